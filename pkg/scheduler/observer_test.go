package scheduler_test

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// Observer watches a core from outside and knows only the promises of the
// package comment: it sees the events that go in and the actions that come out,
// keeps its own idea of the world, and says when the two part.
type Observer struct {
	policy   scheduler.Policy
	draining bool
	stopped  bool
	now      scheduler.Time
	lastSeq  uint64

	Targets  map[gpreempt.ProcessKey]*seenTarget
	sessions map[gpreempt.ProcessKey]*seenSession
	leases   map[scheduler.LeaseID]*seenLease
	// owners are those of the clients that have one.
	owners map[scheduler.ClientID]gpreempt.ProcessKey
	// breaker is until when nothing may be suspended on a GPU; shown is what the
	// records say of it.
	breaker map[gpreempt.GPUID]scheduler.Time
	shown   map[gpreempt.GPUID]bool
	// calmAt is when every guarantee of running time that an observer cannot see has
	// ended.
	calmAt scheduler.Time

	jobs seenJobs

	// of the step being watched
	ends    map[scheduler.LeaseID]scheduler.LeaseEnd
	left    map[gpreempt.ProcessKey]bool
	answers map[scheduler.LeaseID]scheduler.Answer
	reset   map[gpreempt.GPUID]bool // a queue did not leave them
	Counts  Counts
}

// Counts says what a history contained, so that a test cannot pass by doing nothing.
type Counts map[string]int

// Add adds the counts of o.
func (c Counts) Add(o Counts) {
	for what, n := range o {
		c[what] += n
	}
}

// seenSession is the mechanism on a process.
type seenSession struct {
	// flight is ActAttach or ActDetach while one has not come back.
	flight                   scheduler.ActionKind
	attached, failed, births bool
	refuses                  bool // the last attempt to use it has failed
	// since is when the last result came, dueSince when the Attach became due, if isDue.
	since, dueSince scheduler.Time
	isDue           bool
	// askAt is when to ask what an Attach waits for, asked the number of an Inspect that has
	// not come back since askedAt; ask: it was time when the step began.
	askAt, askedAt scheduler.Time
	asked          uint64
	ask            bool
}

type seenTarget struct {
	scheduler.TargetSeen
	state scheduler.TargetState
	// Flight is the action that has not come back; seq 0 means none.
	Flight uint64
	// queuesSince is when it was first seen with a queue, if hadQueues.
	queuesSince scheduler.Time
	hadQueues   bool
	kind        scheduler.ActionKind
	sentAt      scheduler.Time
	// askAt is when to ask what it waits for, asked the number of an Inspect that has not
	// come back since askedAt; hung: the answer opened the breakers.
	askAt, askedAt scheduler.Time
	asked          uint64
	hung           bool
	due            bool            // it was time to ask when the step began
	again          scheduler.Cause // why it has run since then

	Detaching        bool           // a Detach that resumes is in flight
	failedAt         scheduler.Time // of a resume that waits for its retry
	waitsForRetry    bool
	quarantinedUntil scheduler.Time
	// resetUntil is the end of a quarantine because of a reset, doubted are the GPUs that raised an
	// alarm during the Suspend in flight.
	resetUntil scheduler.Time
	doubted    []gpreempt.GPUID
	pin        scheduler.Cause
	pinUntil   scheduler.Time

	awaySince scheduler.Time
	ranSince  scheduler.Time
	// calmAt is as that of the Observer, for the members of a job; alone is when the job changed.
	calmAt, alone scheduler.Time
	forced        bool           // max_suspend or the share floor ended this stretch
	runsUntil     scheduler.Time // because it was forced

	refusals    int            // results that say that it resists, RefusalTime apart
	refusedAt   scheduler.Time // the last of these
	killed      bool
	leased      bool           // a lease justified it after the last step
	lingerUntil scheduler.Time // latest end of the linger
	capUntil    scheduler.Time // latest end of what the share cap asks for, once it does
	shadow      bool           // reported as suspended
}

type seenLease struct {
	scheduler.LeaseRequested
	state    scheduler.LeaseState
	created  scheduler.Time
	expires  scheduler.Time
	live     bool
	answered bool

	sawWork, idle bool
	idleSince     scheduler.Time
}

// NewObserver returns an observer of a new core with a policy.
func NewObserver(p scheduler.Policy) *Observer {
	return &Observer{
		policy: p, Targets: map[gpreempt.ProcessKey]*seenTarget{}, sessions: map[gpreempt.ProcessKey]*seenSession{}, leases: map[scheduler.LeaseID]*seenLease{},
		owners:  map[scheduler.ClientID]gpreempt.ProcessKey{},
		breaker: map[gpreempt.GPUID]scheduler.Time{}, shown: map[gpreempt.GPUID]bool{},
		reset: map[gpreempt.GPUID]bool{}, jobs: seenJobs{},
		ends: map[scheduler.LeaseID]scheduler.LeaseEnd{}, left: map[gpreempt.ProcessKey]bool{}, answers: map[scheduler.LeaseID]scheduler.Answer{}, Counts: Counts{},
	}
}

// Watch takes in one step of the core and says what was wrong with it.
func (o *Observer) Watch(now scheduler.Time, ev scheduler.Event, actions []scheduler.Action) error {
	o.now = max(o.now, now)
	o.Counts["Steps"]++
	clear(o.ends)
	clear(o.left)
	clear(o.answers)
	clear(o.reset)
	o.passTime()
	o.takeEvent(ev)
	for i, a := range actions {
		if err := o.takeAction(a, actions[:i]); err != nil {
			return fmt.Errorf("at %v, after %T: action %d, %q: %w", o.now, ev, i, a, err)
		}
	}
	o.jobs.watch(o)
	for _, err := range []error{o.checkEnds(), o.checkTargets(), o.checkSessions(), o.checkLeases(), o.checkBreakers()} {
		if err != nil {
			return fmt.Errorf("at %v, after %T: %w", o.now, ev, err)
		}
	}
	return nil
}

// passTime notices what is due before the event counts.
func (o *Observer) passTime() {
	for _, t := range o.Targets {
		switch flying := t.Flight != 0 || t.Detaching; {
		case flying && t.asked != 0 && o.overslept(t.askedAt+scheduler.InspectTime):
			t.askedAt = o.now
		case flying && t.asked != 0 && o.now >= t.askedAt+scheduler.InspectTime:
			o.takeInspected(t, false)
		case o.overdue(t) && o.overslept(t.askAt):
			t.askAt = o.now + scheduler.StuckAfter
		}
		t.due = o.overdue(t)
	}
	for _, s := range o.sessions {
		switch {
		case s.asked != 0 && o.overslept(s.askedAt+scheduler.InspectTime):
			s.askedAt = o.now
		case s.asked != 0 && o.now >= s.askedAt+scheduler.InspectTime:
			s.asked, s.askAt = 0, math.MaxInt64
		case s.lateAttach(o.now) && o.overslept(s.askAt):
			s.askAt = o.now + scheduler.StuckAfter
		}
		s.ask = s.lateAttach(o.now)
	}
	for id, l := range o.leases {
		if l.live && o.now >= l.expires {
			o.endLease(id, scheduler.EndExpired)
			o.Counts["Expired"]++
		}
	}
}

// overslept reports whether the daemon did not run when the timer was due: see scheduler.InspectTime.
func (o *Observer) overslept(due scheduler.Time) bool {
	if o.now <= due+scheduler.InspectTime {
		return false
	}
	o.Counts["Overslept"]++
	return true
}

func (o *Observer) endLease(id scheduler.LeaseID, end scheduler.LeaseEnd) {
	o.leases[id].live = false
	o.ends[id] = end
	o.Counts["Ended"]++
}

// held reports whether an admin has the target run.
func (o *Observer) held(t *seenTarget) bool {
	return t.pin == scheduler.CauseHold && o.now < t.pinUntil
}

// pinned reports whether a pin has the job of a target suspended.
func (o *Observer) pinned(t *seenTarget, cause scheduler.Cause) bool {
	return slices.ContainsFunc(o.job(t), func(m *seenTarget) bool { return m.pin == cause && o.now < m.pinUntil })
}

func (o *Observer) takePin(ev scheduler.Pin) {
	t, byAdmin := o.Targets[ev.Target], ev.Cause == scheduler.CauseHold || ev.Cause == scheduler.CauseByHand
	switch {
	case t == nil, !byAdmin && (t.pin == scheduler.CauseHold || t.pin == scheduler.CauseByHand) && o.now < t.pinUntil:
		return
	case ev.Cause == scheduler.CauseHold:
		t.quarantinedUntil = o.now
		o.calmJob(t.Job, o.now+ev.For)
	case o.held(t):
		o.calmJob(t.Job, o.now+o.policy.MinRun)
	}
	t.pin, t.pinUntil = ev.Cause, o.now+ev.For
}

func (o *Observer) targetLeft(key gpreempt.ProcessKey) {
	if o.Targets[key] == nil {
		return
	}
	o.regrouped(o.Targets[key], scheduler.TargetSeen{})
	o.left[key] = true
	o.calmJob(o.Targets[key].Job, o.now+o.policy.MinRun)
}

func (o *Observer) takeEvent(ev scheduler.Event) {
	switch ev := ev.(type) {
	case scheduler.TargetSeen:
		t := o.Targets[ev.Target]
		if t == nil {
			t = &seenTarget{state: scheduler.TargetNone, ranSince: o.now}
			o.Targets[ev.Target] = t
		}
		before := t.TargetSeen
		if ev.Queues != before.Queues && !o.session(ev.Target).births && (t.state == scheduler.TargetSuspending || t.state == scheduler.TargetSuspended) {
			t.again = scheduler.CauseNewQueue
		}
		if !t.hadQueues && ev.Queues > 0 {
			t.hadQueues, t.queuesSince = true, o.now
		}
		o.regrouped(t, ev)
		o.calmJob(t.Job, o.now+o.policy.MinRun)
		t.TargetSeen = ev
		o.regrouped(t, before)
		if before.Job != ev.Job || before.Class != ev.Class {
			t.alone = o.now
		}
		o.calmJob(t.Job, max(o.now+o.policy.MinRun, t.pinUntil))
	case scheduler.TargetGone:
		o.targetLeft(ev.Target)
	case scheduler.LeaseRequested:
		if l := o.leases[ev.Lease]; l != nil && l.live {
			return
		}
		if o.owners[ev.Client].IsZero() && !ev.Client.IsAdmin() && !ev.Owner.IsZero() {
			o.changeOwner(ev.Client, ev.Owner)
		}
		o.leases[ev.Lease] = &seenLease{
			LeaseRequested: ev, created: o.now, expires: o.now + ev.TTL, live: true,
		}
	case scheduler.LeaseRenewed:
		if l := o.leases[ev.Lease]; l != nil && l.live {
			l.expires = o.now + ev.TTL
		}
	case scheduler.LeaseFinished:
		if l := o.leases[ev.Lease]; l != nil && l.live {
			o.endLease(ev.Lease, ev.End)
		}
	case scheduler.ClientGone:
		for id, l := range o.leases {
			if l.live && l.Client == ev.Client {
				o.endLease(id, ev.End)
			}
		}
		o.changeOwner(ev.Client, gpreempt.ProcessKey{})
	case scheduler.ClientBacklog:
		o.takeBacklog(ev)
	case scheduler.Attached:
		o.takeAttached(ev)
	case scheduler.Detached:
		o.takeDetached(ev)
	case scheduler.Lost:
		if s := o.session(ev.Target); s.attached && s.flight == scheduler.ActRecord {
			s.failed = true
			o.takeRefusal(o.Targets[ev.Target], s, ev.Result)
			o.openBreakers(o.Targets[ev.Target], ev.Result, ev.FailedGPUs)
			o.Counts["Lost"]++
		}
	case scheduler.Running:
		t := o.Targets[ev.Target]
		switch {
		case t == nil:
		case ev.Suspended > 0:
			o.Counts["Births"]++
		case t.state == scheduler.TargetSuspending || t.state == scheduler.TargetSuspended:
			t.again = ev.Cause
			o.Counts[map[bool]string{true: "Births", false: "Reruns"}[ev.Cause == scheduler.CauseNewQueue]]++
		}
	case scheduler.Stopped:
		o.stopped = true
	case scheduler.Suspended:
		o.takeResult(ev.Target, scheduler.ActSuspend, ev.Seq, ev.Result, ev.FailedGPUs)
	case scheduler.Resumed:
		o.takeResult(ev.Target, scheduler.ActResume, ev.Seq, ev.Result, ev.FailedGPUs)
	case scheduler.Inspected:
		if t := o.Targets[ev.Target]; t != nil && (t.Flight != 0 || t.Detaching) && t.asked != 0 && t.asked == ev.Seq {
			o.takeInspected(t, ev.Stuck)
		}
		o.takeAttachInspected(ev)
	case scheduler.Alarm:
		for id := range o.shown {
			if ev.GPU == 0 || ev.GPU == id {
				o.takeAlarm(id)
				if ev.Unmap {
					o.reset[id] = true
				}
			}
		}
	case scheduler.QueueReset:
		o.takeAlarm(ev.GPU)
		o.reset[ev.GPU] = true
		for _, key := range ev.Suspects {
			if t := o.Targets[key]; t != nil && t.Class == gpreempt.Offline {
				t.quarantinedUntil, t.resetUntil = o.now+scheduler.QuarantineTime, o.now+scheduler.QuarantineTime
			}
		}
		o.Counts["Resets"]++
	case scheduler.GPUAdded:
		if _, known := o.shown[ev.GPU]; !known {
			o.shown[ev.GPU] = false
		}
	case scheduler.Pin:
		o.takePin(ev)
	case scheduler.PolicyChanged:
		o.takePolicy(ev.Policy)
	case scheduler.Drain:
		if o.draining != ev.On {
			o.draining = ev.On
			o.Counts["Drains"]++
		}
	}
}

func (o *Observer) takeBacklog(ev scheduler.ClientBacklog) {
	for id, l := range o.leases {
		switch {
		case !l.live || l.Client != ev.Client || !l.OnIdle:
		case ev.Busy:
			l.sawWork, l.idle = true, false
		case !l.sawWork:
		case !l.idle:
			l.idle, l.idleSince = true, o.now
		case o.now >= l.idleSince+scheduler.IdleGrace:
			o.endLease(id, scheduler.EndIdle)
			o.Counts["Idle"]++
		}
	}
}

func (o *Observer) takeAlarm(id gpreempt.GPUID) {
	o.breaker[id] = o.now + scheduler.BreakerTime
	for _, t := range o.Targets {
		if t.Flight != 0 && t.kind == scheduler.ActSuspend && slices.Contains(t.GPUs, id) {
			t.doubted = append(t.doubted, id)
			o.Counts["Doubted"]++
		}
	}
}

func (o *Observer) takeResult(key gpreempt.ProcessKey, kind scheduler.ActionKind, seq uint64, result scheduler.Cause, gpus []gpreempt.GPUID) {
	t := o.Targets[key]
	if t == nil {
		o.openBreakers(nil, result, gpus)
		return
	}
	if t.Flight == 0 || t.Flight != seq || t.kind != kind {
		return
	}
	t.Flight = 0
	if doubted := t.doubted; kind == scheduler.ActSuspend && result == "" && len(doubted) > 0 {
		o.Counts["Disbelieved"]++
		until := t.quarantinedUntil
		o.takeOutcome(t, kind, scheduler.CauseHardware, doubted)
		if until > o.now && until == t.resetUntil {
			t.quarantinedUntil = until
		}
		return
	}
	o.takeOutcome(t, kind, result, gpus)
}

func (o *Observer) takeOutcome(t *seenTarget, kind scheduler.ActionKind, result scheduler.Cause, gpus []gpreempt.GPUID) {
	switch result {
	case "":
		if kind == scheduler.ActSuspend {
			t.refusals = 0
		}
		return
	case scheduler.CauseGone:
		o.targetLeft(t.Target)
		return
	case scheduler.CauseReplaced:
		o.Counts["Replaced"]++
	case gpreempt.ReasonResisted:
		o.Counts["Failures"]++
		if t.OnResist == (gpreempt.Resistance{}) {
			t.quarantinedUntil = o.now + scheduler.QuarantineTime
		}
	default:
		o.Counts["Failures"]++
		t.quarantinedUntil = o.now + scheduler.QuarantineTime
		o.openBreakers(t, result, gpus)
	}
	o.session(t.Target).failed = true
	o.takeRefusal(t, o.session(t.Target), result)
	if kind != scheduler.ActSuspend {
		t.waitsForRetry, t.failedAt = true, o.now
	}
}

func (o *Observer) openBreakers(t *seenTarget, result scheduler.Cause, gpus []gpreempt.GPUID) {
	if result != scheduler.CauseHardware {
		return
	}
	if len(gpus) == 0 && t != nil {
		gpus = t.GPUs
	}
	for _, id := range gpus {
		o.breaker[id] = o.now + scheduler.BreakerTime
	}
}

func (o *Observer) takePolicy(p scheduler.Policy) {
	old := o.policy
	o.policy = p
	o.calmAt = max(o.calmAt, o.now+old.MinRun, o.now+p.MinRun)
	for _, t := range o.Targets {
		o.calmAt = max(o.calmAt, t.pinUntil)
		t.lingerUntil = min(t.lingerUntil, o.now+longestLinger(p))
		if t.capUntil > 0 {
			t.capUntil = o.now + longestCap(p)
		}
		if !p.Shadow {
			t.shadow = false
		}
	}
}

func longestLinger(p scheduler.Policy) time.Duration {
	if p.Linger == scheduler.LingerLearned {
		return scheduler.LongestLearned
	}
	return p.Linger
}

// recorded reports whether one of the records before an answer says it was given.
func (o *Observer) recorded(a scheduler.Action, before []scheduler.Action) bool {
	if a.Answer.Reason == scheduler.CauseEnded {
		return true // the end says it
	}
	return slices.ContainsFunc(before, func(b scheduler.Action) bool {
		r := b.Record
		if b.Kind != scheduler.ActRecord || r.Kind != scheduler.RecordLease || r.Lease != a.Lease {
			return false
		}
		if a.Answer.Quiesced {
			return r.ToLease == scheduler.LeaseHeld
		}
		return r.FromLease == r.ToLease && r.Cause == scheduler.Cause(string(a.Answer.Reason)) && r.Took == a.Answer.Waited
	})
}
