// Package hrtimer implements a timer on timerfd that wakes a goroutine within tens of
// microseconds. Go's own timers are up to a millisecond late when the process is
// otherwise idle, because the poller waits in steps of a millisecond.
package hrtimer

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Timer is a one-shot timer for one waiting goroutine. Set and Close may be called by any
// goroutine at any time, also while another one is in Wait.
type Timer struct {
	file *os.File

	// mu guards closed, and keeps Close from closing the descriptor during a Set.
	mu     sync.Mutex
	closed bool
	fd     int
}

// New returns a disarmed timer. It needs one file descriptor until Close.
func New() (*Timer, error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("create a timer descriptor: %w", err)
	}
	// A nonblocking descriptor makes NewFile hand reads to the runtime's poller.
	return &Timer{file: os.NewFile(uintptr(fd), "timerfd"), fd: fd}, nil
}

// Set makes the timer fire once, d from now, instead of whenever it would have
// fired. A d of 0 or less disarms it. After Close it returns os.ErrClosed.
func (t *Timer) Set(d time.Duration) error {
	var spec unix.ItimerSpec
	spec.Value = unix.NsecToTimespec(max(int64(d), 0))
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return os.ErrClosed
	}
	if err := unix.TimerfdSettime(t.fd, 0, &spec, nil); err != nil {
		return fmt.Errorf("set the timer to %v: %w", d, err)
	}
	return nil
}

// Wait sleeps until the timer fires. If it fires outside of Wait, the next Wait returns at
// once, unless Set comes first. After Close, also one during Wait, it returns os.ErrClosed.
func (t *Timer) Wait() error {
	var expirations [8]byte
	_, err := t.file.Read(expirations[:])
	switch {
	case err == nil:
		return nil
	case errors.Is(err, os.ErrClosed):
		return os.ErrClosed
	}
	return fmt.Errorf("wait for the timer: %w", err)
}

// Close makes Wait return os.ErrClosed and closes the descriptor. It is idempotent.
func (t *Timer) Close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return nil
	}
	t.closed = true
	return t.file.Close()
}
