package nvrm

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/proc"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// ControlPath is the device of RM's control calls.
const ControlPath = "/dev/nvidiactl"

// File is a copy of an open file of ControlPath. Its methods may be called by several goroutines at
// once, Close once.
type File interface {
	// Control makes a control call, which reads and writes params. Errors: a Status, or that of
	// the system call.
	Control(client, object Handle, cmd Command, params []byte) error
	Close() error
}

// Process is a handle to a process, which a reused pid does not confuse. It keeps nothing of the
// process alive. Its methods may be called by several goroutines at once, Close once, by the caller.
type Process interface {
	// Files returns the numbers of its descriptors of ControlPath.
	Files() ([]int, error)
	// Copy returns a copy of one of them.
	Copy(number int) (File, error)
	Exited() bool
	Close()
}

// Sys is RM on this host, or a fake.
type Sys interface {
	// Open returns a handle to a process; proc.ErrGone when it has exited.
	Open(gpreempt.ProcessKey) (Process, error)
	// NewestClient returns the handle of a client that was just created, and freed again.
	// RM counts handles upwards (serverAllocClient).
	NewestClient() (Handle, error)
	// Confidential returns the state of confidential computing on the host.
	Confidential() (Confidential, error)
}

// Kernel returns the Sys of this host.
func Kernel() Sys { return kernel{} }

type kernel struct{}

func (kernel) Open(key gpreempt.ProcessKey) (Process, error) {
	p, err := proc.Open("/", key)
	if err != nil {
		return nil, err
	}
	defer p.Close()
	fd, err := p.Pidfd()
	return process{key.PID, fd}, err
}

func (kernel) NewestClient() (Handle, error) {
	fd, err := unix.Open(ControlPath, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, &fs.PathError{Op: "open", Path: ControlPath, Err: err}
	}
	defer unix.Close(fd) // which frees the client, too
	h, err := alloc(fd, 0, ClassRoot)
	if err != nil {
		return 0, fmt.Errorf("create an RM client: %w", err)
	}
	return h, nil
}

type process struct {
	pid   int32
	pidfd int
}

func (p process) Exited() bool          { return proc.Exited(p.pidfd) }
func (p process) Close()                { _ = unix.Close(p.pidfd) } // nothing is lost
func (p process) Files() ([]int, error) { return controlFiles(p.pid) }

// controlFiles returns the descriptors of a process that are of ControlPath, by their names: so
// none of another device is opened.
func controlFiles(pid int32) ([]int, error) {
	dir := "/proc/" + strconv.Itoa(int(pid)) + "/fd"
	names, err := readNames(dir)
	if err != nil {
		return nil, err
	}
	var all []int
	for _, name := range names {
		target, err := os.Readlink(dir + "/" + name)
		if err != nil || !strings.HasSuffix(target, "/nvidiactl") {
			continue
		}
		if n, err := strconv.Atoi(name); err == nil {
			all = append(all, n)
		}
	}
	return all, nil
}

func readNames(dir string) ([]string, error) {
	d, err := os.Open(dir)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil, proc.ErrGone
		}
		return nil, err
	}
	defer d.Close()
	return d.Readdirnames(-1)
}

func (p process) Copy(number int) (File, error) {
	fd, err := unix.PidfdGetfd(p.pidfd, number, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil, proc.ErrGone
	}
	if err != nil {
		return nil, fmt.Errorf("copy descriptor %d of process %d: %w", number, p.pid, err)
	}
	if err := isControl(fd); err != nil { // the number was reused
		_ = unix.Close(fd)
		return nil, err
	}
	return file(fd), nil
}

// isControl checks that a descriptor is of the control device: character device 195:255.
func isControl(fd int) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return os.NewSyscallError("fstat", err)
	}
	const major, minor = 195, 255
	if st.Mode&unix.S_IFMT != unix.S_IFCHR || unix.Major(st.Rdev) != major || unix.Minor(st.Rdev) != minor {
		return unix.EBADF
	}
	return nil
}

type file int

func (f file) Close() error { return unix.Close(int(f)) }
func (f file) Control(client, object Handle, cmd Command, params []byte) error {
	return control(int(f), client, object, cmd, params)
}
