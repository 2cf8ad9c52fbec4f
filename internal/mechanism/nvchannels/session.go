package nvchannels

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/internal/log"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/nvrm"
)

// session is a process whose channels may be disabled. It implements mechanism.Watcher. The
// mechanism's lock guards its fields.
type session struct {
	m       *Mechanism
	target  gpreempt.ProcessKey
	process nvrm.Process
	events  chan struct{}
	view    *nvrm.View
	// looked is the time of the last examination, and full of the last one by a scan.
	looked, full time.Time
	total        int // number of channels, for changed
	// armed are the channels that the supervisor would enable.
	armed []nvrm.Channel
	// disabled are the channels that are disabled, each once, because the driver counts. unsure is
	// set while other channels of armed may be disabled too, or some of these may be enabled.
	disabled []nvrm.Channel
	unsure   bool
	// suspended is set from a successful Suspend to the next Resume.
	suspended bool
	// ran is set when a suspended process runs again. lost is why it can no longer be suspended.
	ran, changed, closed bool
	lost                 error
}

var _ mechanism.Watcher = (*session)(nil)

var errClosed = errors.New("the mechanism, or the session with the process, has been closed")

// channels returns the channels to disable.
func (s *session) channels() ([]nvrm.Channel, error) {
	all, unknown := s.view.Channels()
	s.changed = s.changed || len(all) != s.total
	s.total = len(all)
	if unknown > 0 {
		return nil, fmt.Errorf("process %d: the GPUs of %d channels are not known", s.target.PID, unknown)
	}
	chosen := make([]nvrm.Channel, 0, len(all))
	for _, c := range all {
		if (c.Compute || s.m.cfg.CopyEngines) && s.owns(c.Client) {
			chosen = append(chosen, c)
		}
	}
	return chosen, nil
}

// owns reports whether a client belongs to this process. After a fork several processes have its
// file, and it belongs to the oldest.
func (s *session) owns(client nvrm.Handle) bool {
	if owner := s.m.cfg.Owner(client); !owner.IsZero() {
		return owner == s.target
	}
	return !slices.ContainsFunc(s.m.members, func(o *session) bool {
		return nvrm.Older(o.target, s.target) && slices.Contains(o.view.Clients(), client)
	})
}

// restore enables channels, and after a failure all channels of the process.
func (s *session) restore(known []nvrm.Channel) error {
	return restore(s.m.cfg.Sys, s.m.cfg.Profile, s.process, known, s.owns)
}

// arm sends the supervisor the channels before any of them is disabled. Disabled channels stay in its
// list even if they are no longer found.
func (s *session) arm() error {
	all, err := s.channels()
	if err != nil {
		return err
	}
	for _, c := range s.disabled {
		if !slices.ContainsFunc(all, c.Is) {
			all = append(all, c)
		}
	}
	if s.armed != nil && slices.Equal(all, s.armed) {
		return nil
	}
	g := s.m.guard.Load()
	if g == nil {
		return errClosed
	}
	if err := g.arm(s.target, s.process.FD(), all); err != nil {
		return err
	}
	s.armed = all
	return nil
}

// ready reports why the process cannot be suspended.
func (s *session) ready(ctx context.Context) error {
	switch {
	case s.closed:
		return errClosed
	case s.lost != nil:
		return s.lost
	case ctx.Err() != nil:
		return s.failure(context.Cause(ctx))
	}
	return nil
}

// disableAlone disables every channel of this process.
func (s *session) disableAlone() error {
	var err error
	for try := range 2 {
		err = nil
		if s.unsure {
			err = s.enable()
		}
		if err == nil && try > 0 { // the list may have changed, for example because a channel was freed
			err = s.scan()
		}
		if err == nil {
			err = s.m.disable([]*session{s}, hotGap)
		}
		if err == nil || hardware(err) != nil {
			break
		}
	}
	if err != nil {
		return s.failure(err)
	}
	return nil
}

// hardware returns the error of a GPU that has failed.
func hardware(err error) *nvrm.SetError {
	var status nvrm.Status
	if set, ok := errors.AsType[*nvrm.SetError](err); ok && errors.As(set, &status) && status.Hardware() {
		return set
	}
	return nil
}

// enable enables every channel.
func (s *session) enable() error {
	known := s.disabled // after a failed call, all channels of that call
	if len(known) > 0 {
		if err := s.restore(known); err != nil {
			s.unsure = true
			return err
		}
	}
	s.disabled, s.unsure, s.suspended = nil, false, false
	return nil
}

// failure enables every channel, and returns the error of an action.
func (s *session) failure(err error) error {
	undo := s.enable()
	if s.process.Exited() || errors.Is(err, mechanism.ErrGone) {
		return fmt.Errorf("process %d: %w", s.target.PID, mechanism.ErrGone)
	}
	if undo != nil {
		err = errors.Join(err, fmt.Errorf("channels may stay disabled until gpreemptd resumes the process or ends: %w", undo))
	}
	if set := hardware(err); set != nil {
		return &mechanism.HardwareError{GPUs: []gpreempt.GPUID{set.GPU}, Err: err}
	}
	return fmt.Errorf("process %d: %w", s.target.PID, err)
}

func (s *session) resume() error {
	if s.closed {
		return errClosed
	}
	if err := s.enable(); err != nil {
		return s.failure(err)
	}
	return nil
}

// Suspend implements mechanism.Session.
func (s *session) Suspend(ctx context.Context) error { return s.SuspendThen(ctx, func() {}) }

// SuspendThen implements mechanism.Watcher.
func (s *session) SuspendThen(ctx context.Context, done func()) error {
	return s.m.suspend(ctx, []*session{s}, done)[0]
}

// Resume implements mechanism.Session.
func (s *session) Resume(ctx context.Context) error {
	return s.m.ResumeAll(ctx, []mechanism.Session{s})[0]
}

// Close implements mechanism.Session.
func (s *session) Close() error {
	s.m.calls.Lock()
	defer s.m.calls.Unlock()
	if s.closed {
		return nil
	}
	if err := s.enable(); err != nil {
		return s.failure(err)
	}
	s.release()
	s.closed = true
	s.m.members = slices.DeleteFunc(s.m.members, func(other *session) bool { return other == s })
	s.process.Close()
	s.m.sessions.Remove(s.target, s)
	return nil
}

// release makes the supervisor and the journal forget a process that runs or has ended.
func (s *session) release() {
	s.suspended, s.unsure, s.disabled, s.armed = false, false, nil, nil
	if g := s.m.guard.Load(); g != nil && !g.hasEnded() {
		if err := g.disarm(s.target); err != nil {
			s.m.cfg.Log.Warn("the supervisor does not forget a process that runs", log.Target(s.target), log.Err(err))
		}
	}
	s.m.pauses.End(s.target)
}

// examine looks for the end of the process and for new channels.
func (s *session) examine() {
	switch {
	case s.closed, s.lost != nil:
		return
	case s.process.Exited():
		s.lose(mechanism.ErrGone)
		return
	case !s.suspended:
		if time.Since(s.looked) < idleEvery {
			return
		}
		look := func() error { return s.view.Quick(gap) }
		if s.looked = time.Now(); s.total == 0 || time.Since(s.full) >= idleFullEvery {
			look = s.scan
		}
		if look() == nil && s.m.supervised() == nil {
			_ = s.arm() // Suspend reports it
		}
		return
	case s.unsure: // the owner suspends the process again
		return
	}
	if time.Since(s.full) >= fullEvery {
		err := s.scan()
		if err == nil && len(s.disabled) > 0 && len(s.view.Clients()) == 0 && s.enable() == nil {
			s.lose(mechanism.ErrReplaced) // its files are closed: it runs another program, or has stopped using the GPU
			return
		}
	}
	s.looked = time.Now()
	if err := s.m.disable([]*session{s}, gap); err != nil { // the owner suspends the process again, and gets the error
		s.ran = true
		s.notify()
	}
}

func (s *session) scan() error {
	s.full = time.Now()
	return s.view.Scan()
}

// lose records why the process can no longer be suspended. Another process may still have its file
// and channels.
func (s *session) lose(why error) {
	for _, o := range s.m.members {
		if o == s {
			continue
		}
		all, _ := o.view.Channels()
		left := slices.DeleteFunc(slices.Clone(all), func(c nvrm.Channel) bool { return !slices.ContainsFunc(s.disabled, c.Is) })
		if _, err := nvrm.EnableEach(o.process, left); err != nil {
			s.m.cfg.Log.Warn("a process that shares a file with one that has exited may stay suspended", log.Target(o.target), log.Err(err))
		}
	}
	s.lost = fmt.Errorf("process %d: %w", s.target.PID, why)
	s.release()
	s.notify()
}

// runAgain resumes the process after the supervisor has resumed it or has ended. The owner suspends
// it again.
func (s *session) runAgain() {
	if !s.suspended && !s.unsure && len(s.disabled) == 0 {
		return
	}
	s.ran = s.ran || s.suspended
	if err := s.enable(); err != nil {
		s.m.cfg.Log.Error("a process could not be resumed", log.Target(s.target), log.Err(err))
	}
	s.notify()
}

// notify makes the owner call Handle.
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
	s.m.calls.Lock()
	defer s.m.calls.Unlock()
	running, err = s.ran, s.lost
	s.ran = false
	return running, err
}

// Changed implements mechanism.Watcher.
func (s *session) Changed() bool {
	s.m.calls.Lock()
	defer s.m.calls.Unlock()
	changed := s.changed
	s.changed = false
	return changed
}
