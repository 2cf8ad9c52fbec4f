package scheduler

import (
	"slices"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// coverage is the state of the jobs that a lease outranks on its GPUs.
type coverage struct {
	// quiet: all of them are suspended; waiting: some will be, by actions in flight.
	quiet, waiting bool
	suspended      int   // targets
	cannot         int   // targets that cannot be suspended
	refused        Cause // why they cannot, the worst reason
	blocked        Cause // why some stay, the worst reason
}

func (c *Core) coverage(l *lease) coverage {
	c.scans++
	s := coverage{quiet: true}
	for _, u := range l.gpus {
		for _, j := range u.jobs {
			if j.seen != c.scans && j.below(l) {
				j.seen = c.scans
				c.cover(&s, j)
			}
		}
	}
	return s
}

func (c *Core) cover(s *coverage, j *job) {
	if j.fresh() {
		s.suspended += len(j.members)
		return
	}
	for _, m := range j.members {
		if why := c.cannotSuspend(m); why != "" {
			s.cannot++
			s.refused = worse(s.refused, why)
		}
	}
	switch {
	case j.coming(c.policy.Shadow):
		s.quiet, s.waiting = false, true
	case j.verdict.suspend:
		s.quiet, s.blocked = false, worse(s.blocked, CauseShadow)
	case j.verdict.cause == CauseNotReady && j.attachComing():
		s.quiet, s.waiting = false, true
	default:
		s.quiet, s.blocked = false, worse(s.blocked, blockReason(j.verdict.cause))
		if slices.ContainsFunc(j.gpus, func(u *gpu) bool { return u.breakerOpen }) {
			s.blocked = worse(s.blocked, CauseUnsafe)
		}
	}
}

// fresh reports whether all of the job is suspended, new queues included.
func (j *job) fresh() bool {
	for _, m := range j.members {
		if m.state != TargetSuspended || m.again != "" {
			return false
		}
	}
	return true
}

// coming reports whether the job is not suspended yet, but will be.
func (j *job) coming(shadow bool) bool { return j.verdict.suspend && !shadow && !j.fresh() }

// mustWait reports, at little cost, whether a lease has to wait for a job and has nothing
// else to do. While many targets are suspended one by one, each result looks at one job,
// the last that was waited for, and not at all of them.
func (c *Core) mustWait(l *lease) bool {
	if c.policy.Shadow || !l.answered && c.now >= l.created+l.req.MaxWait {
		return false
	}
	if j := l.awaits; j != nil && j.coming(false) && j.below(l) && j.touches(l.gpus) {
		return true
	}
	for _, u := range slices.Backward(l.gpus) {
		for _, j := range slices.Backward(u.jobs) {
			if j.coming(false) && j.below(l) {
				l.awaits = j
				return true
			}
		}
	}
	l.awaits = nil
	return false
}

func (j *job) touches(gpus []*gpu) bool {
	return slices.ContainsFunc(j.gpus, func(u *gpu) bool { return slices.Contains(gpus, u) })
}

// severity has the reasons in the answer to an announcement for a job that runs, the worst last: that is the one
// that an admin should see first.
var severity = slices.Concat([]Cause{"", CauseShadow, CauseShareFloor, CauseHold, CauseStuck}, gpreempt.Obstacles(), []Cause{CauseUnsafe, CauseDrain})

// blockReason returns the reason for a job that runs for a cause.
func blockReason(cause Cause) Cause {
	switch {
	case cause == CauseMaxSuspend, cause == CauseShareCapOver:
		return CauseShareFloor
	case cause == CauseQuarantine:
		return gpreempt.ReasonCannotSuspend
	case slices.Contains(severity, cause):
		return cause
	}
	return CauseUnsafe
}

// worse returns the worse of two reasons.
func worse(a, b Cause) Cause {
	return severity[max(slices.Index(severity, a), slices.Index(severity, b))]
}

// answer is an answer that the GPUs are not quiet.
func (s coverage) answer(reason Cause) Answer {
	return Answer{Reason: reason, Suspended: s.suspended, CannotSuspend: s.cannot}
}

// instead returns the reason for GPUs that are not quiet, where reason is only why the answer is
// given now: that of a target that cannot be suspended, if there is one.
func (s coverage) instead(reason Cause) Cause {
	if s.cannot > 0 {
		return worse(s.blocked, s.refused)
	}
	return reason
}
