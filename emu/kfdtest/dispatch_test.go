package kfdtest_test

import (
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/emu/kfdtest"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

func TestHandlerIsChosenByNumberAlone(t *testing.T) {
	stage(t, "6.12", hws, func(s *scene) {
		var v kfd.GetVersionArgs
		const getVersionOfAnotherType = kfd.Request(1<<30 | 8<<16 | 'X'<<8 | 1)
		_, err := s.job.Main().Ioctl(s.fd, getVersionOfAnotherType, kfd.PointerTo(&v))
		s.must(err)
		if diff := cmp.Diff(kfd.GetVersionArgs{Major: 1, Minor: 17}, v); diff != "" {
			s.Errorf("version (-want +got):\n%s", diff)
		}
	})
}

func TestUnknownNumberIsENOTTYSince612(t *testing.T) {
	onProfiles(t, hws, func(s *scene) {
		want := unix.ENOTTY
		if s.device.Version().Minor < 17 {
			want = unix.EINVAL
		}
		var args [8]uint64
		for _, nr := range []kfd.Request{0, 0x7f, 0xff} {
			_, err := s.job.Main().Ioctl(s.fd, 0xC0004B00|nr|8<<16, kfd.PointerTo(&args))
			s.want(want, err)
		}
		_, err := s.job.Main().Ioctl(s.fd, kfdabi.ReqProfiler, kfd.PointerTo(&kfdabi.ProfilerArgs{Op: kfdabi.ProfilerVersion}))
		if s.device.Version().Minor >= 23 {
			want = 0
		}
		s.want(want, err)
	})
}

func TestProfilesAgreeWithPackageKFD(t *testing.T) {
	onProfiles(t, hws, func(s *scene) {
		if w := s.device.Warning(); w != "" {
			s.Errorf("a version not known: %v", w)
		}
		s.enable()
		entries := make([]kfd.DeviceInfoEntry, 2)
		args := kfdabi.TrapDeviceSnapshotArgs{
			PID: uint32(s.job.PID()), Op: kfd.TrapGetDeviceSnapshot, SnapshotBufPtr: kfd.PointerToSlice(entries), NumDevices: 2, EntrySize: 128,
		}
		_, err := s.trap(kfd.PointerTo(&args))
		s.must(err)
		contexts, size := s.device.Version().Minor >= 23, uint32(120)
		if contexts {
			size = 128
		}
		if args.EntrySize != size {
			s.Errorf("device entries of %d bytes, want %d", args.EntrySize, size)
		}
		_, err = s.job.Main().Ioctl(s.fd, kfdabi.ReqCreateProcess, kfd.Pointer{})
		want := unix.Errno(0)
		if !contexts {
			want = unix.ENOTTY
			if s.device.Version().Minor < 17 {
				want = unix.EINVAL
			}
		}
		s.want(want, err)
	})
}

func TestShortStructureIsExtendedWithZeros(t *testing.T) {
	stage(t, "7.2", hws, func(s *scene) {
		// An older runtime passes 88 bytes of CREATE_QUEUE.
		args := [11]uint64{0: 1 << 20, 4: 4096 | uint64(gpuA)<<32, 5: 2 | 100<<32}
		const short = kfd.Request(3<<30 | 88<<16 | 'K'<<8 | 2)
		_, err := s.job.Main().Ioctl(s.fd, short, kfd.PointerTo(&args))
		s.must(err)
		if _, ok := s.job.Queues()[uint32(args[6]>>32)]; !ok {
			s.Errorf("no queue %d", uint32(args[6]>>32))
		}
	})
}

func TestArgumentsAreCopiedBackOnErrors(t *testing.T) {
	stage(t, "6.12", hws, func(s *scene) {
		args := kfdabi.CreateQueueArgs{RingSize: 8, GPUID: 99}
		_, err := s.job.Main().Ioctl(s.fd, kfdabi.ReqCreateQueue, kfd.PointerTo(&args))
		s.want(unix.EINVAL, err)
		if args.RingSize != 1024 {
			s.Errorf("ring size %d, want the smallest there is", args.RingSize)
		}
		_, err = s.job.Main().Ioctl(s.fd, kfd.ReqGetVersion, kfdtest.Unmapped())
		s.want(unix.EFAULT, err)
		_, err = s.job.Main().Ioctl(s.fd, kfdabi.ReqCreateQueue, kfdtest.Unmapped())
		s.want(unix.EFAULT, err)
		_, err = s.job.Main().Ioctl(s.fd, kfdabi.ReqCreateQueue, kfd.Pointer{})
		s.want(unix.EFAULT, err)
	})
}

func TestDescriptorWorksOnlyForItsProcess(t *testing.T) {
	onProfiles(t, hws, func(s *scene) {
		var v kfd.GetVersionArgs
		call := func(t *kfdtest.Thread, fd int) error {
			_, err := t.Ioctl(fd, kfd.ReqGetVersion, kfd.PointerTo(&v))
			return err
		}
		s.want(0, call(s.job.NewThread(), s.fd))
		s.want(unix.EBADF, call(s.job.Fork().Main(), s.fd))
		stolen, err := s.dbg.Main().PidfdGetfd(s.job.PID(), s.fd)
		s.must(err)
		s.want(unix.EBADF, call(s.dbg.Main(), stolen))
		s.want(unix.EBADF, call(s.job.Main(), 77))
		s.want(unix.ENOTTY, call(s.dbg.Main(), s.pipe))
	})
}

func TestOpeningTheDriver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, profile := range driver.Profiles() {
			m := kfdtest.New(kfdtest.Config{Profile: profile})
			_, err := m.Spawn().Main().OpenKFD()
			want := error(nil)
			if profile == "7.2" || profile == "7.3" {
				want = unix.EINVAL // the driver opens only with a GPU
			}
			if err != want { //nolint:errorlint // errnos as they come
				t.Errorf("%s without a GPU: %v, want %v", profile, err, want)
			}
		}
	})
	stage(t, "6.12", hws, func(s *scene) {
		s.m.StartReset(gpuA)
		_, err := s.m.Spawn().Main().OpenKFD()
		s.want(unix.EINVAL, err)
		s.m.EndReset(gpuA)
		_, err = s.m.Spawn().Main().OpenKFD()
		s.must(err)
	})
}

func TestAperturesAreCountedAndListed(t *testing.T) {
	stage(t, "6.12", hws, func(s *scene) {
		args := kfdabi.ProcessAperturesNewArgs{}
		_, err := s.job.Main().Ioctl(s.fd, kfdabi.ReqGetProcessAperturesNew, kfd.PointerTo(&args))
		s.must(err)
		if args.NumOfNodes != 2 {
			s.Errorf("%d nodes, want 2", args.NumOfNodes)
		}
		list := make([]kfdabi.ProcessDeviceApertures, 3)
		args = kfdabi.ProcessAperturesNewArgs{Apertures: kfd.PointerToSlice(list), NumOfNodes: 3}
		_, err = s.job.Main().Ioctl(s.fd, kfdabi.ReqGetProcessAperturesNew, kfd.PointerTo(&args))
		s.must(err)
		if args.NumOfNodes != 2 || list[1].GPUID != uint32(gpuB) || list[2].GPUID != 0 {
			s.Errorf("%d nodes: %+v", args.NumOfNodes, list)
		}
		args.NumOfNodes = 4 // more than the topology has
		_, err = s.job.Main().Ioctl(s.fd, kfdabi.ReqGetProcessAperturesNew, kfd.PointerTo(&args))
		s.want(unix.EINVAL, err)
	})
}

func TestQueueLimits(t *testing.T) {
	for gfx, limit := range map[uint32]int{hws: 255, single: 127} {
		stage(t, "6.12", gfx, func(s *scene) {
			for range limit {
				s.queue(gpuA)
			}
			_, err := s.job.Main().CreateQueue(s.fd, gpuA, kfd.QueueTypeComputeAQL)
			s.want(unix.ENOSPC, err)
			s.must(s.job.Main().DestroyQueue(s.fd, 5))
			if id := s.queue(gpuA); id != 5 {
				s.Errorf("the next queue is %d, want the lowest id that is free", id)
			}
			_, err = s.job.Main().CreateQueue(s.fd, gpuB, 5)
			s.want(unix.Errno(524), err)
			s.want(unix.EINVAL, s.job.Main().DestroyQueue(s.fd, 900))
		})
	}
}

func TestSDMAQueueByEngineHasTheEnginesKind(t *testing.T) {
	stage(t, "6.12", hws, func(s *scene) {
		for engine, kind := range map[uint32]uint32{1: kfd.QueueTypeSDMA, 2: kfd.QueueTypeSDMAXGMI} {
			args := kfdabi.CreateQueueArgs{
				RingBaseAddress: 1 << 20, RingSize: 4096, GPUID: uint32(gpuA), QueueType: kfd.QueueTypeSDMAByEngID,
				QueuePercentage: 100, SDMAEngineID: engine,
			}
			_, err := s.job.Main().Ioctl(s.fd, kfdabi.ReqCreateQueue, kfd.PointerTo(&args))
			s.must(err)
			if got := s.job.Queues()[args.QueueID].Type; got != kind {
				s.Errorf("engine %d: type %d, want %d", engine, got, kind)
			}
		}
	})
}

func TestSecondaryContextCannotDebug(t *testing.T) {
	stage(t, "7.2", hws, func(s *scene) {
		fd, err := s.dbg.Main().OpenKFD()
		s.must(err)
		_, err = s.dbg.Main().Ioctl(fd, kfdabi.ReqCreateProcess, kfd.Pointer{})
		s.must(err)
		args := kfd.TrapDisableArgs{PID: uint32(s.job.PID()), Op: kfd.TrapDisable}
		_, err = s.dbg.Main().Ioctl(fd, kfd.ReqDbgTrap, kfd.PointerTo(&args))
		s.want(unix.EOPNOTSUPP, err)
		_, err = s.dbg.Main().Ioctl(fd, kfdabi.ReqCreateProcess, kfd.Pointer{})
		s.want(unix.EINVAL, err) // one context per open file
		s.must(s.dbg.Main().Close(fd))
		if n := len(s.m.Processes()); n != 2 {
			s.Errorf("%d processes, want the context gone with its file", n)
		}
	})
}

func TestProfilerBelongsToOneProcessAtATime(t *testing.T) {
	stage(t, "7.2", hws, func(s *scene) {
		lock := func(p *kfdtest.Process, fd int, gpu, on uint32) error {
			args := kfdabi.ProfilerArgs{Op: kfdabi.ProfilerPMC, GPUID: gpu, Lock: on}
			_, err := p.Main().Ioctl(fd, kfdabi.ReqProfiler, kfd.PointerTo(&args))
			return err
		}
		dbgFD := s.fdOf(s.dbg)
		s.want(0, lock(s.job, s.fd, uint32(gpuA), 1))
		s.want(unix.EALREADY, lock(s.job, s.fd, uint32(gpuA), 1))
		s.want(unix.EBUSY, lock(s.dbg, dbgFD, uint32(gpuA), 1))
		s.want(unix.EINVAL, lock(s.dbg, dbgFD, uint32(gpuA), 0))
		s.want(0, lock(s.job, s.fd, uint32(gpuA), 0))
		s.want(unix.EINVAL, lock(s.job, s.fd, 5, 1))
		s.job.SetCaps()
		s.want(unix.EPERM, lock(s.job, s.fd, uint32(gpuA), 1))
	})
}

func TestRequestsOfTheOldDebugInterface(t *testing.T) {
	stage(t, "6.12", hws, func(s *scene) {
		var args [2]uint64
		for _, req := range []kfd.Request{0x40084B0D, 0x40084B0E, 0x40104B0F, 0x40104B10} {
			_, err := s.job.Main().Ioctl(s.fd, req, kfd.PointerTo(&args))
			s.want(unix.EPERM, err)
		}
		vm := kfdabi.AcquireVMArgs{GPUID: uint32(gpuA)}
		_, err := s.job.Main().Ioctl(s.fd, kfdabi.ReqAcquireVM, kfd.PointerTo(&vm))
		s.must(err)
		vm.GPUID = 5
		_, err = s.job.Main().Ioctl(s.fd, kfdabi.ReqAcquireVM, kfd.PointerTo(&vm))
		s.want(unix.EINVAL, err)
	})
}
