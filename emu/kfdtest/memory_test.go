package kfdtest_test

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/emu/kfdtest"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

const (
	mib = 1 << 20
	gib = 1 << 30
)

func (s *scene) acquire(gpus ...gpreempt.GPUID) {
	s.Helper()
	for _, gpu := range gpus {
		s.must(s.do(kfdabi.ReqAcquireVM, kfd.PointerTo(&kfdabi.AcquireVMArgs{GPUID: uint32(gpu)})))
	}
}

// tryAlloc allocates at an address that depends on the size.
func (s *scene) tryAlloc(gpu gpreempt.GPUID, flags uint32, size uint64) (kfdabi.AllocMemoryArgs, error) {
	args := kfdabi.AllocMemoryArgs{VAAddr: 1<<40 + size, Size: size, GPUID: uint32(gpu), Flags: flags}
	err := s.do(kfdabi.ReqAllocMemoryOfGPU, kfd.PointerTo(&args))
	return args, err
}

// alloc acquires the VM, allocates, and returns the handle.
func (s *scene) alloc(gpu gpreempt.GPUID, flags uint32, size uint64) uint64 {
	s.Helper()
	s.acquire(gpu)
	args, err := s.tryAlloc(gpu, flags, size)
	s.must(err)
	return args.Handle
}

func (s *scene) allocUserptr(gpu gpreempt.GPUID) uint64 {
	s.Helper()
	args := kfdabi.AllocMemoryArgs{Size: 8 * kfdabi.SignalEventLimit, GPUID: uint32(gpu), Flags: kfdabi.AllocUserptr, MmapOffset: 0x7f0000000000}
	s.must(s.do(kfdabi.ReqAllocMemoryOfGPU, kfd.PointerTo(&args)))
	return args.Handle
}

func (s *scene) free(handle uint64) error {
	return s.do(kfdabi.ReqFreeMemoryOfGPU, kfd.PointerTo(&kfdabi.FreeMemoryArgs{Handle: handle}))
}

// mapTo maps on the GPUs from index done on, and returns how many are done.
func (s *scene) mapTo(handle uint64, done uint32, gpus ...gpreempt.GPUID) (uint32, error) {
	ids := words(gpus)
	args := kfdabi.MapMemoryArgs{Handle: handle, DeviceIDsArrayPtr: kfd.PointerToSlice(ids), NumDevices: uint32(len(ids)), NumSuccess: done}
	err := s.do(kfdabi.ReqMapMemoryToGPU, kfd.PointerTo(&args))
	return args.NumSuccess, err
}

func (s *scene) unmapFrom(handle uint64, done uint32, gpus ...gpreempt.GPUID) (uint32, error) {
	ids := words(gpus)
	args := kfdabi.UnmapMemoryArgs{Handle: handle, DeviceIDsArrayPtr: kfd.PointerToSlice(ids), NumDevices: uint32(len(ids)), NumSuccess: done}
	err := s.do(kfdabi.ReqUnmapMemoryFromGPU, kfd.PointerTo(&args))
	return args.NumSuccess, err
}

func words(gpus []gpreempt.GPUID) []uint32 {
	ids := make([]uint32, len(gpus))
	for i, id := range gpus {
		ids[i] = uint32(id)
	}
	return ids
}

func (s *scene) available(gpu gpreempt.GPUID) uint64 {
	s.Helper()
	args := kfdabi.AvailableMemoryArgs{GPUID: uint32(gpu)}
	s.must(s.do(kfdabi.ReqAvailableMemory, kfd.PointerTo(&args)))
	return args.Available
}

func TestMemoryNeedsTheVM(t *testing.T) {
	onProfiles(t, hws, func(s *scene) {
		_, err := s.tryAlloc(gpuA, kfdabi.AllocVRAM, mib)
		s.want(unix.ENODEV, err)
		_, err = s.tryAlloc(5, kfdabi.AllocVRAM, mib)
		s.want(unix.EINVAL, err)
		handle := s.alloc(gpuA, kfdabi.AllocVRAM, mib)
		n, err := s.mapTo(handle, 0, gpuA, gpuB)
		s.want(unix.ENODEV, err)
		s.same(uint32(1), n)
		importing := kfdabi.ImportDmabufArgs{GPUID: uint32(gpuB)}
		s.want(unix.ENODEV, s.do(kfdabi.ReqImportDmabuf, kfd.PointerTo(&importing)))
	})
}

func TestMemoryIsCountedInTwoMebibytes(t *testing.T) {
	stage(t, "6.12", hws, func(s *scene) {
		const all = 192 * gib
		s.same(uint64(all), s.available(gpuA))
		small := s.alloc(gpuA, kfdabi.AllocVRAM|kfdabi.AllocPublic, 4096)
		s.same(uint64(all-2*mib), s.available(gpuA))
		queue := s.alloc(gpuA, kfdabi.AllocVRAM|kfdabi.AllocAQLQueueMem, 8*mib) // twice in the VM
		s.same(uint64(all-6*mib), s.available(gpuA))
		s.alloc(gpuA, kfdabi.AllocGTT, gib)
		_, err := s.tryAlloc(gpuA, kfdabi.AllocVRAM, all-4*mib)
		s.want(unix.ENOMEM, err)
		s.same(uint64(all-6*mib), s.available(gpuA))
		s.same(uint64(all), s.available(gpuB))
		s.must(s.free(small))
		s.must(s.free(queue))
		s.same(uint64(all), s.available(gpuA))
		s.alloc(gpuA, kfdabi.AllocVRAM, all)
		s.same(uint64(0), s.available(gpuA))
		s.job.Kill()
		fd, err := s.dbg.Main().OpenKFD()
		s.must(err)
		args := kfdabi.AvailableMemoryArgs{GPUID: uint32(gpuA)}
		_, err = s.dbg.Main().Ioctl(fd, kfdabi.ReqAvailableMemory, kfd.PointerTo(&args))
		s.must(err)
		s.same(uint64(all), args.Available)
		args.GPUID = 5
		_, err = s.dbg.Main().Ioctl(fd, kfdabi.ReqAvailableMemory, kfd.PointerTo(&args))
		s.want(unix.EINVAL, err)
	})
}

func TestMemoryOfASmallGPU(t *testing.T) {
	m := kfdtest.New(kfdtest.Config{Profile: "6.12", Nodes: []driver.Node{{ID: gpuA, GFX: hws, VRAM: 3*mib + 4096}}})
	job := m.Spawn()
	fd, err := job.Main().OpenKFD()
	if err != nil {
		t.Fatal(err)
	}
	args := kfdabi.AvailableMemoryArgs{GPUID: uint32(gpuA)}
	if _, err := job.Main().Ioctl(fd, kfdabi.ReqAvailableMemory, kfd.PointerTo(&args)); err != nil || args.Available != 2*mib {
		t.Errorf("%d bytes available, %v; want 2 MiB", args.Available, err)
	}
}

func TestAllocationsAreListed(t *testing.T) {
	stage(t, "6.12", hws, func(s *scene) {
		s.acquire(gpuA, gpuB)
		first := s.alloc(gpuB, kfdabi.AllocVRAM, 5000)
		second := s.alloc(gpuA, kfdabi.AllocGTT|kfdabi.AllocWritable, 8192)
		third := s.alloc(gpuB, kfdabi.AllocVRAM, 4096)
		user := s.allocUserptr(gpuA)
		doorbells := s.alloc(gpuA, kfdabi.AllocDoorbell, 8192)
		registers := s.alloc(gpuA, kfdabi.AllocMMIORemap, 4096)
		n, err := s.mapTo(first, 0, gpuB, gpuA)
		s.must(err)
		s.same(uint32(2), n)
		const a, b = uint64(gpuA) << 32, uint64(gpuB) << 32
		s.same([]uint64{b, a, b + 1, a + 1, a + 2, a + 3}, []uint64{first, second, third, user, doorbells, registers})
		s.same([]driver.Allocation{
			{Handle: second, GPU: gpuA, VA: 1<<40 + 8192, Size: 8192, Flags: kfdabi.AllocGTT | kfdabi.AllocWritable, Offset: 1 << 32},
			{Handle: user, GPU: gpuA, Size: 32768, Flags: kfdabi.AllocUserptr, Offset: 1<<32 + 8192, User: 0x7f0000000000},
			{Handle: doorbells, GPU: gpuA, VA: 1<<40 + 8192, Size: 8192, Flags: kfdabi.AllocDoorbell, Offset: 1<<32 + 8192 + 32768},
			{Handle: registers, GPU: gpuA, VA: 1<<40 + 4096, Size: 4096, Flags: kfdabi.AllocMMIORemap, Offset: uint64(gpuA) << 46},
			{Handle: first, GPU: gpuB, VA: 1<<40 + 5000, Size: 5000, Flags: kfdabi.AllocVRAM, Offset: 1 << 32, Mapped: []gpreempt.GPUID{gpuA, gpuB}},
			{Handle: third, GPU: gpuB, VA: 1<<40 + 4096, Size: 4096, Flags: kfdabi.AllocVRAM, Offset: 1<<32 + 8192},
		}, s.m.Allocations(s.job.MM()))
		s.must(s.free(third))
		if again := s.alloc(gpuB, kfdabi.AllocVRAM, 4096); again != third {
			s.Errorf("handle %#x, want the lowest that is free, %#x", again, third)
		}
		s.job.Exec()
		s.same([]driver.Allocation(nil), s.m.Allocations(s.job.MM()))
	})
}

func TestFlagsOfMemoryAreChecked(t *testing.T) {
	stage(t, "6.12", hws, func(s *scene) {
		s.acquire(gpuA)
		for _, c := range []struct {
			flags uint32
			size  uint64
			want  unix.Errno
		}{
			{kfdabi.AllocVRAM, 0, unix.EINVAL},
			{0, mib, unix.EINVAL},
			{kfdabi.AllocWritable, mib, unix.EINVAL},
			{kfdabi.AllocUserptr, mib, unix.EINVAL}, // without an address
			{kfdabi.AllocDoorbell, 4096, unix.EINVAL},
			{kfdabi.AllocMMIORemap, 8192, unix.EINVAL},
			{kfdabi.AllocGTT | kfdabi.AllocAQLQueueMem, 1, unix.EINVAL},
			{kfdabi.AllocGTT, ^uint64(0), unix.EINVAL}, // rounding up overflows
			{kfdabi.AllocGTT, 1 << 60, unix.ENOMEM},
			{kfdabi.AllocGTT | kfdabi.AllocAQLQueueMem, 2, 0},
			{kfdabi.AllocDoorbell, 8192, 0},
			{kfdabi.AllocMMIORemap, 4096, 0},
		} {
			_, err := s.tryAlloc(gpuA, c.flags, c.size)
			s.want(c.want, err)
		}
	})
}

func TestMappingContinuesAfterTheLastSuccess(t *testing.T) {
	onProfiles(t, hws, func(s *scene) {
		handle := s.alloc(gpuA, kfdabi.AllocVRAM, mib)
		s.acquire(gpuB)
		n, err := s.mapTo(handle, 0, gpuA, 5, gpuB)
		s.want(unix.EINVAL, err)
		s.same(uint32(1), n)
		n, err = s.mapTo(handle, n+1, gpuA, 5, gpuB)
		s.must(err)
		s.same(uint32(3), n)
		s.same([]gpreempt.GPUID{gpuA, gpuB}, s.m.Allocations(s.job.MM())[0].Mapped)
		_, err = s.mapTo(handle, 0, gpuA) // mapping twice counts once
		s.must(err)
		s.want(unix.EBUSY, s.free(handle))
		n, err = s.unmapFrom(handle, 0, gpuB, gpuB)
		s.want(unix.EINVAL, err)
		s.same(uint32(1), n)
		_, err = s.unmapFrom(handle, 0, gpuA)
		s.must(err)
		s.must(s.free(handle))
		s.want(unix.EINVAL, s.free(handle))
		_, err = s.mapTo(handle, 0, gpuA)
		s.want(unix.ENOMEM, err)
		_, err = s.mapTo(7, 0, gpuA)
		s.want(unix.EINVAL, err)
		_, err = s.mapTo(handle, 2, gpuA)
		s.want(unix.EINVAL, err)
		_, err = s.unmapFrom(handle, 0)
		s.want(unix.EINVAL, err)
		args := kfdabi.MapMemoryArgs{Handle: handle, DeviceIDsArrayPtr: kfdtest.Unmapped(), NumDevices: 1}
		s.want(unix.EFAULT, s.do(kfdabi.ReqMapMemoryToGPU, kfd.PointerTo(&args)))
		args.NumDevices = 1 << 30
		s.want(unix.ENOMEM, s.do(kfdabi.ReqMapMemoryToGPU, kfd.PointerTo(&args)))
	})
}

func TestNoFileIsADmabuf(t *testing.T) {
	stage(t, "6.12", hws, func(s *scene) {
		handle := s.alloc(gpuA, kfdabi.AllocVRAM, mib)
		user := s.allocUserptr(gpuA)
		for fd, want := range map[int]unix.Errno{s.fd: unix.EINVAL, 99: unix.EBADF} {
			info := kfdabi.DmabufInfoArgs{DmabufFD: uint32(fd)}
			s.want(want, s.do(kfdabi.ReqGetDmabufInfo, kfd.PointerTo(&info)))
			importing := kfdabi.ImportDmabufArgs{GPUID: uint32(gpuA), DmabufFD: uint32(fd)}
			s.want(want, s.do(kfdabi.ReqImportDmabuf, kfd.PointerTo(&importing)))
		}
		for h, want := range map[uint64]unix.Errno{handle: unix.ENOMEM, user: unix.EPERM, handle + 9: unix.EINVAL, 3: unix.EINVAL} {
			s.want(want, s.do(kfdabi.ReqExportDmabuf, kfd.PointerTo(&kfdabi.ExportDmabufArgs{Handle: h})))
		}
	})
}

func TestSecondaryContextCannotUseProcessMemory(t *testing.T) {
	stage(t, "7.2", hws, func(s *scene) {
		s.must(s.do(kfdabi.ReqCreateProcess, kfd.Pointer{}))
		s.acquire(gpuA)
		args := kfdabi.AllocMemoryArgs{Size: 4096, GPUID: uint32(gpuA), Flags: kfdabi.AllocUserptr, MmapOffset: 0x7f0000000000}
		s.want(unix.EOPNOTSUPP, s.do(kfdabi.ReqAllocMemoryOfGPU, kfd.PointerTo(&args)))
		s.want(unix.EOPNOTSUPP, s.svm(&svmCall{SVMArgs: kfdabi.SVMArgs{StartAddr: 4096, Size: 4096}}))
	})
}

// From 7.3 on, freeing memory waits for a reset of any GPU of the process, with the lock that
// its debugger needs.
func TestFreeingMemoryWaitsForAResetSince73(t *testing.T) {
	onProfiles(t, hws, func(s *scene) {
		s.acquire(gpuA, gpuB)
		handle := s.alloc(gpuA, kfdabi.AllocVRAM, mib)
		s.m.StartReset(gpuB)
		freed := start(func() error { return s.free(handle) })
		debugged := start(func() error {
			_, _, err := s.device.QueryDebugEvent(s.job.PID(), 0)
			return err
		})
		late := s.profile == "7.3"
		if waits(freed) != late || waits(debugged) != late {
			s.Errorf("during the reset: FREE waits %v, DBG_TRAP waits %v; want %v", waits(freed), waits(debugged), late)
		}
		s.m.EndReset(gpuB)
		s.must(<-freed)
		s.want(unix.EINVAL, <-debugged) // debugging was never enabled
	}, "7.2", "7.3")
}
