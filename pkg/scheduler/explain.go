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
	// Leases are those that cover one of the target's GPUs, or name it.
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
	// HoldUntil is the end of a hold, RunUntil of the running time that is guaranteed after
	// MaxSuspend or the share floor, LingerUntil of the linger.
	HoldUntil, RunUntil, LingerUntil Time
	// ShareFloor is the policy's; BudgetLeft is how long it permits to be suspended.
	ShareFloor float64
	BudgetLeft time.Duration
	// AttachAt is when the last member is attached to that none of its leases ask for; Never for one
	// without a queue.
	AttachAt Time
	ByHand   bool
	// Top is the highest priority of the leases that count, -1 for none; those of Owners do not.
	Top    int
	Owners []gpreempt.ProcessKey
	// Slots are those of its GPUs. Loaded: it is known whether each member has work; Busy: one has;
	// else none has had any since IdleSince.
	Slots        []SlotUse
	Loaded, Busy bool
	IdleSince    Time
}

// MemberFacts are those of one process.
type MemberFacts struct {
	Key gpreempt.ProcessKey
	// Ready: a mechanism can suspend it.
	Ready bool
	// Stuck: a call of the process holds up the action in flight, AttachStuck an Attach.
	Stuck, AttachStuck bool
	// Refusal is why the last attempt to attach to it or to suspend it has failed, OutcomeOK if it has not.
	Refusal  Outcome
	Refusals int
	OnResist gpreempt.Resistance
}

// OpenBreaker is a breaker that is open.
type OpenBreaker struct {
	GPU    gpreempt.GPUID
	Closes Time
}

// SlotUse is the use of a GPU's slots for compute queues, parked queues included except in Mapped.
type SlotUse struct {
	GPU gpreempt.GPUID
	// Slots is 0 if that is not known. Permitted and PermittedOffline are what the budget permits.
	Slots                       int
	All, Offline, Mapped        int
	Permitted, PermittedOffline int
}

// Explain returns why a target is suspended or runs, by the checks that decide.
func (c *Core) Explain(key gpreempt.ProcessKey) (Explanation, bool) {
	t := c.targets[key]
	if t == nil {
		return Explanation{}, false
	}
	v := c.decide(t.gang)
	e := Explanation{State: t.state, Suspend: v.suspend, Cause: v.cause, Facts: c.facts(t.gang)}
	decided := false
	for _, ch := range checks {
		if ch.name == CheckHQDBudget && !c.parking.budget.On() {
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
		e.Checks = append(e.Checks, ExplainedCheck{ch.name, result, result != CheckPass && !decided})
		decided = decided || result != CheckPass
	}
	for _, l := range c.Leases() {
		if l.Target == key || slices.ContainsFunc(l.GPUs, func(id gpreempt.GPUID) bool { return slices.Contains(t.gpus, id) }) {
			e.Leases = append(e.Leases, l.ID)
		}
	}
	return e, true
}

func (c *Core) facts(g *gang) Facts {
	f := Facts{
		Now: c.now, Class: g.members[0].class, Priority: g.priority, Draining: c.draining, Shadow: c.policy.Shadow,
		HoldUntil: g.holdUntil(), RunUntil: g.runUntil, LingerUntil: g.lingerUntil, ShareFloor: c.policy.ShareFloor, BudgetLeft: c.budgetLeft(g),
		ByHand: g.byHand(), Top: g.top(), Owners: g.owners, Loaded: !g.any(func(t *target) bool { return !t.loaded }),
		Busy: g.any(func(t *target) bool { return t.busy }), IdleSince: c.idleAt(g) - ParkAfterIdle,
	}
	if g.job != nil {
		f.Job = g.job.name
	}
	f.QuarantinedUntil, f.QuarantineCause = g.quarantine()
	for _, m := range g.members {
		a := m.attachment
		f.Members = append(f.Members, MemberFacts{
			Key: m.key, Ready: m.ready(), Stuck: m.stuck, AttachStuck: a.stuck, Refusal: a.refusal, Refusals: m.refusals, OnResist: m.onResist,
		})
		if a.state == detached && c.mayAttach(a) {
			f.AttachAt = max(f.AttachAt, c.attachDue(m))
		}
	}
	for _, u := range g.gpus {
		if u.breakerOpen {
			f.Breakers = append(f.Breakers, OpenBreaker{u.id, u.breakerUntil})
		}
	}
	if b := c.parking.budget; b.On() {
		c.countQueues()
		for _, u := range g.gpus {
			f.Slots = append(f.Slots, SlotUse{
				u.id, u.slots, u.use.all, u.use.offline, u.use.mapped, u.slots * (100 - b.Spare) / 100, u.slots * b.Offline / 100,
			})
		}
	}
	return f
}
