package kfd

import (
	"fmt"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// ExceptionCode is enum kfd_dbg_trap_exception_code of kfd_ioctl.h: an event of a queue, a
// GPU or a process that a debugger can be notified of.
type ExceptionCode uint32

// The exception codes that the daemon acts on.
const (
	// ECQueueNew is set on every new queue, with or without a debugger. The queue cannot
	// be suspended until a snapshot clears it.
	ECQueueNew ExceptionCode = 31
	// ECProcessRuntime is raised when the target starts or ends the ROCm runtime. The
	// target then blocks until AnswerRuntime sends it this code: a debugger that does
	// not answer hangs every clean exit.
	ECProcessRuntime ExceptionCode = 48
)

// ExceptionMask is a set of exception codes, code c being bit c-1 (KFD_EC_MASK).
type ExceptionMask uint64

// Mask returns the set of c alone. It is empty for a code that does not fit in a mask.
func (c ExceptionCode) Mask() ExceptionMask {
	if c < 1 || c > 64 {
		return 0
	}
	return 1 << (c - 1)
}

// Exceptions returns the set of codes.
func Exceptions(codes ...ExceptionCode) ExceptionMask {
	var m ExceptionMask
	for _, c := range codes {
		m |= c.Mask()
	}
	return m
}

// Has reports whether c is in the set.
func (m ExceptionMask) Has(c ExceptionCode) bool { return m&c.Mask() != 0 }

// String returns the set in hexadecimal, as the header writes it.
func (m ExceptionMask) String() string { return fmt.Sprintf("%#x", uint64(m)) }

// TrapOp is enum kfd_dbg_trap_operations of kfd_ioctl.h: the operation of a DBG_TRAP call.
type TrapOp uint32

// The operations.
const (
	TrapEnable             TrapOp = 0
	TrapDisable            TrapOp = 1
	TrapSendRuntimeEvent   TrapOp = 2
	TrapSuspendQueues      TrapOp = 6
	TrapResumeQueues       TrapOp = 7
	TrapQueryDebugEvent    TrapOp = 11
	TrapQueryExceptionInfo TrapOp = 12
	TrapGetQueueSnapshot   TrapOp = 13
	TrapGetDeviceSnapshot  TrapOp = 14
)

// trapOpNames are the header's names without KFD_IOC_DBG_TRAP_.
var trapOpNames = [...]string{
	"ENABLE", "DISABLE", "SEND_RUNTIME_EVENT", "SET_EXCEPTIONS_ENABLED", "SET_WAVE_LAUNCH_OVERRIDE", "SET_WAVE_LAUNCH_MODE",
	"SUSPEND_QUEUES", "RESUME_QUEUES", "SET_NODE_ADDRESS_WATCH", "CLEAR_NODE_ADDRESS_WATCH", "SET_FLAGS",
	"QUERY_DEBUG_EVENT", "QUERY_EXCEPTION_INFO", "GET_QUEUE_SNAPSHOT", "GET_DEVICE_SNAPSHOT",
}

// String returns the header's name without KFD_IOC_DBG_TRAP_.
func (o TrapOp) String() string { return gpreempt.Word(o, "op", trapOpNames[:]...) }
