package kmap

import (
	"context"
	"errors"

	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// session is a process that the handle may limit. It implements mechanism.Session.
type session struct {
	m      *Mechanism
	lane   *lane
	target gpreempt.ProcessKey
	pidfd  int
	// room takes the driver's report of the queues; lane.calls guards it.
	room   []kfd.KmapQueue
	closed bool
	mechanism.Notifier

	// lane.mu guards what follows.
	// ran: the lease has ended, and the process runs. lost is why it can no longer be
	// suspended.
	ran  bool
	lost error
	// total is the number of queues by the last report, -1 before the first; changed: it has changed.
	total   int
	changed bool
}

var _ mechanism.Session = (*session)(nil)

// errClosed is returned by the methods of a closed session.
var errClosed = errors.New("the session with the process has been closed")

// Suspend implements mechanism.Session.
func (s *session) Suspend(ctx context.Context, done func()) error {
	if s.closed {
		return errClosed
	}
	err := s.lane.suspend(ctx, []*session{s})[0]
	if err == nil && done != nil {
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

// Handle implements mechanism.Session. Queues that are born while the process is suspended are
// born held: it only runs when the lease has ended.
func (s *session) Handle(context.Context) (r mechanism.Report, err error) {
	s.lane.mu.Lock()
	defer s.lane.mu.Unlock()
	if s.ran {
		r.Running = mechanism.Lapsed
	}
	r.Changed, err = s.changed, s.lost
	s.ran, s.changed, s.lost = false, false, nil
	return r, err
}
