// Package mechanism defines what a mechanism is: one way to suspend and resume all
// queues of a process.
//
// # Journal
//
// A Journal is the record on disk of pauses that the kernel does not undo when the daemon
// dies.
//
// An entry is written before a pause is made and removed after the pause was undone. So
// whenever the daemon dies, the entries name every process that may be paused, and some
// that are not: undoing is safe for both. Each entry is a file of its own; one that
// cannot be read does not affect the others.
package mechanism

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"

	"github.com/gpreempt/gpreempt/internal/proc"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// ErrGone reports that the target process has exited: an event, not a failure.
var ErrGone = proc.ErrGone

// ErrReplaced reports that the target process runs another program now (execve), and
// that whatever was known of its queues is void: an event, too. It can be attached to
// again at once.
var ErrReplaced = errors.New("the process has replaced its program")

// ErrDebugged reports that another debugger holds the process on the GPU: nothing has
// failed, and how long that one stays does not depend on how long it has stayed. What is
// returned wraps it and names the process.
var ErrDebugged = errors.New("another debugger holds the process on the GPU")

// ErrTraced reports that another program traces the process.
var ErrTraced = proc.ErrTraced

// ErrResumed reports that another program resumes the process each time it is suspended.
var ErrResumed = errors.New("another program has resumed it")

// ErrWaiting reports that a call of the driver for the process, which was given up, has not
// returned: nothing else has failed, and the process can be attached to as soon as it returns.
var ErrWaiting = errors.New("a call of the driver for the process has not returned")

// HardwareError reports that GPUs failed to do what the mechanism asked: the
// GPU may be hung or in reset, and must be left alone.
type HardwareError struct {
	GPUs []gpreempt.GPUID
	Err  error
}

func (e *HardwareError) Error() string {
	return fmt.Sprintf("GPU %v reported an error: %v", e.GPUs, e.Err)
}

// Unwrap returns the cause.
func (e *HardwareError) Unwrap() error { return e.Err }

// Mechanism is one way to suspend and resume processes. Its methods may be called by
// several goroutines at once.
type Mechanism interface {
	// Name is that of its Kind.
	Name() string
	// Probe checks whether Attach can work, without any effect on the target.
	// It does not block for long, and reports a process that has exited by the evidence.
	Probe(ctx context.Context, target gpreempt.ProcessKey) Capability
	// Attach prepares a target, off the hot path. It returns ErrGone when the process
	// has exited. A session that comes with an error can only be closed: the target could
	// not be released yet.
	Attach(ctx context.Context, target gpreempt.ProcessKey) (Session, error)
}

// Inspector is a Mechanism that knows what its calls wait for.
type Inspector interface {
	Mechanism
	// WaitsForTarget reports whether a call that was made for the target and has not
	// returned waits for a lock that the target itself holds: no GPU is at fault then. It
	// returns false when that is not known. It may be called during any call, and does not
	// block.
	WaitsForTarget(target gpreempt.ProcessKey) bool
}

// Batcher is a Mechanism that suspends or resumes several targets with one call of the driver.
type Batcher interface {
	Mechanism
	// SuspendEach is Suspend of each of the sessions, which are the mechanism's own, of
	// different targets, and used by nobody else until done is called with their index and
	// result: once for each, by any goroutine. The failure of one does not undo the others, and
	// one that a call holds up that began earlier does not hold them up. It returns once done was
	// called for each. When ctx has ended all are resumed.
	SuspendEach(ctx context.Context, sessions []Session, done func(index int, err error))
	// ResumeEach is Resume of each of them.
	ResumeEach(ctx context.Context, sessions []Session, done func(index int, err error))
}

// Session is a mechanism attached to one target. Its methods are called by one goroutine
// at a time. They may block in the driver, which nothing cuts short.
type Session interface {
	// Suspend takes every queue of the target off its GPUs, those born since the
	// last call included; suspending what is suspended is harmless. It calls done, unless that is nil,
	// as soon as every queue is suspended, from the thread that made the call to the driver, and not
	// before an error. It is all or nothing: on an error, also when ctx has ended, it has resumed what
	// it could. Errors: ErrGone, ErrReplaced, *HardwareError, others.
	Suspend(ctx context.Context, done func()) error
	// Resume maps every queue again; resuming what runs is harmless. Its errors are those
	// of Suspend.
	Resume(ctx context.Context) error
	// Close detaches; whatever is suspended runs again. On an error something may
	// still be suspended, and Close must be called again. After nil it is idempotent.
	Close() error
	// Events returns a channel that is readable when Handle must be called; nil for never.
	Events() <-chan struct{}
	// Handle takes in what has happened to the target since the last call. An error means that the
	// session can no longer suspend and is to be closed; ErrGone, that the process has exited.
	Handle(ctx context.Context) (Report, error)
}

// Report is what has happened to a target.
type Report struct {
	// Running is why a queue of a suspended target runs, so that another Suspend is needed.
	Running Running
	// Born is the number of queues that were born while the target was suspended, and that the session
	// has suspended by itself.
	Born int
	// Changed: queues were born, or the target's runtime started or ended.
	Changed bool
}

// Running is why a queue of a suspended target runs.
type Running uint8

// The reasons.
const (
	// NotRunning: none does, or the target is not suspended.
	NotRunning Running = iota
	// NewQueue: it was born since, and could not be suspended at once.
	NewQueue
	// ResumedByAnother: another program has resumed the process.
	ResumedByAnother
	// Lapsed: what resumes everything when the daemon hangs has done so.
	Lapsed
)

// Notifier is the channel of the events of a session.
type Notifier chan struct{}

// NewNotifier returns a channel without an event.
func NewNotifier() Notifier { return make(Notifier, 1) }

// Events implements Session.
func (e Notifier) Events() <-chan struct{} { return e }

// Notify has the owner of the session call Handle. It does not block.
func (e Notifier) Notify() {
	select {
	case e <- struct{}{}:
	default: // it will be called already
	}
}

// Guard calls f and returns a panic as an error, so that a mechanism that is broken for one
// target ends neither the daemon nor what it does for other targets.
func Guard(f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
	}()
	return f()
}
