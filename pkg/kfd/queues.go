package kfd

import (
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// The bits that the driver sets in the array of IDs (kfd_ioctl.h). An ID with one of them
// is not valid in the next call.
const (
	// QueueErrorMask is KFD_DBG_QUEUE_ERROR_MASK: the hardware failed.
	QueueErrorMask uint32 = 1 << 30
	// QueueInvalidMask is KFD_DBG_QUEUE_INVALID_MASK: the queue was skipped.
	QueueInvalidMask uint32 = 1 << 31
)

// Grace periods: how long the GPU waits for waves to end before it saves them, in units of
// 1000 GPU clocks, of which the hardware takes the lowest 8 bits.
const (
	// GraceMin is the shortest, which every driver passes on. What 0 means is the driver's to
	// choose: up to Linux 7.2 it was 1, and from 7.3 on, with most firmware, it leaves the
	// default period (pm_config_dequeue_wait_counts_v9, pm_grace_period_0_supported).
	GraceMin uint32 = 1
)

// QueueStatus is the result of one queue in a call to suspend or resume.
type QueueStatus uint8

// The results.
const (
	// QueueOK: the queue is suspended or resumed, by this call or before.
	QueueOK QueueStatus = iota
	// QueueSkipped: the target has no such queue; or it is being destroyed; or ECQueueNew is
	// set, which a snapshot clears; or the GPU failed at another queue first. The driver does
	// not report which.
	QueueSkipped
	// QueueHardwareError: the GPU failed or is being reset. The driver counts the queue as
	// suspended although it may still run, and reports OK in the next call.
	QueueHardwareError
)

// String returns words for the status.
func (s QueueStatus) String() string {
	return gpreempt.Word(s, "status", "ok", "skipped", "hardware error")
}

// QueueResult is the result of one queue.
type QueueResult struct {
	ID     uint32
	Status QueueStatus
}

// Suspend suspends the queues ids of pid (suspend_queues) and returns the result of each,
// in the order of ids; ids is not modified. An *Error means that the driver rejected the
// whole call and suspended nothing. A nil error does not mean that every queue is
// suspended: check each status. The grace period is GraceMin: the GPU saves the waves at once.
//
// Each call preempts every process on each GPU that has one of the queues, unless the
// firmware schedules queue by queue: pass all queues of a process in one call, including
// those for copying (SDMA). It may block for 9 seconds per GPU. Queues that are created
// meanwhile run. Without ids no call is made.
//
// More than MaxQueues ids, a duplicate, or an ID with the bits of QueueErrorMask or
// QueueInvalidMask are rejected with EINVAL without a call. ErrInconsistent means that any
// of the queues may be suspended now: use ResumeAll. Other errors are at [Error].
func (d *Device) Suspend(pid int32, ids []uint32) ([]QueueResult, error) {
	array, err := cleanIDs(pid, TrapSuspendQueues, ids)
	if err != nil || len(ids) == 0 {
		return nil, err
	}
	args := TrapSuspendQueuesArgs{
		PID:           uint32(pid),
		Op:            TrapSuspendQueues,
		QueueArrayPtr: PointerToSlice(array),
		NumQueues:     uint32(len(array)),
		GracePeriod:   GraceMin,
	}
	return d.trapQueues(pid, TrapSuspendQueues, PointerTo(&args), ids, array)
}

// Resume resumes the queues ids of pid (resume_queues). The description of Suspend applies.
// A queue that runs already is OK.
func (d *Device) Resume(pid int32, ids []uint32) ([]QueueResult, error) {
	array, err := cleanIDs(pid, TrapResumeQueues, ids)
	if err != nil || len(ids) == 0 {
		return nil, err
	}
	args := TrapResumeQueuesArgs{
		PID:           uint32(pid),
		Op:            TrapResumeQueues,
		QueueArrayPtr: PointerToSlice(array),
		NumQueues:     uint32(len(array)),
	}
	return d.trapQueues(pid, TrapResumeQueues, PointerTo(&args), ids, array)
}

// ResumeAll resumes every queue of pid (resume_queues without an array) and returns their
// number. Queues of a GPU that failed are only missing from the number: compare it with a
// snapshot. It may block like Suspend.
func (d *Device) ResumeAll(pid int32) (int, error) {
	args := TrapResumeQueuesArgs{PID: uint32(pid), Op: TrapResumeQueues}
	n, err := d.trapAgain(pid, TrapResumeQueues, PointerTo(&args), func() {})
	if err != nil {
		return 0, err
	}
	return int(n), nil
}

// cleanIDs checks ids and returns an array for the copy that is sent. Without ids the
// array is nil and must not be sent: without an array RESUME_QUEUES means all queues.
func cleanIDs(pid int32, op TrapOp, ids []uint32) ([]uint32, error) {
	refused := &Error{Op: trapName(op), PID: pid, Errno: unix.EINVAL}
	if len(ids) > MaxQueues {
		return nil, fmt.Errorf("%d queues in one call, at most %d: %w", len(ids), MaxQueues, refused)
	}
	array := slices.Sorted(slices.Values(ids))
	for i, id := range array {
		switch {
		case id&(QueueErrorMask|QueueInvalidMask) != 0:
			return nil, fmt.Errorf("invalid queue ID %#x: its upper bits have the result of an earlier call: %w", id, refused)
		case i > 0 && id == array[i-1]:
			return nil, fmt.Errorf("duplicate queue %d: %w", id, refused)
		}
	}
	return array, nil
}

// trapQueues makes a call with args, which has array for ids, and returns the results from
// the array that the driver wrote and the number that it returned, which counts the clean
// IDs. If they differ, the driver could not write the array, which it only logs.
func (d *Device) trapQueues(pid int32, op TrapOp, args Pointer, ids, array []uint32) ([]QueueResult, error) {
	n, err := d.trapAgain(pid, op, args, func() { copy(array, ids) })
	if err != nil {
		return nil, err
	}
	res := make([]QueueResult, len(ids))
	var ok uintptr
	for i, id := range ids {
		res[i] = QueueResult{ID: id, Status: status(array[i])}
		if got := array[i] &^ (QueueErrorMask | QueueInvalidMask); got != id {
			return nil, fmt.Errorf("%s of process %d: %w: queue %d was returned as %d", trapName(op), pid, ErrInconsistent, id, got)
		}
		if res[i].Status == QueueOK {
			ok++
		}
	}
	if ok != n {
		return nil, fmt.Errorf("%s of process %d: %w: it counted %d queues and marked %d", trapName(op), pid, ErrInconsistent, n, ok)
	}
	return res, nil
}

// status reads the bits of one id. The driver may set both.
func status(id uint32) QueueStatus {
	switch {
	case id&QueueErrorMask != 0:
		return QueueHardwareError
	case id&QueueInvalidMask != 0:
		return QueueSkipped
	}
	return QueueOK
}
