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
	// regular: a write never waits, and is at offset 0, which the driver passes to
	// kernel_write.
	regular bool

	mu     sync.Mutex
	closed bool
}

// File implements driver.Task.
func (t *Task) File(fd uint32) driver.EventFile {
	own, err := t.getFile(int(int32(fd)))
	if err != nil {
		return nil
	}
	f := &eventFile{h: t.h, fd: own}
	flags, err := unix.FcntlInt(uintptr(own), unix.F_GETFL, 0)
	if err != nil || flags&unix.O_PATH != 0 { // fget does not return such files
		f.Put()
		return nil
	}
	var st unix.Stat_t
	if unix.Fstat(own, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFREG {
		f.regular = true
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
	mode, err := unix.FcntlInt(uintptr(f.fd), unix.F_GETFL, 0)
	if err != nil || mode&unix.O_ACCMODE == unix.O_RDONLY {
		return false
	}
	if f.regular {
		_, _ = unix.Pwrite(f.fd, []byte{'.'}, 0) // the driver ignores errors, too
		return false
	}
	_, err = unix.Pwritev2(f.fd, [][]byte{{'.'}}, -1, unix.RWF_NOWAIT)
	if errors.Is(err, unix.EOPNOTSUPP) { // pipes before Linux 6.4, terminals
		// Only the debugger that passed the pipe could fill it in between.
		if err = unix.EAGAIN; f.hasRoom() {
			_, err = unix.Write(f.fd, []byte{'.'})
		}
	}
	switch t, ok := by.(*Task); {
	case errors.Is(err, unix.EAGAIN) && mode&unix.O_NONBLOCK == 0:
		f.h.awaitRoom(f)
		return true
	case errors.Is(err, unix.EPIPE) && ok:
		// The writer to a pipe without a reader gets the signal. If that fails,
		// the thread has just ended.
		_ = unix.Tgkill(int(t.leader.tid), int(t.tid), unix.SIGPIPE)
	}
	return false
}

// awaitRoom has Sweep wake the driver when a full file has room.
func (h *Host) awaitRoom(f *eventFile) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.full[f] = true
}

// hasRoom reports whether a write would not wait. mu is held.
func (f *eventFile) hasRoom() bool {
	ready := []unix.PollFd{{Fd: int32(f.fd), Events: unix.POLLOUT}}
	n, err := unix.Poll(ready, 0)
	return n > 0 || err != nil
}

// look wakes the driver if the file has room, and else has the next Sweep look again.
func (f *eventFile) look() {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case f.closed:
	case f.hasRoom():
		f.h.wake()
	default:
		f.h.awaitRoom(f)
	}
}

// Put implements driver.EventFile.
func (f *eventFile) Put() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return
	}
	f.closed = true
	_ = unix.Close(f.fd) // fput reports no error, either
}
