package client

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

const (
	// releaseBound is the longest time Release takes.
	releaseBound = time.Second
	// renewBound is the longest wait for the answer to one Renew.
	renewBound = time.Second
	// renewPause is the shortest pause before a Renew that failed is repeated.
	renewPause = 10 * time.Millisecond
)

// Timing says where the time of an Acquire went.
type Timing struct {
	// Decide is from the arrival of the request in the daemon to its decision.
	Decide time.Duration
	// Quiesce is from the decision until the last target was suspended; 0 when
	// nothing had to be, or the answer did not wait for it.
	Quiesce time.Duration
	// Total is from arrival to answer, in the daemon.
	Total time.Duration
	// RoundTrip is the whole call, as this process saw it.
	RoundTrip time.Duration
}

// link is what a lease lives and dies with: a connection or a stream.
type link interface {
	complete(ctx context.Context, id string) error
	renew(ctx context.Context, id string, ttl time.Duration) (granted time.Duration, err error)
	leases() *leaseSet
}

// Lease is a claim on quiet GPUs, from Acquire until Release.
type Lease struct {
	c      *Client
	link   link // nil when the lease is unprotected
	cause  error
	answer *gpreemptv1.NotifyOnlineResponse
	timing Timing
	lost   chan struct{}

	mu      sync.Mutex // guards what follows
	phase   phase
	expires time.Time
	timer   *time.Timer
}

type phase uint8

const (
	held phase = iota
	releasing
	over
)

// unprotected returns a lease that is none.
func unprotected(cause error) *Lease {
	return &Lease{cause: cause, lost: make(chan struct{}), phase: over}
}

// hold returns the lease of an answer to a question asked at begun.
func (c *Client) hold(r *Request, begun time.Time, answer *gpreemptv1.NotifyOnlineResponse, via link) *Lease {
	ttl := answer.GetTtl().AsDuration()
	l := &Lease{
		c: c, link: via, answer: answer, lost: make(chan struct{}), expires: begun.Add(ttl),
		timing: Timing{
			Decide:    answer.GetTiming().GetDecide().AsDuration(),
			Quiesce:   answer.GetTiming().GetQuiesce().AsDuration(),
			Total:     answer.GetTiming().GetTotal().AsDuration(),
			RoundTrip: time.Since(begun),
		},
	}
	l.mu.Lock()
	if r.NoRenew {
		l.timer = time.AfterFunc(time.Until(l.expires), l.lose)
	} else {
		l.timer = time.AfterFunc(ttl/2, func() { c.spawn(l.renew) })
	}
	l.mu.Unlock()
	if !via.leases().add(l) {
		l.lose() // the link broke while the answer was on its way up
	}
	return l
}

// ID names the lease in the daemon's words, as gpctl shows it; "" when it is
// unprotected.
func (l *Lease) ID() string { return l.answer.GetLeaseId() }

// Protected reports whether the daemon gave the lease and, as far as is known, has
// not ended it of its own accord. When it is false the work may run beside
// offline work.
func (l *Lease) Protected() bool {
	if l.link == nil {
		return false
	}
	select {
	case <-l.lost:
		return false
	default:
		return true
	}
}

// Cause reports why the daemon gave no lease; nil when it did.
func (l *Lease) Cause() error { return l.cause }

// Quiesced tells that the GPUs were quiet when Acquire returned: everything of
// lower priority on them was suspended.
func (l *Lease) Quiesced() bool { return l.answer.GetQuiesced() }

// Reason reports why the GPUs are quiet, or why not; UNSPECIFIED when the lease is
// unprotected.
func (l *Lease) Reason() gpreemptv1.QuiesceReason { return l.answer.GetReason() }

// SuspendedTargets is the number of processes suspended for this lease.
func (l *Lease) SuspendedTargets() int { return int(l.answer.GetSuspendedTargets()) }

// GPUs are the GPUs the lease covers.
func (l *Lease) GPUs() []gpreempt.GPUID {
	gpus := make([]gpreempt.GPUID, len(l.answer.GetGpuIds()))
	for i, id := range l.answer.GetGpuIds() {
		gpus[i] = gpreempt.GPUID(id)
	}
	return gpus
}

// TTL is the time to live the daemon granted, and which renewing gives again.
func (l *Lease) TTL() time.Duration { return l.answer.GetTtl().AsDuration() }

// Timing reports where the time of Acquire went.
func (l *Lease) Timing() Timing { return l.timing }

// Lost is closed when the lease ends before Release: the connection or the
// stream broke, the client or the session was closed, an admin released it, it
// fell idle (CompleteOnIdle), or its time was over. What ended inside the daemon
// is found out when the lease is renewed. Work goes on unprotected; Acquire again
// to change that. For an unprotected lease, and after Release, it is never closed.
func (l *Lease) Lost() <-chan struct{} { return l.lost }

// Release ends the lease. It may be called again: nil means that the lease is
// over, whatever ended it. An error means that the daemon did not answer within
// a second; the lease ends with its TTL then, since it is renewed no more. That
// ctx is done does not stop Release, since that is when leases are released; ctx
// gives its values.
func (l *Lease) Release(ctx context.Context) error {
	l.mu.Lock()
	if l.phase == over {
		l.mu.Unlock()
		return nil
	}
	l.phase = releasing
	l.timer.Stop()
	l.mu.Unlock()

	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseBound)
	defer cancel()
	err := l.link.complete(ctx, l.ID())
	if gpreempt.ReasonOf(err) == gpreempt.ReasonUnknownLease || l.link.leases().isBroken() {
		err = nil
	}
	if errors.Is(err, context.DeadlineExceeded) {
		err = noAnswer("Complete", releaseBound)
	}
	if err == nil {
		l.mu.Lock()
		l.phase = over
		l.mu.Unlock()
		l.link.leases().remove(l)
	}
	return err
}

// lose ends the lease without having been asked to.
func (l *Lease) lose() {
	l.mu.Lock()
	if l.phase == held {
		close(l.lost)
	}
	l.phase = over
	l.timer.Stop()
	l.mu.Unlock()
	l.link.leases().remove(l)
}

// renew returns the lease a new time to live, and tries again while it has one.
func (l *Lease) renew() {
	l.mu.Lock()
	current, left := l.phase, time.Until(l.expires)
	l.mu.Unlock()
	if current != held {
		return
	}
	if left <= 0 {
		l.lose()
		return
	}
	begun := time.Now()
	ctx, cancel := context.WithTimeout(l.c.background, min(left, renewBound))
	ttl, err := l.link.renew(ctx, l.ID(), l.TTL())
	cancel()
	switch gpreempt.ReasonOf(err) {
	case gpreempt.ReasonUnknownLease, gpreempt.ReasonForeignLease:
		l.lose()
		return
	default:
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.phase != held {
		return
	}
	if err == nil {
		l.expires = begun.Add(ttl)
		l.timer.Reset(ttl / 2)
		return
	}
	left = max(time.Until(l.expires), 0)
	l.timer.Reset(min(left, max(left/2, renewPause)))
}

// leaseSet is the leases of a link. Once broken it takes no more.
type leaseSet struct {
	mu     sync.Mutex // guards what follows; taken before no other lock
	broken bool
	leases map[*Lease]struct{}
}

// add reports whether the link still stands.
func (s *leaseSet) add(l *Lease) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.broken {
		return false
	}
	if s.leases == nil {
		s.leases = make(map[*Lease]struct{})
	}
	s.leases[l] = struct{}{}
	return true
}

func (s *leaseSet) remove(l *Lease) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.leases, l)
}

func (s *leaseSet) isBroken() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.broken
}

// breakAll loses every lease.
func (s *leaseSet) breakAll() {
	s.mu.Lock()
	s.broken = true
	all := slices.Collect(maps.Keys(s.leases))
	s.mu.Unlock()
	for _, l := range all {
		l.lose()
	}
}
