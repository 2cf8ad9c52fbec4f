package scheduler

import "slices"

// coverage is the state of the gangs that a lease outranks on its GPUs.
type coverage struct {
	// quiet: all of them are suspended; waiting: some will be, by actions in flight.
	quiet, waiting bool
	suspended      int           // targets
	cannot         int           // targets that cannot be suspended
	blocked        QuiesceReason // why some stay, the worst reason
}

func (c *Core) coverage(l *lease) coverage {
	c.scans++
	s := coverage{quiet: true}
	if l.target != nil {
		c.cover(&s, l.target.gang)
	}
	for _, u := range l.gpus {
		for _, g := range u.gangs {
			if g.seen != c.scans && g.below(l) {
				g.seen = c.scans
				c.cover(&s, g)
			}
		}
	}
	return s
}

func (c *Core) cover(s *coverage, g *gang) {
	if g.fresh() {
		s.suspended += len(g.members)
		return
	}
	for _, m := range g.members {
		if c.cannotSuspend(m) {
			s.cannot++
		}
	}
	switch {
	case g.coming(c.policy.Shadow):
		s.quiet, s.waiting = false, true
	case g.verdict.suspend:
		s.quiet, s.blocked = false, worse(s.blocked, QuiesceShadow)
	case g.verdict.cause == CauseNotReady && g.attachComing():
		s.quiet, s.waiting = false, true
	default:
		s.quiet, s.blocked = false, worse(s.blocked, blockReason(g.verdict.cause))
		if slices.ContainsFunc(g.gpus, func(u *gpu) bool { return u.breakerOpen }) {
			s.blocked = worse(s.blocked, QuiesceUnsafe)
		}
	}
}

// fresh reports whether all of the gang is suspended, new queues included.
func (g *gang) fresh() bool {
	for _, m := range g.members {
		if m.state != TargetSuspended || m.runsAgain() != "" {
			return false
		}
	}
	return true
}

// coming reports whether the gang is not suspended yet, but will be.
func (g *gang) coming(shadow bool) bool { return g.verdict.suspend && !shadow && !g.fresh() }

// mustWait reports, at little cost, whether a lease has to wait for a gang and has nothing
// else to do. While many targets are suspended one by one, each result looks at one gang,
// the last that was waited for, and not at all of them.
func (c *Core) mustWait(l *lease) bool {
	if l.target != nil || c.policy.Shadow || !l.answered && c.now >= l.created+l.req.MaxWait {
		return false
	}
	if g := l.awaits; g != nil && g.coming(false) && g.below(l) && g.touches(l.gpus) {
		return true
	}
	for _, u := range slices.Backward(l.gpus) {
		for _, g := range slices.Backward(u.gangs) {
			if g.coming(false) && g.below(l) {
				l.awaits = g
				return true
			}
		}
	}
	l.awaits = nil
	return false
}

func (g *gang) touches(gpus []*gpu) bool {
	return slices.ContainsFunc(g.gpus, func(u *gpu) bool { return slices.Contains(gpus, u) })
}

// blockReason returns the reason in the answer to an announcement for a gang that runs.
func blockReason(cause Cause) QuiesceReason {
	switch cause {
	case CauseDrain:
		return QuiesceDraining
	case CauseHold:
		return QuiesceHold
	case CauseStuck:
		return QuiesceStuck
	case CauseDRMQueues:
		return QuiesceDRMQueues
	case CauseCannotSuspend, CauseQuarantine:
		return QuiesceCannotSuspend
	case CauseShareFloor, CauseMaxSuspend:
		return QuiesceShareFloor
	default:
		return QuiesceUnsafe
	}
}

// answer is an answer that the GPUs are not quiet.
func (s coverage) answer(reason QuiesceReason) Answer {
	return Answer{Reason: reason, Suspended: s.suspended, CannotSuspend: s.cannot}
}

// instead returns the reason for GPUs that are not quiet, where reason is only why the answer is
// given now: that of a target that cannot be suspended, if there is one.
func (s coverage) instead(reason QuiesceReason) QuiesceReason {
	if s.cannot > 0 {
		return worse(s.blocked, QuiesceCannotSuspend)
	}
	return reason
}

// worse returns the reason that an admin should see first.
func worse(a, b QuiesceReason) QuiesceReason {
	order := []QuiesceReason{QuiesceNone, QuiesceShadow, QuiesceShareFloor, QuiesceHold, QuiesceStuck, QuiesceCannotSuspend, QuiesceDRMQueues, QuiesceUnsafe, QuiesceDraining}
	if slices.Index(order, a) > slices.Index(order, b) {
		return a
	}
	return b
}
