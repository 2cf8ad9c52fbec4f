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
	// Assess is called before a mechanism is used on a target.
	Assess func(mechanism string, target gpreempt.ProcessKey) Assessment
	// Post takes the result of every action.
	Post func(scheduler.Event)
	// Look is called when the queues of a target have changed, so that discovery reads
	// them. It must not block.
	Look func(target gpreempt.ProcessKey)
	// Bystanders returns the GPUs that the target can see and has no queue on, and whose
	// runlists have queues of others; false for a process that is not known.
	Bystanders func(target gpreempt.ProcessKey) ([]gpreempt.GPUID, bool)
	// Disturbed counts runlist cycles on a GPU that a target has no queue on.
	Disturbed func(gpu gpreempt.GPUID, cycles int)
	// Kill ends a process by SIGKILL.
	Kill func(target gpreempt.ProcessKey) error
	// Permitted reports whether the program that traces the target is one that an admin permits to.
	Permitted func(target gpreempt.ProcessKey) bool
	// Now is a monotonic clock.
	Now func() time.Duration
	Log *zap.Logger
}

// Sessions are the mechanisms' sessions with targets. They implement
// scheduler.Executor; the methods are safe for concurrent use.
type Sessions struct {
	cfg     Config
	ctx     context.Context // ends when Close gives up waiting
	cancel  context.CancelFunc
	wg      sync.WaitGroup
	history *history

	mu     sync.Mutex // guards the rest; not held while a mechanism is called
	actors map[gpreempt.ProcessKey]*actor
	states map[gpreempt.ProcessKey]*State
	orders []order // since the last Flush, of actors with a batcher
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
	ctx, cancel := context.WithCancel(context.Background()) //nolint:forbidigo // sessions outlive the caller; Close ends them
	return &Sessions{
		cfg: cfg, ctx: ctx, cancel: cancel,
		actors: map[gpreempt.ProcessKey]*actor{}, states: map[gpreempt.ProcessKey]*State{}, history: newHistory(time.Now().Add(-cfg.Now())),
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
	a.orders <- order{kind: attach}
}

// Detach implements scheduler.Executor.
func (s *Sessions) Detach(target gpreempt.ProcessKey) {
	s.order(order{target: target, kind: detach})
}

// Suspend implements scheduler.Executor.
func (s *Sessions) Suspend(target gpreempt.ProcessKey, seq uint64) {
	s.order(order{target: target, kind: suspend, seq: seq})
}

// Resume implements scheduler.Executor.
func (s *Sessions) Resume(target gpreempt.ProcessKey, seq uint64) {
	s.order(order{target: target, kind: resume, seq: seq})
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

// hand hands an order to the target's actor. Without one nothing is attached and nothing is
// suspended, which is the result. It needs mu.
func (s *Sessions) hand(o order) {
	if a := s.actors[o.target]; a != nil {
		a.orders <- o // it has room for as many as the scheduler has in flight
		return
	}
	var result scheduler.Event = scheduler.Detached{Target: o.target}
	switch o.kind {
	case suspend:
		result = scheduler.Suspended{Target: o.target, Seq: o.seq, Result: scheduler.CauseFailed}
	case resume:
		result = scheduler.Resumed{Target: o.target, Seq: o.seq}
	case attach, detach:
	}
	go s.cfg.Post(result) // the caller is in the middle of a step of the scheduler
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
