// Package scheduler decides which offline processes are suspended, and when.
//
// Core decides: it takes events and returns actions, without I/O, goroutines or a clock.
// The same events result in the same actions, byte for byte. Runner has the clock,
// serialises events and carries out the actions.
//
// What the core promises, whatever clients, targets and mechanisms do:
//
//  1. A target is suspended only while a live lease of higher priority covers
//     one of its job's GPUs, during the bounded linger after it, while a pin of bounded
//     time has it suspended: by an admin, or by what keeps hardware slots free; or because its job
//     has used its share cap.
//  2. Every suspension has a deadline: the lease's TTL, max_suspend, the share floor.
//  3. Only targets of class offline are suspended, by leases only those of lower priority, and
//     none by a lease of its own process or of its Kin.
//  4. Except Inspect and Kill, one action is in flight per target; queues born while their
//     target is suspended are suspended too.
//  5. No announcement waits longer than its max_wait.
//  6. The end of the last overlapping lease resumes; calls are idempotent by request id.
//  7. Failures quarantine the target, as does an action that waits for the target itself; the
//     latter only until the breakers close, if one is open. Hardware errors, alarms, and actions that
//     do not return for another reason, open the GPU's breaker: everything resumes and nothing
//     more is suspended there until it closes. A suspend during which its GPU raised an alarm has
//     failed, and no announcement that waited while a queue was reset is answered quiet.
//  8. After a drain or a change of policy, only what the policy permits is suspended.
//  9. Only an offline target is killed, and only after it has resisted as many suspensions as
//     its Resistance states, which leases or an admin asked for, at least RefusalTime apart.
package scheduler

import (
	"cmp"
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Times that are no part of the policy, because they need no tuning.
const (
	// QuarantineTime is how long a target that failed is not suspended.
	QuarantineTime = 5 * time.Minute
	// BreakerTime is how long nothing is suspended on a GPU after an alarm.
	BreakerTime = 30 * time.Second
	// StuckAfter is how long a suspend or resume may take before the core asks what it
	// waits for; KFD itself gives up after 9 s.
	StuckAfter = 2 * time.Second
	// InspectTime is how long the answer may take. Without one, what the action waits for
	// is unknown. When a timer for StuckAfter or InspectTime fires later than
	// this, the daemon did not run, and perhaps nor did the action: the time begins again.
	InspectTime = 100 * time.Millisecond
	// IdleGrace is how long the queues of a client must be empty before a lease
	// with OnIdle ends: a serving loop pauses between two kernels of one request.
	IdleGrace = 2 * time.Millisecond
)

// Core is the scheduler's state. It is not safe for concurrent use.
type Core struct {
	book
	policy   Policy
	draining bool
	// stopping: every session is released, and no target is attached to any more.
	stopping bool
	now      Time

	gpus     map[gpreempt.GPUID]*gpu
	gpuOrder []*gpu // by id
	targets  map[gpreempt.ProcessKey]*target
	order    []*target // by key: loops over all targets use it
	// leaving are those that have left and are not detached yet.
	leaving map[gpreempt.ProcessKey]*target
	// progress is that of the jobs, by name.
	progress map[string]*progress
	// owners counts the clients by their owner, without those that have none.
	owners map[gpreempt.ProcessKey]int

	timers       timerHeap
	seq          uint64
	scans        uint64
	dirty        []*job
	dirtyTargets []*target
	pending      []*lease // unanswered or not yet quiet
	actions      []Action
}

// New returns an empty core. The policy must be valid.
func New(policy Policy, limits Limits) *Core {
	return &Core{
		book:     newBook(limits),
		policy:   policy,
		gpus:     map[gpreempt.GPUID]*gpu{},
		targets:  map[gpreempt.ProcessKey]*target{},
		progress: map[string]*progress{},
		leaving:  map[gpreempt.ProcessKey]*target{},
		owners:   map[gpreempt.ProcessKey]int{},
	}
}

// Step handles one event and returns the actions to carry out, in order. The slice is
// valid until the next Step. Time does not decrease: an earlier now counts as the last one.
func (c *Core) Step(now Time, ev Event) []Action {
	c.now = max(c.now, now)
	clear(c.actions)
	c.actions = c.actions[:0]
	for t := c.timers.popDue(c.now); t != nil; t = c.timers.popDue(c.now) {
		t.owner.fire(c)
	}
	c.apply(ev)
	c.evaluateMarked()
	return c.actions
}

// NextDeadline returns when Step must be called again, with a Tick if nothing happens before;
// false for no deadline.
func (c *Core) NextDeadline() (Time, bool) { return c.timers.next() }

func (c *Core) apply(ev Event) {
	switch ev := ev.(type) {
	case Tick:
	case GPUAdded:
		c.gpu(ev.GPU)
	case TargetSeen:
		c.targetSeen(ev)
	case TargetGone:
		if t := c.targets[ev.Target]; t != nil {
			c.targetGone(t)
		}
	case LeaseRequested:
		c.leaseRequested(ev)
	case LeaseRenewed:
		if l := c.leases[ev.Lease]; l != nil {
			l.expires = c.now + ev.TTL
			c.setLeaseTimer(l)
		}
	case LeaseFinished:
		if l := c.leases[ev.Lease]; l != nil {
			c.endLease(l, ev.End)
		}
	case ClientGone:
		if cl := c.clients[ev.Client]; cl != nil {
			for len(cl.leases) > 0 {
				c.endLease(cl.leases[len(cl.leases)-1], ev.End)
			}
			delete(c.clients, ev.Client)
			c.leaveOwner(cl)
		}
	case ClientBacklog:
		c.clientBacklog(ev)
	case Attached:
		c.done(ActAttach, Suspended{Target: ev.Target, Result: ev.Result, FailedGPUs: ev.FailedGPUs}, ev.ReportsBirths)
	case Detached:
		c.done(ActDetach, Suspended(ev), false)
	case Lost:
		c.sessionLost(ev)
	case Running:
		switch t := c.targets[ev.Target]; {
		case t == nil:
		case ev.Suspended == 0:
			c.runs(t, ev.Cause)
		case t.state == TargetSuspended:
			c.record(Record{Kind: RecordTarget, Target: t.Target, FromTarget: t.state, ToTarget: t.state, Class: t.Class, Cause: ev.Cause})
		}
	case Suspended:
		c.done(ActSuspend, ev, false)
	case Resumed:
		c.done(ActResume, Suspended(ev), false)
	case Inspected:
		if t := c.find(ev.Target); t != nil && t.flight.inspection != 0 && t.flight.inspection == ev.Seq {
			c.inspected(t, ev.Stuck)
		}
	case Alarm:
		for _, g := range c.gpuOrder {
			switch {
			case ev.GPU != 0 && g.id != ev.GPU:
			case ev.Unmap:
				c.alarm(g, CauseReset)
			default:
				c.alarm(g, CauseAlarm)
			}
		}
	case QueueReset:
		c.queueReset(ev)
	case Pin:
		c.pinTarget(ev)
	case PolicyChanged:
		c.setPolicy(ev.Policy)
	case Drain:
		if c.draining != ev.On {
			c.draining = ev.On
			c.record(Record{Kind: RecordDrain, On: ev.On})
			c.markAll()
		}
	case Stopped:
		c.stopping = true
		for _, t := range c.order {
			c.markTarget(t)
		}
	}
}

func (c *Core) setPolicy(p Policy) {
	for _, t := range c.order {
		c.charge(t.job)
	}
	if window := jobWindow(p); window != jobWindow(c.policy) {
		for _, of := range c.progress {
			of.restart(c.now, window)
		}
	}
	c.policy = p
	c.record(Record{Kind: RecordPolicy, On: p.Shadow})
	for _, t := range c.order {
		c.markTarget(t)
		t.job.budget, t.job.credit = min(t.job.budget, c.policy.MaxBudget()), min(t.job.credit, c.policy.maxCredit())
		t.job.lingerUntil = min(t.job.lingerUntil, c.now+c.linger(t.job))
	}
	c.markAll()
}

// evaluateMarked evaluates the jobs that changed, then answers the leases that can be answered.
func (c *Core) evaluateMarked() {
	for i := 0; i < len(c.dirty); i++ { //nolint:intrange // evaluating one may mark another
		j := c.dirty[i]
		j.dirty = false
		if len(j.members) > 0 {
			c.evaluate(j)
		} else {
			c.timers.clear(&j.timer)
		}
	}
	c.dirty = c.dirty[:0]
	for _, t := range c.dirtyTargets {
		t.dirty = false
		c.settleTarget(t)
	}
	clear(c.dirtyTargets)
	c.dirtyTargets = c.dirtyTargets[:0]
	c.pending = slices.DeleteFunc(c.pending, func(l *lease) bool {
		l.pending = c.settleLease(l)
		return !l.pending
	})
}

func (c *Core) mark(j *job) {
	if !j.dirty {
		j.dirty = true
		c.dirty = append(c.dirty, j)
	}
}

func (c *Core) markAll() {
	for _, t := range c.order {
		c.mark(t.job)
	}
}

func (c *Core) markGPU(u *gpu) {
	for _, j := range u.jobs {
		c.mark(j)
	}
}

func (c *Core) record(r Record) {
	r.At = c.now
	c.emit(ActRecord).Record = r
}

// emit appends an action that the caller fills in place, because actions are large.
func (c *Core) emit(kind ActionKind) *Action {
	n := len(c.actions)
	if n < cap(c.actions) {
		c.actions = c.actions[:n+1] // Step has cleared it
	} else {
		c.actions = append(c.actions, Action{})
	}
	a := &c.actions[n]
	a.Kind = kind
	return a
}

// gpu is a GPU node with its jobs, leases and breaker.
type gpu struct {
	id     gpreempt.GPUID
	jobs   []*job // with a member on it
	leases []*lease
	// started counts started leases by priority; top is the highest, -1 for none.
	started [gpreempt.MaxPriority + 1]int
	top     int

	breakerUntil Time
	breakerOpen  bool
	timer        timer

	// gap learns the time from the end of the last lease to the next announcement.
	gap     estimate
	lastEnd Time
	free    bool // lastEnd is set and no lease has begun since
}

func (c *Core) gpu(id gpreempt.GPUID) *gpu {
	u := c.gpus[id]
	if u == nil {
		u = &gpu{id: id, top: -1}
		u.timer.owner = u
		c.gpus[id] = u
		at, _ := slices.BinarySearchFunc(c.gpuOrder, id, func(u *gpu, id gpreempt.GPUID) int { return cmp.Compare(u.id, id) })
		c.gpuOrder = slices.Insert(c.gpuOrder, at, u)
	}
	return u
}

// setTop recounts top and reports whether it changed.
func (u *gpu) setTop() bool {
	old := u.top
	u.top = -1
	for p := range u.started {
		if u.started[p] > 0 {
			u.top = p
		}
	}
	return u.top != old
}

func (c *Core) openBreaker(u *gpu, cause Cause) {
	u.breakerUntil = c.now + BreakerTime
	c.timers.set(&u.timer, u.breakerUntil)
	if u.breakerOpen {
		return
	}
	u.breakerOpen = true
	c.record(Record{Kind: RecordBreaker, GPU: u.id, On: true, Cause: cause})
	c.markGPU(u)
}

// BreakersClose returns when the last breaker closes or has closed, 0 when none has been open.
func (c *Core) BreakersClose() (at Time) {
	for _, u := range c.gpuOrder {
		at = max(at, u.breakerUntil)
	}
	return at
}

// fire closes the breaker.
func (u *gpu) fire(c *Core) {
	u.breakerOpen = false
	c.record(Record{Kind: RecordBreaker, GPU: u.id, Cause: CauseCooledDown})
	c.markGPU(u)
}
