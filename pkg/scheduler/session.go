package scheduler

import (
	"cmp"
	"slices"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// session is what the core knows of the session of a mechanism with a process. It outlives its
// target until it is released.
type session struct {
	attached bool
	flight   flight
	// failure is why the session can no longer suspend, or why it could not be released:
	// it is detached. "" while nothing failed.
	failure Cause
	// refusal is why the last Attach or session failed; "" when it did not, and for
	// a new program.
	refusal Cause
	// reportsBirths: the mechanism posts Running for a new queue; otherwise TargetSeen counts them.
	reportsBirths bool
	// retryAt is when the next Attach or Detach may be sent: after sessions that failed
	// and after releases that failed.
	retryAt           Time
	sessions, release Backoff
}

// flight is the action that has not come back; ActRecord for none.
type flight struct {
	kind ActionKind
	// seq is the number of a Suspend or Resume.
	seq uint64
	// asked: a lease or an admin asked to suspend the target when it was sent.
	asked bool
	// due is when to ask what it waits for, or, while inspection is the number of an Inspect in
	// flight, until when to wait for the answer.
	due        Time
	inspection uint64
	// late: by an Inspect it has taken longer than StuckAfter; stuck: because of the target itself.
	late, stuck bool
	// doubted are the GPUs that raised an alarm during a Suspend.
	doubted []gpreempt.GPUID
}

// is reports whether an action of a kind is in flight.
func (f *flight) is(kind ActionKind) bool { return f.kind == kind }

// ready reports whether a mechanism can suspend the target.
func (t *target) ready() bool {
	return t.attached && t.failure == "" && !t.flight.is(ActDetach)
}

// find returns a target, or one that has left and whose session is not released.
func (c *Core) find(key gpreempt.ProcessKey) *target {
	if t := c.targets[key]; t != nil {
		return t
	}
	return c.leaving[key]
}

// mayAttach reports whether the target may have a mechanism attached.
func (c *Core) mayAttach(t *target) bool {
	return t.state != TargetLeft && t.Class == gpreempt.Offline && !c.policy.Shadow && !c.stopping
}

// attachDue returns since when the target is to have a mechanism attached, if it may: at
// once when a lease asks for its job, or the share cap. Attaching and detaching interrupt every process on
// every GPU that the target can see, so that a process that ends before is left alone, unless
// it is not trusted to be there to be suspended later.
func (c *Core) attachDue(t *target) Time {
	switch {
	case c.policy.AttachAfter == 0 || t.job.covered(), t.OnResist.Enforced(), c.usedUp(t.job):
		return c.now
	case !t.hadQueues:
		return Never
	}
	return t.queuesSince + c.policy.AttachAfter
}

// settleTarget sends the Attach or Detach that is missing, and arms the timer. A target that is
// away is resumed first.
func (c *Core) settleTarget(t *target) {
	due := Never
	switch {
	case !t.flight.is(ActRecord):
		due = t.flight.due
	case t.state == TargetResuming:
		due = t.resumeAt
	case !t.attached && c.mayAttach(t):
		if due = max(t.retryAt, c.attachDue(t)); due <= c.now {
			due = c.send(t, ActAttach, c.now+StuckAfter)
		}
	case !t.attached && t.state == TargetLeft:
		delete(c.leaving, t.Target)
	case t.attached && (t.failure != "" || !c.mayAttach(t)) && !t.isAway():
		if due = t.retryAt; due <= c.now {
			due = c.send(t, ActDetach, Never)
		}
	}
	if t.state == TargetQuarantined {
		due = min(due, t.quarantinedUntil)
	}
	c.timers.set(&t.timer, due)
}

// send sends an action, and returns when to ask what it waits for.
func (c *Core) send(t *target, kind ActionKind, due Time) Time {
	t.flight = flight{kind: kind, due: due}
	a := c.emit(kind)
	a.Target = t.Target
	switch kind {
	case ActAttach:
		t.flight.asked = c.asked(t.job)
	case ActSuspend, ActResume:
		c.seq++
		t.flight.seq, a.Seq = c.seq, c.seq
	default:
	}
	return due
}

func (t *target) fire(c *Core) {
	c.markTarget(t)
	f := &t.flight
	if c.now >= f.due && !f.is(ActRecord) {
		switch overslept := c.now-f.due > InspectTime; {
		case f.inspection != 0 && overslept:
			f.due = c.now + InspectTime
		case f.inspection != 0:
			c.inspected(t, false)
		case overslept:
			f.due = c.now + StuckAfter
		default:
			c.seq++
			f.inspection, f.due = c.seq, c.now+InspectTime
			a := c.emit(ActInspect)
			a.Target, a.Seq = t.Target, c.seq
		}
	}
	switch {
	case t.state == TargetResuming && f.is(ActRecord) && c.now >= t.resumeAt:
		c.resumeTarget(t, CauseRetry)
	case t.state == TargetQuarantined && c.now >= t.quarantinedUntil:
		c.setTargetState(t, TargetRunning, CauseQuarantineOver, 0, 0)
		c.mark(t.job)
	}
}

// inspected takes in what an action waits for that has taken too long. While it is the
// target itself (a job that has the driver pin host memory holds its lock for seconds),
// nothing is known against a GPU, and the core asks again. An Attach suspends nothing: it opens no
// breaker, and leases do not wait for it any longer.
func (c *Core) inspected(t *target, stuck bool) {
	f := &t.flight
	first := stuck && !f.stuck
	f.inspection, f.late, f.stuck, f.due = 0, true, stuck, Never
	if stuck {
		f.due = c.now + StuckAfter
	}
	c.markTarget(t)
	switch {
	case f.is(ActAttach):
	case stuck:
		c.quarantineStuck(t)
		if first {
			c.record(Record{Kind: RecordTarget, Target: t.Target, FromTarget: t.state, ToTarget: t.state, Class: t.Class, Cause: CauseStuck, Took: c.now - t.since})
		}
	default:
		for _, id := range t.GPUs {
			c.openBreaker(c.gpu(id), CauseHung)
		}
	}
	if t.state != TargetLeft {
		c.mark(t.job)
	}
}

// markUnattached has settle look at the members of a job that nothing is attached to: what asks
// for them has changed.
func (c *Core) markUnattached(j *job) {
	for _, m := range j.members {
		if !m.attached {
			c.markTarget(m)
		}
	}
}

// done takes in the result of an action, births that of an Attach.
func (c *Core) done(kind ActionKind, ev Suspended, births bool) {
	t := c.find(ev.Target)
	if t == nil || !t.flight.is(kind) || t.flight.seq != ev.Seq {
		if t == nil || t.state == TargetLeft {
			c.openBreakers(ev.Result, ev.FailedGPUs, nil) // the process has left, the GPUs have not
		}
		return // the result of an action that was replaced
	}
	f := t.flight
	t.flight = flight{}
	c.markTarget(t)
	if t.state != TargetLeft {
		c.charge(t.job)
		c.mark(t.job)
	}
	switch kind {
	case ActAttach:
		c.attach(t, f.asked, ev, births)
	case ActDetach:
		c.detach(t, ev)
	case ActSuspend:
		c.suspended(t, &f, ev)
	default:
		c.resumed(t, ev, !f.late)
	}
}

func (c *Core) attach(t *target, asked bool, ev Suspended, births bool) {
	t.refusal = refusalBy(ev.Result)
	if ev.Result == "" {
		t.attached, t.failure, t.reportsBirths = true, "", births
		return
	}
	c.openBreakers(ev.Result, ev.FailedGPUs, t)
	t.retryAt = t.sessions.Fail(c.now, RetryAction)
	if ev.Result == gpreempt.ReasonResisted && asked && t.state != TargetLeft && !c.mayNot(t.job) {
		c.refused(t)
	}
}

// detach takes in the result of a Detach, which resumes as well: for a target in
// Resuming it is the result of that.
func (c *Core) detach(t *target, ev Suspended) {
	c.openBreakers(ev.Result, ev.FailedGPUs, t)
	if ev.Result == "" || ev.Result == CauseGone {
		if t.failure != "" {
			t.retryAt = t.sessions.Fail(c.now, RetryAction)
		}
		t.attached, t.reportsBirths, t.release, t.failure = false, false, Backoff{}, ""
	} else {
		t.failure, t.refusal = ev.Result, cmp.Or(refusalBy(ev.Result), gpreempt.ReasonCannotSuspend)
		t.retryAt = t.release.Fail(c.now, RetryAction)
	}
	if t.state == TargetResuming {
		c.resumed(t, ev, false)
	}
}

// sessionLost handles a session that ended by itself. The queues that it had suspended
// run, or the Detach that follows resumes them.
func (c *Core) sessionLost(ev Lost) {
	t := c.find(ev.Target)
	if t == nil || !t.attached || t.flight.is(ActDetach) {
		return
	}
	c.openBreakers(ev.Result, ev.FailedGPUs, t)
	c.failSession(t, ev.Result)
	if ev.Result == gpreempt.ReasonResisted && t.state != TargetLeft && c.asked(t.job) {
		c.refused(t)
	}
}

// failSession ends the use of a session that failed.
func (c *Core) failSession(t *target, failure Cause) {
	t.failure, t.refusal = failure, refusalBy(failure)
	c.markTarget(t)
	if t.state != TargetLeft {
		c.mark(t.job)
	}
}

// openBreakers opens the breakers of the GPUs that reported an error; those of the
// target when it is not known which they are.
func (c *Core) openBreakers(result Cause, gpus []gpreempt.GPUID, t *target) {
	if result != CauseHardware {
		return
	}
	if len(gpus) == 0 && t != nil && t.state != TargetLeft {
		gpus = t.GPUs
	}
	for _, id := range gpus {
		c.openBreaker(c.gpu(id), CauseHardware)
	}
}

// alarm opens a breaker, and has the suspends fail that are in flight on the GPU. For CauseReset,
// the announcements that wait for the GPU are answered.
func (c *Core) alarm(u *gpu, cause Cause) {
	for _, j := range u.jobs {
		for _, t := range j.members {
			if t.flight.is(ActSuspend) && slices.Contains(t.GPUs, u.id) && !slices.Contains(t.flight.doubted, u.id) {
				t.flight.doubted = append(t.flight.doubted, u.id)
			}
		}
	}
	for _, l := range c.pending {
		l.reset = l.reset || cause == CauseReset && l.started && !l.answered && slices.Contains(l.gpus, u)
	}
	c.openBreaker(u, cause)
}

func (c *Core) queueReset(ev QueueReset) {
	r := Record{Kind: RecordReset, GPU: ev.GPU, Target: ev.Process, Suspects: len(ev.Suspects)}
	if t := c.targets[ev.Process]; t != nil {
		r.Class = t.Class
	}
	c.record(r)
	c.alarm(c.gpu(ev.GPU), CauseReset)
	for _, key := range ev.Suspects {
		t := c.targets[key]
		if t == nil || t.Class != gpreempt.Offline {
			continue
		}
		c.quarantine(t, CauseReset)
		if t.state == TargetRunning {
			c.setTargetState(t, TargetQuarantined, CauseReset, 0, 0)
		}
		c.markTarget(t)
		c.mark(t.job)
	}
}
