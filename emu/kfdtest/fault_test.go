package kfdtest_test

import (
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdtest"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

var snapshotOp = driver.TrapOp(kfd.TrapGetQueueSnapshot)

func TestErrnoForTheNthCallOfOneProcess(t *testing.T) {
	stage(t, "6.12", hws, func(s *scene) {
		s.enable()
		snapshot := func() error { _, err := s.device.Snapshot(s.job.PID(), 0); return err }
		s.m.Inject(kfdtest.Fault{Op: snapshotOp, Caller: s.dbg, Nth: 3, Errno: unix.ENOMEM})
		s.m.Fail(snapshotOp, s.job, unix.EIO, true) // of another process
		s.must(snapshot())                          // one call: there are no queues
		s.must(snapshot())
		s.want(unix.ENOMEM, snapshot())
		s.must(snapshot())
		always := s.m.Fail(snapshotOp, nil, unix.EINTR, true)
		s.want(unix.EINTR, func() error { _, err := s.device.Snapshot(s.job.PID(), enabledMask); return err }())
		always.Remove()
		s.must(snapshot())
		if always.Hits() != 1 {
			s.Errorf("%d hits", always.Hits())
		}
	})
}

func TestEffectStaysWhenOnlyTheResultFails(t *testing.T) {
	stage(t, "6.12", hws, func(s *scene) {
		s.m.Inject(kfdtest.Fault{Op: driver.TrapOp(kfd.TrapEnable), Stage: kfdtest.After, Errno: unix.EINTR})
		_, err := s.device.Enable(s.job.PID(), enabledMask, s.pipe)
		s.want(unix.EINTR, err)
		if state, _ := s.job.KFD(); !state.Enabled {
			s.Error("debugging is not enabled")
		}
		last := s.m.Calls()[len(s.m.Calls())-1]
		want := kfdtest.Call{
			PID: s.dbg.PID(), TID: s.dbg.PID(), Op: driver.TrapOp(kfd.TrapEnable), Target: s.job.PID(), Mask: enabledMask,
			Done: true, R1: ^uintptr(0), Err: unix.EINTR, Injected: true,
		}
		if diff := cmp.Diff(want, last); diff != "" {
			s.Errorf("call (-want +got):\n%s", diff)
		}
	})
}

func TestQueueReplacedBetweenSnapshotAndSuspend(t *testing.T) {
	onEach(t, func(s *scene) {
		gone := s.suspendable(gpuA)[0]
		var born uint32
		s.m.Inject(kfdtest.Fault{Op: snapshotOp, Stage: kfdtest.After, Do: func() {
			s.must(s.job.Main().DestroyQueue(s.fd, gone))
			s.queue(gpuA) // it gets the same ID
			born = s.queue(gpuA)
		}})
		_, err := s.device.Snapshot(s.job.PID(), kfd.ECQueueNew.Mask())
		s.must(err)
		_, ids := s.suspend(gone, born)
		s.wantArray([]uint32{gone | kfd.QueueInvalidMask, born | kfd.QueueInvalidMask}, ids)
	})
}

func TestKillBeforeAndAfterACall(t *testing.T) {
	onEach(t, func(s *scene) {
		ids := s.suspendable(gpuA)
		suspendOp := driver.TrapOp(kfd.TrapSuspendQueues)
		s.m.Inject(kfdtest.Fault{Op: suspendOp, Caller: s.dbg, Stage: kfdtest.After, Do: s.dbg.Kill})
		_, err := s.device.Suspend(s.job.PID(), ids)
		s.want(unix.EOWNERDEAD, err)
		if !s.dbg.Dead() || s.job.Suspended() != nil {
			s.Errorf("dead %v, suspended %v", s.dbg.Dead(), s.job.Suspended())
		}
		second := s.m.Spawn()
		device := s.open(second)
		s.must(second.Main().Seize(s.job.PID()))
		_, err = device.Enable(s.job.PID(), 0, 0)
		s.want(unix.EBADF, err)
		s.m.Inject(kfdtest.Fault{Op: suspendOp, Target: s.job, Do: s.job.Kill})
		_, err = device.Suspend(s.job.PID(), ids)
		s.want(unix.ESRCH, err)
	})
}

func TestHungCallHoldsTheTargetsLock(t *testing.T) {
	onEach(t, func(s *scene) {
		ids := s.suspendable(gpuA)
		other := s.m.Spawn()
		fd, err := other.Main().StartRuntime()
		s.must(err)
		hang := s.m.Hang(driver.TrapOp(kfd.TrapSuspendQueues))
		suspended := start(func() error { _, err := s.device.Suspend(s.job.PID(), ids); return err })
		updated := start(func() error { _, err := s.job.Main().CreateQueue(s.fd, gpuB, kfd.QueueTypeSDMA); return err })
		s.job.Main().Interrupt() // a signal does not end the call
		sameGPU := start(func() error { _, err := other.Main().CreateQueue(fd, gpuA, kfd.QueueTypeSDMA); return err })
		opened := start(func() error { _, err := other.NewThread().Open(kfd.DevicePath, 0); return err })
		synctest.Wait()
		if !waits(suspended) || !waits(updated) || !waits(sameGPU) || waits(opened) {
			s.Errorf("waiting: the call %v, the target %v, another on the GPU %v; another that opens %v",
				waits(suspended), waits(updated), waits(sameGPU), waits(opened))
		}
		if !s.dbg.Main().Blocked() || !s.job.Main().Blocked() {
			s.Error("not blocked")
		}
		hang.Release()
		s.must(<-suspended)
		s.must(<-updated)
		s.must(<-sameGPU)
		s.must(<-opened)
	})
}

func TestCallIsHeldBeforeItBegins(t *testing.T) {
	stage(t, "6.12", hws, func(s *scene) {
		i := s.m.Inject(kfdtest.Fault{Op: driver.TrapOp(kfd.TrapEnable), Hold: true})
		enabled := start(func() error { _, err := s.device.Enable(s.job.PID(), enabledMask, s.pipe); return err })
		<-i.Reached()
		s.queue(gpuA) // the held call has no lock
		if !waits(enabled) || !s.dbg.Main().Blocked() {
			s.Fatal("it is not held")
		}
		i.Release()
		s.must(<-enabled)

		again := s.m.Inject(kfdtest.Fault{Op: snapshotOp, Hold: true})
		listed := start(func() error { _, err := s.device.Snapshot(s.job.PID(), 0); return err })
		<-again.Reached()
		s.dbg.Kill()
		s.want(unix.EOWNERDEAD, <-listed)
	})
}

func TestPIDsAreReused(t *testing.T) {
	stage(t, "6.12", hws, func(s *scene) {
		s.enable()
		s.job.Kill()
		again := s.m.SpawnAt(s.job.PID())
		if again.PID() != s.job.PID() || again.Start() == s.job.Start() {
			s.Errorf("%v and %v", again.Key(), s.job.Key())
		}
		_, err := s.device.Snapshot(again.PID(), 0)
		s.want(unix.ESRCH, err)
		s.want(unix.ESRCH, s.dbg.Main().Detach(again.PID()))
	})
}

func TestPtrace(t *testing.T) {
	stage(t, "6.12", hws, func(s *scene) {
		pid, other := s.job.PID(), s.m.Spawn()
		s.want(unix.EPERM, other.Main().Seize(pid)) // traced already
		s.want(unix.ESRCH, s.dbg.NewThread().Detach(pid))
		thread := s.dbg.NewThread()
		s.must(s.dbg.Main().Detach(pid))
		s.must(thread.Seize(pid))
		thread.Exit() // this ends the tracing
		s.want(unix.EPERM, s.job.Main().Seize(pid))
		s.want(unix.ESRCH, other.Main().Seize(77))
		other.SetCaps()
		s.want(unix.EPERM, other.Main().Seize(pid))
		s.must(s.dbg.Main().Seize(pid))
		if !s.dbg.Main().Traces(pid) || thread.Traces(pid) {
			s.Error("the wrong thread traces")
		}
	})
}

func TestPipes(t *testing.T) {
	stage(t, "6.12", hws, func(s *scene) {
		r, w, err := s.job.Main().Pipe(false)
		s.must(err)
		child := s.job.Fork()
		read := start(func() error { _, err := child.Main().Read(r, make([]byte, 4)); return err })
		if !waits(read) || !child.Main().Blocked() {
			s.Fatal("a pipe in blocking mode does not block")
		}
		_, err = s.job.Main().Write(w, []byte("x"))
		s.must(err)
		s.must(<-read)
		read = start(func() error { _, err := child.Main().Read(r, make([]byte, 4)); return err })
		child.Main().Interrupt()
		s.want(unix.EINTR, <-read)
		s.must(s.job.Main().Close(w))
		read = start(func() error { _, err := s.job.Main().Read(r, make([]byte, 4)); return err })
		if !waits(read) { // the child also has the other end
			s.Error("the pipe ended before its last writer")
		}
		child.Kill()
		s.must(<-read) // the end of the file
		_, err = s.dbg.Main().Read(s.events, make([]byte, 1))
		s.want(unix.EAGAIN, err)
	})
}
