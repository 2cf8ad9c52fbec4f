// Package executor carries out what the scheduler decides: one worker goroutine
// per target, so that a target whose mechanism is slow delays no other.
package executor

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/internal/logkey"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// Config is what an Executor needs.
type Config struct {
	// Mechanism attaches to targets: a mechanism.Mechanism, or a choice of several.
	Mechanism Attacher
	// Post takes the result of every action; it may call the Executor.
	Post func(scheduler.Event)
	// Attached is told once for each Attach that no Detach undid meanwhile, from the
	// target's worker: nil when the target can be suspended now.
	Attached func(target gpreempt.ProcessKey, err error)
	// Now is a monotonic clock, for how long actions take.
	Now func() time.Duration
	Log *zap.Logger
}

// Attacher is the part of mechanism.Mechanism the executor uses.
type Attacher interface {
	Attach(ctx context.Context, target gpreempt.ProcessKey) (mechanism.Session, error)
}

// Executor implements scheduler.Executor. Its methods are safe for concurrent use.
type Executor struct {
	cfg    Config
	ctx    context.Context // ends when Close gives up waiting
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu      sync.Mutex // guards the rest
	workers map[gpreempt.ProcessKey]*worker
	// leaving are those that were detached and have not let go of their target yet,
	// the latest for each target.
	leaving map[gpreempt.ProcessKey]*worker
	closed  bool
}

type command struct {
	suspend bool
	seq     uint64
}

// worker owns the session of one target.
type worker struct {
	target gpreempt.ProcessKey
	// commands holds at most the one action the scheduler has in flight; closing
	// it detaches after that action.
	commands chan command
	// before had the target before, and has to let go of it first; nil when there was
	// none.
	before *worker
	done   chan struct{}
}

// New returns an executor without targets.
func New(cfg Config) *Executor {
	ctx, cancel := context.WithCancel(context.Background()) //nolint:forbidigo // an executor outlives its maker's call; Close ends it
	return &Executor{cfg: cfg, ctx: ctx, cancel: cancel, workers: map[gpreempt.ProcessKey]*worker{}, leaving: map[gpreempt.ProcessKey]*worker{}}
}

// Attach begins to attach the mechanism to a target; Config.Attached hears how
// it went. Attaching a target twice does nothing.
func (e *Executor) Attach(target gpreempt.ProcessKey) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed || e.workers[target] != nil {
		return
	}
	w := &worker{target: target, commands: make(chan command, 1), before: e.leaving[target], done: make(chan struct{})}
	e.workers[target] = w
	e.wg.Go(func() { e.work(w) })
}

// Detach lets a target go, after the action in flight; whatever is suspended
// runs again. Detaching an unknown target does nothing.
func (e *Executor) Detach(target gpreempt.ProcessKey) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.detach(target)
}

func (e *Executor) detach(target gpreempt.ProcessKey) {
	if w := e.workers[target]; w != nil {
		delete(e.workers, target)
		e.leaving[target] = w
		close(w.commands)
	}
}

// Close detaches every target and waits for the workers; when ctx ends first it
// cancels what they do and returns its error.
func (e *Executor) Close(ctx context.Context) error {
	e.mu.Lock()
	e.closed = true
	for target := range e.workers {
		e.detach(target)
	}
	e.mu.Unlock()
	defer e.cancel()
	done := make(chan struct{})
	go func() { e.wg.Wait(); close(done) }()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("some targets are still being released: %w", context.Cause(ctx))
	}
}

// Suspend hands the action to the target's worker.
func (e *Executor) Suspend(target gpreempt.ProcessKey, seq uint64) {
	if !e.hand(target, command{true, seq}) {
		// Posting from here would re-enter the scheduler, which is in the middle of
		// a step.
		go e.cfg.Post(scheduler.Suspended{Target: target, Seq: seq, Result: scheduler.OutcomeFailed})
	}
}

// Resume hands the action to the target's worker. A target that was detached, even while
// it was being suspended, runs once it has been let go of: that is waited for, and no
// failure.
func (e *Executor) Resume(target gpreempt.ProcessKey, seq uint64) {
	if e.hand(target, command{false, seq}) {
		return
	}
	e.mu.Lock()
	leaving := e.leaving[target]
	e.mu.Unlock()
	go func() {
		outcome := scheduler.OutcomeOK
		if leaving != nil {
			if <-leaving.done; e.ctx.Err() != nil { // it may have been given up
				outcome = scheduler.OutcomeFailed
			}
		}
		e.cfg.Post(scheduler.Resumed{Target: target, Seq: seq, Result: outcome})
	}()
}

func (e *Executor) hand(target gpreempt.ProcessKey, c command) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	w := e.workers[target]
	if w == nil {
		return false
	}
	select {
	case w.commands <- c:
		return true
	default: // a second action in flight: the scheduler never sends one
		return false
	}
}

func (e *Executor) work(w *worker) {
	defer e.gone(w)
	if w.before != nil {
		<-w.before.done
	}
	session, err := e.attach(w.target)
	if e.current(w) {
		e.cfg.Attached(w.target, err)
	}
	for c := range w.commands {
		e.do(w.target, session, c)
	}
	if session != nil {
		e.release(w.target, session)
	}
}

// gone notes that w has let go of its target.
func (e *Executor) gone(w *worker) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.leaving[w.target] == w {
		delete(e.leaving, w.target)
	}
	close(w.done)
}

const (
	// firstRelease and lastRelease bound the time between two attempts to let a
	// target go.
	firstRelease = 100 * time.Millisecond
	lastRelease  = 30 * time.Second
)

// release lets a target go, however often that has to be tried: what is suspended
// would stay so.
func (e *Executor) release(target gpreempt.ProcessKey, session mechanism.Session) {
	for wait := firstRelease; ; wait = min(2*wait, lastRelease) {
		err := closeSession(session)
		if err == nil {
			return
		}
		e.cfg.Log.Error("a target could not be released and may be suspended; it is tried again",
			logkey.Target(target), logkey.RetryIn(wait), logkey.Err(err))
		select {
		case <-e.ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}

func closeSession(session mechanism.Session) (err error) {
	defer barrier(&err)
	return session.Close()
}

// current reports whether w is still the worker of its target: what a worker that
// was let go finds out says nothing about the one after it.
func (e *Executor) current(w *worker) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.workers[w.target] == w
}

func (e *Executor) attach(target gpreempt.ProcessKey) (s mechanism.Session, err error) {
	defer barrier(&err)
	return e.cfg.Mechanism.Attach(e.ctx, target)
}

func (e *Executor) do(target gpreempt.ProcessKey, session mechanism.Session, c command) {
	begin := e.cfg.Now()
	err := e.call(session, c)
	took := e.cfg.Now() - begin
	outcome, gpus := classify(err)
	if outcome != scheduler.OutcomeOK && outcome != scheduler.OutcomeGone {
		e.cfg.Log.Warn("an action on a target failed", logkey.Target(target), logkey.Suspend(c.suspend), logkey.Err(err))
	}
	if c.suspend {
		e.cfg.Post(scheduler.Suspended{Target: target, Seq: c.seq, Result: outcome, FailedGPUs: gpus, Took: took})
	} else {
		e.cfg.Post(scheduler.Resumed{Target: target, Seq: c.seq, Result: outcome, FailedGPUs: gpus, Took: took})
	}
}

var errNotAttached = errors.New("no mechanism is attached to the target")

func (e *Executor) call(session mechanism.Session, c command) (err error) {
	defer barrier(&err)
	switch {
	case session == nil && c.suspend:
		return errNotAttached
	case session == nil:
		return nil
	case c.suspend:
		return session.Suspend(e.ctx)
	default:
		return session.Resume(e.ctx)
	}
}

// barrier turns a panic of a mechanism into an error: one broken target must not
// take the others, or the daemon, with it.
func barrier(err *error) {
	if p := recover(); p != nil {
		*err = fmt.Errorf("the mechanism panicked: %v\n%s", p, debug.Stack())
	}
}

func classify(err error) (scheduler.Outcome, []gpreempt.GPUID) {
	var hardware *mechanism.HardwareError
	switch {
	case err == nil:
		return scheduler.OutcomeOK, nil
	case errors.Is(err, mechanism.ErrGone), errors.Is(err, mechanism.ErrReplaced):
		// With its memory the driver let go of all that was suspended. As a new program it
		// is seen again.
		return scheduler.OutcomeGone, nil
	case errors.As(err, &hardware):
		return scheduler.OutcomeHardware, hardware.GPUs
	default:
		return scheduler.OutcomeFailed, nil
	}
}
