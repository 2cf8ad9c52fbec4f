package criu

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

// Host is the operating system apart from the driver and ptrace. Errors carry the
// errno, and are mechanism.ErrGone when the process has exited.
type Host interface {
	// Open returns a handle to a process.
	Open(target gpreempt.ProcessKey) (Process, error)
	// Capabilities returns the effective capabilities of this program, bit n for
	// number n.
	Capabilities() (uint64, error)
}

// Process is a handle to a process that another process with its pid cannot take over.
type Process interface {
	// Tracer returns who traces it and the remedy, "" for nobody.
	Tracer() (found, remedy string, err error)
	// Descriptors returns the numbers of its descriptors of /dev/kfd.
	Descriptors() ([]int, error)
	// Take returns a descriptor of this program for the open file that has the number
	// there; EBADF when that is not /dev/kfd. The caller closes it with kfd.Sys.
	Take(number int) (int, error)
	Close()
}

// machine is this operating system, with the name of the driver's device file.
type machine struct{ device string }

func (machine) Capabilities() (uint64, error) {
	s, err := proc.Status("/", "self")
	return s.Capabilities, err
}

func (m machine) Open(target gpreempt.ProcessKey) (Process, error) {
	p, err := proc.OpenWithPidfd("/", target)
	if err != nil {
		return nil, err
	}
	// The queues of a process that is exiting go with it.
	if _, err := p.LiveThread(); err != nil {
		p.Close()
		return nil, err
	}
	return process{p, m.device}, nil
}

// process is a process of this machine.
type process struct {
	*proc.Process
	device string
}

func (p process) Tracer() (found, remedy string, err error) {
	s, err := p.Status()
	if tracer, traced := proc.TracerOf("/", s); traced {
		found, remedy = proc.Traced(tracer)
	}
	return found, remedy, err
}

// Descriptors finds the driver by its device number: a file of any kind can have the
// name, and a container may have given the driver another name.
func (p process) Descriptors() ([]int, error) {
	dir, err := p.Dir("fd")
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil, p.gone(err)
	}
	driver, err := p.driver()
	if err != nil {
		return nil, err
	}
	var numbers []int
	link := make([]byte, len("/dev/"))
	for _, name := range names {
		n, err := unix.Readlinkat(int(dir.Fd()), name, link)
		if errors.Is(err, fs.ErrNotExist) {
			continue // closed meanwhile
		} else if err != nil {
			return nil, p.gone(os.NewSyscallError("readlinkat", err))
		}
		// statx of a file elsewhere may wait for a server.
		if !strings.HasPrefix(string(link[:n]), "/dev/") {
			continue
		}
		is, err := isDevice(int(dir.Fd()), name, driver)
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // closed meanwhile
			return nil, p.gone(err)
		}
		if !is {
			continue
		}
		number, err := strconv.Atoi(name)
		if err != nil {
			return nil, fmt.Errorf("%s/%s: %w", dir.Name(), name, err)
		}
		numbers = append(numbers, number)
	}
	return numbers, nil
}

// gone returns mechanism.ErrGone in place of err if the process has exited.
func (p process) gone(err error) error {
	if gone := p.Check(); gone != nil {
		return gone
	}
	return err
}

// driver returns the device number of the driver in this program's /dev.
func (p process) driver() (uint64, error) {
	var s unix.Stat_t
	if err := unix.Stat(p.device, &s); err != nil {
		return 0, &fs.PathError{Op: "stat", Path: p.device, Err: err}
	}
	if s.Mode&unix.S_IFMT != unix.S_IFCHR {
		return 0, fmt.Errorf("%s is not a character device, so not the driver", p.device)
	}
	return s.Rdev, nil
}

// isDevice reports whether a file, or dir itself for the path "", is the character
// device with that number. It does not wait for the server of a filesystem, as fstat
// may.
func isDevice(dir int, path string, number uint64) (bool, error) {
	var s unix.Statx_t
	if err := unix.Statx(dir, path, unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_TYPE, &s); err != nil {
		return false, os.NewSyscallError("statx", err)
	}
	return s.Mode&unix.S_IFMT == unix.S_IFCHR && unix.Mkdev(s.Rdev_major, s.Rdev_minor) == number, nil
}

// Take checks what it took: the number may be that of another file by now, and the
// request numbers of the driver mean something else to another driver.
func (p process) Take(number int) (int, error) {
	fd, err := p.CopyFD(number)
	if err != nil {
		return -1, err
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
