package workload

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// strict is a machine with render nodes that creates a queue as Linux 6.12 does: only if each
// of its buffers is exactly one mapping on the GPU (kfd_queue_acquire_buffers). It creates a
// signal event as Linux 7.3 does: only on a page of the program.
type strict struct {
	*machine
	save   uint64 // the size of save areas
	vms    int
	mapped map[uint64]uint64 // sizes, by address
	made   map[uint64]bool   // allocations
	page   uint64            // that of events, which is one, and stays
	given  bool              // CREATE_EVENT had it
}

func (s *strict) Open(path string, flags int) (int, error) {
	if path != "/dev/dri/renderD128" {
		return s.machine.Open(path, flags)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open++
	return 100, nil
}

func (s *strict) Ioctl(fd int, req kfd.Request, arg kfd.Pointer) (uintptr, error) {
	s.mu.Lock()
	ours, errno := s.memory(req, arg)
	s.mu.Unlock()
	switch {
	case errno != 0:
		return 0, errno
	case ours:
		return 0, nil
	}
	return s.machine.Ioctl(fd, req, arg)
}

// memory handles the requests about memory, and checks those about queues.
func (s *strict) memory(req kfd.Request, arg kfd.Pointer) (ours bool, _ unix.Errno) {
	switch req {
	case kfdabi.ReqAcquireVM:
		s.vms++
		return true, 0
	case kfdabi.ReqAllocMemoryOfGPU:
		args := kfd.As[kfdabi.AllocMemoryArgs](arg)
		if args.Flags&kfdabi.AllocGTT != 0 && s.page == 0 {
			s.page = args.VAAddr
			args.Handle = s.page
			return true, 0
		}
		if args.Flags&kfdabi.AllocUserptr == 0 || args.MmapOffset != args.VAAddr || s.vms == 0 {
			return true, unix.EINVAL
		}
		args.Handle = args.VAAddr
		s.made[args.Handle], s.mapped[args.Handle] = true, args.Size
		return true, 0
	case kfdabi.ReqMapMemoryToGPU:
		if handle := kfd.As[kfdabi.MapMemoryArgs](arg).Handle; handle != s.page && !s.made[handle] {
			return true, unix.EINVAL
		}
		return true, 0
	case kfdabi.ReqUnmapMemoryFromGPU:
		delete(s.mapped, kfd.As[kfdabi.UnmapMemoryArgs](arg).Handle)
		return true, 0
	case kfdabi.ReqFreeMemoryOfGPU:
		handle := kfd.As[kfdabi.FreeMemoryArgs](arg).Handle
		if _, busy := s.mapped[handle]; busy {
			return true, unix.EBUSY
		}
		delete(s.made, handle)
		return true, 0
	case kfdabi.ReqCreateEvent:
		// As Linux 7.3 does: signal events need a page of the program.
		handle := kfd.As[kfdabi.CreateEventArgs](arg).EventPageOffset
		if s.given = s.given || handle != 0 && handle == s.page; !s.given {
			return true, unix.ENOMEM
		}
	case kfdabi.ReqCreateQueue:
		return false, s.check(kfd.As[kfdabi.CreateQueueArgs](arg))
	}
	return false, 0
}

// check returns EINVAL for a queue that the driver would not create.
func (s *strict) check(args *kfdabi.CreateQueueArgs) unix.Errno {
	const page = 4096
	want := map[uint64]uint64{
		args.WritePointerAddress &^ (page - 1): page, args.ReadPointerAddress &^ (page - 1): page, args.RingBaseAddress: uint64(args.RingSize),
	}
	if args.QueueType == kfd.QueueTypeComputeAQL {
		want[args.EOPBufferAddress], want[args.CtxSaveRestoreAddress] = page, s.save
	}
	got := map[uint64]uint64{}
	for at := range want {
		got[at] = s.mapped[at]
	}
	if diff := cmp.Diff(want, got); diff != "" {
		s.t.Errorf("the buffers of a queue and their mappings on the GPU (-want +got):\n%s", diff)
		return unix.EINVAL
	}
	return 0
}

func TestEachBufferOfAQueueIsOneMappingOnTheGPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &strict{machine: newMachine(t, 77), mapped: map[uint64]uint64{}, made: map[uint64]bool{}}
		d, err := openDevice(s)
		if err != nil {
			t.Fatal(err)
		}
		// The node of the driver's own GPU in the guest (emu/softgpu): 40 compute units.
		d.gpus[0].describe(`simd_count 160
simd_per_cu 4
array_count 4
simd_arrays_per_engine 1
gfx_target_version 90402
num_xcc 1
cwsr_size 24391680
ctl_stack_size 16384
drm_render_minor 128
`)
		s.save = (24391680 + 1600*32 + 4095) &^ 4095
		l := &load{cfg: Config{Queues: 2, SDMA: true, Packets: 20, Depth: 4}, d: d, report: func(err error) { t.Error(err) }, stop: make(chan struct{}), change: make(chan struct{}, 1)}
		if err := l.setUp(); err != nil {
			t.Fatal(err)
		}
		l.start()
		for !l.over() {
			<-l.change
		}
		if err := l.close(); err != nil {
			t.Error(err)
		}
		if len(s.mapped)+len(s.made) != 0 {
			t.Errorf("the client left mappings at %s and allocations at %s", hex(s.mapped), hex(s.made))
		}
		checkClean(t, s.machine)
	})
}

func hex[V any](m map[uint64]V) string { return fmt.Sprintf("%#x", slices.Sorted(maps.Keys(m))) }
