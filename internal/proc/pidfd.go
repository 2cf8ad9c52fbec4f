package proc

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// OpenWithPidfd is Open for a caller that needs Exited, Signal or CopyFD: the handle
// holds a pidfd, too.
func OpenWithPidfd(root string, key gpreempt.ProcessKey) (*Process, error) {
	p, err := Open(root, key)
	if err != nil {
		return nil, err
	}
	if p.pidfd, err = p.Pidfd(); err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

// Pidfd returns a new pidfd of the process, which the caller closes.
func (p *Process) Pidfd() (int, error) {
	fd, err := unix.PidfdOpen(int(p.key.PID), 0)
	if err != nil {
		return -1, wrap(p.key.PID, os.NewSyscallError("pidfd_open", err))
	}
	if err := p.Check(); err != nil { // it may be that of another process with the pid
		_ = unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// Exited reports whether all threads of the process have ended. It needs no new
// descriptor.
func (p *Process) Exited() bool { return Exited(p.pidfd) }

// Signal sends a signal to the process. It needs no new descriptor.
func (p *Process) Signal(number unix.Signal) error {
	if err := unix.PidfdSendSignal(p.pidfd, number, nil, 0); err != nil {
		return fmt.Errorf("send %s: %w", unix.SignalName(number), wrap(p.key.PID, os.NewSyscallError("pidfd_send_signal", err)))
	}
	return nil
}

// CopyFD returns a descriptor of this program for the open file that the process has
// with the given number: unix.EBADF when it has none. The caller closes it. It needs
// the right to trace the process.
func (p *Process) CopyFD(number int) (int, error) {
	fd, err := unix.PidfdGetfd(p.pidfd, number, 0)
	if err != nil {
		return -1, wrap(p.key.PID, os.NewSyscallError("pidfd_getfd", err))
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
