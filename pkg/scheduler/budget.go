package scheduler

import (
	"cmp"
	"time"
)

// leastBudget returns the budget that a suspension needs to begin.
func (j *job) leastBudget() time.Duration {
	cost, _ := j.suspendCost()
	return cost + j.resumeCost()
}

// mustRun returns why a suspended job has to run now; "" when it need not. Where no lease asks for the
// suspension nothing is cut short: that is how one by the share cap ends.
func (c *Core) mustRun(j *job) Cause {
	late, short := c.now >= c.maxSuspendAt(j), c.now >= c.floorAt(j)
	if (late || short) && j.verdict.cause == CauseShareCap && !j.outranked() {
		return CauseShareCapOver
	}
	return cmp.Or(when(late, CauseMaxSuspend), when(short, CauseShareFloor))
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

// whole is a share of 1, in millionths.
const whole = 1_000_000

func millionths(share float64) int64 { return int64(share * whole) }

// charge updates the buckets to now.
func (c *Core) charge(j *job) {
	dt := c.now - j.chargedAt
	j.chargedAt = c.now
	if floor := millionths(c.policy.ShareFloor); floor > 0 && !(j.suspended && j.byHand()) {
		j.budget = flow(j.budget, dt, j.suspended, whole-floor, c.policy.MaxBudget())
	}
	if c.capped(j) {
		// It compensates for being late, and not for all that it ran because it could not be suspended.
		j.credit = max(flow(j.credit, dt, !j.suspended, millionths(c.policy.ShareCap), c.policy.maxCredit()), -c.policy.MinRun)
	}
}

// flow returns what is left in a bucket after dt. It empties while its time is used, and fills up to
// most meanwhile, so that the two times keep the ratio of share to the rest.
func flow(left, dt time.Duration, used bool, share int64, most time.Duration) time.Duration {
	if used {
		return left - dt
	}
	return min(left+min(dt, time.Hour)*time.Duration(share)/time.Duration(whole-share), most)
}

// capped reports whether the share cap applies to the job. What counts is that it is not suspended:
// whether it has work is not known of every queue.
func (c *Core) capped(j *job) bool {
	return c.policy.ShareCap > 0 && millionths(c.policy.ShareCap) < whole && j.offline() && len(j.gpus) > 0
}

// usedUp reports whether the share cap has the job suspended: when its credit is used, and until that
// is full again. Shorter turns would keep the same share, but each stops every queue of the GPU
// twice, also those of others.
func (c *Core) usedUp(j *job) bool {
	if !c.capped(j) {
		return false
	}
	if j.suspended && j.verdict.cause == CauseShareCap {
		return j.credit < c.policy.maxCredit()
	}
	return j.credit <= 0
}

// capAt returns when the share cap begins or ends to suspend the job.
func (c *Core) capAt(j *job) Time {
	switch share, missing := millionths(c.policy.ShareCap), int64(c.policy.maxCredit()-j.credit); {
	case !c.capped(j):
	case !j.suspended:
		return c.now + j.credit
	case j.verdict.cause == CauseShareCap:
		return c.now + time.Duration((missing*(whole-share)+share-1)/share)
	}
	return Never
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
	add(c.capAt(j))
	if j.pins {
		for _, m := range j.members {
			add(m.pin.until)
		}
	}
	c.timers.set(&j.timer, due)
}

func (j *job) fire(c *Core) { c.mark(j) }
