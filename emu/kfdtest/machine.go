// Package kfdtest implements a fake machine with AMD's compute driver behind [kfd.Sys],
// for tests without hardware: fake processes, threads, ptrace, descriptors and signals,
// and a driver that follows the rules of the real one.
//
// A Machine never touches the real driver. The rules are those of package driver, as read
// from the driver's source. They were not compared with AMD hardware.
//
// # Use
//
//	m := kfdtest.New(kfdtest.Config{Profile: "6.12", Nodes: []driver.Node{{ID: 7, GFX: 90402}}})
//	job := m.Spawn()
//	fd, err := job.Main().StartRuntime()
//	id, err := job.Main().CreateQueue(fd, 7, kfd.QueueTypeComputeAQL)
//	daemon := m.Spawn()
//	err = daemon.Main().Seize(job.PID())
//	device, err := kfd.OpenWith(daemon.Main(), kfd.DevicePath)
//
// A call that waits in the real driver blocks its goroutine, in a way that synctest
// recognizes, so a Machine works in a bubble. Outside of one use [Machine.Await]. Nothing
// sleeps. Only the timeout of WAIT_EVENTS and GET_CLOCK_COUNTERS depend on the clock, that
// of package time.
//
// # What is not faked
//
// GPU memory is only counted: SVM and memory of the process (AllocUserptr) accept any
// address as mapped, nothing can be mapped at an mmap offset, host memory has no limit, and
// AVAILABLE_MEMORY does not subtract the driver's page tables. CREATE_QUEUE acquires the VM
// if the process has not, and then accepts any memory, as UPDATE_QUEUE does; if the process
// has none, it acquires those of all GPUs, as ROCm's runtime does at its start. ACQUIRE_VM
// accepts any descriptor. A signal event is signalled by its ID: its slot in the event page is neither
// read nor written. No file is a dma-buf, and EXPORT_DMABUF returns ENOMEM.
// GET_QUEUE_WAVE_STATE finds no waves. The CRIU operations that copy return ENOSYS, which
// the driver never does. ptrace records tracers and stops no thread.
package kfdtest

import (
	"context"
	"fmt"
	"sync"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Config describes a Machine.
type Config struct {
	// Profile is the driver: a name of [driver.Profiles], or [driver.KmapProfile].
	Profile string
	// Nodes are the GPU nodes. There may be no node.
	Nodes []driver.Node
	// NoHWS is the module parameter sched_policy=2: no debugging.
	NoHWS bool
	// Hardware, if not nil, carries out the steps of the hardware that no Fault selects, and
	// returns their results. Queue, if not nil, is driver.Config.Queue. Both are called with
	// the driver's lock held: they must not call the Machine.
	Hardware func(driver.Step) driver.Outcome
	Queue    func(q driver.MappedQueue, created bool)
	// Oops and OwnVMs are those of driver.Config.
	Oops   func(what string)
	OwnVMs bool
}

// Machine is a fake machine. Several goroutines may call its methods, and those of its
// processes and threads, at once. Of the driver's methods, tests use those that say what it
// knows and what the hardware does; threads make its calls.
type Machine struct {
	*driver.Driver
	hardware func(driver.Step) driver.Outcome

	// mu guards the fake operating system: the fields below, of every process, thread and
	// file. It may be taken while the driver's lock is held; the driver must not be called
	// while it is held.
	mu      sync.Mutex
	lastID  int32
	started uint64
	inodes  int
	threads map[int32]*Thread
	procs   map[int32]*Process
	self    *Process
	calls   []*Call
	faults  []*Injection
}

// firstID is above the pids of a real kernel (PID_MAX_LIMIT).
const firstID = 1<<22 + 1

// New returns a machine whose only process is Self. It panics if the profile is unknown,
// or if two nodes have the same ID.
func New(cfg Config) *Machine {
	ids := map[gpreempt.GPUID]bool{}
	for _, n := range cfg.Nodes {
		if n.ID == 0 || ids[n.ID] {
			panic(fmt.Sprintf("kfdtest: node ID %v is zero or not unique", n.ID))
		}
		ids[n.ID] = true
	}
	m := &Machine{hardware: cfg.Hardware, lastID: firstID - 1, threads: map[int32]*Thread{}, procs: map[int32]*Process{}}
	d, err := driver.New(driver.Config{Profile: cfg.Profile, Nodes: cfg.Nodes, NoHWS: cfg.NoHWS, Queue: cfg.Queue, Oops: cfg.Oops, OwnVMs: cfg.OwnVMs}, m.step)
	if err != nil {
		panic(fmt.Sprintf("kfdtest: %v", err))
	}
	m.Driver = d
	m.self = m.newSelf()
	return m
}

// Spawn starts a process with one thread, no open descriptor, every capability, and a pid
// that no real process has.
func (m *Machine) Spawn() *Process {
	defer m.lock()()
	return m.spawn(m.newID())
}

// SpawnAt starts a process with the pid of a dead one, as a kernel does eventually. It
// panics if the process with that pid is not dead.
func (m *Machine) SpawnAt(pid int32) *Process {
	defer m.lock()()
	if t := m.threads[pid]; t != nil && !t.p.dead {
		panic(fmt.Sprintf("kfdtest: pid %d is in use", pid))
	}
	return m.spawn(pid)
}

// Self returns the process that runs the test. Each call of its main thread is one of the
// OS thread that makes it: tracing that a goroutine begins belongs to the OS thread that it
// is locked to, and ends with that thread. Descriptors that are not the Machine's are
// real: the real kernel reads, writes and closes them, and opens other files, and one
// passed to ENABLE is duplicated and written to. No call waits for a real pipe; use the
// threads of a Spawn for that.
func (m *Machine) Self() *Process { return m.self }

// Await waits until cond returns true, or until ctx is done, and then returns the cause.
// It calls cond after each change of the machine, and sometimes without a change. cond may
// call the machine. In a bubble, synctest.Wait is simpler.
func (m *Machine) Await(ctx context.Context, cond func() bool) error {
	defer context.AfterFunc(ctx, m.Wake)()
	if m.Driver.Await(cond, func() bool { return ctx.Err() != nil }) {
		return nil
	}
	return context.Cause(ctx)
}

// GPU returns the state of a GPU node. It panics if there is no such node.
func (m *Machine) GPU(id gpreempt.GPUID) driver.GPUState {
	g, ok := m.Driver.GPU(id)
	if !ok {
		panic(fmt.Sprintf("kfdtest: unknown GPU %v", id))
	}
	return g
}

// WaitsIn returns the kernel function in which a thread waits for the mutex of a process,
// as /proc/TID/wchan shows it; "" for one that waits for anything else.
func (m *Machine) WaitsIn(tid int) string {
	unlock := m.lock()
	t := m.threads[int32(tid)]
	unlock()
	if t == nil {
		return ""
	}
	return m.Driver.WaitsIn(t)
}

// lock takes mu and returns the function that releases it.
func (m *Machine) lock() (unlock func()) {
	m.mu.Lock()
	return m.mu.Unlock
}

// newID returns an ID that no thread has had. mu is held.
func (m *Machine) newID() int32 {
	m.lastID++
	return m.lastID
}

// spawn creates a process. mu is held.
func (m *Machine) spawn(pid int32) *Process {
	m.started++
	p := &Process{
		m: m, pid: pid, inside: pid, start: m.started, mm: new(mm), fds: map[int]*descriptor{}, firstFD: 3,
		caps: map[driver.Capability]bool{driver.CapSysPtrace: true, driver.CapSysAdmin: true, driver.CapCheckpointRestore: true},
	}
	p.main = p.newThread(pid)
	m.procs[pid] = p
	return p
}
