package driver

import (
	"encoding/binary"
	"slices"
	"sync"
	"time"

	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// eventWait is a WAIT_EVENTS under way.
type eventWait struct {
	cond    *sync.Cond
	waiters []*eventWaiter
	all     bool
	// asleep: a wake-up finds it so. expired: its time is over.
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

// wake reports whether the wait slept.
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
			return kfd.WaitResultFail
		case x.activated && !w.all:
			return kfd.WaitResultComplete
		case x.activated:
			activated++
		}
	}
	if activated == len(w.waiters) {
		return kfd.WaitResultComplete
	}
	return kfd.WaitResultTimeout
}

// eventDataSize is sizeof(struct kfd_event_data), eventIDAt where it names the event.
const (
	eventDataSize = 48
	eventIDAt     = 40
)

// maxWaiters is how many struct kfd_event_waiter of 56 bytes the kernel allocates in
// one piece, 4 MiB.
const maxWaiters = 4 << 20 / 56

// waitEvents is kfd_ioctl_wait_events and kfd_wait_on_events.
func (d *Driver) waitEvents(c *call) (int, errno) {
	result, err := d.waitOnEvents(c)
	switch {
	case err != 0:
		result = kfd.WaitResultFail
	case result == kfd.WaitResultFail:
		err = EIO
	}
	c.put32(20, result)
	return 0, err
}

func (d *Driver) waitOnEvents(c *call) (result uint32, err errno) {
	n := c.u32(8)
	if n > d.prof.waitLimit {
		return 0, ENOMEM
	}
	p, array := c.p, c.pointer(0)
	w := &eventWait{cond: sync.NewCond(&d.mu), all: c.u32(12) != 0}
	d.lock(c, &p.events)
	defer d.unlock(&p.events)
	defer func() { w.free(err == ERESTARTSYS) }()
	for i := range int(n) {
		if err := d.addWaiter(p, w, array, i); err != 0 {
			return 0, err
		}
	}
	if result = w.result(); result != kfd.WaitResultComplete {
		d.unlock(&p.events)
		result, err = d.awaitEvents(c, w)
		d.lock(c, &p.events)
	}
	if err == 0 && result == kfd.WaitResultComplete {
		err = w.tell()
	}
	return result, err
}

// addWaiter is init_event_waiter, with the copying before it.
func (d *Driver) addWaiter(p *process, w *eventWait, array Memory, i int) errno {
	var data [eventDataSize]byte
	if array == nil || !array.At(i*eventDataSize).Read(data[:]) {
		return EFAULT
	}
	e := p.signals.byID[binary.NativeEndian.Uint32(data[eventIDAt:])]
	if e == nil {
		return EINVAL
	}
	x := &eventWaiter{wait: w, event: e, activated: e.signaled, memory: array.At(i * eventDataSize)}
	w.waiters = append(w.waiters, x)
	e.signaled = e.signaled && !e.autoReset
	if age := binary.NativeEndian.Uint64(data[:]); d.prof.eventAge && e.kind == kfd.EventTypeSignal && age != 0 {
		x.aged = true
		x.activated = x.activated || e.age != age
	}
	if !x.activated {
		e.waiters = append(e.waiters, x)
	}
	return 0
}

// awaitEvents sleeps until the wait has a result, its time is over, or a signal is
// pending, which comes first; what is left of the time goes to the caller.
func (d *Driver) awaitEvents(c *call, w *eventWait) (result uint32, err errno) {
	ms := c.u32(16)
	finite := ms != 0 && ms != kfd.WaitForever
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
	d.waiting[c] = true
	d.eventWaits[w] = true
	defer func() {
		delete(d.waiting, c)
		delete(d.eventWaits, w)
		w.asleep = false
	}()
	for first := true; ; first = false {
		if c.task.Interrupted() {
			if finite {
				c.put32(16, uint32(max(0, end-d.cfg.Clock().Raw)/int64(time.Millisecond)))
			}
			return 0, ERESTARTSYS
		}
		if result = w.result(); result != kfd.WaitResultTimeout || w.expired {
			return result, 0
		}
		if first {
			d.note() // that somebody waits is a change
		}
		w.asleep = true
		w.cond.Wait()
	}
}

// tell is copy_signaled_event_data.
func (w *eventWait) tell() errno {
	for _, x := range w.waiters {
		if x.event == nil {
			return EINVAL
		}
		var data []byte
		switch {
		case !x.activated:
		case x.event.kind == kfd.EventTypeMemory:
			data = make([]byte, 32)
		case x.event.kind == kfd.EventTypeHWException:
			data = make([]byte, 16)
		case x.aged:
			data = binary.NativeEndian.AppendUint64(nil, x.event.age)
		}
		copy(data, x.event.data)
		if !writeAt(x.memory, 0, data) {
			return EFAULT
		}
	}
	return 0
}

// free is free_waiters. With undo, what this wait took from events that reset
// themselves is given back.
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
