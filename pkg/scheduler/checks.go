package scheduler

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

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
	// detail describes what the check looked at.
	detail func(*Core, *gang) string
}

// mechanismCheck is the first check of what a mechanism, a lease and an admin can do.
const mechanismCheck = "mechanism"

// hqdCheck is left out of explanations while there is no budget.
const hqdCheck = "HQD budget"

// checks are what decides about a gang: the first that applies. Nothing else does.
var checks = []check{
	{"class", false, func(_ *Core, g *gang) Cause {
		return when(g.any(func(t *target) bool { return t.class != gpreempt.Offline }), CauseClass)
	}, func(_ *Core, g *gang) string {
		return fmt.Sprintf("class %v, priority %d%s", g.members[0].class, g.priority, g.jobText())
	}},
	{"quarantine", false, func(c *Core, g *gang) Cause {
		until, cause := g.quarantine()
		return when(c.now < until, cause)
	}, (*Core).quarantineText},
	{
		"drain", false, func(c *Core, _ *gang) Cause { return when(c.draining, CauseDrain) },
		func(c *Core, _ *gang) string {
			return map[bool]string{true: "draining", false: "not draining"}[c.draining]
		},
	},
	{"breaker", false, func(_ *Core, g *gang) Cause {
		return when(slices.ContainsFunc(g.gpus, func(u *gpu) bool { return u.breakerOpen }), CauseBreaker)
	}, (*Core).breakerText},
	{
		"hold", false, func(c *Core, g *gang) Cause { return when(c.now < g.holdUntil(), CauseHold) },
		func(c *Core, g *gang) string { return c.endText(g.holdUntil()) },
	},
	{"share floor and max_suspend", false, func(c *Core, g *gang) Cause {
		return cmp.Or(g.forced, when(c.now < g.runUntil, g.runCause))
	}, (*Core).mustRunText},
	{mechanismCheck, false, func(c *Core, g *gang) Cause {
		stuck := g.any(func(t *target) bool { return t.attachment.stuck })
		drm := g.any(func(t *target) bool {
			return t.attachment.refusal == OutcomeDRMQueues && t.attachment.state != attaching
		})
		refuses := g.any(func(t *target) bool { return t.attachment.refusal != OutcomeOK && t.attachment.state != attaching })
		return when(!c.policy.Shadow, cmp.Or(when(stuck, CauseStuck), when(drm, CauseDRMQueues), when(refuses, CauseCannotSuspend), when(g.any((*target).unready), CauseNotReady)))
	}, (*Core).mechanismText},
	{
		"order by hand", true, func(_ *Core, g *gang) Cause { return when(g.byHand(), CauseByHand) },
		func(_ *Core, g *gang) string {
			return map[bool]string{true: "an admin suspended it", false: "none"}[g.byHand()]
		},
	},
	{"lease", true, func(_ *Core, g *gang) Cause { return when(g.outranked(), CauseLease) }, (*Core).leaseText},
	{"linger", true, func(c *Core, g *gang) Cause {
		return when(g.held && c.now < g.lingerUntil, CauseLinger)
	}, func(c *Core, g *gang) string { return c.endText(g.lingerUntil) }},
	{hqdCheck, true, func(_ *Core, g *gang) Cause { return when(g.parked, CauseHQDBudget) }, (*Core).hqdText},
	{"otherwise", false, func(_ *Core, g *gang) Cause {
		switch {
		case g.held && slices.Contains([]Cause{CauseHQDBudget, CauseHQDBusy, CauseHQDRoom}, g.verdict.cause):
			return cmp.Or(when(g.any(func(t *target) bool { return t.busy }), CauseHQDBusy), CauseHQDRoom)
		case g.held && g.lingerUntil > 0:
			return CauseLingerOver
		case g.held:
			return CauseLeaseEnded
		default:
			return CauseNoLease
		}
	}, func(*Core, *gang) string { return "a target runs unless a check above decides" }},
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
		case checks[i].name == mechanismCheck:
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

// Explanation is why a target is suspended or runs.
type Explanation struct {
	Verdict string
	// Checks are all checks in their order. The first that is not CheckPass decides.
	Checks []ExplainedCheck
	// Leases are those that cover one of the target's GPUs, or name it.
	Leases []LeaseID
}

// ExplainedCheck is the result of one check.
type ExplainedCheck struct {
	Name   string
	Result CheckResult
	// Decides is set for one check of an Explanation.
	Decides bool
	Detail  string
}

// CheckResult is what a check asks for; the numbers are those of the API.
type CheckResult uint8

// The results.
const (
	// CheckPass leaves the decision to the next check.
	CheckPass CheckResult = iota + 1
	// CheckRun asks that the target runs.
	CheckRun
	// CheckSuspend asks that the target is suspended.
	CheckSuspend
)

// Explain returns why a target is suspended or runs, by the checks that decide.
func (c *Core) Explain(key gpreempt.ProcessKey) (Explanation, bool) {
	t := c.targets[key]
	if t == nil {
		return Explanation{}, false
	}
	e := Explanation{Verdict: c.verdictText(t)}
	decided := false
	for _, ch := range checks {
		if ch.name == hqdCheck && !c.parking.budget.On() {
			continue
		}
		result := CheckPass
		switch {
		case ch.cause(c, t.gang) == "":
		case ch.suspend:
			result = CheckSuspend
		default:
			result = CheckRun
		}
		e.Checks = append(e.Checks, ExplainedCheck{ch.name, result, result != CheckPass && !decided, ch.detail(c, t.gang)})
		decided = decided || result != CheckPass
	}
	for _, l := range c.Leases() {
		if l.Target == key || slices.ContainsFunc(l.GPUs, func(id gpreempt.GPUID) bool { return slices.Contains(t.gpus, id) }) {
			e.Leases = append(e.Leases, l.ID)
		}
	}
	return e, true
}

func (c *Core) verdictText(t *target) string {
	v := c.decide(t.gang)
	state := "Running"
	switch {
	case t.state == TargetSuspending:
		state = "Suspending"
	case t.state == TargetSuspended:
		state = "Suspended"
	case t.state == TargetResuming:
		state = "Resuming"
	case v.suspend && c.policy.Shadow:
		state = "Running (the shadow policy suspends nothing)"
	case v.suspend:
		state = "To be suspended"
	}
	return fmt.Sprintf("%s: %s.", state, v.cause)
}

func (g *gang) jobText() string {
	if g.job == nil {
		return ""
	}
	return fmt.Sprintf("; %d processes of job %s", len(g.members), g.job.name)
}

// membersText returns good, or bad with the members for which it is true.
func (g *gang) membersText(good, bad string, is func(*target) bool) string {
	var keys []string
	for _, m := range g.members {
		if is(m) {
			keys = append(keys, m.key.String())
		}
	}
	switch {
	case len(keys) == 0:
		return good
	case len(g.members) == 1:
		return bad
	default:
		return bad + ": " + strings.Join(keys, ", ")
	}
}

func (c *Core) quarantineText(g *gang) string {
	until, cause := g.quarantine()
	ends := c.endText(until)
	stuck := func(t *target) bool { return t.stuck }
	switch {
	case g.any(stuck):
		return g.membersText("", "a call of the process holds its lock in the driver", stuck) + "; " + ends
	case c.now < until && cause == CauseReset:
		return "the driver reset a queue that was the process's, or may have been; " + ends
	case c.now < until && cause == CauseStuck:
		return "a call of the process held its lock in the driver; " + ends
	}
	return ends
}

func (c *Core) mechanismText(g *gang) string {
	if c.policy.Shadow {
		return "not attached: a shadow policy attaches to nothing"
	}
	drm := func(t *target) bool { return t.attachment.refusal == OutcomeDRMQueues }
	if g.any(drm) {
		return g.membersText("", "it has user queues of DRM, which no enabled mechanism can suspend", drm)
	}
	if g.any((*target).refuses) {
		return g.membersText("", "it could not be suspended or attached to at the last attempt", (*target).refuses) + g.refusalsText()
	}
	text := g.membersText("attached", "not attached", (*target).unready)
	var due Time
	for _, m := range g.members {
		a := m.attachment
		switch {
		case a.stuck:
			return g.membersText("", "a call of the process holds its lock in the driver, and it cannot be attached to", func(t *target) bool { return t.attachment.stuck })
		case a.state == detached && c.mayAttach(a):
			due = max(due, c.attachDue(m))
		}
	}
	switch {
	case due <= c.now:
		return text
	case due == never:
		return text + " before it has a queue"
	}
	return fmt.Sprintf("%s yet: attach_after ends in %v, and a lease on its GPUs attaches at once", text, (due - c.now).Round(time.Millisecond))
}

// endText describes something that lasts until a time.
func (c *Core) endText(until Time) string {
	if until <= c.now {
		return "none"
	}
	return fmt.Sprintf("ends in %v", (until - c.now).Round(time.Millisecond))
}

func (c *Core) breakerText(g *gang) string {
	var open []string
	for _, u := range g.gpus {
		if u.breakerOpen {
			open = append(open, fmt.Sprintf("GPU %v open for %v", u.id, (u.breakerUntil-c.now).Round(time.Millisecond)))
		}
	}
	return cmp.Or(strings.Join(open, ", "), "closed")
}

func (c *Core) mustRunText(g *gang) string {
	floor := "no share floor"
	if c.policy.ShareFloor > 0 {
		floor = fmt.Sprintf("the share floor of %.0f%% permits %v more of suspension", 100*c.policy.ShareFloor, c.budgetLeft(g).Round(time.Millisecond))
	}
	if c.now < g.runUntil {
		return fmt.Sprintf("must run for %v more; %s", (g.runUntil - c.now).Round(time.Millisecond), floor)
	}
	return floor
}

func (c *Core) leaseText(g *gang) string {
	text := fmt.Sprintf("no lease (target priority %d)", g.priority)
	if top := g.top(); top >= 0 {
		text = fmt.Sprintf("highest lease priority %d, target priority %d", top, g.priority)
	}
	for i, owner := range g.owners {
		text += fmt.Sprintf("%s%v", map[bool]string{true: "; not counted, because they are for this process: the leases of ", false: ", "}[i == 0], owner)
	}
	return text
}
