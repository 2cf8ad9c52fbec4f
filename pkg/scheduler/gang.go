package scheduler

import (
	"cmp"
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// gang is the targets that are suspended together: one target, or all offline targets
// of a job. Suspending only some ranks would leave the others waiting on their GPUs, and
// with unrelated leases on each GPU a job of eight would almost never run as a whole.
type gang struct {
	members  []*target // by key
	gpus     []*gpu    // union of the members', by id
	priority gpreempt.Priority
	job      *job // nil for a gang of one
	// owners are those of Core.owners whose leases do not suspend it, by key. All members
	// have the same: who announces is not suspended with the rest of its job.
	owners []gpreempt.ProcessKey

	dirty bool
	seen  uint64 // the last of Core.scans that counted it

	// suspended: the decision to suspend stands, or a member is still away because of it.
	suspended      bool
	suspendedSince Time
	// leased: the last decision was for a lease, not for the linger after one.
	leased      bool
	lingerUntil Time
	// forced: max_suspend or the share floor ended the suspension; it must run
	// before it can be suspended again.
	forced   Cause
	runUntil Time
	runCause Cause

	// budget is the time it may still be suspended under the share floor: a
	// bucket that empties while suspended and fills while running.
	budget   time.Duration
	budgetAt Time

	// parked: the HQD budget keeps it off the GPUs while it is idle. wanted is only used
	// within balance.
	parked, wanted bool

	// verdict is the last decision.
	verdict verdict
	timer   timer
}

func (c *Core) joinGang(t *target) {
	c.joinJob(t)
	owners := c.ownersOf(t)
	var g *gang
	if t.job != nil {
		g = t.job.gangOf(owners)
	}
	if g == nil {
		g = &gang{budget: c.budgetCap(), budgetAt: c.now, owners: owners}
		g.timer.owner = g
		if t.job != nil {
			g.job = t.job
			g.job.gangs = append(g.job.gangs, g)
		}
	}
	if t.gang != nil {
		c.charge(g)
		c.inherit(g, t.gang, t.isAway())
	}
	t.gang = g
	at, _ := slices.BinarySearchFunc(g.members, t.key, func(m *target, k gpreempt.ProcessKey) int { return m.key.Compare(k) })
	g.members = slices.Insert(g.members, at, t)
	c.regroup(g)
	c.mark(g)
}

// inherit carries over the budget and the deadlines of a member's old gang: a new class,
// priority, job or set of GPUs must not refill the share budget or restart max_suspend.
// Where two gangs join, the more favourable guarantee applies.
func (c *Core) inherit(g, old *gang, away bool) {
	g.budget = min(g.budget, old.budget)
	g.mustRunUntil(old.runUntil, old.runCause)
	if !old.suspended {
		return
	}
	if !away {
		if old.forced != "" { // the rest of its old gang does not run yet
			g.mustRunUntil(c.now+c.policy.MinRun, old.forced)
		}
		return
	}
	if !g.suspended {
		g.suspended, g.suspendedSince = true, old.suspendedSince
	}
	g.suspendedSince = min(g.suspendedSince, old.suspendedSince)
	g.forced = cmp.Or(g.forced, old.forced)
}

func (c *Core) leaveGang(t *target) {
	g := t.gang
	c.charge(g)
	g.members = slices.DeleteFunc(g.members, func(m *target) bool { return m == t })
	c.regroup(g)
	if len(g.members) == 0 && g.job != nil {
		g.job.gangs = slices.DeleteFunc(g.job.gangs, func(o *gang) bool { return o == g })
	}
	c.mark(g)
}

// regroup computes the gang's GPUs and priority from its members, and updates the GPUs'
// lists of gangs.
func (c *Core) regroup(g *gang) {
	for _, u := range g.gpus {
		u.gangs = slices.DeleteFunc(u.gangs, func(o *gang) bool { return o == g })
	}
	g.gpus = g.gpus[:0]
	g.priority = 0
	for _, m := range g.members {
		g.priority = max(g.priority, m.priority)
		for _, id := range m.gpus {
			if u := c.gpu(id); !slices.Contains(g.gpus, u) {
				g.gpus = append(g.gpus, u)
			}
		}
	}
	slices.SortFunc(g.gpus, func(a, b *gpu) int { return int(a.id) - int(b.id) })
	for _, u := range g.gpus {
		u.gangs = append(u.gangs, g)
	}
	// A linger belongs to the members it began with: a new member that no lease
	// outranked must not be suspended by it.
	g.lingerUntil, g.leased = 0, g.leased && g.outranked()
	c.markUnattached(g)
}

func (g *gang) any(is func(*target) bool) bool { return slices.ContainsFunc(g.members, is) }

func (g *gang) anyAway() bool { return g.any((*target).isAway) }

func (g *gang) byHand() bool { return g.any(func(t *target) bool { return len(t.orders) > 0 }) }

// covered reports whether a lease asks for the gang, started or not, or an order by hand.
func (g *gang) covered() bool {
	return g.byHand() || slices.ContainsFunc(g.gpus, func(u *gpu) bool {
		return slices.ContainsFunc(u.leases, g.below)
	})
}

// attachComing reports whether every member is ready, or is being attached to now.
func (g *gang) attachComing() bool {
	return !g.any(func(t *target) bool {
		return !t.ready() && (t.attachment.state != attaching || t.attachment.late)
	})
}

// outranked reports whether a lease of higher priority covers one of the gang's GPUs.
func (g *gang) outranked() bool { return g.top() > int(g.priority) }

// lingers reports whether the gang is off the GPUs for the next lease only.
func (g *gang) lingers() bool {
	return g.verdict.cause == CauseLinger && !g.any(func(t *target) bool { return t.state == TargetResuming })
}

// quarantine returns when the last quarantine of a member ends, and its cause.
func (g *gang) quarantine() (until Time, cause Cause) {
	for _, m := range g.members {
		if m.quarantinedUntil > until {
			until, cause = m.quarantinedUntil, m.quarantineCause
		}
	}
	return until, cause
}

// holdUntil returns when the last hold on a member ends.
func (g *gang) holdUntil() Time {
	var until Time
	for _, m := range g.members {
		until = max(until, m.holdUntil)
	}
	return until
}

// top returns the highest priority of the started leases on the gang's GPUs, its own left
// out; -1 for none.
func (g *gang) top() int {
	top := -1
	for _, u := range g.gpus {
		if len(g.owners) == 0 {
			top = max(top, u.top)
			continue
		}
		for _, l := range u.leases {
			if l.started && !g.ownedBy(l) {
				top = max(top, int(l.req.Priority))
			}
		}
	}
	return top
}

// suspendCost and resumeCost return the learned time of the slowest member: members are
// suspended in parallel.
func (g *gang) suspendCost() (cost time.Duration, known bool) {
	known = len(g.members) > 0
	for _, m := range g.members {
		cost = max(cost, m.suspend.likely())
		known = known && m.suspend.samples > 0
	}
	return cost, known
}

func (g *gang) resumeCost() time.Duration {
	var cost time.Duration
	for _, m := range g.members {
		cost = max(cost, m.resume.likely())
	}
	return cost
}
