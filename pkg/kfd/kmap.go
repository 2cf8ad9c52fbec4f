package kfd

import (
	"errors"
	"fmt"
	"math"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

const opOpenKmap = "open " + KmapPath

// kmapMajor is KFD_KMAP_ABI_MAJOR. Minor versions only add.
const kmapMajor = 1

// Kmap is a handle of [KmapPath], a kernel extension that holds the queues of processes back
// from the hardware's runlist: all queues of a process, or those beyond a number. No released
// kernel has it, and it was not run on AMD hardware.
//
// The limits that a handle sets are its own. They end with the handle, also when its process
// dies, and with the lease of the last [Kmap.Set]: then every queue runs again. A process that
// inherits the descriptor shares the handle; this package opens it with O_CLOEXEC.
//
// Several goroutines may use a Kmap at once. Each call needs CAP_SYS_ADMIN. A call may block
// as long as the firmware needs, by default up to 9 seconds for each GPU.
type Kmap struct {
	handle
	info KmapInfo
}

// KmapInfo is what the extension reports about itself and about a handle.
type KmapInfo struct {
	Version Version
	// MaxTargets is the most processes of a call, MinLease and MaxLease bound its lease.
	MaxTargets         int
	MinLease, MaxLease time.Duration
	// Lapses counts the leases of this handle that have ended: with each, all its limits did.
	Lapses uint32
	// Limited is the number of living processes that this handle limits.
	Limited int
}

// OpenKmap opens the extension at path, normally [KmapPath], on this machine.
func OpenKmap(path string) (*Kmap, error) { return OpenKmapWith(Kernel(), path) }

// OpenKmapWith opens the extension at path through sys and gets its version. The error wraps
// [ErrVersion] for another major version, or is an *Error:
//
//	ENOENT  the kernel has no extension; ENXIO, ENODEV: only the file is left
//	EACCES  the file's mode forbids it
//	EPERM   no CAP_SYS_ADMIN, or the device cgroup forbids it
//	ENOTTY  the file is something else
//
// [KmapSupportOf] reads them.
func OpenKmapWith(sys Sys, path string) (*Kmap, error) {
	k := &Kmap{}
	err := k.open(sys, path, opOpenKmap)
	if err != nil {
		return nil, err
	}
	if k.info, err = k.Info(); err == nil && k.info.Version.Major != kmapMajor {
		err = fmt.Errorf("%w: %s has version %v, and %d.x is supported; install the gpreempt of that kernel", ErrVersion, path, k.info.Version, kmapMajor)
	}
	if err != nil {
		return nil, closeAfter(err, k.Close())
	}
	return k, nil
}

// KmapSupport is what an attempt to open the extension shows.
type KmapSupport uint8

// The answers.
const (
	// KmapUnknown: the attempt failed for another reason, and may succeed later.
	KmapUnknown KmapSupport = iota
	// KmapReady: it can be used.
	KmapReady
	// KmapMissing: this kernel, or this container, does not have it.
	KmapMissing
	// KmapForeign: it has another major version, or the file is something else.
	KmapForeign
	// KmapDenied: this process may not use it.
	KmapDenied
)

// KmapSupportOf returns what the error of OpenKmap means.
func KmapSupportOf(err error) KmapSupport {
	var errno unix.Errno
	switch {
	case err == nil:
		return KmapReady
	case errors.Is(err, ErrVersion):
		return KmapForeign
	case !errors.As(err, &errno):
		return KmapUnknown
	}
	switch errno {
	case unix.ENOENT, unix.ENXIO, unix.ENODEV:
		return KmapMissing
	case unix.ENOTTY:
		return KmapForeign
	case unix.EPERM, unix.EACCES:
		return KmapDenied
	default:
		return KmapUnknown
	}
}

// ProbeKmap opens the extension through sys, and closes it. The error says why the answer is
// not KmapReady, for people.
func ProbeKmap(sys Sys, path string) (KmapInfo, KmapSupport, error) {
	k, err := OpenKmapWith(sys, path)
	if err != nil {
		return KmapInfo{}, KmapSupportOf(err), err
	}
	return k.info, KmapReady, k.Close()
}

// Version returns the version of the extension.
func (k *Kmap) Version() Version { return k.info.Version }

// Info returns the present state of the handle. Errors are *Error.
func (k *Kmap) Info() (KmapInfo, error) {
	var args KmapInfoArgs
	if _, err := k.ioctl(ReqKmapInfo, PointerTo(&args)); err != nil {
		return KmapInfo{}, fail(err, Error{Op: ReqKmapInfo.String()})
	}
	return KmapInfo{
		Version:    Version{Major: args.ABIMajor, Minor: args.ABIMinor},
		MaxTargets: int(args.MaxTargets),
		MinLease:   time.Duration(args.MinLeaseMS) * time.Millisecond,
		MaxLease:   time.Duration(args.MaxLeaseMS) * time.Millisecond,
		Lapses:     args.Lapses,
		Limited:    int(args.Limited),
	}, nil
}

// KmapTarget is a process in a call of [Kmap.Set].
type KmapTarget struct {
	// PIDFD is a pidfd of the process.
	PIDFD int
	// PID is the process for the text of an error, 0 for none. It is not sent.
	PID int32
	// Limit is how many compute queues of the process stay mapped on each GPU: those with
	// the highest priority, and the oldest among them. 0 holds every queue, those for
	// copying (SDMA) too. KmapNoLimit releases the process.
	Limit uint32
	// Queues is room for the states of the process's queues, at most KmapMaxRoom; it may be
	// empty. [Kmap.Set] writes to it.
	Queues []KmapQueue
}

// KmapResult is the result of one target.
type KmapResult struct {
	// Err is nil or an *Error. The fields below are 0 with most errors.
	//
	//	EBADF       PIDFD is not a pidfd
	//	ESRCH       the process has exited, or does not use the driver: an event
	//	EBUSY       another handle limits the process
	//	EINVAL      an earlier target of the call is the same process
	//	E2BIG       Queues is too long
	//	EOPNOTSUPP  a queue of the process is on a GPU without a runlist (MES): nothing was done
	//	EIO         a GPU hangs or is being reset: the limit holds when it is back. The states of
	//	            the queues there have KmapFailed
	//	EFAULT      the states could not be written: the limit holds
	Err error
	// Total is the number of the process's queues, Held of those that its limit keeps out.
	Total, Held int
	// Queues is the filled part of the target's: complete if it has Total entries. It is
	// ordered by GPU and ID.
	Queues []KmapQueue
}

// KmapAnswer is the result of [Kmap.Set].
type KmapAnswer struct {
	// Results are those of the targets, in their order, and Failed the number with an Err.
	Results []KmapResult
	Failed  int
	// Cycles is the number of runlists that the driver submitted: at most one for each GPU.
	Cycles int
	// Lapses is that of KmapInfo.
	Lapses uint32
}

// Set sets the limits of targets in one call, with one new runlist for each GPU where that
// changes something, and starts the lease of the handle anew, also without targets. When
// lease has passed without another Set, every limit of the handle ends. lease is rounded down
// to milliseconds. grace is that of SUSPEND_QUEUES: GraceMin saves the waves at once,
// GraceDefault after the firmware's own period.
//
// An error means that no limit was changed, with two exceptions: after EFAULT, and
// [ErrInconsistent], limits may have been set: they end with the lease. It is an *Error, see
// there:
//
//	EPERM   no CAP_SYS_ADMIN
//	EINVAL  lease is out of bounds
//	E2BIG   more targets than KmapMaxTargets
func (k *Kmap) Set(targets []KmapTarget, lease time.Duration, grace uint32) (KmapAnswer, error) {
	array := make([]KmapTargetArgs, len(targets))
	for i, t := range targets {
		array[i] = KmapTargetArgs{
			PIDFD: int32(t.PIDFD), Limit: t.Limit, QueuesPtr: PointerToSlice(t.Queues), NumQueues: uint32(len(t.Queues)),
		}
	}
	args := KmapSetArgs{
		TargetsPtr: PointerToSlice(array),
		NumTargets: uint32(len(array)),
		TargetSize: kmapTargetSize,
		// Out of bounds for the driver, too.
		LeaseMS: uint32(min(max(lease.Milliseconds(), 0), math.MaxUint32)),
		Grace:   grace,
	}
	if _, err := k.ioctl(ReqKmapSet, PointerTo(&args)); err != nil {
		return KmapAnswer{}, fail(err, Error{Op: ReqKmapSet.String()})
	}
	return kmapAnswer(&args, array, targets)
}

// kmapTargetSize is sizeof(struct kfd_kmap_target).
const kmapTargetSize = 32

// kmapAnswer reads what the driver wrote.
func kmapAnswer(args *KmapSetArgs, array []KmapTargetArgs, targets []KmapTarget) (KmapAnswer, error) {
	bad := func(format string, a ...any) (KmapAnswer, error) {
		return KmapAnswer{}, fmt.Errorf("%v: %w: %s", ReqKmapSet, ErrInconsistent, fmt.Sprintf(format, a...))
	}
	answer := KmapAnswer{Results: make([]KmapResult, len(targets)), Cycles: int(args.Cycles), Lapses: args.Lapses}
	for i, got := range array {
		res, of := &answer.Results[i], targets[i]
		switch {
		case got.Result > 0 || got.Result < -maxErrno:
			return bad("the result of target %d is %d", i, got.Result)
		case got.Result < 0:
			answer.Failed++
			res.Err = &Error{Op: ReqKmapSet.String(), PID: of.PID, Errno: unix.Errno(-got.Result)}
			if errno := unix.Errno(-got.Result); errno != unix.EIO && errno != unix.EFAULT {
				continue // NumQueues is what was sent
			}
		}
		if got.NumHeld > got.NumQueues || got.NumQueues > KmapMaxRoom {
			return bad("target %d has %d queues, %d of them held", i, got.NumQueues, got.NumHeld)
		}
		res.Total, res.Held = int(got.NumQueues), int(got.NumHeld)
		if got.Result == -int32(unix.EFAULT) {
			continue // the array was not written as a whole
		}
		res.Queues = of.Queues[:min(len(of.Queues), res.Total)]
	}
	if int(args.Failed) != answer.Failed {
		return bad("it counted %d failed targets and marked %d", args.Failed, answer.Failed)
	}
	return answer, nil
}

// maxErrno is MAX_ERRNO.
const maxErrno = 4095

// Occupancy returns the use of a GPU. Errors are *Error:
//
//	EPERM       no CAP_SYS_ADMIN
//	ENODEV      no such GPU
//	EOPNOTSUPP  the GPU has no hardware scheduler
func (k *Kmap) Occupancy(gpu gpreempt.GPUID) (KmapOccupancyArgs, error) {
	args := KmapOccupancyArgs{GPUID: uint32(gpu)}
	_, err := k.ioctl(ReqKmapOccupancy, PointerTo(&args))
	return args, fail(err, Error{Op: ReqKmapOccupancy.String(), GPU: gpu})
}
