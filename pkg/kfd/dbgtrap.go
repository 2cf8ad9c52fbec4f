package kfd

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// RuntimeState is enum kfd_dbg_runtime_state of kfd_ioctl.h: whether the target's
// ROCm runtime has made it ready for debugging.
type RuntimeState uint32

// The states of a target's runtime.
const (
	// RuntimeDisabled: the target has not started the runtime, or ended it.
	RuntimeDisabled RuntimeState = 0
	// RuntimeEnabled: queues can be suspended; in no other state can they.
	RuntimeEnabled RuntimeState = 1
	// RuntimeBusy: a GPU could not be had for debugging, because of another
	// debugged process or a CU mask. Disable, and try later.
	RuntimeBusy RuntimeState = 2
	// RuntimeFailed: a GPU failed to enter debugging. Disable, and try later.
	RuntimeFailed RuntimeState = 3
)

// String returns a word for the state.
func (s RuntimeState) String() string {
	switch s {
	case RuntimeDisabled:
		return "disabled"
	case RuntimeEnabled:
		return "enabled"
	case RuntimeBusy:
		return "enabled, busy"
	case RuntimeFailed:
		return "enabled, error"
	}
	return fmt.Sprintf("state(%d)", uint32(s))
}

// Enable begins to debug process pid (kfd_dbg_trap_enable). eventFD is the write
// end of a pipe in nonblocking mode; the driver writes a '.' there for each
// exception in mask. A blocking pipe can hang the target, an eventfd does not work.
//
// A nil error does not mean that queues can be suspended: RuntimeInfo.State must
// be RuntimeEnabled. It preempts every process on every GPU the target can see:
// not for the hot path. From here on somebody has to answer ECProcessRuntime.
//
// It is made once: an interrupted call returns EINTR, and whether debugging is
// enabled shows in a second, EALREADY, or in Disable. Errors beyond those at [Error]:
//
//	EALREADY  debugging is enabled already, by this process or another; under
//	          PermissionProcess the right to debug has gone to the caller now
//	ENODEV    a GPU is too old
//	EBUSY     the target uses GWS on a GPU that cannot debug it
//	EBADF     eventFD is no open descriptor
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

// Disable ends debugging: every queue of pid runs again and every exception is
// cleared (kfd_dbg_trap_disable). It preempts every process on every GPU the
// target can see. EINVAL means that debugging was not enabled: there is nothing
// left to do. It is made once, an interrupted call returns EINTR.
func (d *Device) Disable(pid int32) error {
	args := TrapDisableArgs{PID: uint32(pid), Op: TrapDisable}
	_, err := d.trap(pid, TrapDisable, PointerTo(&args))
	return err
}

// SendRuntimeEvent raises exceptions to the target's runtime, as if the driver
// had (kfd_ioctl_set_debug_trap). ECProcessRuntime releases the target from the
// call it announced itself with, or from the next if it is not in one: each send
// counts. gpu and queue say whose the exceptions are, 0 for those of the process.
// It is made once, an interrupted call returns EINTR. ENODEV: no such GPU.
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

// SetExceptions replaces the set of exceptions that are told to the debugger
// (kfd_dbg_set_enabled_debug_exception_mask). What is in it no longer reaches the
// target's runtime by itself, so that a set with memory faults in it makes the
// target hang where it would have died. A pending one of the set is told at once.
func (d *Device) SetExceptions(pid int32, mask ExceptionMask) error {
	args := TrapSetExceptionsEnabledArgs{PID: uint32(pid), Op: TrapSetExceptionsEnabled}
	_, err := d.trapAgain(pid, TrapSetExceptionsEnabled, PointerTo(&args), func() { args.ExceptionMask = mask })
	return err
}

// DebugEvent is what was raised at one source.
type DebugEvent struct {
	// Raised is everything pending there, told or not.
	Raised ExceptionMask
	// GPU is the source's GPU; 0 when the source is the process.
	GPU gpreempt.GPUID
	// Queue is the source if Raised has one of ExceptionsOfQueue; queue 0 is a
	// queue like any other, and 0 stands for no queue too.
	Queue uint32
}

// QueryDebugEvent finds the first source at which an exception the debugger is
// told of is pending, and clears those of clearMask there: queues first, the newest
// before the others, then GPUs, then the process (kfd_dbg_ev_query_debug_event).
// False means that nothing is pending; call it until then after each '.'. With
// clearMask empty it may be interrupted; otherwise it is made once and may return EINTR.
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

// once makes a call that changes something when changes is true a single time,
// and otherwise as often as it takes.
func once(changes bool, call func() error) error {
	if changes {
		return call()
	}
	return retry(call)
}

// maxExceptionInfo is more than any exception has to say: 32 bytes for a memory
// violation, 16 for the runtime's state.
const maxExceptionInfo = 64

// QueryExceptionInfo returns what the driver keeps about exception code at source,
// a queue id or a gpu_id by the class of the code, anything for the process's; and
// clears that code there if clearIt is set (kfd_dbg_trap_query_exception_info). Most
// codes have nothing to say. For ECProcessRuntime see [ParseRuntimeInfo]. With
// clearIt it is made once and may return EINTR. Errors beyond those at [Error]:
//
//	ENODATA  the exception is not pending there
//	EINVAL   no such source or code, too
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

// ParseRuntimeInfo reads what QueryExceptionInfo gives for ECProcessRuntime. It
// wants at least the 16 bytes of struct kfd_runtime_info.
func ParseRuntimeInfo(b []byte) (RuntimeInfo, error) {
	var info RuntimeInfo
	if n := copy(bytesOf(&info), b); n < len(bytesOf(&info)) {
		return RuntimeInfo{}, fmt.Errorf("%w: runtime info of %d bytes, want %d", ErrInconsistent, n, len(bytesOf(&info)))
	}
	return info, nil
}

// ProbePermissionRule finds out whom the driver lets debug pid, by asking for
// something harmless: a count of its queues. It tells only after Enable succeeded,
// and from a thread that does not trace the target: after PTRACE_DETACH, or on
// another thread than the tracer's. PermissionUnknown comes with the error that
// left it open; asking again later may tell.
//
// PermissionThread is also the answer when another debugger has tried to enable
// debugging since, because the driver has given the right to that one.
func (d *Device) ProbePermissionRule(pid int32) (PermissionRule, error) {
	_, err := d.queueSnapshot(pid, 0, nil)
	switch {
	case err == nil:
		return PermissionProcess, nil
	case errors.Is(err, unix.EPERM):
		return PermissionThread, nil
	}
	return PermissionUnknown, err
}
