// Package kfdrules hides what AMD's compute driver decides: the order of its
// checks, its errnos and the states its processes, queues and GPUs go through, as
// one deterministic machine without an operating system, shared by the fake of
// package kfdtest and the emulator.
//
// The rules were read from the driver's source (amdkfd of Linux 6.12.107, 6.12.117
// and 7.2.13); functions named in comments are found there. No hardware was asked.
package driver

import (
	"sync"
	"syscall"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Driver is the driver of one machine. Its methods may be called by several
// goroutines at once; one that has to wait as the driver would blocks its caller.
type Driver struct {
	cfg  Config
	prof profile
	// hook is asked before each step of the hardware.
	hook func(Step) Outcome

	// mu guards all below, and what hangs off it. changed is told of every change
	// that somebody may wait for.
	mu      sync.Mutex
	changed *sync.Cond
	gpus    []*gpu
	// procs are the processes, the oldest first; dying those of them that no
	// reference holds, which a worker takes down.
	procs, dying []*process
	// walkers counts debuggers at their end that walk through procs.
	walkers int
	// puts are files to let go of once the lock is given back.
	puts []EventFile
	// changes counts them.
	changes uint64
	// waiting has the calls that wait, and whether a signal ends it.
	waiting map[*call]bool
	// eventWaits are those of them that wait for events. They look again when an event
	// changes that they wait for, and not at every change of the driver's.
	eventWaits map[*eventWait]bool
	// locked counts the resets under way (kfd_locked).
	locked int
	// serial is the last queue's.
	serial uint64
	// events stands in for Config.Clock where that was nil: it counts SMI events, in
	// nanoseconds.
	countEvents bool
	events      int64
}

// errno is 0 or why a call failed.
type errno = syscall.Errno

// Step is one thing the driver is about to do to a GPU.
type Step struct {
	Kind StepKind
	GPU  gpreempt.GPUID
	// Op is the call under way, "" for work of the driver's own: the end of a
	// process.
	Op Op
	// Caller is the process that makes the call, 0 for the driver's own work.
	Caller int32
	// Process is the one it is done for or to, if it is one; Queue likewise,
	// NoQueue for none.
	Process int32
	Queue   uint32
	// Queues are those that will be in the runlist of a StepMap, in the driver's order,
	// or the one of a StepAdd or StepRemove; of other steps none.
	Queues []MappedQueue
}

// StepKind says what kind of step.
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
	// StepShaderDebugger tells MES how a process is debugged
	// (kfd_dbg_set_mes_debug_mode).
	StepShaderDebugger StepKind = "set shader debugger"
)

// Outcome is how a step ends.
type Outcome struct {
	// Held, if not nil, is asked until it returns false; meanwhile the step takes its
	// time, with the locks the driver holds then. Call Driver.Wake when its answer
	// changes.
	Held func() bool
	// Errno is 0 or what went wrong. ETIME of an unmap is a GPU that does not answer.
	Errno syscall.Errno
}

// New returns the driver of cfg. hook, if not nil, is asked before each step of the
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

// Wake has every wait look again at what it waits for. The operating system calls
// it after it changed anything a Task, an EventFile or an Outcome tells.
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

// Await waits until cond holds, or else stop, and reports whether cond does. Both are
// asked after every change and every Wake.
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

// note tells of a change.
func (d *Driver) note() {
	d.changes++
	d.changed.Broadcast()
}

// mutex is a lock of the driver's, which a call keeps while it waits.
type mutex struct{ held bool }

func (d *Driver) lock(c *call, m *mutex) {
	d.wait(c, func() bool { return !m.held })
	m.held = true
}

func (d *Driver) unlock(m *mutex) {
	m.held = false
	d.note()
}

// wait waits until done, whatever signals come.
func (d *Driver) wait(c *call, done func() bool) { d.sleep(c, false, done) }

// waitInterruptible waits until done, or until a signal is pending, which gives
// false; what is done already does not wait.
func (d *Driver) waitInterruptible(c *call, done func() bool) bool { return d.sleep(c, true, done) }

func (d *Driver) sleep(c *call, interruptible bool, done func() bool) bool {
	if done() {
		return true
	}
	d.waiting[c] = interruptible
	defer delete(d.waiting, c)
	d.note() // that somebody waits is a change, too
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
