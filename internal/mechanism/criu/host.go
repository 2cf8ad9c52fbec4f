package criu

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Host is what is asked of the operating system beside the driver and ptrace.
// Errors carry the errno, and are mechanism.ErrGone when the process has exited.
type Host interface {
	// Open gets hold of a process.
	Open(target gpreempt.ProcessKey) (Process, error)
	// Capabilities returns the effective ones of this program, bit n for number n.
	Capabilities() (uint64, error)
}

// Process is a process, and not another one that has its pid later.
type Process interface {
	// Tracer is the thread that traces it, 0 for none.
	Tracer() (int32, error)
	// Descriptors are the numbers of those of /dev/kfd.
	Descriptors() ([]int, error)
	// Take returns this program a descriptor of the open file that has the number there;
	// EBADF when none has that is one of /dev/kfd. It is closed with kfd.Sys.
	Take(number int) (int, error)
	Close() error
}

// machine is this operating system, with the driver's device file by that name.
type machine struct{ device string }

func (machine) Capabilities() (uint64, error) {
	s, err := readStatus("/proc/self/status")
	return s.Capabilities, err
}

func readStatus(path string) (discovery.ProcStatus, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return discovery.ProcStatus{}, err
	}
	s, err := discovery.ParseProcStatus(text)
	if err != nil {
		return discovery.ProcStatus{}, fmt.Errorf("%s: %w", path, err)
	}
	return s, nil
}

func (m machine) Open(target gpreempt.ProcessKey) (Process, error) {
	fd, err := unix.PidfdOpen(int(target.PID), 0)
	if errors.Is(err, unix.ESRCH) {
		return nil, mechanism.ErrGone
	} else if err != nil {
		return nil, fmt.Errorf("process %v: %w", target, os.NewSyscallError("pidfd_open", err))
	}
	p := &process{device: m.device, dir: filepath.Join("/proc", strconv.Itoa(int(target.PID))), fd: fd}
	// The descriptor may be that of another process with the pid. If it is not now, it
	// never will be.
	err = p.is(target)
	if err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

// process is a process of this machine. What is read in dir is of another one once
// this one has exited and its pid is used again; then Take fails.
type process struct {
	device, dir string
	fd          int
}

func (p *process) is(target gpreempt.ProcessKey) error {
	text, err := os.ReadFile(filepath.Join(p.dir, "stat"))
	if err != nil {
		return goneOr(err)
	}
	stat, err := discovery.ParseProcStat(text)
	switch {
	case err != nil:
		return fmt.Errorf("%s/stat: %w", p.dir, err)
	case stat.Start != target.Start, !stat.Alive():
		return mechanism.ErrGone
	case stat.Flags&discovery.FlagExiting != 0 && stat.Threads <= 1:
		return mechanism.ErrGone // its queues go with it, or have gone
	}
	return nil
}

// goneOr returns mechanism.ErrGone for the errors that say that there is no such process.
func goneOr(err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return mechanism.ErrGone
	}
	return err
}

func (p *process) Tracer() (int32, error) {
	s, err := readStatus(filepath.Join(p.dir, "status"))
	if err != nil {
		return 0, goneOr(err)
	}
	return s.Tracer, nil
}

// Descriptors finds the driver by its device number: a name can be that of anything,
// and a container may have given the driver another one.
func (p *process) Descriptors() ([]int, error) {
	entries, err := os.ReadDir(filepath.Join(p.dir, "fd"))
	if err != nil {
		return nil, goneOr(err)
	}
	driver, err := p.driver()
	if err != nil {
		return nil, err
	}
	var numbers []int
	for _, e := range entries {
		path := filepath.Join(p.dir, "fd", e.Name())
		link, err := os.Readlink(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue // closed meanwhile
		} else if err != nil {
			return nil, goneOr(err)
		}
		// Looking at files elsewhere may mean to wait for a server.
		if !strings.HasPrefix(link, "/dev/") {
			continue
		}
		is, err := isDevice(unix.AT_FDCWD, path, driver)
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // closed meanwhile
			return nil, goneOr(err)
		}
		if !is {
			continue
		}
		n, err := strconv.Atoi(e.Name())
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		numbers = append(numbers, n)
	}
	return numbers, nil
}

// driver returns the device number of the driver as this program sees it.
func (p *process) driver() (uint64, error) {
	var s unix.Stat_t
	if err := unix.Stat(p.device, &s); err != nil {
		return 0, &fs.PathError{Op: "stat", Path: p.device, Err: err}
	}
	if s.Mode&unix.S_IFMT != unix.S_IFCHR {
		return 0, fmt.Errorf("%s is not the driver: it is no character device", p.device)
	}
	return s.Rdev, nil
}

// isDevice reports whether a file, or dir itself for the path "", is the character
// device of that number. It is fstat but for waiting for the server of a filesystem.
func isDevice(dir int, path string, number uint64) (bool, error) {
	var s unix.Statx_t
	if err := unix.Statx(dir, path, unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_TYPE, &s); err != nil {
		return false, os.NewSyscallError("statx", err)
	}
	return s.Mode&unix.S_IFMT == unix.S_IFCHR && unix.Mkdev(s.Rdev_major, s.Rdev_minor) == number, nil
}

// Take looks at what it took: the number may be that of another file by now, and a
// call of the driver means something else to another driver.
func (p *process) Take(number int) (int, error) {
	fd, err := unix.PidfdGetfd(p.fd, number, 0)
	if errors.Is(err, unix.ESRCH) {
		return -1, mechanism.ErrGone
	} else if err != nil {
		return -1, os.NewSyscallError("pidfd_getfd", err)
	}
	driver, err := p.driver()
	is := false
	if err == nil {
		is, err = isDevice(fd, "", driver)
	}
	if err == nil && !is {
		err = fmt.Errorf("descriptor %d of the process is not %s: %w", number, p.device, unix.EBADF)
	}
	if err != nil {
		return -1, errors.Join(err, os.NewSyscallError("close", unix.Close(fd)))
	}
	return fd, nil
}

func (p *process) Close() error { return os.NewSyscallError("close", unix.Close(p.fd)) }
