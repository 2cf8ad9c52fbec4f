package kfd

import (
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const (
	opOpen = "open " + DevicePath
	opSMI  = "SMI_EVENTS"
)

// Device is the driver, opened by this process. It may be used by several
// goroutines at once.
//
// While the process lives it is one of the driver's processes, even after Close:
// it is listed in sysfs, and it keeps GPUs from being partitioned anew. Debugging
// that it enabled ends, and suspended queues run again, when the process dies;
// Close does not end it.
type Device struct {
	handle  handle
	version Version
	profile Profile
	warning *UnknownMinor
}

// Open opens the driver of this machine.
func Open() (*Device, error) { return OpenWith(Kernel(), DevicePath) }

// OpenWith opens the driver at path through sys and asks for its version
// (kfd_open, kfd_ioctl_get_version). The error wraps [ErrVersion] when the
// interface is of a version ProfileFor does not know, or is an *Error:
//
//	ENOENT  no driver
//	EACCES  the file's mode forbids it
//	EPERM   the device cgroup forbids it
//	EINVAL  a GPU reset or a change of partitions is going on; 7.2: no GPU
func OpenWith(sys Sys, path string) (*Device, error) {
	var fd int
	err := retry(func() (err error) {
		fd, err = sys.Open(path, unix.O_RDWR|unix.O_CLOEXEC)
		return err
	})
	if err != nil {
		return nil, fail(err, Error{Op: opOpen, Queue: NoQueue})
	}
	d := &Device{handle: handle{sys: sys, fd: fd}}
	if err := d.identify(); err != nil {
		return nil, closeAfter(err, d.Close())
	}
	return d, nil
}

// identify finds the driver's version and how to speak to it.
func (d *Device) identify() error {
	var err error
	if d.version, err = d.GetVersion(); err != nil {
		return err
	}
	d.profile, d.warning, err = ProfileFor(d.version)
	return err
}

// closeAfter returns err, with what closing said if that failed too.
func closeAfter(err, closing error) error {
	if closing != nil {
		return fmt.Errorf("%w (and closing it: %w)", err, closing)
	}
	return err
}

// Close closes the descriptor, once the calls that are under way have returned;
// it does not wait for them. Calls after it fail with os.ErrClosed. It is
// idempotent.
func (d *Device) Close() error { return d.handle.close() }

// Version returns what the driver answered when it was opened.
func (d *Device) Version() Version { return d.version }

// Profile returns what is known of drivers of that version.
func (d *Device) Profile() Profile { return d.profile }

// Warning is not nil when the driver's minor version is not a known one.
func (d *Device) Warning() *UnknownMinor { return d.warning }

// Calls returns how many ioctls have returned, whatever they returned, and how long they
// took together.
func (d *Device) Calls() (n int64, took time.Duration) {
	return d.handle.calls.Load(), time.Duration(d.handle.took.Load())
}

// GetVersion asks for the version of the ioctl interface (kfd_ioctl_get_version).
func (d *Device) GetVersion() (Version, error) {
	var args GetVersionArgs
	err := retry(func() error {
		_, err := d.handle.ioctl(ReqGetVersion, PointerTo(&args))
		return err
	})
	if err != nil {
		return Version{}, fail(err, Error{Op: ReqGetVersion.String(), Queue: NoQueue})
	}
	return Version{Major: args.Major, Minor: args.Minor}, nil
}

// trap makes a DBG_TRAP call once and returns the value it returned.
func (d *Device) trap(pid int32, op TrapOp, args Pointer) (uintptr, error) {
	r1, err := d.handle.ioctl(ReqDbgTrap, args)
	return r1, fail(err, Error{Op: trapName(op), PID: pid, Queue: NoQueue})
}

// trapAgain makes a DBG_TRAP call that may be made twice, see retry. prepare sets
// what the driver may have overwritten.
func (d *Device) trapAgain(pid int32, op TrapOp, args Pointer, prepare func()) (r1 uintptr, err error) {
	err = retry(func() (err error) {
		prepare()
		r1, err = d.trap(pid, op, args)
		return err
	})
	return r1, err
}

// handle is an open descriptor that is closed when the last call on it is over:
// a call may block for seconds, and its number must not become another file's
// meanwhile.
type handle struct {
	sys Sys
	fd  int
	// calls is how many ioctls returned, and took how long they lasted in nanoseconds.
	calls, took atomic.Int64

	// mu guards what follows. It is not held across a call.
	mu     sync.Mutex
	users  int
	closed bool
}

func (h *handle) acquire() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return os.ErrClosed
	}
	h.users++
	return nil
}

// release ends a use. Closing a character device loses nothing, and nobody is
// left to tell.
func (h *handle) release() {
	h.mu.Lock()
	h.users--
	last := h.closed && h.users == 0
	h.mu.Unlock()
	if last {
		_ = h.sys.Close(h.fd)
	}
}

func (h *handle) close() error {
	h.mu.Lock()
	now := !h.closed && h.users == 0
	h.closed = true
	h.mu.Unlock()
	if !now {
		return nil
	}
	return h.sys.Close(h.fd)
}

func (h *handle) ioctl(req Request, arg Pointer) (uintptr, error) {
	if err := h.acquire(); err != nil {
		return 0, err
	}
	defer h.release()
	begin := time.Now()
	r1, err := h.sys.Ioctl(h.fd, req, arg)
	h.calls.Add(1)
	h.took.Add(int64(time.Since(begin)))
	return r1, err
}

func (h *handle) read(p []byte) (n int, err error) {
	if err := h.acquire(); err != nil {
		return 0, err
	}
	defer h.release()
	err = retry(func() (err error) {
		n, err = h.sys.Read(h.fd, p)
		return err
	})
	return n, err
}

func (h *handle) write(p []byte) (int, error) {
	if err := h.acquire(); err != nil {
		return 0, err
	}
	defer h.release()
	return h.sys.Write(h.fd, p)
}
