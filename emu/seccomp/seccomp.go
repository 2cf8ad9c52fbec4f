// Package seccomp answers the system calls of unmodified programs in another program, the
// supervisor. It implements a filter that selects calls for the supervisor (seccomp user
// notification, seccomp_unotify(2)), the listener that receives and answers them, and the
// transfer of that listener from the program to the supervisor.
//
// The package does not depend on a device: the types of ioctls are an argument of Filter,
// and their meaning is up to the handler. A supervisor for a device whose ioctls have the
// type 'X' is
//
//	filter := seccomp.Filter('X')
//	seccomp.OwnThread(func() {
//		fd, err := seccomp.Install(filter)
//		l := seccomp.NewListener(fd, handle)
//		...
//	})
//
// in one process, for tests, or Serve in the supervisor and Enter in a small program that
// then executes the supervised program. In one process, calls that block must be made with
// entersyscall (os, syscall.Syscall; not syscall.RawSyscall), or the process deadlocks.
//
// Guarantees:
//
//   - A received call is answered once, and no signal repeats or cancels it: filters are
//     installed with WAIT_KILLABLE_RECV or not at all. Kernels without "seccomp: Fix a
//     race with WAIT_KILLABLE_RECV if the tracer replies too fast" (in Linux 6.18, and in
//     stable releases since October 2025) violate that rarely: a signal that arrives
//     together with the answer repeats the call. Neither this package nor the program can
//     detect it.
//   - A signal handler without SA_RESTART can make any selected call fail with EINTR
//     before it is received. The call has had no effect then.
//   - While a call waits for its answer, Call.Interrupted reports what
//     wait_event_interruptible would have returned to a driver, and the answer
//     ERESTARTSYS has the same effect as for a driver.
//   - When the supervisor ends, calls in progress and all later selected calls fail with
//     ENOSYS. A call cannot be received twice, so another supervisor cannot take over.
//
// Limits: the filter does not see calls made through io_uring, nor those of 32-bit
// programs on a 64-bit kernel.
package seccomp

import (
	"errors"
	"syscall"
)

// ERESTARTSYS is the result of a driver whose wait a signal interrupted: the kernel then
// restarts the call or returns EINTR, if the signal's handler was installed with
// SA_RESTART or without (include/linux/errno.h). It must never reach a program, so
// Call.Return rejects it unless the call was interrupted.
const ERESTARTSYS = syscall.Errno(512)

// Errors to match with errors.Is.
var (
	// ErrAlready: the thread already has a filter with a listener, and the kernel allows
	// only one. It belongs to a supervisor of this package or, for instance, to a
	// container runtime; a call of the emulated device shows which.
	ErrAlready = errors.New("a seccomp filter with a listener is installed already, and there can be only one")
	// ErrGone: the caller was killed, or has left the call. It needs no answer.
	ErrGone = errors.New("the caller has ended")
	// ErrAnswered: the call was answered before.
	ErrAnswered = errors.New("the call is answered already")
	// ErrNotInterrupted: the answer was ERESTARTSYS, but nothing is pending for the
	// caller. The call still waits for an answer.
	ErrNotInterrupted = errors.New("the call was not interrupted: ERESTARTSYS would reach the program")
)
