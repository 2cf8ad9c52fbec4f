package kfd

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// ErrInconsistent reports a result of the driver that contradicts itself: the state of the
// queues is not known.
var ErrInconsistent = errors.New("inconsistent result of the driver")

// Error is an error of the driver. errors.Is finds the errno in it: errors.Is(err,
// unix.ESRCH) is true when the target has exited, in any call, which is an event rather
// than a failure.
//
// For all DBG_TRAP operations (kfd_ioctl_set_debug_trap):
//
//	ESRCH       the target has exited, or never opened the driver
//	EPERM       the caller may not debug the target, see PermissionRule; for
//	            SUSPEND_QUEUES and RESUME_QUEUES also: the target's runtime is not
//	            in state RuntimeEnabled. A snapshot fails only for the first reason,
//	            so a successful one distinguishes the two.
//	EINVAL      debugging is not enabled, or the driver runs without the hardware
//	            scheduler (module parameter sched_policy=2)
//	EBADF       the descriptor was opened by another process
//	EOPNOTSUPP  the target or the caller is a secondary context (7.2)
//	ENOTTY      the driver has no such request (EINVAL in older ones)
//	EBUSY       the PC sampler is active (AMD's own packages)
//
// The methods document further errors of their operations.
type Error struct {
	// Op is the operation by the header's name, such as DBG_TRAP ENABLE.
	Op string
	// PID is the target, 0 for calls without one.
	PID int32
	// GPU is the GPU the call was about, 0 for none.
	GPU gpreempt.GPUID
	// Errno is the driver's error.
	Errno unix.Errno
}

// Error returns the operation, its target, the errno and what the errno means there.
func (e *Error) Error() string {
	s := e.Op
	if e.PID != 0 {
		s += " of process " + strconv.Itoa(int(e.PID))
	}
	if e.GPU != 0 {
		s += " GPU " + e.GPU.String()
	}
	s += ": " + e.Errno.Error()
	if why := e.reason(); why != "" {
		s += ": " + why
	}
	return s
}

// Unwrap returns the errno.
func (e *Error) Unwrap() error { return e.Errno }

// trapName is Error.Op of a DBG_TRAP operation.
func trapName(op TrapOp) string { return ReqDbgTrap.String() + " " + op.String() }

// reasons has the meaning of an errno for one operation.
var reasons = map[string]map[unix.Errno]string{
	opOpen: {
		unix.ENOENT: "the amdgpu driver is not loaded, or the container was not given the device",
		unix.EACCES: "add the user to the group of the device, usually render",
		unix.EPERM:  "the device cgroup denies it",
		unix.EINVAL: "a GPU reset or a change of partitions is in progress; retry later",
	},
	trapName(TrapEnable): {
		unix.EALREADY: "another debugger is attached to the process on the GPU",
		unix.ENODEV:   "a GPU that the process can use is too old for debugging",
		unix.EBUSY:    "the process uses GWS on a GPU that cannot debug it, or the PC sampler is active",
		unix.EBADF:    "the event descriptor is not open, or the driver was opened by another process",
		unix.EFAULT:   "debugging may be partly enabled; disable it",
	},
	trapName(TrapSuspendQueues):      {unix.EPERM: permissionOrRuntime},
	trapName(TrapResumeQueues):       {unix.EPERM: permissionOrRuntime},
	trapName(TrapQueryExceptionInfo): {unix.ENODATA: "the exception is not raised"},
	opCRIUPause:                      criuReasons,
	opCRIUUnpause:                    criuReasons,
	opSMI: {
		unix.EINVAL: "unknown GPU, or the device cgroup hides it",
	},
}

var criuReasons = map[unix.Errno]string{
	unix.EACCES:     "it needs CAP_CHECKPOINT_RESTORE or CAP_SYS_ADMIN",
	unix.EBADF:      "the calling thread does not trace the process's main thread, or it is not the process's descriptor",
	unix.EINVAL:     "the process is not paused",
	unix.ENODEV:     "the process has no GPU",
	unix.EIO:        "the GPU hangs or is being reset",
	unix.EOPNOTSUPP: "the process has a queue of a kind that cannot be saved",
}

const permissionOrRuntime = "the calling thread may not debug the process, or the process's ROCm runtime is not enabled; if a queue snapshot succeeds it is the latter"

// trapReasons are for DBG_TRAP operations without their own reason.
var trapReasons = map[unix.Errno]string{
	unix.ESRCH:      "the process has exited or does not use the GPU",
	unix.EPERM:      "the calling thread may not debug the process",
	unix.EINVAL:     "debugging is not enabled for the process, or the driver runs without the hardware scheduler",
	unix.EBADF:      "the driver was opened by another process",
	unix.EOPNOTSUPP: "only the first KFD context of a process can be debugged",
	unix.ENOTTY:     "the driver has no such request",
	unix.EBUSY:      "the PC sampler may be active",
}

// reason returns the meaning of the errno for the operation, "" if it is not known.
func (e *Error) reason() string {
	if why, ok := reasons[e.Op][e.Errno]; ok {
		return why
	}
	if strings.HasPrefix(e.Op, ReqDbgTrap.String()) {
		return trapReasons[e.Errno]
	}
	return ""
}

// fail returns e with the errno of err, an error of Sys. An error without an errno is
// wrapped with the operation.
func fail(err error, e Error) error {
	if err == nil {
		return nil
	}
	if !errors.As(err, &e.Errno) {
		return fmt.Errorf("%s: %w", e.Op, err)
	}
	return &e
}
