package kfdabi

import (
	"fmt"
	"strings"
	"structs"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// KmapPath is the path of the device of the kernel extension in deploy/kernel, which decides which
// queues are mapped. No released kernel has it. The structures below are those of its
// include/uapi/linux/kfd_kmap.h, version 1.0.
const KmapPath = "/dev/kfd_kmap"

// The request numbers of kfd_kmap.h (KFD_KMAP_IOC_*). Their type is 0xEB, and not the 'K' of
// /dev/kfd: another size is another request.
const (
	ReqKmapInfo      kfd.Request = 0xC020EB00
	ReqKmapSet       kfd.Request = 0xC028EB01
	ReqKmapOccupancy kfd.Request = 0xC030EB02
)

// The bounds of SET: KFD_KMAP_MAX_TARGETS, KFD_KMAP_MIN_LEASE_MS, KFD_KMAP_MAX_LEASE_MS, and
// the most queues that a target may ask for.
const (
	KmapMaxTargets = 256
	KmapMinLeaseMS = 100
	KmapMaxLeaseMS = 60000
	KmapMaxRoom    = 4096
)

// KmapName returns the name of a request of the extension.
func KmapName(req kfd.Request) string {
	switch req {
	case ReqKmapInfo:
		return "KMAP_INFO"
	case ReqKmapSet:
		return "KMAP_SET"
	case ReqKmapOccupancy:
		return "KMAP_OCCUPANCY"
	default:
		return fmt.Sprintf("kfd_kmap request(%#x)", uint32(req))
	}
}

// KmapNoLimit is KFD_KMAP_NO_LIMIT: the limit of a process that is released.
const KmapNoLimit = ^uint32(0)

// KmapQueueState is the set of KFD_KMAP_QUEUE_* bits of a queue. A queue without a bit is not in
// the runlist for a reason of its process: its ring is empty, or its share of time is 0.
type KmapQueueState uint32

// The bits.
const (
	// KmapMapped: the queue is in the runlist.
	KmapMapped KmapQueueState = 1
	// KmapHeld: a limit keeps it out.
	KmapHeld KmapQueueState = 2
	// KmapEvicted: the driver keeps it out, as for a lack of memory.
	KmapEvicted KmapQueueState = 4
	// KmapSuspended: a debugger keeps it out.
	KmapSuspended KmapQueueState = 8
	// KmapFailed: the last runlist of its GPU failed, so the hardware may not follow the other bits.
	KmapFailed KmapQueueState = 16
)

// KmapInfoArgs is struct kfd_kmap_info_args.
type KmapInfoArgs struct {
	_          structs.HostLayout
	ABIMajor   uint32
	ABIMinor   uint32
	MaxTargets uint32
	MinLeaseMS uint32
	MaxLeaseMS uint32
	Lapses     uint32
	Limited    uint32
	Pad        uint32
}

// KmapQueue is struct kfd_kmap_queue: one queue of a target, written by the driver.
type KmapQueue struct {
	_     structs.HostLayout
	GPUID uint32
	ID    uint32
	State KmapQueueState
	Pad   uint32
}

// KmapTargetArgs is struct kfd_kmap_target.
type KmapTargetArgs struct {
	_         structs.HostLayout
	PIDFD     int32
	Limit     uint32
	QueuesPtr kfd.Pointer
	// NumQueues is the room, and in the result the queues of the process.
	NumQueues uint32
	NumHeld   uint32
	// Result is 0 or a negative errno.
	Result int32
	Pad    uint32
}

// KmapSetArgs is struct kfd_kmap_set_args.
type KmapSetArgs struct {
	_          structs.HostLayout
	TargetsPtr kfd.Pointer
	NumTargets uint32
	TargetSize uint32
	LeaseMS    uint32
	Flags      uint32
	Grace      uint32
	Failed     uint32
	Cycles     uint32
	Lapses     uint32
}

// KmapOccupancyArgs is struct kfd_kmap_occupancy_args: how a GPU's queue slots are used. CP are
// compute queues.
type KmapOccupancyArgs struct {
	_     structs.HostLayout
	GPUID uint32
	Flags uint32
	// Slots are the queues that fit the hardware at once, Mapped those in the runlist, also beyond
	// the slots, and Held those that a limit keeps out.
	CPSlots    uint32
	CPMapped   uint32
	CPHeld     uint32
	SDMASlots  uint32
	SDMAMapped uint32
	SDMAHeld   uint32
	// OverSubscribed is 1 if the last runlist did not fit: the firmware takes turns.
	OverSubscribed uint32
	// Limited is the number of processes with a limit, of any handle, and a queue here.
	Limited uint32
	Pad     [2]uint32
}

// GPU returns the queue's GPU.
func (q KmapQueue) GPU() gpreempt.GPUID { return gpreempt.GPUID(q.GPUID) }

// String returns the names of the bits, such as "held+evicted".
func (s KmapQueueState) String() string {
	var words []string
	for i, word := range []string{"mapped", "held", "evicted", "suspended", "failed"} {
		if s&(1<<i) != 0 {
			words = append(words, word)
		}
	}
	if rest := s &^ (KmapMapped | KmapHeld | KmapEvicted | KmapSuspended | KmapFailed); rest != 0 {
		words = append(words, fmt.Sprintf("%#x", uint32(rest)))
	}
	if words == nil {
		return "idle"
	}
	return strings.Join(words, "+")
}
