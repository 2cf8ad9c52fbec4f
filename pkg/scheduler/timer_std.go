package scheduler

import (
	"errors"
	"sync"
	"time"
)

var errClosed = errors.New("timer closed")

// stdTimer is a Timer on the Go runtime's timers, which an idle process fires up
// to a millisecond late (docs/adr/0005). It works in a synctest bubble.
type stdTimer struct {
	timer  *time.Timer
	closed chan struct{}
	once   sync.Once
}

// NewTimer returns a Timer on the Go runtime's timers.
func NewTimer() Timer {
	t := &stdTimer{timer: time.NewTimer(time.Hour), closed: make(chan struct{})}
	t.timer.Stop()
	return t
}

func (t *stdTimer) Set(d time.Duration) error {
	t.timer.Reset(d)
	return nil
}

func (t *stdTimer) Wait() error {
	select {
	case <-t.timer.C:
		return nil
	case <-t.closed:
		return errClosed
	}
}

func (t *stdTimer) Close() error {
	t.once.Do(func() { t.timer.Stop(); close(t.closed) })
	return nil
}
