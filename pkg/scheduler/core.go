// Package scheduler decides which offline processes are suspended, and when.
//
// Core decides: it takes events and returns actions, without I/O, goroutines or a clock.
// The same events result in the same actions, byte for byte. Runner has the clock,
// serialises events and carries out the actions.
//
// What the core promises, whatever clients, targets and mechanisms do:
//
//  1. A target is suspended only while a live lease of higher priority covers
//     one of its gang's GPUs, during the bounded linger after it, by order of an admin, or
//     while it is idle and its GPU has more compute queues than the HQD budget permits.
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
	// attachments are the attachments of targets, and of processes that have left and are
	// not detached yet.
	attachments map[gpreempt.ProcessKey]*attachment
	jobs        map[string]*job
	parking     *parking
	// owners counts the clients by their owner, without those that have none.
	owners map[gpreempt.ProcessKey]int

	timers           timerHeap
	seq              uint64
	scans            uint64
	dirty            []*gang
	dirtyAttachments []*attachment
	pending          []*lease // unanswered or not yet quiet
	actions          []Action
}

// New returns an empty core. The policy must be valid.
func New(policy Policy, limits Limits) *Core {
	c := &Core{
		book:        newBook(limits),
		policy:      policy,
		gpus:        map[gpreempt.GPUID]*gpu{},
		targets:     map[gpreempt.ProcessKey]*target{},
		jobs:        map[string]*job{},
		attachments: map[gpreempt.ProcessKey]*attachment{},
		owners:      map[gpreempt.ProcessKey]int{},
		parking:     &parking{},
	}
	c.parking.timer.owner = c.parking
	return c
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
	c.settle()
	return c.actions
}

// NextDeadline returns when Step must be called again, with a Tick if nothing happens before;
// false for no deadline.
func (c *Core) NextDeadline() (Time, bool) { return c.timers.next() }

func (c *Core) apply(ev Event) {
	switch ev := ev.(type) {
	case Tick:
	case GPUAdded:
		u := c.gpu(ev.GPU)
		u.slots = max(u.slots, ev.Slots)
	case TargetSeen:
		c.targetSeen(ev)
	case TargetLoad:
		c.targetLoad(ev)
	case HQDBudgetChanged:
		c.setHQDBudget(ev.Budget)
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
		c.attached(ev)
	case Detached:
		c.detached(ev)
	case Lost:
		c.sessionLost(ev)
	case Running:
		c.runs(ev)
	case Suspended:
		c.suspended(ev)
	case Resumed:
		c.resumed(ev)
	case Inspected:
		if t := c.targets[ev.Target]; t != nil && t.inspection != 0 && t.inspection == ev.Seq {
			c.inspected(t, ev.Stuck)
		}
		if a := c.attachments[ev.Target]; a != nil && a.inspection != 0 && a.inspection == ev.Seq {
			c.attachInspected(a, ev.Stuck)
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
	case Hold:
		c.hold(ev)
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
			c.markAttachment(t.attachment)
		}
	}
}

func (c *Core) setPolicy(p Policy) {
	for _, t := range c.order {
		c.charge(t.gang)
	}
	if window := jobWindow(p); window != jobWindow(c.policy) {
		for _, j := range c.jobs {
			j.restart(c.now, window)
		}
	}
	c.policy = p
	c.record(Record{Kind: RecordPolicy})
	for _, t := range c.order {
		c.markAttachment(t.attachment)
		t.gang.budget = min(t.gang.budget, c.budgetCap())
		t.gang.lingerUntil = min(t.gang.lingerUntil, c.now+c.linger(t.gang))
	}
	c.markAll()
}

// settle evaluates the gangs that changed, then answers the leases that can be answered.
func (c *Core) settle() {
	c.balance()
	for i := 0; i < len(c.dirty); i++ { //nolint:intrange // evaluating one may mark another
		g := c.dirty[i]
		g.dirty = false
		if len(g.members) > 0 {
			c.evaluate(g)
		} else {
			c.timers.clear(&g.timer)
		}
	}
	c.dirty = c.dirty[:0]
	for _, a := range c.dirtyAttachments {
		a.dirty = false
		c.settleAttachment(a)
	}
	clear(c.dirtyAttachments)
	c.dirtyAttachments = c.dirtyAttachments[:0]
	kept := c.pending[:0]
	for _, l := range c.pending {
		if c.settleLease(l) {
			kept = append(kept, l)
		} else {
			l.pending = false
		}
	}
	clear(c.pending[len(kept):])
	c.pending = kept
}

func (c *Core) mark(g *gang) {
	if !g.dirty {
		g.dirty = true
		c.dirty = append(c.dirty, g)
	}
}

func (c *Core) markAll() {
	for _, t := range c.order {
		c.mark(t.gang)
	}
}

func (c *Core) markGPU(g *gpu) {
	for _, gg := range g.gangs {
		c.mark(gg)
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

// gpu is a GPU node with its gangs, leases and breaker.
type gpu struct {
	id     gpreempt.GPUID
	gangs  []*gang // with a member on it
	leases []*lease
	// slots is how many compute queues fit at once, 0 if that is not known.
	slots int
	use   hqdUse
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
	g := c.gpus[id]
	if g == nil {
		g = &gpu{id: id, top: -1}
		g.timer.owner = g
		c.gpus[id] = g
		at, _ := slices.BinarySearchFunc(c.gpuOrder, id, func(g *gpu, id gpreempt.GPUID) int { return cmp.Compare(g.id, id) })
		c.gpuOrder = slices.Insert(c.gpuOrder, at, g)
	}
	return g
}

// setTop recounts top and reports whether it changed.
func (g *gpu) setTop() bool {
	old := g.top
	g.top = -1
	for p := range g.started {
		if g.started[p] > 0 {
			g.top = p
		}
	}
	return g.top != old
}

func (c *Core) openBreaker(g *gpu, cause Cause) {
	g.breakerUntil = c.now + BreakerTime
	c.timers.set(&g.timer, g.breakerUntil)
	if g.breakerOpen {
		return
	}
	g.breakerOpen = true
	c.record(Record{Kind: RecordBreaker, GPU: g.id, On: true, Cause: cause})
	c.markGPU(g)
}

// BreakersClose returns when the last breaker closes or has closed, 0 when none has been open.
func (c *Core) BreakersClose() (at Time) {
	for _, g := range c.gpuOrder {
		at = max(at, g.breakerUntil)
	}
	return at
}

// fire closes the breaker.
func (g *gpu) fire(c *Core) {
	g.breakerOpen = false
	c.record(Record{Kind: RecordBreaker, GPU: g.id, Cause: CauseCooledDown})
	c.markGPU(g)
}
