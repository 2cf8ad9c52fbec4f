package seccomp

import (
	"bytes"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// pollEvery is how often the callers of watched calls are looked at. The kernel
// tells nobody that a thread it has sleep killably had something pending.
const pollEvery = 5 * time.Millisecond

// watchers is the process's: one timer looks at the calls of all listeners, of
// which there may be one for each of a hundred programs.
var watchers poller

// poller looks at watched calls. Its goroutine runs while there are any.
type poller struct {
	// mu guards the fields below.
	mu sync.Mutex
	// added are the calls the goroutine has not seen yet.
	added   []*watch
	running bool
}

// watch is a call that is looked at, and holds its listener open.
type watch struct {
	call *Call
	wake func()
	stat statFile
	open bool
}

func (p *poller) add(w *watch) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.added = append(p.added, w)
	if !p.running {
		p.running = true
		go p.run()
	}
}

// run looks at every call each pollEvery until none is left. Calls that are over
// by their first look cost nothing but that.
func (p *poller) run() {
	ticker := time.NewTicker(pollEvery)
	defer ticker.Stop()
	var watched []*watch
	for {
		<-ticker.C
		p.mu.Lock()
		watched = append(watched, p.added...)
		p.added = nil
		p.running = len(watched) > 0
		more := p.running
		p.mu.Unlock()
		if !more {
			return
		}
		rest := watched[:0]
		for _, w := range watched {
			if !w.look() {
				rest = append(rest, w)
			}
		}
		clear(watched[len(rest):])
		watched = rest
	}
}

// look reports whether the watch is over.
func (w *watch) look() bool {
	c := w.call
	done := c.life.Load() == over || c.listener.closing.Load() || w.interrupted()
	if !done {
		return false
	}
	if w.open {
		w.stat.close()
	}
	if c.life.Load() != over {
		w.wake()
	}
	c.listener.busy.Done()
	return true
}

func (w *watch) interrupted() bool {
	if w.open {
		return w.call.look(w.stat)
	}
	w.stat, w.open = openStat(w.call.TID), true
	return w.call.lookOnce(w.stat)
}

// statFile is a thread's stat file: the thread's that had the number when the
// file was opened, for as long as it is open. -1 is one that could not be opened.
type statFile int

// openStat opens the stat file of one thread. It is the thread's own below task:
// the one above sums up all threads of the process.
func openStat(tid int32) statFile {
	fd, err := unix.Open(fmt.Sprintf("/proc/%d/task/%d/stat", tid, tid), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1 // the thread has ended, or /proc hides it: Valid tells
	}
	return statFile(fd)
}

func (f statFile) close() {
	if f >= 0 {
		_ = unix.Close(int(f)) // nothing was written
	}
}

// state is field 3, 0 when it cannot be read: the thread has ended.
func (f statFile) state() byte {
	if f < 0 {
		return 0
	}
	var line [128]byte // pid, name (at most 64 bytes here) and state come first
	n, err := unix.Pread(int(f), line[:], 0)
	if err != nil {
		return 0
	}
	return stateOf(line[:n])
}

// stateOf finds the state in a stat line. The name before it may contain
// anything, parentheses included.
func stateOf(line []byte) byte {
	end := bytes.LastIndexByte(line, ')')
	if end < 0 || end+2 >= len(line) {
		return 0
	}
	return line[end+2]
}
