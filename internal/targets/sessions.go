// Package targets implements what the daemon does with the processes that use a GPU: it
// classifies them for the scheduler, and attaches mechanisms to those that the scheduler
// wants to suspend.
//
// Registry has the classification. Sessions has one goroutine for each target with a
// mechanism: the goroutine owns the mechanism's session and carries out the scheduler's
// actions, so that a call that hangs in the driver holds up its own target only, or with a
// Batcher the targets that the call is for.
package targets

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/internal/log"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// Config is what Sessions need. Its functions are called by several goroutines.
type Config struct {
	// Mechanisms are those to use, best first.
	Mechanisms []mechanism.Mechanism
	// Assess is called before a mechanism is used on a target; nil permits all.
	Assess func(mechanism string, target gpreempt.ProcessKey) Assessment
	// Post takes the result of every action.
	Post func(scheduler.Event)
	// Look is called when the queues of a target have changed, so that discovery reads
	// them. It must not block. May be nil.
	Look func(target gpreempt.ProcessKey)
	// Bystanders returns the GPUs that the target can see and has no queue on, and whose
	// runlists have queues of others; false for a process that is not known. May be nil.
	Bystanders func(target gpreempt.ProcessKey) ([]gpreempt.GPUID, bool)
	// Disturbed counts runlist cycles on a GPU that a target has no queue on. May be nil.
	Disturbed func(gpu gpreempt.GPUID, cycles int)
	// Kill ends a process by SIGKILL.
	Kill func(target gpreempt.ProcessKey) error
	// Permitted reports whether the program that traces the target is one that an admin permits to.
	// May be nil: none is.
	Permitted func(target gpreempt.ProcessKey) bool
	// Now is a monotonic clock.
	Now func() time.Duration
	Log *zap.Logger
}

// Sessions are the mechanisms' sessions with targets. They implement
// scheduler.Executor; the methods are safe for concurrent use.
type Sessions struct {
	cfg    Config
	start  time.Time       // the wall clock when cfg.Now was 0
	ctx    context.Context // ends when Close gives up waiting
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu      sync.Mutex // guards the rest; not held while a mechanism is called
	actors  map[gpreempt.ProcessKey]*actor
	states  map[gpreempt.ProcessKey]*State
	history history
	orders  []order // since the last Flush, of actors with a batcher
}

// State is what Sessions know of a target.
type State struct {
	// Choice is the mechanism that is attached, or why none is.
	Choice Choice
	// Err is why the target cannot be suspended; nil while a mechanism is attached.
	Err error
	// AttachCycles counts the runlist cycles that attaching to it and releasing it caused on
	// GPUs that it has no queue on.
	AttachCycles uint64
	// forgotten: the process has left, and nothing is kept once its actor ends.
	forgotten bool
	// warned: the log says already that the target cannot be suspended.
	warned bool
}

var _ scheduler.Executor = (*Sessions)(nil)

// NewSessions returns sessions with no target.
func NewSessions(cfg Config) *Sessions {
	if cfg.Assess == nil {
		cfg.Assess = func(string, gpreempt.ProcessKey) Assessment {
			return Assessment{Evidence: mechanism.Evidence{OK: true}}
		}
	}
	if cfg.Look == nil {
		cfg.Look = func(gpreempt.ProcessKey) {}
	}
	if cfg.Bystanders == nil {
		cfg.Bystanders = func(gpreempt.ProcessKey) ([]gpreempt.GPUID, bool) { return nil, false }
	}
	if cfg.Permitted == nil {
		cfg.Permitted = func(gpreempt.ProcessKey) bool { return false }
	}
	if cfg.Disturbed == nil {
		cfg.Disturbed = func(gpreempt.GPUID, int) {}
	}
	ctx, cancel := context.WithCancel(context.Background()) //nolint:forbidigo // sessions outlive the caller; Close ends them
	return &Sessions{
		cfg: cfg, start: time.Now().Add(-cfg.Now()), ctx: ctx, cancel: cancel,
		actors: map[gpreempt.ProcessKey]*actor{}, states: map[gpreempt.ProcessKey]*State{}, history: newHistory(),
	}
}

// Attach implements scheduler.Executor.
func (s *Sessions) Attach(target gpreempt.ProcessKey) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ctx.Err() != nil {
		return
	}
	s.state(target) // there is one from now on
	a := s.actors[target]
	if a == nil {
		a = newActor(s, target)
		s.actors[target] = a
		s.wg.Go(a.run)
	}
	a.commands <- command{kind: attach}
}

// Detach implements scheduler.Executor.
func (s *Sessions) Detach(target gpreempt.ProcessKey) {
	s.send(target, command{kind: detach}, scheduler.Detached{Target: target})
}

// Suspend implements scheduler.Executor.
func (s *Sessions) Suspend(target gpreempt.ProcessKey, seq uint64) {
	s.order(target, command{kind: suspend, seq: seq}, scheduler.Suspended{Target: target, Seq: seq, Result: scheduler.CauseFailed})
}

// Resume implements scheduler.Executor.
func (s *Sessions) Resume(target gpreempt.ProcessKey, seq uint64) {
	s.order(target, command{kind: resume, seq: seq}, scheduler.Resumed{Target: target, Seq: seq})
}

// Inspect implements scheduler.Executor.
func (s *Sessions) Inspect(target gpreempt.ProcessKey, seq uint64) {
	go func() { // the caller is in the middle of a step of the scheduler
		stuck := slices.ContainsFunc(s.cfg.Mechanisms, func(m mechanism.Mechanism) bool {
			i, ok := m.(mechanism.Inspector)
			return ok && i.WaitsForTarget(target)
		})
		s.cfg.Post(scheduler.Inspected{Target: target, Seq: seq, Stuck: stuck})
	}()
}

// Kill implements scheduler.Executor.
func (s *Sessions) Kill(target gpreempt.ProcessKey) {
	s.wg.Go(func() { // the caller is in the middle of a step of the scheduler
		if err := s.cfg.Kill(target); err != nil && !errors.Is(err, mechanism.ErrGone) {
			s.cfg.Log.Error("target that cannot be suspended could not be killed", log.Target(target), log.Err(err))
			return
		}
		s.cfg.Log.Warn("target killed: it refused as many suspensions as its rule allows", log.Target(target))
	})
}

// send hands a command to the target's actor. Without one nothing is attached and
// nothing is suspended, which is the result.
func (s *Sessions) send(target gpreempt.ProcessKey, c command, without scheduler.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.flush() // actions on one target are carried out in order
	s.hand(target, c, without)
}

// hand is send. It needs mu.
func (s *Sessions) hand(target gpreempt.ProcessKey, c command, without scheduler.Event) {
	if a := s.actors[target]; a != nil {
		a.commands <- c // it has room for as many as the scheduler has in flight
		return
	}
	go s.cfg.Post(without) // the caller is in the middle of a step of the scheduler
}

// Close waits until every target is detached, which is the scheduler's to order. When
// ctx ends first, Close gives up, and each target that a call still holds up is released
// when that call returns. The error is that of ctx.
func (s *Sessions) Close(ctx context.Context) error {
	defer s.cancel()
	done := make(chan struct{})
	go func() { s.wg.Wait(); close(done) }()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("some targets are not released yet: %w", context.Cause(ctx))
	}
}

// State returns the state of a target; false when no Attach was tried.
func (s *Sessions) State(target gpreempt.ProcessKey) (State, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if st := s.states[target]; st != nil {
		return *st, true
	}
	return State{}, false
}

// Forget drops what is known of a process that has left, once nothing is attached to it.
func (s *Sessions) Forget(target gpreempt.ProcessKey) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.actors[target] != nil {
		s.state(target).forgotten = true
		return
	}
	s.drop(target)
}

// drop needs mu.
func (s *Sessions) drop(target gpreempt.ProcessKey) {
	delete(s.states, target)
	s.history.forget(target)
}

// state returns the state of a target, to be changed. It needs mu.
func (s *Sessions) state(target gpreempt.ProcessKey) *State {
	st := s.states[target]
	if st == nil {
		st = &State{}
		s.states[target] = st
	}
	return st
}

// Invalidate ends the use of the mechanism that is attached to a target, if obstacle, which is
// called with its name, returns one.
func (s *Sessions) Invalidate(target gpreempt.ProcessKey, obstacle func(name string) *mechanism.Evidence) {
	s.mu.Lock()
	name := ""
	if s.actors[target] != nil {
		name = s.state(target).Choice.Mechanism
	}
	s.mu.Unlock()
	if name == "" {
		return
	}
	if e := obstacle(name); e != nil {
		r := rejection(name, *e)
		s.lost(target, &NotSuspendable{[]Rejection{r}})
	}
}

// Reassess ends the use of the mechanisms that Config.Assess rules out by now.
func (s *Sessions) Reassess() {
	s.mu.Lock()
	targets := slices.Collect(maps.Keys(s.actors))
	s.mu.Unlock()
	for _, target := range targets {
		s.reassess(target)
	}
}

func (s *Sessions) reassess(target gpreempt.ProcessKey) {
	s.Invalidate(target, func(name string) *mechanism.Evidence {
		if e := s.cfg.Assess(name, target).Evidence; !e.OK {
			return &e
		}
		return nil
	})
}

// lost reports to the scheduler that the session with target can no longer suspend.
func (s *Sessions) lost(target gpreempt.ProcessKey, err error) {
	s.mu.Lock()
	st := s.state(target)
	st.Choice, st.Err = Choice{}, err
	s.mu.Unlock()
	s.cfg.Log.Warn("target can no longer be suspended", log.Target(target), log.Err(err))
	result, gpus := s.result(target, err)
	s.cfg.Post(scheduler.Lost{Target: target, Result: result, FailedGPUs: gpus})
}

func (s *Sessions) reject(name string, target gpreempt.ProcessKey, a Assessment) *Rejection {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.history.reject(s.cfg.Now(), s.start, name, target, a)
}

// reserve returns why a mechanism is not to be tried; nil if it may be, and then it has
// the slots it needs.
func (s *Sessions) reserve(name string, target gpreempt.ProcessKey, a Assessment) *Rejection {
	s.mu.Lock()
	defer s.mu.Unlock()
	if no := s.history.reject(s.cfg.Now(), s.start, name, target, a); no != nil {
		return no
	}
	return s.history.reserve(name, target, a.Limited)
}

func (s *Sessions) free(target gpreempt.ProcessKey, h *holding) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.history.free(h.name, target, h.gpus)
}

func (s *Sessions) fail(name string, target gpreempt.ProcessKey, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.history.fail(s.cfg.Now(), name, target, err)
}

// result is that of a failure about a target, whose tracer may be a permitted one.
func (s *Sessions) result(target gpreempt.ProcessKey, err error) (scheduler.Cause, []gpreempt.GPUID) {
	why, gpus := result(err)
	if why == gpreempt.ReasonResisted && s.cfg.Permitted(target) {
		why = scheduler.CauseFailed
	}
	return why, gpus
}

// result returns what an error of a mechanism means to the scheduler, which is the worst obstacle if it names
// some, and the GPUs that failed.
func result(err error) (scheduler.Cause, []gpreempt.GPUID) {
	hardware, failed := errors.AsType[*mechanism.HardwareError](err)
	rejected, _ := errors.AsType[*NotSuspendable](err)
	switch {
	case err == nil:
		return "", nil
	case errors.Is(err, mechanism.ErrGone):
		return scheduler.CauseGone, nil
	case errors.Is(err, mechanism.ErrReplaced):
		return scheduler.CauseReplaced, nil
	case failed:
		return scheduler.CauseHardware, hardware.GPUs
	}
	for _, o := range slices.Backward(gpreempt.Obstacles()) {
		if reasonOf(err) == o || rejected != nil && slices.ContainsFunc(rejected.Rejected, func(r Rejection) bool { return r.Reason == o }) {
			return o, nil
		}
	}
	return scheduler.CauseFailed, nil
}
