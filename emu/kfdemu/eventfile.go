package kfdemu

import (
	"errors"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
)

// eventFile is an open file of another process, with a descriptor in this one.
type eventFile struct {
	h  *Host
	fd int
	// offset is the offset of a write: 0 for regular files, as the driver passes to
	// kernel_write, -1 for pipes and sockets. regular: a write never waits.
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
	if err != nil || flags&unix.O_PATH != 0 { // fget does not return such files
		f.Put()
		return nil
	}
	var st unix.Stat_t
	if unix.Fstat(own, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFREG {
		f.offset, f.regular = 0, true
	}
	return f
}

// getFile returns a descriptor for the open file fd in the thread's table. It uses the
// thread's pidfd and not its leader's, which may have ended; before Linux 6.9 only that of
// the leader is available.
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
			// The writer to a pipe without a reader gets the signal. If that fails,
			// the thread has just ended.
			_ = unix.Tgkill(int(t.leader.tid), int(t.tid), unix.SIGPIPE)
		}
	}
	return false
}

// writeIfReady writes unless that would wait. Only the debugger that passed the pipe could
// fill it in between.
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

// awaitRoom starts a wait that wakes the driver when there is room. It returns false if the
// file cannot be polled. mu is held.
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
	_ = unix.Close(f.fd) // fput reports no error, either
}
