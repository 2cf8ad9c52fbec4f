package scheduler

import (
	"slices"
	"time"
)

// lease is a live announcement.
type lease struct {
	id      LeaseID
	req     LeaseRequested
	client  *client
	gpus    []*gpu
	state   LeaseState
	created Time
	expires Time
	startAt Time

	started   bool
	answered  bool
	answer    Answer
	pending   bool // in Core.pending
	awaits    *job // the job that mustWait found last
	coalesced bool
	reset     bool // a queue was reset on its GPUs before the answer

	sawWork   bool
	idle      bool
	idleSince Time

	timer timer
}

func (c *Core) leaseRequested(ev LeaseRequested) {
	if c.leases[ev.Lease] != nil {
		return
	}
	l := c.enter(ev)
	l.created, l.expires = c.now, c.now+ev.TTL
	c.setOwner(l.client, ev.Owner)
	c.coverGPUs(l)
	c.setLeaseState(l, LeaseWaiting, CauseAnnounced)
	announced := &c.actions[len(c.actions)-1].Record
	announced.Trace, announced.GPUs = ev.Trace, ev.GPUs
	if ev.Arrived > 0 {
		announced.Took = max(0, c.now-ev.Arrived)
	}
	l.startAt = c.startTime(l)
	if c.now >= l.startAt {
		c.startLease(l)
	}
	c.setLeaseTimer(l)
	c.await(l)
}

// coverGPUs adds the lease to the leases of its GPUs.
func (c *Core) coverGPUs(l *lease) {
	for _, id := range l.req.GPUs {
		u := c.gpu(id)
		l.gpus = append(l.gpus, u)
		u.leases = append(u.leases, l)
		for _, j := range u.jobs {
			c.markUnattached(j)
		}
		if u.free {
			u.gap.learn(c.now - u.lastEnd)
			u.free = false
		}
	}
}

// await has settle look at the lease.
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

// startTime is when suspending for the lease begins: at its eta less the learned suspend time.
func (c *Core) startTime(l *lease) Time {
	if l.req.ETA == 0 {
		return c.now
	}
	suspend, known := c.suspendCost(l)
	if !known {
		return c.now // nothing learned yet: too early is better than too late
	}
	return max(c.now, l.created+l.req.ETA-suspend)
}

// suspendCost returns the learned time until the lease's GPUs are quiet; known is false
// when one of the targets was never suspended before.
func (c *Core) suspendCost(l *lease) (cost time.Duration, known bool) {
	known = true
	for _, u := range l.gpus {
		for _, j := range u.jobs {
			if !j.below(l) {
				continue
			}
			gc, ok := j.suspendCost()
			cost, known = max(cost, gc), known && ok
		}
	}
	return cost, known
}

// below reports whether a lease can suspend the job.
func (j *job) below(l *lease) bool { return j.offline() && j.outrankedBy(l) }

// startLease makes the lease count: from now on its GPUs have to become quiet.
func (c *Core) startLease(l *lease) {
	l.started = true
	c.setLeaseState(l, LeaseQuiescing, CauseStarted)
	for _, u := range l.gpus {
		for _, j := range u.jobs {
			l.coalesced = l.coalesced || j.lingers() && j.below(l)
		}
		u.started[l.req.Priority]++
		c.leasesChanged(u)
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

// settleLease updates a lease from the state of its jobs, and answers it once it has
// nothing to wait for. It reports whether the lease has to be settled again.
func (c *Core) settleLease(l *lease) bool {
	switch l.state {
	case LeaseEnded:
		c.free = append(c.free, l)
		return false
	case LeaseWaiting:
		if !l.answered && c.now >= l.created+l.req.MaxWait {
			c.sendAnswer(l, Answer{Reason: CauseDeferred})
		}
		return true
	default: // started: below
	}
	reset := l.reset && !l.answered
	if !reset && c.mustWait(l) {
		return true
	}
	s := c.coverage(l)
	if s.quiet && l.state == LeaseQuiescing {
		cause := CauseQuiet
		if l.coalesced {
			cause = CauseCoalesced
		}
		c.setLeaseState(l, LeaseHeld, cause)
	}
	if !l.answered {
		switch {
		case reset:
			c.sendAnswer(l, s.answer(CauseReset))
		case s.quiet && s.suspended > 0:
			c.sendAnswer(l, Answer{Quiesced: true, Reason: CauseDone, Suspended: s.suspended})
		case s.quiet:
			c.sendAnswer(l, Answer{Quiesced: true, Reason: CauseNothingToDo})
		case !s.waiting:
			c.sendAnswer(l, s.answer(s.blocked))
		case l.req.MaxWait == 0:
			c.sendAnswer(l, s.answer(s.instead(CauseNotAwaited)))
		case c.now >= l.created+l.req.MaxWait:
			c.sendAnswer(l, s.answer(s.instead(CauseMaxWait)))
		}
	}
	return !l.answered || l.state == LeaseQuiescing
}

func (c *Core) sendAnswer(l *lease, a Answer) {
	a.Waited = c.now - l.created
	a.OwnerOffline = slices.ContainsFunc(l.gpus, func(u *gpu) bool {
		return slices.ContainsFunc(u.jobs, func(j *job) bool { return j.offline() && j.ownedBy(l) })
	})
	l.answered, l.answer = true, a
	if !a.Quiesced && l.state != LeaseEnded { // else a change of state is recorded
		c.record(Record{Kind: RecordLease, Lease: l.id, FromLease: l.state, ToLease: l.state, Cause: a.Reason, Took: a.Waited})
	}
	action := c.emit(ActAnswer)
	action.Lease, action.Answer = l.id, a
	if l.state != LeaseEnded {
		c.setLeaseTimer(l)
	}
}

func (c *Core) endLease(l *lease, end LeaseEnd) {
	c.setLeaseState(l, LeaseEnded, "")
	c.actions[len(c.actions)-1].Record.End = end
	if !l.answered {
		c.sendAnswer(l, Answer{Reason: CauseEnded})
	}
	c.timers.clear(&l.timer)
	for _, u := range l.gpus {
		u.leases = remove(u.leases, l)
		if len(u.leases) == 0 {
			u.free, u.lastEnd = true, c.now
		}
		if !l.started {
			continue
		}
		u.started[l.req.Priority]--
		c.leasesChanged(u)
	}
	c.strike(l, end, c.now-l.created)
	if !l.pending {
		c.free = append(c.free, l)
	}
}

// clientBacklog ends the OnIdle leases whose client had work and has been idle for IdleGrace.
func (c *Core) clientBacklog(ev ClientBacklog) {
	cl := c.clients[ev.Client]
	if cl == nil {
		return
	}
	for _, l := range slices.Backward(cl.leases) { // from the end: an ended lease leaves the slice
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
