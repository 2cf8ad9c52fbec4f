package workload

import (
	"fmt"
	"runtime"
	"time"
)

// maxWait limits the wait for an event. Then the worker checks whether it missed the event.
const maxWait = time.Second

// wait waits until the oldest packet has completed, if any is in flight, until the next is
// due, if due is positive, or until the worker is woken. It may return earlier.
func (w *worker) wait(flying bool, due time.Duration) error {
	most := maxWait
	if due > 0 {
		most = min(most, due)
	}
	switch {
	case !flying:
		timer := time.NewTimer(most)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-w.stop:
		case <-w.abandon:
		}
		return nil
	case w.wake == nil:
		w.watch(most)
		return nil
	}
	raised, err := w.wake.wait(most)
	if raised {
		w.missed = false
	}
	if err != nil || raised || most < maxWait {
		return err
	}
	if !w.oldestOver() {
		return nil
	}
	// The GPU raises the event after it writes: the event may follow. The driver loses one
	// that is raised as a wait ends without any (kfd_wait_on_events: the waiter that has
	// timed out, and still waits for a lock, resets it), but not one after the other.
	raised, err = w.wake.wait(maxWait)
	if err == nil && !raised && w.missed {
		err = fmt.Errorf("packet %d has completed, but its event was not raised", w.retired)
	}
	w.missed = !raised
	return err
}

// watch polls memory until the oldest packet has completed, less and less often.
func (w *worker) watch(most time.Duration) {
	const spins, longest = 20, time.Millisecond
	end, nap := time.Now().Add(most), 20*time.Microsecond
	for i := 0; !w.oldestOver() && !closed(w.abandon) && time.Now().Before(end); i++ {
		if i < spins {
			runtime.Gosched()
			continue
		}
		time.Sleep(nap)
		nap = min(2*nap, longest)
	}
}

// oldestOver reports whether the oldest packet has completed, or is wrong, which the next
// check will report.
func (w *worker) oldestOver() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	var over bool
	var err error
	if w.retired < w.proof.pushed {
		over, err = w.queue.over(w.retired)
	} else {
		over, err = w.queue.sealed()
	}
	return over || err != nil
}
