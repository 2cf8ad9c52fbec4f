package kfdtrace

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// FS is a tracefs: the control files of the kernel's tracing. Names are relative
// to its root, with slashes. One goroutine at a time uses it.
type FS interface {
	ReadFile(name string) ([]byte, error)
	// Write writes data to an existing control file, without emptying it first:
	// for several of them that means to undo what others set up.
	Write(name, data string) error
	List(dir string) ([]string, error)
	// Mkdir and Remove make and remove an instance.
	Mkdir(dir string) error
	Remove(dir string) error
	// Lock takes the directory's lock until it is closed, or the process ends:
	// whoever holds it is alive. It never waits; ErrLocked says that it is taken.
	Lock(dir string) (io.Closer, error)
	OpenPipe(name string) (Pipe, error)
}

// Pipe is a stream of text that is read while it grows.
type Pipe interface {
	io.Closer
	// ReadSome reads what is there, and never waits: with nothing there it gives 0
	// and no error.
	ReadSome(p []byte) (int, error)
}

// ErrLocked says that another process holds a lock.
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
	defer func() { err = errors.Join(err, f.Close()) }() // some act, and fail, when they are closed
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

// Remove removes an instance: the kernel releases what is in it.
func (d Dir) Remove(dir string) error {
	if err := syscall.Rmdir(d.path(dir)); err != nil {
		return &fs.PathError{Op: "rmdir", Path: d.path(dir), Err: err}
	}
	return nil
}

// Lock takes the directory's lock. The kernel frees it when the process dies,
// however it does, and tells apart processes of different pid namespaces.
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

// pipe is no os.File: that would wait in the runtime's poller, for wake-ups that
// the kernel gives only when the buffer is as full as buffer_percent says.
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

// Find returns the tracefs of this host, by the mounts of this thread.
func Find() (Dir, error) {
	mounts, err := os.ReadFile("/proc/thread-self/mounts")
	if err != nil {
		return "", err
	}
	if dir := mountedAt(string(mounts)); dir != "" {
		return Dir(dir), nil
	}
	// debugfs mounts it there when somebody looks.
	const automount = "/sys/kernel/debug/tracing"
	if _, err := os.Stat(automount + "/instances"); err == nil {
		return automount, nil
	}
	return "", &Error{
		What: "tracefs, the kernel's tracing, is not mounted here",
		Next: "mount -t tracefs tracefs /sys/kernel/tracing; in a container, run gpctl on the host",
		Err:  fs.ErrNotExist,
	}
}

// mountedAt finds the last tracefs in a list of mounts, as of proc(5).
func mountedAt(mounts string) string {
	dir := ""
	for line := range strings.Lines(mounts) {
		if f := strings.Fields(line); len(f) >= 3 && f[2] == "tracefs" {
			dir = unescape(f[1])
		}
	}
	return dir
}

// unescape undoes the \ooo of spaces and the like in a list of mounts.
func unescape(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+4 <= len(s) {
			if c, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(c))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}
