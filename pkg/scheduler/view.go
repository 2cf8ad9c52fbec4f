package scheduler

import (
	"cmp"
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// LeaseInfo is a live lease as readers see it.
type LeaseInfo struct {
	ID       LeaseID
	Client   ClientID
	GPUs     []gpreempt.GPUID
	Priority gpreempt.Priority
	State    LeaseState
	Created  Time
	Expires  Time
	Label    string
}

// TargetInfo is a target as readers see it.
type TargetInfo struct {
	Key      gpreempt.ProcessKey
	Class    gpreempt.Class
	Priority gpreempt.Priority
	State    TargetState
	Since    Time
	// RunsBy is the time by which it runs again, while it is away.
	RunsBy Time
	GPUs   []gpreempt.GPUID
	Ready  bool
	// Stuck: the action in flight, or the Attach, waits for the target itself, by the last
	// Inspect.
	Stuck bool
	// CannotSuspend: it is to be suspendable, and is not: the last attempt to attach to it or to
	// suspend it has failed.
	CannotSuspend bool
	OnResist      gpreempt.Resistance
	// Refusals counts the suspensions that it has refused since the last that worked.
	Refusals       int
	Suspends       uint64
	SuspendedTotal time.Duration
	// Pin is the Cause of the Pin that is in force, "" for none.
	Pin Cause
	// Capped: the share cap has it suspended.
	Capped bool
	// BudgetLeft is how long the share floor permits its job to be suspended.
	BudgetLeft time.Duration
	// Job is its job; the zero value without one.
	Job JobInfo
	// Owners are the processes that are clients and whose leases do not suspend it: itself, or
	// of its Kin.
	Owners         []gpreempt.ProcessKey
	LearnedSuspend time.Duration
	LearnedResume  time.Duration
}

// OffGPU returns a function that says of a process among targets whether it is offline, and
// whether it is suspended.
func OffGPU(targets []TargetInfo) func(gpreempt.ProcessKey) (offline, suspended bool) {
	return func(key gpreempt.ProcessKey) (offline, suspended bool) {
		at, known := slices.BinarySearchFunc(targets, key, func(t TargetInfo, k gpreempt.ProcessKey) int { return t.Key.Compare(k) })
		if !known {
			return false, false
		}
		return targets[at].Class == gpreempt.Offline, targets[at].State == TargetSuspended
	}
}

// GPUInfo is a GPU as readers see it.
type GPUInfo struct {
	ID            gpreempt.GPUID
	Leases        int
	Suspended     int
	CannotSuspend int // targets
	BreakerOpen   bool
	BreakerCloses Time
}

// Policy returns the policy in force.
func (c *Core) Policy() Policy { return c.policy }

// Draining reports whether nothing is to be suspended.
func (c *Core) Draining() bool { return c.draining }

// LeaseCount returns the number of live leases.
func (c *Core) LeaseCount() int { return len(c.leases) }

// Leases returns the live leases, oldest first.
func (c *Core) Leases() []LeaseInfo {
	infos := make([]LeaseInfo, 0, len(c.leases))
	for _, l := range c.leases {
		infos = append(infos, l.info())
	}
	slices.SortFunc(infos, func(a, b LeaseInfo) int {
		return cmp.Or(cmp.Compare(a.Created, b.Created), cmp.Compare(a.ID, b.ID))
	})
	return infos
}

func (l *lease) info() LeaseInfo {
	return LeaseInfo{
		ID: l.id, Client: l.req.Client, GPUs: l.req.GPUs, Priority: l.req.Priority, State: l.state,
		Created: l.created, Expires: l.expires, Label: l.req.Label,
	}
}

// Targets returns every target, by key.
func (c *Core) Targets() []TargetInfo {
	infos := make([]TargetInfo, 0, len(c.order))
	for _, t := range c.order {
		infos = append(infos, c.targetInfo(t))
	}
	return infos
}

// Target returns one target.
func (c *Core) Target(key gpreempt.ProcessKey) (TargetInfo, bool) {
	t := c.targets[key]
	if t == nil {
		return TargetInfo{}, false
	}
	return c.targetInfo(t), true
}

func (c *Core) targetInfo(t *target) TargetInfo {
	info := TargetInfo{
		Key: t.Target, Class: t.Class, Owners: t.job.owners, Priority: t.Priority, State: t.state, Since: t.since, GPUs: t.GPUs, Ready: t.ready(), Stuck: t.flight.stuck,
		CannotSuspend: len(t.job.gpus) > 0 && c.cannotSuspend(t) != "", OnResist: t.OnResist, Refusals: t.refusals,
		Suspends: t.suspends, SuspendedTotal: t.away, LearnedSuspend: t.suspend.mean, LearnedResume: t.resume.mean,
		BudgetLeft: c.budgetLeft(t.job), Capped: t.state == TargetSuspended && t.job.verdict.cause == CauseShareCap,
	}
	if c.now < t.pin.until {
		info.Pin = t.pin.cause
	}
	if p := t.job.progress; p != nil {
		info.Job = c.jobInfo(p)
	}
	if t.isAway() {
		info.SuspendedTotal += c.now - t.awaySince
		info.RunsBy = c.runsBy(t.job)
	}
	return info
}

// runsBy returns the deadline of rule 2.
func (c *Core) runsBy(j *job) Time {
	if !j.suspended {
		return c.now
	}
	by := c.maxSuspendAt(j)
	// The bucket was last charged at chargedAt and empties since.
	if c.policy.ShareFloor > 0 && !j.byHand() {
		by = min(by, j.chargedAt+max(0, j.budget))
	}
	last := j.pinnedUntil(true)
	for _, u := range j.gpus {
		for _, l := range u.leases {
			if l.started && j.outrankedBy(l) {
				last = max(last, l.expires)
			}
		}
	}
	if j.leased {
		last += c.policy.longestLinger()
	}
	if c.usedUp(j) {
		last = max(last, c.capAt(c.chargedNow(j)))
	}
	return max(c.now, min(by, max(last, j.lingerUntil)))
}

// GPUs returns every GPU, by id.
func (c *Core) GPUs() []GPUInfo {
	infos := make([]GPUInfo, 0, len(c.gpuOrder))
	for _, u := range c.gpuOrder {
		info := GPUInfo{ID: u.id, Leases: len(u.leases), BreakerOpen: u.breakerOpen}
		if u.breakerOpen {
			info.BreakerCloses = u.breakerUntil
		}
		for _, j := range u.jobs {
			for _, m := range j.members {
				if m.state == TargetSuspended && slices.Contains(m.GPUs, u.id) {
					info.Suspended++
				}
				if c.cannotSuspend(m) != "" {
					info.CannotSuspend++
				}
			}
		}
		infos = append(infos, info)
	}
	return infos
}

// Away returns the number of targets that are suspending, suspended or resuming.
func (c *Core) Away() int {
	n := 0
	for _, t := range c.order {
		n += t.countAway()
	}
	return n
}

// IdleWatched returns the clients with a lease that ends by idleness: the daemon reads
// the backlog of their queues.
func (c *Core) IdleWatched() []ClientID {
	var ids []ClientID
	for _, l := range c.leases {
		if l.req.OnIdle && !slices.Contains(ids, l.req.Client) {
			ids = append(ids, l.req.Client)
		}
	}
	slices.SortFunc(ids, func(a, b ClientID) int { return gpreempt.ProcessKey(a).Compare(gpreempt.ProcessKey(b)) })
	return ids
}

// chargedNow returns the job with its buckets as of now.
func (c *Core) chargedNow(j *job) *job {
	now := *j
	c.charge(&now)
	return &now
}

// budgetLeft returns the job's budget as of now.
func (c *Core) budgetLeft(j *job) time.Duration { return c.chargedNow(j).budget }

// FloorUse returns the used share of the time for which the share floor permits an
// offline job to be suspended, of the job with the least left: 0 to 1, and 0 without
// a floor.
func (c *Core) FloorUse() float64 {
	if millionths(c.policy.ShareFloor) == 0 {
		return 0
	}
	use := 0.0
	for _, t := range c.order {
		if t.Class == gpreempt.Offline {
			use = max(use, 1-float64(c.budgetLeft(t.job))/float64(c.policy.MaxBudget()))
		}
	}
	return min(use, 1)
}
