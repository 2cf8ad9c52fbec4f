package engine

import (
	"errors"
	"os"
	"time"
)

// How long the poller sleeps: a quarter of the time since the last event, so that a process
// that answers at once is answered at once, and an idle one costs little CPU time.
const (
	shortNap = 20 * time.Microsecond
	longNap  = time.Millisecond
)

// poll looks at doorbells until Close.
func (e *Engine) poll() {
	var work []*queue
	var ended uint64
	moved := time.Now()
	for {
		e.kicked.Store(false)
		before := e.ended.Load()
		w, idle := e.rung(work[:0])
		work = w
		var again, waiting, progress bool
		for _, q := range work {
			progress = q.pump() || progress
			again = again || q.look
			waiting = waiting || q.waiting
		}
		clear(work)
		if progress || ended != before {
			moved, ended = time.Now(), before
		}
		if again {
			continue
		}
		nap := min(max(time.Since(moved)/4, shortNap), longNap)
		lazy := idle || nap > 2*shortNap
		e.waiting.Store(waiting)
		e.lazy.Store(lazy)
		if !idle {
			e.setTimer(nap)
		}
		if e.kicked.Load() || (waiting || lazy) && e.ended.Load() != before {
			continue
		}
		if err := e.timer.Wait(); err != nil {
			if !errors.Is(err, os.ErrClosed) {
				// Only the engine has the timer.
				panic("engine: " + err.Error())
			}
			return
		}
	}
}

// rung appends the queues to look at to work. idle: no queue can have work.
func (e *Engine) rung(work []*queue) (_ []*queue, idle bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	idle = true
	for _, q := range e.queues {
		if q.stopped.Load() {
			continue
		}
		idle = false
		// The swap reads a write of the process and prepares for the next in one step.
		if q.bell.Load() != silent && q.bell.Swap(silent) != silent {
			q.look = true
		}
		if q.look || q.waiting {
			work = append(work, q)
		}
	}
	return work, idle
}

// kick has the poller look again at once. It may be called with the machine locked.
func (e *Engine) kick() {
	if !e.kicked.Swap(true) {
		e.setTimer(1)
	}
}

// setTimer has the poller wake up d from now.
func (e *Engine) setTimer(d time.Duration) {
	if err := e.timer.Set(d); err != nil && !errors.Is(err, os.ErrClosed) {
		panic("engine: " + err.Error())
	}
}

// moved records that a packet ended: the process may answer, and others may continue.
// The machine is locked.
func (e *Engine) moved() {
	e.ended.Add(1)
	if e.waiting.Load() || e.lazy.Load() {
		e.kick()
	}
}
