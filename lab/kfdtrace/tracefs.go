package kfdtrace

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// FS is a tracefs: the control files of the kernel's tracing. Names are relative
// to its root, with slashes. One goroutine at a time uses it.
type FS interface {
	ReadFile(name string) ([]byte, error)
	// Write writes data to an existing control file, without truncating it first: for
	// several of them that would remove what others set up.
	Write(name, data string) error
	List(dir string) ([]string, error)
	// Mkdir and Remove make and remove an instance.
	Mkdir(dir string) error
	Remove(dir string) error
	// Lock locks the directory until the lock is closed or the process ends. It never
	// waits: it returns ErrLocked when another process holds the lock.
	Lock(dir string) (io.Closer, error)
	OpenPipe(name string) (Pipe, error)
}

// Pipe is a stream of text that is read while it grows.
type Pipe interface {
	io.Closer
	// ReadSome reads what is available and never waits: without any it returns 0 and
	// no error.
	ReadSome(p []byte) (int, error)
}

// ErrLocked is returned when another process holds a lock.
var ErrLocked = errors.New("another process holds the lock")

// Dir is a tracefs mounted at a directory.
type Dir string

var _ FS = Dir("")

func (d Dir) path(name string) string { return filepath.Join(string(d), filepath.FromSlash(name)) }

// ReadFile reads a control file.
func (d Dir) ReadFile(name string) ([]byte, error) { return os.ReadFile(d.path(name)) }

// Write writes to a control file.
func (d Dir) Write(name, data string) (err error) {
	f, err := os.OpenFile(d.path(name), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }() // some files act, and fail, on close
	_, err = f.WriteString(data)
	return err
}

// List returns the names in a directory.
func (d Dir) List(dir string) ([]string, error) {
	entries, err := os.ReadDir(d.path(dir))
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = e.Name()
	}
	return names, err
}

// Mkdir makes an instance.
func (d Dir) Mkdir(dir string) error { return os.Mkdir(d.path(dir), 0o750) }

// Remove removes an instance. The kernel frees what it contains.
func (d Dir) Remove(dir string) error {
	if err := syscall.Rmdir(d.path(dir)); err != nil {
		return &fs.PathError{Op: "rmdir", Path: d.path(dir), Err: err}
	}
	return nil
}

// Lock locks the directory. The kernel releases the lock however the process ends, and
// it works between pid namespaces.
func (d Dir) Lock(dir string) (io.Closer, error) {
	f, err := os.Open(d.path(dir))
	if err != nil {
		return nil, err
	}
	switch err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); {
	case errors.Is(err, syscall.EWOULDBLOCK):
		return nil, errors.Join(fmt.Errorf("%s: %w", d.path(dir), ErrLocked), f.Close())
	case err != nil:
		return nil, errors.Join(&fs.PathError{Op: "flock", Path: d.path(dir), Err: err}, f.Close())
	}
	return f, nil
}

// OpenPipe opens a pipe to read from.
func (d Dir) OpenPipe(name string) (Pipe, error) {
	fd, err := syscall.Open(d.path(name), syscall.O_RDONLY|syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: d.path(name), Err: err}
	}
	return &pipe{d.path(name), fd}, nil
}

// pipe is not an os.File, which would wait in the runtime's poller for wake-ups that
// the kernel sends only when the buffer is as full as buffer_percent.
type pipe struct {
	path string
	fd   int
}

func (p *pipe) ReadSome(b []byte) (int, error) {
	for {
		n, err := syscall.Read(p.fd, b)
		switch {
		case errors.Is(err, syscall.EINTR):
		case errors.Is(err, syscall.EAGAIN):
			return 0, nil
		case err != nil:
			return 0, &fs.PathError{Op: "read", Path: p.path, Err: err}
		default:
			return n, nil // 0 too: trace_pipe ends while tracing is off
		}
	}
}

func (p *pipe) Close() error { return syscall.Close(p.fd) }

// Find returns the tracefs of this host: mounted by itself, or by debugfs on access.
func Find() (Dir, error) {
	for _, dir := range []string{"/sys/kernel/tracing", "/sys/kernel/debug/tracing"} {
		if _, err := os.Stat(dir + "/instances"); err == nil {
			return Dir(dir), nil
		}
	}
	return "", &Error{
		What: "tracefs, the kernel's tracing, is not mounted",
		Next: "mount -t tracefs tracefs /sys/kernel/tracing; in a container, run gplab on the host",
		Err:  fs.ErrNotExist,
	}
}
