package kfdtest

import (
	"maps"
	"slices"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// mm is an address space. It is not empty: pointers to two must differ.
type mm struct{ _ byte }

// Process is a fake process.
type Process struct {
	m     *Machine
	pid   int32
	start uint64
	main  *Thread
	real  bool // Self and its parts: descriptors that are not fake are real

	// Guarded by Machine.mu.
	inside  int32
	mm      *mm
	fds     map[int]*descriptor
	firstFD int
	caps    map[driver.Capability]bool
	threads []*Thread
	// killed: it will end when no thread is inside the driver. exiting: that has begun.
	// dead: it has ended.
	killed, exiting, dead bool
}

// PID returns the process's ID, which is the ID of its main thread.
func (p *Process) PID() int32 { return p.pid }

// Start returns its start time, which no two processes share.
func (p *Process) Start() uint64 { return p.start }

// Key returns PID and Start.
func (p *Process) Key() gpreempt.ProcessKey { return gpreempt.ProcessKey{PID: p.pid, Start: p.start} }

// Main returns the main thread.
func (p *Process) Main() *Thread { return p.main }

// NewThread starts a thread.
func (p *Process) NewThread() *Thread {
	defer p.m.lock()()
	return p.newThread(p.m.newID())
}

// newThread creates a thread. mu is held.
func (p *Process) newThread(tid int32) *Thread {
	t := &Thread{p: p, tid: tid}
	p.threads = append(p.threads, t)
	p.m.threads[tid] = t
	return t
}

// SetCaps sets the process's capabilities.
func (p *Process) SetCaps(caps ...driver.Capability) {
	defer p.m.lock()()
	p.caps = map[driver.Capability]bool{}
	for _, c := range caps {
		p.caps[c] = true
	}
}

// Fork starts a child with descriptors of the same open files, its own address space and
// no tracer.
func (p *Process) Fork() *Process {
	defer p.m.lock()()
	child := p.m.spawn(p.m.newID())
	child.caps = maps.Clone(p.caps)
	for fd, d := range p.fds {
		d.file.refs++
		child.fds[fd] = &descriptor{file: d.file, closeOnExec: d.closeOnExec}
	}
	return child
}

// Exec replaces the program: it ends the address space with the driver's state of it, all
// threads except the main one, and the descriptors that close on exec. It waits for calls
// that no signal ends.
func (p *Process) Exec() {
	p.m.mu.Lock()
	old, fresh := p.mm, new(mm)
	threads := p.threads
	for _, t := range threads {
		t.interrupted = t.calls > 0
		if t != p.main {
			t.die()
		}
	}
	p.threads = []*Thread{p.main}
	p.m.mu.Unlock()
	p.m.Wake()
	busy := func(t *Thread) bool { return !t.idle() }
	p.m.Driver.Await(func() bool { return !slices.ContainsFunc(threads, busy) }, never)

	p.m.mu.Lock()
	p.mm = fresh
	var closing []*file
	for fd, d := range p.fds {
		if d.closeOnExec {
			closing = append(closing, d.file)
			delete(p.fds, fd)
		}
	}
	p.m.mu.Unlock()
	p.m.MMReleased(p.main, old)
	for _, f := range closing {
		f.put()
	}
	p.m.Wake()
}

// Kill ends the process: it leaves the driver, closes its descriptors and ends its
// tracing. A thread that waits interruptibly is woken. When Kill returns, the process is
// dead, or waits for something that no signal ends: a lock of the driver. Its calls return
// EOWNERDEAD; in a real process they would not return.
func (p *Process) Kill() {
	p.m.mu.Lock()
	p.killed = true
	p.m.mu.Unlock()
	p.m.Wake()
	if p.beginExit() {
		go p.exit()
	}
	p.m.Driver.Await(p.ended, never)
}

func never() bool { return false }

// ended reports whether the killed process is dead, or cannot proceed by itself.
func (p *Process) ended() bool {
	p.m.mu.Lock()
	threads, dead, exiting := slices.Clone(p.threads), p.dead, p.exiting
	p.m.mu.Unlock()
	if dead {
		return true
	}
	if exiting {
		stuck, _ := p.m.Waiting(p.main)
		return stuck
	}
	stuck := false
	for _, t := range threads {
		if t.idle() {
			continue
		}
		if !t.stuck() {
			return false
		}
		stuck = true
	}
	return stuck // without a call in progress, the exit is next
}

// beginExit reports, once, whether the process was killed and has no call in progress.
func (p *Process) beginExit() bool {
	defer p.m.lock()()
	if !p.killed || p.exiting {
		return false
	}
	for _, t := range p.threads {
		if t.calls > 0 {
			return false
		}
	}
	p.exiting = true
	return true
}

// exit is do_exit of the last thread: it ends the address space, then the descriptors,
// then the tracing of its threads.
func (p *Process) exit() {
	m := p.m
	m.mu.Lock()
	old := p.mm
	p.mm = nil
	m.mu.Unlock()
	if old != nil {
		m.MMReleased(p.main, old)
	}
	m.mu.Lock()
	files := make([]*file, 0, len(p.fds))
	for _, fd := range slices.Sorted(maps.Keys(p.fds)) {
		files = append(files, p.fds[fd].file)
	}
	clear(p.fds)
	m.mu.Unlock()
	for _, f := range files {
		f.put()
	}
	m.mu.Lock()
	for _, t := range p.threads {
		t.die()
	}
	p.dead = true
	m.mu.Unlock()
	m.Wake()
}

// Dead reports whether the process has died.
func (p *Process) Dead() bool {
	defer p.m.lock()()
	return p.dead
}

// FDs returns the file of each open descriptor as in /proc/PID/fd: "/dev/kfd",
// "anon_inode:kfd_smi_ev", "pipe:[1]".
func (p *Process) FDs() map[int]string {
	defer p.m.lock()()
	fds := map[int]string{}
	for fd, d := range p.fds {
		fds[fd] = d.file.name
	}
	return fds
}

// KFD returns the driver's state of the process, false if it has not opened the driver
// since its start or its last exec.
func (p *Process) KFD() (driver.ProcessState, bool) { return p.m.Process(p.MM()) }

// Queues returns the process's queues in the driver, by ID.
func (p *Process) Queues() map[uint32]driver.QueueState {
	s, _ := p.KFD()
	queues := map[uint32]driver.QueueState{}
	for _, q := range s.Queues {
		queues[q.ID] = q
	}
	return queues
}

// Suspended returns the IDs of the suspended queues, in order.
func (p *Process) Suspended() []uint32 {
	var ids []uint32
	for id, q := range p.Queues() {
		if q.Suspended {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

// MM returns the address space, nil after its end.
func (p *Process) MM() driver.MM {
	defer p.m.lock()()
	if p.mm == nil {
		return nil
	}
	return p.mm
}

// Unmap is the end of the process's memory from an address on, as by munmap.
func (p *Process) Unmap(start, bytes uint64) { p.m.Unmapped(p.MM(), start, start+bytes-1) }

// HoldMutex takes the driver's mutex of the process until release is called, as a call of
// the process does that pins much host memory. It panics if the driver does not know the
// process.
func (p *Process) HoldMutex() (release func()) {
	unlock := p.m.lock()
	mm := p.mm
	unlock()
	release, ok := p.m.Driver.HoldMutex(mm)
	if !ok {
		panic("kfdtest: the process has not opened the driver")
	}
	return release
}
