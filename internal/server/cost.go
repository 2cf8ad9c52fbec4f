package server

import (
	"context"
	"time"

	"github.com/gpreempt/gpreempt/internal/auth"
)

// answerShare is the part of the bytes of answers that is charged like bytes of the client:
// 1024 events of 100 bytes cost as much as 112 announcements of 256.
const answerShare = 4

// sharedTime is how old an answer may be that is shared by clients without the right Admin.
const sharedTime = time.Second

// shared is a value that is expensive to compute. It is computed once at a time.
type shared[T any] struct {
	busy  chan struct{} // has an element while the value is computed; guards all below
	began time.Time     // of its computation; zero before the first
	value T
}

func newShared[T any]() *shared[T] { return &shared[T]{busy: make(chan struct{}, 1)} }

// get returns the value, computed no earlier than notBefore. The error is that ctx ended
// first.
func (s *shared[T]) get(ctx context.Context, notBefore time.Time, compute func() T) (value T, err error) {
	select {
	case s.busy <- struct{}{}:
	case <-ctx.Done():
		return value, context.Cause(ctx)
	}
	defer func() { <-s.busy }()
	if !s.began.IsZero() && !s.began.Before(notBefore) {
		return s.value, nil
	}
	began := time.Now()
	value = compute()
	if ctx.Err() != nil { // the value may be incomplete
		return value, context.Cause(ctx)
	}
	s.began, s.value = began, value
	return value, nil
}

// notBefore returns the earliest time of a shared answer for a caller: admins see the
// present state, as what they have just changed.
func (c *connection) notBefore() time.Time {
	if c.rights.Allows(auth.Admin) {
		return time.Now()
	}
	return time.Now().Add(-sharedTime)
}
