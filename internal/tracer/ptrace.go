package tracer

import "golang.org/x/sys/unix"

// ptrace makes one of the requests that take no pointer. x/sys has functions for
// some of them, and for PTRACE_DETACH one without a signal.
func ptrace(request uintptr, pid int32, signal unix.Signal) error {
	if _, _, errno := unix.Syscall6(unix.SYS_PTRACE, request, uintptr(pid), 0, uintptr(signal), 0, 0); errno != 0 {
		return errno
	}
	return nil
}
