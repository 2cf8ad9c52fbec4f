package nvchannels

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/gpreempt/gpreempt/internal/log"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/nvrm"
)

// session is a process whose channels may be off. It implements mechanism.Watcher.
type session struct {
	m       *Mechanism
	target  gpreempt.ProcessKey
	process nvrm.Process
	events  chan struct{}
	wake    chan struct{} // examine it sooner
	stop    chan struct{}
	ended   chan struct{} // run has

	mu   sync.Mutex // guards what follows; held through calls of the driver
	view *nvrm.View
	// held are the channels that may be off, and files those of their clients; nil files: nothing
	// is off.
	held  []nvrm.Channel
	files map[nvrm.Handle]nvrm.File
	// suspended: Suspend has succeeded last.
	suspended bool
	full      time.Time // of the last full scan
	total     int
	// ran: it was resumed, and not by Resume. lost is why it cannot be suspended any more.
	ran, changed, closed bool
	lost                 error
}

var _ mechanism.Watcher = (*session)(nil)

var errClosed = errors.New("the session with the process has been closed")

// channels returns those to take off. It needs mu.
func (s *session) channels() (all []nvrm.Channel, err error) {
	all, unknown := s.view.Channels()
	s.changed = s.changed || len(all) != s.total
	s.total = len(all)
	if unknown > 0 {
		return nil, fmt.Errorf("process %d: the GPUs of %d channels are not known", s.target.PID, unknown)
	}
	if s.m.cfg.CopyEngines {
		return all, nil
	}
	return slices.DeleteFunc(all, func(c nvrm.Channel) bool { return !c.Compute }), nil
}

// Suspend implements mechanism.Session.
func (s *session) Suspend(ctx context.Context) error { return s.SuspendThen(ctx, func() {}) }

// SuspendThen implements mechanism.Watcher.
func (s *session) SuspendThen(ctx context.Context, done func()) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closed:
		return errClosed
	case s.lost != nil:
		return s.lost
	case ctx.Err() != nil:
		return errors.Join(context.Cause(ctx), s.on())
	}
	// A channel may have been born in the place of a freed one, where a quick look does not see it.
	err := s.scan()
	if err == nil {
		err = s.off()
	}
	if stale(err) { // a channel was freed: the list is another one now
		if err = s.on(); err == nil {
			err = s.scan()
		}
		if err == nil {
			err = s.off()
		}
	}
	if err == nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		return s.failure(err, s.on())
	}
	s.suspended, s.ran = true, false
	done()
	select {
	case s.wake <- struct{}{}:
	default:
	}
	return nil
}

// stale reports whether an error says that channels or clients were freed.
func stale(err error) bool {
	status, ok := errors.AsType[nvrm.Status](err)
	return ok && !status.Hardware()
}

// off takes every channel off. It needs mu.
func (s *session) off() error {
	if s.process.Exited() {
		return mechanism.ErrGone
	}
	if s.files == nil {
		files, err := s.view.Copies()
		if err != nil {
			return err
		}
		if err := s.m.pauses.Begin(mechanism.JournalEntry{Target: s.target}); err != nil {
			nvrm.CloseAll(files)
			return err
		}
		s.files, s.held = files, nil
	}
	// The driver counts: what was disabled twice has to be enabled twice.
	already := s.held
	if len(already) > 0 && (!s.suspended || s.ran) {
		if err := nvrm.Set(s.files, already, false); err != nil {
			return err
		}
		already = nil
	}
	for range 10 { // channels may be born all the time
		if err := s.view.Quick(s.files); err != nil {
			return err
		}
		all, err := s.channels()
		if err != nil {
			return err
		}
		born := slices.DeleteFunc(slices.Clone(all), func(c nvrm.Channel) bool { return slices.Contains(already, c) })
		if len(born) == 0 && len(already) == len(all) {
			return nil
		}
		if err := s.hold(all); err != nil {
			return err
		}
		if err := nvrm.Set(s.files, born, true); err != nil {
			return err
		}
		already = all
	}
	return fmt.Errorf("process %d creates channels faster than they are taken off", s.target.PID)
}

// hold tells the supervisor what will be off. It needs mu.
func (s *session) hold(all []nvrm.Channel) error {
	g, err := s.m.supervisor()
	if err == nil {
		err = g.hold(s.target, s.files, s.process.FD(), all)
	}
	if err == nil {
		s.held = all
	}
	return err
}

// on puts every channel on. It needs mu.
func (s *session) on() error {
	if s.files == nil {
		s.suspended = false
		return nil
	}
	if err := nvrm.Set(s.files, s.held, false); err != nil && !s.process.Exited() {
		return err
	}
	s.release()
	return nil
}

// release forgets what is on, or belongs to a process that has ended. It needs mu.
func (s *session) release() {
	nvrm.CloseAll(s.files)
	s.suspended, s.files, s.held = false, nil, nil
	s.m.mu.Lock()
	g := s.m.guard
	s.m.mu.Unlock()
	if g != nil && !g.hasEnded() {
		if err := g.release(s.target); err != nil {
			s.m.cfg.Log.Warn("the supervisor keeps a process that runs", log.Target(s.target), log.Err(err))
		}
	}
	s.m.pauses.End(s.target)
}

// failure returns the error of an action, with that of what was done about it.
func (s *session) failure(err, undo error) error {
	if s.process.Exited() {
		return fmt.Errorf("process %d: %w", s.target.PID, mechanism.ErrGone)
	}
	if undo != nil {
		err = errors.Join(err, fmt.Errorf("channels may stay off until gpreemptd resumes the process or ends: %w", undo))
	}
	var status nvrm.Status
	if set, ok := errors.AsType[*nvrm.SetError](err); ok && errors.As(set, &status) && status.Hardware() {
		return &mechanism.HardwareError{GPUs: []gpreempt.GPUID{set.GPU}, Err: err}
	}
	return fmt.Errorf("process %d: %w", s.target.PID, err)
}

// Resume implements mechanism.Session.
func (s *session) Resume(context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return errClosed
	}
	if err := s.on(); err != nil {
		return s.failure(err, nil)
	}
	return nil
}

// Close implements mechanism.Session.
func (s *session) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	if err := s.on(); err != nil {
		s.mu.Unlock()
		return s.failure(err, nil)
	}
	s.closed = true
	s.mu.Unlock()
	s.m.mu.Lock()
	delete(s.m.members, s)
	s.m.mu.Unlock()
	close(s.stop)
	<-s.ended
	s.process.Close()
	s.m.sessions.Remove(s.target, s)
	return nil
}

// run examines the process from time to time.
func (s *session) run() {
	defer close(s.ended)
	tick := time.NewTimer(idleEvery)
	defer tick.Stop()
	for {
		select {
		case <-s.stop:
			return
		case <-s.wake:
		case <-tick.C:
		}
		tick.Reset(s.examine())
	}
}

// examine looks for the end of the process, and for channels that were born. It returns when to do
// so again.
func (s *session) examine() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closed, s.lost != nil:
		return time.Hour
	case s.process.Exited():
		s.lose(mechanism.ErrGone)
		return time.Hour
	case s.files == nil:
		_ = s.scan() // Suspend reports it
		return idleEvery
	case !s.suspended: // Resume has failed, and is called again
		return PollEvery
	}
	if time.Since(s.full) >= fullEvery {
		if err := s.scan(); err == nil && len(s.held) > 0 && !s.view.Has(s.held[0].Client) {
			s.lose(mechanism.ErrReplaced) // the files were closed: it runs another program, or has ended its use of the GPU
			return time.Hour
		}
	}
	before := len(s.held)
	if err := s.view.Quick(s.files); err != nil {
		return PollEvery
	}
	all, err := s.channels()
	if err == nil && len(all) == before {
		return PollEvery
	}
	if err == nil && len(all) > before {
		err = s.off()
	}
	if err != nil { // the owner suspends it again, and learns why that fails
		s.ran = true
		s.notify()
	}
	return PollEvery
}

// scan needs mu.
func (s *session) scan() error {
	s.full = time.Now()
	return s.view.Scan()
}

// lose ends the use of the process. It needs mu.
func (s *session) lose(why error) {
	s.lost = fmt.Errorf("process %d: %w", s.target.PID, why)
	if s.files != nil {
		s.release()
	}
	s.notify()
}

// ranMeanwhile takes in that the supervisor has put the channels on.
func (s *session) ranMeanwhile() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.suspended {
		s.ran = true
		s.notify()
	}
}

// unguarded puts the channels on, because there is no supervisor any more.
func (s *session) unguarded() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.files == nil {
		return
	}
	wanted := s.suspended
	if err := s.on(); err != nil {
		s.m.cfg.Log.Error("a process could not be resumed", log.Target(s.target), log.Err(err))
	}
	s.ran = wanted
	s.notify()
}

// notify has the owner call Handle.
func (s *session) notify() {
	select {
	case s.events <- struct{}{}:
	default:
	}
}

// Events implements mechanism.Watcher.
func (s *session) Events() <-chan struct{} { return s.events }

// Handle implements mechanism.Watcher.
func (s *session) Handle(context.Context) (running bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	running, err = s.ran, s.lost
	s.ran = false
	return running, err
}

// Changed implements mechanism.Watcher.
func (s *session) Changed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	changed := s.changed
	s.changed = false
	return changed
}
