package dbgtrap

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/tracer"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// errClosed is what a session gives once it has been closed.
var errClosed = errors.New("the session with the process has been closed")

// RuntimeError reports that the target's ROCm runtime is in a state in which the
// driver suspends no queue.
type RuntimeError struct {
	Target gpreempt.ProcessKey
	State  kfd.RuntimeState
	// Queues is how many queues the target has, where it matters.
	Queues int
	// Ended tells that the runtime was there and has been shut down.
	Ended bool
}

func (e *RuntimeError) Error() string {
	switch {
	case e.State == kfd.RuntimeBusy:
		return fmt.Sprintf("process %d: a GPU could not be had for debugging: it can debug one process at a time and has one, or the process has set a CU mask: end the other one, or let another mechanism hold this process", e.Target.PID)
	case e.State == kfd.RuntimeFailed:
		return fmt.Sprintf("process %d: a GPU failed to enter debugging: look for amdgpu errors in the kernel log", e.Target.PID)
	case e.Ended:
		return fmt.Sprintf("process %d has shut its ROCm runtime down and still has %d queues, which cannot be suspended: wait for its end", e.Target.PID, e.Queues)
	}
	return fmt.Sprintf("process %d has %d queues and did not enable its ROCm runtime for debugging before it made them, so they can never be suspended this way: "+
		"run it with a ROCm of 6.0 or later on GPUs with debug firmware, or let another mechanism hold it", e.Target.PID, e.Queues)
}

// errRuntimeOff is what a call on queues gives when the runtime's state forbids
// it; the driver says EPERM, as it does to strangers.
var errRuntimeOff = errors.New("the ROCm runtime of the process is not enabled")

// final tells that after err a session can do nothing more for its target.
func final(err error) bool {
	if e, ok := errors.AsType[*RuntimeError](err); ok {
		return !e.Ended
	}
	if _, ok := errors.AsType[*tracer.DeniedError](err); ok {
		return true
	}
	return errors.Is(err, mechanism.ErrGone) || errors.Is(err, mechanism.ErrReplaced) || errors.Is(err, mechanism.ErrDebugged)
}

// lostTouch tells that the driver, or the tracer, no longer takes this program for
// the target's debugger. EINVAL and EPERM have other reasons too; which it is shows
// when hold.regain looks.
func lostTouch(err error) bool {
	return errors.Is(err, unix.EPERM) || errors.Is(err, unix.EINVAL) || errors.Is(err, tracer.ErrDetached)
}

// left tells that the driver, or the tracer, knows the target no longer.
func left(err error) bool {
	return errors.Is(err, unix.ESRCH) || errors.Is(err, tracer.ErrGone)
}
