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

// maxRounds bounds a race against a target that makes queues all the time.
const maxRounds = 8

// suspend takes every queue off its GPU, those born since the last call included. done
// is called, on the thread that made the call, when the driver has suspended them; it is
// not called where there are none. On an error some may be suspended: the caller resumes
// them.
func (h *hold) suspend(ctx context.Context, done func()) error {
	// What is known is trusted where it saves a call on the hot path: none is suspended
	// twice, and the runtime's state is asked for when it stands in the way only.
	stale := len(h.held) > 0 || h.state != kfd.RuntimeEnabled
	for {
		if stale {
			if err := h.serve(ctx); err != nil {
				return err
			}
		}
		if h.state == kfd.RuntimeEnabled {
			err := h.suspendAll(ctx, done)
			if stale || !errors.Is(err, errRuntimeOff) {
				return err
			}
			stale = true
			continue
		}
		return h.withoutRuntime(ctx)
	}
}

// withoutRuntime returns an error if the target has queues although its runtime is not
// enabled.
func (h *hold) withoutRuntime(ctx context.Context) error {
	var snapshot []kfd.QueueSnapshotEntry
	err := h.op(ctx, func() (err error) {
		snapshot, err = h.snapshot()
		return err
	})
	if err == nil && len(snapshot) > 0 {
		err = h.without(len(snapshot))
	}
	return err
}

// endingTime bounds how long queues that are being destroyed are waited for. One takes
// the driver about a millisecond, of one process they go one after another, and each of
// those that were waiting for a resume is woken by it.
const endingTime = 100 * time.Millisecond

// suspendAll returns queues that are being destroyed, which the driver does not suspend,
// the time for that.
func (h *hold) suspendAll(ctx context.Context, done func()) error {
	for wait, waited := time.Millisecond, time.Duration(0); ; wait *= 2 {
		err := h.op(ctx, func() error {
			err := h.suspendRounds()
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
func (h *hold) suspendRounds() error {
	c := newCampaign(h.held)
	for range maxRounds {
		snapshot, err := h.snapshot()
		if err != nil {
			return err
		}
		ids := c.next(snapshot)
		if len(ids) == 0 {
			return nil
		}
		results, err := h.m.cfg.Device.Suspend(h.pid, ids, kfd.GracePeriod{})
		if err != nil {
			return h.runtimeOff(err)
		}
		switch v := c.judge(results, snapshot); {
		case len(v.failed) > 0:
			return &mechanism.HardwareError{GPUs: v.failed, Err: fmt.Errorf("suspend the queues of process %d: the GPU is hung or in reset: look for amdgpu errors in the kernel log", h.target.PID)}
		case len(v.refused) > 0:
			return &endingError{h.target.PID, v.refused}
		case !v.again:
			return nil
		}
	}
	return fmt.Errorf("process %d makes queues faster than they can be suspended: all of them run again", h.target.PID)
}

// resume lets every queue run again. A *mechanism.HardwareError may leave queues off
// the GPU; calling it again is what can be done for them.
func (h *hold) resume(ctx context.Context) error {
	clear(h.held)
	err := h.op(ctx, h.resumeAll)
	if !errors.Is(err, errRuntimeOff) {
		return err
	}
	// The driver has resumed them when the runtime ended; if it did.
	if h.state == kfd.RuntimeEnabled {
		if err := h.serve(ctx); err != nil || h.state != kfd.RuntimeEnabled {
			return err
		}
		return h.op(ctx, h.resumeAll)
	}
	return nil
}

// resumeAll is made on the tracing thread.
func (h *hold) resumeAll() error {
	n, snapshot, err := h.resumeOnce()
	if err != nil || n >= len(snapshot) {
		return err
	}
	// The driver does not say which queues it could not resume, only how many it did.
	// Asked for them by name it does, where a runlist is in use.
	h.stranded = true
	results, err := h.m.cfg.Device.Resume(h.pid, idsOf(snapshot))
	if err != nil {
		return h.runtimeOff(err)
	}
	gpus := gpusOf(failures(results), snapshot)
	if len(gpus) == 0 {
		if n, snapshot, err = h.resumeOnce(); err != nil || n >= len(snapshot) {
			return err
		}
		gpus = gpusOf(idsOf(snapshot), snapshot) // one of them
	}
	return &mechanism.HardwareError{GPUs: gpus, Err: fmt.Errorf("resume the queues of process %d: the GPU is hung or in reset: look for amdgpu errors in the kernel log", h.target.PID)}
}

// resumeOnce returns the number of queues that were resumed, and those that should
// have been.
func (h *hold) resumeOnce() (int, []kfd.QueueSnapshotEntry, error) {
	d := h.m.cfg.Device
	if h.stranded {
		// Where the firmware schedules queue by queue, one it failed to take back counts
		// as resumed from then on, and stays off the GPU (resume_single_queue). To
		// suspend it first makes the driver try once more.
		snapshot, err := h.snapshot()
		if err == nil {
			_, err = d.Suspend(h.pid, idsOf(snapshot), kfd.GracePeriod{})
		}
		if err != nil && !errors.Is(err, kfd.ErrInconsistent) {
			return 0, nil, h.runtimeOff(err)
		}
	}
	n, err := d.ResumeAll(h.pid)
	if err != nil {
		return 0, nil, h.runtimeOff(err)
	}
	snapshot, err := d.Snapshot(h.pid, 0)
	if err != nil {
		return 0, nil, err
	}
	snapshot = slices.DeleteFunc(snapshot, func(q kfd.QueueSnapshotEntry) bool {
		return q.ExceptionStatus.Has(kfd.ECQueueNew) // it may have been born since
	})
	h.stranded = h.stranded && n < len(snapshot)
	return n, snapshot, nil
}

// runtimeOff finds out which of two things EPERM means for a call on queues: a
// snapshot has only the one reason, that we are not the debugger.
func (h *hold) runtimeOff(err error) error {
	if !errors.Is(err, unix.EPERM) {
		return err
	}
	if _, looking := h.m.cfg.Device.Snapshot(h.pid, 0); looking == nil {
		return errRuntimeOff
	}
	return err
}
