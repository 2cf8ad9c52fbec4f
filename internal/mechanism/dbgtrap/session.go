package dbgtrap

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/internal/logkey"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// maxRetry is the longest wait between two attempts to let a target run.
const maxRetry = time.Minute

// session is a hold on a target and the goroutine that owns it. Calls to the driver
// may block for long, and nothing cuts them short: they are made on that goroutine
// only, and who asked for one may give up on it.
type session struct {
	m      *Mechanism
	target gpreempt.ProcessKey

	calls   chan call
	closing chan struct{} // closed by Close, or when there is nobody to call it
	once    sync.Once     // closes closing
	// settled is closed after the first attempt to let the target go; closeErr is
	// how the latest went.
	settled  chan struct{}
	mu       sync.Mutex // guards closeErr
	closeErr error

	// What follows is the goroutine's.
	hold *hold
	log  *zap.Logger
	// wanted tells that the queues are to be suspended.
	wanted bool
	// over is why the hold has ended before Close, nil while it lasts.
	over error
	// owed tells that queues that should run may be suspended: it is tried again
	// when retry fires, after wait.
	owed  bool
	retry *time.Timer
	wait  time.Duration
	// ending fires when a target that is to be suspended has been without its runtime
	// for so long that it does not just end.
	ending *time.Timer
}

var _ mechanism.Session = (*session)(nil)

// call is something asked of a session. The answer is handed over, or the asker
// has gone: there is no third.
type call struct {
	ctx     context.Context //nolint:containedctx // it travels with the call it belongs to
	suspend bool
	answer  chan error
}

func newSession(m *Mechanism, target gpreempt.ProcessKey) *session {
	return &session{
		m: m, target: target,
		calls:   make(chan call),
		closing: make(chan struct{}),
		settled: make(chan struct{}),
		hold:    newHold(m, target),
		log:     m.cfg.Log.With(logkey.Target(target)),
	}
}

// Suspend implements mechanism.Session. Errors beyond the interface's: *RuntimeError,
// mechanism.ErrDebugged, mechanism.ErrReplaced, a *kfd.Error, the cause of ctx. When ctx ends first the
// driver goes on, and what it suspends is resumed.
func (s *session) Suspend(ctx context.Context) error { return s.ask(ctx, true) }

// Resume implements mechanism.Session; errors are those of Suspend. What could not be
// resumed is tried again until it is.
func (s *session) Resume(ctx context.Context) error { return s.ask(ctx, false) }

func (s *session) ask(ctx context.Context, suspend bool) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	c := call{ctx: ctx, suspend: suspend, answer: make(chan error)}
	select {
	case s.calls <- c:
	case <-s.closing:
		return errClosed
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	select {
	case err := <-c.answer:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Close implements mechanism.Session. It waits for the call to the driver that is
// under way. An error says that the target could not be let go yet, which is tried
// again until it is, whether Close is called again or not.
func (s *session) Close() error {
	s.close()
	return s.awaitSettled()
}

// awaitSettled waits for the first attempt to let the target go, and describes how the
// latest went.
func (s *session) awaitSettled() error {
	<-s.settled
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closeErr
}

func (s *session) setCloseErr(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closeErr = err
}

func (s *session) close() { s.once.Do(func() { close(s.closing) }) }

func (s *session) isClosing() bool {
	select {
	case <-s.closing:
		return true
	default:
		return false
	}
}

// run is the life of a session. It gives up how attaching went, while attaching
// lasts.
func (s *session) run(attaching context.Context, up chan<- error) {
	ctx := context.WithoutCancel(attaching) // whatever becomes of the caller, the target is let go in order
	s.retry, s.ending = time.NewTimer(0), time.NewTimer(0)
	s.retry.Stop()
	s.ending.Stop()
	err := guard(func() error { return s.hold.begin(ctx, attaching) })
	if err == nil {
		select {
		case up <- nil:
		case <-attaching.Done():
			s.close()
		}
		s.serve(ctx)
		s.finish(ctx, nil)
		return
	}
	s.close()
	s.finish(ctx, func(closing error) {
		select {
		case up <- errors.Join(err, closing):
		case <-attaching.Done():
		}
	})
}

// serve answers calls and the target until the session is closed.
func (s *session) serve(ctx context.Context) {
	for {
		var stirred, ended, untraced <-chan struct{}
		if s.over == nil {
			stirred, ended, untraced = s.hold.signals()
		}
		select {
		case <-s.closing:
			return
		case c := <-s.calls:
			s.handle(ctx, c)
		case <-stirred:
			s.attend(ctx, true)
		case <-ended:
			s.attend(ctx, true)
		case <-untraced:
			s.attend(ctx, true)
		case <-s.ending.C:
			s.attend(ctx, false)
		case <-s.retry.C:
			s.payBack(ctx)
		}
	}
}

// finish lets the target go, however long that takes, and describes how the first
// attempt went.
func (s *session) finish(ctx context.Context, tell func(error)) {
	err := s.end(ctx)
	s.setCloseErr(err)
	if err == nil {
		s.m.forget(s)
	}
	close(s.settled)
	if tell != nil {
		tell(err)
	}
	if err == nil {
		return
	}
	for err != nil {
		s.putOff(err)
		<-s.retry.C
		if err = s.end(ctx); err != nil {
			s.setCloseErr(err)
		}
	}
	s.log.Info("the target has been let go after all")
	s.m.forget(s)
	s.setCloseErr(nil)
}

func (s *session) end(ctx context.Context) error {
	return guard(func() error { return s.hold.end(ctx) })
}

// handle carries out a call and answers it.
func (s *session) handle(ctx context.Context, c call) {
	s.wanted = c.suspend
	err := s.act(ctx, c.suspend)
	if c.suspend && err == nil && s.isClosing() {
		err = errClosed
	}
	if c.suspend && err != nil && !final(err) {
		err = errors.Join(err, s.release(ctx))
	}
	ends := s.over == nil && final(err)
	if ends {
		s.conclude(ctx, err)
	}
	select {
	case c.answer <- err:
	case <-c.ctx.Done():
		switch {
		case ends:
			s.report(err)
		case err != nil:
			s.log.Warn("an action on the target failed after it was given up", logkey.Suspend(c.suspend), logkey.Err(err))
		case c.suspend: // too late: nobody knows that it is suspended
			if err := s.release(ctx); final(err) {
				s.conclude(ctx, err)
				s.report(err)
			}
		}
	}
	s.tellBirths()
}

func (s *session) act(ctx context.Context, suspend bool) error {
	switch {
	case s.over != nil && !suspend && !s.owed && !errors.Is(s.over, mechanism.ErrGone):
		return nil // everything runs since it was let go
	case s.over != nil:
		return s.over
	case suspend:
		return guard(func() error { return s.hold.suspend(ctx) })
	}
	return s.release(ctx)
}

// release resumes everything, now or later.
func (s *session) release(ctx context.Context) error {
	s.wanted = false
	if s.over != nil { // let go, or to be
		return nil //nolint:nilerr // it reports why, and is no error of this
	}
	err := guard(func() error { return s.hold.resume(ctx) })
	if s.owed = err != nil && !final(err); s.owed {
		s.putOff(err)
	} else {
		s.wait = 0
	}
	return err
}

// attend looks what the target is about. What is born while it is suspended is
// suspended at once. A target that ends shuts its runtime down first, and with that
// all its queues run; is it not gone some time later, and patience at its end, then who
// takes it for suspended has to hear of that.
func (s *session) attend(ctx context.Context, patient bool) {
	if s.over != nil {
		return
	}
	err := guard(func() error {
		if err := s.hold.serve(ctx); err != nil || !s.wanted {
			return err
		}
		return s.hold.suspend(ctx)
	})
	if e, ok := errors.AsType[*RuntimeError](err); ok && e.Ended && (patient || !s.wanted) {
		err = nil // Suspend tells who asks, and the runtime may come back
		if s.wanted {
			s.ending.Reset(s.m.retry)
		}
	}
	if err != nil {
		s.conclude(ctx, err)
		s.report(err)
	}
	s.tellBirths()
}

func (s *session) tellBirths() {
	if s.hold.news {
		s.hold.news = false
		s.m.cfg.Births(s.target)
	}
}

// conclude ends the hold before Close: the target runs.
func (s *session) conclude(ctx context.Context, err error) {
	s.over, s.wanted = err, false
	s.payBack(ctx)
}

// report reports why the hold has ended when no caller was told. That the target left
// is an event, not a loss.
func (s *session) report(err error) {
	if errors.Is(err, mechanism.ErrGone) {
		s.hold.news = true
		return
	}
	if s.isClosing() {
		return
	}
	s.log.Warn("the target can be suspended no longer", logkey.Err(err))
	go s.m.cfg.Lost(s.target, err)
}

// payBack tries again to let run what should run.
func (s *session) payBack(ctx context.Context) {
	var err error
	if s.over != nil {
		err = s.end(ctx)
	} else if s.owed {
		err = guard(func() error { return s.hold.resume(ctx) })
	}
	s.owed = err != nil
	if err == nil {
		s.wait = 0
		return
	}
	if s.over == nil && final(err) {
		s.conclude(ctx, err)
		s.report(err)
		return
	}
	s.putOff(err)
}

// putOff has something tried again later.
func (s *session) putOff(err error) {
	s.wait = min(max(2*s.wait, s.m.retry), maxRetry)
	s.log.Error("the target may be suspended and could not be resumed: trying again", logkey.RetryIn(s.wait), logkey.Err(err))
	s.retry.Reset(s.wait)
}

// guard makes an error of a panic: the target is resumed then like after any other,
// and the other targets are not touched.
func guard(f func() error) (err error) {
	defer func() {
		if cause := recover(); cause != nil {
			err = fmt.Errorf("panic: %v\n%s", cause, debug.Stack())
		}
	}()
	return f()
}
