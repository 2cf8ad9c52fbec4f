package kfd

// CRIUOp is enum kfd_criu_op of kfd_ioctl.h: the steps of a checkpoint.
type CRIUOp uint32

// The steps that this package uses.
const (
	CRIUOpProcessInfo CRIUOp = 0
	CRIUOpUnpause     CRIUOp = 2
)

const (
	opCRIUPause   = "CRIU_OP PROCESS_INFO"
	opCRIUUnpause = "CRIU_OP UNPAUSE"
)

// CRIUPause evicts every queue of pid from every GPU (criu_process_info), including those
// created later, until CRIUUnpause. Nothing else undoes it, not even the exit of the
// caller. fd is the target's own open /dev/kfd, from pidfd_getfd; close it soon, because it
// keeps the target's memory after the target's exit. The calling OS thread must trace the
// target's main thread and have CAP_CHECKPOINT_RESTORE or CAP_SYS_ADMIN.
//
// A second pause would need a second CRIUUnpause, which the driver refuses: the process
// would never run again. The driver cannot report whether a process is paused. So record
// the pause before the call, and unpause after any error and after a crash. The call is
// made once; if it is interrupted it returns EINTR. It may block for 9 seconds per GPU.
// Errors are *Error:
//
//	EACCES      no capability
//	EBADF       this thread does not trace the target, or fd is not the target's
//	ENODEV      the target has no GPU
//	EIO         a GPU hangs or is being reset
//	EOPNOTSUPP  a queue of a kind that cannot be saved
func CRIUPause(sys Sys, fd int, pid int32) error {
	args := CRIUArgs{Op: CRIUOpProcessInfo}
	_, err := sys.Ioctl(fd, ReqCRIUOp, PointerTo(&args))
	return fail(err, Error{Op: opCRIUPause, PID: pid})
}

// CRIUUnpause undoes one CRIUPause (criu_unpause), with the same conditions for fd and the
// calling thread. EINVAL means that the process is not paused, which after a crash counts
// as success. The call is made once.
func CRIUUnpause(sys Sys, fd int, pid int32) error {
	args := CRIUArgs{Op: CRIUOpUnpause}
	_, err := sys.Ioctl(fd, ReqCRIUOp, PointerTo(&args))
	return fail(err, Error{Op: opCRIUUnpause, PID: pid})
}
