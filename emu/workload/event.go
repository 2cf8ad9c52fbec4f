package workload

import (
	"errors"
	"fmt"
	"time"

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
const eventPageBytes = 8 * kfd.SignalEventLimit

// createEvent creates an event. If it is raised while no goroutine waits, the next wait
// returns at once.
func (d *device) createEvent() (*event, error) {
	args := kfd.CreateEventArgs{EventType: kfd.EventTypeSignal, AutoReset: 1}
	if err := d.ioctl(kfd.ReqCreateEvent, 0, kfd.NoQueue, kfd.PointerTo(&args)); err != nil {
		return nil, err
	}
	e := &event{d: d, id: args.EventID}
	d.mu.Lock()
	defer d.mu.Unlock()
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

// wait waits until the event is raised, and resets it, at most for about d. It reports
// whether the event was raised.
func (e *event) wait(d time.Duration) (bool, error) {
	data := kfd.SignalEventData{EventID: e.id}
	args := kfd.WaitEventsArgs{EventsPtr: kfd.PointerTo(&data), NumEvents: 1}
	args.Timeout = uint32(min(max((d+time.Millisecond-1)/time.Millisecond, 0), time.Duration(kfd.WaitForever-1)))
	if err := e.d.ioctl(kfd.ReqWaitEvents, 0, kfd.NoQueue, kfd.PointerTo(&args)); err != nil {
		return false, err
	}
	return args.WaitResult != kfd.WaitResultTimeout, nil
}

// raise signals the event, as the GPU does.
func (e *event) raise() error {
	args := kfd.SetEventArgs{EventID: e.id}
	return e.d.ioctl(kfd.ReqSetEvent, 0, kfd.NoQueue, kfd.PointerTo(&args))
}

// destroy ends the event.
func (e *event) destroy() error {
	args := kfd.DestroyEventArgs{EventID: e.id}
	return e.d.ioctl(kfd.ReqDestroyEvent, 0, kfd.NoQueue, kfd.PointerTo(&args))
}
