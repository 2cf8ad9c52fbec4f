package workload

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// event is an event of the driver that a GPU raises and one goroutine waits for.
type event struct {
	d *device
	// id is the data of the GPU's interrupt.
	id uint32
	// mailbox is the address of the event's slot, to which the GPU writes id before the
	// interrupt.
	mailbox uint64
}

// eventPageBytes is the size of the page of signal events: a slot of 8 bytes for each.
const eventPageBytes = 8 * kfdabi.SignalEventLimit

// createEvent creates an event. If it is raised while no goroutine waits, the next wait
// returns at once. The first one provides the page of events, as ROCm's runtime does:
// from 7.3 on the driver has none of its own. A replacement of the driver whose GPUs have no
// address space has one.
func (d *device) createEvent() (*event, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	args := kfdabi.CreateEventArgs{EventType: kfdabi.EventTypeSignal, AutoReset: 1}
	if d.events.mem == nil && slices.ContainsFunc(d.gpus, func(g gpu) bool { return g.HasVM }) {
		var err error
		if d.events, args.EventPageOffset, err = d.allocateEventPage(); err != nil {
			return nil, fmt.Errorf("allocate the page of events: %w", err)
		}
	}
	if err := d.ioctl(kfdabi.ReqCreateEvent, 0, kfdabi.NoQueue, kfd.PointerTo(&args)); err != nil {
		return nil, err
	}
	e := &event{d: d, id: args.EventID}
	if d.events.mem == nil {
		page, err := d.mapShared(int64(args.EventPageOffset), eventPageBytes)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("map the page of events: %w", err), e.destroy())
		}
		d.events = page
	}
	e.mailbox = d.events.addr(int(args.EventSlotIndex) * 8)
	return e, nil
}

// allocateEventPage returns memory of the host for the page of events, which is mapped at the
// same address in this process and on its GPUs, and the handle. It ends with the process: the
// driver frees it before that for nobody.
func (d *device) allocateEventPage() (page region, handle uint64, err error) {
	var gpus []uint32
	for _, g := range d.gpus {
		if g.HasVM {
			gpus = append(gpus, uint32(g.ID))
		}
	}
	first := d.gpus[slices.IndexFunc(d.gpus, func(g gpu) bool { return g.HasVM })]
	if page, err = newRegion(eventPageBytes); err != nil {
		return region{}, 0, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, page.free())
			page = region{}
		}
	}()
	alloc := kfdabi.AllocMemoryArgs{
		VAAddr: page.addr(0), Size: eventPageBytes, GPUID: uint32(first.ID),
		Flags: kfdabi.AllocGTT | kfdabi.AllocWritable | kfdabi.AllocExecutable | kfdabi.AllocCoherent,
	}
	if err = d.ioctl(kfdabi.ReqAllocMemoryOfGPU, first.ID, kfdabi.NoQueue, kfd.PointerTo(&alloc)); err != nil {
		return page, 0, err
	}
	if err = d.sys.MapAt(page.mem, first.Render, int64(alloc.MmapOffset)); err != nil {
		return page, 0, err
	}
	if err = unix.Madvise(page.mem, unix.MADV_DONTFORK); err != nil {
		return page, 0, err
	}
	args := kfdabi.MapMemoryArgs{Handle: alloc.Handle, DeviceIDsArrayPtr: kfd.PointerToSlice(gpus), NumDevices: uint32(len(gpus))}
	return page, alloc.Handle, d.ioctl(kfdabi.ReqMapMemoryToGPU, first.ID, kfdabi.NoQueue, kfd.PointerTo(&args))
}

// wait waits until the event is raised, and resets it, at most for about d. It reports
// whether the event was raised.
func (e *event) wait(d time.Duration) (bool, error) {
	data := kfdabi.SignalEventData{EventID: e.id}
	args := kfdabi.WaitEventsArgs{EventsPtr: kfd.PointerTo(&data), NumEvents: 1}
	args.Timeout = uint32(min(max((d+time.Millisecond-1)/time.Millisecond, 0), time.Duration(kfdabi.WaitForever-1)))
	if err := e.d.ioctl(kfdabi.ReqWaitEvents, 0, kfdabi.NoQueue, kfd.PointerTo(&args)); err != nil {
		return false, err
	}
	return args.WaitResult != kfdabi.WaitResultTimeout, nil
}

// raise signals the event, as the GPU does.
func (e *event) raise() error {
	args := kfdabi.SetEventArgs{EventID: e.id}
	return e.d.ioctl(kfdabi.ReqSetEvent, 0, kfdabi.NoQueue, kfd.PointerTo(&args))
}

// destroy ends the event.
func (e *event) destroy() error {
	args := kfdabi.DestroyEventArgs{EventID: e.id}
	return e.d.ioctl(kfdabi.ReqDestroyEvent, 0, kfdabi.NoQueue, kfd.PointerTo(&args))
}
