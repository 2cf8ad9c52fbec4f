package dbgtrap

import (
	"context"
	"errors"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// maxEvents is more than can be pending: one for each queue and one of the process.
const maxEvents = kfd.MaxQueues + 1

// maxLooks bounds how often new queues are looked at by one call: a target that creates them
// all the time must not delay its suspension.
const maxLooks = 4

// serve handles the events since the last call and answers the one that the target
// waits for. A runtime that cannot be used is an error, as are queues without one.
func (d *debuggee) serve(ctx context.Context) error {
	var queues int
	err := d.op(ctx, func() (err error) {
		queues, err = d.drain()
		return err
	})
	switch {
	case err != nil:
		return err
	case d.usable() != nil:
		return d.usable()
	case d.state == kfd.RuntimeDisabled && queues > 0 && !d.hadRuntime:
		return d.without(queues)
	}
	return nil
}

// drain asks the driver until nothing is pending, or for long enough, and returns the
// number of queues when some were born. It is made on the tracing thread.
func (d *debuggee) drain() (queues int, err error) {
	if d.ackPending {
		if err := d.acknowledge(); err != nil {
			return 0, err
		}
	}
	looks := 0
	for range maxEvents {
		event, pending, err := d.m.cfg.Device.QueryDebugEvent(d.pid, 0)
		if err != nil || !pending {
			return queues, err
		}
		if event.Raised.Has(kfd.ECProcessRuntime) {
			d.changed = true
			if err := d.answerRuntime(); err != nil {
				return queues, err
			}
			continue
		}
		if looks++; looks > maxLooks {
			d.notify()
			return queues, nil
		}
		snapshot, err := d.snapshot()
		if err != nil {
			return queues, err
		}
		queues = len(snapshot)
		forgetReborn(d.suspended, snapshot)
		if err := d.checkVMs(snapshot); err != nil {
			return queues, err
		}
	}
	return queues, nil
}

// answerRuntime reads the runtime's new state and acknowledges it, for which the target waits.
func (d *debuggee) answerRuntime() error {
	for {
		runtime, err := d.m.cfg.Device.TakeRuntimeInfo(d.pid)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.ENODATA):
			// The call before was interrupted after it had cleared it, and the state is
			// lost. If it is not enabled, SUSPEND_QUEUES returns EPERM.
			d.setRuntime(kfd.RuntimeEnabled)
			return d.acknowledge()
		case errors.Is(err, kfd.ErrInconsistent): // it is cleared
			return errors.Join(err, d.acknowledge())
		case err != nil:
			return err
		}
		d.setRuntime(runtime.State)
		return d.acknowledge()
	}
}

// acknowledge ends the call of the target that announced its runtime. A needless call is
// harmless, see enableOnce.
func (d *debuggee) acknowledge() error {
	d.ackPending = true // the exception is cleared, and nothing else shows that the target waits
	for {
		err := d.m.cfg.Device.AnswerRuntime(d.pid)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err == nil {
			d.ackPending = false
		}
		return err
	}
}
