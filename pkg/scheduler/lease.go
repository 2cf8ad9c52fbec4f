package scheduler

import (
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// client is whoever holds leases.
type client struct {
	id     ClientID
	leases []*lease
	// work learns how long a lease of this client needs on quiet GPUs.
	work estimate
}

// lease is a live announcement.
type lease struct {
	id      LeaseID
	req     LeaseRequested
	client  *client
	gpus    []*gpu
	target  *target // of an order by hand
	state   LeaseState
	created Time
	expires Time
	startAt Time
	heldAt  Time // when the GPUs were quiet first
	quiet   bool // heldAt is set

	started   bool
	answered  bool
	answer    Answer
	pending   bool // in Core.pending
	coalesced bool

	sawWork   bool
	idle      bool
	idleSince Time

	timer timer
}

// endedLease is what is remembered of a lease that ended.
type endedLease struct {
	id     LeaseID
	req    LeaseRequested
	end    LeaseEnd
	held   time.Duration
	answer Answer
}

func (c *Core) leaseRequested(ev LeaseRequested) {
	if c.leases[ev.Lease] != nil {
		return
	}
	l := c.newLease()
	l.id, l.req, l.created, l.expires = ev.Lease, ev, c.now, c.now+ev.TTL
	l.client = c.clients[ev.Client]
	if l.client == nil {
		l.client = &client{id: ev.Client}
		c.clients[ev.Client] = l.client
	}
	l.client.leases = append(l.client.leases, l)
	c.leases[l.id] = l
	if ev.RequestID != "" {
		c.requests[requestKey{ev.Client, ev.RequestID}] = l.id
	}
	if ev.Target.IsZero() {
		c.coverGPUs(l)
	} else {
		l.target = c.targets[ev.Target]
	}
	c.setLeaseState(l, LeaseWaiting, CauseAnnounced)
	l.startAt = c.startTime(l)
	if c.now >= l.startAt {
		c.startLease(l)
	}
	c.setLeaseTimer(l)
	c.await(l)
}

// coverGPUs makes the lease one of its GPUs' leases. An order by hand is never:
// it asks for a target, whatever GPUs it names.
func (c *Core) coverGPUs(l *lease) {
	for _, id := range l.req.GPUs {
		u := c.gpu(id)
		l.gpus = append(l.gpus, u)
		u.leases = append(u.leases, l)
		if u.quiet {
			u.gap.learn(c.now - u.lastEnd)
			u.quiet = false
		}
	}
}

func (c *Core) newLease() *lease {
	if n := len(c.free); n > 0 {
		l := c.free[n-1]
		c.free = c.free[:n-1]
		*l = lease{gpus: l.gpus[:0]}
		l.timer.owner = l
		return l
	}
	l := &lease{}
	l.timer.owner = l
	return l
}

// await puts a lease among those that settle looks at.
func (c *Core) await(l *lease) {
	if !l.pending {
		l.pending = true
		c.pending = append(c.pending, l)
	}
}

func (c *Core) setLeaseState(l *lease, to LeaseState, cause Cause) {
	from := l.state
	l.state = to
	r := Record{Kind: RecordLease, Lease: l.id, FromLease: from, ToLease: to, Cause: cause}
	if to == LeaseHeld || to == LeaseEnded {
		r.Took = c.now - l.created
	}
	c.record(r)
}

// startTime is when suspending for the lease begins.
func (c *Core) startTime(l *lease) Time {
	if l.target != nil || c.policy.SuspendWhen == SuspendAtOnce {
		return c.now
	}
	suspend, known := c.suspendCost(l)
	if !known {
		return c.now // nothing learned yet: too early beats too late
	}
	start := c.now
	if l.req.ETA > 0 {
		start = max(start, l.created+l.req.ETA-suspend)
	}
	if c.policy.SuspendWhen == SuspendSlack && l.req.SLO > 0 {
		work := l.req.Expected
		if work == 0 && l.client.work.samples > 0 {
			work = l.client.work.high()
		}
		if work > 0 {
			// From here on the work would still be done in time if nothing of it
			// had been done before.
			start = max(start, l.created+l.req.SLO-work-suspend)
		}
	}
	return start
}

// suspendCost is the learned time to quiet the lease's GPUs; known is false when
// some target that matters has never been suspended.
func (c *Core) suspendCost(l *lease) (cost time.Duration, known bool) {
	known = true
	for _, u := range l.gpus {
		for _, g := range u.gangs {
			if !g.below(l.req.Priority) {
				continue
			}
			gc, ok := g.suspendCost()
			cost, known = max(cost, gc), known && ok
		}
	}
	return cost, known
}

// below tells whether a lease of the given priority is about the gang at all.
func (g *gang) below(p gpreempt.Priority) bool {
	return len(g.members) > 0 && g.members[0].class == gpreempt.Offline && g.priority < p
}

// startLease lets the lease count: from now on it asks for its GPUs.
func (c *Core) startLease(l *lease) {
	l.started = true
	c.setLeaseState(l, LeaseQuiescing, CauseStarted)
	if l.target != nil {
		c.charge(l.target.gang)
		l.target.orders = append(l.target.orders, l)
		c.mark(l.target.gang)
		return
	}
	for _, u := range l.gpus {
		for _, g := range u.gangs {
			l.coalesced = l.coalesced || g.held && !g.leased && c.now < g.lingerUntil && g.below(l.req.Priority)
		}
		u.started[l.req.Priority]++
		if u.setTop() {
			c.markGPU(u)
		}
	}
}

// setLeaseTimer arms the lease's next deadline: its start, the end of its wait,
// or its expiry.
func (c *Core) setLeaseTimer(l *lease) {
	due := l.expires
	if !l.started {
		due = min(due, l.startAt)
	}
	if !l.answered {
		due = min(due, l.created+l.req.MaxWait)
	}
	c.timers.set(&l.timer, due)
}

func (l *lease) fire(c *Core) {
	if c.now >= l.expires {
		c.endLease(l, EndExpired)
		return
	}
	if !l.started && c.now >= l.startAt {
		c.startLease(l)
	}
	c.await(l)
	if l.answered || c.now < l.created+l.req.MaxWait {
		c.setLeaseTimer(l)
	} // else settle answers, and arms it
}

// survey looks at everything the lease outranks on its GPUs.
func (c *Core) survey(l *lease) (quiet bool, suspended int, waiting bool, blocked QuiesceReason) {
	c.surveys++
	quiet = true
	look := func(g *gang) {
		if g.seen == c.surveys {
			return
		}
		g.seen = c.surveys
		fresh := true
		for _, m := range g.members {
			fresh = fresh && m.state == TargetSuspended && m.queues == m.suspendedQueues
		}
		switch {
		case fresh:
			suspended += len(g.members)
		case !g.verdict.suspend:
			quiet, blocked = false, worse(blocked, blockReason(g.verdict.cause))
		case c.policy.Shadow:
			quiet, blocked = false, worse(blocked, QuiesceShadow)
		default:
			quiet, waiting = false, true
		}
	}
	if l.target != nil {
		look(l.target.gang)
	}
	for _, u := range l.gpus {
		for _, g := range u.gangs {
			if g.below(l.req.Priority) {
				look(g)
			}
		}
	}
	return quiet, suspended, waiting, blocked
}

// blockReason is what an announcement is told about a gang that stays.
func blockReason(cause Cause) QuiesceReason {
	switch cause {
	case CauseDrain:
		return QuiesceDraining
	case CauseHold:
		return QuiesceHold
	case CauseShareFloor, CauseMaxSuspend:
		return QuiesceShareFloor
	default:
		return QuiesceUnsafe
	}
}

// worse is the reason an admin should see first.
func worse(a, b QuiesceReason) QuiesceReason {
	order := []QuiesceReason{QuiesceNone, QuiesceShadow, QuiesceShareFloor, QuiesceHold, QuiesceUnsafe, QuiesceDraining}
	if slices.Index(order, a) > slices.Index(order, b) {
		return a
	}
	return b
}

// settleLease brings a lease up to date with its gangs and answers it as soon as
// there is nothing left to wait for. It tells whether the lease needs looking at
// again.
func (c *Core) settleLease(l *lease) bool {
	switch l.state {
	case LeaseEnded:
		c.free = append(c.free, l)
		return false
	case LeaseWaiting:
		if !l.answered && c.now >= l.created+l.req.MaxWait {
			c.sendAnswer(l, Answer{Reason: QuiesceDeferred})
		}
		return true
	}
	quiet, suspended, waiting, blocked := c.survey(l)
	if quiet && l.state == LeaseQuiescing {
		cause := CauseQuiet
		if l.coalesced && !l.quiet {
			cause = CauseCoalesced
		}
		c.setLeaseState(l, LeaseHeld, cause)
		if !l.quiet {
			l.quiet, l.heldAt = true, c.now
		}
	}
	if !l.answered {
		switch {
		case quiet && suspended > 0:
			c.sendAnswer(l, Answer{Quiesced: true, Reason: QuiesceDone, Suspended: suspended})
		case quiet:
			c.sendAnswer(l, Answer{Quiesced: true, Reason: QuiesceNothingToDo})
		case !waiting:
			c.sendAnswer(l, Answer{Reason: blocked, Suspended: suspended})
		case l.req.MaxWait == 0:
			c.sendAnswer(l, Answer{Reason: QuiesceNotAwaited, Suspended: suspended})
		case c.now >= l.created+l.req.MaxWait:
			c.sendAnswer(l, Answer{Reason: QuiesceMaxWait, Suspended: suspended})
		}
	}
	return !l.answered || l.state == LeaseQuiescing
}

func (c *Core) sendAnswer(l *lease, a Answer) {
	a.Waited = c.now - l.created
	l.answered, l.answer = true, a
	c.actions = append(c.actions, Action{Kind: ActAnswer, Lease: l.id, Answer: a})
	if l.state != LeaseEnded {
		c.setLeaseTimer(l)
	}
}

func (c *Core) endLease(l *lease, end LeaseEnd) {
	c.learnWork(l, end)
	c.setLeaseState(l, LeaseEnded, "")
	c.actions[len(c.actions)-1].Record.End = end
	if !l.answered {
		c.sendAnswer(l, Answer{Reason: QuiesceEnded})
	}
	c.timers.clear(&l.timer)
	delete(c.leases, l.id)
	l.client.leases = remove(l.client.leases, l)
	if len(l.client.leases) == 0 && l.client.id == 0 {
		delete(c.clients, 0)
	}
	if l.target != nil {
		c.charge(l.target.gang)
		l.target.orders = remove(l.target.orders, l)
		c.mark(l.target.gang)
	}
	for _, u := range l.gpus {
		u.leases = remove(u.leases, l)
		if len(u.leases) == 0 {
			u.quiet, u.lastEnd = true, c.now
		}
		if !l.started {
			continue
		}
		u.started[l.req.Priority]--
		if u.setTop() {
			c.markGPU(u)
		}
	}
	c.remember(endedLease{id: l.id, req: l.req, end: end, held: c.now - l.created, answer: l.answer})
	if !l.pending {
		c.free = append(c.free, l)
	}
}

// remove deletes without keeping a pointer behind.
func remove(leases []*lease, l *lease) []*lease {
	if i := slices.Index(leases, l); i >= 0 {
		return slices.Delete(leases, i, i+1)
	}
	return leases
}

// learnWork learns how long a lease needs on quiet GPUs, from those that had
// quiet GPUs for the whole of their work and said when it was done.
func (c *Core) learnWork(l *lease, end LeaseEnd) {
	if (end != EndCompleted && end != EndIdle) || !l.quiet || l.target != nil {
		return
	}
	if begin := max(l.heldAt, l.created+l.req.ETA); begin <= c.now && l.heldAt <= max(l.created+l.req.ETA, l.created+l.answer.Waited) {
		l.client.work.learn(c.now - begin)
	}
}

// remember keeps an ended lease in place of the oldest one.
func (c *Core) remember(e endedLease) {
	if len(c.ended) < endedKept {
		c.endedByID[e.id] = len(c.ended)
		c.ended = append(c.ended, e)
		return
	}
	old := &c.ended[c.endedNext]
	delete(c.endedByID, old.id)
	if key := (requestKey{old.req.Client, old.req.RequestID}); c.requests[key] == old.id {
		delete(c.requests, key)
	}
	*old = e
	c.endedByID[e.id] = c.endedNext
	c.endedNext = (c.endedNext + 1) % endedKept
}

// clientBacklog ends OnIdle leases whose work came and went.
func (c *Core) clientBacklog(ev ClientBacklog) {
	cl := c.clients[ev.Client]
	if cl == nil {
		return
	}
	for i := len(cl.leases) - 1; i >= 0; i-- {
		l := cl.leases[i]
		switch {
		case !l.req.OnIdle:
		case ev.Busy:
			l.sawWork, l.idle = true, false
		case !l.sawWork:
		case !l.idle:
			l.idle, l.idleSince = true, c.now
		case c.now >= l.idleSince+IdleGrace:
			c.endLease(l, EndIdle)
		}
	}
}
