// Package seccomp hides how the system calls of a running, unmodified program
// are answered by another program: a filter that hands some calls over
// (seccomp user notification, seccomp_unotify(2)), the listener that receives
// and answers them, and the hand-over of that listener from the program's side
// to the supervisor's.
//
// It is the transport of an emulated device and knows none: which ioctls are
// handed over is an argument of Filter, what they mean is up to the handler. A
// supervisor for a device whose ioctls have the type 'X' is
//
//	filter, err := seccomp.Filter(runtime.GOARCH, 'X')
//	...
//	seccomp.OwnThread(func() {
//		l, err := seccomp.Thread(filter, handle, blocks)
//		...
//	})
//
// in one process, for tests, or Serve in the supervisor and Enter in a small
// program that then executes the program to be emulated for.
//
// What a caller may rely on:
//
//   - A call that was received is answered once, and no signal repeats it or
//     takes it back: filters are installed with WAIT_KILLABLE_RECV or not at all.
//     Kernels without "seccomp: Fix a race with WAIT_KILLABLE_RECV if the tracer
//     replies too fast" (in Linux 6.18, and in stable releases since October
//     2025) break that rarely: a signal that arrives together with the answer
//     repeats the call. Package and program cannot tell that it happened.
//   - A signal handler without SA_RESTART can make any call that is handed over
//     fail with EINTR before it is received. It has had no effect then.
//   - While a call waits for its answer, Call.Interrupted reports what
//     wait_event_interruptible would have told a driver, and the answer
//     ERESTARTSYS does what it does for a driver.
//   - When the supervisor ends, calls under way and all later ones that the
//     filter hands over fail with ENOSYS. A call cannot be received twice, so no
//     other supervisor can take over.
//
// What it cannot do: calls made through io_uring do not pass the filter, neither
// do 32-bit programs on a 64-bit kernel.
package seccomp

import (
	"errors"
	"syscall"
)

// ERESTARTSYS is what a driver returns when a signal interrupted its wait: the
// kernel then starts the call again or turns it into EINTR, as the signal's
// handler was installed with SA_RESTART or without (include/linux/errno.h). It
// must never reach a program, so Call.Return refuses it unless the call was
// interrupted.
const ERESTARTSYS = syscall.Errno(512)

// Errors to match with errors.Is.
var (
	// ErrAlready: the thread is under a filter with a listener already, and the
	// kernel allows one. It is a supervisor's of this package or, for instance,
	// that of a container runtime: whoever needs to know which tries the emulated
	// device.
	ErrAlready = errors.New("a seccomp filter with a listener is in place already, and there can be only one")
	// ErrGone: the caller was killed, or left the call. Nothing is to be answered.
	ErrGone = errors.New("the caller is gone")
	// ErrAnswered: the call has its answer.
	ErrAnswered = errors.New("the call is answered already")
	// ErrNotInterrupted: ERESTARTSYS was to be the answer to a call whose caller
	// has nothing pending. The call still waits for an answer.
	ErrNotInterrupted = errors.New("the call was not interrupted, ERESTARTSYS would reach the program")
	// ErrMainThread: a filter stays on the first thread of a Go process for good,
	// because that thread never ends.
	ErrMainThread = errors.New("this is the first thread of the process, which would never lose the filter: call from OwnThread")
)
