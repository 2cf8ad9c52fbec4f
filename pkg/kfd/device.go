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

// Device is the driver, opened by this process. Several goroutines may use it at once.
//
// Until the process exits it is one of the driver's processes, even after Close: it is
// listed in sysfs, and the partitions of GPUs cannot be changed. When it exits, debugging
// that it enabled ends, and suspended queues are resumed. Close does neither.
type Device struct {
	handle
	version Version
	// profile and warning are those of ProfileFor.
	profile, warning string
}

// Open opens the driver of this machine.
func Open() (*Device, error) { return OpenWith(Kernel(), DevicePath) }

// OpenWith opens the driver at path through sys and gets its version (kfd_open,
// kfd_ioctl_get_version). The error wraps [ErrVersion] if ProfileFor does not support the
// version, or is an *Error:
//
//	ENOENT  no driver
//	EACCES  the file's mode forbids it
//	EPERM   the device cgroup forbids it
//	EINVAL  a GPU reset or a change of partitions is in progress; 7.2: no GPU
func OpenWith(sys Sys, path string) (*Device, error) {
	d := &Device{}
	if err := d.open(sys, path, opOpen); err != nil {
		return nil, err
	}
	if err := d.identify(); err != nil {
		return nil, closeAfter(err, d.Close())
	}
	return d, nil
}

// identify gets the driver's version and its profile.
func (d *Device) identify() error {
	var err error
	if d.version, err = d.GetVersion(); err != nil {
		return err
	}
	d.profile, d.warning, err = ProfileFor(d.version)
	return err
}

// closeAfter returns err, joined with the error of closing if that failed, too.
func closeAfter(err, closing error) error {
	if closing != nil {
		return fmt.Errorf("%w (and closing it: %w)", err, closing)
	}
	return err
}

// Version returns the driver's version.
func (d *Device) Version() Version { return d.version }

// Profile returns the line of drivers of that version; see ProfileFor.
func (d *Device) Profile() string { return d.profile }

// Warning returns a warning if the driver's minor version is not known, otherwise "".
func (d *Device) Warning() string { return d.warning }

// GetVersion returns the version of the ioctl interface (kfd_ioctl_get_version).
func (d *Device) GetVersion() (Version, error) {
	var args GetVersionArgs
	err := retry(func() error {
		_, err := d.ioctl(ReqGetVersion, PointerTo(&args))
		return err
	})
	if err != nil {
		return Version{}, fail(err, Error{Op: ReqGetVersion.String()})
	}
	return Version{Major: args.Major, Minor: args.Minor}, nil
}

// trap makes a DBG_TRAP call once and returns its result.
func (d *Device) trap(pid int32, op TrapOp, args Pointer) (uintptr, error) {
	r1, err := d.ioctl(ReqDbgTrap, args)
	return r1, fail(err, Error{Op: trapName(op), PID: pid})
}

// trapAgain makes a DBG_TRAP call that may be repeated, see retry. prepare sets the fields
// that the driver may have overwritten.
func (d *Device) trapAgain(pid int32, op TrapOp, args Pointer, prepare func()) (r1 uintptr, err error) {
	err = retry(func() (err error) {
		prepare()
		r1, err = d.trap(pid, op, args)
		return err
	})
	return r1, err
}

// handle is an open descriptor that is closed after the last call on it: a call may block
// for seconds, and meanwhile its number must not become that of another file.
type handle struct {
	sys Sys
	fd  int
	// calls is the number of ioctls that returned, and took their time in nanoseconds.
	calls, took atomic.Int64

	// mu guards what follows. It is not held across a call.
	mu     sync.Mutex
	users  int
	closed bool
}

// open opens a device; op is the operation of its errors.
func (h *handle) open(sys Sys, path, op string) error {
	h.sys = sys
	return fail(retry(func() (err error) {
		h.fd, err = sys.Open(path, unix.O_RDWR|unix.O_CLOEXEC)
		return err
	}), Error{Op: op})
}

// Calls returns the number of ioctls that have returned, with or without an error, and
// their total time.
func (h *handle) Calls() (n int64, took time.Duration) {
	return h.calls.Load(), time.Duration(h.took.Load())
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

// release ends a use. An error of closing is ignored: no data can be lost.
func (h *handle) release() {
	h.mu.Lock()
	h.users--
	last := h.closed && h.users == 0
	h.mu.Unlock()
	if last {
		_ = h.sys.Close(h.fd)
	}
}

// Close closes the descriptor after the calls in progress have returned; it does not wait
// for them. Later calls fail with os.ErrClosed. Close is idempotent.
func (h *handle) Close() error {
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
