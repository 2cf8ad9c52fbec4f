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
	// releaseBound is the longest duration of Release.
	releaseBound = time.Second
	// renewBound is the longest wait for the answer to one Renew.
	renewBound = time.Second
	// renewPause is the shortest pause before a failed Renew is repeated.
	renewPause = 10 * time.Millisecond
)

// Timing is the duration of each part of an Acquire.
type Timing struct {
	// Decide is from the arrival of the request in the daemon to its decision.
	Decide time.Duration
	// Quiesce is from the decision to the suspension of the last target; 0 when nothing
	// had to be suspended or the answer did not wait for it.
	Quiesce time.Duration
	// Total is from arrival to answer, in the daemon.
	Total time.Duration
	// RoundTrip is the duration of the whole call in this process.
	RoundTrip time.Duration
}

// Lease is what Acquire returns. It asks for quiet GPUs until Release. Work of a Client that
// overlaps shares one lease of the daemon if its announcements are equal: the first announces,
// and the last Release completes. What the daemon answered to the first is in all.
type Lease struct {
	*grant
	cause     error
	roundTrip time.Duration
	leave     func() bool // reports whether its release is the last
}

// grant is a lease of the daemon.
type grant struct {
	c      *Client
	stream *stream // nil when the lease is unprotected
	answer *gpreemptv1.NotifyOnlineResponse
	lost   chan struct{}

	mu      sync.Mutex // guards all below
	phase   phase
	expires time.Time
	timer   *time.Timer
	onLost  map[*Lease]func() // they must not block
}

type phase uint8

const (
	held phase = iota
	releasing
	ended
)

// unprotected returns the lease of work that runs without the daemon.
func unprotected(cause error) *Lease {
	return &Lease{
		cause: cause, leave: func() bool { return false },
		grant: &grant{lost: make(chan struct{}), phase: ended, onLost: make(map[*Lease]func())},
	}
}

// live reports whether the daemon is not known to have ended it.
func (l *grant) live() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.phase == held && time.Now().Before(l.expires)
}

// hold returns the grant of an answer to a request that was sent at begun.
func (c *Client) hold(r *Request, begun time.Time, answer *gpreemptv1.NotifyOnlineResponse, st *stream) *grant {
	ttl := answer.GetTtl().AsDuration()
	l := &grant{c: c, stream: st, answer: answer, lost: make(chan struct{}), onLost: make(map[*Lease]func()), expires: begun.Add(ttl)}
	l.mu.Lock()
	if r.NoRenew {
		l.timer = time.AfterFunc(time.Until(l.expires), l.lose)
	} else {
		l.timer = time.AfterFunc(ttl/2, func() { c.spawn(l.renew) })
	}
	l.mu.Unlock()
	if !st.held.add(l) {
		l.lose() // the stream broke before the answer was handled
	}
	return l
}

// ID returns the daemon's ID of the lease, as gpctl shows it; "" when it is
// unprotected.
func (l *Lease) ID() string { return l.answer.GetLeaseId() }

// Protected reports whether the daemon granted the lease and is not known to have ended
// it. If it is false, the work may run beside offline work.
func (l *Lease) Protected() bool {
	if l.stream == nil {
		return false
	}
	select {
	case <-l.lost:
		return false
	default:
		return true
	}
}

// Cause returns why the daemon granted no lease; nil when it did.
func (l *Lease) Cause() error { return l.cause }

// Quiet reports whether the GPUs were quiet when Acquire returned: every offline target
// of lower priority on them was suspended.
func (l *Lease) Quiet() bool { return l.answer.GetQuiesced() }

// Reason returns why the GPUs were or were not quiet; UNSPECIFIED when the lease is
// unprotected.
func (l *Lease) Reason() gpreemptv1.QuiesceReason { return l.answer.GetReason() }

// SuspendedTargets returns the number of processes suspended for this lease.
func (l *Lease) SuspendedTargets() int { return int(l.answer.GetSuspendedTargets()) }

// OwnerOffline reports whether the daemon takes this process, or one that it started, for
// offline work: leases of others suspend it.
func (l *Lease) OwnerOffline() bool { return l.answer.GetOwnerOffline() }

// GPUs returns the GPUs that the lease covers.
func (l *Lease) GPUs() []gpreempt.GPUID {
	gpus := make([]gpreempt.GPUID, len(l.answer.GetGpuIds()))
	for i, id := range l.answer.GetGpuIds() {
		gpus[i] = gpreempt.GPUID(id)
	}
	return gpus
}

// TTL returns the granted time to live. Each renewal sets it again.
func (l *Lease) TTL() time.Duration { return l.answer.GetTtl().AsDuration() }

// Timing returns the duration of each part of the announcement, and of this Acquire.
func (l *Lease) Timing() Timing {
	t := l.answer.GetTiming()
	return Timing{t.GetDecide().AsDuration(), t.GetQuiesce().AsDuration(), t.GetTotal().AsDuration(), l.roundTrip}
}

// Lost returns a channel that is closed when the lease ends before Release: the
// connection or the stream broke, the client was closed, an admin
// released the lease, its queues were idle (CompleteOnIdle), or its time to live passed.
// An end in the daemon is detected at the next renewal. The work continues unprotected
// until the next Acquire. For an unprotected lease the channel is never closed; after
// Release it means nothing.
func (l *Lease) Lost() <-chan struct{} { return l.lost }

// Release ends the lease, or leaves it to those who share it. It may be called again; nil means
// that it has ended, for any reason, or that others use it. An error means that the daemon did
// not answer within a second; the lease ends with its TTL then, because it is not renewed any
// more. Release ignores the end of ctx, because leases are often released then, and uses only
// its values.
func (l *Lease) Release(ctx context.Context) error {
	l.mu.Lock()
	delete(l.onLost, l)
	l.mu.Unlock()
	if !l.leave() {
		return nil
	}
	return l.complete(ctx)
}

// complete ends the grant, as Release does.
func (l *grant) complete(ctx context.Context) error {
	l.mu.Lock()
	if l.phase == ended {
		l.mu.Unlock()
		return nil
	}
	l.phase = releasing
	l.timer.Stop()
	l.mu.Unlock()

	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseBound)
	defer cancel()
	err := l.stream.complete(ctx, l.answer.GetLeaseId())
	if gpreempt.ReasonOf(err) == gpreempt.ReasonUnknownLease || l.stream.held.isBroken() {
		err = nil
	}
	if errors.Is(err, context.DeadlineExceeded) {
		err = noAnswer("Complete", releaseBound)
	}
	if err == nil {
		l.mu.Lock()
		l.phase = ended
		l.mu.Unlock()
		l.stream.held.remove(l)
	}
	return err
}

// whenLost arranges one call of do when Lost is closed, at once if it is.
func (l *Lease) whenLost(do func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case <-l.lost:
		do()
	default:
		l.onLost[l] = do
	}
}

// lose ends a grant that was not completed.
func (l *grant) lose() {
	l.mu.Lock()
	if l.phase == held {
		close(l.lost)
		for _, do := range l.onLost {
			do()
		}
	}
	l.phase = ended
	l.timer.Stop()
	l.mu.Unlock()
	l.stream.held.remove(l)
}

// renew renews the lease, and repeats a failed renewal until the time to live passes.
func (l *grant) renew() {
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
	ttl, err := l.stream.renew(ctx, l.answer.GetLeaseId(), l.answer.GetTtl().AsDuration())
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

// leaseSet has the leases of a stream. A broken one accepts no lease.
type leaseSet struct {
	mu     sync.Mutex // guards all below; no other lock is taken while it is held
	broken bool
	leases map[*grant]struct{}
}

// add adds a lease, unless the stream is broken; it reports whether it did.
func (s *leaseSet) add(l *grant) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.broken {
		return false
	}
	if s.leases == nil {
		s.leases = make(map[*grant]struct{})
	}
	s.leases[l] = struct{}{}
	return true
}

func (s *leaseSet) remove(l *grant) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.leases, l)
}

func (s *leaseSet) isBroken() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.broken
}

// breakAll breaks the stream and loses every lease.
func (s *leaseSet) breakAll() {
	s.mu.Lock()
	s.broken = true
	all := slices.Collect(maps.Keys(s.leases))
	s.mu.Unlock()
	for _, l := range all {
		l.lose()
	}
}
