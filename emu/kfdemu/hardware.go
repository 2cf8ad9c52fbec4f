package kfdemu

import (
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/engine"
	"github.com/gpreempt/gpreempt/emu/gpumodel"
	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// hardware is what the emulator knows of the modelled GPUs besides their board.
type hardware struct {
	*gpumodel.Board

	mu sync.Mutex // guards all below
	// doorbells releases the doorbell of a queue, by serial.
	doorbells map[uint64]func() error
	// ending: the driver still has processes whose address space has gone.
	ending bool
}

// step does a step of the driver's on the modelled GPUs, with the faults that match it, and
// takes the modelled time. The driver's lock is held.
func (e *Emulator) step(s driver.Step) driver.Outcome {
	began := time.Now()
	fault := e.faults.forStep(s)
	reportStep := func(errno string) {
		v := Event{
			Kind: EventStep, Op: string(s.Kind), PID: s.Caller, Target: s.Process, GPU: s.GPU, Errno: errno,
			Took: float64(time.Since(began)) / float64(time.Microsecond),
		}
		if s.Queue != kfdabi.NoQueue {
			v.Queue = &s.Queue
		}
		e.report(v)
	}
	var held atomic.Bool
	held.Store(true)
	// end is called with the machine when that is locked, otherwise with nil.
	end := func(m *gpumodel.Machine) {
		if task, ok := s.Task.(*Task); ok && s.Op != "" && m != nil {
			task.stepped(m)
		}
		held.Store(false)
		e.askWake()
	}
	outcome := driver.Outcome{Held: held.Load}
	if fault != nil {
		e.report(Event{Kind: EventFault, Op: string(s.Kind), PID: s.Caller, Target: s.Process, GPU: s.GPU, Errno: errnoName(fault.Errno)})
		if fault.Do != nil {
			fault.Do()
		}
		if fault.Reset != nil {
			if outcome.Stuck = *fault.Reset; outcome.Stuck.PID == 0 {
				outcome.Stuck.PID = s.Process
			}
		}
		if outcome.Errno = fault.Errno; outcome.Errno != 0 {
			// The queues stay where they are.
			fault.later(func() { reportStep(errnoName(fault.Errno)); end(nil) })
			return outcome
		}
	}
	done := func(m *gpumodel.Machine) {
		if fault != nil && (fault.Delay > 0 || fault.Until != nil) {
			fault.later(func() { reportStep(""); end(nil) })
			return
		}
		reportStep("")
		end(m)
	}
	if err := e.gpus.Step(s, done); err != nil {
		e.trouble("do to the modelled GPU what the driver does", err)
		done(nil)
	}
	return outcome
}

// later calls fn when the step has lasted as long as the fault says.
func (f *Fault) later(fn func()) {
	if f.Until == nil {
		time.AfterFunc(f.Delay, fn)
		return
	}
	go func() {
		<-f.Until
		fn()
	}()
}

// queue adds a queue to the hardware and the engine, or removes it.
// The driver's lock is held.
func (e *Emulator) queue(q driver.MappedQueue, born bool) {
	e.gpus.mu.Lock()
	defer e.gpus.mu.Unlock()
	if born {
		e.trouble("make a queue known to the modelled GPU", e.attach(q))
	} else {
		e.detach(q)
	}
	// Now, because the next queue may have the same id.
	e.trouble("write the files of a process", e.tree.Processes(q.PID))
}

// attach needs gpus.mu.
func (e *Emulator) attach(q driver.MappedQueue) error {
	space := q.MM.(*Space)
	if err := e.startProcess(space); err != nil {
		return err
	}
	ref, err := e.gpus.AttachQueue(q)
	if err != nil {
		return err
	}
	e.report(Event{Kind: EventQueue, PID: q.PID, GPU: q.GPU, Queue: &q.ID})
	doorbell, release := e.files.doorbell(space, q.GPU, q.Doorbell)
	e.gpus.doorbells[q.Serial] = release
	if doorbell == nil {
		return nil // the queue exists, and its packets are not executed
	}
	return e.engine.Add(engine.Queue{
		Serial: q.Serial, Ref: ref, Type: gpumodel.QueueType(q.Type), AQL: q.Type == kfd.QueueTypeComputeAQL,
		Ring: q.Ring, RingBytes: q.Size, Read: q.Read, Write: q.Write, Doorbell: doorbell, Memory: space,
		Interrupt: func(event uint32) { e.driver.SignalEvent(space, event) },
	})
}

// detach needs gpus.mu.
func (e *Emulator) detach(q driver.MappedQueue) {
	if _, known := e.gpus.Queue(q.Serial); !known {
		return
	}
	e.engine.Remove(q.Serial)
	if release := e.gpus.doorbells[q.Serial]; release != nil {
		e.trouble("unmap doorbells", release())
	}
	delete(e.gpus.doorbells, q.Serial)
	e.trouble("have the modelled GPU forget a queue", e.gpus.DetachQueue(q.Serial))
	e.report(Event{Kind: EventQueueEnd, PID: q.PID, GPU: q.GPU, Queue: &q.ID})
}

// startProcess makes a process known to the hardware. One with the key of another that is
// known is what that was before it executed a program, and is being taken down: then
// another settle follows.
func (e *Emulator) startProcess(space *Space) error {
	key := space.Key()
	isNew, err := e.gpus.StartProcess(space, gpumodel.ProcSpec{PID: key.PID, Start: key.Start}, nil)
	if isNew {
		e.report(Event{Kind: EventProcess, PID: key.PID})
	}
	return err
}

// settle updates the modelled hardware and the files to the driver's processes; see queue
// for queues. It is called before a call that changed the processes is answered.
func (e *Emulator) settle() {
	e.settling.Lock()
	defer e.settling.Unlock()
	gone := e.gpus.Processes()
	// A process that is made meanwhile is not in gone, and stays.
	states := e.driver.Processes()
	changed, ending := false, false
	vms := map[int32][]gpreempt.GPUID{}
	e.gpus.mu.Lock()
	for _, p := range states {
		space, ok := p.MM.(*Space)
		if !ok {
			ending = true
			if p.Secondary || !slices.ContainsFunc(states, func(o driver.ProcessState) bool { return o.PID == p.PID && o.MM != nil }) {
				// It and its queues are known until the driver releases them.
				maps.DeleteFunc(gone, func(mm driver.MM, _ bool) bool { return mm.(*Space).PID() == p.PID })
				continue
			}
			// It has executed a program that opened the driver, too: the model knows that one only.
			for _, q := range p.Queues {
				e.detach(driver.MappedQueue{QueueState: q, PID: p.PID})
			}
			continue
		}
		if !p.Secondary {
			vms[p.PID] = p.VMs
		}
		if !gone[space] {
			changed = true
		}
		delete(gone, space)
		e.trouble("make a process known to the modelled GPU", e.startProcess(space))
	}
	for mm := range gone {
		changed = true
		e.trouble("have the modelled GPU forget a process", e.gpus.EndProcess(mm))
		e.report(Event{Kind: EventProcessEnd, PID: mm.(*Space).PID()})
	}
	e.gpus.ending = ending
	e.gpus.mu.Unlock()
	if changed {
		e.trouble("write the files of processes", e.tree.Processes())
	}
	e.trouble("write the files about VMs", e.tree.VMs(vms))
}

// anyEnding reports whether another settle is needed for processes that end.
func (h *hardware) anyEnding() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.ending
}

// gpuFault is called when a queue makes its GPU use unmapped memory.
func (e *Emulator) gpuFault(serial, address uint64) {
	ref, _ := e.gpus.Queue(serial)
	e.report(Event{Kind: EventGPUFault, PID: ref.Process.PID, Queue: &ref.ID, Address: address})
}

// The time between two sweeps, the least time between two writes of the files about the GPUs,
// and that between two writes of the positions of queues in hardware slots alone.
const (
	sweepPeriod = 2 * time.Millisecond
	movesPeriod = 20 * time.Millisecond
	slotsPeriod = 100 * time.Millisecond
)

// followHost finds processes that ended or executed another program, and updates
// debugfs.
func (e *Emulator) followHost() {
	tick := time.NewTicker(sweepPeriod)
	defer tick.Stop()
	var moves, slots time.Time
	var moved uint64
	for {
		select {
		case <-tick.C:
		case <-e.over:
			return
		}
		e.sweep()
		if e.gpus.anyEnding() {
			e.settle()
		}
		now := time.Now()
		if now.Sub(moves) < movesPeriod {
			continue
		}
		moves = now
		var n uint64
		e.rt.Do(func(m *gpumodel.Machine) { n = m.Moves() })
		if n != moved {
			moved = n
			slots = now
			e.trouble("write debugfs", e.tree.Debugfs("mqds", "hqds"))
		} else if now.Sub(slots) >= slotsPeriod && e.gpus.QueueCount() > 0 {
			slots = now
			e.trouble("write debugfs", e.tree.Debugfs("hqds"))
		}
	}
}

// WriteDebugfs writes the files in debugfs now, for a test that reads them directly after a change.
// Otherwise they are written once in the periods above, on a busy host later.
func (e *Emulator) WriteDebugfs() error { return e.tree.Debugfs() }

// sweep finds address spaces that have ended and files that nobody has open, and releases
// them. It does not wait for that, since the driver may have to wait for the hardware. A
// process ends, or executes a program, before its files are closed: so files are looked at
// first, and released last.
func (e *Emulator) sweep() {
	e.sweeping.Lock()
	defer e.sweeping.Unlock()
	closed := e.files.takeClosed()
	for _, space := range e.host.Sweep() {
		over := e.ending.begin(space)
		e.workers.Go(func() {
			defer over()
			e.ending.awaitCalls(space)
			e.driver.MMReleased(space.Leader(), space)
			e.driver.Work()
			e.settle()
		})
	}
	for _, f := range closed {
		over := e.ending.begin(f)
		e.workers.Go(func() {
			defer over()
			e.ending.awaitOne(f.space)
			e.ending.awaitCalls(f)
			f.release(e.driver)
			e.driver.Work()
			e.trouble("close an emulated file", e.files.remove(f))
			e.settle()
		})
	}
}
