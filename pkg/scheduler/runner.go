package scheduler

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Clock tells the time. It is monotonic and safe for concurrent use.
type Clock interface{ Now() Time }

// Executor carries out suspends and resumes. Its methods must not block, and call
// nothing of the Runner but Post, which takes the result, at once or later.
type Executor interface {
	Suspend(target gpreempt.ProcessKey, seq uint64)
	Resume(target gpreempt.ProcessKey, seq uint64)
}

// Reply takes the answer to an announcement. It must not block.
type Reply func(LeaseID, Answer)

// Timer is a one-shot alarm clock. Set re-arms it and may be called while another
// goroutine is in Wait; Close ends Wait with an error.
type Timer interface {
	Set(d time.Duration) error
	Wait() error
	Close() error
}

// Runner serialises events into a Core and carries its actions out in order.
// All methods are safe for concurrent use; none blocks on anything but the lock,
// which is held for a Step and the hand-over of its actions, and for those of the
// events posted meanwhile, never across I/O (docs/adr/0002).
type Runner struct {
	clock    Clock
	executor Executor
	record   func(Record)
	timer    Timer

	posted posted

	mu       sync.Mutex // guards all below; taken by lock, and let go of by unlock
	core     *Core
	armed    Time // what timer is set to
	nextID   LeaseID
	replies  map[LeaseID][]Reply
	stopping bool
}

// NewRunner gives a runner. record is called for every state change, in order,
// under the runner's lock: it must not block and not call the runner.
func NewRunner(core *Core, clock Clock, timer Timer, executor Executor, record func(Record)) *Runner {
	return &Runner{core: core, clock: clock, timer: timer, executor: executor, record: record, replies: map[LeaseID][]Reply{}}
}

// Run fires deadlines until ctx ends, then closes the timer. beat is called on
// every turn, and at least every beatEvery, with the lock free: it feeds the
// watchdog, so a scheduler that hangs is noticed.
func (r *Runner) Run(ctx context.Context, beatEvery time.Duration, beat func()) error {
	stop := context.AfterFunc(ctx, func() { _ = r.timer.Close() })
	defer stop()
	for {
		r.turn(beatEvery)
		beat()
		if err := r.timer.Wait(); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("scheduler: the timer failed: %w", err)
		}
	}
}

// turn fires what is due and arms the timer for what comes next.
func (r *Runner) turn(atMost time.Duration) {
	r.lock()
	defer r.unlock()
	now := r.catchUp()
	wake := now + atMost
	if due, ok := r.core.NextDeadline(); ok {
		wake = min(wake, due)
	}
	r.arm(now, wake)
}

// catchUp fires what is due, so that what is asked of the core next is answered
// as of now: a lease may be overdue that the timer has not ended yet.
func (r *Runner) catchUp() Time {
	now := r.clock.Now()
	if due, ok := r.core.NextDeadline(); ok && due <= now {
		r.step(now, Tick{})
	}
	return now
}

func (r *Runner) arm(now, due Time) {
	r.armed = due
	if err := r.timer.Set(max(due-now, time.Nanosecond)); err != nil {
		// Without a timer nothing would ever expire: Wait fails too, and Run ends.
		_ = r.timer.Close()
	}
}

// Post takes in an event that has no answer, before any call that begins after it
// returns. It never waits: while another goroutine has the lock, that one takes the
// event in. When many targets are suspended at once, their workers would otherwise
// queue up for the lock, and be woken one after the other. After Stop the draining is
// not ended any more.
func (r *Runner) Post(ev Event) {
	r.posted.put(ev)
	if r.mu.TryLock() {
		r.unlock()
	}
}

func (r *Runner) lock() {
	r.mu.Lock()
	r.takeIn()
}

// unlock lets go of the lock with nothing posted that nobody will take in: whoever
// posted while it was held went away.
func (r *Runner) unlock() {
	for {
		r.takeIn()
		r.mu.Unlock()
		if r.posted.none() || !r.mu.TryLock() { // who has it now takes in what was posted
			return
		}
	}
}

func (r *Runner) takeIn() {
	for events := r.posted.take(); len(events) > 0; events = r.posted.take() {
		now := r.clock.Now()
		for _, ev := range events {
			if drain, ok := ev.(Drain); ok && r.stopping && !drain.On {
				continue
			}
			r.step(now, ev)
		}
	}
}

// posted are the events that were posted and not taken in yet.
type posted struct {
	n  atomic.Int64
	mu sync.Mutex // guards the rest
	// events are in their order; spare is the memory of those taken last.
	events, spare []Event
}

func (p *posted) put(ev Event) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.events = append(p.events, ev)
	p.n.Store(int64(len(p.events)))
}

func (p *posted) none() bool { return p.n.Load() == 0 }

// take gives what was posted, valid until it is called again.
func (p *posted) take() []Event {
	if p.none() {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	taken := p.events
	clear(p.spare)
	p.events, p.spare = p.spare[:0], taken
	p.n.Store(0)
	return taken
}

// Announce takes in an announcement; req.Lease is ignored, the id comes back.
// reply is called exactly once unless an error comes back, possibly before
// Announce returns. Errors are *gpreempt.Error.
func (r *Runner) Announce(req LeaseRequested, reply Reply) (LeaseID, error) {
	r.lock()
	defer r.unlock()
	if r.stopping {
		return 0, &gpreempt.Error{
			Code: gpreempt.CodeUnavailable, Reason: gpreempt.ReasonShuttingDown,
			Message: "the daemon is shutting down", Next: "go on without a lease, and announce again when it is back",
		}
	}
	now := r.catchUp()
	id, err := r.core.Admit(req)
	if err != nil {
		return 0, err
	}
	if id != 0 {
		if !req.Target.IsZero() {
			r.step(now, LeaseRenewed{Lease: id, TTL: req.TTL})
		}
		if answer, ok := r.core.Answered(id); ok {
			reply(id, answer)
		} else {
			r.replies[id] = append(r.replies[id], reply)
		}
		return id, nil
	}
	r.nextID++
	req.Lease = r.nextID
	r.replies[req.Lease] = []Reply{reply}
	r.step(now, req)
	return req.Lease, nil
}

// Complete ends a lease of the client; client 0, an admin, may end any. A lease
// that ended already tells how. Errors are *gpreempt.Error.
func (r *Runner) Complete(client ClientID, id LeaseID, end LeaseEnd) (LeaseEnd, time.Duration, error) {
	r.lock()
	defer r.unlock()
	if err := r.core.Owned(client, id); err != nil {
		return EndNone, 0, err
	}
	if how, held, ok := r.core.Ended(id); ok {
		return how, held, nil
	}
	r.step(r.clock.Now(), LeaseFinished{Lease: id, End: end})
	how, held, _ := r.core.Ended(id)
	return how, held, nil
}

// Renew gives a live lease a new time to live. Errors are *gpreempt.Error.
func (r *Runner) Renew(client ClientID, id LeaseID, ttl time.Duration) error {
	r.lock()
	defer r.unlock()
	now := r.catchUp()
	if err := r.core.Owned(client, id); err != nil {
		return err
	}
	if _, _, ended := r.core.Ended(id); ended {
		return UnknownLease()
	}
	if err := r.core.checkTTL(ttl); err != nil {
		return err
	}
	r.step(now, LeaseRenewed{Lease: id, TTL: ttl})
	return nil
}

// View gives read access under the lock, as of now; fn must not block and must
// keep nothing but copies.
func (r *Runner) View(fn func(c *Core)) {
	r.lock()
	defer r.unlock()
	r.step(r.clock.Now(), Tick{})
	fn(r.core)
}

// Now is the runner's time.
func (r *Runner) Now() Time { return r.clock.Now() }

// SetLimits replaces the limits; leases beyond them stay.
func (r *Runner) SetLimits(l Limits) {
	r.lock()
	defer r.unlock()
	r.core.limits = l
}

// Stop refuses announcements from now on and resumes everything.
func (r *Runner) Stop() {
	r.lock()
	defer r.unlock()
	r.stopping = true
	r.step(r.clock.Now(), Drain{On: true})
}

func (r *Runner) step(now Time, ev Event) {
	actions := r.core.Step(now, ev)
	for i := range actions {
		switch a := &actions[i]; a.Kind {
		case ActRecord:
			r.record(a.Record)
		case ActSuspend:
			r.executor.Suspend(a.Target, a.Seq)
		case ActResume:
			r.executor.Resume(a.Target, a.Seq)
		case ActAnswer:
			for _, reply := range r.replies[a.Lease] {
				reply(a.Lease, a.Answer)
			}
			delete(r.replies, a.Lease)
		}
	}
	if due, ok := r.core.NextDeadline(); ok && due < r.armed {
		r.arm(now, due)
	}
}
