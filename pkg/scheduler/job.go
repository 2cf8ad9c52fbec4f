package scheduler

import (
	"cmp"
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// job is the targets that are suspended together: the offline targets of a job, or one target.
// Suspending only some ranks would leave the others waiting on their GPUs, and with unrelated leases
// on each GPU a job of eight would almost never run as a whole. A lease does not suspend who announced
// it with the rest of its job: those that the leases of different owners spare are jobs apart.
type job struct {
	members  []*target // by key
	gpus     []*gpu    // union of the members', by id
	priority gpreempt.Priority
	progress *progress // of all targets with its name; nil for one without a name
	// owners are those of Core.owners whose leases do not suspend it, by key.
	owners []gpreempt.ProcessKey

	dirty bool
	seen  uint64 // the last of Core.scans that counted it

	// suspended: the decision to suspend stands, or a member is still away because of it.
	suspended      bool
	suspendedSince Time
	// leased: the last decision was for a lease, not for the linger after one.
	leased      bool
	lingerUntil Time
	// forced: max_suspend or the share floor ended the suspension; it must run
	// before it can be suspended again.
	forced   Cause
	runUntil Time
	runCause Cause

	// budget is the time it may still be suspended under the share floor, credit the time it may
	// still run under the share cap: buckets, charged up to chargedAt.
	budget, credit time.Duration
	chargedAt      Time

	// pins: a member has one.
	pins bool
	// verdict is the last decision.
	verdict verdict
	timer   timer
}

// join makes the target a member of the job where it belongs.
func (c *Core) join(t *target) {
	old, owners, p := t.job, c.ownersOf(t), c.progressOf(t)
	j := p.part(owners)
	if j == nil {
		j = &job{progress: p, budget: c.policy.MaxBudget(), credit: c.policy.maxCredit(), chargedAt: c.now, owners: owners}
		j.timer.owner = j
	}
	p.add(c.now, 1, t.countAway())
	if old != nil {
		c.charge(j)
		c.inherit(j, old, t.isAway())
		c.forget(old.progress)
	}
	t.job = j
	at, _ := slices.BinarySearchFunc(j.members, t.Target, byKey)
	j.members = slices.Insert(j.members, at, t)
	if p != nil && len(j.members) == 1 {
		p.parts = append(p.parts, j)
	}
	c.regroup(j)
	c.mark(j)
}

// inherit carries over the buckets and the deadlines of a member's old job: a new class,
// priority, job or set of GPUs must not refill them or restart max_suspend.
// Where two jobs join, the more favourable guarantee applies.
func (c *Core) inherit(j, old *job, away bool) {
	j.budget, j.credit = min(j.budget, old.budget), min(j.credit, old.credit)
	j.mustRunUntil(old.runUntil, old.runCause)
	if !old.suspended {
		return
	}
	if !away {
		if old.forced != "" { // the rest of its old job does not run yet
			j.mustRunUntil(c.now+c.policy.MinRun, old.forced)
		}
		return
	}
	if !j.suspended {
		j.suspended, j.suspendedSince, j.verdict = true, old.suspendedSince, old.verdict
	}
	j.suspendedSince = min(j.suspendedSince, old.suspendedSince)
	j.forced = cmp.Or(j.forced, old.forced)
}

func (c *Core) leave(t *target) {
	j := t.job
	c.charge(j)
	j.members = slices.DeleteFunc(j.members, func(m *target) bool { return m == t })
	j.progress.add(c.now, -1, -t.countAway())
	if p := j.progress; p != nil && len(j.members) == 0 {
		p.parts = slices.DeleteFunc(p.parts, func(o *job) bool { return o == j })
	}
	c.regroup(j)
	c.mark(j)
}

// regroup computes the job's GPUs and priority from its members, and updates the GPUs'
// lists of jobs.
func (c *Core) regroup(j *job) {
	for _, u := range j.gpus {
		u.jobs = slices.DeleteFunc(u.jobs, func(o *job) bool { return o == j })
	}
	j.gpus = j.gpus[:0]
	j.priority, j.pins = 0, false
	for _, m := range j.members {
		j.priority, j.pins = max(j.priority, m.Priority), j.pins || m.pin != pin{}
		for _, id := range m.GPUs {
			if u := c.gpu(id); !slices.Contains(j.gpus, u) {
				j.gpus = append(j.gpus, u)
			}
		}
	}
	slices.SortFunc(j.gpus, func(a, b *gpu) int { return int(a.id) - int(b.id) })
	for _, u := range j.gpus {
		u.jobs = append(u.jobs, j)
	}
	// A linger belongs to the members it began with: a new member that no lease
	// outranked must not be suspended by it.
	j.lingerUntil, j.leased = 0, j.leased && j.outranked()
	c.markUnattached(j)
}

func (j *job) any(is func(*target) bool) bool { return slices.ContainsFunc(j.members, is) }

func (j *job) anyAway() bool { return j.any((*target).isAway) }

// covered reports whether a lease asks for the job, started or not, or an admin.
func (j *job) covered() bool {
	return j.byHand() || slices.ContainsFunc(j.gpus, func(u *gpu) bool {
		return slices.ContainsFunc(u.leases, j.below)
	})
}

// attachComing reports whether every member is ready, or is being attached to now.
func (j *job) attachComing() bool {
	return !j.any(func(t *target) bool {
		return !t.ready() && (!t.flight.is(ActAttach) || t.flight.late)
	})
}

// outranked reports whether a lease of higher priority covers one of the job's GPUs.
func (j *job) outranked() bool { return j.top() > int(j.priority) }

// lingers reports whether the job is off the GPUs for the next lease only.
func (j *job) lingers() bool {
	return j.verdict.cause == CauseLinger && !j.any(func(t *target) bool { return t.state == TargetResuming })
}

// refusal returns why members could not be suspended or attached to at the last attempt, the worst reason.
func (j *job) refusal() (why Cause) {
	for _, m := range j.members {
		if !m.flight.is(ActAttach) {
			why = worse(why, m.refusal)
		}
	}
	return why
}

// quarantine returns when the last quarantine of a member ends, and its cause.
func (j *job) quarantine() (until Time, cause Cause) {
	for _, m := range j.members {
		if m.quarantinedUntil > until {
			until, cause = m.quarantinedUntil, m.quarantineCause
		}
	}
	return until, cause
}

// top returns the highest priority of the started leases on the job's GPUs, its own left
// out; -1 for none.
func (j *job) top() int {
	top := -1
	for _, u := range j.gpus {
		if len(j.owners) == 0 {
			top = max(top, u.top)
			continue
		}
		for _, l := range u.leases {
			if l.started && !j.ownedBy(l) {
				top = max(top, int(l.req.Priority))
			}
		}
	}
	return top
}

// suspendCost and resumeCost return the learned time of the slowest member: members are
// suspended in parallel.
func (j *job) suspendCost() (cost time.Duration, known bool) {
	known = len(j.members) > 0
	for _, m := range j.members {
		cost = max(cost, m.suspend.likely())
		known = known && m.suspend.samples > 0
	}
	return cost, known
}

func (j *job) resumeCost() time.Duration {
	var cost time.Duration
	for _, m := range j.members {
		cost = max(cost, m.resume.likely())
	}
	return cost
}
