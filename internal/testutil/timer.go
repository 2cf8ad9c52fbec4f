package testutil

import (
	"errors"
	"sync"
	"time"
)

// Timer is a scheduler.Timer on the Go runtime's timers, which an idle process fires up
// to a millisecond late (docs/adr/0005). It works in a synctest bubble.
type Timer struct {
	timer  *time.Timer
	closed chan struct{}
	once   sync.Once
}

// NewTimer returns a timer that is not set.
func NewTimer() *Timer {
	t := &Timer{timer: time.NewTimer(time.Hour), closed: make(chan struct{})}
	t.timer.Stop()
	return t
}

// Set makes Wait return d from now.
func (t *Timer) Set(d time.Duration) error {
	t.timer.Reset(d)
	return nil
}

// Wait returns when the timer fires, or with an error after Close.
func (t *Timer) Wait() error {
	select {
	case <-t.timer.C:
		return nil
	case <-t.closed:
		return errors.New("timer closed")
	}
}

// Close ends Wait.
func (t *Timer) Close() error {
	t.once.Do(func() { t.timer.Stop(); close(t.closed) })
	return nil
}
