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
	blocks func(*Call) bool
	// closing: receiving has stopped, and calls in progress count as interrupted.
	closing atomic.Bool
	// busy counts the goroutines and watches that use fd: meanwhile the number must not
	// become that of another file.
	busy sync.WaitGroup
	// done is closed after fd; err is set before.
	done chan struct{}
	err  error
	// mu guards stop, an eventfd that ends the wait for calls, -1 when it is closed.
	mu   sync.Mutex
	stop int
}

// NewListener serves a filter's listener, and closes fd at the end. handle answers each
// call before it returns; without an answer the call gets ENOSYS. It is called for one call
// after the other, except those for which blocks returns true: each of them has its own
// goroutine, and the handler must watch the call to notice its interruption.
func NewListener(fd int, handle func(*Call), blocks func(*Call) bool) *Listener {
	l := &Listener{fd: fd, handle: handle, blocks: blocks, done: make(chan struct{})}
	stop, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		l.stop = -1
		l.err = errors.Join(fmt.Errorf("seccomp: create an eventfd for a listener, whose callers now get ENOSYS: %w", err), unix.Close(fd))
		close(l.done)
		return l
	}
	l.stop = stop
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

func (l *Listener) serve() {
	err := l.receive()
	l.closing.Store(true)
	l.busy.Wait()
	l.mu.Lock()
	l.err = errors.Join(err, unix.Close(l.fd), unix.Close(l.stop))
	l.stop = -1
	l.mu.Unlock()
	close(l.done)
}

// receive receives calls until every filtered process has exited, or until Close.
func (l *Listener) receive() error {
	// The receiving ioctl is called only when there is a call: before Linux 6.11 only a
	// call or a signal ends it.
	fds := []unix.PollFd{{Fd: int32(l.fd), Events: unix.POLLIN}, {Fd: int32(l.stop), Events: unix.POLLIN}}
	for {
		_, err := unix.Poll(fds, -1)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return fmt.Errorf("seccomp: wait for calls: %w", err)
		case fds[1].Revents != 0:
			return nil
		case fds[0].Revents&unix.POLLIN != 0:
			if err := l.next(); err != nil {
				return err
			}
		case fds[0].Revents&unix.POLLHUP != 0:
			return nil // no thread has the filter
		case fds[0].Revents&unix.POLLNVAL != 0:
			return fmt.Errorf("seccomp: wait for calls: descriptor %d is closed", l.fd)
		default:
			// POLLERR: a signal arrived while the filter was locked (seccomp_notify_poll).
		}
	}
}

// next receives a call and answers it.
func (l *Listener) next() error {
	n, errno := receive(l.fd)
	switch {
	case errors.Is(errno, unix.ENOENT):
		return nil // a signal ended the call meanwhile
	case errno != 0:
		return fmt.Errorf("seccomp: receive a call: %w", errno)
	}
	c := &Call{ID: n.id, TID: int32(n.pid), NR: int(n.data.nr), Args: n.data.args, listener: l}
	if l.blocks(c) {
		l.busy.Go(func() { l.answer(c) })
		return nil
	}
	l.answer(c)
	return nil
}

func (l *Listener) answer(c *Call) {
	defer c.end()
	l.handle(c)
	if c.life.Load() != over {
		_ = c.Return(0, unix.ENOSYS) // unless the caller has ended
	}
}
