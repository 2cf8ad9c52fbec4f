package scheduler

import (
	"fmt"
	"maps"
	"slices"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// CheckInvariants reports whether the state keeps the promises of the package
// comment. It is meant for tests, after every Step; it is never wrong on a
// healthy core and costs time proportional to the state.
func (c *Core) CheckInvariants() error {
	for _, t := range c.order {
		if err := c.checkTarget(t); err != nil {
			return fmt.Errorf("target %v (%d): %w", t.key, t.state, err)
		}
	}
	for id, l := range c.leases {
		if err := c.checkLease(l); err != nil {
			return fmt.Errorf("lease %d (%d): %w", id, l.state, err)
		}
	}
	return c.checkBooks()
}

func (c *Core) checkTarget(t *target) error {
	g := t.gang
	if !slices.Contains(g.members, t) {
		return fmt.Errorf("not a member of its gang")
	}
	if t.attachment != c.attachments[t.key] || t.attachment.target != t {
		return fmt.Errorf("its attachment is another's")
	}
	next, armed := c.NextDeadline()
	switch t.state {
	case TargetSuspended:
		switch {
		case t.class != gpreempt.Offline:
			return fmt.Errorf("rule 3: class %v is suspended", t.class)
		case c.draining:
			return fmt.Errorf("rule 8: suspended while draining")
		case c.policy.Shadow:
			return fmt.Errorf("suspended under a shadow policy")
		case t.quarantinedUntil > c.now:
			return fmt.Errorf("rule 7: suspended in quarantine")
		case t.queues != t.suspendedQueues:
			return fmt.Errorf("rule 4: a queue was born and runs")
		case !g.held:
			return fmt.Errorf("suspended, but its gang is not held")
		case !g.byHand() && g.top() <= int(g.priority) && c.now >= g.lingerUntil:
			return fmt.Errorf("rule 1: no lease outranks it and no linger lasts")
		case !armed:
			return fmt.Errorf("rule 2: no deadline at all")
		case next > c.maxSuspendAt(g):
			return fmt.Errorf("rule 2: next deadline %v is after max_suspend at %v", next, c.maxSuspendAt(g))
		case c.now >= c.maxSuspendAt(g):
			return fmt.Errorf("rule 2: suspended past max_suspend")
		}
		for _, u := range g.gpus {
			if u.breakerOpen {
				return fmt.Errorf("rule 7: suspended behind the open breaker of GPU %v", u.id)
			}
		}
		for _, m := range g.members {
			if m.state == TargetRunning || m.state == TargetQuarantined {
				return fmt.Errorf("its gang is torn: %v runs", m.key)
			}
		}
		if due, ok := c.floorAt(g); ok && c.now >= due && g.budget < 0 {
			return fmt.Errorf("share floor: suspended with budget %v", g.budget)
		}
	case TargetRunning:
		if g.verdict.suspend && !c.policy.Shadow {
			return fmt.Errorf("runs although it is to be suspended (%s)", g.verdict.cause)
		}
		if v := c.decide(g); v.suspend != g.verdict.suspend {
			return fmt.Errorf("the decision is stale: %v, now %v", g.verdict, v)
		}
	case TargetSuspending, TargetResuming:
		if t.seq == 0 && t.attachment.state != detaching && !t.retrying {
			return fmt.Errorf("rule 4: away without an action")
		}
		if !t.stuck && t.timer.index == 0 {
			return fmt.Errorf("an action in flight without a deadline")
		}
	case TargetQuarantined:
		if t.timer.index == 0 {
			return fmt.Errorf("a quarantine without an end")
		}
	default:
		return fmt.Errorf("it is listed in a state that is none of a living target")
	}
	return nil
}

func (c *Core) checkLease(l *lease) error {
	switch {
	case l.timer.index == 0:
		return fmt.Errorf("no deadline")
	case c.now >= l.expires:
		return fmt.Errorf("lives past its expiry")
	case !l.answered && c.now >= l.created+l.req.MaxWait:
		return fmt.Errorf("rule 5: unanswered after max_wait")
	case !l.answered && !l.pending:
		return fmt.Errorf("rule 5: unanswered and forgotten")
	case l.state == LeaseQuiescing && !l.pending:
		return fmt.Errorf("not quiet and forgotten")
	case l.started != (l.state == LeaseQuiescing || l.state == LeaseHeld):
		return fmt.Errorf("started is %v in this state", l.started)
	}
	return nil
}

// checkBooks checks that what is counted twice is counted the same.
func (c *Core) checkBooks() error {
	started := map[*gpu][gpreempt.MaxPriority + 1]int{}
	perClient := map[*client]int{}
	perUser := map[UserID]int{}
	for _, l := range c.leases {
		perClient[l.client]++
		if l.client.id != 0 {
			perUser[l.req.User]++
		}
		for _, u := range l.gpus {
			n := started[u]
			if l.started {
				n[l.req.Priority]++
			}
			started[u] = n
		}
	}
	for _, u := range c.gpuOrder {
		if u.started != started[u] {
			return fmt.Errorf("GPU %v counts leases %v, there are %v", u.id, u.started, started[u])
		}
		if u.setTop() {
			return fmt.Errorf("GPU %v has a stale top priority", u.id)
		}
	}
	for _, cl := range c.clients {
		if len(cl.leases) != perClient[cl] {
			return fmt.Errorf("client %d lists %d leases and holds %d", cl.id, len(cl.leases), perClient[cl])
		}
	}
	if !maps.Equal(perUser, c.perUser) {
		return fmt.Errorf("users hold leases %v, counted are %v", perUser, c.perUser)
	}
	if len(c.dirty) != 0 {
		return fmt.Errorf("%d gangs left unsettled", len(c.dirty))
	}
	for i, t := range c.timers.items {
		if t.index != i+1 || t.due < c.timers.items[0].due {
			return fmt.Errorf("the timer heap is out of order at %d", i)
		}
		if t.due <= c.now {
			return fmt.Errorf("a deadline of %v is due at %v and did not fire", t.due, c.now)
		}
	}
	return nil
}
