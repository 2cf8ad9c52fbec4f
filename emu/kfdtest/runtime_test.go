package kfdtest_test

import (
	"testing"
	"testing/synctest"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/emu/kfdtest"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// answer is the debugger's answer to EC_PROCESS_RUNTIME.
func (s *scene) answer() {
	s.Helper()
	s.must(s.device.AnswerRuntime(s.job.PID()))
}

func TestRuntimeEnableOnce(t *testing.T) {
	onEach(t, func(s *scene) {
		s.want(unix.EBUSY, s.job.Main().RuntimeEnable(s.fd))
		s.must(s.job.Main().RuntimeDisable(s.fd))
		s.queue(gpuA)
		s.want(unix.EEXIST, s.job.Main().RuntimeEnable(s.fd))
	})
}

func TestRuntimeWaitsForTheDebugger(t *testing.T) {
	onEach(t, func(s *scene) {
		s.must(s.job.Main().RuntimeDisable(s.fd))
		if info := s.enable(); info.State != kfd.RuntimeDisabled {
			s.Fatalf("runtime %v", info.State)
		}
		enabled := start(func() error { return s.job.Main().RuntimeEnable(s.fd) })
		if !waits(enabled) || s.dots() != 1 {
			s.Fatal("RUNTIME_ENABLE did not wait, or did not notify the debugger")
		}
		event, _, err := s.device.QueryDebugEvent(s.job.PID(), kfd.ECProcessRuntime.Mask())
		s.must(err)
		if event.Raised != kfd.ECProcessRuntime.Mask() {
			s.Errorf("raised: %v", event.Raised)
		}
		s.must(func() error { _, err := s.device.ResumeAll(s.job.PID()); return err }()) // it is activated already
		s.answer()
		s.must(<-enabled)

		s.suspendAllOf(s.queue(gpuA))
		disabled := start(func() error { return s.job.Main().RuntimeDisable(s.fd) })
		if !waits(disabled) || s.job.Suspended() != nil {
			s.Errorf("waits: %v, suspended: %v", waits(disabled), s.job.Suspended())
		}
		// Neither DISABLE nor the debugger's death ends the wait; a signal does.
		s.dbg.Kill()
		synctest.Wait()
		if !waits(disabled) {
			s.Fatal("the death of the debugger answered")
		}
		s.job.Main().Interrupt()
		s.want(unix.EINTR, <-disabled)
		s.must(s.job.Main().RuntimeDisable(s.fd))
	})
}

func (s *scene) suspendAllOf(ids ...uint32) {
	s.Helper()
	_, err := s.device.Snapshot(s.job.PID(), kfd.ECQueueNew.Mask())
	s.must(err)
	s.suspend(ids...)
}

func TestRuntimeAnswersAreCounted(t *testing.T) {
	stage(t, "6.12.103", hws, func(s *scene) {
		s.must(s.job.Main().RuntimeDisable(s.fd))
		s.enable()
		s.answer()
		s.answer()
		for range 1 {
			s.must(s.job.Main().RuntimeEnable(s.fd))
			s.must(s.job.Main().RuntimeDisable(s.fd))
		}
		third := start(func() error { return s.job.Main().RuntimeEnable(s.fd) })
		if !waits(third) {
			s.Fatal("two answers were enough for three")
		}
		s.job.Main().Interrupt()
		s.want(unix.EINTR, <-third)
		// The second attempt waits again, without another notification.
		s.dots()
		third = start(func() error { return s.job.Main().RuntimeEnable(s.fd) })
		if !waits(third) || s.dots() != 0 {
			s.Fatal("the retry does not wait, or tells again")
		}
		s.answer()
		s.must(<-third)
	})
}

func TestFullPipeInBlockingModeHangsTheTarget(t *testing.T) {
	onProfiles(t, hws, func(s *scene) {
		r, w, err := s.dbg.Main().Pipe(false)
		s.must(err)
		s.pipe = w
		s.enable()
		n, err := s.dbg.Main().Write(w, make([]byte, 65536))
		if err != nil || n != 65536 {
			s.Fatal(n, err)
		}
		created := start(func() error {
			_, err := s.job.Main().CreateQueue(s.fd, gpuA, kfd.QueueTypeComputeAQL)
			return err
		})
		queried := start(func() error {
			_, _, err := s.device.QueryDebugEvent(s.job.PID(), 0)
			return err
		})
		if !waits(created) || !waits(queried) {
			s.Fatal("it did not wait: the debugger for the target, and that for the debugger")
		}
		thread := s.dbg.NewThread()
		if _, err = thread.Read(r, make([]byte, 1)); err != nil {
			s.Fatal(err)
		}
		s.must(<-created)
		s.must(<-queried)
	})
}

func TestPipeWithoutAReaderKillsTheTarget(t *testing.T) {
	stage(t, "6.12", hws, func(s *scene) {
		s.enable()
		s.must(s.dbg.Main().Close(s.events))
		_, err := s.job.Main().CreateQueue(s.fd, gpuA, kfd.QueueTypeComputeAQL)
		s.want(unix.EOWNERDEAD, err)
		if !s.job.Dead() {
			s.Error("the target survived SIGPIPE")
		}
	})
}

func TestExceptionsGoToTheDebuggerOrTheRuntime(t *testing.T) {
	stage(t, "6.12", hws, func(s *scene) {
		id := s.suspendable(gpuA)[0]
		fault := kfdabi.ECQueueWaveMemoryViolation.Mask()
		if !s.m.Raise(s.job.MM(), gpuA, id, fault) || s.dots() != 0 || s.job.Queues()[id].Sent != fault {
			s.Error("the runtime did not get an exception that the debugger has not enabled")
		}
		// It stays pending, so enabling it later notifies at once.
		s.must(s.setExceptions(fault))
		if s.dots() != 1 {
			s.Error("the debugger was not notified of a pending exception")
		}
		query := func(id uint32) (size uint32, err error) {
			args := kfd.TrapQueryExceptionInfoArgs{
				PID: uint32(s.job.PID()), Op: kfd.TrapQueryExceptionInfo, InfoPtr: kfd.PointerTo(new([64]byte)), InfoSize: 64,
				SourceID: id, ExceptionCode: kfdabi.ECQueueWaveMemoryViolation, ClearException: 1,
			}
			_, err = s.trap(kfd.PointerTo(&args))
			return args.InfoSize, err
		}
		size, err := query(id)
		s.must(err)
		if size != 0 {
			s.Errorf("info of %d bytes", size)
		}
		_, err = query(id)
		s.want(unix.ENODATA, err)
		_, err = query(99)
		s.want(unix.EINVAL, err)
		send := func(mask kfd.ExceptionMask, gpu gpreempt.GPUID, queue uint32) error {
			_, err := s.trap(kfd.PointerTo(&kfd.TrapSendRuntimeEventArgs{
				PID: uint32(s.job.PID()), Op: kfd.TrapSendRuntimeEvent, ExceptionMask: mask, GPUID: uint32(gpu), QueueID: queue,
			}))
			return err
		}
		s.want(unix.ENODEV, send(kfdabi.ECDeviceMemoryViolation.Mask(), 99, 0))
		s.must(send(fault, gpuA, id))
	})
}

func TestQueueDeletionIsAnExceptionOfTheGPU(t *testing.T) {
	stage(t, "6.12", hws, func(s *scene) {
		id := s.suspendable(gpuB)[0]
		s.must(s.setExceptions(kfdabi.ECDeviceQueueDelete.Mask()))
		s.must(s.job.Main().DestroyQueue(s.fd, id))
		event, _, err := s.device.QueryDebugEvent(s.job.PID(), kfdabi.ECDeviceQueueDelete.Mask())
		s.must(err)
		if event != (kfd.DebugEvent{Raised: kfdabi.ECDeviceQueueDelete.Mask(), GPU: gpuB}) {
			s.Errorf("event %+v", event)
		}
	})
}

func TestOtherDebugOperations(t *testing.T) {
	stage(t, "6.12", hws, func(s *scene) {
		s.enable()
		pid := uint32(s.job.PID())
		flags := kfdabi.TrapSetFlagsArgs{PID: pid, Op: kfdabi.TrapSetFlags, Flags: 1}
		_, err := s.trap(kfd.PointerTo(&flags))
		s.must(err)
		if flags.Flags != 0 {
			s.Errorf("flags before: %d", flags.Flags)
		}
		flags.Flags = 2
		_, err = s.trap(kfd.PointerTo(&flags))
		s.want(unix.EACCES, err)
		mode := kfdabi.TrapSetWaveLaunchModeArgs{PID: pid, Op: kfdabi.TrapSetWaveLaunchMode, LaunchMode: 2}
		_, err = s.trap(kfd.PointerTo(&mode))
		s.want(unix.EINVAL, err)
		over := kfdabi.TrapSetWaveLaunchOverrideArgs{PID: pid, Op: kfdabi.TrapSetWaveLaunchOverride, SupportRequestMask: 1 << 30}
		_, err = s.trap(kfd.PointerTo(&over))
		s.want(unix.EACCES, err)
		if over.SupportRequestMask != 0x1ff {
			s.Errorf("supported: %#x", over.SupportRequestMask)
		}
		watch := kfdabi.TrapSetNodeAddressWatchArgs{PID: pid, Op: kfdabi.TrapSetNodeAddressWatch, GPUID: uint32(gpuB)}
		for id := range uint32(4) {
			_, err = s.trap(kfd.PointerTo(&watch))
			s.must(err)
			if watch.ID != id {
				s.Errorf("watch point %d, want %d", watch.ID, id)
			}
		}
		_, err = s.trap(kfd.PointerTo(&watch))
		s.want(unix.ENOMEM, err)
		watch.GPUID = 5
		_, err = s.trap(kfd.PointerTo(&watch))
		s.want(unix.ENODEV, err)
		clearing := kfdabi.TrapClearNodeAddressWatchArgs{PID: pid, Op: kfdabi.TrapClearNodeAddressWatch, GPUID: uint32(gpuB), ID: 3}
		_, err = s.trap(kfd.PointerTo(&clearing))
		s.must(err)
		_, err = s.trap(kfd.PointerTo(&clearing))
		s.want(unix.EINVAL, err)
	})
}

func TestNoDebuggingWithoutHWS(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := kfdtest.New(kfdtest.Config{Profile: "6.12", Nodes: []driver.Node{{ID: gpuA, GFX: hws}}, NoHWS: true})
		job, dbg := m.Spawn(), m.Spawn()
		fd, err := job.Main().StartRuntime()
		if err != nil {
			t.Fatal(err)
		}
		if _, err = job.Main().CreateQueue(fd, gpuA, kfd.QueueTypeComputeAQL); err != nil {
			t.Fatal(err)
		}
		device, err := kfd.OpenWith(dbg.Main(), kfd.DevicePath)
		if err != nil {
			t.Fatal(err)
		}
		s := &scene{T: t}
		s.want(unix.EINVAL, device.Disable(12345))
		if !job.Queues()[0].Running {
			t.Error("the queue does not run")
		}
		s.must(m.Evict(job.MM(), kfd.TriggerTTM))
		if job.Queues()[0].Running {
			t.Error("the queue runs although evicted")
		}
	})
}

// The last call ends while Kill waits, and the exit begins right after that.
func TestKillReturnsAfterTheDeathOfAWaitingProcess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := kfdtest.New(kfdtest.Config{Profile: "7.2", Nodes: []driver.Node{{ID: gpuA, GFX: hws}}})
		m.Inject(kfdtest.Fault{Op: driver.RequestOp(kfdabi.ReqRuntimeEnable), Hold: true, Always: true})
		for range 500 {
			job := m.Spawn()
			fd, err := job.Main().OpenKFD()
			if err != nil {
				t.Fatal(err)
			}
			enabled := start(func() error { return job.Main().RuntimeEnable(fd) })
			if !waits(enabled) {
				t.Fatal("the call does not wait")
			}
			job.Kill()
			if !job.Dead() {
				t.Fatal("Kill returned before the death")
			}
			<-enabled
		}
	})
}

// setExceptions replaces the exceptions that the debugger is notified of.
func (s *scene) setExceptions(mask kfd.ExceptionMask) error {
	_, err := s.trap(kfd.PointerTo(&kfdabi.TrapSetExceptionsEnabledArgs{
		PID: uint32(s.job.PID()), Op: kfdabi.TrapSetExceptionsEnabled, ExceptionMask: mask,
	}))
	return err
}
