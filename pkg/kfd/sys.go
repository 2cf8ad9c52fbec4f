package kfd

import (
	"errors"

	"golang.org/x/sys/unix"
)

// Sys is the part of the operating system that this package calls: the kernel, or a
// replacement. Implementations must be safe for concurrent use. Errors are unix.Errno
// values; the methods return EINTR and do not retry.
type Sys interface {
	// Open is open(2).
	Open(path string, flags int) (fd int, err error)
	// Ioctl is ioctl(2). arg points to the structure of the request req. r1 is the
	// returned value, whose meaning depends on the request.
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

// retry repeats call while a signal interrupts it. It is the only function that does, and
// only for calls that have the same result when made twice:
//
//   - open, read and GET_VERSION;
//   - a snapshot or a query that clears nothing;
//   - SUSPEND_QUEUES and RESUME_QUEUES: queues that are suspended already, or run
//     already, are counted again; call must write clean IDs each time.
//
// It is not for ENABLE (the second returns EALREADY) and DISABLE (EINVAL),
// SEND_RUNTIME_EVENT (it increments a semaphore), calls that clear exceptions (the second
// no longer reports them), and CRIU_OP: pausing twice evicts twice, and one unpause does
// not undo it.
func retry(call func() error) error {
	for {
		if err := call(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}
