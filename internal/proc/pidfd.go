package proc

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Pidfd returns a new pidfd of the process, which the caller closes.
func (p *Process) Pidfd() (int, error) {
	fd, err := unix.PidfdOpen(int(p.key.PID), 0)
	if errors.Is(err, unix.ESRCH) {
		return -1, wrap(p.key.PID, ErrGone)
	} else if err != nil {
		return -1, fmt.Errorf("process %d: %w", p.key.PID, os.NewSyscallError("pidfd_open", err))
	}
	if err := p.Check(); err != nil { // it may be that of another process with the pid
		_ = unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// Exited reports whether all threads of the process of a pidfd have ended. That makes
// the pidfd readable, before and after the parent has waited for the process
// (pidfd_poll).
func Exited(pidfd int) bool {
	fds := []unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(fds, 0)
		if !errors.Is(err, unix.EINTR) {
			return n > 0
		}
	}
}
