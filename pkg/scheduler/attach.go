package scheduler

import (
	"math"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// attachState is where the session of a mechanism with a process stands.
type attachState uint8

const (
	// detached ends with an Attach action.
	detached attachState = iota
	// attaching ends with the Attached event.
	attaching
	// attached ends with a Detach action.
	attached
	// detaching ends with the Detached event.
	detaching
)

// attachment is what the core knows of the session of a mechanism with a process. It
// outlives the target until the session is released.
type attachment struct {
	key    gpreempt.ProcessKey
	target *target // nil once the process has left
	state  attachState
	// failure is why the session can no longer suspend, or why it could not be released:
	// it is detached. OutcomeOK while nothing failed.
	failure Outcome
	// reportsBirths: the mechanism posts Running for a new queue; otherwise TargetSeen counts them.
	reportsBirths bool
	// dirty: it is on the list that settle goes through.
	dirty bool
	// inspection is the number of the Inspect in flight about an Attach, 0 for none. late:
	// the Attach has taken longer than StuckAfter; stuck: because of the target itself.
	inspection  uint64
	late, stuck bool
	// refusal is why the last Attach or session failed; OutcomeOK when it did not, and for
	// a new program.
	refusal Outcome
	// asked: a lease or an admin asked to suspend the target when the Attach was sent.
	asked bool

	// retryAt is when the next Attach or Detach may be sent: after sessions that failed
	// and after releases that failed.
	retryAt           Time
	sessions, release Backoff
	timer             timer
}

// attachmentOf returns the attachment of a target, and makes one if the target has none.
func (c *Core) attachmentOf(t *target) *attachment {
	a := c.attachments[t.key]
	if a == nil {
		a = &attachment{key: t.key}
		a.timer.owner = a
		c.attachments[t.key] = a
	}
	a.target = t
	return a
}

func (c *Core) markAttachment(a *attachment) {
	if !a.dirty {
		a.dirty = true
		c.dirtyAttachments = append(c.dirtyAttachments, a)
	}
}

// mayAttach reports whether the target may have a mechanism attached.
func (c *Core) mayAttach(a *attachment) bool {
	return a.target != nil && a.target.class == gpreempt.Offline && !c.policy.Shadow && !c.stopping
}

// attachDue returns since when the target is to have a mechanism attached, if it may: at
// once when a lease asks for its gang. Attaching and detaching interrupt every process on
// every GPU that the target can see, so that a process that ends before is left alone, unless
// it is not trusted to be there to be suspended later.
func (c *Core) attachDue(t *target) Time {
	switch {
	case c.policy.AttachAfter == 0 || t.gang.covered(), t.onResist.Enforced():
		return c.now
	case !t.hadQueues:
		return Never
	}
	return t.queuesSince + c.policy.AttachAfter
}

// Never is later than every deadline.
const Never Time = math.MaxInt64

// mustDetach reports whether the session is to be released rather than used.
func (c *Core) mustDetach(a *attachment) bool {
	return a.state == attached && (a.failure != OutcomeOK || !c.mayAttach(a))
}

// settleAttachment sends the Attach or Detach that is missing. A target that is away is
// resumed first.
func (c *Core) settleAttachment(a *attachment) {
	var kind ActionKind
	due := a.retryAt
	switch {
	case a.state == attaching:
		return // the timer is that of its Inspect
	case a.state == detached && c.mayAttach(a):
		kind, due = ActAttach, max(due, c.attachDue(a.target))
	case a.state == detached && a.target == nil:
		c.timers.clear(&a.timer)
		delete(c.attachments, a.key)
		return
	case c.mustDetach(a) && (a.target == nil || !a.target.isAway()):
		kind = ActDetach
	default:
		c.timers.clear(&a.timer)
		return
	}
	switch {
	case due == Never:
		c.timers.clear(&a.timer)
		return
	case c.now < due:
		c.timers.set(&a.timer, due)
		return
	}
	if kind == ActAttach {
		a.state, a.asked = attaching, c.asked(a.target.gang)
		c.timers.set(&a.timer, c.now+StuckAfter)
	} else {
		a.state = detaching
		c.timers.clear(&a.timer)
	}
	c.emit(kind).Target = a.key
}

func (a *attachment) fire(c *Core) {
	switch {
	case a.state != attaching:
		c.markAttachment(a)
	case a.inspection != 0 && a.timer.overslept(c.now):
		c.timers.set(&a.timer, c.now+InspectTime)
	case a.inspection != 0:
		c.attachInspected(a, false)
	case a.timer.overslept(c.now):
		c.timers.set(&a.timer, c.now+StuckAfter)
	default:
		a.inspection = c.inspect(a.key)
		c.timers.set(&a.timer, c.now+InspectTime)
	}
}

// inspect sends an Inspect and returns its number.
func (c *Core) inspect(key gpreempt.ProcessKey) uint64 {
	c.seq++
	a := c.emit(ActInspect)
	a.Target, a.Seq = key, c.seq
	return c.seq
}

// attachInspected takes in what an Attach waits for that has taken too long. An Attach
// suspends nothing: it opens no breaker, and leases do not wait for it any longer.
func (c *Core) attachInspected(a *attachment, stuck bool) {
	a.inspection, a.late, a.stuck = 0, true, stuck
	c.timers.clear(&a.timer)
	if stuck {
		c.timers.set(&a.timer, c.now+StuckAfter)
	}
	if a.target != nil {
		c.mark(a.target.gang)
	}
}

// markUnattached has settle look at the attachments of a gang again: what asks for them
// has changed.
func (c *Core) markUnattached(g *gang) {
	for _, m := range g.members {
		if m.attachment.state == detached {
			c.markAttachment(m.attachment)
		}
	}
}

func (c *Core) attached(ev Attached) {
	a := c.attachments[ev.Target]
	if a == nil || a.state != attaching {
		return
	}
	c.markAttachment(a)
	a.inspection, a.late, a.stuck, a.refusal = 0, false, false, refusalBy(ev.Result)
	c.timers.clear(&a.timer)
	if a.target != nil {
		c.mark(a.target.gang)
	}
	if ev.Result != OutcomeOK {
		a.state = detached
		c.openBreakers(ev.Result, ev.FailedGPUs, a.target)
		a.retryAt = a.sessions.Fail(c.now, RetryAction)
		if ev.Result == OutcomeResisted && a.asked && a.target != nil && !c.mayNot(a.target.gang) {
			c.refused(a.target)
		}
		return
	}
	a.state, a.failure, a.reportsBirths = attached, OutcomeOK, ev.ReportsBirths
}

// sessionLost handles a session that ended by itself. The queues that it had suspended
// run, or the Detach that follows resumes them.
func (c *Core) sessionLost(ev Lost) {
	a := c.attachments[ev.Target]
	if a == nil || a.state != attached {
		return
	}
	c.openBreakers(ev.Result, ev.FailedGPUs, a.target)
	c.failAttachment(a, ev.Result)
	if t := a.target; ev.Result == OutcomeResisted && t != nil && c.asked(t.gang) {
		c.refused(t)
	}
}

// failAttachment ends the use of a session that failed.
func (c *Core) failAttachment(a *attachment, failure Outcome) {
	a.failure, a.refusal = failure, refusalBy(failure)
	c.markAttachment(a)
	if a.target != nil {
		c.mark(a.target.gang)
	}
}

// detached takes in the result of a Detach, which resumes as well: for a target in
// Resuming it is the result of that.
func (c *Core) detached(ev Detached) {
	a := c.attachments[ev.Target]
	if a == nil || a.state != detaching {
		return
	}
	c.markAttachment(a)
	c.openBreakers(ev.Result, ev.FailedGPUs, a.target)
	if ev.Result == OutcomeOK || ev.Result == OutcomeGone {
		a.state, a.reportsBirths = detached, false
		if a.failure != OutcomeOK {
			a.retryAt = a.sessions.Fail(c.now, RetryAction)
		}
		a.release = Backoff{}
		a.failure = OutcomeOK
	} else {
		a.state, a.failure, a.refusal = attached, ev.Result, ev.Result
		a.retryAt = a.release.Fail(c.now, RetryAction)
	}
	if t := a.target; t != nil {
		c.mark(t.gang)
		if t.state == TargetResuming && t.seq == 0 {
			c.resumeResult(t, ev.Result, ev.FailedGPUs, ev.Took)
		}
	}
}

// runs takes in that a queue of a target runs.
func (c *Core) runs(ev Running) {
	t := c.targets[ev.Target]
	switch {
	case t == nil:
		return
	case ev.Suspended > 0:
		t.queues += uint64(ev.Suspended)
		t.suspendedQueues += uint64(ev.Suspended)
		c.active(t)
		if t.state == TargetSuspended {
			c.record(Record{Kind: RecordTarget, Target: t.key, FromTarget: t.state, ToTarget: t.state, Class: t.class, Cause: CauseNewQueue})
		}
	case ev.Cause == CauseNewQueue && t.attachment.reportsBirths:
		t.queues++
		c.active(t)
	case t.state == TargetSuspending || t.state == TargetSuspended:
		t.again = ev.Cause
	}
	c.mark(t.gang)
}

// openBreakers opens the breakers of the GPUs that reported an error; those of the
// target when it is not known which they are.
func (c *Core) openBreakers(result Outcome, gpus []gpreempt.GPUID, t *target) {
	if result != OutcomeHardware {
		return
	}
	if len(gpus) == 0 && t != nil {
		gpus = t.gpus
	}
	for _, id := range gpus {
		c.openBreaker(c.gpu(id), CauseHardware)
	}
}
