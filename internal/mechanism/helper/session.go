package helper

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/gpreempt/gpreempt/internal/log"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// session is the daemon's end of the session in a helper.
type session struct {
	m      *Mechanism
	target gpreempt.ProcessKey
	child  *child // nil after the session has left it

	events chan struct{}
	// done is called by the child's goroutine between a request and its result.
	done atomic.Pointer[func()]
	// lost is why the helper is of no use; nil while it is.
	lost     error
	reported bool // Handle has returned lost
	closed   bool
	spent    bool
	changed  bool
	queues   atomic.Pointer[[]kfd.QueueSnapshotEntry]
}

var _ mechanism.Watcher = (*session)(nil)

func newSession(m *Mechanism, target gpreempt.ProcessKey) *session {
	return &session{m: m, target: target, events: make(chan struct{}, 1)}
}

func (s *session) notify() {
	select {
	case s.events <- struct{}{}:
	default:
	}
}

// isLost reports whether the helper has ended, or was abandoned.
func (s *session) isLost() bool { return s.lost != nil }

// call makes one request and returns its result.
func (s *session) call(req request) (result, error) {
	if s.lost != nil {
		return result{}, s.lost
	}
	r, err := s.m.call(s.target, s.child, req)
	if err != nil {
		return result{}, s.lose(err)
	}
	return r, s.take(&r)
}

func (s *session) lose(err error) error {
	s.lost = err
	s.m.log.Warn("the helper of a target is lost", log.Target(s.target), log.Err(err))
	return err
}

// take takes over what a result says besides its error, which it returns.
func (s *session) take(r *result) error {
	s.changed = s.changed || r.Changed
	s.spent = r.Spent
	if r.Listed {
		s.queues.Store(&r.Queues)
	}
	s.m.noteResult(r, r.Calls-s.child.calls, r.Took-s.child.took)
	s.child.calls, s.child.took = r.Calls, r.Took
	return r.Err.error()
}

// Events implements mechanism.Watcher.
func (s *session) Events() <-chan struct{} { return s.events }

// Changed implements mechanism.Watcher.
func (s *session) Changed() bool {
	changed := s.changed
	s.changed = false
	return changed
}

// Suspend implements mechanism.Session.
func (s *session) Suspend(ctx context.Context) error { return s.SuspendThen(ctx, func() {}) }

// SuspendThen implements mechanism.Watcher. done is called by the goroutine that reads from the
// helper.
func (s *session) SuspendThen(ctx context.Context, done func()) error {
	if err := s.usable(ctx); err != nil {
		return err
	}
	reported := false
	s.done.Store(new(func() {
		if ctx.Err() == nil { // else it is undone
			reported = true
			done()
		}
	}))
	_, err := s.call(request{Op: opSuspend})
	s.done.Store(nil)
	if err == nil && !reported {
		_, undoing := s.call(request{Op: opResume})
		err = errors.Join(context.Cause(ctx), undoing)
	}
	return err
}

// usable returns the error of a call that must not be made.
func (s *session) usable(ctx context.Context) error {
	switch {
	case s.closed:
		return errSessionClosed
	case ctx.Err() != nil:
		return context.Cause(ctx)
	}
	return nil
}

var errSessionClosed = errors.New("the session with the process has been closed")

// Resume implements mechanism.Session. When the helper has ended, everything runs.
func (s *session) Resume(ctx context.Context) error {
	if err := s.usable(ctx); err != nil {
		return err
	}
	if s.lost == nil {
		if _, err := s.call(request{Op: opResume}); err == nil || s.lost == nil {
			return err
		}
	}
	if s.ends() {
		return nil
	}
	return s.lost
}

// endTime is how long to wait for the end of a helper that is lost.
const endTime = time.Second

// ends reports whether the helper, which is lost, ends in time: the kernel has undone what it
// did.
func (s *session) ends() bool {
	timer := time.NewTimer(endTime)
	defer timer.Stop()
	select {
	case <-s.child.ended:
		return true
	case <-timer.C:
		return false
	}
}

// Handle implements mechanism.Watcher.
func (s *session) Handle(context.Context) (mechanism.Running, error) {
	if s.closed || s.lost != nil && s.reported {
		return mechanism.NotRunning, nil
	}
	r, err := s.call(request{Op: opHandle})
	s.reported = s.lost != nil
	return r.Running, err
}

// Close implements mechanism.Session.
func (s *session) Close() error {
	s.closed = true
	if s.child == nil {
		return nil
	}
	if s.lost == nil {
		if _, err := s.call(request{Op: opClose}); err != nil && s.lost == nil {
			return err
		}
		if s.lost == nil {
			s.leave()
			return nil
		}
	}
	s.child.kill()
	if !s.ends() {
		return fmt.Errorf("%w: process %d may be suspended until helper process %d has ended", s.lost, s.target.PID, s.child.pid)
	}
	s.spent = true
	s.leave()
	return nil
}

// leave returns the helper, which holds nothing, to the mechanism.
func (s *session) leave() {
	c := s.child
	c.session.Store(nil)
	s.child, s.closed = nil, true
	s.m.leave(s.target, c, s.spent)
	s.m.sessions.Remove(s.target, s)
}
