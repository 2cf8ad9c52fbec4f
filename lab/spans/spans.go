// Package spans makes spans of time from the events of a daemon, the stages of a lease and the states
// of its targets, and sends them to a collector of OpenTelemetry.
package spans

import (
	"cmp"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
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

// Span is the time in which a lease, a target or a GPU was in a state.
type Span struct {
	Kind Kind
	// Lease is the lease, for the kinds of a lease, and the one that a target was
	// suspended for, from Suspending to Resuming; 0 when no lease was the reason.
	Lease scheduler.LeaseID
	// Target is set for the kinds of a target, GPU for BreakerOpen.
	Target gpreempt.ProcessKey
	GPU    gpreempt.GPUID
	// Seq is the number of the span in the order in which they began or were first
	// recorded: a span within another one has a higher number.
	Seq uint64
	// Begin is when it began; with Clipped set it may have begun earlier, and Begin is the
	// time of the first record, or of the end of the span before. End is not below Begin,
	// and set unless Open.
	Begin, End    scheduler.Time
	Clipped, Open bool
	// Cause is why it began, where known, and Ended why it ended: for an Announce the
	// reason of the answer, and for a Lease its end.
	Cause, Ended string
	// Took is the time of the mechanism, for Suspending and Resuming.
	Took time.Duration
}

// Builder makes spans of records that are added in their order. Its zero value is ready.
type Builder struct {
	first, now scheduler.Time
	begun      bool
	seq        uint64
	leases     map[scheduler.LeaseID]*lease
	targets    map[gpreempt.ProcessKey]*Span
	breakers   map[gpreempt.GPUID]*Span
	// ended is when the last span of a target or a GPU ended.
	ended map[subject]scheduler.Time
}

type subject struct {
	target gpreempt.ProcessKey
	gpu    gpreempt.GPUID
}

type lease struct {
	whole, stage Span
	announce     *Span // nil once it is answered
}

// Add adds a record and appends to dst the spans that ended with it. The time of a record
// counts as that of the record before if it is earlier.
func (b *Builder) Add(r scheduler.Record, dst []Span) []Span {
	if !b.begun {
		*b = Builder{
			begun: true, first: r.At, now: r.At,
			leases: map[scheduler.LeaseID]*lease{}, targets: map[gpreempt.ProcessKey]*Span{}, breakers: map[gpreempt.GPUID]*Span{},
			ended: map[subject]scheduler.Time{},
		}
	}
	b.now = max(b.now, r.At)
	switch r.Kind {
	case scheduler.RecordLease:
		return b.lease(r, dst)
	case scheduler.RecordTarget:
		return b.target(r, dst)
	case scheduler.RecordBreaker:
		return b.breaker(r, dst)
	default:
		return dst
	}
}

// Open appends to dst the spans that have not ended, as if they ended now.
func (b *Builder) Open(now scheduler.Time, dst []Span) []Span {
	now = max(now, b.now)
	open := func(s Span) {
		s.End, s.Open = now, true
		dst = append(dst, s)
	}
	for _, l := range b.leases {
		open(l.whole)
		open(l.stage)
		if l.announce != nil {
			open(*l.announce)
		}
	}
	for _, s := range b.targets {
		open(*s)
	}
	for _, s := range b.breakers {
		open(*s)
	}
	return dst
}

// begin returns a span that begins now, or before the first record of its subject.
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
	if s.Lease == 0 || !s.Target.IsZero() {
		b.ended[subject{s.Target, s.GPU}] = b.now
	}
	return s
}

// stageKind is the kind of span of a lease in a state; 0 while it is requested.
var stageKind = map[scheduler.LeaseState]Kind{scheduler.LeaseQuiescing: Quiescing, scheduler.LeaseHeld: Online}

func (b *Builder) lease(r scheduler.Record, dst []Span) []Span {
	l := b.leases[r.Lease]
	if l == nil {
		clipped, state, cause := true, r.FromLease, ""
		if r.FromLease == scheduler.LeaseNone {
			clipped, state, cause = false, r.ToLease, string(r.Cause)
		}
		l = &lease{whole: b.begin(Span{Kind: Lease, Lease: r.Lease, Cause: cause}, clipped)}
		if !clipped {
			l.announce = new(b.begin(Span{Kind: Announce, Lease: r.Lease, Cause: cause}, false))
		}
		l.stage = b.begin(Span{Kind: cmp.Or(stageKind[state], Requested), Lease: r.Lease, Cause: cause}, clipped)
		b.leases[r.Lease] = l
		if !clipped && r.ToLease != scheduler.LeaseEnded {
			return dst
		}
	}
	answered := r.FromLease == r.ToLease || r.ToLease == scheduler.LeaseHeld || r.ToLease == scheduler.LeaseEnded
	if l.announce != nil && answered {
		why := string(r.Cause)
		if r.ToLease == scheduler.LeaseEnded {
			why = scheduler.QuiesceEnded.String()
		}
		dst = append(dst, b.end(*l.announce, why))
		l.announce = nil
	}
	if r.FromLease == r.ToLease {
		return dst
	}
	why := string(r.Cause)
	if r.ToLease == scheduler.LeaseEnded {
		why = r.End.String()
	}
	dst = append(dst, b.end(l.stage, why))
	if r.ToLease == scheduler.LeaseEnded {
		delete(b.leases, r.Lease)
		return append(dst, b.end(l.whole, why))
	}
	l.stage = b.begin(Span{Kind: cmp.Or(stageKind[r.ToLease], Requested), Lease: r.Lease, Cause: why}, false)
	return dst
}

// targetKind is the kind of span of a target in a state; it has none after its end.
var targetKind = map[scheduler.TargetState]Kind{
	scheduler.TargetRunning: Running, scheduler.TargetSuspending: Suspending, scheduler.TargetSuspended: Suspended,
	scheduler.TargetResuming: Resuming, scheduler.TargetQuarantined: Quarantined,
}

func (b *Builder) target(r scheduler.Record, dst []Span) []Span {
	s := b.targets[r.Target]
	if s == nil {
		if from, ok := targetKind[r.FromTarget]; ok {
			s = new(b.begin(Span{Kind: from, Target: r.Target}, true))
			b.targets[r.Target] = s
		}
	}
	// A new class, or a resume that failed and is retried: the state stays.
	if s != nil && r.FromTarget == r.ToTarget {
		return dst
	}
	away := r.Lease
	if s != nil {
		if r.ToTarget != scheduler.TargetSuspending || away == 0 {
			away = s.Lease // still suspended for the same lease
		}
		ended := b.end(*s, string(r.Cause))
		if s.Kind == Suspending || s.Kind == Resuming {
			ended.Took = r.Took
		}
		dst = append(dst, ended)
		delete(b.targets, r.Target)
	}
	if kind, ok := targetKind[r.ToTarget]; ok {
		next := Span{Kind: kind, Target: r.Target, Cause: string(r.Cause)}
		if kind != Running && kind != Quarantined {
			next.Lease = away
		}
		b.targets[r.Target] = new(b.begin(next, false))
	}
	return dst
}

func (b *Builder) breaker(r scheduler.Record, dst []Span) []Span {
	s := b.breakers[r.GPU]
	if r.On {
		if s == nil {
			b.breakers[r.GPU] = new(b.begin(Span{Kind: BreakerOpen, GPU: r.GPU, Cause: string(r.Cause)}, false))
		}
		return dst
	}
	if s == nil {
		s = new(b.begin(Span{Kind: BreakerOpen, GPU: r.GPU}, true))
	}
	delete(b.breakers, r.GPU)
	return append(dst, b.end(*s, string(r.Cause)))
}
