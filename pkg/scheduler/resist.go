package scheduler

import (
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// RefusalTime is the least time between two refused suspensions that count: a program that looks at
// a job for some seconds does not have it killed.
const RefusalTime = 10 * time.Second

// refusalBy returns what a failure says about the next attempt: nothing, after the end of a
// process or of its program.
func refusalBy(result Cause) Cause {
	switch {
	case result == "", result == CauseGone, result == CauseReplaced:
		return ""
	case result.Obstacle() == "": // a failure without a reason
		return gpreempt.ReasonCannotSuspend
	}
	return result
}

// cannotSuspend returns why the target, which is to be suspendable, is not; "" if it is. Its own calls
// (stuck), the breakers and an admin do not count.
func (c *Core) cannotSuspend(t *target) Cause {
	switch {
	case c.mayAttach(t) && t.refusal != "":
		return t.refusal
	case t.Class == gpreempt.Offline && c.now < t.quarantinedUntil && t.quarantineCause == CauseQuarantine:
		return gpreempt.ReasonCannotSuspend
	}
	return ""
}

// refused counts a suspension that a lease or an admin asked for and that the target resisted.
func (c *Core) refused(t *target) {
	if t.refusals > 0 && c.now < t.refusedAt+RefusalTime {
		return
	}
	t.refusals++
	t.refusedAt = c.now
	if after := t.OnResist.KillAfter; after == 0 || t.refusals < after || t.killed || t.Class != gpreempt.Offline {
		return
	}
	t.killed = true
	c.record(Record{Kind: RecordTarget, Target: t.Target, FromTarget: t.state, ToTarget: t.state, Class: t.Class, Cause: CauseKilled, Lease: c.lease(t.job, CauseLease)})
	c.emit(ActKill).Target = t.Target
}
