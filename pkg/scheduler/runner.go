package scheduler

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Clock returns the time. It is monotonic and safe for concurrent use.
type Clock interface{ Now() Time }

// Executor carries out actions on targets. Its methods must not block and must not
// call the Runner: the result is posted later, by Runner.Post. Actions on one target
// are carried out in order.
type Executor interface {
	// Attach posts Attached, Detach posts Detached.
	Attach(target gpreempt.ProcessKey)
	Detach(target gpreempt.ProcessKey)
	// Suspend posts Suspended, Resume posts Resumed, with seq.
	Suspend(target gpreempt.ProcessKey, seq uint64)
	Resume(target gpreempt.ProcessKey, seq uint64)
	// Inspect posts Inspected, with seq. It may be called during any of the others.
	Inspect(target gpreempt.ProcessKey, seq uint64)
	// Kill ends the process, and posts nothing.
	Kill(target gpreempt.ProcessKey)
	// Flush is called after the actions of each step. What Suspend and Resume have ordered
	// since the last call may begin with it only.
	Flush()
}

// Reply is called with the answer to an announcement. It must not block.
type Reply func(LeaseID, Answer)

// Timer is a one-shot timer. Set arms it again and may be called while another goroutine
// is in Wait; Close makes Wait return an error.
type Timer interface {
	Set(d time.Duration) error
	Wait() error
	Close() error
}

// Runner serialises events into a Core and carries its actions out in order.
// All methods are safe for concurrent use. They wait for the lock only, which is held
// for one Step and the hand-over of its actions, and not during I/O (docs/adr/0002).
type Runner struct {
	clock    Clock
	executor Executor
	record   func(Record)
	timer    Timer

	mu       sync.Mutex // guards all below
	core     *Core
	armed    Time // what timer is set to
	nextID   LeaseID
	replies  map[LeaseID][]Reply
	stopping bool
}

// NewRunner returns a runner. record is called for every state change, in order,
// under the runner's lock: it must not block and not call the runner.
func NewRunner(core *Core, clock Clock, timer Timer, executor Executor, record func(Record)) *Runner {
	return &Runner{core: core, clock: clock, timer: timer, executor: executor, record: record, replies: map[LeaseID][]Reply{}}
}

// Run fires deadlines until ctx ends, then closes the timer. It calls beat after each
// deadline and at least every beatEvery, without the lock: beat feeds the watchdog, which
// detects a scheduler that hangs.
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
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.catchUp()
	wake := now + atMost
	if due, ok := r.core.NextDeadline(); ok {
		wake = min(wake, due)
	}
	r.arm(now, wake)
}

// catchUp fires what is due, so that the core is up to date: the timer may not have ended
// an overdue lease yet.
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

// Post handles an event that has no answer. After Stop, an event that ends draining is
// ignored.
func (r *Runner) Post(ev Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if drain, ok := ev.(Drain); ok && r.stopping && !drain.On {
		return
	}
	r.step(r.clock.Now(), ev)
}

// Announce admits an announcement, and returns its lease and the lease's time to live;
// req.Lease is ignored. Unless it returns an error it calls reply exactly once, possibly
// before it returns. Errors are *Refusal.
func (r *Runner) Announce(req LeaseRequested, reply Reply) (LeaseID, time.Duration, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stopping {
		return 0, 0, &Refusal{Reason: gpreempt.ReasonShuttingDown}
	}
	now := r.catchUp()
	id, err := r.core.Admit(&req)
	if err != nil {
		return 0, 0, err
	}
	if id != 0 {
		if answer, ok := r.core.Answered(id); ok {
			reply(id, answer)
		} else {
			r.replies[id] = append(r.replies[id], reply)
		}
		return id, req.TTL, nil
	}
	r.nextID++
	req.Lease = r.nextID
	r.replies[req.Lease] = []Reply{reply}
	r.step(now, req)
	return req.Lease, req.TTL, nil
}

// Complete ends a lease of the client; client 0, an admin, may end any. It returns how
// the lease ended, which may have been earlier, and how long it lived. Errors are
// *Refusal.
func (r *Runner) Complete(client ClientID, id LeaseID, end LeaseEnd) (LeaseEnd, time.Duration, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.core.Owned(client, id); err != nil {
		return EndNone, 0, err
	}
	r.step(r.clock.Now(), LeaseFinished{Lease: id, End: end})
	how, held, _ := r.core.Ended(id)
	return how, held, nil
}

// Renew sets the time to live of a live lease, which may be PolicyDefault, and returns
// it. Errors are *Refusal.
func (r *Runner) Renew(client ClientID, id LeaseID, ttl time.Duration) (time.Duration, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.catchUp()
	if err := r.core.Owned(client, id); err != nil {
		return 0, err
	}
	if _, _, ended := r.core.Ended(id); ended {
		return 0, errUnknownLease
	}
	ttl = orDefault(ttl, r.core.policy.DefaultTTL)
	if err := r.core.checkTTL(ttl); err != nil {
		return 0, err
	}
	r.step(now, LeaseRenewed{Lease: id, TTL: ttl})
	return ttl, nil
}

// View calls fn with the core, under the lock; fn must not block or change the core, and may keep
// copies only. Times are as of now; a deadline that is due is left to Run.
func (r *Runner) View(fn func(c *Core)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.core.now = max(r.core.now, r.clock.Now())
	fn(r.core)
}

// Now returns the runner's time.
func (r *Runner) Now() Time { return r.clock.Now() }

// SetLimits replaces the limits; leases above them stay.
func (r *Runner) SetLimits(l Limits) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.core.limits = l
}

// Stop rejects announcements from now on, resumes all targets and detaches from every
// target.
func (r *Runner) Stop() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stopping = true
	r.step(r.clock.Now(), Drain{On: true})
	r.step(r.clock.Now(), Stopped{})
}

func (r *Runner) step(now Time, ev Event) {
	actions := r.core.Step(now, ev)
	for i := range actions {
		switch a := &actions[i]; a.Kind {
		case ActRecord:
			r.record(a.Record)
		case ActAttach:
			r.executor.Attach(a.Target)
		case ActDetach:
			r.executor.Detach(a.Target)
		case ActSuspend:
			r.executor.Suspend(a.Target, a.Seq)
		case ActResume:
			r.executor.Resume(a.Target, a.Seq)
		case ActKill:
			r.executor.Kill(a.Target)
		case ActInspect:
			r.executor.Inspect(a.Target, a.Seq)
		case ActAnswer:
			for _, reply := range r.replies[a.Lease] {
				reply(a.Lease, a.Answer)
			}
			delete(r.replies, a.Lease)
		}
	}
	r.executor.Flush()
	if due, ok := r.core.NextDeadline(); ok && due < r.armed {
		r.arm(now, due)
	}
}
