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

	"github.com/gpreempt/gpreempt/internal/preempt"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Host is what is asked of the operating system beside the driver and ptrace.
// Errors carry the errno, and are preempt.ErrGone when the process has exited.
type Host interface {
	// Open gets hold of a process.
	Open(target gpreempt.ProcessKey) (Process, error)
	// Capabilities gives the effective ones of this program, bit n for number n.
	Capabilities() (uint64, error)
}

// Process is a process, and not another one that has its pid later.
type Process interface {
	// Tracer is the thread that traces it, 0 for none.
	Tracer() (int32, error)
	// Descriptors are the numbers of those of /dev/kfd.
	Descriptors() ([]int, error)
	// Take gives this program a descriptor of the open file that has the number there;
	// EBADF when none has. It is closed with kfd.Sys.
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
		return nil, preempt.ErrGone
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
		return preempt.ErrGone
	case stat.Flags&discovery.FlagExiting != 0 && stat.Threads <= 1:
		return preempt.ErrGone // its queues go with it, or have gone
	}
	return nil
}

// goneOr gives preempt.ErrGone for the errors that say that there is no such process.
func goneOr(err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return preempt.ErrGone
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

// Descriptors finds the driver by its name, and by its device number where a
// container gave it another name.
func (p *process) Descriptors() ([]int, error) {
	var device unix.Stat_t
	known := unix.Stat(p.device, &device) == nil && device.Mode&unix.S_IFMT == unix.S_IFCHR
	entries, err := os.ReadDir(filepath.Join(p.dir, "fd"))
	if err != nil {
		return nil, goneOr(err)
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
		is := strings.TrimSuffix(link, " (deleted)") == p.device
		// Of files elsewhere a stat may wait for a server.
		if !is && known && strings.HasPrefix(link, "/dev/") {
			var s unix.Stat_t
			is = unix.Stat(path, &s) == nil && s.Mode&unix.S_IFMT == unix.S_IFCHR && s.Rdev == device.Rdev
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

func (p *process) Take(number int) (int, error) {
	fd, err := unix.PidfdGetfd(p.fd, number, 0)
	if errors.Is(err, unix.ESRCH) {
		return -1, preempt.ErrGone
	} else if err != nil {
		return -1, os.NewSyscallError("pidfd_getfd", err)
	}
	return fd, nil
}

func (p *process) Close() error { return os.NewSyscallError("close", unix.Close(p.fd)) }
