package scheduler

import "time"

// leastBudget returns the budget that a suspension needs to begin.
func (j *job) leastBudget() time.Duration {
	cost, _ := j.suspendCost()
	return cost + j.resumeCost()
}

// mustRun returns why a suspended job has to run now; "" when it need not.
func (c *Core) mustRun(j *job) Cause {
	if c.now >= c.maxSuspendAt(j) {
		return CauseMaxSuspend
	}
	if c.now >= c.floorAt(j) {
		return CauseShareFloor
	}
	return ""
}

func (c *Core) maxSuspendAt(j *job) Time { return j.suspendedSince + c.policy.MaxSuspend }

// floorAt returns when the share floor ends the suspension: early enough for the resume
// to be complete when the budget is used up.
func (c *Core) floorAt(j *job) Time {
	if c.policy.ShareFloor <= 0 || j.byHand() {
		return Never
	}
	return c.now + max(0, j.budget-j.resumeCost())
}

// linger returns how long a job stays suspended after the last lease.
//
// A learned one compares the cost of waiting with that of a resume and a suspend. These
// cost their time twice: for the offline work, which does nothing meanwhile, and for the
// online work, which waits for the suspend and loses a runlist cycle to each. Waiting
// costs the offline work the time until the next announcement. While that time is
// unknown, waiting as long as the pair costs is at most twice as bad as the best choice
// (the ski rental problem).
func (c *Core) linger(j *job) time.Duration {
	if c.policy.Linger != LingerLearned {
		return c.policy.Linger
	}
	var cost time.Duration
	for _, m := range j.members {
		cost = max(cost, m.suspend.mean+m.resume.mean)
	}
	expected := Never
	for _, u := range j.gpus {
		if u.gap.samples >= 3 {
			expected = min(expected, u.gap.likely())
		}
	}
	switch {
	case expected == Never:
		return min(2*cost, LongestLearned)
	case expected <= 2*cost:
		return min(expected, LongestLearned)
	default:
		return 0
	}
}

func floorPPM(share float64) int64 { return int64(share * 1_000_000) }

// charge updates the budget to now.
func (c *Core) charge(j *job) {
	dt := c.now - j.budgetAt
	j.budgetAt = c.now
	ppm := floorPPM(c.policy.ShareFloor)
	if ppm == 0 || dt == 0 {
		return
	}
	switch {
	case !j.suspended:
		// While running it fills at (1-floor)/floor: suspended time and running
		// time then keep the ratio the floor asks for.
		dt = min(dt, time.Hour)
		j.budget = min(j.budget+dt*time.Duration(1_000_000-ppm)/time.Duration(ppm), c.policy.MaxBudget())
	case !j.byHand():
		j.budget -= dt
	}
}

// setJobTimer arms the timer for the next time at which the decision may change without
// an event.
func (c *Core) setJobTimer(j *job) {
	due := Never
	add := func(t Time) {
		if t > c.now {
			due = min(due, t)
		}
	}
	if j.suspended && j.forced == "" {
		add(c.maxSuspendAt(j))
		add(c.floorAt(j))
		if !j.leased {
			add(j.lingerUntil)
		}
	}
	add(j.runUntil)
	for _, m := range j.members {
		add(m.pin.until)
	}
	c.timers.set(&j.timer, due)
}

func (j *job) fire(c *Core) { c.mark(j) }
