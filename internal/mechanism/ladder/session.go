package ladder

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/gpreempt/gpreempt/internal/logkey"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// climbEvery is how often a target on a lower rung is tried on the better ones.
const climbEvery = time.Minute

// session is the session of the mechanism that was chosen. While its target runs
// it looks for a better one now and then, in the background.
type session struct {
	ladder *Ladder
	target gpreempt.ProcessKey
	ctx    context.Context // ends with Close
	cancel context.CancelFunc

	mu sync.Mutex // guards all below; not held while a mechanism is called, but for Close
	// current is used; better waits to replace it at the next suspend.
	current, better *chosen
	betterChoice    Choice
	suspended       bool
	// lost: the mechanism has failed, and nothing has worked since. A resume is tried
	// again and again, which is one failure and not many.
	lost      bool
	climbing  bool
	nextClimb time.Time
	closed    bool
}

func newSession(l *Ladder, target gpreempt.ProcessKey, c *chosen) *session {
	ctx, cancel := context.WithCancel(context.Background()) //nolint:forbidigo // a session outlives the call that attached it; Close ends it
	return &session{ladder: l, target: target, ctx: ctx, cancel: cancel, current: c, nextClimb: l.cfg.Now().Add(climbEvery)}
}

var errClosed = errors.New("the session has been closed")

// Suspend implements mechanism.Session.
func (s *session) Suspend(ctx context.Context) error {
	c, err := s.takeBetter()
	if err != nil {
		return err
	}
	err = c.inner.Suspend(ctx)
	s.check(ctx, c, err, true)
	return err
}

// Resume implements mechanism.Session.
func (s *session) Resume(ctx context.Context) error {
	s.mu.Lock()
	c, closed := s.current, s.closed
	s.mu.Unlock()
	if closed {
		return errClosed
	}
	err := c.inner.Resume(ctx)
	s.check(ctx, c, err, false)
	if err == nil {
		s.lookUp()
	}
	return err
}

// Close implements mechanism.Session.
func (s *session) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	s.cancel()
	return errors.Join(s.drop(&s.current), s.drop(&s.better))
}

// drop closes what is held, and keeps it when that fails.
func (s *session) drop(c **chosen) error {
	if *c == nil {
		return nil
	}
	if err := (*c).inner.Close(); err != nil {
		return err
	}
	s.ladder.free((*c).slots, s.target)
	*c = nil
	return nil
}

// check takes note of how an action went and reports a mechanism that failed. That
// the process left or the caller gave up is no failure of it.
func (s *session) check(ctx context.Context, c *chosen, err error, suspend bool) {
	s.mu.Lock()
	if err == nil {
		s.suspended, s.lost = suspend, false
	}
	told := err == nil || s.lost || s.closed || errors.Is(err, mechanism.ErrGone) || ctx.Err() != nil
	s.lost = s.lost || !told
	s.mu.Unlock()
	if told {
		return
	}
	s.ladder.Lost(s.ladder.cfg.Rungs[c.index].Name(), s.target, err)
}

// takeBetter returns the mechanism to suspend with, which is the better one when
// there is one and the target runs.
func (s *session) takeBetter() (*chosen, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, errClosed
	}
	if s.better == nil || s.suspended {
		return s.current, nil
	}
	if err := s.drop(&s.current); err != nil {
		s.ladder.cfg.Log.Warn("a mechanism that holds a running target does not let go of it for a better one",
			logkey.Mechanism(s.ladder.cfg.Rungs[s.current.index].Name()), logkey.Target(s.target), logkey.Err(err))
		return s.current, nil
	}
	s.current, s.better = s.better, nil
	s.ladder.setChoice(s.target, s.betterChoice)
	return s.current, nil
}

// lookUp begins to try the better rungs, when it is time for that.
func (s *session) lookUp() {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.ladder.cfg.Now()
	if s.closed || s.climbing || s.better != nil || s.current.index == 0 || now.Before(s.nextClimb) {
		return
	}
	s.climbing = true
	s.nextClimb = now.Add(climbEvery)
	go s.climb(s.current.index)
}

func (s *session) climb(below int) {
	better, choice, err := s.ladder.climb(s.ctx, s.target, below)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.climbing = false
	switch {
	case err != nil || better == nil: // what there is stays
	case s.closed:
		// It has suspended nothing, so that all there is to lose is what it occupies.
		if err := s.drop(&better); err != nil {
			s.ladder.cfg.Log.Warn("a mechanism that holds a running target does not let go of it",
				logkey.Mechanism(choice.Mechanism), logkey.Target(s.target), logkey.Err(err))
		}
	default:
		s.better, s.betterChoice = better, choice
	}
}
