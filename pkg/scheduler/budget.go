package scheduler

import "time"

// leastBudget returns the budget that a suspension needs to begin.
func (g *gang) leastBudget() time.Duration {
	cost, _ := g.suspendCost()
	return cost + g.resumeCost()
}

// mustRun returns why a suspended gang has to run now; "" when it need not.
func (c *Core) mustRun(g *gang) Cause {
	if c.now >= c.maxSuspendAt(g) {
		return CauseMaxSuspend
	}
	if due, ok := c.floorAt(g); ok && c.now >= due {
		return CauseShareFloor
	}
	return ""
}

func (c *Core) maxSuspendAt(g *gang) Time { return g.suspendedSince + c.policy.MaxSuspend }

// floorAt returns when the share floor ends the suspension: early enough for the resume
// to be complete when the budget is used up; false without a floor.
func (c *Core) floorAt(g *gang) (Time, bool) {
	if c.policy.ShareFloor <= 0 || g.byHand() {
		return 0, false
	}
	return c.now + max(0, g.budget-g.resumeCost()), true
}

// budgetCap returns the largest budget.
func (c *Core) budgetCap() time.Duration {
	ppm := floorPPM(c.policy.ShareFloor)
	return c.policy.ShareWindow / 1_000_000 * time.Duration(1_000_000-ppm)
}

func floorPPM(share float64) int64 { return int64(share * 1_000_000) }

// charge updates the budget to now.
func (c *Core) charge(g *gang) {
	dt := c.now - g.budgetAt
	g.budgetAt = c.now
	ppm := floorPPM(c.policy.ShareFloor)
	if ppm == 0 || dt == 0 {
		return
	}
	switch {
	case !g.suspended:
		// While running it fills at (1-floor)/floor: suspended time and running
		// time then keep the ratio the floor asks for.
		dt = min(dt, time.Hour)
		g.budget = min(g.budget+dt*time.Duration(1_000_000-ppm)/time.Duration(ppm), c.budgetCap())
	case !g.byHand():
		g.budget -= dt
	}
}

// setGangTimer arms the timer for the next time at which the decision may change without
// an event.
func (c *Core) setGangTimer(g *gang) {
	due, armed := Time(0), false
	add := func(t Time) {
		if t > c.now && (!armed || t < due) {
			due, armed = t, true
		}
	}
	if g.suspended && g.forced == "" {
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
