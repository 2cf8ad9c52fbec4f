package workload

import (
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// event is an event of the driver's that a GPU raises and one goroutine waits for.
type event struct {
	d *device
	// id is what the GPU interrupts with.
	id uint32
	// mailbox is the address of the event's slot, where the GPU writes id before the
	// interrupt.
	mailbox uint64
}

// createEvent makes an event. One that is raised while nobody waits is kept for the
// next who does.
func (d *device) createEvent() (*event, error) {
	args := createEventArgs{EventType: eventTypeSignal, AutoReset: 1}
	if err := d.ioctl(kfd.ReqCreateEvent, kfd.PointerTo(&args)); err != nil {
		return nil, refused(kfd.ReqCreateEvent.String(), 0, kfd.NoQueue, err)
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

// wait waits until the event is raised and takes that back, at most for about d. It tells
// whether it was raised.
func (e *event) wait(d time.Duration) (bool, error) {
	data := eventData{EventID: e.id}
	args := waitEventsArgs{Events: kfd.PointerTo(&data), NumEvents: 1}
	// The field counts ms, and all ones mean for ever.
	args.Timeout = uint32(min(max((d+time.Millisecond-1)/time.Millisecond, 0), math.MaxUint32-1))
	if err := e.d.ioctl(kfd.ReqWaitEvents, kfd.PointerTo(&args)); err != nil {
		return false, refused(kfd.ReqWaitEvents.String(), 0, kfd.NoQueue, err)
	}
	return args.WaitResult != waitTimedOut, nil
}

// raise does what the GPU does.
func (e *event) raise() error { return e.call(kfd.ReqSetEvent) }

// destroy ends the event.
func (e *event) destroy() error { return e.call(kfd.ReqDestroyEvent) }

func (e *event) call(req kfd.Request) error {
	args := eventArgs{EventID: e.id}
	return refused(req.String(), 0, kfd.NoQueue, e.d.ioctl(req, kfd.PointerTo(&args)))
}
