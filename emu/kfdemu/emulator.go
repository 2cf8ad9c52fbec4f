// Package kfdemu runs unmodified programs on an emulated machine with AMD GPUs: a /dev/kfd
// that answers their real system calls by the driver's rules, GPUs that execute the
// packets on their queues, and the kernel's files about both.
//
// A supervisor receives the calls by seccomp user notification (package seccomp). Package
// driver decides, package gpumodel is the hardware, and package engine executes packets in
// the memory of the programs. The files of host implement the driver's operating system
// with real Linux processes; those of the tree are the kernel's files. Nothing here was
// compared with AMD hardware: everything is EMULATED. docs/lab/kfdemu.md says what that covers.
package kfdemu

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/engine"
	"github.com/gpreempt/gpreempt/emu/gpumodel"
	"github.com/gpreempt/gpreempt/emu/seccomp"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Config says what machine to emulate.
type Config struct {
	// Machine is a kind of GPU by its name: see gpumodel.Presets. Spec, if it has a name,
	// is one instead, for tests.
	Machine string
	Spec    gpumodel.Spec
	// GPUs is how many nodes of it there are, 1 if 0.
	GPUs int
	// Profile is the driver: one of driver.Profiles, or driver.KmapProfile. "" is 6.12.
	Profile string
	// Seed decides the jitter of modelled durations.
	Seed uint64
	// KernelTime is the duration of a kernel that does not define its own: see package engine.
	// 0 is a millisecond.
	KernelTime time.Duration
	// Shim is the program whose verb "exec" starts others under the emulator: emu/cmd/kfdemu.
	Shim string
	// Dir is an existing directory for the emulator's socket and files; "" makes one, which
	// Close removes.
	Dir string
	// Event, if not nil, is called for every event, one at a time. It must not call the
	// emulator, which waits for it.
	Event func(Event)
}

// Emulator is a running machine. Its methods may be called by several goroutines at once.
type Emulator struct {
	cfg   Config
	began time.Time
	dir   string
	undo  []func() error

	driver *driver.Driver
	host   *Host
	rt     *gpumodel.Realtime
	engine *engine.Engine
	tree   *Tree
	// child are the attributes of programs that the emulator starts.
	child *syscall.SysProcAttr

	listeners listeners
	files     files
	faults    faults
	gpus      hardware
	ending    endings
	kmsg      kmsg

	// wake asks for a call of driver.Wake, and work for one of driver.Work.
	wake    chan struct{}
	work    chan struct{}
	over    chan struct{}
	workers sync.WaitGroup
	// reporting serializes the calls of Config.Event.
	reporting sync.Mutex
	// settling serializes settle.
	settling sync.Mutex
	// sweeping serializes sweep: the ends that it found are recorded when it returns.
	sweeping sync.Mutex

	closing sync.Once
	closed  error
}

// New starts a machine without programs. The caller must Close it.
func New(cfg Config) (e *Emulator, err error) {
	if cfg.Spec.Name == "" {
		if cfg.Spec, err = gpumodel.PresetByName(cfg.Machine); err != nil {
			return nil, fmt.Errorf("kfdemu: %w", err)
		}
	}
	cfg.GPUs = max(cfg.GPUs, 1)
	if cfg.Profile == "" {
		cfg.Profile = "6.12"
	}
	if cfg.KernelTime == 0 {
		cfg.KernelTime = time.Millisecond
	}
	if err := seccomp.Supported(); err != nil {
		return nil, fmt.Errorf("kfdemu: %w", err)
	}
	e = &Emulator{
		cfg: cfg, began: time.Now(), dir: cfg.Dir, gpus: hardware{doorbells: map[uint64]func() error{}}, ending: newEndings(),
		wake: make(chan struct{}, 1), work: make(chan struct{}, 1), over: make(chan struct{}),
	}
	e.files = newFiles(&e.ending)
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("kfdemu: %w", err), e.Close())
			e = nil
		}
	}()
	if e.dir == "" {
		if e.dir, err = os.MkdirTemp("", "kfdemu-"); err != nil {
			return e, err
		}
		e.undo = append(e.undo, func() error { return os.RemoveAll(e.dir) })
	}
	if err := e.build(); err != nil {
		return e, err
	}
	return e, nil
}

// build makes the parts, the hardware first.
func (e *Emulator) build() error {
	var err error
	if e.gpus.Board, err = gpumodel.NewBoard(e.cfg.Spec, e.cfg.GPUs, e.cfg.Profile, e.cfg.Seed); err != nil {
		return err
	}
	e.rt = e.gpus.Model()
	e.undo = append(e.undo, e.gpus.Close)
	cpus, err := CPUNodes()
	if err != nil {
		return err
	}
	e.rt.Do(func(m *gpumodel.Machine) { m.SetCPUNodes(cpus) })

	if e.host, err = NewHost(e.askWake, func(err error) { e.trouble("look into a process", err) }); err != nil {
		return err
	}
	e.undo = append(e.undo, func() error { e.host.Close(); return nil }, e.files.close, e.kmsg.close)
	if e.driver, err = driver.New(e.rules(cpus), e.step); err != nil {
		return err
	}
	if e.engine, err = engine.New(e.rt, engine.Config{KernelTime: e.cfg.KernelTime, Ticks: gpuClock, OnFault: e.gpuFault}); err != nil {
		return err
	}
	e.undo = append(e.undo, e.engine.Close)
	if e.tree, err = NewTree(func() fs.FS { return e.rt.FS() }); err != nil {
		return err
	}
	e.undo = append(e.undo, e.tree.Close)
	label := fmt.Sprintf("%s x%d with the rules of %s (kfdemu)\n", e.cfg.Spec.Name, e.cfg.GPUs, e.cfg.Profile)
	if err := os.WriteFile(filepath.Join(e.tree.Dir(), emulatedFile), []byte(label), 0o444); err != nil {
		return err
	}
	if e.cfg.Profile == driver.KmapProfile {
		if err := write(e.tree.path(kmapFile), fmt.Sprintf("%d:%d\n", miscMajor, kmapMinor)); err != nil {
			return err
		}
	}
	if err := e.showTree(); err != nil {
		return err
	}
	e.workers.Go(e.followHost)
	e.workers.Go(e.doWork)
	// The driver is woken until the end: releasing processes waits for the hardware, too.
	still, asleep := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(asleep)
		e.wakeDriver(still)
	}()
	e.undo = append(e.undo, func() error {
		close(e.over)
		e.workers.Wait()
		close(still)
		<-asleep
		return nil
	}, e.listeners.close)
	server, err := seccomp.Serve(e.Socket(), e.accept, e.joinFailed)
	if err != nil {
		return err
	}
	e.undo = append(e.undo, server.Close)
	return nil
}

// emulatedFile is where programs see discovery.EmulatedFile: it says that all is emulated.
const emulatedFile = "sys/devices/virtual/kfd/kfd/emulated"

// rules describes the machine to the driver.
func (e *Emulator) rules(cpus int) driver.Config {
	return driver.Config{
		Profile: e.cfg.Profile, Nodes: e.gpus.Nodes(), CPUNodes: cpus, Clock: e.clocks, Queue: e.queue, Waits: func(t driver.Task) { t.(*Task).waits() },
		Worker:  func() { ask(e.work) },
		Mapped:  func(t driver.Task, start, last uint64) bool { return t.(*Task).mapped(start, last) },
		Offsets: e.files.offsets(e.rt.GPUs()), After: e.after,
		Log: e.print, PASID: e.gpus.PASID,
	}
}

// after calls wake after a time, unless the machine has ended or stop is called.
func (e *Emulator) after(d time.Duration, wake func()) (stop func()) {
	timer := time.AfterFunc(d, func() {
		select {
		case <-e.over:
		default:
			wake()
		}
	})
	return func() { timer.Stop() }
}

// gpuClock is the counter of the GPUs at a time of the machine: 100 MHz.
func gpuClock(at time.Duration) uint64 { return uint64(at / 10) }

func (e *Emulator) clocks() driver.Clocks {
	return driver.Clocks{
		Raw: clock(unix.CLOCK_MONOTONIC_RAW), Boot: clock(unix.CLOCK_BOOTTIME), GPU: gpuClock(e.rt.Now()),
	}
}

// Close ends the machine. The calls of programs that still run return ENOSYS.
func (e *Emulator) Close() error {
	e.closing.Do(func() {
		for _, undo := range slices.Backward(e.undo) {
			e.closed = errors.Join(e.closed, undo())
		}
	})
	return e.closed
}

// askWake asks for a call of driver.Wake. It never waits.
func (e *Emulator) askWake() { ask(e.wake) }

// ask sends, unless that was done already and is not handled yet.
func ask(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// doWork does the driver's own work. No caller does: it would wait for the hardware while the
// time of the GPUs stands still for it.
func (e *Emulator) doWork() {
	for {
		select {
		case <-e.work:
			e.driver.Work()
		case <-e.over:
			return
		}
	}
}

func (e *Emulator) wakeDriver(over <-chan struct{}) {
	for {
		select {
		case <-e.wake:
			e.driver.Wake()
		case <-over:
			return
		}
	}
}

// Socket returns the path of the socket by which programs join the machine.
func (e *Emulator) Socket() string { return filepath.Join(e.dir, "kfdemu.sock") }

// Driver returns the driver, for tests, and for evictions and resets.
func (e *Emulator) Driver() *driver.Driver { return e.driver }

// Waiting reports whether a thread waits inside the driver, and whether a signal would
// end that; one does not for a step of the hardware.
func (e *Emulator) Waiting(tid int32) (waiting, interruptible bool) {
	task, err := e.host.Task(tid)
	if err != nil {
		return false, false // the thread has ended
	}
	return e.driver.Waiting(task)
}

// GPUs describes the GPUs.
func (e *Emulator) GPUs() []gpreempt.GPU { return e.rt.GPUs() }

// Machine calls fn with the modelled hardware, as gpumodel.Realtime.Do does.
func (e *Emulator) Machine(fn func(*gpumodel.Machine)) { e.rt.Do(fn) }

// ResetGPU resets a GPU: its queues are unmapped permanently, and until meanwhile returns,
// everything that uses the GPU fails.
func (e *Emulator) ResetGPU(id gpreempt.GPUID, meanwhile func()) error {
	e.driver.StartReset(id)
	var err error
	e.rt.Do(func(m *gpumodel.Machine) { err = m.ClearGPU(id) })
	if meanwhile != nil {
		meanwhile()
	}
	e.driver.EndReset(id)
	return err
}
