package kfdemu

import (
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/engine"
	"github.com/gpreempt/gpreempt/emu/gpumodel"
	"github.com/gpreempt/gpreempt/emu/host"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// hardware is which of the driver's processes and queues the modelled GPUs know.
type hardware struct {
	mu     sync.Mutex
	procs  map[*host.Space]bool
	queues map[uint64]attached // by serial
	// ending: the driver still has processes whose address space has gone.
	ending bool
}

// attached is a queue the modelled GPU knows.
type attached struct {
	gpumodel.QueueRef
	// dropDoorbell returns its doorbell back; nil if it has none.
	dropDoorbell func() error
}

func newHardware() hardware {
	return hardware{procs: map[*host.Space]bool{}, queues: map[uint64]attached{}}
}

// step does to the modelled GPUs what the driver does to real ones, and takes the time
// that is modelled. The driver's lock is held.
func (e *Emulator) step(s driver.Step) driver.Outcome {
	began := time.Now()
	fault := e.faults.forStep(s)
	told := func(errno string) {
		v := Event{
			Kind: EventStep, Op: string(s.Kind), PID: s.Caller, Target: s.Process, GPU: s.GPU, Errno: errno,
			Took: float64(time.Since(began)) / float64(time.Microsecond),
		}
		if s.Queue != kfd.NoQueue {
			v.Queue = &s.Queue
		}
		e.tell(v)
	}
	var held atomic.Bool
	held.Store(true)
	release := func() {
		held.Store(false)
		e.askWake()
	}
	outcome := driver.Outcome{Held: held.Load}
	if fault != nil {
		e.tell(Event{Kind: EventFault, Op: string(s.Kind), PID: s.Caller, Target: s.Process, GPU: s.GPU, Errno: errnoName(fault.Errno)})
		if fault.Do != nil {
			fault.Do()
		}
		if outcome.Errno = fault.Errno; outcome.Errno != 0 {
			// The queues stay where they are.
			time.AfterFunc(fault.Delay, func() { told(errnoName(fault.Errno)); release() })
			return outcome
		}
	}
	done := func() {
		if fault != nil && fault.Delay > 0 {
			time.AfterFunc(fault.Delay, func() { told(""); release() })
			return
		}
		told("")
		release()
	}
	if err := e.drive(s, done); err != nil {
		e.trouble("do to the modelled GPU what the driver does", err)
		done()
	}
	return outcome
}

// drive has the modelled GPU do a step; done is called when it has.
func (e *Emulator) drive(s driver.Step, done func()) (err error) {
	by, refs := e.who(s)
	e.rt.Do(func(m *gpumodel.Machine) {
		switch s.Kind {
		case driver.StepUnmap:
			err = m.Unmap(s.GPU, by, done)
		case driver.StepMap:
			err = m.Map(s.GPU, by, refs, done)
		case driver.StepAdd:
			err = addOrRemove(refs, done, m.AddQueue)
		case driver.StepRemove:
			err = addOrRemove(refs, done, m.RemoveQueue)
		case driver.StepShaderDebugger:
			done()
		}
	})
	return err
}

// addOrRemove does it to the one queue there is, if the hardware knows it.
func addOrRemove(refs []gpumodel.QueueRef, done func(), do func(gpumodel.QueueRef, func()) error) error {
	if len(refs) == 0 {
		done()
		return nil
	}
	return do(refs[0], done)
}

// who returns the process a step is for, the zero key if it has gone, and the queues it
// is about.
func (e *Emulator) who(s driver.Step) (by gpreempt.ProcessKey, refs []gpumodel.QueueRef) {
	e.gpus.mu.Lock()
	defer e.gpus.mu.Unlock()
	for space := range e.gpus.procs {
		if key := space.Key(); key.PID == s.Process {
			by = key
		}
	}
	for _, q := range s.Queues {
		if known, ok := e.gpus.queues[q.Serial]; ok {
			refs = append(refs, known.QueueRef)
		}
	}
	return by, refs
}

// queue makes a queue known to the hardware and to the engine, or forgotten by them.
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
	space := q.MM.(*host.Space)
	if err := e.startProcess(space); err != nil {
		return err
	}
	ref := gpumodel.QueueRef{Process: space.Key(), ID: q.ID}
	spec := gpumodel.QueueSpec{
		ID: q.ID, GPU: q.GPU, Type: queueTypes[q.Type], PM4: q.Type == kfd.QueueTypeCompute, RingBytes: uint64(q.Size), Ring: q.Ring,
		Read: q.Read, Write: q.Write, Save: q.Ctx, SaveBytes: q.CtxSize, Doorbell: q.Doorbell, Priority: gpreempt.Priority(q.Priority),
	}
	var err error
	e.rt.Do(func(m *gpumodel.Machine) { err = m.AttachQueue(ref.Process, spec) })
	if err != nil {
		return err
	}
	e.tell(Event{Kind: EventQueue, PID: q.PID, GPU: q.GPU, Queue: &q.ID})
	doorbell, drop := e.files.doorbell(space, q.GPU, q.Doorbell)
	e.gpus.queues[q.Serial] = attached{ref, drop}
	if doorbell == nil || spec.PM4 {
		return nil // it is there, and nothing on it is executed
	}
	return e.engine.Add(engine.Queue{
		Serial: q.Serial, Ref: ref, Type: spec.Type, AQL: q.Type == kfd.QueueTypeComputeAQL,
		Ring: q.Ring, RingBytes: q.Size, Read: q.Read, Write: q.Write, Doorbell: doorbell, Memory: space,
		Interrupt: func(event uint32) { e.driver.SignalEvent(space, event) },
	})
}

// detach needs gpus.mu.
func (e *Emulator) detach(q driver.MappedQueue) {
	ref, ok := e.gpus.queues[q.Serial]
	if !ok {
		return
	}
	delete(e.gpus.queues, q.Serial)
	e.engine.Remove(q.Serial)
	if ref.dropDoorbell != nil {
		e.trouble("unmap doorbells", ref.dropDoorbell())
	}
	e.rt.Do(func(m *gpumodel.Machine) {
		if err := m.DetachQueue(ref.Process, ref.ID); err != nil {
			e.trouble("have the modelled GPU forget a queue", err)
		}
	})
	e.tell(Event{Kind: EventQueueEnd, PID: q.PID, GPU: q.GPU, Queue: &q.ID})
}

// queueTypes are the words for the uAPI's numbers.
var queueTypes = map[uint32]gpreempt.QueueType{
	kfd.QueueTypeCompute: gpreempt.QueueCompute, kfd.QueueTypeComputeAQL: gpreempt.QueueCompute,
	kfd.QueueTypeSDMA: gpreempt.QueueSDMA, kfd.QueueTypeSDMAXGMI: gpreempt.QueueSDMAXGMI,
}

// startProcess makes a process known to the hardware. It needs gpus.mu.
func (e *Emulator) startProcess(space *host.Space) (err error) {
	key := space.Key()
	for known := range e.gpus.procs {
		if known == space || known.Key() == key {
			// Another with that key is what the process was before it became another
			// program, and is being taken down: then there is a settle to come.
			return nil
		}
	}
	e.rt.Do(func(m *gpumodel.Machine) { _, err = m.StartProcess(gpumodel.ProcSpec{PID: key.PID, Start: key.Start}) })
	if err != nil {
		return err
	}
	e.gpus.procs[space] = true
	e.tell(Event{Kind: EventProcess, PID: key.PID})
	return nil
}

// settle has the modelled hardware and the files follow the driver: processes that are
// new and those that are gone; queues are followed one by one, see queue. It is called
// before the call that changed something is answered.
func (e *Emulator) settle() {
	e.settling.Lock()
	defer e.settling.Unlock()
	e.gpus.mu.Lock()
	gone := maps.Clone(e.gpus.procs)
	e.gpus.mu.Unlock()
	before := len(gone)
	// A process that is made meanwhile is not in gone, and stays.
	states := e.driver.Processes()

	e.gpus.mu.Lock()
	e.gpus.ending = false
	for _, p := range states {
		space, ok := p.MM.(*host.Space)
		if !ok { // its queues are known until the driver releases them
			maps.DeleteFunc(gone, func(s *host.Space, _ bool) bool { return s.PID() == p.PID })
			e.gpus.ending = true
			continue
		}
		delete(gone, space)
		if err := e.startProcess(space); err != nil {
			e.trouble("make a process known to the modelled GPU", err)
		}
	}
	for space := range gone {
		delete(e.gpus.procs, space)
		key := space.Key()
		e.rt.Do(func(m *gpumodel.Machine) {
			if err := m.EndProcess(key); err != nil {
				e.trouble("have the modelled GPU forget a process", err)
			}
		})
		e.tell(Event{Kind: EventProcessEnd, PID: key.PID})
	}
	same := len(gone) == 0 && len(e.gpus.procs) == before
	e.gpus.mu.Unlock()
	if !same {
		e.trouble("write the files of processes", e.tree.Processes())
	}
}

// anyEnding reports whether another settle will find processes gone.
func (h *hardware) anyEnding() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.ending
}

// gpuFault is a queue that made its GPU touch memory that is not there.
func (e *Emulator) gpuFault(serial, address uint64) {
	e.gpus.mu.Lock()
	ref := e.gpus.queues[serial]
	e.gpus.mu.Unlock()
	e.tell(Event{Kind: EventGPUFault, PID: ref.Process.PID, Queue: &ref.ID, Address: address})
}

// How often it is looked for processes that ended, and how often the files are written
// that follow the GPUs, at most: those of what the driver and the firmware did, and
// those of how far queues in hardware slots are.
const (
	sweepPeriod = 2 * time.Millisecond
	movesPeriod = 20 * time.Millisecond
	slotsPeriod = 100 * time.Millisecond
)

// followHost notices processes that ended or became another program, and keeps
// debugfs up to date.
func (e *Emulator) followHost() {
	tick := time.NewTicker(sweepPeriod)
	defer tick.Stop()
	var moves, slots time.Time
	var moved, seated uint64
	for {
		select {
		case <-e.host.Ended():
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
			e.trouble("write debugfs", e.tree.Debugfs("mqds", "rls"))
		}
		// Slots also change when the last queue has gone.
		if now.Sub(slots) >= slotsPeriod && (n != seated || e.hasQueues()) {
			slots, seated = now, n
			e.trouble("write debugfs", e.tree.Debugfs("hqds"))
		}
	}
}

func (e *Emulator) hasQueues() bool {
	e.gpus.mu.Lock()
	defer e.gpus.mu.Unlock()
	return len(e.gpus.queues) > 0
}

// sweep finds address spaces that have ended, and takes down what belongs to them. As
// the driver may have to wait for the hardware then, nobody waits for that here.
func (e *Emulator) sweep() {
	e.sweeping.Lock()
	defer e.sweeping.Unlock()
	for _, space := range e.host.Sweep() {
		over := e.ending.begin(space)
		e.workers.Go(func() {
			defer over()
			e.ending.awaitCalls(space)
			e.release(space)
			e.settle()
		})
	}
}

// release is the end of an address space and of the files it opened.
func (e *Emulator) release(space *host.Space) {
	e.driver.MMReleased(space.Leader(), space)
	for _, f := range e.files.of(space) {
		if f.kfd != nil {
			e.driver.Release(f.kfd)
		}
		e.trouble("close an emulated file", e.files.remove(f))
	}
}
