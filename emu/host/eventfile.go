package host

import (
	"errors"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
)

// eventFile is an open file of another process, by a descriptor of our own.
type eventFile struct {
	h  *Host
	fd int
	// offset is where a file that has places is written to (kernel_write is given a
	// place, always the first), -1 for pipes and sockets. regular: it never waits.
	offset  int64
	regular bool

	mu     sync.Mutex
	closed bool
	room   *watch // made when it was first full
}

// File implements driver.Task.
func (t *Task) File(fd uint32) driver.EventFile {
	own, err := t.getFile(int(int32(fd)))
	if err != nil {
		return nil
	}
	f := &eventFile{h: t.h, fd: own, offset: -1}
	flags, err := unix.FcntlInt(uintptr(own), unix.F_GETFL, 0)
	if err != nil || flags&unix.O_PATH != 0 { // fget does not give such a one
		f.Put()
		return nil
	}
	var st unix.Stat_t
	if unix.Fstat(own, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFREG {
		f.offset, f.regular = 0, true
	}
	return f
}

// getFile returns a descriptor for the open file that is fd in the thread's table. The
// thread's, and not its leader's, who may have ended; before Linux 6.9 only the leader
// can be asked.
func (t *Task) getFile(fd int) (int, error) {
	const thread = unix.O_EXCL // PIDFD_THREAD
	pidfd, err := unix.PidfdOpen(int(t.tid), thread)
	if errors.Is(err, unix.EINVAL) {
		pidfd, err = unix.PidfdOpen(int(t.leader.tid), 0)
	}
	if err != nil {
		return -1, err
	}
	defer func() { _ = unix.Close(pidfd) }()
	return unix.PidfdGetfd(pidfd, fd, 0)
}

// WriteDot implements driver.EventFile.
func (f *eventFile) WriteDot(by driver.Task) (full bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return false
	}
	flags := unix.RWF_NOWAIT
	if f.regular {
		flags = 0
	}
	_, err := unix.Pwritev2(f.fd, [][]byte{{'.'}}, f.offset, flags)
	if errors.Is(err, unix.EOPNOTSUPP) { // pipes before Linux 6.4, terminals
		err = f.writeIfReady()
	}
	switch {
	case errors.Is(err, unix.EAGAIN):
		mode, err := unix.FcntlInt(uintptr(f.fd), unix.F_GETFL, 0)
		return err == nil && mode&unix.O_NONBLOCK == 0 && f.awaitRoom()
	case errors.Is(err, unix.EPIPE):
		if t, ok := by.(*Task); ok {
			// Who writes to a pipe without a reader has itself to blame; if the
			// signal fails, the thread has just ended.
			_ = unix.Tgkill(int(t.leader.tid), int(t.tid), unix.SIGPIPE)
		}
	}
	return false
}

// writeIfReady writes unless that would wait. The only one who could fill the pipe
// in between is the one who gave it.
func (f *eventFile) writeIfReady() error {
	ready := []unix.PollFd{{Fd: int32(f.fd), Events: unix.POLLOUT}}
	n, err := unix.Poll(ready, 0)
	switch {
	case err != nil:
		return err
	case n == 0:
		return unix.EAGAIN
	}
	_, err = unix.Write(f.fd, []byte{'.'})
	return err
}

// awaitRoom has the driver woken when there is room. False is a file that cannot be
// waited for. mu is held.
func (f *eventFile) awaitRoom() bool {
	if f.room != nil {
		return f.room.again() == nil
	}
	var err error
	f.room, err = f.h.poller.add(f.fd, unix.EPOLLOUT, f.h.wake)
	return err == nil
}

// Put implements driver.EventFile.
func (f *eventFile) Put() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return
	}
	f.closed = true
	if f.room != nil {
		f.room.remove()
	}
	_ = unix.Close(f.fd) // as fput: nobody is told
}
