package kfd

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// RuntimeState is enum kfd_dbg_runtime_state of kfd_ioctl.h: whether the target's ROCm
// runtime has prepared it for debugging.
type RuntimeState uint32

// The states of a target's runtime.
const (
	// RuntimeDisabled: the target has not started the runtime, or ended it.
	RuntimeDisabled RuntimeState = 0
	// RuntimeEnabled: queues can be suspended. In the other states they cannot.
	RuntimeEnabled RuntimeState = 1
	// RuntimeBusy: a GPU is not available for debugging, because of another debugged
	// process or a CU mask. Disable, and retry later.
	RuntimeBusy RuntimeState = 2
	// RuntimeFailed: a GPU failed to enter debugging. Disable, and retry later.
	RuntimeFailed RuntimeState = 3
)

// String returns a word for the state.
func (s RuntimeState) String() string {
	return gpreempt.Word(s, "state", "disabled", "enabled", "enabled, busy", "enabled, error")
}

// Enable starts debugging process pid (kfd_dbg_trap_enable). eventFD is the write end of a
// pipe in nonblocking mode; the driver writes a '.' to it for each exception in mask. A
// blocking pipe can hang the target, an eventfd does not work.
//
// A nil error does not mean that queues can be suspended: RuntimeInfo.State must be
// RuntimeEnabled. Enable preempts every process on every GPU that the target can use: it
// is not for the hot path. From now on the caller must answer ECProcessRuntime.
//
// The call is made once: if it is interrupted it returns EINTR. Whether debugging is
// enabled then, shows in a second call, EALREADY, or in Disable. Errors beyond those at
// [Error]:
//
//	EALREADY  debugging is enabled already, by this process or another; under
//	          PermissionProcess the caller has the right to debug now
//	ENODEV    a GPU is too old
//	EBUSY     the target uses GWS on a GPU that cannot debug it
//	EBADF     eventFD is not an open descriptor
//	EFAULT    6.12 leaves debugging half enabled
func (d *Device) Enable(pid int32, mask ExceptionMask, eventFD int) (RuntimeInfo, error) {
	var info RuntimeInfo
	args := TrapEnableArgs{
		PID:           uint32(pid),
		Op:            TrapEnable,
		ExceptionMask: mask,
		RinfoPtr:      PointerTo(&info),
		RinfoSize:     uint32(len(bytesOf(&info))),
		DbgFD:         uint32(eventFD),
	}
	if _, err := d.trap(pid, TrapEnable, PointerTo(&args)); err != nil {
		return RuntimeInfo{}, err
	}
	return info, nil
}

// Disable ends debugging: every queue of pid is resumed and every exception is cleared
// (kfd_dbg_trap_disable). It preempts every process on every GPU that the target can use.
// EINVAL means that debugging was not enabled. The call is made once; if it is interrupted
// it returns EINTR.
func (d *Device) Disable(pid int32) error {
	args := TrapDisableArgs{PID: uint32(pid), Op: TrapDisable}
	_, err := d.trap(pid, TrapDisable, PointerTo(&args))
	return err
}

// AnswerRuntime sends ECProcessRuntime to the target's runtime, as the driver does
// (kfd_ioctl_set_debug_trap): that releases the target from RUNTIME_ENABLE, or from the next one,
// since sends are counted. The call is made once; if it is interrupted it returns EINTR.
func (d *Device) AnswerRuntime(pid int32) error {
	args := TrapSendRuntimeEventArgs{PID: uint32(pid), Op: TrapSendRuntimeEvent, ExceptionMask: ECProcessRuntime.Mask()}
	_, err := d.trap(pid, TrapSendRuntimeEvent, PointerTo(&args))
	return err
}

// DebugEvent is the exceptions at one source.
type DebugEvent struct {
	// Raised is everything pending there, reported or not.
	Raised ExceptionMask
	// GPU is the source's GPU, 0 if the source is the process.
	GPU gpreempt.GPUID
	// Queue is the source if Raised has one of KFD_EC_MASK_QUEUE, otherwise 0. Queue 0 is
	// a valid queue.
	Queue uint32
}

// QueryDebugEvent returns the first source with a pending exception that the debugger
// enabled, and clears the exceptions in clearMask there: queues first, from the newest on,
// then GPUs, then the process (kfd_dbg_ev_query_debug_event). False means that nothing is
// pending; call it until then after each '.'. With an empty clearMask an interrupted call
// is repeated; otherwise it is made once and may return EINTR.
func (d *Device) QueryDebugEvent(pid int32, clearMask ExceptionMask) (DebugEvent, bool, error) {
	args := TrapQueryDebugEventArgs{PID: uint32(pid), Op: TrapQueryDebugEvent}
	err := once(clearMask != 0, func() error {
		args.ExceptionMask, args.GPUID, args.QueueID = clearMask, 0, 0
		_, err := d.trap(pid, TrapQueryDebugEvent, PointerTo(&args))
		return err
	})
	if errors.Is(err, unix.EAGAIN) {
		return DebugEvent{}, false, nil
	}
	if err != nil {
		return DebugEvent{}, false, err
	}
	return DebugEvent{Raised: args.ExceptionMask, GPU: gpreempt.GPUID(args.GPUID), Queue: args.QueueID}, true, nil
}

// once makes a call, and repeats it after an interruption unless it changes something.
func once(changes bool, call func() error) error {
	if changes {
		return call()
	}
	return retry(call)
}

// TakeRuntimeInfo returns the state of the target's runtime that ECProcessRuntime announced, and
// clears the exception (kfd_dbg_trap_query_exception_info). The call is made once; if it is
// interrupted it returns EINTR. ErrInconsistent means that the driver cleared it without the state.
// Errors beyond those at [Error]:
//
//	ENODATA  the exception is not pending
func (d *Device) TakeRuntimeInfo(pid int32) (RuntimeInfo, error) {
	var info RuntimeInfo
	size := uint32(len(bytesOf(&info)))
	args := TrapQueryExceptionInfoArgs{
		PID:            uint32(pid),
		Op:             TrapQueryExceptionInfo,
		InfoPtr:        PointerTo(&info),
		InfoSize:       size,
		ExceptionCode:  ECProcessRuntime,
		ClearException: 1,
	}
	if _, err := d.trap(pid, TrapQueryExceptionInfo, PointerTo(&args)); err != nil {
		return RuntimeInfo{}, err
	}
	if args.InfoSize < size {
		return RuntimeInfo{}, fmt.Errorf("%w: runtime info of %d bytes, want %d", ErrInconsistent, args.InfoSize, size)
	}
	return info, nil
}

// ProbePermissionRule finds out who may debug pid, by a call without effect: a count of
// its queues. The result is valid only after Enable succeeded, and from a thread that does
// not trace the target: after PTRACE_DETACH, or on another thread than the tracer.
// PermissionUnknown comes with the error of the call; a later call may succeed.
//
// PermissionThread is also the result if another debugger has called ENABLE since, because
// that one has the right to debug now.
func (d *Device) ProbePermissionRule(pid int32) (PermissionRule, error) {
	_, _, err := d.snapshot(pid, TrapGetQueueSnapshot, 0, nil, len(bytesOf(new(QueueSnapshotEntry))))
	switch {
	case err == nil:
		return PermissionProcess, nil
	case errors.Is(err, unix.EPERM):
		return PermissionThread, nil
	}
	return PermissionUnknown, err
}
