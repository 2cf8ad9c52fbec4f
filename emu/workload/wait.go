package workload

import (
	"fmt"
	"runtime"
	"time"
)

// patience is how long a worker waits for one event before it looks whether it missed it.
const patience = time.Second

// wait waits until the oldest packet is over, if any is flying, or the time is over after
// which the next is due, if that is positive, or somebody wakes the worker. It may come
// back earlier.
func (w *worker) wait(flying bool, due time.Duration) error {
	most := patience
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
	if err != nil || raised || most < patience {
		return err
	}
	if !w.oldestOver() {
		return nil
	}
	// The GPU writes first and raises the event then, so it may be about to.
	if raised, err = w.wake.wait(patience); err == nil && !raised {
		err = fmt.Errorf("packet %d is over, and its event was never raised", w.retired)
	}
	return err
}

// watch looks at memory until the oldest packet is over, less and less often.
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

// oldestOver reports whether the oldest packet is over, or wrong, which who looks next
// will see.
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
