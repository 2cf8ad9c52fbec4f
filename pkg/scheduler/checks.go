package scheduler

import (
	"cmp"
	"slices"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// verdict is whether a job should be off the GPUs, and why.
type verdict struct {
	suspend bool
	cause   Cause
}

// check is one reason why a job runs or is suspended.
type check struct {
	name string
	// suspend is what the check asks for.
	suspend bool
	// cause returns why the job has to run or be suspended now; "" when the check does
	// not apply to it.
	cause func(*Core, *job) Cause
}

// The names of the checks.
const (
	CheckClass      = "class"
	CheckQuarantine = "quarantine"
	CheckDrain      = "drain"
	CheckBreaker    = "breaker"
	CheckPinRun     = "pinned to run"
	CheckMustRun    = "share floor and max_suspend"
	// CheckMechanism is the first check of what a mechanism, a lease and an admin can do.
	CheckMechanism  = "mechanism"
	CheckPinSuspend = "pinned to suspend"
	CheckCap        = "share cap"
	CheckLease      = "lease"
	CheckLinger     = "linger"
	CheckOtherwise  = "otherwise"
)

// checks are what decides about a job: the first that applies. Nothing else does.
var checks = []check{
	{CheckClass, false, func(_ *Core, j *job) Cause {
		return when(j.any(func(t *target) bool { return t.Class != gpreempt.Offline }), CauseClass)
	}},
	{CheckQuarantine, false, func(c *Core, j *job) Cause {
		until, cause := j.quarantine()
		return when(c.now < until, cause)
	}},
	{CheckDrain, false, func(c *Core, _ *job) Cause { return when(c.draining, CauseDrain) }},
	{CheckBreaker, false, func(_ *Core, j *job) Cause {
		return when(slices.ContainsFunc(j.gpus, func(u *gpu) bool { return u.breakerOpen }), CauseBreaker)
	}},
	{CheckPinRun, false, func(c *Core, j *job) Cause { return j.pinned(c.now, false) }},
	{CheckMustRun, false, func(c *Core, j *job) Cause {
		return cmp.Or(j.forced, when(c.now < j.runUntil, j.runCause))
	}},
	{CheckMechanism, false, func(c *Core, j *job) Cause {
		stuck := j.any(func(t *target) bool { return t.flight.is(ActAttach) && t.flight.stuck })
		unready := j.any(func(t *target) bool { return !t.ready() })
		return when(!c.policy.Shadow, cmp.Or(when(stuck, CauseStuck), j.refusal(), when(unready, CauseNotReady)))
	}},
	{CheckPinSuspend, true, func(c *Core, j *job) Cause { return j.pinned(c.now, true) }},
	{CheckCap, true, func(c *Core, j *job) Cause { return when(c.usedUp(j), CauseShareCap) }},
	{CheckLease, true, func(_ *Core, j *job) Cause { return when(j.outranked(), CauseLease) }},
	{CheckLinger, true, func(c *Core, j *job) Cause { return when(j.suspended && c.now < j.lingerUntil, CauseLinger) }},
	{CheckOtherwise, false, func(_ *Core, j *job) Cause {
		switch {
		case j.suspended && slices.Contains([]Cause{CauseHQDBudget, CauseHQDBusy, CauseHQDRoom}, j.verdict.cause):
			return cmp.Or(when(j.any(func(t *target) bool { return t.pin.cause == CauseHQDBusy }), CauseHQDBusy), CauseHQDRoom)
		case j.suspended && j.verdict.cause == CauseByHand:
			return CausePinOver
		case j.suspended && j.verdict.cause == CauseShareCap:
			return CauseShareCapOver
		case j.suspended && j.lingerUntil > 0:
			return CauseLingerOver
		case j.suspended:
			return CauseLeaseEnded
		default:
			return CauseNoLease
		}
	}},
}

// when returns the cause if it applies, and "" otherwise.
func when(applies bool, cause Cause) Cause {
	if applies {
		return cause
	}
	return ""
}

// decide returns whether the job should be off the GPUs now.
func (c *Core) decide(j *job) verdict {
	for i := range checks {
		if cause := checks[i].cause(c, j); cause != "" {
			return verdict{checks[i].suspend, cause}
		}
	}
	panic("scheduler: the last check did not decide")
}

// mayNot reports whether the job is to run whatever a lease or an admin asks for, and whether a
// mechanism could suspend it.
func (c *Core) mayNot(j *job) bool {
	for i := range checks {
		switch {
		case checks[i].name == CheckMechanism:
			return c.policy.Shadow
		case checks[i].cause(c, j) != "":
			return true
		}
	}
	panic("scheduler: there is no check of the mechanism")
}

// asked reports whether a lease, or an admin, asks to suspend the job, and nothing but its
// mechanism can prevent it.
func (c *Core) asked(j *job) bool { return !c.mayNot(j) && (j.outranked() || j.byHand()) }
