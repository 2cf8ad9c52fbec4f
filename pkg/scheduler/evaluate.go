package scheduler

// evaluate decides about a job and emits the actions that follow.
func (c *Core) evaluate(j *job) {
	c.charge(j)
	c.unpin(j)
	if j.suspended && !j.anyAway() && !(c.policy.Shadow && j.any(func(t *target) bool { return t.shadowed })) {
		c.release(j)
	}
	if j.suspended && j.forced == "" {
		j.forced = c.mustRun(j)
	}
	c.follow(j)
	if c.usedUp(j) {
		c.markUnattached(j)
	}
	v := c.decide(j)
	if v.suspend && !j.suspended && !j.byHand() && c.policy.ShareFloor > 0 && j.budget <= j.leastBudget() {
		// The budget is less than a suspend and a resume take.
		j.mustRunUntil(c.now+c.policy.MinRun, CauseShareFloor)
		v = c.decide(j)
	}
	if v.suspend && !j.suspended {
		j.suspended, j.suspendedSince, j.lingerUntil = true, c.now, 0
		j.leased = v.cause == CauseLease
	}
	for _, m := range j.members {
		if c.policy.Shadow {
			c.shadow(m, v)
		} else {
			c.act(m, v)
		}
	}
	if j.suspended && !v.suspend && !j.anyAway() {
		c.release(j)
	}
	j.verdict = v
	c.setJobTimer(j)
}

// follow begins the linger when the last lease on the job ended, and ends it when a
// new lease covers the job.
func (c *Core) follow(j *job) {
	if !j.suspended {
		j.leased = false
		return
	}
	leased := j.outranked()
	if j.leased && !leased {
		j.lingerUntil = 0
		if d := c.linger(j); d > 0 {
			j.lingerUntil = c.now + d
		}
	}
	j.leased = leased
}

// act sends the action that the verdict asks for.
func (c *Core) act(t *target, v verdict) {
	t.shadowed = false
	switch {
	case t.state == TargetSuspended && !v.suspend:
		c.resumeTarget(t, v.cause)
	case t.state == TargetSuspended && t.again != "":
		c.suspendTarget(t, t.again, 0)
		c.requiesce(t.job)
	case t.state == TargetRunning && v.suspend:
		c.suspendTarget(t, v.cause, c.lease(t.job, v.cause))
		c.requiesce(t.job)
	}
}

// shadow records what act would have done, and resumes a target that was suspended
// before the policy changed.
func (c *Core) shadow(t *target, v verdict) {
	if t.state == TargetSuspended {
		c.resumeTarget(t, CausePolicy)
	}
	if t.shadowed != v.suspend {
		t.shadowed = v.suspend
		from, to := TargetRunning, TargetSuspended
		if !v.suspend {
			from, to = to, from
		}
		about := &Shadowed{Comm: t.Comm, By: t.By, GPUs: len(t.GPUs)}
		id := c.lease(t.job, v.cause)
		if l := c.leases[id]; l != nil {
			about.Client, about.Label = l.req.Client, l.req.Label
		} else {
			about.Cause = v.cause
		}
		c.record(Record{Kind: RecordShadow, Target: t.Target, FromTarget: from, ToTarget: to, Cause: v.cause, Lease: id, Shadow: about})
	}
}

// release ends the suspension of a job whose members all run.
func (c *Core) release(j *job) {
	c.charge(j)
	j.suspended, j.leased, j.lingerUntil = false, false, 0
	if j.forced != "" {
		j.mustRunUntil(c.now+c.policy.MinRun, j.forced)
		j.forced = ""
	}
}

// mustRunUntil guarantees running time; a later guarantee stays.
func (j *job) mustRunUntil(until Time, cause Cause) {
	if until > j.runUntil {
		j.runUntil, j.runCause = until, cause
	}
}

// lease returns the oldest started lease that outranks the job, for records; 0 if that is not the cause.
func (c *Core) lease(j *job, cause Cause) LeaseID {
	if cause != CauseLease {
		return 0
	}
	for _, u := range j.gpus {
		if u.top <= int(j.priority) {
			continue
		}
		for _, l := range u.leases {
			if l.started && j.outrankedBy(l) {
				return l.id
			}
		}
	}
	return 0
}

// requiesce returns leases that were held to quiescing: a target of the job is running.
func (c *Core) requiesce(j *job) {
	for _, u := range j.gpus {
		for _, l := range u.leases {
			if l.state == LeaseHeld && j.outrankedBy(l) {
				l.coalesced = false
				c.setLeaseState(l, LeaseQuiescing, CauseNewTarget)
				c.await(l)
			}
		}
	}
}
