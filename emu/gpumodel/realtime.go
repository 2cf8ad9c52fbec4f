package gpumodel

import (
	"errors"
	"io/fs"
	"os"
	"sync"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Timer is a one-shot timer with one sleeper, such as an hrtimer.Timer. Set may be
// called while another goroutine is in Wait; Close ends Wait with os.ErrClosed.
type Timer interface {
	Set(d time.Duration) error
	Wait() error
	Close() error
}

// Realtime runs a Machine along the wall clock. Its methods may be called by any
// goroutine and do not block.
// When there is more to simulate than the CPU manages, virtual time falls behind
// the wall clock, and while the machine is paused it stands still. It never goes back.
//
// Functions given to it are called with the machine locked, by any goroutine: they
// must not block, and must use the Machine, never the Realtime.
type Realtime struct {
	timer   Timer
	stopped chan struct{}

	// mu guards what follows.
	mu sync.Mutex
	m  *Machine
	// origin is the wall clock's time 0 of the machine. It moves when a pause ends.
	origin time.Time
	paused bool
	// wake is when the timer is set to fire, in virtual time; 0: it is not set. After a
	// pause it fires too early.
	wake time.Duration
	over bool
}

// Start has the machine's virtual time follow the wall clock, from its present value. The caller must not use m or timer directly any more, and must Close the
// Realtime, which closes the timer.
func Start(m *Machine, timer Timer) *Realtime {
	r := &Realtime{
		origin:  time.Now().Add(-m.Now()),
		timer:   timer,
		stopped: make(chan struct{}),
		m:       m,
	}
	go r.run()
	r.Do(func(*Machine) {})
	return r
}

// Close stops virtual time. It is idempotent.
func (r *Realtime) Close() error {
	r.mu.Lock()
	over := r.over
	r.over = true
	r.mu.Unlock()
	if over {
		return nil
	}
	err := r.timer.Close()
	<-r.stopped
	return err
}

// run wakes up when the next event is due.
func (r *Realtime) run() {
	defer close(r.stopped)
	for {
		if err := r.timer.Wait(); err != nil {
			if !errors.Is(err, os.ErrClosed) {
				// Only this package has the descriptor, so this is an error of the program.
				panic("gpumodel: " + err.Error())
			}
			return
		}
		r.mu.Lock()
		r.wake = 0
		r.follow()
		r.mu.Unlock()
	}
}

// batch is how many events are simulated before others get the lock.
const batch = 4096

// follow brings the machine up to the wall clock and sets the timer for what
// comes next. It needs mu.
func (r *Realtime) follow() {
	if r.over {
		return
	}
	if r.paused && r.m.pauses == 0 {
		r.origin = time.Now().Add(-r.m.Now())
	}
	r.m.advance(time.Since(r.origin), batch)
	if r.paused = r.m.pauses > 0; r.paused {
		return
	}
	next, ok := r.m.Next()
	// Setting the timer is a system call, and firing too early is harmless: it is set
	// only for an earlier time.
	if !ok || r.wake != 0 && r.wake <= next {
		return
	}
	if err := r.timer.Set(max(next-time.Since(r.origin), 1)); err == nil {
		r.wake = max(next, 1)
	}
}

// Do calls fn with the machine at the present time. fn must not block, must not
// call AdvanceTo, and must not keep the machine except in functions it gives to
// it.
func (r *Realtime) Do(fn func(m *Machine)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.follow()
	fn(r.m)
	r.follow()
}

// GPUs is Machine.GPUs.
func (r *Realtime) GPUs() []gpreempt.GPU { return r.m.GPUs() }

// Now is Machine.Now.
func (r *Realtime) Now() (now time.Duration) {
	r.Do(func(m *Machine) { now = m.Now() })
	return now
}

// FS is the machine's file tree; each call sees one moment. It may be used by any
// goroutine, also after Close.
func (r *Realtime) FS() fs.FS { return &FS{with: r.Do} }
