package driver

import (
	"cmp"
	"maps"
	"slices"

	"github.com/gpreempt/gpreempt/emu/kfdabi"
)

// signals are the events a process waits for, as kfd_events.c keeps them.
type signals struct {
	byID map[uint32]*event
	// For each range of IDs, a bound: every ID below is in use.
	lowestSignal, lowestOther uint32
	// page: there is memory for signals (signal_page), of handle if the process provided
	// it. mapped is its size in bytes (signal_mapped_size), 8 for each event.
	page   bool
	handle uint64
	mapped uint64
}

// sorted returns the events in the order of their IDs.
func (s *signals) sorted() []*event {
	return slices.SortedFunc(maps.Values(s.byID), func(a, b *event) int { return cmp.Compare(a.id, b.id) })
}

// Event IDs: those of signals are the lowest, from 1 on. The driver keeps 0 for itself.
const (
	firstOtherEvent = 1 << 30
	lastEvent       = 1<<31 - 1
	// defaultSlots is the number of slots in the driver's own page.
	defaultSlots = 256
)

// event is struct kfd_event.
type event struct {
	id, kind            uint32
	autoReset, signaled bool
	age                 uint64
	// memory and hardware describe the last exception, for the two kinds of events that
	// report exceptions.
	memory   kfdabi.MemoryEventData
	hardware kfdabi.HWEventData
	// waiters are in its wait queue.
	waiters []*eventWaiter
}

// gpuCanSignal is event_can_be_gpu_signaled.
func (e *event) gpuCanSignal() bool {
	return e.kind == kfdabi.EventTypeSignal || e.kind == kfdabi.EventTypeDebug
}

// set is set_event. The event stays signalled unless it resets itself and has a waiter.
func (e *event) set() {
	e.signaled = !e.autoReset || len(e.waiters) == 0
	e.age++
	for _, w := range e.waiters {
		w.activated = true
	}
	e.wake()
}

// wake is wake_up_all: sleeping waiters leave the queue (autoremove_wake_function).
func (e *event) wake() {
	e.waiters = slices.DeleteFunc(e.waiters, func(w *eventWaiter) bool { return w.wait.wake() })
}

// createEvent is kfd_ioctl_create_event.
func (d *Driver) createEvent(c *call, args *kfdabi.CreateEventArgs) (int, errno) {
	p := c.p
	if handle := args.EventPageOffset; handle != 0 {
		d.lock(c, &p.mutex)
		err := d.setEventPage(p, handle)
		d.unlock(&p.mutex)
		if err != 0 {
			return 0, err
		}
	}
	args.EventPageOffset = 0
	defer d.hold(c, &p.events)()
	s := &p.signals
	e := &event{kind: args.EventType, autoReset: args.AutoReset != 0, age: 1}
	if s.byID == nil {
		s.byID, s.lowestSignal, s.lowestOther = map[uint32]*event{}, 1, firstOtherEvent
	}
	lowest, end := &s.lowestOther, uint64(lastEvent+1)
	if e.gpuCanSignal() {
		if !s.page && d.prof.ownEventPage {
			return 0, ENOMEM
		}
		if !s.page {
			s.page, s.mapped = true, 8*defaultSlots
		}
		lowest, end = &s.lowestSignal, s.mapped/8
	}
	for s.byID[*lowest] != nil {
		*lowest++
	}
	if uint64(*lowest) >= end {
		return 0, ENOSPC
	}
	e.id = *lowest
	s.byID[e.id] = e
	args.EventTriggerData, args.EventID = e.id, e.id
	if e.gpuCanSignal() {
		args.EventSlotIndex, args.EventPageOffset = e.id, d.cfg.Offsets.Events
		if d.prof.ownEventPage {
			args.EventPageOffset = mmapEvents // which nobody can map (kfd_mmap)
		}
	}
	return 0, 0
}

// setEventPage is kfd_kmap_event_page: signals use memory of the process.
func (d *Driver) setEventPage(p *process, handle uint64) errno {
	if p.signals.page {
		return EINVAL
	}
	x := p.pdd(uint32(handle >> 32))
	if x == nil {
		return EINVAL
	}
	if !x.vm {
		return ENODEV
	}
	m := x.memory[uint32(handle)]
	if m == nil || m.flags&kfdabi.AllocUserptr != 0 || m.bytes() < 8*kfdabi.SignalEventLimit {
		return EINVAL
	}
	p.signals.page, p.signals.handle, p.signals.mapped = true, handle, m.bytes()
	return 0
}

// destroyEvent is kfd_ioctl_destroy_event and destroy_event: waits for the event fail.
func (d *Driver) destroyEvent(c *call, args *kfdabi.DestroyEventArgs) (int, errno) {
	p := c.p
	defer d.hold(c, &p.events)()
	e := p.signals.byID[args.EventID]
	if e == nil {
		return 0, EINVAL
	}
	for _, w := range e.waiters {
		w.event = nil
	}
	e.wake()
	lowest := &p.signals.lowestOther
	if e.gpuCanSignal() {
		lowest = &p.signals.lowestSignal
	}
	*lowest = min(*lowest, e.id)
	delete(p.signals.byID, e.id)
	return 0, 0
}

// setEvent is kfd_ioctl_set_event.
func (d *Driver) setEvent(c *call, args *kfdabi.SetEventArgs) (int, errno) {
	e := c.p.signals.byID[args.EventID]
	if e == nil || e.kind != kfdabi.EventTypeSignal {
		return 0, EINVAL
	}
	e.set()
	return 0, 0
}

// resetEvent is kfd_ioctl_reset_event.
func (d *Driver) resetEvent(c *call, args *kfdabi.SetEventArgs) (int, errno) {
	e := c.p.signals.byID[args.EventID]
	if e == nil || e.kind != kfdabi.EventTypeSignal {
		return 0, EINVAL
	}
	e.signaled = false
	return 0, 0
}

// SignalEvent is the interrupt of a GPU's signal (kfd_signal_event_interrupt), with the
// complete ID of the event: the memory for signals is neither read nor written. An unknown
// event, or one that no GPU can signal, is ignored.
func (d *Driver) SignalEvent(mm MM, id uint32) {
	d.mu.Lock()
	defer d.leave()
	if p := d.byMM(mm); p != nil {
		if e := p.signals.byID[id]; e != nil && e.gpuCanSignal() {
			e.set()
		}
	}
}

// MemoryFault is a GPU's report of an invalid memory access: struct
// kfd_hsa_memory_exception_data.
type MemoryFault struct {
	VA                              uint64
	NotPresent, ReadOnly, NoExecute bool
	// Imprecise: VA may be another address than the one accessed.
	Imprecise bool
}

// data returns the fault as kfd_signal_vm_fault_event reports it: no memory has failed.
func (f MemoryFault) data(g *gpu) kfdabi.MemoryEventData {
	return kfdabi.MemoryEventData{
		NotPresent: flag(f.NotPresent), ReadOnly: flag(f.ReadOnly), NoExecute: flag(f.NoExecute), Imprecise: flag(f.Imprecise),
		VA: f.VA, GPUID: uint32(g.ID),
	}
}

// flag is a C bool.
func flag(is bool) uint32 {
	if is {
		return 1
	}
	return 0
}

// orImprecise returns data, or for nil that of a fault without details.
func orImprecise(data *kfdabi.MemoryEventData, g *gpu) kfdabi.MemoryEventData {
	if data == nil {
		return MemoryFault{Imprecise: true}.data(g)
	}
	return *data
}

// signalFault is kfd_signal_vm_fault_event.
func (p *process) signalFault(data kfdabi.MemoryEventData) {
	for _, e := range p.signals.sorted() {
		if e.kind == kfdabi.EventTypeMemory {
			e.memory = data
			e.set()
		}
	}
}

// signalReset is kfd_signal_reset_event after a hang: every process that uses the GPU
// has lost the content of its memory. After the reset of a queue (detect_hang_count) each
// with a reset queue gets the same event.
func (d *Driver) signalReset(g *gpu, ofQueue bool) {
	data := kfdabi.HWEventData{MemoryLost: 1, GPUID: uint32(g.ID)} // of the whole GPU, because of a hang
	for _, p := range d.procs {
		if ofQueue {
			if x := p.pdd(uint32(g.ID)); x == nil || !x.hasReset {
				continue
			}
			d.print(g, "Queues reset on process %s tid %d thread %s pid %d", p.lead.Comm(), p.PID, p.lead.Comm(), p.PID)
		}
		for _, e := range p.signals.sorted() {
			if p.table && e.kind == kfdabi.EventTypeHWException {
				e.hardware = data
				e.set()
			}
		}
	}
}
