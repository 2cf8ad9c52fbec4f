package scheduler

import (
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// target is a process that owns queues, and the session of a mechanism with it.
type target struct {
	TargetSeen // the last
	job        *job
	session

	state TargetState
	since Time
	// queuesSince is when it was first seen with a queue, if hadQueues.
	queuesSince Time
	hadQueues   bool
	// again is why it is to be suspended again: it runs although the last Suspend was sent; "" for no reason.
	again Cause

	quarantinedUntil Time
	quarantineCause  Cause
	pin              pin
	// resumeAt is when a resume that failed is tried again.
	resumeAt Time
	resumes  Backoff
	shadowed bool // reported as suspended under a shadow policy
	timer    timer
	// dirty: it is on the list that settle goes through.
	dirty bool

	suspend, resume estimate
	suspends        uint64
	awaySince       Time
	away            time.Duration // total time not running, up to awaySince

	// refusals counts the suspensions that it has refused since the last that worked, at
	// most one in RefusalTime; the last was at refusedAt.
	refusals  int
	refusedAt Time
	killed    bool // its Kill was sent
}

func (t *target) isAway() bool {
	return t.state == TargetSuspending || t.state == TargetSuspended || t.state == TargetResuming
}

// countAway returns 1 if it is away.
func (t *target) countAway() int {
	if t.isAway() {
		return 1
	}
	return 0
}

func (c *Core) markTarget(t *target) {
	if !t.dirty {
		t.dirty = true
		c.dirtyTargets = append(c.dirtyTargets, t)
	}
}

func (c *Core) targetSeen(ev TargetSeen) {
	t := c.targets[ev.Target]
	if t == nil {
		t = &target{TargetSeen: ev, since: c.now}
		t.timer.owner = t
		c.targets[ev.Target] = t
		at, _ := slices.BinarySearchFunc(c.order, ev.Target, byKey)
		c.order = slices.Insert(c.order, at, t)
		if left := c.leaving[ev.Target]; left != nil {
			t.session = left.session
			c.timers.clear(&left.timer)
			delete(c.leaving, ev.Target)
		}
		c.noteQueues(t)
		c.setTargetState(t, TargetRunning, CauseSeen, 0, 0)
		c.join(t)
		return
	}
	old := t.TargetSeen
	t.Kin = ev.Kin
	reclassified := old.Class != ev.Class || old.Priority != ev.Priority
	rejoin := reclassified || old.Job != ev.Job || !slices.Equal(old.GPUs, ev.GPUs) || !slices.Equal(t.job.owners, c.ownersOf(t))
	if rejoin {
		c.leave(t)
	}
	t.TargetSeen = ev
	if old.Queues != ev.Queues && !t.reportsBirths {
		c.runs(t, CauseNewQueue)
	}
	if rejoin || old.Queues != ev.Queues || old.OnResist != ev.OnResist {
		c.noteQueues(t)
	}
	if reclassified {
		c.record(Record{Kind: RecordTarget, Target: t.Target, FromTarget: t.state, ToTarget: t.state, Class: t.Class, Cause: CauseClass})
	}
	if rejoin {
		c.join(t)
	}
}

// noteQueues notes when it is first seen with a queue: something may be attached to it then.
func (c *Core) noteQueues(t *target) {
	if !t.hadQueues && t.Queues > 0 {
		t.queuesSince, t.hadQueues = c.now, true
	}
	c.markTarget(t)
}

// byKey compares a target with a key, for lists that are sorted by it.
func byKey(t *target, key gpreempt.ProcessKey) int { return t.Target.Compare(key) }

func (c *Core) targetGone(t *target) {
	c.setTargetState(t, TargetLeft, CauseGone, 0, 0)
	c.leave(t)
	c.forget(t.job.progress)
	if t.flight.is(ActSuspend) || t.flight.is(ActResume) {
		t.flight = flight{}
	}
	c.leaving[t.Target] = t
	c.markTarget(t)
	delete(c.targets, t.Target)
	if at, ok := slices.BinarySearchFunc(c.order, t.Target, byKey); ok {
		c.order = slices.Delete(c.order, at, at+1)
	}
}

// setTargetState changes the state and leaves the record of it.
func (c *Core) setTargetState(t *target, to TargetState, cause Cause, lease LeaseID, took time.Duration) {
	from, before := t.state, t.countAway()
	t.state, t.since = to, c.now
	if moved := t.countAway() - before; moved != 0 {
		t.job.progress.add(c.now, 0, moved)
		if moved > 0 {
			t.awaySince = c.now
		} else {
			t.away += c.now - t.awaySince
		}
	}
	c.record(Record{Kind: RecordTarget, Target: t.Target, FromTarget: from, ToTarget: to, Class: t.Class, Cause: cause, Lease: lease, Took: took})
}

// runs notes that a queue of the target runs: it is suspended again if it is suspended, or will be.
func (c *Core) runs(t *target, why Cause) {
	if t.state == TargetSuspending || t.state == TargetSuspended {
		t.again = why
	}
	c.mark(t.job)
}

// suspendTarget sends a Suspend, also for queues born since the last one.
func (c *Core) suspendTarget(t *target, cause Cause, lease LeaseID) {
	c.setTargetState(t, TargetSuspending, cause, lease, 0)
	t.again = ""
	c.send(t, ActSuspend, c.now+StuckAfter)
	c.markTarget(t)
}

// resumeTarget sends a Resume. A session that has failed is detached instead, which
// resumes as well and may work where Resume does not.
func (c *Core) resumeTarget(t *target, cause Cause) {
	c.setTargetState(t, TargetResuming, cause, 0, 0)
	kind := ActResume
	if t.attached && t.failure != "" {
		kind = ActDetach
	}
	c.send(t, kind, c.now+StuckAfter)
	c.markTarget(t)
}

func (c *Core) suspended(t *target, f *flight, ev Suspended) {
	switch ev.Result {
	case "":
		if len(f.doubted) > 0 {
			c.disbelieve(t, f.doubted)
			return
		}
		if !f.late {
			t.suspend.learn(ev.Took)
		}
		t.suspends++
		t.refusals = 0
		c.setTargetState(t, TargetSuspended, CauseDone, 0, ev.Took)
	case CauseGone:
		c.targetGone(t)
	case CauseReplaced:
		// What was suspended ended with the program.
		c.failSession(t, ev.Result)
		c.resumeTarget(t, CauseReplaced)
	default:
		if ev.Result == gpreempt.ReasonResisted && c.asked(t.job) {
			c.refused(t)
		}
		c.quarantineFailed(t, ev.Result, ev.FailedGPUs)
		c.failSession(t, ev.Result)
		// The mechanism has undone what it could; the Detach makes sure.
		c.resumeTarget(t, ev.Result)
	}
}

// disbelieve has a suspend fail that the mechanism calls good: its GPUs raised an alarm.
func (c *Core) disbelieve(t *target, gpus []gpreempt.GPUID) {
	cause := CauseReset
	if t.quarantinedUntil <= c.now || t.quarantineCause != CauseReset {
		cause = CauseHardware
		c.quarantine(t, CauseQuarantine)
	}
	c.openBreakers(CauseHardware, gpus, t)
	c.failSession(t, CauseHardware)
	c.resumeTarget(t, cause)
}

// resumed takes in the result of a Resume, or of a Detach in its place; its time is learned if it
// says how long a resume takes.
func (c *Core) resumed(t *target, ev Suspended, learn bool) {
	switch ev.Result {
	case "":
		if learn {
			t.resume.learn(ev.Took)
		}
		t.resumes = Backoff{}
		to, cause := TargetRunning, CauseDone
		if t.quarantinedUntil > c.now {
			to, cause = TargetQuarantined, t.quarantineCause
		}
		c.setTargetState(t, to, cause, 0, ev.Took)
	case CauseGone:
		c.targetGone(t)
	default:
		if ev.Result != CauseReplaced {
			c.quarantineFailed(t, ev.Result, ev.FailedGPUs)
		}
		c.failSession(t, ev.Result)
		t.resumeAt = t.resumes.Fail(c.now, RetryAction)
		// It stays in Resuming: it may still be off the GPU.
		c.setTargetState(t, TargetResuming, ev.Result, 0, ev.Took)
	}
}

func (c *Core) quarantine(t *target, cause Cause) {
	t.quarantinedUntil, t.quarantineCause = c.now+QuarantineTime, cause
}

// quarantineStuck quarantines a target that an action waits for. While a breaker is open, it lasts
// until that closes: when a GPU resets, the driver lets processes wait for the end of the reset
// with their lock held, also those with no queue there (kfd_process_wait_gpu_reset_complete,
// Linux 7.3).
func (c *Core) quarantineStuck(t *target) {
	closes := c.BreakersClose()
	switch {
	case closes <= c.now:
		c.quarantine(t, CauseStuck)
	case closes > t.quarantinedUntil:
		t.quarantinedUntil, t.quarantineCause = closes, CauseStuck
	}
}

func (c *Core) quarantineFailed(t *target, o Cause, gpus []gpreempt.GPUID) {
	if o != gpreempt.ReasonResisted || !t.OnResist.Enforced() {
		c.quarantine(t, CauseQuarantine)
	}
	c.openBreakers(o, gpus, t)
}
