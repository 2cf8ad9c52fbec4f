package scheduler

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// CheckInvariants returns how the state breaks the rules of the package comment; nil when
// it does not. The tests call it after every Step.
func (c *Core) CheckInvariants() error {
	for _, t := range c.order {
		if err := c.checkTarget(t); err != nil {
			return fmt.Errorf("target %v (%d): %w", t.Target, t.state, err)
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
	j := t.job
	if !slices.Contains(j.members, t) {
		return fmt.Errorf("not a member of its job")
	}
	if t.pin != (pin{}) && !j.pins {
		return fmt.Errorf("its job does not know of its pin")
	}
	if c.targets[t.Target] != t || c.leaving[t.Target] != nil {
		return fmt.Errorf("it is listed as another, or as one that has left")
	}
	next, armed := c.NextDeadline()
	switch t.state {
	case TargetSuspended:
		switch {
		case t.Class != gpreempt.Offline:
			return fmt.Errorf("rule 3: class %v is suspended", t.Class)
		case c.draining:
			return fmt.Errorf("rule 8: suspended while draining")
		case c.policy.Shadow:
			return fmt.Errorf("suspended under a shadow policy")
		case t.quarantinedUntil > c.now:
			return fmt.Errorf("rule 7: suspended in quarantine")
		case t.again != "":
			return fmt.Errorf("rule 4: it runs: %v", t.again)
		case !j.suspended:
			return fmt.Errorf("suspended, but its job is not")
		case j.pinned(c.now, true) == "" && j.top() <= int(j.priority) && c.now >= j.lingerUntil && !c.usedUp(j):
			return fmt.Errorf("rule 1: no lease outranks it, no linger lasts, no pin has it suspended, and its share is not used up")
		case !armed:
			return fmt.Errorf("rule 2: no deadline at all")
		case next > c.maxSuspendAt(j):
			return fmt.Errorf("rule 2: next deadline %v is after max_suspend at %v", next, c.maxSuspendAt(j))
		case c.now >= c.maxSuspendAt(j):
			return fmt.Errorf("rule 2: suspended past max_suspend")
		}
		for _, u := range j.gpus {
			if u.breakerOpen {
				return fmt.Errorf("rule 7: suspended behind the open breaker of GPU %v", u.id)
			}
		}
		for _, m := range j.members {
			if m.state == TargetRunning || m.state == TargetQuarantined {
				return fmt.Errorf("its job is torn: %v runs", m.Target)
			}
		}
		if c.now >= c.floorAt(j) && j.budget < 0 {
			return fmt.Errorf("share floor: suspended with budget %v", j.budget)
		}
	case TargetRunning:
		if j.verdict.suspend && !c.policy.Shadow {
			return fmt.Errorf("runs although it is to be suspended (%s)", j.verdict.cause)
		}
		if v := c.decide(j); v.suspend != j.verdict.suspend {
			return fmt.Errorf("the decision is stale: %v, now %v", j.verdict, v)
		}
	case TargetSuspending, TargetResuming:
		if t.flight.is(ActRecord) && (t.state == TargetSuspending || t.resumeAt <= c.now) {
			return fmt.Errorf("rule 4: away without an action")
		}
		if hung := t.flight.late && !t.flight.stuck; !hung && t.timer.index == 0 {
			return fmt.Errorf("an action in flight without a deadline")
		}
	case TargetQuarantined:
		if t.timer.index == 0 {
			return fmt.Errorf("a quarantine without an end")
		}
	default:
		return fmt.Errorf("it is listed in a state that no live target has")
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
		if !l.client.id.IsAdmin() {
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
	if err := c.checkJobs(); err != nil {
		return err
	}
	if err := c.checkOwners(); err != nil {
		return err
	}
	if len(c.dirty) != 0 {
		return fmt.Errorf("%d jobs left unsettled", len(c.dirty))
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

// checkOwners compares the owners with the clients, and the jobs with their members.
func (c *Core) checkOwners() error {
	owners := map[gpreempt.ProcessKey]int{}
	for _, cl := range c.clients {
		if !cl.owner.IsZero() {
			owners[cl.owner]++
		}
	}
	if !maps.Equal(owners, c.owners) {
		return fmt.Errorf("clients have owners %v, counted are %v", owners, c.owners)
	}
	for _, t := range c.order {
		if want := c.ownersOf(t); !slices.Equal(t.job.owners, want) {
			return fmt.Errorf("the job of target %v has owners %v, its own are %v", t.Target, t.job.owners, want)
		}
	}
	return nil
}

// checkJobs compares the jobs with their members, and what is measured of them.
func (c *Core) checkJobs() error {
	type count struct{ members, away int }
	want, got := map[string]count{}, map[string]count{}
	for _, t := range c.order {
		name, p := t.Job, t.job.progress
		if t.Class != gpreempt.Offline || name == "" {
			if p != nil {
				return fmt.Errorf("target %v is of job %s, and should not be", t.Target, p.name)
			}
			continue
		}
		if p != c.progress[name] {
			return fmt.Errorf("target %v is not of job %s", t.Target, name)
		}
		if !slices.Contains(p.parts, t.job) {
			return fmt.Errorf("the parts of job %s and target %v do not fit", name, t.Target)
		}
		n := want[name]
		n.members++
		if t.isAway() {
			n.away++
		}
		want[name] = n
	}
	for name, p := range c.progress {
		got[name] = count{p.members, p.away}
	}
	if !maps.Equal(want, got) {
		return fmt.Errorf("jobs count members %+v, there are %+v", got, want)
	}
	return nil
}

// Leftovers returns an error for everything that the core still holds when no client
// and no target remains. limits are those of the core.
func (c *Core) Leftovers(limits Limits) error {
	var errs []error
	for what, n := range map[string]int{
		"targets": len(c.targets), "targets in order": len(c.order), "jobs": len(c.progress), "leases": len(c.leases), "clients": len(c.clients), "owners": len(c.owners), "users": len(c.perUser),
		"leaving": len(c.leaving), "dirty targets": len(c.dirtyTargets), "timers": len(c.timers.items), "dirty jobs": len(c.dirty), "pending leases": len(c.pending),
	} {
		if n != 0 {
			errs = append(errs, fmt.Errorf("%d %s left", n, what))
		}
	}
	for _, u := range c.gpuOrder {
		if len(u.jobs) != 0 || len(u.leases) != 0 || u.started != [gpreempt.MaxPriority + 1]int{} || u.top != -1 || u.breakerOpen {
			errs = append(errs, fmt.Errorf("GPU %v keeps %d jobs, %d leases, counts %v, top %d, breaker %v", u.id, len(u.jobs), len(u.leases), u.started, u.top, u.breakerOpen))
		}
	}
	if n := len(c.free); n > 2*limits.LeasesTotal+1 {
		errs = append(errs, fmt.Errorf("%d leases on the free list, more than ever lived at once", n))
	}
	free := map[*lease]bool{}
	for _, l := range c.free {
		if free[l] {
			errs = append(errs, fmt.Errorf("lease %d is free twice", l.id))
		}
		free[l] = true
		if l.timer.index != 0 {
			errs = append(errs, fmt.Errorf("free lease %d has a timer", l.id))
		}
	}
	if len(c.ended) > endedKept || len(c.endedByID) != len(c.ended) || len(c.requests) > len(c.ended) {
		errs = append(errs, fmt.Errorf("%d ended leases kept, %d by id, %d request ids", len(c.ended), len(c.endedByID), len(c.requests)))
	}
	return errors.Join(errs...)
}

// CheckExplanation compares the checks of one target's explanation with the decision; n
// selects the target.
func (c *Core) CheckExplanation(n int) error {
	if len(c.order) == 0 {
		return nil
	}
	t := c.order[n%len(c.order)]
	e, _ := c.Explain(t.Target)
	decides, result := 0, CheckPass
	for _, check := range e.Checks {
		if check.Decides {
			decides, result = decides+1, check.Result
		}
	}
	if suspend := c.decide(t.job).suspend; decides != 1 || suspend != (result == CheckSuspend) {
		return fmt.Errorf("target %v, suspend %v, is explained by %+v", t.Target, suspend, e)
	}
	return nil
}

// LeasesPerUser returns the number of live leases of each user.
func (c *Core) LeasesPerUser() map[UserID]int { return c.perUser }
