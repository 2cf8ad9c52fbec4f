package dbgtrap

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// maxRounds bounds the attempts to suspend a target that creates queues all the time.
const maxRounds = 8

// suspend takes every queue off its GPU, those born since the last call included. done
// is called, on the thread that made the call, when the driver has suspended them; it is
// not called for a target without queues. On an error some may be suspended: the caller resumes
// them.
func (d *debuggee) suspend(ctx context.Context, done func()) error {
	// The hot path makes no call whose result is known: no queue is suspended twice, and
	// the runtime's state is read only when the driver refuses because of it.
	stale := len(d.suspended) > 0 || d.state != kfd.RuntimeEnabled
	for {
		if stale {
			if err := d.serve(ctx); err != nil {
				return err
			}
		}
		if d.state == kfd.RuntimeEnabled {
			err := d.suspendAll(ctx, done)
			if stale || !errors.Is(err, errRuntimeOff) {
				return err
			}
			stale = true
			continue
		}
		return d.withoutRuntime(ctx)
	}
}

// withoutRuntime returns an error if the target has queues although its runtime is not
// enabled.
func (d *debuggee) withoutRuntime(ctx context.Context) error {
	var snapshot []kfd.QueueSnapshotEntry
	err := d.op(ctx, func() (err error) {
		snapshot, err = d.snapshot()
		return err
	})
	if err == nil && len(snapshot) > 0 {
		err = d.without(len(snapshot))
	}
	return err
}

// endingTime bounds the wait for queues that are being destroyed. The driver takes about a
// millisecond for one, destroys those of one process one after another, and wakes each that
// was waiting for a resume.
const endingTime = 100 * time.Millisecond

// suspendAll suspends all queues. The driver does not suspend one that is being destroyed:
// suspendAll waits for its end.
func (d *debuggee) suspendAll(ctx context.Context, done func()) error {
	for wait, waited := time.Millisecond, time.Duration(0); ; wait *= 2 {
		err := d.op(ctx, func() error {
			err := d.suspendRounds()
			if err == nil {
				done()
			}
			return err
		})
		if _, ending := errors.AsType[*endingError](err); !ending || waited >= endingTime {
			return err
		}
		<-time.After(wait)
		waited += wait
	}
}

// endingError reports queues that are being destroyed: they run, and cannot be
// suspended.
type endingError struct {
	pid    int32
	queues []uint32
}

func (e *endingError) Error() string {
	return fmt.Sprintf("queues %v of process %d are being destroyed and cannot be suspended: try again when they are gone", e.queues, e.pid)
}

// suspendRounds suspends what a snapshot shows until nothing is left, all queues in
// one call: each call interrupts every process on their GPUs. It is made on the
// tracing thread.
func (d *debuggee) suspendRounds() error {
	c := newSuspendPass(d.suspended)
	for range maxRounds {
		snapshot, err := d.snapshot()
		if err != nil {
			return err
		}
		ids := c.next(snapshot)
		if len(ids) == 0 {
			return nil
		}
		results, err := d.suspendQueues(ids, snapshot)
		if err != nil {
			return d.runtimeOff(err)
		}
		switch again, failed, refused := c.take(results, snapshot); {
		case len(failed) > 0:
			return &mechanism.HardwareError{GPUs: failed, Err: fmt.Errorf("suspend the queues of process %d: the GPU is hung or in reset: look for amdgpu errors in the kernel log", d.target.PID)}
		case len(refused) > 0:
			return &endingError{d.target.PID, refused}
		case !again:
			return nil
		}
	}
	return fmt.Errorf("process %d makes queues faster than they can be suspended: all of them run again", d.target.PID)
}

// resume resumes every queue. After a *mechanism.HardwareError queues may still be off the
// GPU; the caller tries again.
func (d *debuggee) resume(ctx context.Context) error {
	clear(d.suspended)
	err := d.op(ctx, d.resumeAll)
	if !errors.Is(err, errRuntimeOff) {
		return err
	}
	// If the runtime has ended, the driver has resumed them.
	if d.state == kfd.RuntimeEnabled {
		if err := d.serve(ctx); err != nil || d.state != kfd.RuntimeEnabled {
			return err
		}
		return d.op(ctx, d.resumeAll)
	}
	return nil
}

// resumeAll is made on the tracing thread.
func (d *debuggee) resumeAll() error {
	n, snapshot, err := d.resumeOnce()
	if err != nil || n >= len(snapshot) {
		return err
	}
	// The driver returns how many queues it resumed, not which. With their ids as the
	// argument it marks those that failed, if it uses a runlist.
	d.resumeIncomplete = true
	results, err := d.m.cfg.Device.Resume(d.pid, idsOf(snapshot))
	if err != nil {
		return d.runtimeOff(err)
	}
	gpus := gpusOf(failures(results), snapshot)
	if len(gpus) == 0 {
		if n, snapshot, err = d.resumeOnce(); err != nil || n >= len(snapshot) {
			return err
		}
		gpus = gpusOf(idsOf(snapshot), snapshot) // one of them
	}
	return &mechanism.HardwareError{GPUs: gpus, Err: fmt.Errorf("resume the queues of process %d: the GPU is hung or in reset: look for amdgpu errors in the kernel log", d.target.PID)}
}

// resumeOnce returns the number of queues that were resumed, and those that should
// have been.
func (d *debuggee) resumeOnce() (int, []kfd.QueueSnapshotEntry, error) {
	if d.resumeIncomplete {
		// Where the firmware schedules queue by queue, a queue that it failed to map counts
		// as resumed from then on, and stays off the GPU (resume_single_queue). Suspending
		// it first makes the driver try again.
		snapshot, err := d.snapshot()
		if err == nil {
			_, err = d.suspendQueues(idsOf(snapshot), snapshot)
		}
		if err != nil && !errors.Is(err, kfd.ErrInconsistent) {
			return 0, nil, d.runtimeOff(err)
		}
	}
	n, err := d.m.cfg.Device.ResumeAll(d.pid)
	if err != nil {
		return 0, nil, d.runtimeOff(err)
	}
	snapshot, err := d.m.cfg.Device.Snapshot(d.pid, 0)
	if err != nil {
		return 0, nil, err
	}
	snapshot = slices.DeleteFunc(snapshot, func(q kfd.QueueSnapshotEntry) bool {
		return q.ExceptionStatus.Has(kfd.ECQueueNew) // it may have been born since
	})
	d.resumeIncomplete = d.resumeIncomplete && n < len(snapshot)
	return n, snapshot, nil
}

// runtimeOff returns errRuntimeOff if that is the reason of an EPERM. The other reason is
// that this program is not the debugger, and then a snapshot fails too.
func (d *debuggee) runtimeOff(err error) error {
	if !errors.Is(err, unix.EPERM) {
		return err
	}
	if _, looking := d.m.cfg.Device.Snapshot(d.pid, 0); looking == nil {
		return errRuntimeOff
	}
	return err
}
