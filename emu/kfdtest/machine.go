// Package kfdtest hides a whole machine with AMD's compute driver behind
// [kfd.Sys]: processes, threads, ptrace, descriptors and signals that are faked,
// and a driver that keeps to the rules of the real one, for tests without hardware.
//
// A Machine never touches the real driver. The rules are those of package kfdrules,
// as read from the driver's source; nothing here was compared with AMD hardware.
//
// # Use
//
//	m := kfdtest.New(kfdtest.Config{Profile: "6.12", Nodes: []kfdtest.Node{{ID: 7, GFX: 90402}}})
//	job := m.Spawn()
//	fd, err := job.Main().StartRuntime()
//	id, err := job.Main().CreateQueue(fd, 7, kfd.QueueTypeComputeAQL)
//	daemon := m.Spawn()
//	err = daemon.Main().Seize(job.PID())
//	device, err := kfd.OpenWith(daemon.Main(), kfd.DevicePath)
//
// A call that the driver would make wait blocks its goroutine. Everything waits on
// what synctest knows, so a Machine made in a bubble works there; a Machine outside
// of one is waited for with [Machine.Await]. Nothing sleeps, and only the timeout of
// WAIT_EVENTS and GET_CLOCK_COUNTERS have to do with the clock, that of package time.
//
// # What is not faked
//
// GPU memory is counted, and nothing is behind it: CREATE_QUEUE and UPDATE_QUEUE, SVM
// and memory of the process (AllocUserptr) take any address for mapped, no mmap offset
// leads anywhere, memory of the host has no limit, and what the driver keeps for page
// tables is not taken off AVAILABLE_MEMORY. CREATE_QUEUE acquires the VM if the process
// has not, and ACQUIRE_VM takes any descriptor. A signal event is signalled by its
// number alone: its slot in the event page is neither read nor written. No file is a
// dma-buf, and EXPORT_DMABUF says that there is no room for one. GET_QUEUE_WAVE_STATE
// finds no waves. The CRIU operations that copy answer ENOSYS, which the driver never
// does. ptrace knows who traces whom and stops nobody.
package kfdtest

import (
	"context"
	"fmt"
	"sync"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// Config says what machine it is.
type Config struct {
	// Profile is the driver: a name of [Profiles].
	Profile string
	// Nodes are the GPU nodes, none is allowed.
	Nodes []Node
	// NoHWS is the module parameter sched_policy=2: no debugging.
	NoHWS bool
}

type (
	// Node is a GPU node. From GFX 110000 on the firmware schedules queue by queue
	// (MES). gfx90a, gfx942, gfx950 and those with MES can have several processes
	// debugged at a time, the others one.
	Node = driver.Node
	// ProcessState is what the driver knows of a process.
	ProcessState = driver.ProcessState
	// QueueState is what it knows of a queue, and whether that runs.
	QueueState = driver.QueueState
	// GPUState is the state of a GPU node.
	GPUState = driver.GPUState
	// MemoryFault is what a GPU says of an address it could not use.
	MemoryFault = driver.MemoryFault
	// Allocation is GPU memory of a process.
	Allocation = driver.Allocation
	// Op names a call: "open", "CREATE_QUEUE", "DBG_TRAP SUSPEND_QUEUES",
	// "CRIU_OP UNPAUSE".
	Op = driver.Op
	// Capability is a capability a process may lack.
	Capability = driver.Capability
)

// The capabilities that are asked for.
const (
	CapSysPtrace         = driver.CapSysPtrace
	CapSysAdmin          = driver.CapSysAdmin
	CapCheckpointRestore = driver.CapCheckpointRestore
)

// DefaultGrace is what GPUState has for a grace period that was not set.
const DefaultGrace = driver.DefaultGrace

// OpOpen is opening the driver.
const OpOpen = driver.OpOpen

// TrapOp names the call DBG_TRAP op.
func TrapOp(op kfd.TrapOp) Op { return driver.TrapOp(op) }

// CRIUOp names the call CRIU_OP op.
func CRIUOp(op kfd.CRIUOp) Op { return driver.CRIUOp(op) }

// Profiles are the names of Config.Profile: those of package kfd, and "6.12.117",
// which differs from "6.12.103" in three fixes.
func Profiles() []string { return driver.Profiles() }

// Machine is a machine. Its methods, and those of its processes and threads, may be
// called by several goroutines at once.
type Machine struct {
	driver *driver.Driver

	// mu guards all that is faked of the operating system: the fields below, of
	// every process, thread and file. It may be taken while the driver's lock is
	// held, and never the other way round.
	mu      sync.Mutex
	lastID  int32
	born    uint64
	inodes  int
	threads map[int32]*Thread
	procs   map[int32]*Process
	self    *Process
	calls   []*Call
	faults  []*Injection
}

// firstID is above the pids of a real kernel (PID_MAX_LIMIT).
const firstID = 1<<22 + 1

// New returns a machine with no process but Self. It panics if it knows no such
// profile, or if two nodes have the same id.
func New(cfg Config) *Machine {
	ids := map[gpreempt.GPUID]bool{}
	for _, n := range cfg.Nodes {
		if n.ID == 0 || ids[n.ID] {
			panic(fmt.Sprintf("kfdtest: node id %v is zero or there twice", n.ID))
		}
		ids[n.ID] = true
	}
	m := &Machine{lastID: firstID - 1, threads: map[int32]*Thread{}, procs: map[int32]*Process{}}
	driver, err := driver.New(driver.Config{Profile: cfg.Profile, Nodes: cfg.Nodes, NoHWS: cfg.NoHWS}, m.step)
	if err != nil {
		panic(fmt.Sprintf("kfdtest: %v", err))
	}
	m.driver = driver
	m.self = m.newSelf()
	return m
}

// Spawn starts a process: one thread, no descriptor open, every capability, and a
// pid no real process has.
func (m *Machine) Spawn() *Process {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.spawn(m.newID())
}

// SpawnAt starts a process with the pid of a dead one, as a kernel does sooner or
// later. It panics if that one lives.
func (m *Machine) SpawnAt(pid int32) *Process {
	m.mu.Lock()
	defer m.mu.Unlock()
	if t := m.threads[pid]; t != nil && !t.p.dead {
		panic(fmt.Sprintf("kfdtest: pid %d is in use", pid))
	}
	return m.spawn(pid)
}

// Self is the process that runs the test: see [Process.Sys].
func (m *Machine) Self() *Process { return m.self }

// Await waits until cond holds, asking again after each change of the machine, or
// until ctx is done, which returns its cause. cond may call the machine, and may be
// asked more often than there are changes. In a bubble, synctest.Wait is simpler.
func (m *Machine) Await(ctx context.Context, cond func() bool) error {
	defer context.AfterFunc(ctx, m.driver.Wake)()
	if m.driver.Await(cond, func() bool { return ctx.Err() != nil }) {
		return nil
	}
	return context.Cause(ctx)
}

// GPU returns the state of a GPU node. It panics if there is no such node.
func (m *Machine) GPU(id gpreempt.GPUID) GPUState {
	g, ok := m.driver.GPU(id)
	if !ok {
		panic(fmt.Sprintf("kfdtest: no GPU %v", id))
	}
	return g
}

// Processes returns the state of each process the driver has, the oldest first;
// those that died stay while something holds them.
func (m *Machine) Processes() []ProcessState { return m.driver.Processes() }

// StartReset begins a reset of the GPU: what the driver does with GPUs fails with
// EIO, /dev/kfd cannot be opened, and every process's queues are evicted, on all
// GPUs.
func (m *Machine) StartReset(id gpreempt.GPUID) { m.driver.StartReset(id) }

// EndReset ends it. Queues stay evicted: after a reset processes do not go on.
func (m *Machine) EndReset(id gpreempt.GPUID) { m.driver.EndReset(id) }

// newID returns an id that no thread has had. mu is held.
func (m *Machine) newID() int32 {
	m.lastID++
	return m.lastID
}

// spawn makes a process. mu is held.
func (m *Machine) spawn(pid int32) *Process {
	m.born++
	p := &Process{
		m: m, pid: pid, inside: pid, start: m.born, mm: new(mm), fds: map[int]*descriptor{}, firstFD: 3,
		caps: map[Capability]bool{CapSysPtrace: true, CapSysAdmin: true, CapCheckpointRestore: true},
	}
	p.main = p.newThread(pid)
	m.procs[pid] = p
	return p
}
