// Package spans makes spans of time from the events of a daemon, the stages of a lease and the states
// of its targets, and sends them to a collector of OpenTelemetry.
package spans

import (
	"cmp"
	"time"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// Kind is the kind of a span.
type Kind uint8

// The kinds. Those of a lease come first; Announce overlaps Requested, Quiescing and
// Online, which follow each other within Lease. Those of a target follow each other.
const (
	// Lease is all of a lease.
	Lease Kind = iota
	// Announce is until the announcement is answered.
	Announce
	// Requested is until the lease counts: at once, or when its eta or slo says so.
	Requested
	// Quiescing is until the GPUs are quiet.
	Quiescing
	// Online is the time on quiet GPUs, until the lease ends or a new target runs there.
	Online
	// Running and the following are the states of a target.
	Running
	Suspending
	Suspended
	Resuming
	Quarantined
	// BreakerOpen is a GPU with an open breaker.
	BreakerOpen
)

// String names the kind.
func (k Kind) String() string {
	return [...]string{
		"lease", "announce", "requested", "quiescing", "online",
		"running", "suspend", "suspended", "resume", "quarantined", "breaker open",
	}[k]
}

// Span is the time in which a lease, a target or a GPU was in a state. Times are of the daemon's clock.
type Span struct {
	Kind Kind
	// Lease is the lease, for the kinds of a lease, and the one that a target was
	// suspended for, from Suspending to Resuming; "" when no lease was the reason.
	// GPUs are those that it covers, where its announcement was seen, and Whole is the Seq of
	// its span of the kind Lease: an id may come twice.
	Lease string
	GPUs  []uint32
	Whole uint64
	// Target is set for the kinds of a target, GPU for BreakerOpen.
	Target string
	GPU    uint32
	// Seq is the number of the span in the order in which they began or were first
	// seen: a span within another one has a higher number.
	Seq uint64
	// Begin is when it began; with Clipped set it may have begun earlier, and Begin is the
	// time of the first event, or of the end of the span before. End is not below Begin,
	// and the time of the last event if the span is Open.
	Begin, End    time.Duration
	Clipped, Open bool
	// Answered is when the announcement of a Lease was answered, End if that was not seen.
	Answered time.Duration
	// Cause is why it began, where known, and Ended why it ended: for an Announce the
	// reason of the answer, and for a Lease its end.
	Cause, Ended string
	// Took is the time of the mechanism, for Suspending and Resuming.
	Took time.Duration
}

// Done reports whether a suspend or a resume succeeded.
func (s *Span) Done() bool { return s.Ended == string(scheduler.CauseDone) }

// Builder makes spans of events that are added in their order. Its zero value is ready.
type Builder struct {
	first, now time.Duration
	begun      bool
	seq        uint64
	leases     map[string]*lease
	targets    map[string]*Span
	breakers   map[uint32]*Span
	// ended is when the last span of a target or a GPU ended.
	ended map[subject]time.Duration
}

type subject struct {
	target string
	gpu    uint32
}

type lease struct {
	whole, stage Span
	announce     *Span // nil once it is answered
}

// Add adds an event and appends to dst the spans that ended with it. The time of an event
// counts as that of the event before if it is earlier. An event without the target, lease or
// GPU that it must have changes nothing.
func (b *Builder) Add(e *gpreemptv1.Event, dst []Span) []Span {
	at := max(0, e.GetClock().AsDuration())
	if !b.begun {
		*b = Builder{
			begun: true, first: at, now: at,
			leases: map[string]*lease{}, targets: map[string]*Span{}, breakers: map[uint32]*Span{}, ended: map[subject]time.Duration{},
		}
	}
	b.now = max(b.now, at)
	switch kind := e.GetKind(); {
	case kind == gpreemptv1.EventKind_EVENT_KIND_LEASE && e.GetLeaseId() != "":
		return b.lease(e, dst)
	case kind == gpreemptv1.EventKind_EVENT_KIND_TARGET && e.GetTargetId() != "":
		return b.target(e, dst)
	case kind == gpreemptv1.EventKind_EVENT_KIND_BREAKER && e.GetGpuId() != 0:
		return b.breaker(e, dst)
	}
	return dst
}

// Open appends to dst the spans that have not ended, as if they ended now.
func (b *Builder) Open(now time.Duration, dst []Span) []Span {
	now = max(now, b.now)
	open := func(s Span) {
		s.End, s.Open = now, true
		dst = append(dst, s)
	}
	for _, l := range b.leases {
		if l.announce != nil {
			open(*l.announce)
		}
		l.whole.Answered = cmp.Or(l.whole.Answered, now)
		open(l.whole)
		open(l.stage)
	}
	for _, s := range b.targets {
		open(*s)
	}
	for _, s := range b.breakers {
		open(*s)
	}
	return dst
}

// begin returns a span that begins now, or before the first event of its subject.
func (b *Builder) begin(s Span, clipped bool) Span {
	b.seq++
	s.Seq, s.Begin, s.Clipped = b.seq, b.now, clipped
	if clipped {
		s.Begin = max(b.first, b.ended[subject{s.Target, s.GPU}])
	}
	return s
}

// end returns s, ended.
func (b *Builder) end(s Span, why string) Span {
	s.End, s.Ended = b.now, why
	if s.Lease == "" || s.Target != "" {
		b.ended[subject{s.Target, s.GPU}] = b.now
	}
	return s
}

// The states of a lease that decide, for short.
const (
	leaseNone  = gpreemptv1.LeaseState_LEASE_STATE_UNSPECIFIED
	leaseHeld  = gpreemptv1.LeaseState_LEASE_STATE_HELD
	leaseEnded = gpreemptv1.LeaseState_LEASE_STATE_ENDED
)

// stageKind is the kind of span of a lease in a state; 0 while it is requested.
var stageKind = map[gpreemptv1.LeaseState]Kind{gpreemptv1.LeaseState_LEASE_STATE_QUIESCING: Quiescing, leaseHeld: Online}

func (b *Builder) lease(e *gpreemptv1.Event, dst []Span) []Span {
	id, from, to := e.GetLeaseId(), e.GetFromLease(), e.GetToLease()
	l := b.leases[id]
	if l == nil {
		clipped, state, cause := true, from, ""
		if from == leaseNone {
			clipped, state, cause = false, to, e.GetCause()
		}
		s := Span{Lease: id, GPUs: e.GetGpuIds(), Whole: b.seq + 1, Cause: cause}
		l = &lease{whole: b.begin(s, clipped)}
		if !clipped {
			s.Kind = Announce
			l.announce = new(b.begin(s, false))
		}
		s.Kind = cmp.Or(stageKind[state], Requested)
		l.stage = b.begin(s, clipped)
		b.leases[id] = l
		if !clipped && to != leaseEnded {
			return dst
		}
	}
	if l.announce != nil && (from == to || to == leaseHeld || to == leaseEnded) {
		why := e.GetCause()
		if to == leaseEnded {
			why = string(scheduler.CauseEnded)
		}
		dst = append(dst, b.end(*l.announce, why))
		l.announce, l.whole.Answered = nil, b.now
	}
	if from == to {
		return dst
	}
	why := e.GetCause()
	if to == leaseEnded {
		why = api.EnumName(e.GetEnd())
	}
	dst = append(dst, b.end(l.stage, why))
	if to == leaseEnded {
		delete(b.leases, id)
		l.whole.Answered = cmp.Or(l.whole.Answered, b.now)
		return append(dst, b.end(l.whole, why))
	}
	l.stage = b.begin(Span{Kind: cmp.Or(stageKind[to], Requested), Lease: id, GPUs: l.whole.GPUs, Whole: l.whole.Whole, Cause: why}, false)
	return dst
}

// targetKind is the kind of span of a target in a state; it has none after its end.
var targetKind = map[gpreemptv1.TargetState]Kind{
	gpreemptv1.TargetState_TARGET_STATE_RUNNING: Running, gpreemptv1.TargetState_TARGET_STATE_SUSPENDING: Suspending,
	gpreemptv1.TargetState_TARGET_STATE_SUSPENDED: Suspended, gpreemptv1.TargetState_TARGET_STATE_RESUMING: Resuming,
	gpreemptv1.TargetState_TARGET_STATE_QUARANTINED: Quarantined,
}

func (b *Builder) target(e *gpreemptv1.Event, dst []Span) []Span {
	id, from, to := e.GetTargetId(), e.GetFromTarget(), e.GetToTarget()
	s := b.targets[id]
	if s == nil {
		if kind, ok := targetKind[from]; ok {
			s = new(b.begin(Span{Kind: kind, Target: id}, true))
			b.targets[id] = s
		}
	}
	// A new class, or a resume that failed and is retried: the state stays.
	if s != nil && from == to {
		return dst
	}
	next := Span{Kind: targetKind[to], Target: id, Lease: e.GetLeaseId(), Cause: e.GetCause()}
	if l := b.leases[next.Lease]; l != nil {
		next.GPUs, next.Whole = l.whole.GPUs, l.whole.Whole
	}
	if s != nil {
		if next.Kind != Suspending || next.Lease == "" {
			next.Lease, next.GPUs, next.Whole = s.Lease, s.GPUs, s.Whole // still suspended for the same lease
		}
		ended := b.end(*s, e.GetCause())
		if s.Kind == Suspending || s.Kind == Resuming {
			ended.Took = e.GetTook().AsDuration()
		}
		dst = append(dst, ended)
		delete(b.targets, id)
	}
	if _, ok := targetKind[to]; ok {
		if next.Kind == Running || next.Kind == Quarantined {
			next.Lease, next.GPUs, next.Whole = "", nil, 0
		}
		b.targets[id] = new(b.begin(next, false))
	}
	return dst
}

func (b *Builder) breaker(e *gpreemptv1.Event, dst []Span) []Span {
	id := e.GetGpuId()
	s := b.breakers[id]
	if e.GetCause() != string(scheduler.CauseCooledDown) { // it opens
		if s == nil {
			b.breakers[id] = new(b.begin(Span{Kind: BreakerOpen, GPU: id, Cause: e.GetCause()}, false))
		}
		return dst
	}
	if s == nil {
		s = new(b.begin(Span{Kind: BreakerOpen, GPU: id}, true))
	}
	delete(b.breakers, id)
	return append(dst, b.end(*s, e.GetCause()))
}
