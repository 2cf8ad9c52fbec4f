package kfdtest_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/emu/kfdtest"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

func TestAnswersRecordedInAGuestWithoutAGPU(t *testing.T) {
	// The results of raw calls on Debian's 6.12.117 in a virtual machine.
	stage(t, "6.12.117", hws, func(s *scene) {
		m := kfdtest.New(kfdtest.Config{Profile: "6.12.117"})
		job, dbg := m.Spawn(), m.Spawn()
		d := s.open(dbg)
		pid := job.PID()
		_, w, err := dbg.Main().Pipe(true)
		s.must(err)
		_, err = d.OpenSMI(0, 0)
		s.want(unix.EINVAL, err)
		_, err = d.Enable(pid, enabledMask, w)
		s.want(unix.ESRCH, err) // never opened the driver
		fd, err := job.Main().StartRuntime()
		s.must(err)
		_, err = d.Enable(pid, enabledMask, w)
		s.want(unix.EPERM, err)
		s.must(job.Main().RuntimeDisable(fd))
		s.must(dbg.Main().Seize(pid))
		info, err := d.Enable(pid, enabledMask, w)
		s.must(err)
		if info.State != kfd.RuntimeDisabled {
			s.Errorf("runtime %v, want disabled", info.State)
		}
		_, err = d.Enable(pid, enabledMask, w)
		s.want(unix.EALREADY, err)
		_, err = d.ResumeAll(pid)
		s.want(unix.EPERM, err)
		_, pending, err := d.QueryDebugEvent(pid, 0)
		s.must(err)
		if pending {
			s.Error("an event is pending")
		}
		queues, err := d.Snapshot(pid, 0)
		s.must(err)
		if len(queues) != 0 {
			s.Errorf("queues: %v", queues)
		}
		device := kfdabi.TrapDeviceSnapshotArgs{PID: uint32(pid), Op: kfd.TrapGetDeviceSnapshot, EntrySize: 120}
		_, err = dbg.Main().Ioctl(s.fdOf(dbg), kfd.ReqDbgTrap, kfd.PointerTo(&device))
		s.want(unix.EINVAL, err)
		s.must(d.AnswerRuntime(pid))
		unknown := kfd.TrapDisableArgs{PID: uint32(pid), Op: 99}
		_, err = dbg.Main().Ioctl(s.fdOf(dbg), kfd.ReqDbgTrap, kfd.PointerTo(&unknown))
		s.want(unix.EINVAL, err)
		s.must(d.Disable(pid))
		s.want(unix.EINVAL, d.Disable(pid))
		job.Kill()
		s.want(unix.ESRCH, d.Disable(pid))
	})
}

func TestDebuggingNeedsPermission(t *testing.T) {
	onProfiles(t, hws, func(s *scene) {
		s.enable()
		s.must(s.dbg.Main().Detach(s.job.PID()))
		rule, err := s.device.ProbePermissionRule(s.job.PID())
		s.must(err)
		byProcess := rule == kfd.PermissionProcess
		want := unix.EPERM
		if byProcess {
			want = 0
		}
		_, err = s.device.Snapshot(s.job.PID(), 0)
		s.want(want, err)
		// The tracer is another thread than the caller.
		s.must(s.dbg.NewThread().Seize(s.job.PID()))
		_, err = s.device.Snapshot(s.job.PID(), 0)
		s.want(want, err)

		stranger := s.open(s.m.Spawn())
		_, err = stranger.Snapshot(s.job.PID(), 0)
		s.want(unix.EPERM, err)
		want = 0 // before the fix, any process could call DISABLE
		if byProcess {
			want = unix.EPERM
		}
		s.want(want, stranger.Disable(s.job.PID()))
	})
}

func TestPermissionRuleOfEachProfile(t *testing.T) {
	want := map[string]kfd.PermissionRule{
		"6.5": kfd.PermissionThread, "6.12": kfd.PermissionThread, "amd-dkms": kfd.PermissionThread,
		"6.12.103": kfd.PermissionProcess, "6.12.117": kfd.PermissionProcess, "7.2": kfd.PermissionProcess, "7.3": kfd.PermissionProcess,
	}
	got := map[string]kfd.PermissionRule{}
	for _, profile := range driver.Profiles() {
		stage(t, profile, hws, func(s *scene) {
			s.enable()
			s.must(s.dbg.Main().Detach(s.job.PID()))
			var err error
			got[profile], err = s.device.ProbePermissionRule(s.job.PID())
			s.must(err)
		})
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("rules (-want +got):\n%s", diff)
	}
}

func TestFailedEnableTakesOverTheRightToDebug(t *testing.T) {
	onProfiles(t, hws, func(s *scene) {
		ids := s.suspendable(gpuA)
		s.suspend(ids...)
		s.must(s.dbg.Main().Detach(s.job.PID()))
		thief := s.m.Spawn()
		device := s.open(thief)
		_, w, err := thief.Main().Pipe(true)
		s.must(err)
		s.must(thief.Main().Seize(s.job.PID()))
		_, err = device.Enable(s.job.PID(), 0, w)
		s.want(unix.EALREADY, err)
		_, err = s.device.Snapshot(s.job.PID(), 0)
		s.want(unix.EPERM, err)

		// The session of the first one survives the death of either.
		s.dbg.Kill()
		thief.Kill()
		if diff := cmp.Diff(ids, s.job.Suspended()); diff != "" {
			s.Errorf("suspended after both died (-want +got):\n%s", diff)
		}
	}, "6.12.103", "7.2")
}

func TestSecondEnableOfTheFirstDebuggerRestoresItsRight(t *testing.T) {
	stage(t, "7.2", hws, func(s *scene) {
		ids := s.suspendable(gpuA)
		s.suspend(ids...)
		s.must(s.dbg.Main().Detach(s.job.PID()))
		thief := s.m.Spawn()
		device := s.open(thief)
		s.must(thief.Main().Seize(s.job.PID()))
		_, err := device.Enable(s.job.PID(), 0, 0)
		s.want(unix.EALREADY, err)
		s.must(thief.Main().Detach(s.job.PID()))
		s.must(s.dbg.Main().Seize(s.job.PID()))
		_, err = s.device.Enable(s.job.PID(), enabledMask, s.pipe)
		s.want(unix.EALREADY, err)
		s.dbg.Kill()
		if got := s.job.Suspended(); got != nil {
			s.Errorf("suspended after the debugger died: %v", got)
		}
	})
}

func TestDeathOfTheDebuggerResumes(t *testing.T) {
	onEach(t, func(s *scene) {
		ids := s.suspendable(gpuA, gpuB)
		s.suspend(ids...)
		if got := s.running(); got != nil {
			s.Fatalf("running although suspended: %v", got)
		}
		s.must(s.dbg.Main().Close(s.fdOf(s.dbg))) // this does not end the session
		if got := s.running(); got != nil {
			s.Fatalf("running after the descriptor was closed: %v", got)
		}
		s.dbg.Exec() // this does
		if diff := cmp.Diff(ids, s.running()); diff != "" {
			s.Errorf("running (-want +got):\n%s", diff)
		}
		if state, _ := s.job.KFD(); state.Enabled {
			s.Error("debugging is enabled still")
		}
	})
}

func TestDeathOfTheDebuggerWaitsForTheTargetsLock(t *testing.T) {
	onEach(t, func(s *scene) {
		ids := s.suspendable(gpuA)
		hang := s.m.Hang(driver.TrapOp(kfd.TrapSuspendQueues))
		suspended := start(func() error {
			_, err := s.device.Suspend(s.job.PID(), ids)
			return err
		})
		<-hang.Reached()
		s.dbg.Kill() // it returns although the thread cannot exit yet
		if s.dbg.Dead() || !waits(suspended) {
			s.Fatal("a thread that no signal ends has ended")
		}
		hang.Release()
		s.want(unix.EOWNERDEAD, <-suspended)
		if !s.dbg.Dead() || s.job.Suspended() != nil {
			s.Errorf("dead: %v, suspended: %v", s.dbg.Dead(), s.job.Suspended())
		}
	})
}

func TestTargetThatDiesOrExecsIsUnknown(t *testing.T) {
	onEach(t, func(s *scene) {
		s.suspend(s.suspendable(gpuA, gpuB)...)
		s.job.Exec()
		s.want(unix.ESRCH, s.device.Disable(s.job.PID()))
		s.job.Kill()
		s.want(unix.ESRCH, s.device.Disable(s.job.PID()))
		if n := len(s.m.Processes()); n != 1 {
			s.Errorf("%d processes, want the debugger alone", n)
		}
		if state, _ := s.dbg.KFD(); state.Debugged != 0 {
			s.Errorf("the debugger debugs %d processes", state.Debugged)
		}
	})
}

func TestForkedChildIsNotDebugged(t *testing.T) {
	stage(t, "7.2", hws, func(s *scene) {
		s.suspendable(gpuA)
		child := s.job.Fork()
		_, err := s.device.Snapshot(child.PID(), 0)
		s.want(unix.ESRCH, err)
		if _, err = child.Main().OpenKFD(); err != nil {
			s.Fatal(err)
		}
		_, err = s.device.Snapshot(child.PID(), 0)
		s.want(unix.EPERM, err)
	})
}

func TestOneProcessAtATimeWithASingleVMID(t *testing.T) {
	onProfiles(t, single, func(s *scene) {
		s.enable()
		if owner := s.m.GPU(gpuA).DebugOwner; owner != s.job.PID() {
			s.Errorf("the debug VMID is %d's", owner)
		}
		second := s.m.Spawn()
		_, err := second.Main().StartRuntime()
		s.must(err)
		s.must(s.dbg.Main().Seize(second.PID()))
		info, err := s.device.Enable(second.PID(), enabledMask, s.pipe)
		s.must(err) // it succeeds although the state says otherwise
		if info.State != kfd.RuntimeBusy {
			s.Fatalf("runtime %v, want busy", info.State)
		}
		_, err = s.device.ResumeAll(second.PID())
		s.want(unix.EPERM, err)
		s.must(s.device.Disable(second.PID()))
		s.must(s.device.Disable(s.job.PID()))
		info, err = s.device.Enable(second.PID(), enabledMask, s.pipe)
		s.must(err)
		if info.State != kfd.RuntimeEnabled {
			s.Errorf("runtime %v after the first session ended", info.State)
		}
	})
}

func TestProcessWithGWSCannotBeDebuggedEverywhere(t *testing.T) {
	for gfx, want := range map[uint32]unix.Errno{hws: 0, 110000: unix.EBUSY, mes: 0} {
		stage(t, "6.12.103", gfx, func(s *scene) {
			args := kfdabi.AllocQueueGWSArgs{QueueID: s.queue(gpuA), NumGWS: 1}
			_, err := s.job.Main().Ioctl(s.fd, kfdabi.ReqAllocQueueGWS, kfd.PointerTo(&args))
			s.must(err)
			_, err = s.device.Enable(s.job.PID(), enabledMask, s.pipe)
			s.want(want, err)
		})
	}
}

func TestEnableThatCannotWriteItsResult(t *testing.T) {
	onProfiles(t, hws, func(s *scene) {
		args := kfd.TrapEnableArgs{
			PID: uint32(s.job.PID()), Op: kfd.TrapEnable, RinfoPtr: kfdtest.Unmapped(), RinfoSize: 16, DbgFD: uint32(s.pipe),
		}
		_, err := s.trap(kfd.PointerTo(&args))
		s.want(unix.EFAULT, err)
		state, _ := s.job.KFD()
		undone := map[string]bool{"6.12.117": true, "7.2": true, "7.3": true}
		if want := !undone[s.profile]; state.Enabled != want {
			s.Errorf("enabled %v, want %v", state.Enabled, want)
		}
		s.want(unix.EBADF, func() error { // after the check of the descriptor
			if state.Enabled {
				s.must(s.device.Disable(s.job.PID()))
			}
			_, err := s.device.Enable(s.job.PID(), enabledMask, 999)
			return err
		}())
	})
}

func TestCUMaskMakesSomeGPUsBusy(t *testing.T) {
	stage(t, "6.12", 110000, func(s *scene) {
		words := []uint32{0xf}
		args := kfdabi.SetCUMaskArgs{QueueID: s.queue(gpuA), NumCUMask: 32, CUMaskPtr: kfd.PointerToSlice(words)}
		set := func() error {
			_, err := s.job.Main().Ioctl(s.fd, kfdabi.ReqSetCUMask, kfd.PointerTo(&args))
			return err
		}
		s.must(set())
		if info := s.enable(); info.State != kfd.RuntimeBusy {
			s.Errorf("runtime %v, want busy", info.State)
		}
		words[0] = 1 // half a pair
		s.want(unix.EINVAL, set())
	})
}
