package kfd

import (
	"errors"

	"golang.org/x/sys/unix"
)

// Sys is the part of the operating system this package calls: the kernel, or
// something that answers like it. Implementations must be safe for concurrent
// use. Errors are unix.Errno values; the methods return EINTR and do not retry.
type Sys interface {
	// Open is open(2).
	Open(path string, flags int) (fd int, err error)
	// Ioctl is ioctl(2). arg points to the structure that req belongs to; r1 is
	// the value returned, which some requests give a meaning of its own.
	Ioctl(fd int, req Request, arg Pointer) (r1 uintptr, err error)
	// Read is read(2).
	Read(fd int, p []byte) (int, error)
	// Write is write(2).
	Write(fd int, p []byte) (int, error)
	// Close is close(2).
	Close(fd int) error
}

// Kernel returns the running kernel.
func Kernel() Sys { return kernel{} }

type kernel struct{}

func (kernel) Open(path string, flags int) (int, error) { return unix.Open(path, flags, 0) }
func (kernel) Read(fd int, p []byte) (int, error)       { return unix.Read(fd, p) }
func (kernel) Write(fd int, p []byte) (int, error)      { return unix.Write(fd, p) }
func (kernel) Close(fd int) error                       { return unix.Close(fd) }

// retry runs call again while a signal interrupts it. It is the only place that
// does, and only for calls that may be made twice without changing what happens:
//
//   - open, read and GET_VERSION;
//   - a snapshot or a query that clears nothing;
//   - SET_EXCEPTIONS_ENABLED, which replaces a mask by the same mask;
//   - SUSPEND_QUEUES and RESUME_QUEUES: what is suspended stays so and is counted
//     again, likewise what runs; call has to write clean ids each time.
//
// Not ENABLE (the second gives EALREADY) or DISABLE (EINVAL), not
// SEND_RUNTIME_EVENT (it raises a counting semaphore), not what clears exceptions
// (the second no longer reports them), and not CRIU_OP: pausing twice evicts twice
// and one unpause does not undo it.
func retry(call func() error) error {
	for {
		if err := call(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}
