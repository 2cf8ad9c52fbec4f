package dbgtrap

import (
	"context"
	"errors"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// maxEvents is more than can be pending: one for each queue and one of the process.
const maxEvents = kfd.MaxQueues + 1

// maxLooks bounds how often new queues are looked at in one go: a target that makes them
// all the time keeps nobody from suspending it.
const maxLooks = 4

// serve takes in what happened since the last call and answers what the target
// waits for. A runtime that cannot be used is an error, as are queues without one.
func (h *hold) serve(ctx context.Context) error {
	var queues int
	err := h.op(ctx, func() (err error) {
		queues, err = h.drain()
		return err
	})
	switch {
	case err != nil:
		return err
	case h.usable() != nil:
		return h.usable()
	case h.state == kfd.RuntimeDisabled && queues > 0 && !h.hadRuntime:
		return h.without(queues)
	}
	return nil
}

// drain asks the driver until nothing is pending, or for long enough, and returns the
// number of queues when some were born. It is made on the tracing thread.
func (h *hold) drain() (queues int, err error) {
	if h.owesAck {
		if err := h.acknowledge(); err != nil {
			return 0, err
		}
	}
	looks := 0
	for range maxEvents {
		event, pending, err := h.m.cfg.Device.QueryDebugEvent(h.pid, 0)
		if err != nil || !pending {
			return queues, err
		}
		if event.Raised.Has(kfd.ECProcessRuntime) {
			h.news = true
			if err := h.answerRuntime(); err != nil {
				return queues, err
			}
			continue
		}
		if looks++; looks > maxLooks {
			h.notify()
			return queues, nil
		}
		snapshot, err := h.snapshot()
		if err != nil {
			return queues, err
		}
		queues = len(snapshot)
		forgetReborn(h.held, snapshot)
	}
	return queues, nil
}

// answerRuntime learns the runtime's new state and lets the target go on.
func (h *hold) answerRuntime() error {
	for {
		info, err := h.m.cfg.Device.QueryExceptionInfo(h.pid, 0, kfd.ECProcessRuntime, true)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.ENODATA):
			// The call before was interrupted after it had cleared it, and the state is
			// lost. If it is not this one, SUSPEND_QUEUES will say so.
			h.runtimeIs(kfd.RuntimeEnabled)
			return h.acknowledge()
		case err != nil:
			return err
		}
		runtime, err := kfd.ParseRuntimeInfo(info)
		if err != nil {
			return errors.Join(err, h.acknowledge())
		}
		h.runtimeIs(runtime.State)
		return h.acknowledge()
	}
}

// acknowledge releases the target from the call it announced itself with. One too
// many does no harm, see enableOnce.
func (h *hold) acknowledge() error {
	h.owesAck = true // the exception is cleared, and nothing else tells that the target waits
	for {
		err := h.m.cfg.Device.SendRuntimeEvent(h.pid, kfd.ECProcessRuntime.Mask(), 0, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err == nil {
			h.owesAck = false
		}
		return err
	}
}
