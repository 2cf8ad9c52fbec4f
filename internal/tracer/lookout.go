package tracer

import (
	"os"
	"os/signal"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// sweep is how often the targets are looked at without a SIGCHLD: the kernel sends
// none when a thread's execve takes the place of the main thread, and a parent may
// have asked for another signal at the exit.
const sweep = time.Second

// lookout is the one of this process, as SIGCHLD is.
var lookout watch

// watch wakes the threads whose target has something to wait for. The kernel sends
// SIGCHLD to the process of the tracer at each stop and exit, one for several when
// they come together; so each is taken to say that any target may have stirred.
// Looking costs a system call for each target and wakes no thread in vain.
type watch struct {
	mu      sync.Mutex
	threads map[*Thread]struct{} // guarded by mu
	quit    chan struct{}        // guarded by mu; ends the goroutine that watches
}

// add makes the watch wake t.
func (w *watch) add(t *Thread) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.threads) == 0 {
		w.threads, w.quit = map[*Thread]struct{}{}, make(chan struct{})
		stirred := make(chan os.Signal, 1)
		signal.Notify(stirred, unix.SIGCHLD)
		go w.keep(stirred, w.quit)
	}
	w.threads[t] = struct{}{}
}

// remove makes the watch forget t.
func (w *watch) remove(t *Thread) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.threads, t)
	if len(w.threads) == 0 {
		close(w.quit)
	}
}

func (w *watch) keep(stirred chan os.Signal, quit <-chan struct{}) {
	defer signal.Stop(stirred)
	tick := time.NewTicker(sweep)
	defer tick.Stop()
	var threads []*Thread
	for {
		select {
		case <-stirred:
		case <-tick.C:
		case <-quit:
			return
		}
		threads = w.appendThreads(threads[:0])
		for _, t := range threads {
			if waitFor(t.pid).what != nothing {
				t.rouse()
			}
		}
		clear(threads)
	}
}

func (w *watch) appendThreads(to []*Thread) []*Thread {
	w.mu.Lock()
	defer w.mu.Unlock()
	for t := range w.threads {
		to = append(to, t)
	}
	return to
}

// rouse makes the thread look what its target wants. It does not block.
func (t *Thread) rouse() {
	select {
	case t.wake <- struct{}{}:
	default: // it is to look already
	}
}
