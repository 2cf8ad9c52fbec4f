package dbgtrap

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/proc"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// errClosed is returned by a session that has been closed.
var errClosed = errors.New("the session with the process has been closed")

// RuntimeError reports that the target's ROCm runtime is in a state in which the
// driver suspends no queue.
type RuntimeError struct {
	Target gpreempt.ProcessKey
	State  kfd.RuntimeState
	// Queues is how many queues the target has, where it matters.
	Queues int
	// Ended: the runtime was enabled and has been shut down.
	Ended bool
}

func (e *RuntimeError) Error() string {
	switch {
	case e.State == kfd.RuntimeBusy:
		return fmt.Sprintf("process %d: a GPU is not available for debugging: it debugs one process at a time, or the process has set a CU mask: end the other debugged process, or let another mechanism suspend this one", e.Target.PID)
	case e.State == kfd.RuntimeFailed:
		return fmt.Sprintf("process %d: a GPU failed to enter debugging: look for amdgpu errors in the kernel log", e.Target.PID)
	case e.Ended:
		return fmt.Sprintf("process %d has shut its ROCm runtime down and still has %d queues, which cannot be suspended: wait for its end", e.Target.PID, e.Queues)
	}
	return fmt.Sprintf("process %d has %d queues and did not enable its ROCm runtime for debugging before it made them, so they can never be suspended this way: "+
		"run it with a ROCm of 6.0 or later on GPUs with debug firmware, or let another mechanism suspend it", e.Target.PID, e.Queues)
}

// errRuntimeOff is returned by a call on queues when the runtime's state forbids
// it; the driver returns EPERM, as to any program that is not the debugger.
var errRuntimeOff = errors.New("the ROCm runtime of the process is not enabled")

// final reports whether a session is of no use after err.
func final(err error) bool {
	if e, ok := errors.AsType[*RuntimeError](err); ok {
		return !e.Ended
	}
	if _, ok := errors.AsType[*proc.DeniedError](err); ok {
		return true
	}
	return gpreempt.ReasonOf(err) == gpreempt.ReasonGPUWithoutVM || errors.Is(err, mechanism.ErrGone) || errors.Is(err, mechanism.ErrReplaced) || errors.Is(err, mechanism.ErrDebugged)
}

// notDebugger reports whether the driver, or the tracer, no longer accepts this program as
// the target's debugger. EINVAL and EPERM have other reasons too; debuggee.regain finds out
// which it is.
func notDebugger(err error) bool {
	return errors.Is(err, unix.EPERM) || errors.Is(err, unix.EINVAL) || errors.Is(err, proc.ErrDetached)
}

// isGone reports whether the driver, or the tracer, no longer knows the target.
func isGone(err error) bool {
	return errors.Is(err, unix.ESRCH) || errors.Is(err, proc.ErrGone)
}
