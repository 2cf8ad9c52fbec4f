package server

import (
	"context"
	"time"

	"github.com/gpreempt/gpreempt/internal/auth"
)

// costs is the price of a call of each method, in requests of the rate: its processor time
// as a multiple of an announcement's, rounded up, by BenchmarkCosts on a host with 24
// processes and 192 queues. Each message that a client sends on a stream has the price of
// its method. What grows with the answer is charged by its bytes (answerShare).
var costs = map[string]int{
	"/gpreempt.v1.OnlineService/NotifyOnline": 1,
	"/gpreempt.v1.OnlineService/Complete":     1,
	"/gpreempt.v1.OnlineService/Renew":        1,
	"/gpreempt.v1.OnlineService/Session":      1,

	"/gpreempt.v1.AdminService/GetStatus":      2,
	"/gpreempt.v1.AdminService/ListGpus":       4,
	"/gpreempt.v1.AdminService/ListTargets":    4,
	"/gpreempt.v1.AdminService/ListQueues":     12,
	"/gpreempt.v1.AdminService/ListHqds":       4,
	"/gpreempt.v1.AdminService/WatchQueues":    12,
	"/gpreempt.v1.AdminService/ListLeases":     2,
	"/gpreempt.v1.AdminService/CreateLease":    2,
	"/gpreempt.v1.AdminService/ReleaseLease":   2,
	"/gpreempt.v1.AdminService/SuspendTarget":  2,
	"/gpreempt.v1.AdminService/ResumeTarget":   2,
	"/gpreempt.v1.AdminService/ClassifyTarget": 2,
	"/gpreempt.v1.AdminService/ExplainTarget":  2,
	"/gpreempt.v1.AdminService/GetPolicy":      2,
	"/gpreempt.v1.AdminService/SetPolicy":      2,
	"/gpreempt.v1.AdminService/WatchEvents":    4,
	"/gpreempt.v1.AdminService/GetStatistics":  4,
	"/gpreempt.v1.AdminService/SetDrain":       1,
	// Its own cost is that of the host's checks, which are shared for a second.
	"/gpreempt.v1.AdminService/Diagnose": 8,

	"/grpc.health.v1.Health/Check": 1,
	"/grpc.health.v1.Health/List":  1,
	"/grpc.health.v1.Health/Watch": 1,

	"/grpc.reflection.v1.ServerReflection/ServerReflectionInfo":      12,
	"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": 12,
}

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
