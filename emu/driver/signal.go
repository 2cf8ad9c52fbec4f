package driver

import (
	"cmp"
	"maps"
	"slices"

	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// signals are the events a process waits for, as kfd_events.c keeps them.
type signals struct {
	byID map[uint32]*event
	// lowest of each range of ids: none below is free.
	lowestSignal, lowestOther uint32
	// page: there is memory for signals (signal_page), of handle if the process gave
	// it. mapped are its bytes (signal_mapped_size), 8 for each event.
	page   bool
	handle uint64
	mapped uint64
}

// sorted returns the events in the order of their ids.
func (s *signals) sorted() []*event {
	return slices.SortedFunc(maps.Values(s.byID), func(a, b *event) int { return cmp.Compare(a.id, b.id) })
}

// Event ids: those of signals are the lowest, from 1 on; 0 is an event of the
// driver's which nobody finds.
const (
	firstOtherEvent = 1 << 30
	lastEvent       = 1<<31 - 1
	// defaultSlots are those of a page the process did not give.
	defaultSlots = 256
)

// event is struct kfd_event.
type event struct {
	id, kind            uint32
	autoReset, signaled bool
	age                 uint64
	// memory and hardware are what the last exception was, for the two kinds of events
	// that report exceptions.
	memory   kfd.MemoryEventData
	hardware kfd.HWEventData
	// waiters are in its wait queue.
	waiters []*eventWaiter
}

// gpuCanSignal is event_can_be_gpu_signaled.
func (e *event) gpuCanSignal() bool {
	return e.kind == kfd.EventTypeSignal || e.kind == kfd.EventTypeDebug
}

// set is set_event. What nobody waits for stays signalled, and what is not reset by
// itself.
func (e *event) set() {
	e.signaled = !e.autoReset || len(e.waiters) == 0
	e.age++
	for _, w := range e.waiters {
		w.activated = true
	}
	e.wake()
}

// wake is wake_up_all: who sleeps leaves the queue (autoremove_wake_function).
func (e *event) wake() {
	e.waiters = slices.DeleteFunc(e.waiters, func(w *eventWaiter) bool { return w.wait.wake() })
}

// createEvent is kfd_ioctl_create_event.
func (d *Driver) createEvent(c *call, args *kfd.CreateEventArgs) (int, errno) {
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
	d.lock(c, &p.events)
	defer d.unlock(&p.events)
	s := &p.signals
	e := &event{kind: args.EventType, autoReset: args.AutoReset != 0, age: 1}
	if s.byID == nil {
		s.byID, s.lowestSignal, s.lowestOther = map[uint32]*event{}, 1, firstOtherEvent
	}
	lowest, end := &s.lowestOther, uint64(lastEvent+1)
	if e.gpuCanSignal() {
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
		args.EventSlotIndex, args.EventPageOffset = e.id, d.cfg.eventPage()
	}
	return 0, 0
}

// setEventPage is kfd_kmap_event_page: signals go to memory of the process's.
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
	if m == nil || m.flags&kfd.AllocUserptr != 0 || m.bytes() < 8*kfd.SignalEventLimit {
		return EINVAL
	}
	p.signals.page, p.signals.handle, p.signals.mapped = true, handle, m.bytes()
	return 0
}

// destroyEvent is kfd_ioctl_destroy_event and destroy_event: who waits for the event
// fails.
func (d *Driver) destroyEvent(c *call, args *kfd.DestroyEventArgs) (int, errno) {
	p := c.p
	d.lock(c, &p.events)
	defer d.unlock(&p.events)
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
func (d *Driver) setEvent(c *call, args *kfd.SetEventArgs) (int, errno) {
	e := c.p.signals.byID[args.EventID]
	if e == nil || e.kind != kfd.EventTypeSignal {
		return 0, EINVAL
	}
	e.set()
	return 0, 0
}

// resetEvent is kfd_ioctl_reset_event.
func (d *Driver) resetEvent(c *call, args *kfd.SetEventArgs) (int, errno) {
	e := c.p.signals.byID[args.EventID]
	if e == nil || e.kind != kfd.EventTypeSignal {
		return 0, EINVAL
	}
	e.signaled = false
	return 0, 0
}

// SignalEvent is the interrupt a signal of the GPU's ends with
// (kfd_signal_event_interrupt), as far as it has the whole number of the event: the
// memory for signals is neither read nor written. An event that is not, or that no
// GPU can signal, is passed over.
func (d *Driver) SignalEvent(mm MM, id uint32) {
	d.mu.Lock()
	defer d.leave()
	if p := d.byMM(mm); p != nil {
		if e := p.signals.byID[id]; e != nil && e.gpuCanSignal() {
			e.set()
		}
	}
}

// MemoryFault is what a GPU says of an address it could not use: struct
// kfd_hsa_memory_exception_data.
type MemoryFault struct {
	VA                              uint64
	NotPresent, ReadOnly, NoExecute bool
	// Imprecise: VA may not be where it was.
	Imprecise bool
}

// data returns the fault as kfd_signal_vm_fault_event tells it: no memory failed.
func (f MemoryFault) data(g *gpu) kfd.MemoryEventData {
	return kfd.MemoryEventData{
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

// orImprecise returns the data of a fault, if nothing else is known of it that it
// happened.
func orImprecise(data *kfd.MemoryEventData, g *gpu) kfd.MemoryEventData {
	if data == nil {
		return MemoryFault{Imprecise: true}.data(g)
	}
	return *data
}

// signalFault is kfd_signal_vm_fault_event.
func (p *process) signalFault(data kfd.MemoryEventData) {
	for _, e := range p.signals.sorted() {
		if e.kind == kfd.EventTypeMemory {
			e.memory = data
			e.set()
		}
	}
}

// signalReset is kfd_signal_reset_event after a hang: what was in the memory of the
// GPU is lost, to every process that has it.
func (d *Driver) signalReset(g *gpu) {
	data := kfd.HWEventData{MemoryLost: 1, GPUID: uint32(g.ID)} // of the whole GPU, because of a hang
	for _, p := range d.procs {
		for _, e := range p.signals.sorted() {
			if p.table && e.kind == kfd.EventTypeHWException {
				e.hardware = data
				e.set()
			}
		}
	}
}
