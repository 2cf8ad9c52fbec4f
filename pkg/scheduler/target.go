package scheduler

import (
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// target is a process that owns queues.
type target struct {
	key        gpreempt.ProcessKey
	jobName    string // of the last TargetSeen
	kin        []gpreempt.ProcessKey
	onResist   gpreempt.Resistance
	job        *job // nil unless it is offline and has a name of a job
	class      gpreempt.Class
	priority   gpreempt.Priority
	gpus       []gpreempt.GPUID
	gang       *gang
	attachment *attachment

	state TargetState
	since Time
	// seq is the number of the Suspend or Resume in flight; 0 for a Detach that resumes.
	seq uint64
	// queuesSince is when it was first seen with a queue, if hadQueues.
	queuesSince Time
	hadQueues   bool
	// again is why it runs although it was suspended; "" while that is not known.
	again Cause
	// queues is the number of queues that were ever born, by TargetSeen and Running;
	// suspendedQueues is what it was when the last Suspend was sent.
	queues, suspendedQueues uint64

	// load, busy and idleSince are from the last TargetLoad, if loaded.
	load      []GPUQueues
	loaded    bool
	busy      bool
	idleSince Time

	quarantinedUntil Time
	quarantineCause  Cause
	holdUntil        Time // an admin keeps it running
	retryAt          Time
	backoff          Backoff
	retrying         bool // a resume failed and waits for retryAt
	shadowed         bool // reported as suspended under a shadow policy
	timer            timer

	// inspection is the number of the Inspect in flight, 0 for none.
	inspection uint64
	// stuck: the action in flight waits for the target itself, by the last Inspect; hung:
	// it has opened the breakers.
	stuck, hung bool
	// doubted are the GPUs that raised an alarm during the Suspend in flight.
	doubted []gpreempt.GPUID

	suspend, resume estimate
	suspends        uint64
	awaySince       Time
	away            time.Duration // total time not running, up to awaySince
	orders          []*lease      // live leases that name it, oldest first

	// refusals counts the suspensions that it has refused since the last that worked, at
	// most one in refusalTime; the last was at refusedAt.
	refusals  int
	refusedAt Time
	killed    bool // its Kill was sent
}

// ready reports whether a mechanism can suspend the target.
func (t *target) ready() bool {
	return t.attachment.state == attached && t.attachment.failure == OutcomeOK
}

func (t *target) isAway() bool {
	return t.state == TargetSuspending || t.state == TargetSuspended || t.state == TargetResuming
}

func (t *target) unready() bool { return !t.ready() }

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
		t.attachment = c.attachmentOf(t)
		c.markAttachment(t.attachment)
		c.setTargetState(t, TargetRunning, CauseSeen, 0, 0)
		c.joinGang(t)
		return
	}
	t.kin = ev.Kin
	if t.onResist != ev.OnResist {
		t.onResist = ev.OnResist
		c.markAttachment(t.attachment)
	}
	regang := t.jobName != ev.Job || t.class != ev.Class || t.priority != ev.Priority || !slices.Equal(t.gpus, ev.GPUs) ||
		!slices.Equal(t.gang.owners, c.ownersOf(t))
	queues := ev.Queues
	if t.attachment.reportsBirths {
		queues = t.queues
	}
	if !regang && t.queues == queues {
		return
	}
	if queues > t.queues {
		c.active(t)
	}
	if regang {
		c.leaveGang(t)
	}
	reclassified := t.class != ev.Class || t.priority != ev.Priority
	t.jobName, t.class, t.priority, t.gpus, t.queues = ev.Job, ev.Class, ev.Priority, ev.GPUs, queues
	c.noteQueues(t)
	c.markAttachment(t.attachment)
	if reclassified {
		c.record(Record{Kind: RecordTarget, Target: t.key, FromTarget: t.state, ToTarget: t.state, Class: t.class, Cause: CauseClass})
	}
	if regang {
		c.joinGang(t)
	}
	c.mark(t.gang)
}

func (c *Core) noteQueues(t *target) {
	if !t.hadQueues && t.queues > 0 {
		t.queuesSince, t.hadQueues = c.now, true
	}
}

func (c *Core) targetGone(t *target) {
	for len(t.orders) > 0 {
		c.endLease(t.orders[0], EndReleased)
	}
	c.setTargetState(t, TargetLeft, CauseGone, 0, 0)
	c.leaveGang(t)
	c.leaveJob(t)
	c.timers.clear(&t.timer)
	t.attachment.target = nil
	c.markAttachment(t.attachment)
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
	t.inspection, t.stuck, t.hung, t.doubted = 0, false, false, nil
	switch away := t.isAway(); {
	case away && !wasAway:
		t.awaySince = c.now
		t.job.moved(c.now, 1)
	case !away && wasAway:
		t.away += c.now - t.awaySince
		t.job.moved(c.now, -1)
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
	c.send(t, ActSuspend)
}

// resumeTarget sends a Resume. A session that has failed is detached instead, which
// resumes as well and may work where Resume does not.
func (c *Core) resumeTarget(t *target, cause Cause) {
	c.setTargetState(t, TargetResuming, cause, 0, 0)
	if a := t.attachment; c.mustDetach(a) && a.failure != OutcomeOK {
		a.state = detaching
		t.seq, t.retrying = 0, false
		c.emit(ActDetach).Target = t.key
		c.setTargetTimer(t)
		return
	}
	c.send(t, ActResume)
}

func (c *Core) send(t *target, kind ActionKind) {
	c.seq++
	t.seq, t.retrying = c.seq, false
	a := c.emit(kind)
	a.Target, a.Seq = t.key, t.seq
	c.setTargetTimer(t)
}

// setTargetTimer sets the timer of a target: to when its action takes too long, to the
// retry of a resume, or to the end of its quarantine.
func (c *Core) setTargetTimer(t *target) {
	switch {
	case t.retrying:
		c.timers.set(&t.timer, t.retryAt)
	case (t.state == TargetSuspending || t.state == TargetResuming) && !t.hung:
		c.timers.set(&t.timer, c.now+StuckAfter)
	case t.state == TargetQuarantined:
		c.timers.set(&t.timer, t.quarantinedUntil)
	default:
		c.timers.clear(&t.timer)
	}
}

func (t *target) fire(c *Core) {
	switch {
	case t.retrying:
		c.resumeTarget(t, CauseRetry)
	case t.inspection != 0 && t.timer.overslept(c.now):
		c.timers.set(&t.timer, c.now+InspectTime)
	case t.inspection != 0:
		c.inspected(t, false)
	case (t.state == TargetSuspending || t.state == TargetResuming) && t.timer.overslept(c.now):
		c.timers.set(&t.timer, c.now+StuckAfter)
	case t.state == TargetSuspending || t.state == TargetResuming:
		t.inspection = c.inspect(t.key)
		c.timers.set(&t.timer, c.now+InspectTime)
	case t.state == TargetQuarantined:
		c.setTargetState(t, TargetRunning, CauseQuarantineOver, 0, 0)
		c.mark(t.gang)
	}
}

// inspected takes in what an action waits for that has taken too long. While it is the
// target itself (a job that has the driver pin host memory holds its lock for seconds),
// nothing is known against a GPU, and the core asks again.
func (c *Core) inspected(t *target, stuck bool) {
	t.inspection = 0
	first := stuck && !t.stuck
	t.stuck, t.hung = stuck, !stuck
	if stuck {
		c.quarantineStuck(t)
		if first {
			c.record(Record{Kind: RecordTarget, Target: t.key, FromTarget: t.state, ToTarget: t.state, Class: t.class, Cause: CauseStuck, Took: c.now - t.since})
		}
		c.mark(t.gang)
	} else {
		for _, id := range t.gpus {
			c.openBreaker(c.gpu(id), CauseHung)
		}
	}
	c.setTargetTimer(t)
}

func (c *Core) suspended(ev Suspended) {
	t := c.targets[ev.Target]
	if t == nil {
		c.openBreakers(ev.Result, ev.FailedGPUs, nil) // the process has left, the GPUs have not
		return
	}
	if t.state != TargetSuspending || t.seq != ev.Seq {
		return // the result of an action that was replaced
	}
	c.charge(t.gang)
	switch ev.Result {
	case OutcomeOK:
		if len(t.doubted) > 0 {
			c.disbelieve(t)
			return
		}
		if !t.stuck && !t.hung {
			t.suspend.learn(ev.Took)
		}
		t.suspends++
		t.refusals = 0
		c.setTargetState(t, TargetSuspended, CauseDone, 0, ev.Took)
		c.setTargetTimer(t)
	case OutcomeGone:
		c.targetGone(t)
		return
	case OutcomeReplaced:
		// What was suspended ended with the program.
		c.failAttachment(t.attachment, ev.Result)
		c.resumeTarget(t, CauseReplaced)
	default:
		if ev.Result == OutcomeResisted && c.asked(t.gang) {
			c.refused(t)
		}
		c.quarantineFailed(t, ev.Result, ev.FailedGPUs)
		c.failAttachment(t.attachment, ev.Result)
		// The mechanism has undone what it could; the Detach makes sure.
		c.resumeTarget(t, failureCause(ev.Result))
	}
	c.mark(t.gang)
}

func (c *Core) resumed(ev Resumed) {
	t := c.targets[ev.Target]
	if t == nil {
		c.openBreakers(ev.Result, ev.FailedGPUs, nil)
		return
	}
	if t.state != TargetResuming || t.retrying || t.seq != ev.Seq || t.seq == 0 {
		return
	}
	if ev.Result == OutcomeOK && !t.stuck && !t.hung {
		t.resume.learn(ev.Took)
	}
	c.resumeResult(t, ev.Result, ev.FailedGPUs, ev.Took)
}

// resumeResult handles the result of a Resume, or of a Detach in its place.
func (c *Core) resumeResult(t *target, result Outcome, gpus []gpreempt.GPUID, took time.Duration) {
	c.charge(t.gang)
	c.markAttachment(t.attachment)
	switch result {
	case OutcomeOK:
		t.backoff = Backoff{}
		to, cause := TargetRunning, CauseDone
		if t.quarantinedUntil > c.now {
			to, cause = TargetQuarantined, t.quarantineCause
		}
		c.setTargetState(t, to, cause, 0, took)
	case OutcomeGone:
		c.targetGone(t)
		return
	default:
		if result != OutcomeReplaced {
			c.quarantineFailed(t, result, gpus)
		}
		c.failAttachment(t.attachment, result)
		t.retrying = true
		t.retryAt = t.backoff.Fail(c.now, RetryAction)
		// It stays in Resuming: it may still be off the GPU.
		c.setTargetState(t, TargetResuming, failureCause(result), 0, took)
	}
	c.setTargetTimer(t)
	c.mark(t.gang)
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

func (c *Core) hold(ev Hold) {
	t := c.targets[ev.Target]
	if t == nil {
		return
	}
	for len(t.orders) > 0 {
		c.endLease(t.orders[0], EndReleased)
	}
	t.quarantinedUntil = c.now
	if t.state == TargetQuarantined {
		c.setTargetState(t, TargetRunning, CauseHold, 0, 0)
		c.setTargetTimer(t)
	}
	c.charge(t.gang)
	t.holdUntil = c.now + ev.For
	c.mark(t.gang)
}
