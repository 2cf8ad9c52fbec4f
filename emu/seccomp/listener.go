package seccomp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Listener answers the calls of all threads under one filter.
type Listener struct {
	fd     int
	handle func(*Call)
	// closing: receiving has stopped, and calls in progress count as interrupted.
	closing atomic.Bool
	// busy counts the users of fd besides the goroutine that receives: meanwhile the number
	// must not become that of another file.
	busy sync.WaitGroup
	// done is closed after fd; err is set before.
	done chan struct{}
	err  error
	// mu guards stop, an eventfd that ends the wait for calls, -1 when it is closed.
	mu   sync.Mutex
	stop int
}

// NewListener serves a filter's listener, and closes fd at the end. handle answers each
// call before it returns; without an answer the call gets ENOSYS. It is called by the
// goroutine that receives the calls, one after the other: a handler that may wait must call
// Call.Wait before.
func NewListener(fd int, handle func(*Call)) *Listener {
	l := &Listener{fd: fd, handle: handle, done: make(chan struct{})}
	stop, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		l.stop = -1
		l.err = errors.Join(fmt.Errorf("seccomp: create an eventfd for a listener, whose callers now get ENOSYS: %w", err), unix.Close(fd))
		close(l.done)
		return l
	}
	l.stop = stop
	// The caller waits for its answer, so its CPU is free for this process. To wake an idle CPU
	// takes longer than the call, in a virtual machine much longer. It fails before Linux 6.6, which
	// costs time only.
	_ = unix.IoctlSetInt(fd, unix.SECCOMP_IOCTL_NOTIF_SET_FLAGS, unix.SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP)
	go l.serve()
	return l
}

// Wait waits until no thread has the filter and all calls are over, or until the listener
// was closed, and returns nil; or until receiving calls fails, and returns the error.
func (l *Listener) Wait() error {
	<-l.done
	return l.err
}

// Close ends the listener and waits until the calls in progress are over: they count as
// interrupted, and watched ones are woken. Later selected calls, and those without an
// answer by then, fail with ENOSYS. It returns the result of Wait. A handler must not call
// it.
func (l *Listener) Close() error {
	l.closing.Store(true)
	l.mu.Lock()
	if l.stop >= 0 {
		// It fails only if the counter is full, and then the loop is awake.
		_, _ = unix.Write(l.stop, binary.NativeEndian.AppendUint64(nil, 1))
	}
	l.mu.Unlock()
	return l.Wait()
}

// serve receives calls until every filtered process has exited, until Close, or until a
// handler waits and another goroutine serves.
func (l *Listener) serve() {
	passed, err := l.receive()
	if passed {
		l.busy.Done()
		return
	}
	l.closing.Store(true)
	l.busy.Wait()
	l.mu.Lock()
	l.err = errors.Join(err, unix.Close(l.fd), unix.Close(l.stop))
	l.stop = -1
	l.mu.Unlock()
	close(l.done)
}

// receive receives calls. passed: a handler has passed that to another goroutine.
func (l *Listener) receive() (passed bool, err error) {
	// The receiving ioctl is called only when there is a call: before Linux 6.11 only a
	// call or a signal ends it.
	fds := []unix.PollFd{{Fd: int32(l.fd), Events: unix.POLLIN}, {Fd: int32(l.stop), Events: unix.POLLIN}}
	for {
		_, err := unix.Poll(fds, -1)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return false, fmt.Errorf("seccomp: wait for calls: %w", err)
		case fds[1].Revents != 0:
			return false, nil
		case fds[0].Revents&unix.POLLIN != 0:
			if passed, err := l.next(); passed || err != nil {
				return passed, err
			}
		case fds[0].Revents&unix.POLLHUP != 0:
			return false, nil // no thread has the filter
		case fds[0].Revents&unix.POLLNVAL != 0:
			return false, fmt.Errorf("seccomp: wait for calls: descriptor %d is closed", l.fd)
		default:
			// POLLERR: a signal arrived while the filter was locked (seccomp_notify_poll).
		}
	}
}

// next receives a call and answers it.
func (l *Listener) next() (passed bool, err error) {
	n, errno := receive(l.fd)
	switch {
	case errors.Is(errno, unix.ENOENT):
		return false, nil // a signal ended the call meanwhile
	case errno != 0:
		return false, fmt.Errorf("seccomp: receive a call: %w", errno)
	}
	c := &Call{ID: n.id, TID: int32(n.pid), NR: int(n.data.nr), Args: n.data.args, listener: l}
	l.handle(c)
	if c.life.Load() != over {
		_ = c.Return(0, unix.ENOSYS) // unless the caller has ended
	}
	c.end()
	return c.passed.Swap(true), nil
}
