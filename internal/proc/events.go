package proc

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// ptrace makes a request that takes no pointer; x/sys lacks some of them.
func ptrace(request uintptr, pid int32, signal unix.Signal) error {
	if _, _, errno := unix.Syscall6(unix.SYS_PTRACE, request, uintptr(pid), 0, uintptr(signal), 0, 0); errno != 0 {
		return errno
	}
	return nil
}

// seize makes the calling thread the tracer of the process.
func (t *Tracer) seize() error {
	err := ptrace(unix.PTRACE_SEIZE, t.target.PID, 0)
	switch {
	case err == nil:
		// A traced process keeps its pid until the tracer has waited for it. So the
		// check comes after the seizure.
		return Check("/", t.target)
	case errors.Is(err, unix.ESRCH):
		return fmt.Errorf("process %d: %w", t.target.PID, ErrGone)
	case errors.Is(err, unix.EPERM):
		return t.denied()
	default:
		return fmt.Errorf("process %d: %w", t.target.PID, os.NewSyscallError("ptrace(PTRACE_SEIZE)", err))
	}
}

// forward ends a stop of the target, if there is one, with its effect on the target
// unchanged, and reports whether the target is still traced. The next stop leads to
// another SIGCHLD.
func (t *Tracer) forward() bool {
	switch e := poll(t.target.PID); e.what {
	case stopped:
		request := uintptr(unix.PTRACE_CONT)
		if e.groupStop() {
			// It stays stopped, and SIGCONT continues it as without a tracer.
			request = unix.PTRACE_LISTEN
		}
		// An error means that it was killed in the stop: its exit follows.
		_ = ptrace(request, t.target.PID, e.inject())
	case exited:
		t.gone.Store(true)
		return false
	case lost:
		// Its parent has waited for it, if that is this process; or another thread has
		// called execve, which takes over the pid and the start time but not the tracer.
		t.gone.Store(errors.Is(Check("/", t.target), ErrGone))
		return false
	case nothing:
	}
	return true
}
