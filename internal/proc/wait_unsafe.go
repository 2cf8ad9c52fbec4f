package proc

import (
	"errors"
	"structs"
	"unsafe"

	"golang.org/x/sys/unix"
)

// outcome is the kind of an event.
type outcome uint8

const (
	nothing outcome = iota
	stopped         // the target waits for a ptrace request
	exited          // the target waits to be reaped
	lost            // the target is neither traced by this process nor its child
)

// event is what waitid reports of a target.
type event struct {
	what outcome
	// code is, for a stop, the signal with the ptrace event above it.
	code int32
}

// groupStop reports whether a stop signal stopped the target with all its threads, as
// it would without a tracer.
func (e event) groupStop() bool {
	if e.code>>8 != unix.PTRACE_EVENT_STOP {
		return false
	}
	switch e.signal() {
	case unix.SIGSTOP, unix.SIGTSTP, unix.SIGTTIN, unix.SIGTTOU:
		return true
	default: // SIGTRAP: the answer to PTRACE_INTERRUPT, or the end of a group stop
		return false
	}
}

// inject returns the signal the target stopped to receive, 0 for other stops.
func (e event) inject() unix.Signal {
	if e.code>>8 != 0 {
		return 0
	}
	return e.signal()
}

func (e event) signal() unix.Signal { return unix.Signal(e.code & 0x7f) }

// The values of si_code in a siginfo for SIGCHLD (include/uapi/asm-generic/siginfo.h)
// of a process that has ended.
const (
	cldExited = 1
	cldKilled = 2
	cldDumped = 3
)

// childInfo is siginfo_t as waitid fills it on 64-bit Linux; that of x/sys is opaque.
type childInfo struct {
	_      structs.HostLayout
	signo  int32
	errno  int32
	code   int32
	_      int32
	pid    int32
	uid    uint32
	status int32
	_      [100]byte
}

// Fails to compile when the two differ in size.
var _ = [1]struct{}{}[unsafe.Sizeof(childInfo{})-unsafe.Sizeof(unix.Siginfo{})]

// poll returns the pending event of a target, without waiting. Any thread of the
// tracer's process may poll, and the event stays (WNOWAIT): a ptrace request ends a
// stop, the exit status is for the parent, and a signal that wait4 had consumed would
// not reach the target when its tracer ends (wait_task_stopped clears exit_code).
func poll(pid int32) event {
	const what = unix.WSTOPPED | unix.WEXITED | unix.WNOWAIT | unix.WNOHANG | unix.WALL
	for {
		var info childInfo // stays zero without an event
		// Legal: both types are siginfo_t and have its size, and the pointer outlives
		// the call.
		err := unix.Waitid(unix.P_PID, int(pid), (*unix.Siginfo)(unsafe.Pointer(&info)), what, nil)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil: // ECHILD; the arguments are right
			return event{what: lost}
		case info.signo == 0:
			return event{}
		}
		switch info.code {
		case cldExited, cldKilled, cldDumped:
			return event{what: exited}
		default:
			return event{what: stopped, code: info.status}
		}
	}
}
