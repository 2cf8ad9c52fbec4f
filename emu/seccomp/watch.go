package seccomp

import (
	"bytes"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// pollEvery is the interval at which the callers of watched calls are checked. The kernel
// does not notify when it moves a thread to a killable sleep.
const pollEvery = 5 * time.Millisecond

// watchers is shared by all listeners, of which there may be one for each of a hundred
// programs: one timer checks the calls of all.
var watchers poller

// poller checks watched calls. Its goroutine runs while there is one.
type poller struct {
	// mu guards the fields below.
	mu sync.Mutex
	// added are the calls that the goroutine has not received yet.
	added   []*watch
	running bool
}

// watch is a call that is checked. It keeps its listener open.
type watch struct {
	call *Call
	wake func()
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

// run checks every call each pollEvery until no call is left.
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
	if c.life.Load() != over && !c.Interrupted() {
		return false
	}
	if c.life.Load() != over {
		w.wake()
	}
	c.listener.busy.Done()
	return true
}

// statFile is the stat file of the thread that had the number when the file was opened. -1
// is one that could not be opened.
type statFile int

// openStat opens the stat file of one thread, below task: the one above is about all
// threads of the process.
func openStat(tid int32) statFile {
	fd, err := unix.Open(fmt.Sprintf("/proc/%d/task/%d/stat", tid, tid), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1 // the thread has ended, or /proc hides it: Valid distinguishes
	}
	return statFile(fd)
}

func (f statFile) close() {
	if f >= 0 {
		_ = unix.Close(int(f)) // nothing was written
	}
}

// state returns field 3, 0 if it cannot be read: the thread has ended.
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

// stateOf returns the state in a stat line. The name before it may contain any bytes,
// including parentheses.
func stateOf(line []byte) byte {
	end := bytes.LastIndexByte(line, ')')
	if end < 0 || end+2 >= len(line) {
		return 0
	}
	return line[end+2]
}
