package scheduler

// evaluate decides about a gang and emits the actions that follow.
func (c *Core) evaluate(g *gang) {
	c.charge(g)
	if g.suspended && !g.anyAway() && !(c.policy.Shadow && g.any(func(t *target) bool { return t.shadowed })) {
		c.release(g)
	}
	if g.suspended && g.forced == "" {
		g.forced = c.mustRun(g)
	}
	c.follow(g)
	v := c.decide(g)
	if v.suspend && !g.suspended && !g.byHand() && c.policy.ShareFloor > 0 && g.budget <= g.leastBudget() {
		// The budget is less than a suspend and a resume take.
		g.mustRunUntil(c.now+c.policy.MinRun, CauseShareFloor)
		v = c.decide(g)
	}
	if v.suspend && !g.suspended {
		g.suspended, g.suspendedSince, g.lingerUntil = true, c.now, 0
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

// follow begins the linger when the last lease on the gang ended, and ends it when a
// new lease covers the gang.
func (c *Core) follow(g *gang) {
	if !g.suspended {
		g.leased = false
		return
	}
	leased := g.outranked()
	if g.leased && !leased {
		g.lingerUntil = 0
		if c.policy.Linger > 0 {
			g.lingerUntil = c.now + c.policy.Linger
		}
	}
	g.leased = leased
}

func (c *Core) act(g *gang, v verdict) {
	for _, m := range g.members {
		m.shadowed = false
		switch {
		case m.state == TargetSuspended && !v.suspend:
			c.resumeTarget(m, v.cause)
		case m.state == TargetSuspended && m.runsAgain() != "":
			c.suspendTarget(m, m.runsAgain(), 0)
			c.requiesce(g)
		case m.state == TargetRunning && v.suspend:
			c.suspendTarget(m, v.cause, c.lease(g))
			c.requiesce(g)
		}
	}
	if g.suspended && !v.suspend && !g.anyAway() {
		c.release(g)
	}
}

// shadow records what act would have done, and resumes targets that were suspended
// before the policy changed.
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
	if g.suspended && !v.suspend && !g.anyAway() {
		c.release(g)
	}
}

// release ends the suspension of a gang whose members all run.
func (c *Core) release(g *gang) {
	c.charge(g)
	g.suspended, g.leased, g.lingerUntil = false, false, 0
	if g.forced != "" {
		g.mustRunUntil(c.now+c.policy.MinRun, g.forced)
		g.forced = ""
	}
}

// mustRunUntil guarantees running time; a later guarantee stays.
func (g *gang) mustRunUntil(until Time, cause Cause) {
	if until > g.runUntil {
		g.runUntil, g.runCause = until, cause
	}
}

// lease returns the oldest started lease that outranks the gang, for records.
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
			if l.started && g.outrankedBy(l) {
				return l.id
			}
		}
	}
	return 0
}

// requiesce returns leases that were held to quiescing: a target of the gang is running.
func (c *Core) requiesce(g *gang) {
	for _, u := range g.gpus {
		for _, l := range u.leases {
			if l.state == LeaseHeld && g.outrankedBy(l) {
				l.coalesced = false
				c.setLeaseState(l, LeaseQuiescing, CauseNewTarget)
				c.await(l)
			}
		}
	}
}
