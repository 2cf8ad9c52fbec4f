package scheduler

import (
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// target is a process that owns queues, and the session of a mechanism with it.
type target struct {
	key      gpreempt.ProcessKey
	jobName  string // of the last TargetSeen
	kin      []gpreempt.ProcessKey
	onResist gpreempt.Resistance
	class    gpreempt.Class
	priority gpreempt.Priority
	gpus     []gpreempt.GPUID
	job      *job
	session

	state TargetState
	since Time
	// queuesSince is when it was first seen with a queue, if hadQueues.
	queuesSince Time
	hadQueues   bool
	// again is why it runs although it was suspended; "" while that is not known.
	again Cause
	// queues is the number of queues that were ever born, by TargetSeen and Running;
	// suspendedQueues is what it was when the last Suspend was sent.
	queues, suspendedQueues uint64

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

func (c *Core) markTarget(t *target) {
	if !t.dirty {
		t.dirty = true
		c.dirtyTargets = append(c.dirtyTargets, t)
	}
}

func (c *Core) targetSeen(ev TargetSeen) {
	t := c.targets[ev.Target]
	if t == nil {
		t = &target{key: ev.Target, since: c.now}
		t.timer.owner = t
		c.targets[ev.Target] = t
		at, _ := slices.BinarySearchFunc(c.order, ev.Target, func(t *target, k gpreempt.ProcessKey) int { return t.key.Compare(k) })
		c.order = slices.Insert(c.order, at, t)
		t.jobName, t.class, t.priority, t.gpus, t.kin, t.onResist, t.queues = ev.Job, ev.Class, ev.Priority, ev.GPUs, ev.Kin, ev.OnResist, ev.Queues
		c.noteQueues(t)
		if left := c.leaving[t.key]; left != nil {
			t.session = left.session
			c.timers.clear(&left.timer)
			delete(c.leaving, t.key)
		}
		c.markTarget(t)
		c.setTargetState(t, TargetRunning, CauseSeen, 0, 0)
		c.join(t)
		return
	}
	t.kin = ev.Kin
	if t.onResist != ev.OnResist {
		t.onResist = ev.OnResist
		c.markTarget(t)
	}
	rejoin := t.jobName != ev.Job || t.class != ev.Class || t.priority != ev.Priority || !slices.Equal(t.gpus, ev.GPUs) ||
		!slices.Equal(t.job.owners, c.ownersOf(t))
	queues := ev.Queues
	if t.reportsBirths {
		queues = t.queues
	}
	if !rejoin && t.queues == queues {
		return
	}
	if rejoin {
		c.leave(t)
	}
	reclassified := t.class != ev.Class || t.priority != ev.Priority
	t.jobName, t.class, t.priority, t.gpus, t.queues = ev.Job, ev.Class, ev.Priority, ev.GPUs, queues
	c.noteQueues(t)
	c.markTarget(t)
	if reclassified {
		c.record(Record{Kind: RecordTarget, Target: t.key, FromTarget: t.state, ToTarget: t.state, Class: t.class, Cause: CauseClass})
	}
	if rejoin {
		c.join(t)
	}
	c.mark(t.job)
}

func (c *Core) noteQueues(t *target) {
	if !t.hadQueues && t.queues > 0 {
		t.queuesSince, t.hadQueues = c.now, true
	}
}

func (c *Core) targetGone(t *target) {
	c.setTargetState(t, TargetLeft, CauseGone, 0, 0)
	c.leave(t)
	c.forget(t.job.progress)
	if t.flight.is(ActSuspend) || t.flight.is(ActResume) {
		t.flight = flight{}
	}
	c.leaving[t.key] = t
	c.markTarget(t)
	delete(c.targets, t.key)
	if at, ok := slices.BinarySearchFunc(c.order, t.key, func(t *target, k gpreempt.ProcessKey) int { return t.key.Compare(k) }); ok {
		c.order = slices.Delete(c.order, at, at+1)
	}
}

// setTargetState changes the state and leaves the record of it.
func (c *Core) setTargetState(t *target, to TargetState, cause Cause, lease LeaseID, took time.Duration) {
	from := t.state
	wasAway := t.isAway()
	t.state, t.since = to, c.now
	switch away := t.isAway(); {
	case away && !wasAway:
		t.awaySince = c.now
		t.job.progress.moved(c.now, 1)
	case !away && wasAway:
		t.away += c.now - t.awaySince
		t.job.progress.moved(c.now, -1)
	}
	c.record(Record{Kind: RecordTarget, Target: t.key, FromTarget: from, ToTarget: to, Class: t.class, Cause: cause, Lease: lease, Took: took})
}

// runsAgain returns why a suspended target is to be suspended again, "" if it is not.
func (t *target) runsAgain() Cause {
	if t.queues != t.suspendedQueues {
		return CauseNewQueue
	}
	return t.again
}

// suspendTarget sends a Suspend, also for queues born since the last one.
func (c *Core) suspendTarget(t *target, cause Cause, lease LeaseID) {
	c.setTargetState(t, TargetSuspending, cause, lease, 0)
	t.suspendedQueues, t.again = t.queues, ""
	c.send(t, ActSuspend, c.now+StuckAfter)
	c.markTarget(t)
}

// resumeTarget sends a Resume. A session that has failed is detached instead, which
// resumes as well and may work where Resume does not.
func (c *Core) resumeTarget(t *target, cause Cause) {
	c.setTargetState(t, TargetResuming, cause, 0, 0)
	kind := ActResume
	if t.attached && t.failure != OutcomeOK {
		kind = ActDetach
	}
	c.send(t, kind, c.now+StuckAfter)
	c.markTarget(t)
}

func (c *Core) suspended(t *target, f *flight, ev Suspended) {
	switch ev.Result {
	case OutcomeOK:
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
	case OutcomeGone:
		c.targetGone(t)
	case OutcomeReplaced:
		// What was suspended ended with the program.
		c.failSession(t, ev.Result)
		c.resumeTarget(t, CauseReplaced)
	default:
		if ev.Result == OutcomeResisted && c.asked(t.job) {
			c.refused(t)
		}
		c.quarantineFailed(t, ev.Result, ev.FailedGPUs)
		c.failSession(t, ev.Result)
		// The mechanism has undone what it could; the Detach makes sure.
		c.resumeTarget(t, failureCause(ev.Result))
	}
}

// disbelieve has a suspend fail that the mechanism calls good: its GPUs raised an alarm.
func (c *Core) disbelieve(t *target, gpus []gpreempt.GPUID) {
	cause := CauseReset
	if t.quarantinedUntil <= c.now || t.quarantineCause != CauseReset {
		cause = CauseHardware
		c.quarantine(t, CauseQuarantine)
	}
	c.openBreakers(OutcomeHardware, gpus, t)
	c.failSession(t, OutcomeHardware)
	c.resumeTarget(t, cause)
}

// resumed takes in the result of a Resume, or of a Detach in its place; its time is learned if it
// says how long a resume takes.
func (c *Core) resumed(t *target, ev Suspended, learn bool) {
	switch ev.Result {
	case OutcomeOK:
		if learn {
			t.resume.learn(ev.Took)
		}
		t.resumes = Backoff{}
		to, cause := TargetRunning, CauseDone
		if t.quarantinedUntil > c.now {
			to, cause = TargetQuarantined, t.quarantineCause
		}
		c.setTargetState(t, to, cause, 0, ev.Took)
	case OutcomeGone:
		c.targetGone(t)
	default:
		if ev.Result != OutcomeReplaced {
			c.quarantineFailed(t, ev.Result, ev.FailedGPUs)
		}
		c.failSession(t, ev.Result)
		t.resumeAt = t.resumes.Fail(c.now, RetryAction)
		// It stays in Resuming: it may still be off the GPU.
		c.setTargetState(t, TargetResuming, failureCause(ev.Result), 0, ev.Took)
	}
}

func failureCause(o Outcome) Cause {
	switch o {
	case OutcomeHardware:
		return CauseHardware
	case OutcomeReplaced:
		return CauseReplaced
	default:
		return CauseFailed
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

func (c *Core) quarantineFailed(t *target, o Outcome, gpus []gpreempt.GPUID) {
	if o != OutcomeResisted || !t.onResist.Enforced() {
		c.quarantine(t, CauseQuarantine)
	}
	c.openBreakers(o, gpus, t)
}
