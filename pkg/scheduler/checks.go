package scheduler

import (
	"cmp"
	"slices"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// verdict is whether a gang should be off the GPUs, and why.
type verdict struct {
	suspend bool
	cause   Cause
}

// check is one reason why a gang runs or is suspended.
type check struct {
	name string
	// suspend is what the check asks for.
	suspend bool
	// cause returns why the gang has to run or be suspended now; "" when the check does
	// not apply to it.
	cause func(*Core, *gang) Cause
}

// The names of the checks.
const (
	CheckClass      = "class"
	CheckQuarantine = "quarantine"
	CheckDrain      = "drain"
	CheckBreaker    = "breaker"
	CheckHold       = "hold"
	CheckMustRun    = "share floor and max_suspend"
	// CheckMechanism is the first check of what a mechanism, a lease and an admin can do.
	CheckMechanism = "mechanism"
	CheckByHand    = "order by hand"
	CheckLease     = "lease"
	CheckLinger    = "linger"
	// CheckHQDBudget is left out of explanations while there is no budget.
	CheckHQDBudget = "HQD budget"
	CheckOtherwise = "otherwise"
)

// checks are what decides about a gang: the first that applies. Nothing else does.
var checks = []check{
	{CheckClass, false, func(_ *Core, g *gang) Cause {
		return when(g.any(func(t *target) bool { return t.class != gpreempt.Offline }), CauseClass)
	}},
	{CheckQuarantine, false, func(c *Core, g *gang) Cause {
		until, cause := g.quarantine()
		return when(c.now < until, cause)
	}},
	{CheckDrain, false, func(c *Core, _ *gang) Cause { return when(c.draining, CauseDrain) }},
	{CheckBreaker, false, func(_ *Core, g *gang) Cause {
		return when(slices.ContainsFunc(g.gpus, func(u *gpu) bool { return u.breakerOpen }), CauseBreaker)
	}},
	{CheckHold, false, func(c *Core, g *gang) Cause { return when(c.now < g.holdUntil(), CauseHold) }},
	{CheckMustRun, false, func(c *Core, g *gang) Cause {
		return cmp.Or(g.forced, when(c.now < g.runUntil, g.runCause))
	}},
	{CheckMechanism, false, func(c *Core, g *gang) Cause {
		stuck := g.any(func(t *target) bool { return t.attachment.stuck })
		drm := g.any(func(t *target) bool {
			return t.attachment.refusal == OutcomeDRMQueues && t.attachment.state != attaching
		})
		refuses := g.any(func(t *target) bool { return t.attachment.refusal != OutcomeOK && t.attachment.state != attaching })
		return when(!c.policy.Shadow, cmp.Or(when(stuck, CauseStuck), when(drm, CauseDRMQueues), when(refuses, CauseCannotSuspend), when(g.any((*target).unready), CauseNotReady)))
	}},
	{CheckByHand, true, func(_ *Core, g *gang) Cause { return when(g.byHand(), CauseByHand) }},
	{CheckLease, true, func(_ *Core, g *gang) Cause { return when(g.outranked(), CauseLease) }},
	{CheckLinger, true, func(c *Core, g *gang) Cause { return when(g.suspended && c.now < g.lingerUntil, CauseLinger) }},
	{CheckHQDBudget, true, func(_ *Core, g *gang) Cause { return when(g.parked, CauseHQDBudget) }},
	{CheckOtherwise, false, func(_ *Core, g *gang) Cause {
		switch {
		case g.suspended && slices.Contains([]Cause{CauseHQDBudget, CauseHQDBusy, CauseHQDRoom}, g.verdict.cause):
			return cmp.Or(when(g.any(func(t *target) bool { return t.busy }), CauseHQDBusy), CauseHQDRoom)
		case g.suspended && g.lingerUntil > 0:
			return CauseLingerOver
		case g.suspended:
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

// decide returns whether the gang should be off the GPUs now.
func (c *Core) decide(g *gang) verdict {
	for i := range checks {
		if cause := checks[i].cause(c, g); cause != "" {
			return verdict{checks[i].suspend, cause}
		}
	}
	panic("scheduler: the last check did not decide")
}

// mayNot reports whether the gang is to run whatever a lease or an admin asks for, and whether a
// mechanism could suspend it.
func (c *Core) mayNot(g *gang) bool {
	for i := range checks {
		switch {
		case checks[i].name == CheckMechanism:
			return c.policy.Shadow
		case checks[i].cause(c, g) != "":
			return true
		}
	}
	panic("scheduler: there is no check of the mechanism")
}

// asked reports whether a lease, or an admin, asks to suspend the gang, and nothing but its
// mechanism can prevent it.
func (c *Core) asked(g *gang) bool { return !c.mayNot(g) && (g.outranked() || g.byHand()) }
