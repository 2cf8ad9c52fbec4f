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

// SendRuntimeEvent sends exceptions to the target's runtime, as the driver does
// (kfd_ioctl_set_debug_trap). ECProcessRuntime releases the target from RUNTIME_ENABLE, or
// from the next one: sends are counted. gpu and queue are the source of the exceptions, 0
// for those of the process. The call is made once; if it is interrupted it returns EINTR.
// ENODEV means that the target has no such GPU.
func (d *Device) SendRuntimeEvent(pid int32, mask ExceptionMask, gpu gpreempt.GPUID, queue uint32) error {
	args := TrapSendRuntimeEventArgs{
		PID:           uint32(pid),
		Op:            TrapSendRuntimeEvent,
		ExceptionMask: mask,
		GPUID:         uint32(gpu),
		QueueID:       queue,
	}
	e := Error{Op: trapName(TrapSendRuntimeEvent), PID: pid, GPU: gpu, Queue: NoQueue}
	if mask&ExceptionsOfQueue != 0 {
		e.Queue = queue
	}
	_, err := d.handle.ioctl(ReqDbgTrap, PointerTo(&args))
	return fail(err, e)
}

// SetExceptions replaces the set of exceptions that the debugger is notified of
// (kfd_dbg_set_enabled_debug_exception_mask). The driver does not send exceptions of the
// set to the target's runtime, so with memory faults in it the target hangs instead of
// ending. A pending exception of the set is reported at once.
func (d *Device) SetExceptions(pid int32, mask ExceptionMask) error {
	args := TrapSetExceptionsEnabledArgs{PID: uint32(pid), Op: TrapSetExceptionsEnabled}
	_, err := d.trapAgain(pid, TrapSetExceptionsEnabled, PointerTo(&args), func() { args.ExceptionMask = mask })
	return err
}

// DebugEvent is the exceptions at one source.
type DebugEvent struct {
	// Raised is everything pending there, reported or not.
	Raised ExceptionMask
	// GPU is the source's GPU, 0 if the source is the process.
	GPU gpreempt.GPUID
	// Queue is the source if Raised has one of ExceptionsOfQueue, otherwise 0. Queue 0 is
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

// maxExceptionInfo is more than the data of any exception: 32 bytes for a memory
// violation, 16 for the runtime's state.
const maxExceptionInfo = 64

// QueryExceptionInfo returns the driver's data of exception code at source, and clears the
// code there if clearIt is set (kfd_dbg_trap_query_exception_info). source is a queue ID
// or a gpu_id, by the class of the code; it is ignored for those of the process. Most
// codes have no data. For ECProcessRuntime see [ParseRuntimeInfo]. With clearIt the call is
// made once and may return EINTR. Errors beyond those at [Error]:
//
//	ENODATA  the exception is not pending there
//	EINVAL   also: no such source or code
func (d *Device) QueryExceptionInfo(pid int32, source uint32, code ExceptionCode, clearIt bool) ([]byte, error) {
	info := make([]byte, maxExceptionInfo)
	args := TrapQueryExceptionInfoArgs{
		PID:           uint32(pid),
		Op:            TrapQueryExceptionInfo,
		InfoPtr:       PointerToSlice(info),
		SourceID:      source,
		ExceptionCode: code,
	}
	if clearIt {
		args.ClearException = 1
	}
	e := Error{Op: trapName(TrapQueryExceptionInfo), PID: pid, Queue: NoQueue}
	switch mask := code.Mask(); {
	case mask&ExceptionsOfQueue != 0:
		e.Queue = source
	case mask&ExceptionsOfDevice != 0:
		e.GPU = gpreempt.GPUID(source)
	}
	err := once(clearIt, func() error {
		args.InfoSize = maxExceptionInfo
		_, err := d.handle.ioctl(ReqDbgTrap, PointerTo(&args))
		return fail(err, e)
	})
	if err != nil {
		return nil, err
	}
	return info[:min(args.InfoSize, maxExceptionInfo)], nil
}

// ParseRuntimeInfo reads the result of QueryExceptionInfo for ECProcessRuntime. It needs
// at least the 16 bytes of struct kfd_runtime_info.
func ParseRuntimeInfo(b []byte) (RuntimeInfo, error) {
	var info RuntimeInfo
	if n := copy(bytesOf(&info), b); n < len(bytesOf(&info)) {
		return RuntimeInfo{}, fmt.Errorf("%w: runtime info of %d bytes, want %d", ErrInconsistent, n, len(bytesOf(&info)))
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
