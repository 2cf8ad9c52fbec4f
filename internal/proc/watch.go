package proc

import (
	"os"
	"os/signal"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// pollInterval is how often the targets are polled without a SIGCHLD: the kernel sends
// none when a thread's execve replaces the main thread, and a target may have been
// created with another exit signal.
const pollInterval = time.Second

// watcher is the only one of this process: SIGCHLD is sent to the process.
var watcher sigchldWatcher

// sigchldWatcher wakes the threads whose target has an event. The kernel sends SIGCHLD
// to the tracer's process at each stop and exit, and merges several into one; so each
// SIGCHLD leads to a poll of every target, which is one system call.
type sigchldWatcher struct {
	mu      sync.Mutex
	threads map[*Tracer]struct{} // guarded by mu
	quit    chan struct{}        // guarded by mu; ends the goroutine that watches
}

// add starts to watch the target of t.
func (w *sigchldWatcher) add(t *Tracer) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.threads) == 0 {
		w.threads, w.quit = map[*Tracer]struct{}{}, make(chan struct{})
		signals := make(chan os.Signal, 1)
		signal.Notify(signals, unix.SIGCHLD)
		go w.watch(signals, w.quit)
	}
	w.threads[t] = struct{}{}
}

// remove ends what add started.
func (w *sigchldWatcher) remove(t *Tracer) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.threads, t)
	if len(w.threads) == 0 {
		close(w.quit)
	}
}

func (w *sigchldWatcher) watch(signals chan os.Signal, quit <-chan struct{}) {
	defer signal.Stop(signals)
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	var threads []*Tracer
	for {
		select {
		case <-signals:
		case <-tick.C:
		case <-quit:
			return
		}
		threads = w.appendThreads(threads[:0])
		for _, t := range threads {
			if poll(t.target.PID).what != nothing {
				t.wakeUp()
			}
		}
		clear(threads)
	}
}

func (w *sigchldWatcher) appendThreads(to []*Tracer) []*Tracer {
	w.mu.Lock()
	defer w.mu.Unlock()
	for t := range w.threads {
		to = append(to, t)
	}
	return to
}

// wakeUp makes the thread poll its target. It does not block.
func (t *Tracer) wakeUp() {
	select {
	case t.wake <- struct{}{}:
	default: // a poll is pending
	}
}
