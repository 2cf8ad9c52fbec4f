package kfdtest_test

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/emu/kfdtest"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

func TestSettingsNeedAGPUAndItsVM(t *testing.T) {
	onProfiles(t, hws, func(s *scene) {
		policy := func(gpu gpreempt.GPUID, usual uint32) error {
			return s.do(kfdabi.ReqSetMemoryPolicy, kfd.PointerTo(&kfdabi.SetMemoryPolicyArgs{GPUID: uint32(gpu), DefaultPolicy: usual}))
		}
		trap := func(gpu gpreempt.GPUID) error {
			return s.do(kfdabi.ReqSetTrapHandler, kfd.PointerTo(&kfdabi.SetTrapHandlerArgs{GPUID: uint32(gpu)}))
		}
		scratch := func(gpu gpreempt.GPUID) error {
			return s.do(kfdabi.ReqSetScratchBackingVA, kfd.PointerTo(&kfdabi.SetScratchBackingVAArgs{GPUID: uint32(gpu)}))
		}
		s.want(unix.EINVAL, policy(gpuA, 2))
		s.want(unix.EINVAL, policy(5, 0))
		s.want(unix.EINVAL, trap(5))
		s.want(unix.EINVAL, scratch(5))
		s.want(unix.ESRCH, policy(gpuA, kfdabi.CachePolicyCoherent))
		s.want(unix.ESRCH, trap(gpuA))
		s.want(unix.ENODEV, scratch(gpuA))
		s.acquire(gpuA)
		s.must(policy(gpuA, kfdabi.CachePolicyNonCoherent))
		s.must(trap(gpuA))
		s.must(scratch(gpuA))
	})
}

func TestClocksAdvance(t *testing.T) {
	stage(t, "6.12", hws, func(s *scene) {
		read := func(gpu gpreempt.GPUID) kfdabi.ClockCountersArgs {
			s.Helper()
			args := kfdabi.ClockCountersArgs{GPUID: uint32(gpu), GPUClockCounter: 99}
			s.must(s.do(kfdabi.ReqGetClockCounters, kfd.PointerTo(&args)))
			return args
		}
		s.pass(time.Millisecond)
		s.same(kfdabi.ClockCountersArgs{
			GPUClockCounter: 100_000, CPUClockCounter: 1e6, SystemClockCounter: 1e6, SystemClockFreq: 1e9, GPUID: uint32(gpuA),
		}, read(gpuA))
		s.pass(time.Second)
		s.same(kfdabi.ClockCountersArgs{CPUClockCounter: 1.001e9, SystemClockCounter: 1.001e9, SystemClockFreq: 1e9, GPUID: 5}, read(5))
	})
}

func TestTileConfigIsZeros(t *testing.T) {
	stage(t, "6.12", hws, func(s *scene) {
		tiles, macro := make([]uint32, 40), make([]uint32, 40)
		for i := range tiles {
			tiles[i], macro[i] = 7, 7
		}
		args := kfdabi.TileConfigArgs{
			TileConfigPtr: kfd.PointerToSlice(tiles), MacroTileConfigPtr: kfd.PointerToSlice(macro),
			NumTileConfigs: 40, NumMacroTileConfigs: 2, GPUID: uint32(gpuA),
		}
		s.must(s.do(kfdabi.ReqGetTileConfig, kfd.PointerTo(&args)))
		s.same([]uint32{32, 2, 0x2a114042}, []uint32{args.NumTileConfigs, args.NumMacroTileConfigs, args.GBAddrConfig})
		s.same([]uint32{0, 0, 7, 0, 7}, []uint32{tiles[0], tiles[31], tiles[32], macro[1], macro[2]})
		args = kfdabi.TileConfigArgs{NumTileConfigs: 1, GPUID: uint32(gpuA)}
		s.want(unix.EFAULT, s.do(kfdabi.ReqGetTileConfig, kfd.PointerTo(&args)))
		s.same(uint32(0), args.NumTileConfigs)
		args.GPUID = 5
		s.want(unix.EINVAL, s.do(kfdabi.ReqGetTileConfig, kfd.PointerTo(&args)))
	})
}

func TestOldAperturesHoldSevenGPUs(t *testing.T) {
	var nodes []driver.Node
	for i := range 9 {
		nodes = append(nodes, driver.Node{ID: gpuA + gpreempt.GPUID(i), GFX: hws})
	}
	m := kfdtest.New(kfdtest.Config{Profile: "6.12", Nodes: nodes})
	job := m.Spawn().Main()
	fd, err := job.OpenKFD()
	if err != nil {
		t.Fatal(err)
	}
	var args kfdabi.ProcessAperturesArgs
	if _, err := job.Ioctl(fd, kfdabi.ReqGetProcessApertures, kfd.PointerTo(&args)); err != nil {
		t.Fatal(err)
	}
	if args.NumOfNodes != 7 || args.ProcessApertures[6].GPUID != uint32(gpuA)+6 || args.ProcessApertures[0].GPUVMBase == 0 {
		t.Errorf("%+v", args)
	}
}

func TestWaveStateNeedsAStoppedQueue(t *testing.T) {
	onEach(t, func(s *scene) {
		ids := s.suspendable(gpuA)
		stack := make([]uint32, 4)
		read := func(id uint32) error {
			args := kfdabi.QueueWaveStateArgs{CtlStackAddress: kfd.PointerToSlice(stack), QueueID: id}
			return s.do(kfdabi.ReqGetQueueWaveState, kfd.PointerTo(&args))
		}
		s.want(unix.EFAULT, read(77))
		s.want(unix.EINVAL, read(ids[0]))
		s.suspend(ids...)
		s.must(read(ids[0]))
		s.same([]uint32{4096, 0, 4096, 0}, stack) // an empty stack of 4096 bytes, which grows down
		args := kfdabi.QueueWaveStateArgs{QueueID: ids[0]}
		s.want(unix.EFAULT, s.do(kfdabi.ReqGetQueueWaveState, kfd.PointerTo(&args)))
	})
}
