package tracer

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// ptrace makes one of the requests that take no pointer; x/sys has not all of them.
func ptrace(request uintptr, pid int32, signal unix.Signal) error {
	if _, _, errno := unix.Syscall6(unix.SYS_PTRACE, request, uintptr(pid), 0, uintptr(signal), 0, 0); errno != 0 {
		return errno
	}
	return nil
}

// seize makes the calling thread the tracer of the process.
func (t *Thread) seize() error {
	err := ptrace(unix.PTRACE_SEIZE, t.pid, 0)
	switch {
	case err == nil:
		// From here on the pid is that of one process: what is traced keeps it until
		// the tracer has waited for it. A look before the seizure would be too early.
		return t.verify()
	case errors.Is(err, unix.ESRCH):
		return fmt.Errorf("process %d: %w", t.pid, ErrGone)
	case errors.Is(err, unix.EPERM):
		return t.denied()
	default:
		return fmt.Errorf("process %d: %w", t.pid, os.NewSyscallError("ptrace(PTRACE_SEIZE)", err))
	}
}

// verify returns ErrGone when the process meant has ended or the pid is another's.
func (t *Thread) verify() error {
	stat, err := readStat(t.pid)
	switch {
	case isGone(err), err == nil && (stat.Start != t.start || !stat.Alive()):
		return fmt.Errorf("process %d: %w", t.pid, ErrGone)
	case err != nil:
		return fmt.Errorf("process %d: reading its start time: %w", t.pid, err)
	}
	return nil
}

// handOn sends a stop of the target, if there is one, on its way, and reports whether
// the target is still traced. The next stop gives a SIGCHLD of its own.
func (t *Thread) handOn() bool {
	switch e := waitFor(t.pid); e.what {
	case stopped:
		request := uintptr(unix.PTRACE_CONT)
		if e.groupStop() {
			// It stays stopped, and wakes up by SIGCONT as it would alone.
			request = unix.PTRACE_LISTEN
		}
		// An error says that it was killed in the stop: its end is the next thing.
		_ = ptrace(request, t.pid, e.inject())
	case exited:
		t.gone.Store(true)
		return false
	case lost:
		// Waited for by its parent, when that is us, or replaced by the thread that
		// called execve, which has the pid and the start time but not the tracer.
		t.gone.Store(errors.Is(t.verify(), ErrGone))
		return false
	case nothing:
	}
	return true
}
