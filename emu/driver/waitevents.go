package driver

import (
	"slices"
	"sync"
	"time"

	"github.com/gpreempt/gpreempt/emu/kfdabi"
)

// eventWait is a WAIT_EVENTS in progress.
type eventWait struct {
	cond    *sync.Cond
	waiters []*eventWaiter
	all     bool
	// asleep is cleared by a wake-up. expired: the timeout has passed.
	asleep, expired bool
}

// eventWaiter is struct kfd_event_waiter: one event of a wait.
type eventWaiter struct {
	wait *eventWait
	// event is nil once it was destroyed.
	event     *event
	activated bool
	aged      bool // event_age_enabled
	memory    Memory
}

// wake wakes the wait and reports whether it slept.
func (w *eventWait) wake() bool {
	was := w.asleep
	w.asleep = false
	w.cond.Signal()
	return was
}

// result is test_event_condition.
func (w *eventWait) result() uint32 {
	activated := 0
	for _, x := range w.waiters {
		switch {
		case x.event == nil:
			return kfdabi.WaitResultFail
		case x.activated && !w.all:
			return kfdabi.WaitResultComplete
		case x.activated:
			activated++
		}
	}
	if activated == len(w.waiters) {
		return kfdabi.WaitResultComplete
	}
	return kfdabi.WaitResultTimeout
}

// The bytes that are copied of the union at the beginning of struct kfd_event_data: the
// sizes of struct kfd_hsa_hw_exception_data and of struct kfd_hsa_memory_exception_data,
// which fills the union.
const (
	hwExceptionBytes     = 16
	memoryExceptionBytes = 32
)

// maxWaiters is the most struct kfd_event_waiter, of 56 bytes, that fit into the kernel's
// largest allocation, 4 MiB.
const maxWaiters = 4 << 20 / 56

// waitEvents is kfd_ioctl_wait_events and kfd_wait_on_events.
func (d *Driver) waitEvents(c *call, args *kfdabi.WaitEventsArgs) (int, errno) {
	result, err := d.waitOnEvents(c, args)
	switch {
	case err != 0:
		result = kfdabi.WaitResultFail
	case result == kfdabi.WaitResultFail:
		err = EIO
	}
	args.WaitResult = result
	return 0, err
}

func (d *Driver) waitOnEvents(c *call, args *kfdabi.WaitEventsArgs) (result uint32, err errno) {
	n := args.NumEvents
	if n > d.prof.waitLimit {
		return 0, ENOMEM
	}
	p, array := c.p, c.memory(&args.EventsPtr)
	w := &eventWait{cond: sync.NewCond(&d.mu), all: args.WaitForAll != 0}
	defer d.hold(c, &p.events)()
	defer func() { w.free(err == ERESTARTSYS) }()
	for i := range int(n) {
		if err := d.addWaiter(p, w, array, i); err != 0 {
			return 0, err
		}
	}
	if result = w.result(); result != kfdabi.WaitResultComplete {
		d.unlock(&p.events)
		result, err = d.awaitEvents(c, args, w)
		d.lock(c, &p.events)
	}
	if err == 0 && result == kfdabi.WaitResultComplete {
		err = w.copyData()
	}
	return result, err
}

// addWaiter is init_event_waiter, and the copy_from_user before it.
func (d *Driver) addWaiter(p *process, w *eventWait, array Memory, i int) errno {
	if array == nil {
		return EFAULT
	}
	to := array.At(i * sizeOf[kfdabi.SignalEventData]())
	data, ok := copyFrom[kfdabi.SignalEventData](to, 1)
	if !ok {
		return EFAULT
	}
	e := p.signals.byID[data[0].EventID]
	if e == nil {
		return EINVAL
	}
	x := &eventWaiter{wait: w, event: e, activated: e.signaled, memory: to}
	w.waiters = append(w.waiters, x)
	e.signaled = e.signaled && !e.autoReset
	if age := data[0].LastEventAge; d.prof.eventAge && e.kind == kfdabi.EventTypeSignal && age != 0 {
		x.aged = true
		x.activated = x.activated || e.age != age
	}
	if !x.activated {
		e.waiters = append(e.waiters, x)
	}
	return 0
}

// awaitEvents sleeps until the wait has a result, the timeout has passed, or a signal is
// pending, which takes precedence: then args gets the rest of the time.
func (d *Driver) awaitEvents(c *call, args *kfdabi.WaitEventsArgs, w *eventWait) (result uint32, err errno) {
	ms := args.Timeout
	finite := ms != 0 && ms != kfdabi.WaitForever
	w.expired = ms == 0
	var end int64
	if finite {
		rest := time.Duration(min(ms, 1<<31-1)) * time.Millisecond
		end = d.cfg.Clock().Raw + int64(rest)
		defer d.cfg.After(rest, func() {
			d.mu.Lock()
			defer d.mu.Unlock()
			w.expired = true
			w.cond.Signal()
		})()
	}
	d.eventWaits[w] = true
	defer func() {
		delete(d.waiting, c)
		delete(d.eventWaits, w)
		w.asleep = false
	}()
	for first := true; ; first = false {
		if c.task.Interrupted() {
			if finite {
				args.Timeout = uint32(max(0, end-d.cfg.Clock().Raw) / int64(time.Millisecond))
			}
			return 0, ERESTARTSYS
		}
		if result = w.result(); result != kfdabi.WaitResultTimeout || w.expired {
			return result, 0
		}
		if first {
			d.begin(c, true)
			d.note() // that a call waits is a change
		}
		w.asleep = true
		w.cond.Wait()
	}
}

// copyData is copy_signaled_event_data.
func (w *eventWait) copyData() errno {
	for _, x := range w.waiters {
		if x.event == nil {
			return EINVAL
		}
		var data []byte
		switch {
		case !x.activated:
		case x.event.kind == kfdabi.EventTypeMemory:
			data = bytesOf(x.event.memory)[:memoryExceptionBytes]
		case x.event.kind == kfdabi.EventTypeHWException:
			data = bytesOf(x.event.hardware)[:hwExceptionBytes]
		case x.aged:
			data = bytesOf([]uint64{x.event.age})
		}
		if !copyTo(x.memory, data) {
			return EFAULT
		}
	}
	return 0
}

// free is free_waiters. With undo, events that the wait has reset are set again.
func (w *eventWait) free(undo bool) {
	for _, x := range w.waiters {
		if x.event == nil {
			continue
		}
		x.event.waiters = slices.DeleteFunc(x.event.waiters, func(o *eventWaiter) bool { return o == x })
		if undo && x.activated && x.event.autoReset {
			x.event.set()
		}
	}
}
