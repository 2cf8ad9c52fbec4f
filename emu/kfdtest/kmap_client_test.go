package kfdtest_test

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/emu/kfdtest"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// kmap is a handle of the extension.
type kmap struct {
	t  *kfdtest.Thread
	fd int
}

// openKmap opens the extension, and asks for its version.
func openKmap(t *kfdtest.Thread) (kmap, error) {
	fd, err := t.Open(kfdabi.KmapPath, unix.O_RDWR|unix.O_CLOEXEC)
	if err != nil {
		return kmap{}, err
	}
	k := kmap{t, fd}
	_, err = k.info()
	return k, err
}

func (k kmap) close() error { return k.t.Close(k.fd) }

func (k kmap) info() (args kfdabi.KmapInfoArgs, err error) {
	_, err = k.t.Ioctl(k.fd, kfdabi.ReqKmapInfo, kfd.PointerTo(&args))
	return args, err
}

// limited is a target of a SET, and what the driver answers about it.
type limited struct {
	pidfd int
	limit uint32
	room  int // for the states of its queues

	err         error
	total, held int
	queues      []kfdabi.KmapQueue
}

// set is SET. It returns the number of runlists.
func (k kmap) set(targets []limited, lease time.Duration) (cycles int, err error) {
	array := make([]kfdabi.KmapTargetArgs, len(targets))
	for i := range targets {
		t := &targets[i]
		t.queues = make([]kfdabi.KmapQueue, t.room)
		array[i] = kfdabi.KmapTargetArgs{PIDFD: int32(t.pidfd), Limit: t.limit, QueuesPtr: kfd.PointerToSlice(t.queues), NumQueues: uint32(t.room)}
	}
	args := kfdabi.KmapSetArgs{TargetsPtr: kfd.PointerToSlice(array), NumTargets: uint32(len(array)), TargetSize: 32, LeaseMS: uint32(lease.Milliseconds())}
	if _, err := k.t.Ioctl(k.fd, kfdabi.ReqKmapSet, kfd.PointerTo(&args)); err != nil {
		return 0, err
	}
	for i, a := range array {
		t := &targets[i]
		if a.Result != 0 {
			t.err = unix.Errno(-a.Result)
		}
		t.total, t.held, t.queues = int(a.NumQueues), int(a.NumHeld), t.queues[:min(t.room, int(a.NumQueues))]
	}
	return int(args.Cycles), nil
}
