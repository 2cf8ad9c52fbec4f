package scheduler

import (
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Explanation is why a target is suspended or runs.
type Explanation struct {
	State TargetState
	// Suspend and Cause are the decision about the target's job.
	Suspend bool
	Cause   Cause
	// Checks are all checks in their order. The first that is not CheckPass decides.
	Checks []ExplainedCheck
	Facts  Facts
	// Leases are those that cover one of the target's GPUs.
	Leases []LeaseID
}

// ExplainedCheck is the result of one check.
type ExplainedCheck struct {
	Name   string
	Result CheckResult
	// Decides is set for one check of an Explanation.
	Decides bool
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

// Facts are what the checks look at: the state of the job of a target, or of a target without one.
// Times that are not after Now have passed.
type Facts struct {
	Now      Time
	Class    gpreempt.Class
	Priority gpreempt.Priority
	Job      string // "" for none
	Members  []MemberFacts
	// QuarantinedUntil is the end of the last quarantine of a member, and QuarantineCause its cause.
	QuarantinedUntil Time
	QuarantineCause  Cause
	Draining, Shadow bool
	// Breakers are those that are open.
	Breakers []OpenBreaker
	// PinnedToRun is the end of the last pin that has a member run, PinnedToSuspend of the last that
	// has one suspended, because of Pin; RunUntil is that of the running time that is guaranteed after
	// MaxSuspend or the share floor, LingerUntil of the linger.
	PinnedToRun, PinnedToSuspend, RunUntil, LingerUntil Time
	Pin                                                 Cause
	// ShareFloor is the policy's; BudgetLeft is how long it permits to be suspended.
	ShareFloor float64
	BudgetLeft time.Duration
	// ShareCap is the policy's, 0 if it has none or does not apply; CreditLeft is how long it permits
	// to run, and CapEnds when a suspension because of it ends.
	ShareCap   float64
	CreditLeft time.Duration
	CapEnds    Time
	// AttachAt is when the last member is attached to that none of its leases ask for; Never for one
	// without a queue.
	AttachAt Time
	// Top is the highest priority of the leases that count, -1 for none; those of Owners do not.
	Top    int
	Owners []gpreempt.ProcessKey
}

// MemberFacts are those of one process.
type MemberFacts struct {
	Key gpreempt.ProcessKey
	// Ready: a mechanism can suspend it.
	Ready bool
	// Stuck: a call of the process holds up the action in flight, AttachStuck an Attach.
	Stuck, AttachStuck bool
	// Refusal is the obstacle for which the last attempt to attach to it or to suspend it has failed, "" if it has not.
	Refusal  Cause
	Refusals int
	OnResist gpreempt.Resistance
}

// OpenBreaker is a breaker that is open.
type OpenBreaker struct {
	GPU    gpreempt.GPUID
	Closes Time
}

// Explain returns why a target is suspended or runs, by the checks that decide.
func (c *Core) Explain(key gpreempt.ProcessKey) (Explanation, bool) {
	t := c.targets[key]
	if t == nil {
		return Explanation{}, false
	}
	e := Explanation{State: t.state, Facts: c.facts(t.job)}
	for _, ch := range checks {
		x := ExplainedCheck{Name: ch.name, Result: CheckPass}
		if cause := ch.cause(c, t.job); cause != "" {
			x.Result = CheckRun
			if ch.suspend {
				x.Result = CheckSuspend
			}
			if x.Decides = e.Cause == ""; x.Decides {
				e.Suspend, e.Cause = ch.suspend, cause
			}
		}
		e.Checks = append(e.Checks, x)
	}
	for _, l := range c.Leases() {
		if slices.ContainsFunc(l.GPUs, func(id gpreempt.GPUID) bool { return slices.Contains(t.GPUs, id) }) {
			e.Leases = append(e.Leases, l.ID)
		}
	}
	return e, true
}

func (c *Core) facts(j *job) Facts {
	f := Facts{
		Now: c.now, Class: j.members[0].Class, Priority: j.priority, Draining: c.draining, Shadow: c.policy.Shadow,
		PinnedToRun: j.pinnedUntil(false), PinnedToSuspend: j.pinnedUntil(true), Pin: j.pinned(c.now, true), RunUntil: j.runUntil, LingerUntil: j.lingerUntil, ShareFloor: c.policy.ShareFloor, BudgetLeft: c.budgetLeft(j),
		Top: j.top(), Owners: j.owners,
	}
	if j.progress != nil {
		f.Job = j.progress.name
	}
	if c.capped(j) {
		now := c.chargedNow(j)
		f.ShareCap, f.CreditLeft = c.policy.ShareCap, max(0, now.credit)
		if at := c.capAt(now); j.suspended && at != Never {
			f.CapEnds = min(at, c.runsBy(j)) // max_suspend and the share floor end it too
		}
	}
	f.QuarantinedUntil, f.QuarantineCause = j.quarantine()
	for _, m := range j.members {
		attaching := m.flight.is(ActAttach)
		f.Members = append(f.Members, MemberFacts{
			Key: m.Target, Ready: m.ready(), Stuck: m.flight.stuck && !attaching, AttachStuck: m.flight.stuck && attaching, Refusal: m.refusal, Refusals: m.refusals, OnResist: m.OnResist,
		})
		if !m.attached && !attaching && c.mayAttach(m) {
			f.AttachAt = max(f.AttachAt, c.attachDue(m))
		}
	}
	for _, u := range j.gpus {
		if u.breakerOpen {
			f.Breakers = append(f.Breakers, OpenBreaker{u.id, u.breakerUntil})
		}
	}
	return f
}
