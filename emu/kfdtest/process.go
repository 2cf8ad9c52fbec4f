package kfdtest

import (
	"maps"
	"slices"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// mm is an address space. It has a size, so that two have two addresses.
type mm struct{ _ byte }

// Process is a process.
type Process struct {
	m     *Machine
	pid   int32
	start uint64
	main  *Thread
	real  bool // Self: descriptors it does not know are the kernel's

	// Guarded by Machine.mu.
	inside  int32
	mm      *mm
	fds     map[int]*descriptor
	firstFD int
	caps    map[Capability]bool
	threads []*Thread
	// killed: it is to die, and does once no thread is inside the driver. exiting:
	// that has begun. dead: that is over.
	killed, exiting, dead bool
}

// PID is the process's id, which is the tid of its main thread.
func (p *Process) PID() int32 { return p.pid }

// Start is its start time: no two processes have the same.
func (p *Process) Start() uint64 { return p.start }

// Key is PID and Start.
func (p *Process) Key() gpreempt.ProcessKey { return gpreempt.ProcessKey{PID: p.pid, Start: p.start} }

// Main is the main thread.
func (p *Process) Main() *Thread { return p.main }

// NewThread starts a thread.
func (p *Process) NewThread() *Thread {
	p.m.mu.Lock()
	defer p.m.mu.Unlock()
	return p.newThread(p.m.newID())
}

// newThread makes a thread. mu is held.
func (p *Process) newThread(tid int32) *Thread {
	t := &Thread{p: p, tid: tid}
	p.threads = append(p.threads, t)
	p.m.threads[tid] = t
	return t
}

// SetCaps leaves the process with these capabilities and no others.
func (p *Process) SetCaps(caps ...Capability) {
	p.m.mu.Lock()
	defer p.m.mu.Unlock()
	p.caps = map[Capability]bool{}
	for _, c := range caps {
		p.caps[c] = true
	}
}

// SetPIDInside puts the process in a pid namespace where it has this pid. To all
// others it keeps the one it has.
func (p *Process) SetPIDInside(pid int32) {
	p.m.mu.Lock()
	defer p.m.mu.Unlock()
	p.inside = pid
}

// Fork starts a child: with descriptors of the same open files, its own address
// space, and traced by nobody.
func (p *Process) Fork() *Process {
	p.m.mu.Lock()
	defer p.m.mu.Unlock()
	child := p.m.spawn(p.m.newID())
	child.caps = maps.Clone(p.caps)
	for fd, d := range p.fds {
		d.file.refs++
		child.fds[fd] = &descriptor{file: d.file, closeOnExec: d.closeOnExec}
	}
	return child
}

// Exec replaces the program: the address space goes, with what the driver kept for
// it, and the threads but the main one, and the descriptors that close on exec. It
// waits for calls of its threads that a signal does not end.
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
	p.m.driver.Wake()
	busy := func(t *Thread) bool { return !t.idle() }
	p.m.driver.Await(func() bool { return !slices.ContainsFunc(threads, busy) }, never)

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
	p.m.driver.MMReleased(task{p.main}, old)
	for _, f := range closing {
		f.put()
	}
	p.m.driver.Wake()
}

// Exit ends the process, as Kill does.
func (p *Process) Exit() { p.Kill() }

// Kill ends the process: it leaves the driver, closes its descriptors and ends what
// it traces. A thread that waits in a call which a signal ends is woken. When it
// returns the process is dead, or waits for something that no signal ends: for a
// lock of the driver's. Its calls give EOWNERDEAD, which stands for never returning.
func (p *Process) Kill() {
	p.m.mu.Lock()
	p.killed = true
	p.m.mu.Unlock()
	p.m.driver.Wake()
	if p.beginExit() {
		go p.exit()
	}
	p.m.driver.Await(p.gone, never)
}

func never() bool { return false }

// gone reports whether the process is dead, or has nothing left to do without help.
func (p *Process) gone() bool {
	p.m.mu.Lock()
	threads, dead, exiting := slices.Clone(p.threads), p.dead, p.exiting
	p.m.mu.Unlock()
	if dead {
		return true
	}
	if exiting {
		stuck, _ := p.m.driver.Waiting(task{p.main})
		return stuck
	}
	for _, t := range threads {
		if !t.idle() && !t.stuck() {
			return false
		}
	}
	return true
}

// beginExit reports whether the process is to die and nothing keeps it, once.
func (p *Process) beginExit() bool {
	p.m.mu.Lock()
	defer p.m.mu.Unlock()
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

// exit is do_exit of the last thread: the address space goes, then the descriptors,
// then what its threads trace.
func (p *Process) exit() {
	m := p.m
	m.mu.Lock()
	old := p.mm
	p.mm = nil
	m.mu.Unlock()
	if old != nil {
		m.driver.MMReleased(task{p.main}, old)
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
	m.driver.Wake()
}

// Dead reports whether the process has died.
func (p *Process) Dead() bool {
	p.m.mu.Lock()
	defer p.m.mu.Unlock()
	return p.dead
}

// FDs returns what each open descriptor leads to, as /proc/PID/fd has it: "/dev/kfd",
// "anon_inode:kfd_smi_ev", "pipe:[1]".
func (p *Process) FDs() map[int]string {
	p.m.mu.Lock()
	defer p.m.mu.Unlock()
	fds := map[int]string{}
	for fd, d := range p.fds {
		fds[fd] = d.file.name
	}
	return fds
}

// KFD returns what the driver knows of the process, false if it never opened the
// driver since it last was made anew.
func (p *Process) KFD() (ProcessState, bool) {
	p.m.mu.Lock()
	old := p.mm
	p.m.mu.Unlock()
	if old == nil {
		return ProcessState{}, false
	}
	return p.m.driver.Process(old)
}

// Queues returns the queues the driver has for the process, by id.
func (p *Process) Queues() map[uint32]QueueState {
	s, _ := p.KFD()
	queues := map[uint32]QueueState{}
	for _, q := range s.Queues {
		queues[q.ID] = q
	}
	return queues
}

// Suspended returns the ids of the queues that are suspended, in order.
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

// Raise has exceptions raised the way the hardware does (kfd_set_dbg_ev_from_interrupt):
// those of a queue, or of a GPU with queue kfd.NoQueue. It reports whether the debugger
// or the runtime was told.
func (p *Process) Raise(gpu gpreempt.GPUID, queue uint32, mask kfd.ExceptionMask) bool {
	p.m.mu.Lock()
	old := p.mm
	p.m.mu.Unlock()
	return old != nil && p.m.driver.Raise(old, gpu, queue, mask)
}

// SignalEvent has a GPU signal one of the process's events, as the end of a kernel
// does (kfd_signal_event_interrupt).
func (p *Process) SignalEvent(id uint32) {
	if mm := p.addressSpace(); mm != nil {
		p.m.driver.SignalEvent(mm, id)
	}
}

// Fault has a GPU tell of an address of the process's that it could not use.
func (p *Process) Fault(gpu gpreempt.GPUID, fault MemoryFault) {
	if mm := p.addressSpace(); mm != nil {
		p.m.driver.Fault(mm, gpu, fault)
	}
}

// Allocations returns the process's GPU memory, by handle.
func (p *Process) Allocations() []Allocation {
	if mm := p.addressSpace(); mm != nil {
		return p.m.driver.Allocations(mm)
	}
	return nil
}

// addressSpace returns nil once the process has none.
func (p *Process) addressSpace() *mm {
	p.m.mu.Lock()
	defer p.m.mu.Unlock()
	return p.mm
}

// Evict takes the process's queues off all GPUs the way a lack of memory does, and
// Restore brings them back; SMI events tell of both.
func (p *Process) Evict(trigger kfd.SMITrigger) error {
	p.m.mu.Lock()
	old := p.mm
	p.m.mu.Unlock()
	return p.m.driver.Evict(old, trigger)
}

// Restore undoes one Evict.
func (p *Process) Restore() error {
	p.m.mu.Lock()
	old := p.mm
	p.m.mu.Unlock()
	return p.m.driver.Restore(old)
}
