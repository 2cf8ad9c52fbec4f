package scheduler_test

import (
	"errors"
	"fmt"
	"slices"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

func (o *Observer) takeAction(a scheduler.Action, before []scheduler.Action) error {
	switch a.Kind {
	case scheduler.ActRecord:
		return o.takeRecord(a.Record)
	case scheduler.ActAnswer:
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
		o.Counts["Answers"]++
		return nil
	}
	t := o.Targets[a.Target]
	if a.Kind == scheduler.ActAttach || a.Kind == scheduler.ActDetach {
		return o.takeSessionAction(a.Kind, a.Target, t)
	}
	switch a.Kind {
	case scheduler.ActInspect:
		return o.takeInspect(a, t)
	case scheduler.ActKill:
		return o.takeKill(a, t)
	default:
	}
	switch {
	case t == nil:
		return errors.New("an action on an unknown target")
	case t.Flight != 0:
		return fmt.Errorf("rule 4: action %d is still in flight", t.Flight)
	case !o.session(a.Target).attached:
		return errors.New("no mechanism is attached")
	case a.Seq <= o.lastSeq:
		return fmt.Errorf("sequence number %d after %d", a.Seq, o.lastSeq)
	}
	if last := before[len(before)-1]; last.Kind != scheduler.ActRecord || last.Record.Kind != scheduler.RecordTarget || last.Record.Target != a.Target {
		return errors.New("its record does not stand right before it")
	}
	o.lastSeq = a.Seq
	t.Flight, t.kind, t.waitsForRetry, t.doubted = a.Seq, a.Kind, false, nil
	t.begin(o.now)
	if a.Kind == scheduler.ActResume {
		o.Counts["Resumes"]++
		if t.state != scheduler.TargetResuming {
			return fmt.Errorf("resumed in state %v", t.state)
		}
		return nil
	}
	o.Counts["Suspends"]++
	if t.state != scheduler.TargetSuspending {
		return fmt.Errorf("suspended in state %v", t.state)
	}
	t.again = ""
	return o.justified(t, before[len(before)-1].Record)
}

// takeKill checks rule 9.
func (o *Observer) takeKill(a scheduler.Action, t *seenTarget) error {
	o.Counts["Kills"]++
	after := 0
	if t != nil {
		after = t.OnResist.KillAfter
	}
	switch {
	case t == nil || t.Class != gpreempt.Offline:
		return errors.New("rule 9: no offline target is killed")
	case after == 0 || t.refusals < after:
		return fmt.Errorf("rule 9: killed after %d refused suspensions, its Resistance says %d", t.refusals, after)
	case o.draining || o.policy.Shadow || o.held(t):
		return fmt.Errorf("rule 9: killed while draining: %v, by a shadow policy: %v, or held until %v", o.draining, o.policy.Shadow, t.pinUntil)
	case t.killed:
		return errors.New("rule 9: killed twice")
	}
	t.killed = true
	return nil
}

// begin notes an action that begins: when it may be asked for, and that it was not.
func (t *seenTarget) begin(now scheduler.Time) {
	t.sentAt, t.askAt, t.asked, t.hung = now, now+scheduler.StuckAfter, 0, false
}

// overdue reports whether it is time to ask what the action in flight waits for.
func (o *Observer) overdue(t *seenTarget) bool {
	return (t.Flight != 0 || t.Detaching) && !t.hung && t.asked == 0 && o.now >= t.askAt
}

func (o *Observer) takeInspect(a scheduler.Action, t *seenTarget) error {
	if a.Seq <= o.lastSeq {
		return fmt.Errorf("sequence number %d after %d", a.Seq, o.lastSeq)
	}
	o.lastSeq = a.Seq
	s := o.session(a.Target)
	switch {
	case t != nil && t.due && t.asked == 0:
		t.asked, t.askedAt = a.Seq, o.now
	case s.ask && s.asked == 0:
		s.asked, s.askedAt = a.Seq, o.now
	default:
		return errors.New("nothing is overdue")
	}
	return nil
}

// takeInspected notes what the action in flight waits for.
func (o *Observer) takeInspected(t *seenTarget, stuck bool) {
	t.asked = 0
	if stuck {
		t.askAt, t.quarantinedUntil = o.now+scheduler.StuckAfter, max(t.quarantinedUntil, o.stuckUntil())
		o.Counts["Stuck"]++
		return
	}
	t.hung = true
	o.Counts["Hung"]++
	for _, id := range t.GPUs {
		o.breaker[id] = o.now + scheduler.BreakerTime
	}
}

// stuckUntil returns until when a target is quarantined that an action waits for: no longer than a
// breaker is open, if one is.
func (o *Observer) stuckUntil() scheduler.Time {
	var closes scheduler.Time
	for _, until := range o.breaker {
		closes = max(closes, until)
	}
	if closes > o.now {
		return closes
	}
	return o.now + scheduler.QuarantineTime
}

func (o *Observer) takeRecord(r scheduler.Record) error {
	if r.At != o.now {
		return fmt.Errorf("recorded at %v", r.At)
	}
	switch r.Kind {
	case scheduler.RecordTarget:
		return o.takeTargetRecord(r)
	case scheduler.RecordLease:
		l := o.leases[r.Lease]
		switch {
		case l == nil:
			return errors.New("a lease nobody asked for")
		case l.state != r.FromLease:
			return fmt.Errorf("the last record says %v", l.state)
		case r.ToLease == scheduler.LeaseEnded && (r.End == scheduler.EndNone || o.ends[r.Lease] != r.End):
			return fmt.Errorf("it ends by %v", o.ends[r.Lease])
		case r.ToLease == scheduler.LeaseEnded:
			delete(o.ends, r.Lease)
		}
		l.state = r.ToLease
		if r.Cause == scheduler.CauseCoalesced {
			o.Counts["Coalesced"]++
		}
	case scheduler.RecordBreaker:
		if o.shown[r.GPU] == r.On {
			return errors.New("the breaker was so before")
		}
		o.shown[r.GPU] = r.On
		if r.On {
			o.Counts["Breakers"]++
		}
	case scheduler.RecordDrain:
		if r.On != o.draining {
			return errors.New("nobody asked for it")
		}
	case scheduler.RecordShadow:
		t := o.Targets[r.Target]
		if !o.policy.Shadow {
			return errors.New("the policy is no shadow")
		}
		o.Counts["ShadowRecords"]++
		if t.shadow != (r.FromTarget == scheduler.TargetSuspended) {
			return fmt.Errorf("reported suspended before: %v", t.shadow)
		}
		t.shadow = r.ToTarget == scheduler.TargetSuspended
	}
	return nil
}

// moves are the changes of state a target may make.
var moves = map[scheduler.TargetState][]scheduler.TargetState{
	scheduler.TargetNone:        {scheduler.TargetRunning},
	scheduler.TargetRunning:     {scheduler.TargetSuspending, scheduler.TargetQuarantined, scheduler.TargetLeft},
	scheduler.TargetSuspending:  {scheduler.TargetSuspended, scheduler.TargetResuming, scheduler.TargetLeft},
	scheduler.TargetSuspended:   {scheduler.TargetSuspending, scheduler.TargetResuming, scheduler.TargetLeft},
	scheduler.TargetResuming:    {scheduler.TargetRunning, scheduler.TargetQuarantined, scheduler.TargetResuming, scheduler.TargetLeft},
	scheduler.TargetQuarantined: {scheduler.TargetRunning, scheduler.TargetLeft},
}

func (o *Observer) takeTargetRecord(r scheduler.Record) error {
	t := o.Targets[r.Target]
	switch {
	case t == nil:
		return errors.New("a target nobody saw")
	case t.state != r.FromTarget:
		return fmt.Errorf("the last record says %v", t.state)
	case r.Cause == scheduler.CauseClass && r.FromTarget == r.ToTarget: // reclassified
	case (r.Cause == scheduler.CauseKilled || r.Cause == scheduler.CauseNewQueue) && r.FromTarget == r.ToTarget:
		return nil
	case r.Cause == scheduler.CauseStuck && r.FromTarget == r.ToTarget && (t.Flight != 0 || t.Detaching):
		o.Counts["StuckRecords"]++
		return nil
	case !slices.Contains(moves[r.FromTarget], r.ToTarget):
		return errors.New("no such move")
	}
	if l := o.leases[r.Lease]; l != nil && r.Cause == scheduler.CauseLease && o.owns(l, t) {
		return errors.New("its own lease suspends it")
	}
	if r.Cause == scheduler.CauseNewQueue {
		o.Counts["NewQueueSuspends"]++
	}
	if r.Cause == scheduler.CauseRetry {
		o.Counts["Retries"]++
	}
	switch {
	case r.Cause == scheduler.CauseShareCap:
		t.capUntil = o.now + longestCap(o.policy)
	case r.ToTarget == scheduler.TargetResuming:
		t.capUntil = 0
	}
	switch {
	case r.ToTarget == scheduler.TargetLeft:
		if !o.left[r.Target] {
			return errors.New("it did not leave")
		}
		delete(o.left, r.Target)
		delete(o.Targets, r.Target)
	case Away(r.ToTarget) && !Away(t.state):
		t.awaySince = o.now
	case !Away(r.ToTarget) && Away(t.state):
		t.ranSince = o.now
		o.calmJob(t.Job, o.now+o.policy.MinRun)
		if t.forced {
			t.runsUntil, t.forced = o.now+o.policy.MinRun, false
		}
		if r.ToTarget == scheduler.TargetQuarantined {
			o.Counts["Quarantines"]++
		}
	case r.ToTarget == scheduler.TargetResuming && (r.Cause == scheduler.CauseMaxSuspend || r.Cause == scheduler.CauseShareFloor ||
		r.Cause == scheduler.CauseShareCapOver && o.now >= t.awaySince+o.policy.MaxSuspend):
		// In a job, or just out of one, it may pay another's debt.
		t.forced = t.Job == "" && t.awaySince > t.alone
		o.Counts["Forced"]++
	}
	t.state = r.ToTarget
	return nil
}

// calmJob extends calmAt of the members of a job, whose running time is guaranteed because of
// another one in it, also one that leaves it next.
func (o *Observer) calmJob(job string, at scheduler.Time) {
	if job == "" {
		return
	}
	for _, t := range o.Targets {
		if t.Job == job {
			t.calmAt = max(t.calmAt, at)
		}
	}
}
