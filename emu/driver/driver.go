// Package driver implements the rules of AMD's compute driver: the order of its checks,
// its errnos, and the states of its processes, queues and GPUs. It is one deterministic
// state machine without an operating system, shared by the fake of package kfdtest and
// the emulator of package kfdemu.
//
// The rules were read from the driver's source (amdkfd of Linux 6.12.107, 6.12.117,
// 7.2.13 and 7.3.4); the comments name its functions. They were not compared with hardware.
package driver

import (
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Driver is the driver of one machine. Several goroutines may call its methods at once. A
// call that waits in the real driver blocks its caller.
type Driver struct {
	cfg  Config
	prof profile
	// hook is called before each step of the hardware.
	hook func(Step) Outcome
	// svmUsed: there was a range of shared memory.
	svmUsed atomic.Bool

	// mu guards all fields below and what they refer to. changed is signalled at each
	// change that a call may wait for.
	mu      sync.Mutex
	changed *sync.Cond
	gpus    []*gpu
	// procs are the processes, the oldest first. dying are those without a reference,
	// which a worker removes.
	procs, dying []*process
	// walkers counts exiting debuggers that walk through procs.
	walkers int
	// puts are files to release after the lock is released.
	puts []EventFile
	// changes counts the changes.
	changes uint64
	// waiting has the calls that wait, and whether a signal ends the wait.
	waiting map[*call]bool
	// eventWaits are those that wait for events. They check again when one of their
	// events changes, and not at every change.
	eventWaits map[*eventWait]bool
	// locked counts the resets under way (kfd_locked).
	locked int
	// serial is that of the last queue.
	serial uint64
	// events is the time of SMI events where Config.Clock was nil: it advances by a
	// microsecond with each.
	countEvents bool
	events      int64
}

// errno is 0 or why a call failed.
type errno = syscall.Errno

// Step is one operation of the driver on a GPU, before it is done.
type Step struct {
	Kind StepKind
	GPU  gpreempt.GPUID
	// Op is the call under way, "" for the driver's own work: the end of a process.
	Op Op
	// Task makes the call and Caller is its process, nil and 0 for the driver's own work.
	Task   Task
	Caller int32
	// Process and Queue are what the step is about, if it is about one: otherwise 0 and
	// kfdabi.NoQueue.
	Process int32
	Queue   uint32
	// Queues are the queues in the runlist of a StepMap, in the driver's order, or the
	// one of a StepAdd or StepRemove. Other steps have none.
	Queues []MappedQueue
	// Grace is the grace period of a StepUnmap, as GPUState.GraceNow has it.
	Grace uint32
}

// StepKind is the kind of a Step.
type StepKind string

// The steps.
const (
	// StepUnmap takes all queues of all processes off a GPU (unmap_queues_cpsch).
	StepUnmap StepKind = "unmap"
	// StepMap puts the runlist on a GPU (map_queues_cpsch).
	StepMap StepKind = "map"
	// StepAdd and StepRemove are about one queue (add_queue_mes, remove_queue_mes).
	StepAdd    StepKind = "add"
	StepRemove StepKind = "remove"
	// StepShaderDebugger informs MES how a process is debugged
	// (kfd_dbg_set_mes_debug_mode).
	StepShaderDebugger StepKind = "set shader debugger"
)

// Outcome is the result of a step.
type Outcome struct {
	// Held, if not nil, is called until it returns false. Until then the step is not
	// over, and the driver keeps the locks that it holds. Call Driver.Wake when its
	// result changes.
	Held func() bool
	// Errno is 0 or the error. ETIME of an unmap is a GPU that does not answer, that of a
	// StepRemove is MES that does not.
	Errno syscall.Errno
	// Stuck is a queue that does not leave the GPU at a StepUnmap: the driver resets it, or
	// the GPU. What its waves had done since they were last saved is lost on real hardware,
	// and not here.
	Stuck QueueOf
}

// QueueOf is a queue of a process. No queue has the zero value.
type QueueOf struct {
	PID int32
	ID  uint32
}

// New returns the driver of cfg. hook, if not nil, is called before each step of the
// hardware, with the driver's lock held: it must not call the driver.
func New(cfg Config, hook func(Step) Outcome) (*Driver, error) {
	prof, err := profileOf(cfg.Profile)
	if err != nil {
		return nil, err
	}
	countEvents := cfg.Clock == nil
	if countEvents {
		cfg.Clock = clocksSince(time.Now())
	}
	if cfg.After == nil {
		cfg.After = afterFunc
	}
	if cfg.Offsets == nil {
		cfg.Offsets = &driverOffsets
	}
	d := &Driver{cfg: cfg, prof: prof, hook: hook, countEvents: countEvents, waiting: map[*call]bool{}, eventWaits: map[*eventWait]bool{}}
	d.changed = sync.NewCond(&d.mu)
	for _, n := range cfg.Nodes {
		n.XCCs = max(n.XCCs, 1)
		d.gpus = append(d.gpus, &gpu{
			node: n, mapped: map[*queue]bool{}, GPUState: GPUState{ID: n.ID, GraceNow: DefaultGrace, Cycled: map[int32]int{}},
		})
	}
	return d, nil
}

// Wake makes each waiting call check its condition again. The operating system calls it
// after a change of what a Task, an EventFile or an Outcome reports.
func (d *Driver) Wake() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for w := range d.eventWaits {
		w.cond.Signal()
	}
	d.note()
}

// Waiting reports whether t waits inside a call, and whether a signal would end it.
func (d *Driver) Waiting(t Task) (waiting, interruptible bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for c, by := range d.waiting {
		if c.task == t {
			return true, by
		}
	}
	return false, false
}

// Await waits until cond or stop holds, and reports whether cond does. Both are called
// after every change and every Wake.
func (d *Driver) Await(cond, stop func() bool) bool {
	for {
		d.mu.Lock()
		seen := d.changes
		d.mu.Unlock()
		if cond() {
			return true
		}
		if stop() {
			return false
		}
		d.mu.Lock()
		for d.changes == seen {
			d.changed.Wait()
		}
		d.mu.Unlock()
	}
}

// note records a change and wakes the calls that wait for one.
func (d *Driver) note() {
	d.changes++
	d.changed.Broadcast()
}

// mutex is a lock of the driver, which a call keeps while it waits.
type mutex struct{ held bool }

func (d *Driver) lock(c *call, m *mutex) {
	d.wait(c, func() bool { return !m.held })
	m.held = true
}

// hold takes m and returns the function that releases it.
func (d *Driver) hold(c *call, m *mutex) (unlock func()) {
	d.lock(c, m)
	return func() { d.unlock(m) }
}

func (d *Driver) unlock(m *mutex) {
	m.held = false
	d.note()
}

// wait waits until done returns true. Signals do not end it.
func (d *Driver) wait(c *call, done func() bool) { d.sleep(c, false, done) }

// waitInterruptible waits until done returns true, or until a signal is pending, and
// reports whether done did.
func (d *Driver) waitInterruptible(c *call, done func() bool) bool { return d.sleep(c, true, done) }

// begin records that c waits.
func (d *Driver) begin(c *call, interruptible bool) {
	d.waiting[c] = interruptible
	if d.cfg.Waits != nil && c.task != nil {
		d.cfg.Waits(c.task)
	}
}

func (d *Driver) sleep(c *call, interruptible bool, done func() bool) bool {
	if done() {
		return true
	}
	d.begin(c, interruptible)
	defer delete(d.waiting, c)
	d.note() // that a call waits is a change, too
	for {
		if interruptible && c.task != nil && c.task.Interrupted() {
			return false
		}
		d.changed.Wait()
		if done() {
			return true
		}
	}
}
