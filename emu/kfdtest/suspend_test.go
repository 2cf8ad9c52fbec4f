package kfdtest_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/emu/kfdtest"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

const (
	invalid = kfd.QueueInvalidMask
	failed  = kfd.QueueErrorMask
)

func (s *scene) wantArray(want, got []uint32) {
	s.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		s.Errorf("array (-want +got):\n%s", diff)
	}
}

func TestNewQueueIsSkipped(t *testing.T) {
	onEach(t, func(s *scene) {
		old := s.suspendable(gpuA)[0]
		fresh := s.queue(gpuA)
		n, ids := s.suspend(old, fresh, 99, old)
		s.wantArray([]uint32{old, fresh | invalid, 99 | invalid, old | invalid}, ids)
		if n != 1 {
			s.Errorf("%d suspended, want 1", n)
		}
		if s.dots() != 1 {
			s.Error("the new queue was not reported")
		}
		event, pending, err := s.device.QueryDebugEvent(s.job.PID(), kfd.ECQueueNew.Mask())
		s.must(err)
		want := kfd.DebugEvent{Raised: kfd.ECQueueNew.Mask(), GPU: gpuA, Queue: fresh}
		if diff := cmp.Diff(want, event); diff != "" || !pending {
			s.Errorf("event (-want +got):\n%s", diff)
		}
		n, ids = s.suspend(fresh, old|failed)
		s.wantArray([]uint32{fresh, old | failed | invalid}, ids)
		if n != 1 || s.running() != nil {
			s.Errorf("%d suspended, running: %v", n, s.running())
		}
	})
}

func TestClearMaskOfSuspendAppliesAfterTheCheck(t *testing.T) {
	onEach(t, func(s *scene) {
		old := s.suspendable(gpuA)[0]
		fresh := s.queue(gpuA)
		ids := []uint32{old, fresh}
		args := kfd.TrapSuspendQueuesArgs{
			PID: uint32(s.job.PID()), Op: kfd.TrapSuspendQueues, ExceptionMask: kfd.ECQueueNew.Mask(),
			QueueArrayPtr: kfd.PointerToSlice(ids), NumQueues: 2,
		}
		_, err := s.trap(kfd.PointerTo(&args))
		s.must(err)
		s.wantArray([]uint32{old, fresh | invalid}, ids)
		// With a runlist it also clears exceptions of skipped queues, with MES it does not.
		want := kfd.ExceptionMask(0)
		if s.m.GPU(gpuA).Removes > 0 {
			want = kfd.ECQueueNew.Mask()
		}
		if got := s.job.Queues()[fresh].Exceptions; got != want {
			s.Errorf("pending at the new queue: %v, want %v", got, want)
		}
	})
}

func TestFailureOfARunlist(t *testing.T) {
	onProfiles(t, hws, func(s *scene) {
		ids := s.suspendable(gpuA, gpuA, gpuB)
		broken := s.m.FailGPU(driver.TrapOp(kfd.TrapSuspendQueues), gpuA, unix.ETIME)
		n, got := s.suspend(ids[0], ids[1], ids[2])
		s.wantArray([]uint32{ids[0] | failed, ids[1] | failed, ids[2]}, got)
		if n != 1 {
			s.Errorf("%d suspended, want 1", n)
		}
		// This is the driver's state; the hardware has not followed.
		if diff := cmp.Diff(ids, s.job.Suspended()); diff != "" {
			s.Errorf("suspended (-want +got):\n%s", diff)
		}
		if diff := cmp.Diff(ids[:2], s.running()); diff != "" {
			s.Errorf("running (-want +got):\n%s", diff)
		}
		if g := s.m.GPU(gpuA); !g.Hung || g.GraceNow != 1 {
			s.Errorf("hung %v, grace period left %d", g.Hung, g.GraceNow)
		}
		broken.Remove()
		n, got = s.suspend(ids...)
		s.wantArray(ids, got)
		if n != 3 || s.running() != nil {
			s.Errorf("%d suspended, running: %v", n, s.running())
		}
	})
}

func TestFailureOfMES(t *testing.T) {
	onProfiles(t, mes, func(s *scene) {
		ids := s.suspendable(gpuA, gpuA, gpuA)
		s.m.Inject(kfdtest.Fault{Op: driver.TrapOp(kfd.TrapSuspendQueues), Stage: kfdtest.Hardware, Nth: 2, Errno: unix.EIO})
		// The newest comes first: 2 succeeds, 1 fails, 0 is not tried.
		n, got := s.suspend(ids...)
		s.wantArray([]uint32{ids[0] | invalid, ids[1] | invalid | failed, ids[2]}, got)
		if n != 1 {
			s.Errorf("%d suspended, want 1", n)
		}
		n, got = s.suspend(ids...)
		s.wantArray(ids, got) // the second time it is suspended already
		if diff := cmp.Diff([]uint32{ids[1]}, s.running()); diff != "" || n != 3 {
			s.Errorf("%d suspended; running (-want +got):\n%s", n, diff)
		}
	})
}

func TestSuspendDisturbsOthersOnceForEachGPU(t *testing.T) {
	stage(t, "6.12", hws, func(s *scene) {
		other := s.m.Spawn()
		fd, err := other.Main().StartRuntime()
		s.must(err)
		_, err = other.Main().CreateQueue(fd, gpuA, kfd.QueueTypeComputeAQL)
		s.must(err)
		ids := s.suspendable(gpuA, gpuA, gpuA, gpuB)
		before := s.m.GPU(gpuA)
		s.suspend(ids[:3]...)
		after := s.m.GPU(gpuA)
		if got := after.Cycled[other.PID()] - before.Cycled[other.PID()]; got != 1 {
			s.Errorf("the other process was taken off %d times", got)
		}
		if after.Maps-before.Maps != 1 {
			s.Error("the other process was not resumed")
		}
		before = s.m.GPU(gpuB)
		s.suspend(ids[3])
		if after = s.m.GPU(gpuB); after.Unmaps-before.Unmaps != 1 || after.Maps != before.Maps {
			s.Error("a runlist for no queue")
		}
	})
}

func TestGracePeriodAsTheHardwareGetsIt(t *testing.T) {
	for grace, want := range map[uint32]uint32{0: 1, 1: 1, 255: 255, 256: 0, 257: 1, ^uint32(0): driver.DefaultGrace} {
		stage(t, "6.12", hws, func(s *scene) {
			ids := s.suspendable(gpuA)
			s.suspendFor(grace, ids...)
			g := s.m.GPU(gpuA)
			if got := g.Grace[len(g.Grace)-1]; got != want || g.GraceNow != driver.DefaultGrace {
				s.Errorf("grace period %d: the register had %d, want %d, and then %d", grace, got, want, g.GraceNow)
			}
		})
	}
}

// TestGraceOfZeroByKernelAndFirmware compares the emulated register with what was read from each
// kernel's source: kernel, GPU, firmware, grace period, and the field that the driver writes.
func TestGraceOfZeroByKernelAndFirmware(t *testing.T) {
	const table = "../../../shared/findings/inputs/k13-grace-0-on-linux-7.3.txt"
	text, err := os.ReadFile(table)
	if errors.Is(err, fs.ErrNotExist) {
		t.Skip("the table is not here: ", table)
	}
	if err != nil {
		t.Fatal(err)
	}
	profiles := map[string]string{"6.12.117": "6.12.117", "7.2.13": "7.2", "7.3.4": "7.3"}
	versions := map[string]uint32{"9.4.1": 90008, "9.4.2": 90010, "9.4.3": 90402, "9.5.0": 90500}
	rows := 0
	for line := range strings.Lines(string(text)) {
		if line = strings.TrimSpace(line); line == "" || line[0] == '#' {
			continue
		}
		var kernel, gc, product, firmware, written string
		var grace uint32
		if n, err := fmt.Sscan(line, &kernel, &gc, &product, &firmware, &grace, &written); n != 6 {
			t.Fatalf("%q: %v", line, err)
		}
		rows++
		want := driver.DefaultGrace
		if written != "unchanged" {
			_, err = fmt.Sscan(written, &want)
		}
		gfx, known := versions[gc]
		if err != nil || !known || profiles[kernel] == "" {
			t.Fatalf("%q is not understood", line)
		}
		all := []uint32{1, 1000}
		if firmware != "any" {
			all = make([]uint32, 1)
			if _, err := fmt.Sscan(firmware, &all[0]); err != nil {
				t.Fatalf("%q: %v", line, err)
			}
		}
		for _, firmware := range all {
			nodes := []driver.Node{{ID: gpuA, GFX: gfx, MECFirmware: firmware}}
			t.Run(fmt.Sprintf("%s, %s, firmware %d, grace %d", kernel, gc, firmware, grace), func(t *testing.T) {
				stageOn(t, kfdtest.Config{Profile: profiles[kernel], Nodes: nodes}, func(s *scene) {
					s.suspendFor(grace, s.suspendable(gpuA)...)
					g := s.m.GPU(gpuA)
					if got := g.Grace[len(g.Grace)-1]; got != want || g.GraceNow != driver.DefaultGrace {
						s.Errorf("the register had %d, want %d, and then %d", got, want, g.GraceNow)
					}
				})
			})
		}
	}
	if rows < 10 {
		t.Errorf("%d rows, want 10 at least", rows)
	}
}

func TestQueueArrayIsChecked(t *testing.T) {
	onProfiles(t, hws, func(s *scene) {
		ids := s.suspendable(gpuA)
		call := func(op kfd.TrapOp, array kfd.Pointer, n uint32) error {
			args := kfd.TrapSuspendQueuesArgs{PID: uint32(s.job.PID()), Op: op, QueueArrayPtr: array, NumQueues: n}
			_, err := s.trap(kfd.PointerTo(&args))
			return err
		}
		s.want(unix.EFAULT, call(kfd.TrapSuspendQueues, kfdtest.Unmapped(), 1))
		s.want(0, call(kfd.TrapSuspendQueues, kfd.Pointer{}, 0))
		if s.device.Version().Minor >= 17 {
			s.want(unix.EINVAL, call(kfd.TrapSuspendQueues, kfd.Pointer{}, 1))
			s.want(unix.EINVAL, call(kfd.TrapSuspendQueues, kfd.PointerToSlice(ids), kfd.MaxQueues+1))
		}
	})
}

func TestResume(t *testing.T) {
	onEach(t, func(s *scene) {
		ids := s.suspendable(gpuA, gpuB)
		s.suspend(ids[0])
		got, err := s.device.Resume(s.job.PID(), append(ids, 99))
		s.must(err)
		want := []kfd.QueueResult{{ID: ids[0]}, {ID: ids[1]}, {ID: 99, Status: kfd.QueueSkipped}}
		if diff := cmp.Diff(want, got); diff != "" {
			s.Errorf("(-want +got):\n%s", diff)
		}
		s.suspend(ids...)
		n, err := s.device.ResumeAll(s.job.PID())
		s.must(err)
		if diff := cmp.Diff(ids, s.running()); diff != "" || n != 2 {
			s.Errorf("%d resumed; running (-want +got):\n%s", n, diff)
		}
	})
}

func TestDestroyOfASuspendedQueueWaits(t *testing.T) {
	onEach(t, func(s *scene) {
		id := s.suspendable(gpuA)[0]
		s.suspend(id)
		destroyed := start(func() error { return s.job.Main().DestroyQueue(s.fd, id) })
		if !waits(destroyed) || !s.job.Main().Blocked() {
			s.Fatal("it did not wait")
		}
		// Meanwhile the lock is free, and the queue exists but cannot be suspended.
		other := s.queue(gpuA)
		_, err := s.device.ResumeAll(s.job.PID())
		s.must(err)
		s.must(<-destroyed)
		if diff := cmp.Diff([]uint32{other}, s.running()); diff != "" {
			s.Errorf("running (-want +got):\n%s", diff)
		}
	})
}

func TestInterruptedDestroy(t *testing.T) {
	onProfiles(t, hws, func(s *scene) {
		recovers := slices.Contains([]string{"6.12.117", "7.2", "7.3"}, s.profile)
		id := s.suspendable(gpuA)[0]
		s.suspend(id)
		destroyed := start(func() error { return s.job.Main().DestroyQueue(s.fd, id) })
		second := start(func() error { return s.job.NewThread().DestroyQueue(s.fd, id) })
		if recovers {
			s.want(unix.EBUSY, <-second)
		}
		s.job.Main().Interrupt()
		s.want(unix.EINTR, <-destroyed)
		if got := s.job.Queues()[id].Destroying; got == recovers {
			s.Errorf("being destroyed: %v", got)
		}
		_, err := s.device.ResumeAll(s.job.PID())
		s.must(err)
		if !recovers {
			s.must(<-second)
			return
		}
		_, ids := s.suspend(id)
		s.wantArray([]uint32{id}, ids)
	})
}

func TestQueueOfAnInterruptedDestroyIsLostBeforeTheFix(t *testing.T) {
	onProfiles(t, hws, func(s *scene) {
		id := s.suspendable(gpuA)[0]
		s.suspend(id)
		destroyed := start(func() error { return s.job.Main().DestroyQueue(s.fd, id) })
		s.job.Main().Interrupt()
		s.want(unix.EINTR, <-destroyed)
		_, err := s.device.ResumeAll(s.job.PID())
		s.must(err)
		_, ids := s.suspend(id) // it cannot be suspended until it is destroyed
		s.wantArray([]uint32{id | invalid}, ids)
		s.must(s.job.Main().DestroyQueue(s.fd, id))
	}, "6.5", "6.12", "6.12.103", "amd-dkms")
}

func TestDisableClearsWhatIsPending(t *testing.T) {
	onEach(t, func(s *scene) {
		id := s.queue(gpuA)
		s.enable()
		s.must(s.device.Disable(s.job.PID()))
		s.enable()
		_, ids := s.suspend(id)
		s.wantArray([]uint32{id}, ids)
		s.must(s.device.Disable(s.job.PID()))
		s.wantArray([]uint32{id}, s.running())
	})
}

func TestUpdateOfASuspendedQueueLeavesItSuspended(t *testing.T) {
	onEach(t, func(s *scene) {
		id := s.suspendable(gpuA)[0]
		update := func(percent uint32) {
			args := kfdabi.UpdateQueueArgs{RingBaseAddress: 1 << 20, QueueID: id, RingSize: 4096, QueuePercentage: percent}
			_, err := s.job.Main().Ioctl(s.fd, kfdabi.ReqUpdateQueue, kfd.PointerTo(&args))
			s.must(err)
		}
		s.suspend(id)
		update(50)
		if got := s.running(); got != nil {
			s.Errorf("running: %v", got)
		}
		update(0)
		_, err := s.device.ResumeAll(s.job.PID())
		s.must(err)
		if got := s.running(); got != nil {
			s.Errorf("running with percentage 0: %v", got)
		}
		update(100)
		s.wantArray([]uint32{id}, s.running())
	})
}

func TestEvictionAndSuspensionAreIndependent(t *testing.T) {
	onEach(t, func(s *scene) {
		ids := s.suspendable(gpuA, gpuB)
		s.must(s.m.Evict(s.job.MM(), kfd.TriggerTTM))
		n, _ := s.suspend(ids...)
		if n != 2 {
			s.Errorf("%d suspended, want 2", n)
		}
		s.must(s.m.Restore(s.job.MM()))
		if got := s.running(); got != nil {
			s.Errorf("running although suspended: %v", got)
		}
		s.must(s.m.Evict(s.job.MM(), kfd.TriggerTTM))
		_, err := s.device.ResumeAll(s.job.PID())
		s.must(err)
		if got := s.running(); got != nil {
			s.Errorf("running although evicted: %v", got)
		}
		s.must(s.m.Restore(s.job.MM()))
		s.wantArray(ids, s.running())
	})
}

func TestResetEvictsEverything(t *testing.T) {
	onEach(t, func(s *scene) {
		ids := s.suspendable(gpuA, gpuB)
		s.m.StartReset(gpuA)
		_, got := s.suspend(ids...)
		if s.m.GPU(gpuB).Removes+s.m.GPU(gpuA).Removes == 0 {
			s.wantArray([]uint32{ids[0] | failed, ids[1]}, got)
		} else {
			s.wantArray(ids, got) // the queues are evicted: MES removes nothing
		}
		s.m.EndReset(gpuA)
		_, err := s.device.ResumeAll(s.job.PID())
		s.must(err)
		if got := s.running(); got != nil {
			s.Errorf("running after a reset: %v", got)
		}
	})
}

func TestSnapshots(t *testing.T) {
	onEach(t, func(s *scene) {
		s.queue(gpuA)
		s.queue(gpuB)
		s.enable()
		entries := make([]kfd.QueueSnapshotEntry, 2)
		args := kfd.TrapQueueSnapshotArgs{
			PID: uint32(s.job.PID()), Op: kfd.TrapGetQueueSnapshot, ExceptionMask: kfd.ECQueueNew.Mask(),
			SnapshotBufPtr: kfd.PointerToSlice(entries), NumQueues: 1, EntrySize: 64,
		}
		_, err := s.trap(kfd.PointerTo(&args))
		s.must(err)
		if args.NumQueues != 2 || args.EntrySize != 64 || entries[0].QueueID != 1 || entries[0].GPUID != uint32(gpuB) {
			s.Errorf("%+v: %+v", args, entries[0])
		}
		// Only exceptions of listed queues are cleared: those of the newest.
		if q := s.job.Queues(); q[0].Exceptions == 0 || q[1].Exceptions != 0 {
			s.Errorf("pending: %v and %v", q[0].Exceptions, q[1].Exceptions)
		}
		args.NumQueues, args.EntrySize = 2, 0
		_, err = s.trap(kfd.PointerTo(&args))
		s.want(unix.EINVAL, err)
		if args.NumQueues != 0 {
			s.Errorf("%d queues after EINVAL", args.NumQueues)
		}
		devices, err := s.device.DeviceSnapshot(s.job.PID())
		s.must(err)
		if len(devices) != 2 || devices[1].GPUID != uint32(gpuB) || devices[1].NumXCC != 1 {
			s.Errorf("devices: %+v", devices)
		}
	})
}

func TestFailureToResume(t *testing.T) {
	onEach(t, func(s *scene) {
		ids := s.suspendable(gpuA, gpuB)
		s.suspend(ids...)
		s.m.FailGPU(driver.TrapOp(kfd.TrapResumeQueues), gpuA, unix.EIO)
		got, err := s.device.Resume(s.job.PID(), ids)
		s.must(err)
		want := []kfd.QueueResult{{ID: ids[0], Status: kfd.QueueHardwareError}, {ID: ids[1]}}
		if diff := cmp.Diff(want, got); diff != "" {
			s.Errorf("(-want +got):\n%s", diff)
		}
		s.wantArray(ids[1:], s.running())
		if got := s.job.Suspended(); got != nil {
			s.Errorf("suspended, to the driver: %v", got)
		}
	})
}
