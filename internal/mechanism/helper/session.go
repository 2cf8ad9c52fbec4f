package helper

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/internal/child"
	"github.com/gpreempt/gpreempt/internal/log"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// helper is a helper as the daemon knows it.
type helper struct {
	*child.Process[request, *message]
	log *zap.Logger
	// attached: it was asked to attach to something.
	attached atomic.Bool
	// session is the one that its messages are for, nil for none.
	session atomic.Pointer[session]
	// calls and took are what its device has counted so far. They belong to the goroutine of take.
	calls int64
	took  time.Duration
}

// take takes each message of the helper, before the answer to a request is returned.
func (h *helper) take(m *message) {
	if m.Kind == kindLog {
		log.Replay(h.log, m.Log)
		return
	}
	s := h.session.Load()
	if s == nil {
		return
	}
	if m.Kind == kindDone {
		if done := s.done.Load(); done != nil {
			(*done)()
		}
		return
	}
	if m.Listed {
		s.queues.Store(&m.Queues)
	}
	s.m.count(m.Calls-h.calls, m.Took-h.took)
	h.calls, h.took = m.Calls, m.Took
	if m.Kind == kindHandled {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.handled = mechanism.Report{
			Running: max(s.handled.Running, m.Report.Running), Born: s.handled.Born + m.Report.Born, Changed: s.handled.Changed || m.Report.Changed,
		}
		s.failed = errors.Join(s.failed, m.err())
		s.Notify()
	}
}

// session is the daemon's end of the session in a helper.
type session struct {
	m      *Mechanism
	target gpreempt.ProcessKey
	helper *helper // nil after the session has left it
	mechanism.Notifier

	// done is called by the helper's goroutine between a request and its result.
	done   atomic.Pointer[func()]
	queues atomic.Pointer[[]kfd.QueueSnapshotEntry]
	// lost is why the helper is of no use; nil while it is.
	lost     error
	reported bool // Handle has returned lost
	closed   bool
	spent    bool

	mu      sync.Mutex // guards what follows: what the helper has handled since the last call of Handle
	handled mechanism.Report
	failed  error
}

var _ mechanism.Session = (*session)(nil)

// call makes one request. held: the helper has a session then.
func (s *session) call(req request) (held bool, err error) {
	if s.lost != nil {
		return false, s.lost
	}
	m, err := s.m.call(s.target, s.helper, req)
	if err != nil {
		s.lost = err
		return false, err
	}
	s.spent = m.Spent
	return m.Held, m.err()
}

// Suspend implements mechanism.Session. done is called by the goroutine that reads from the helper.
func (s *session) Suspend(ctx context.Context, done func()) error {
	if err := s.usable(ctx); err != nil {
		return err
	}
	reported := false
	s.done.Store(new(func() {
		if ctx.Err() == nil { // else it is undone
			reported = true
			if done != nil {
				done()
			}
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

// usable returns why the session cannot be used, by a caller with ctx.
func (s *session) usable(ctx context.Context) error {
	if s.closed {
		return errors.New("the session with the process has been closed")
	}
	return context.Cause(ctx)
}

// Resume implements mechanism.Session. When the helper has ended, everything runs.
func (s *session) Resume(ctx context.Context) error {
	if err := s.usable(ctx); err != nil {
		return err
	}
	if _, err := s.call(request{Op: opResume}); err == nil || s.lost == nil {
		return err
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
	case <-s.helper.Ended:
		return true
	case <-timer.C:
		return false
	}
}

// Handle implements mechanism.Session. The helper has handled what there was.
func (s *session) Handle(context.Context) (r mechanism.Report, err error) {
	s.mu.Lock()
	r, err = s.handled, s.failed
	s.handled, s.failed = mechanism.Report{}, nil
	s.mu.Unlock()
	if s.helper != nil && s.lost == nil && s.helper.HasClosed() {
		s.lost = fmt.Errorf("process %d: its helper process %d has ended", s.target.PID, s.helper.PID)
		s.m.log.Warn("the helper of a target is lost", log.Target(s.target), log.Err(s.lost))
	}
	if err == nil && s.lost != nil && !s.closed && !s.reported {
		s.reported, err = true, s.lost
	}
	return r, err
}

// Close implements mechanism.Session.
func (s *session) Close() error {
	s.closed = true
	if s.helper == nil {
		return nil
	}
	if _, err := s.call(request{Op: opClose}); err == nil {
		s.leave()
		return nil
	} else if s.lost == nil {
		return err
	}
	s.helper.Kill()
	if !s.ends() {
		return fmt.Errorf("%w: process %d may be suspended until helper process %d has ended", s.lost, s.target.PID, s.helper.PID)
	}
	s.spent = true
	s.leave()
	return nil
}

// leave returns the helper, which holds nothing, to the mechanism.
func (s *session) leave() {
	h := s.helper
	h.session.Store(nil)
	s.helper, s.closed = nil, true
	s.m.leave(s.target, h, s.spent)
	s.m.sessions.Remove(s.target, s)
}
