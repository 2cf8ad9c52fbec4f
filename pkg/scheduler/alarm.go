package scheduler

import (
	"slices"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// alarm opens a breaker, and has the suspends fail that are in flight on the GPU. For CauseReset,
// the announcements that wait for the GPU are answered.
func (c *Core) alarm(g *gpu, cause Cause) {
	for _, gg := range g.gangs {
		for _, t := range gg.members {
			if t.state == TargetSuspending && slices.Contains(t.gpus, g.id) && !slices.Contains(t.doubted, g.id) {
				t.doubted = append(t.doubted, g.id)
			}
		}
	}
	for _, l := range c.pending {
		l.reset = l.reset || cause == CauseReset && l.started && !l.answered && l.covers(g)
	}
	c.openBreaker(g, cause)
}

func (c *Core) queueReset(ev QueueReset) {
	r := Record{Kind: RecordReset, GPU: ev.GPU, Target: ev.Process, Suspects: len(ev.Suspects)}
	if t := c.targets[ev.Process]; t != nil {
		r.Class = t.class
	}
	c.record(r)
	c.alarm(c.gpu(ev.GPU), CauseReset)
	for _, key := range ev.Suspects {
		t := c.targets[key]
		if t == nil || t.class != gpreempt.Offline {
			continue
		}
		c.quarantine(t, CauseReset)
		if t.state == TargetRunning {
			c.setTargetState(t, TargetQuarantined, CauseReset, 0, 0)
		}
		if t.state == TargetQuarantined {
			c.setTargetTimer(t)
		}
		c.mark(t.gang)
	}
}

// covers reports whether the lease asks that targets leave the GPU.
func (l *lease) covers(u *gpu) bool {
	return slices.Contains(l.gpus, u) || l.target != nil && slices.Contains(l.target.gang.gpus, u)
}

// disbelieve has a suspend fail that the mechanism calls good: its GPUs raised an alarm.
func (c *Core) disbelieve(t *target) {
	cause := CauseReset
	if t.quarantinedUntil <= c.now || t.quarantineCause != CauseReset {
		cause = CauseHardware
		c.quarantine(t, CauseQuarantine)
	}
	c.openBreakers(OutcomeHardware, t.doubted, t)
	c.failAttachment(t.attachment, OutcomeHardware)
	c.resumeTarget(t, cause)
	c.mark(t.gang)
}
