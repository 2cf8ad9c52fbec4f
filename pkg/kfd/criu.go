package kfd

import "strconv"

// CRIUOp is enum kfd_criu_op of kfd_ioctl.h: the steps of a checkpoint.
type CRIUOp uint32

// The steps. Only the first and CRIUOpUnpause are used here.
const (
	CRIUOpProcessInfo CRIUOp = 0
	CRIUOpCheckpoint  CRIUOp = 1
	CRIUOpUnpause     CRIUOp = 2
	CRIUOpRestore     CRIUOp = 3
	CRIUOpResume      CRIUOp = 4
)

const (
	opCRIUPause   = "CRIU_OP PROCESS_INFO"
	opCRIUUnpause = "CRIU_OP UNPAUSE"
)

// String returns the header's name without KFD_CRIU_OP_.
func (o CRIUOp) String() string {
	switch o {
	case CRIUOpProcessInfo:
		return "PROCESS_INFO"
	case CRIUOpCheckpoint:
		return "CHECKPOINT"
	case CRIUOpUnpause:
		return "UNPAUSE"
	case CRIUOpRestore:
		return "RESTORE"
	case CRIUOpResume:
		return "RESUME"
	}
	return "op(" + strconv.FormatUint(uint64(o), 10) + ")"
}

// CRIUInfo is what a checkpoint of a paused process would hold.
type CRIUInfo struct {
	// PID is the process's id in its own pid namespace.
	PID int32
	// Devices, BOs and Objects count its GPUs, buffers and all else.
	Devices, BOs, Objects uint32
	// PrivDataBytes is the size of the driver's own part.
	PrivDataBytes uint64
}

// CRIUPause takes every queue of pid off every GPU (criu_process_info), those born
// later included, until CRIUUnpause: nothing else undoes it, not even the death of
// the caller. fd is the target's own open /dev/kfd, taken with pidfd_getfd; it
// should be closed soon, because it keeps the target's memory after its death. The
// calling OS thread must trace the target's main thread and have
// CAP_CHECKPOINT_RESTORE or CAP_SYS_ADMIN.
//
// Pausing twice takes more than one CRIUUnpause to undo, and there is only one:
// the process would never run again. Nor can it be asked whether a process is
// paused. Note it down before the call; after an error of any kind, and after a
// crash, unpause. It is made once, an interrupted call returns EINTR. It may block
// for 9 seconds a GPU. Errors are *Error:
//
//	EACCES      no capability
//	EBADF       this thread does not trace the target, or fd is not its
//	ENODEV      the target has no GPU
//	EIO         a GPU hangs or is being reset
//	EOPNOTSUPP  a queue of a kind that cannot be saved
func CRIUPause(sys Sys, fd int, pid int32) (CRIUInfo, error) {
	args := CRIUArgs{Op: CRIUOpProcessInfo}
	if _, err := sys.Ioctl(fd, ReqCRIUOp, PointerTo(&args)); err != nil {
		return CRIUInfo{}, fail(err, Error{Op: opCRIUPause, PID: pid, Queue: NoQueue})
	}
	return CRIUInfo{
		PID:           int32(args.PID),
		Devices:       args.NumDevices,
		BOs:           args.NumBOs,
		Objects:       args.NumObjects,
		PrivDataBytes: args.PrivDataSize,
	}, nil
}

// CRIUUnpause puts back what one CRIUPause took (criu_unpause); what is said of fd
// and of the calling thread there holds. EINVAL: the process is not paused, which
// after a crash is as good as success. It is made once.
func CRIUUnpause(sys Sys, fd int, pid int32) error {
	args := CRIUArgs{Op: CRIUOpUnpause}
	_, err := sys.Ioctl(fd, ReqCRIUOp, PointerTo(&args))
	return fail(err, Error{Op: opCRIUUnpause, PID: pid, Queue: NoQueue})
}
