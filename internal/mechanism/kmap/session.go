package kmap

import (
	"context"
	"errors"

	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// session is a process that the handle may limit. It implements mechanism.Watcher.
type session struct {
	m      *Mechanism
	lane   *lane
	target gpreempt.ProcessKey
	pidfd  int
	// room takes the driver's report of the queues; lane.calls guards it.
	room   []kfd.KmapQueue
	events chan struct{}
	closed bool

	// lane.mu guards what follows.
	// ran: the lease has ended, and the process runs. lost is why it can no longer be
	// suspended.
	ran  bool
	lost error
	// total is the number of queues by the last report; changed: it has changed.
	total   int
	changed bool
}

var _ mechanism.Watcher = (*session)(nil)

// errClosed is returned by the methods of a closed session.
var errClosed = errors.New("the session with the process has been closed")

// Suspend implements mechanism.Session.
func (s *session) Suspend(ctx context.Context) error {
	if s.closed {
		return errClosed
	}
	return s.lane.suspend(ctx, []*session{s})[0]
}

// SuspendThen implements mechanism.Watcher.
func (s *session) SuspendThen(ctx context.Context, done func()) error {
	err := s.Suspend(ctx)
	if err == nil {
		done()
	}
	return err
}

// Resume implements mechanism.Session.
func (s *session) Resume(context.Context) error {
	if s.closed {
		return errClosed
	}
	return s.lane.set([]*session{s}, kfd.KmapNoLimit)[0]
}

// Close implements mechanism.Session.
func (s *session) Close() error {
	if s.closed {
		return nil
	}
	err := s.lane.set([]*session{s}, kfd.KmapNoLimit)[0]
	if err != nil && !errors.Is(err, mechanism.ErrGone) && !errors.Is(err, mechanism.ErrReplaced) {
		return err
	}
	s.closed = true
	s.m.sessions.Remove(s.target, s)
	s.m.cfg.Host.ClosePidfd(s.pidfd)
	return nil
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

// Handle implements mechanism.Watcher. Queues that are born while the process is suspended are
// born held: it only runs when the lease has ended.
func (s *session) Handle(context.Context) (running mechanism.Running, err error) {
	s.lane.mu.Lock()
	defer s.lane.mu.Unlock()
	if s.ran {
		running = mechanism.Lapsed
	}
	err = s.lost
	s.ran, s.lost = false, nil
	return running, err
}

// Changed implements mechanism.Watcher.
func (s *session) Changed() bool {
	s.lane.mu.Lock()
	defer s.lane.mu.Unlock()
	changed := s.changed
	s.changed = false
	return changed
}
