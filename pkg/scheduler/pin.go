package scheduler

import "github.com/gpreempt/gpreempt/pkg/gpreempt"

// pin is the last Pin of a target; without a cause it has none.
type pin struct {
	cause Cause
	until Time
}

// byAdmin reports whether it is an admin's.
func (p pin) byAdmin() bool { return p.cause == CauseHold || p.cause == CauseByHand }

// suspends reports whether it has the target suspended rather than run.
func (p pin) suspends() bool { return p.cause == CauseByHand || p.cause == CauseHQDBudget }

func (c *Core) pinTarget(ev Pin) {
	t, to := c.targets[ev.Target], pin{ev.Cause, c.now + ev.For}
	if t == nil || !to.byAdmin() && t.pin.byAdmin() && c.now < t.pin.until {
		return
	}
	c.charge(t.job)
	t.pin, t.job.pins = to, true
	if to.cause == CauseHold {
		t.quarantinedUntil = c.now
		if t.state == TargetQuarantined {
			c.setTargetState(t, TargetRunning, CauseHold, 0, 0)
			c.markTarget(t)
		}
	}
	c.mark(t.job)
	c.markUnattached(t.job)
}

// unpin ends the pins whose time is over. What is parked no longer says so until it is resumed.
func (c *Core) unpin(j *job) {
	if !j.pins {
		return
	}
	j.pins = false
	for _, m := range j.members {
		if c.now > m.pin.until || c.now == m.pin.until && (m.pin.byAdmin() || m.pin.suspends()) {
			m.pin = pin{}
		}
		j.pins = j.pins || m.pin != pin{}
	}
}

// pinned returns the cause of a pin that has the job suspended, or run; "" for none.
func (j *job) pinned(now Time, suspended bool) Cause {
	if !j.pins {
		return ""
	}
	for _, m := range j.members {
		if now < m.pin.until && m.pin.suspends() == suspended {
			return m.pin.cause
		}
	}
	return ""
}

// byHand reports whether an admin has the job suspended, whatever its share floor.
func (j *job) byHand() bool {
	return j.pins && j.any(func(t *target) bool { return t.pin.cause == CauseByHand })
}

// pinnedUntil returns when the last pin of a direction ends.
func (j *job) pinnedUntil(suspended bool) (until Time) {
	for _, m := range j.members {
		if m.pin.suspends() == suspended {
			until = max(until, m.pin.until)
		}
	}
	return until
}

// SuspendResult says whether a target that is pinned is suspended, and if not, why; final is
// false while it may still become so by an action in flight.
func (c *Core) SuspendResult(key gpreempt.ProcessKey) (suspended bool, why Cause, final bool) {
	t := c.targets[key]
	if t == nil {
		return false, CauseEnded, true
	}
	s := coverage{quiet: true}
	c.cover(&s, t.job)
	if s.quiet {
		return true, CauseDone, true
	}
	return false, s.blocked, !s.waiting
}
