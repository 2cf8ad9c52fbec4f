package dbgtrap

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/internal/log"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// session is the debugging of one target. It has no goroutine: the caller of its methods
// waits for the driver.
type session struct {
	m        *Mechanism
	target   gpreempt.ProcessKey
	debuggee *debuggee
	log      *zap.Logger
	// ctx is that of Attach without its end: the target is released whatever becomes of
	// the caller.
	ctx context.Context //nolint:containedctx // Close has none

	mechanism.Notifier
	// suspended: the queues are to be suspended; reported: that one of them runs, and could not be
	// suspended, was returned by Handle since the last Suspend.
	suspended, reported bool
	// over is why the debugging has ended before Close, nil while it lasts; released
	// says that everything runs since.
	over     error
	released bool
	closed   bool
	// ending fires, and sets endingDue, when a suspended target has been without its
	// runtime for so long that it does not exit.
	ending    *time.Timer
	endingDue atomic.Bool
	// beat fires when Handle is to look whether this program is still the debugger.
	beat *time.Timer
}

var _ mechanism.Session = (*session)(nil)

func newSession(ctx context.Context, m *Mechanism, target gpreempt.ProcessKey) *session {
	s := &session{
		m: m, target: target, ctx: ctx, Notifier: mechanism.NewNotifier(), log: m.cfg.Log.With(log.Target(target)),
	}
	s.debuggee = newDebuggee(m, target, s.Notify)
	s.ending = time.AfterFunc(time.Hour, func() {
		s.endingDue.Store(true)
		s.Notify()
	})
	s.ending.Stop()
	s.beat = time.AfterFunc(time.Hour, s.Notify)
	s.beat.Stop()
	return s
}

// watch sets the time of the next look. Another debugger can take the right to debug only while
// this program does not trace the target, and the driver reports that to nobody.
func (s *session) watch() {
	switch {
	case s.closed || s.over != nil || s.debuggee.thread != nil:
		s.beat.Stop()
	case s.suspended:
		s.beat.Reset(s.m.beats.suspended)
	default:
		s.beat.Reset(s.m.beats.running)
	}
}

// Suspend implements mechanism.Session. Errors beyond the interface's: *RuntimeError,
// mechanism.ErrDebugged, a *kfd.Error, the cause of ctx.
func (s *session) Suspend(ctx context.Context, done func()) error {
	defer s.noteChange()
	switch {
	case s.closed:
		return errClosed
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case s.over != nil:
		return s.over
	}
	s.suspended, s.reported = true, false
	reported := false
	report := func() {
		if ctx.Err() == nil { // else it is undone
			reported = true
			if done != nil {
				done()
			}
		}
	}
	err := mechanism.Guard(func() error { return s.debuggee.suspend(s.ctx, report) })
	if err == nil && !reported {
		if report(); !reported {
			err = context.Cause(ctx)
		}
	}
	switch {
	case err == nil:
		s.watch()
		return nil
	case final(err):
		s.conclude(err)
		return err
	}
	return errors.Join(err, s.release())
}

// Resume implements mechanism.Session; errors are those of Suspend.
func (s *session) Resume(ctx context.Context) error {
	switch {
	case s.closed:
		return errClosed
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case s.over != nil && s.released && !errors.Is(s.over, mechanism.ErrGone):
		return nil // everything runs since it was released
	case s.over != nil:
		return s.over
	}
	return s.release()
}

// release resumes every queue.
func (s *session) release() error {
	s.suspended = false
	err := mechanism.Guard(func() error { return s.debuggee.resume(s.ctx) })
	if final(err) {
		s.conclude(err)
	}
	return err
}

// noteChange has Handle report that the target has changed.
func (s *session) noteChange() {
	if s.debuggee.changed {
		s.Notify()
	}
}

// Handle implements mechanism.Session. It suspends the queues that were born since.
func (s *session) Handle(context.Context) (r mechanism.Report, err error) {
	defer func() { r.Changed, s.debuggee.changed = s.debuggee.changed, false }()
	if s.over != nil || s.closed {
		return r, nil // over has been reported, and is not an error of this call
	}
	defer s.watch()
	due := s.endingDue.Swap(false)
	err = mechanism.Guard(func() error {
		if err := s.debuggee.serve(s.ctx); err != nil || !s.suspended {
			return err
		}
		if err := s.checkRuntime(due); err != nil || s.reported || !s.debuggee.running() {
			return err
		}
		before := len(s.debuggee.suspended)
		err := s.debuggee.suspend(s.ctx, func() {})
		_, broken := errors.AsType[*mechanism.HardwareError](err)
		switch {
		case err == nil:
			r.Born = max(len(s.debuggee.suspended)-before, 0)
		case !broken && !final(err): // Suspend finds that too, and returns it
			s.reported, r.Running, err = true, mechanism.NewQueue, nil
		}
		return err // with MES the driver does not report a GPU that has failed once more
	})
	if err != nil {
		s.conclude(err)
	}
	return r, err
}

// checkRuntime returns the error of a suspended target that has ended its runtime and
// still has its queues, which run then, after runtimeEndTime. A target that exits ends its
// runtime first, and its queues right after.
func (s *session) checkRuntime(due bool) error {
	if s.debuggee.state == kfd.RuntimeEnabled {
		return nil
	}
	err := s.debuggee.withoutRuntime(s.ctx)
	if e, ok := errors.AsType[*RuntimeError](err); ok && e.Ended && !due {
		s.ending.Reset(s.m.runtimeEndTime)
		return nil
	}
	return err
}

// conclude ends the debugging before Close: the target runs.
func (s *session) conclude(err error) {
	s.over, s.suspended = err, false
	if errors.Is(err, mechanism.ErrGone) {
		s.debuggee.changed = true
	}
	ending := s.end()
	if s.released = ending == nil; !s.released {
		s.log.Error("target may be suspended and could not be released", log.Err(ending))
	}
}

// Close implements mechanism.Session.
func (s *session) Close() error {
	s.closed, s.suspended = true, false
	s.ending.Stop()
	s.beat.Stop()
	if err := s.end(); err != nil {
		return err
	}
	s.m.sessions.Remove(s.target, s)
	return nil
}

func (s *session) end() error {
	return mechanism.Guard(func() error { return s.debuggee.end(s.ctx) })
}
