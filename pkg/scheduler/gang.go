package scheduler

import (
	"cmp"
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// gang is what is suspended together: one target, or all offline targets of a
// job. It is all or nothing: a half-suspended collective spins on its GPUs.
type gang struct {
	members  []*target // by key
	gpus     []*gpu    // union of the members', by id
	priority gpreempt.Priority
	job      string // "" for a gang of one

	dirty bool
	seen  uint64 // last survey that counted it

	// held: the decision to suspend stands, or a member is still away because of it.
	held      bool
	heldSince Time
	// leased: the last decision was for a lease, not for the linger after one.
	leased      bool
	lingerUntil Time
	// forced: max_suspend or the share floor ended the suspension; it must run
	// before it can be suspended again.
	forced   Cause
	runUntil Time
	runCause Cause

	// budget is the time it may still be suspended under the share floor: a
	// bucket that empties while held and fills while running.
	budget   time.Duration
	budgetAt Time

	// verdict is the last decision.
	verdict verdict
	timer   timer
}

// verdict is whether a gang should be off the GPUs, and why.
type verdict struct {
	suspend bool
	cause   Cause
}

func (c *Core) joinGang(t *target) {
	inJob := c.policy.Gang == GangJob && t.class == gpreempt.Offline && t.job != ""
	var g *gang
	if inJob {
		g = c.jobs[t.job]
	}
	if g == nil {
		g = &gang{budget: c.budgetCap(), budgetAt: c.now}
		g.timer.owner = g
		if inJob {
			g.job = t.job
			c.jobs[t.job] = g
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

// inherit takes over the accounts of a member's old gang: a process under a new
// class, priority, job or set of GPUs is owed what it was owed before, so that
// reclassifying refills no share budget and begins no new max_suspend. Where two
// gangs meet, the better promise holds.
func (c *Core) inherit(g, old *gang, away bool) {
	g.budget = min(g.budget, old.budget)
	g.mustRunUntil(old.runUntil, old.runCause)
	if !old.held {
		return
	}
	if !away {
		if old.forced != "" { // the rest of its old gang is not back yet
			g.mustRunUntil(c.now+c.policy.MinRun, old.forced)
		}
		return
	}
	if !g.held {
		g.held, g.heldSince = true, old.heldSince
	}
	g.heldSince = min(g.heldSince, old.heldSince)
	g.forced = cmp.Or(g.forced, old.forced)
}

func (c *Core) leaveGang(t *target) {
	g := t.gang
	c.charge(g)
	g.members = slices.DeleteFunc(g.members, func(m *target) bool { return m == t })
	c.regroup(g)
	if len(g.members) == 0 && g.job != "" {
		delete(c.jobs, g.job)
	}
	c.mark(g)
}

// regroup brings the gang's GPUs and priority, and the GPUs' lists of gangs, in
// line with its members.
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
	// A linger is for the gang there was: a member that no lease ever outranked
	// must not be drawn into it.
	g.lingerUntil, g.leased = 0, g.leased && g.top() > int(g.priority)
}

func (g *gang) anyAway() bool {
	return slices.ContainsFunc(g.members, (*target).isAway)
}

func (g *gang) anyShadowed() bool {
	return slices.ContainsFunc(g.members, func(t *target) bool { return t.shadowed })
}

func (g *gang) byHand() bool {
	return slices.ContainsFunc(g.members, func(t *target) bool { return len(t.orders) > 0 })
}

// lingers reports whether the gang is off the GPUs for the next lease only.
func (g *gang) lingers() bool {
	return g.verdict.cause == CauseLinger && !slices.ContainsFunc(g.members, func(t *target) bool { return t.state == TargetResuming })
}

// holdUntil is when the last hold on a member ends.
func (g *gang) holdUntil() Time {
	var until Time
	for _, m := range g.members {
		until = max(until, m.holdUntil)
	}
	return until
}

// top is the highest priority of the started leases on the gang's GPUs, -1 for none.
func (g *gang) top() int {
	top := -1
	for _, u := range g.gpus {
		top = max(top, u.top)
	}
	return top
}

// suspendCost and resumeCost are the learned times of the slowest member, which
// is what a gang takes when its members go in parallel.
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

// decide says whether the gang should be off the GPUs now. It is the one place
// where that is decided; explain walks the same checks.
func (c *Core) decide(g *gang) verdict {
	for _, m := range g.members {
		switch {
		case m.class != gpreempt.Offline:
			return verdict{cause: CauseClass}
		case !m.ready:
			return verdict{cause: CauseNotReady}
		case m.quarantinedUntil > c.now:
			return verdict{cause: CauseQuarantine}
		}
	}
	if c.draining {
		return verdict{cause: CauseDrain}
	}
	for _, u := range g.gpus {
		if u.breakerOpen {
			return verdict{cause: CauseBreaker}
		}
	}
	if c.now < g.holdUntil() {
		return verdict{cause: CauseHold}
	}
	if g.forced != "" {
		return verdict{cause: g.forced}
	}
	if c.now < g.runUntil {
		return verdict{cause: g.runCause}
	}
	if g.byHand() {
		return verdict{true, CauseByHand}
	}
	if g.top() > int(g.priority) {
		return verdict{true, CauseLease}
	}
	if g.held && c.now < g.lingerUntil {
		return verdict{true, CauseLinger}
	}
	if g.held && g.lingerUntil > 0 {
		return verdict{cause: CauseLingerOver}
	}
	if g.held {
		return verdict{cause: CauseLeaseEnded}
	}
	return verdict{cause: CauseNoLease}
}

// evaluate decides, and sends what is missing.
func (c *Core) evaluate(g *gang) {
	c.charge(g)
	if g.held && !g.anyAway() && !(c.policy.Shadow && g.anyShadowed()) {
		c.release(g)
	}
	if g.held && g.forced == "" {
		g.forced = c.mustRun(g)
	}
	c.follow(g)
	v := c.decide(g)
	if v.suspend && !g.held && !g.byHand() && c.policy.ShareFloor > 0 && g.budget <= g.leastBudget() {
		// Too little is left for a suspension that is worth its cost.
		g.mustRunUntil(c.now+c.policy.MinRun, CauseShareFloor)
		v = c.decide(g)
	}
	if v.suspend && !g.held {
		g.held, g.heldSince, g.lingerUntil = true, c.now, 0
		g.leased = v.cause == CauseLease
	}
	if c.policy.Shadow {
		c.shadow(g, v)
	} else {
		c.act(g, v)
	}
	g.verdict = v
	c.setGangTimer(g)
}

// follow notices that the last lease on the gang ended and begins the linger,
// or that a new one came in time.
func (c *Core) follow(g *gang) {
	if !g.held {
		g.leased = false
		return
	}
	leased := g.top() > int(g.priority)
	if g.leased && !leased {
		g.lingerUntil = 0
		if d := c.linger(g); d > 0 {
			g.lingerUntil = c.now + d
		}
	}
	g.leased = leased
}

// leastBudget is what must be in the bucket for a suspension to begin.
func (g *gang) leastBudget() time.Duration {
	cost, _ := g.suspendCost()
	return cost + g.resumeCost()
}

// mustRun says whether a held gang has to run now for its own sake.
func (c *Core) mustRun(g *gang) Cause {
	if c.now >= c.maxSuspendAt(g) {
		return CauseMaxSuspend
	}
	if due, ok := c.floorAt(g); ok && c.now >= due {
		return CauseShareFloor
	}
	return ""
}

func (c *Core) maxSuspendAt(g *gang) Time { return g.heldSince + c.policy.MaxSuspend }

// floorAt is when the share floor ends the suspension: early enough for the
// resume to be done when the budget is used up.
func (c *Core) floorAt(g *gang) (Time, bool) {
	if c.policy.ShareFloor <= 0 || g.byHand() {
		return 0, false
	}
	return c.now + max(0, g.budget-g.resumeCost()), true
}

func (c *Core) act(g *gang, v verdict) {
	for _, m := range g.members {
		m.shadowed = false
		switch {
		case m.state == TargetSuspended && !v.suspend:
			c.resumeTarget(m, v.cause)
			c.disturb(g)
		case m.state == TargetSuspended && m.queues != m.suspendedQueues:
			c.suspendTarget(m, CauseNewQueue, 0)
			c.unquiet(g)
		case m.state == TargetRunning && v.suspend:
			c.suspendTarget(m, v.cause, c.lease(g))
			c.unquiet(g)
		}
	}
	if g.held && !v.suspend && !g.anyAway() {
		c.release(g)
	}
}

// shadow reports what act would have done. What is really suspended, from
// before the policy changed, is resumed.
func (c *Core) shadow(g *gang, v verdict) {
	from, to := TargetRunning, TargetSuspended
	if !v.suspend {
		from, to = to, from
	}
	for _, m := range g.members {
		if m.state == TargetSuspended {
			c.resumeTarget(m, CausePolicy)
		}
		if m.shadowed != v.suspend {
			m.shadowed = v.suspend
			c.record(Record{Kind: RecordShadow, Target: m.key, FromTarget: from, ToTarget: to, Cause: v.cause, Lease: c.lease(g)})
		}
	}
	if g.held && !v.suspend && !g.anyAway() {
		c.release(g)
	}
}

// release ends the suspension's account: every member runs again.
func (c *Core) release(g *gang) {
	c.charge(g)
	g.held, g.leased, g.lingerUntil = false, false, 0
	if g.forced != "" {
		g.mustRunUntil(c.now+c.policy.MinRun, g.forced)
		g.forced = ""
	}
}

// mustRunUntil promises running time; what was promised before stays.
func (g *gang) mustRunUntil(until Time, cause Cause) {
	if until > g.runUntil {
		g.runUntil, g.runCause = until, cause
	}
}

// lease is the oldest started lease that outranks the gang, for the record.
func (c *Core) lease(g *gang) LeaseID {
	for _, m := range g.members {
		if len(m.orders) > 0 {
			return m.orders[0].id
		}
	}
	for _, u := range g.gpus {
		if u.top <= int(g.priority) {
			continue
		}
		for _, l := range u.leases {
			if l.started && l.req.Priority > g.priority {
				return l.id
			}
		}
	}
	return 0
}

// unquiet sends leases that were quiet back to waiting: a target appeared.
func (c *Core) unquiet(g *gang) {
	for _, u := range g.gpus {
		for _, l := range u.leases {
			if l.state == LeaseHeld && l.req.Priority > g.priority {
				l.quiet, l.coalesced = false, false
				c.setLeaseState(l, LeaseQuiescing, CauseNewTarget)
				c.await(l)
			}
		}
	}
}

// disturb notes on leases that were quiet that the gang runs although they
// outrank it: what they take from now on teaches nothing.
func (c *Core) disturb(g *gang) {
	for _, u := range g.gpus {
		if u.top <= int(g.priority) {
			continue
		}
		for _, l := range u.leases {
			if l.req.Priority > g.priority {
				l.quiet = false
			}
		}
	}
}

// linger is how long a gang stays suspended after the last lease.
func (c *Core) linger(g *gang) time.Duration {
	switch c.policy.Linger {
	case LingerFixed:
		return c.policy.LingerMax
	case LingerAdaptive:
		return min(c.adaptiveLinger(g), c.policy.LingerMax)
	default:
		return 0
	}
}

// adaptiveLinger weighs waiting against resuming. A resume and suspend costs
// their time twice: once for the offline work, which does nothing meanwhile, and
// once for the online work, which waits for the suspend and loses a runlist cycle
// to each. Waiting costs the offline work the time until the next announcement.
// While that is unknown, waiting as long as the pair costs is never worse than
// twice the best choice (ski rental).
func (c *Core) adaptiveLinger(g *gang) time.Duration {
	var cost time.Duration
	for _, m := range g.members {
		cost = max(cost, m.suspend.mean+m.resume.mean)
	}
	breakEven := 2 * cost
	expected, known := time.Duration(0), false
	for _, u := range g.gpus {
		if u.gap.samples >= 3 && (!known || u.gap.likely() < expected) {
			expected, known = u.gap.likely(), true
		}
	}
	switch {
	case !known:
		return breakEven
	case expected <= breakEven:
		return expected
	default:
		return 0
	}
}

// budgetCap is the most the bucket holds.
func (c *Core) budgetCap() time.Duration {
	ppm := floorPPM(c.policy.ShareFloor)
	return c.policy.ShareWindow / 1_000_000 * time.Duration(1_000_000-ppm)
}

func floorPPM(share float64) int64 { return int64(share * 1_000_000) }

// charge brings the bucket up to now.
func (c *Core) charge(g *gang) {
	dt := c.now - g.budgetAt
	g.budgetAt = c.now
	ppm := floorPPM(c.policy.ShareFloor)
	if ppm == 0 || dt == 0 {
		return
	}
	switch {
	case !g.held:
		// While running it fills at (1-floor)/floor: suspended time and running
		// time then keep the ratio the floor asks for.
		dt = min(dt, time.Hour)
		g.budget = min(g.budget+dt*time.Duration(1_000_000-ppm)/time.Duration(ppm), c.budgetCap())
	case !g.byHand():
		g.budget -= dt
	}
}

// setGangTimer arms the next moment at which the decision may change by itself.
func (c *Core) setGangTimer(g *gang) {
	due, armed := Time(0), false
	add := func(t Time) {
		if t > c.now && (!armed || t < due) {
			due, armed = t, true
		}
	}
	if g.held && g.forced == "" {
		add(c.maxSuspendAt(g))
		if at, ok := c.floorAt(g); ok {
			add(at)
		}
		if !g.leased {
			add(g.lingerUntil)
		}
	}
	add(g.runUntil)
	add(g.holdUntil())
	if armed {
		c.timers.set(&g.timer, due)
	} else {
		c.timers.clear(&g.timer)
	}
}

func (g *gang) fire(c *Core) { c.mark(g) }
