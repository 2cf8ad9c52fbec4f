package scheduler

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// observer watches a core from outside and knows only the promises of the
// package comment: it sees the events that go in and the actions that come out,
// keeps its own idea of the world, and says when the two part.
type observer struct {
	policy   Policy
	draining bool
	stopped  bool
	now      Time
	lastSeq  uint64

	targets  map[gpreempt.ProcessKey]*seenTarget
	sessions map[gpreempt.ProcessKey]*seenSession
	leases   map[LeaseID]*seenLease
	// breaker is until when nothing may be suspended on a GPU; shown is what the
	// records say of it.
	breaker map[gpreempt.GPUID]Time
	shown   map[gpreempt.GPUID]bool
	// calmAt is when everything that may owe a gang running time, but is not
	// told to an observer, is over for sure.
	calmAt Time
	// rescopedAt is when the scope of gangs changed last.
	rescopedAt Time

	// of the step being watched
	ends    map[LeaseID]LeaseEnd
	left    map[gpreempt.ProcessKey]bool
	answers map[LeaseID]Answer
	counts  counts
}

// counts says what a history contained, so that a test cannot pass by doing nothing.
type counts map[string]int

func (c counts) add(o counts) {
	for what, n := range o {
		c[what] += n
	}
}

// seenSession is the mechanism on a process.
type seenSession struct {
	// flight is ActAttach or ActDetach while one has not come back.
	flight                   ActionKind
	attached, failed, births bool
	// since is when the last result came.
	since Time
}

type seenTarget struct {
	TargetSeen
	state TargetState
	// flight is the action that has not come back; seq 0 means none.
	flight   uint64
	kind     ActionKind
	sentAt   Time
	stuck    bool
	sentWith uint64 // Queues when the last Suspend was sent

	detaching        bool // a Detach that resumes is in flight
	failedAt         Time // of a resume that waits for its retry
	waitsForRetry    bool
	quarantinedUntil Time
	holdUntil        Time

	awaySince Time
	ranSince  Time
	forced    bool // max_suspend or the share floor ended this stretch
	runsUntil Time // because it was forced

	leased      bool // a lease justified it after the last step
	lingerUntil Time // latest end of the linger
	shadow      bool // reported as suspended
}

type seenLease struct {
	LeaseRequested
	state    LeaseState
	created  Time
	expires  Time
	order    bool // by hand
	bound    bool // the target was there
	live     bool
	answered bool

	sawWork, idle bool
	idleSince     Time
}

func newObserver(p Policy) *observer {
	return &observer{
		policy: p, targets: map[gpreempt.ProcessKey]*seenTarget{}, sessions: map[gpreempt.ProcessKey]*seenSession{}, leases: map[LeaseID]*seenLease{},
		breaker: map[gpreempt.GPUID]Time{}, shown: map[gpreempt.GPUID]bool{},
		ends: map[LeaseID]LeaseEnd{}, left: map[gpreempt.ProcessKey]bool{}, answers: map[LeaseID]Answer{}, counts: counts{},
	}
}

// watch takes in one step of the core and says what was wrong with it.
func (o *observer) watch(now Time, ev Event, actions []Action) error {
	o.now = max(o.now, now)
	o.counts["Steps"]++
	clear(o.ends)
	clear(o.left)
	clear(o.answers)
	o.passTime()
	o.takeEvent(ev)
	for i, a := range actions {
		if err := o.takeAction(a, actions[:i]); err != nil {
			return fmt.Errorf("at %v, after %T: action %d, %q: %w", o.now, ev, i, a, err)
		}
	}
	for _, err := range []error{o.checkEnds(), o.checkTargets(), o.checkSessions(), o.checkLeases(), o.checkBreakers()} {
		if err != nil {
			return fmt.Errorf("at %v, after %T: %w", o.now, ev, err)
		}
	}
	return nil
}

// passTime notices what is due before the event counts.
func (o *observer) passTime() {
	for _, t := range o.targets {
		if (t.flight != 0 || t.detaching) && !t.stuck && o.now >= t.sentAt+StuckAfter {
			t.stuck = true
			o.counts["Stuck"]++
			for _, id := range t.GPUs {
				o.breaker[id] = o.now + BreakerTime
			}
		}
	}
	for id, l := range o.leases {
		if l.live && o.now >= l.expires {
			o.endLease(id, EndExpired)
			o.counts["Expired"]++
		}
	}
}

func (o *observer) endLease(id LeaseID, end LeaseEnd) {
	o.leases[id].live = false
	o.ends[id] = end
	o.counts["Ended"]++
}

func (o *observer) endOrders(key gpreempt.ProcessKey) {
	for id, l := range o.leases {
		if l.live && l.order && l.bound && l.Target == key {
			o.endLease(id, EndReleased)
		}
	}
}

func (o *observer) targetLeft(key gpreempt.ProcessKey) {
	if o.targets[key] == nil {
		return
	}
	o.regrouped(o.targets[key], TargetSeen{})
	o.endOrders(key)
	o.left[key] = true
	o.calmAtJob(o.now + o.policy.MinRun)
}

func (o *observer) takeEvent(ev Event) {
	switch ev := ev.(type) {
	case TargetSeen:
		t := o.targets[ev.Target]
		if t == nil {
			t = &seenTarget{state: TargetNone, ranSince: o.now}
			o.targets[ev.Target] = t
		}
		before := t.TargetSeen
		if t.state != TargetNone && o.session(ev.Target).births {
			ev.Queues = before.Queues
		}
		o.regrouped(t, ev)
		t.TargetSeen = ev
		o.regrouped(t, before)
		o.calmAtJob(o.now + o.policy.MinRun)
	case TargetGone:
		o.targetLeft(ev.Target)
	case LeaseRequested:
		if l := o.leases[ev.Lease]; l != nil && l.live {
			return
		}
		o.leases[ev.Lease] = &seenLease{
			LeaseRequested: ev, created: o.now, expires: o.now + ev.TTL,
			order: !ev.Target.IsZero(), bound: o.targets[ev.Target] != nil, live: true,
		}
	case LeaseRenewed:
		if l := o.leases[ev.Lease]; l != nil && l.live {
			l.expires = o.now + ev.TTL
		}
	case LeaseFinished:
		if l := o.leases[ev.Lease]; l != nil && l.live {
			o.endLease(ev.Lease, ev.End)
		}
	case ClientGone:
		for id, l := range o.leases {
			if l.live && l.Client == ev.Client {
				o.endLease(id, ev.End)
			}
		}
	case ClientBacklog:
		o.takeBacklog(ev)
	case Attached:
		o.takeAttached(ev)
	case Detached:
		o.takeDetached(ev)
	case Lost:
		if s := o.session(ev.Target); s.attached && s.flight == ActRecord {
			s.failed = true
			o.openBreakers(o.targets[ev.Target], ev.Result, ev.FailedGPUs)
			o.counts["Lost"]++
		}
	case QueueBorn:
		if t := o.targets[ev.Target]; t != nil && o.session(ev.Target).births {
			t.Queues++
			o.counts["Births"]++
		}
	case Stopped:
		o.stopped = true
	case Suspended:
		o.takeResult(ev.Target, ActSuspend, ev.Seq, ev.Result, ev.FailedGPUs)
	case Resumed:
		o.takeResult(ev.Target, ActResume, ev.Seq, ev.Result, ev.FailedGPUs)
	case Alarm:
		for id := range o.shown {
			if ev.GPU == 0 || ev.GPU == id {
				o.breaker[id] = o.now + BreakerTime
			}
		}
	case GPUAdded:
		if _, known := o.shown[ev.GPU]; !known {
			o.shown[ev.GPU] = false
		}
	case Hold:
		if t := o.targets[ev.Target]; t != nil {
			o.endOrders(ev.Target)
			t.quarantinedUntil, t.holdUntil = o.now, o.now+ev.For
			if o.policy.Gang == GangJob {
				o.calmAt = max(o.calmAt, t.holdUntil)
			}
		}
	case PolicyChanged:
		o.takePolicy(ev.Policy)
	case Drain:
		if o.draining != ev.On {
			o.draining = ev.On
			o.counts["Drains"]++
		}
	}
}

// regrouped ends the linger of a gang that is not what it was.
func (o *observer) regrouped(t *seenTarget, to TargetSeen) {
	if t.Class == to.Class && t.Priority == to.Priority && t.Job == to.Job && slices.Equal(t.GPUs, to.GPUs) && t.state != TargetNone {
		return
	}
	for _, m := range o.gang(t) {
		m.lingerUntil, m.leased = 0, false
	}
}

func (o *observer) takeBacklog(ev ClientBacklog) {
	for id, l := range o.leases {
		switch {
		case !l.live || l.Client != ev.Client || !l.OnIdle:
		case ev.Busy:
			l.sawWork, l.idle = true, false
		case !l.sawWork:
		case !l.idle:
			l.idle, l.idleSince = true, o.now
		case o.now >= l.idleSince+IdleGrace:
			o.endLease(id, EndIdle)
			o.counts["Idle"]++
		}
	}
}

func (o *observer) takeResult(key gpreempt.ProcessKey, kind ActionKind, seq uint64, result Outcome, gpus []gpreempt.GPUID) {
	t := o.targets[key]
	if t == nil || t.flight == 0 || t.flight != seq || t.kind != kind {
		return
	}
	t.flight, t.stuck = 0, false
	o.takeOutcome(t, kind, result, gpus)
}

func (o *observer) takeOutcome(t *seenTarget, kind ActionKind, result Outcome, gpus []gpreempt.GPUID) {
	switch result {
	case OutcomeOK:
		return
	case OutcomeGone:
		o.targetLeft(t.Target)
		return
	case OutcomeReplaced:
		o.counts["Replaced"]++
	default:
		o.counts["Failures"]++
		t.quarantinedUntil = o.now + QuarantineTime
		o.openBreakers(t, result, gpus)
	}
	o.session(t.Target).failed = true
	if kind != ActSuspend {
		t.waitsForRetry, t.failedAt = true, o.now
	}
}

func (o *observer) openBreakers(t *seenTarget, result Outcome, gpus []gpreempt.GPUID) {
	if result != OutcomeHardware {
		return
	}
	if len(gpus) == 0 && t != nil {
		gpus = t.GPUs
	}
	for _, id := range gpus {
		o.breaker[id] = o.now + BreakerTime
	}
}

func (o *observer) takePolicy(p Policy) {
	old := o.policy
	o.policy = p
	if p.Gang != old.Gang {
		o.rescopedAt = o.now
		for _, t := range o.targets {
			t.lingerUntil, t.leased = 0, false
		}
	}
	o.calmAt = max(o.calmAt, o.now+old.MinRun, o.now+p.MinRun)
	for _, t := range o.targets {
		o.calmAt = max(o.calmAt, t.holdUntil)
		t.lingerUntil = min(t.lingerUntil, o.now+o.longestLinger())
		if !p.Shadow {
			t.shadow = false
		}
	}
}

func (o *observer) longestLinger() time.Duration {
	if o.policy.Linger == LingerNone {
		return 0
	}
	return o.policy.LingerMax
}

// recorded reports whether one of the records before an answer says it was given.
func (o *observer) recorded(a Action, before []Action) bool {
	if a.Answer.Reason == QuiesceEnded {
		return true // the end says it
	}
	return slices.ContainsFunc(before, func(b Action) bool {
		r := b.Record
		if b.Kind != ActRecord || r.Kind != RecordLease || r.Lease != a.Lease {
			return false
		}
		if a.Answer.Quiesced {
			return r.ToLease == LeaseHeld
		}
		return r.FromLease == r.ToLease && r.Cause == Cause(a.Answer.Reason.String()) && r.Took == a.Answer.Waited
	})
}

func (o *observer) takeAction(a Action, before []Action) error {
	switch a.Kind {
	case ActRecord:
		return o.takeRecord(a.Record)
	case ActAnswer:
		l := o.leases[a.Lease]
		switch {
		case l == nil:
			return errors.New("an answer to nobody")
		case l.answered:
			return errors.New("answered twice")
		case a.Answer.Waited != o.now-l.created:
			return fmt.Errorf("it waited %v", o.now-l.created)
		case !o.recorded(a, before):
			return errors.New("no record says it")
		}
		l.answered = true
		o.answers[a.Lease] = a.Answer
		o.counts["Answers"]++
		return nil
	}
	t := o.targets[a.Target]
	if a.Kind == ActAttach || a.Kind == ActDetach {
		return o.takeSessionAction(a.Kind, a.Target, t)
	}
	switch {
	case t == nil:
		return errors.New("an action on a target that is not there")
	case t.flight != 0:
		return fmt.Errorf("rule 4: action %d is still in flight", t.flight)
	case !o.session(a.Target).attached:
		return errors.New("no mechanism is attached")
	case a.Seq <= o.lastSeq:
		return fmt.Errorf("sequence number %d after %d", a.Seq, o.lastSeq)
	}
	if last := before[len(before)-1]; last.Kind != ActRecord || last.Record.Kind != RecordTarget || last.Record.Target != a.Target {
		return errors.New("its record does not stand right before it")
	}
	o.lastSeq = a.Seq
	t.flight, t.kind, t.sentAt, t.stuck, t.waitsForRetry = a.Seq, a.Kind, o.now, false, false
	if a.Kind == ActResume {
		o.counts["Resumes"]++
		if t.state != TargetResuming {
			return fmt.Errorf("resumed in state %v", t.state)
		}
		return nil
	}
	o.counts["Suspends"]++
	if t.state != TargetSuspending {
		return fmt.Errorf("suspended in state %v", t.state)
	}
	t.sentWith = t.Queues
	return o.justified(t, before[len(before)-1].Record)
}

func (o *observer) takeRecord(r Record) error {
	if r.At != o.now {
		return fmt.Errorf("recorded at %v", r.At)
	}
	switch r.Kind {
	case RecordTarget:
		return o.takeTargetRecord(r)
	case RecordLease:
		l := o.leases[r.Lease]
		switch {
		case l == nil:
			return errors.New("a lease nobody asked for")
		case l.state != r.FromLease:
			return fmt.Errorf("the last record says %v", l.state)
		case r.ToLease == LeaseEnded && (r.End == EndNone || o.ends[r.Lease] != r.End):
			return fmt.Errorf("it ends by %v", o.ends[r.Lease])
		case r.ToLease == LeaseEnded:
			delete(o.ends, r.Lease)
		}
		l.state = r.ToLease
		if r.Cause == CauseCoalesced {
			o.counts["Coalesced"]++
		}
	case RecordBreaker:
		if o.shown[r.GPU] == r.On {
			return errors.New("the breaker was so before")
		}
		o.shown[r.GPU] = r.On
		if r.On {
			o.counts["Breakers"]++
		}
	case RecordDrain:
		if r.On != o.draining {
			return errors.New("nobody asked for it")
		}
	case RecordShadow:
		t := o.targets[r.Target]
		if !o.policy.Shadow {
			return errors.New("the policy is no shadow")
		}
		o.counts["ShadowRecords"]++
		if t.shadow != (r.FromTarget == TargetSuspended) {
			return fmt.Errorf("reported suspended before: %v", t.shadow)
		}
		t.shadow = r.ToTarget == TargetSuspended
	}
	return nil
}

// moves are the changes of state a target may make.
var moves = map[TargetState][]TargetState{
	TargetNone:        {TargetRunning},
	TargetRunning:     {TargetSuspending, TargetLeft},
	TargetSuspending:  {TargetSuspended, TargetResuming, TargetLeft},
	TargetSuspended:   {TargetSuspending, TargetResuming, TargetLeft},
	TargetResuming:    {TargetRunning, TargetQuarantined, TargetResuming, TargetLeft},
	TargetQuarantined: {TargetRunning, TargetLeft},
}

func (o *observer) takeTargetRecord(r Record) error {
	t := o.targets[r.Target]
	switch {
	case t == nil:
		return errors.New("a target nobody saw")
	case t.state != r.FromTarget:
		return fmt.Errorf("the last record says %v", t.state)
	case r.Cause == CauseClass && r.FromTarget == r.ToTarget: // judged anew
	case !slices.Contains(moves[r.FromTarget], r.ToTarget):
		return errors.New("no such move")
	}
	if r.Cause == CauseNewQueue {
		o.counts["NewQueueSuspends"]++
	}
	if r.Cause == CauseRetry {
		o.counts["Retries"]++
	}
	switch {
	case r.ToTarget == TargetLeft:
		if !o.left[r.Target] {
			return errors.New("it did not leave")
		}
		delete(o.left, r.Target)
		delete(o.targets, r.Target)
	case away(r.ToTarget) && !away(t.state):
		t.awaySince = o.now
	case !away(r.ToTarget) && away(t.state):
		t.ranSince = o.now
		o.calmAtJob(o.now + o.policy.MinRun)
		if t.forced {
			t.runsUntil, t.forced = o.now+o.policy.MinRun, false
		}
		if r.ToTarget == TargetQuarantined {
			o.counts["Quarantines"]++
		}
	case r.ToTarget == TargetResuming && (r.Cause == CauseMaxSuspend || r.Cause == CauseShareFloor):
		// In a job, or just out of one, it may pay another's debt.
		t.forced = o.policy.Gang == GangProcess && t.awaySince > o.rescopedAt
		o.counts["Forced"]++
	}
	t.state = r.ToTarget
	return nil
}

// calmAtJob puts calmAt off where one process owes its running time to another,
// also to one that has just left the job.
func (o *observer) calmAtJob(at Time) {
	if o.policy.Gang == GangJob {
		o.calmAt = max(o.calmAt, at)
	}
}
