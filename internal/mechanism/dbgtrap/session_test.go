package dbgtrap

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdtest"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

func TestSuspendTakesAllQueuesInOneCallAndResumePutsThemBack(t *testing.T) {
	onEach(t, func(t *testing.T, f *fixture) {
		j := f.start()
		s := f.attach(j)
		j.wantRunning()
		for range 3 {
			f.must("suspend", s.Suspend(t.Context(), nil))
			j.wantSuspended()
			for _, g := range []gpreempt.GPUID{gpuA, gpuB} {
				if grace := f.machine.GPU(g).Grace; len(grace) > 0 && grace[len(grace)-1] != 1 {
					t.Errorf("GPU %v saves waves with a grace period of %d in its register, want at once", g, int32(grace[len(grace)-1]))
				}
			}
			f.must("suspend again", s.Suspend(t.Context(), nil))
			j.wantSuspended()
			f.must("resume", s.Resume(t.Context()))
			j.wantRunning()
			f.must("resume again", s.Resume(t.Context()))
		}
		diff(t, "suspended", [][]uint32{{3, 2, 1, 0}, {3, 2, 1, 0}, {3, 2, 1, 0}}, f.suspendCalls())
		for _, c := range f.machine.Calls() {
			if c.Op == driver.TrapOp(kfd.TrapSuspendQueues) && c.Grace != 1 {
				t.Errorf("a grace period of %d: waves are to be saved at once", c.Grace)
			}
		}
		f.must("suspend", s.Suspend(t.Context(), nil))
		f.must("close", s.Close())
		f.must("close again", s.Close())
		j.wantFree()
		wantErr(t, "suspend after close", s.Suspend(t.Context(), nil), errClosed)
		wantErr(t, "resume after close", s.Resume(t.Context()), errClosed)
	})
}

func TestHotPathIsTwoCallsEachWay(t *testing.T) {
	onEachDriver(t, func(t *testing.T, f *fixture) {
		j := f.start()
		s := f.attach(j)
		before := len(f.machine.Ops(f.machine.Self()))
		f.must("suspend", s.Suspend(t.Context(), nil))
		f.must("resume", s.Resume(t.Context()))
		snapshot := driver.TrapOp(kfd.TrapGetQueueSnapshot)
		want := []driver.Op{snapshot, driver.TrapOp(kfd.TrapSuspendQueues), driver.TrapOp(kfd.TrapResumeQueues), snapshot}
		diff(t, "calls", want, f.machine.Ops(f.machine.Self())[before:])
	})
}

func TestQueuesOfATargetAreKnownFromTheirBirthOn(t *testing.T) {
	onEachDriver(t, func(t *testing.T, f *fixture) {
		j := f.start()
		ids := func() []uint32 {
			queues, _ := f.Queues(j.key())
			return idsOf(queues)
		}
		if queues, held := f.Queues(j.key()); held {
			t.Errorf("a target that is not held has queues %v", queues)
		}
		s := f.attach(j)
		diff(t, "attached", []uint32{3, 2, 1, 0}, ids())
		calls := len(f.machine.Calls())
		ids()
		diff(t, "calls to the driver", calls, len(f.machine.Calls()))
		id := j.create(gpuA, kfd.QueueTypeComputeAQL)
		f.await("the new one is known", func() bool { return slices.Contains(ids(), id) })
		f.must("close", s.Close())
		if queues, held := f.Queues(j.key()); held {
			t.Errorf("a target that was released has queues %v", queues)
		}
	})
}

func TestTraceLastsOnlyWhereTheDriverAsksForIt(t *testing.T) {
	onEachDriver(t, func(t *testing.T, f *fixture) {
		j := f.start()
		f.attach(j)
		f.mu.Lock()
		thread := f.threads[j.PID()]
		f.mu.Unlock()
		if traced := !traceEnded(thread); traced != f.oldRule() {
			t.Errorf("traced %v, although the driver asks for it: %v", traced, f.oldRule())
		}
		want := kfd.PermissionProcess
		if strings.HasSuffix(t.Name(), "/6.5") || strings.HasSuffix(t.Name(), "/6.12") {
			want = kfd.PermissionThread
		}
		if got := f.PermissionRule(); got != want {
			t.Errorf("rule %v, want %v", got, want)
		}
	})
}

func TestQueueBornWhileSuspendedIsSuspendedByItself(t *testing.T) {
	onEach(t, func(t *testing.T, f *fixture) {
		j := f.start()
		s := f.attach(j)
		f.must("suspend", s.Suspend(t.Context(), nil))
		for range 3 {
			j.create(gpuB, kfd.QueueTypeComputeAQL)
			f.await("the new queue is suspended", j.allSuspended)
			if key := receive(f, "birth", f.births); key != j.key() {
				t.Errorf("birth in %v, want %v", key, j.key())
			}
		}
		f.must("suspend", s.Suspend(t.Context(), nil))
		diff(t, "suspended", [][]uint32{{3, 2, 1, 0}, {4}, {5}, {6}}, f.suspendCalls())
		f.must("resume", s.Resume(t.Context()))
		j.wantRunning()
		j.create(gpuA, kfd.QueueTypeSDMA)
		receive(f, "birth", f.births)
		j.wantRunning()
	})
}

// between has something happen between the snapshot and the suspension.
func (f *fixture) between(do func()) {
	f.machine.Inject(kfdtest.Fault{Op: driver.TrapOp(kfd.TrapSuspendQueues), Do: do})
}

func TestQueuesThatChangeBetweenSnapshotAndSuspension(t *testing.T) {
	for name, change := range map[string]func(*job){
		"born":      func(j *job) { j.create(gpuA, kfd.QueueTypeComputeAQL) },
		"destroyed": func(j *job) { j.destroy(1) },
		"replaced":  func(j *job) { j.destroy(1); j.create(gpuB, kfd.QueueTypeComputeAQL) },
		"all destroyed": func(j *job) {
			for id := range j.Queues() {
				j.destroy(id)
			}
		},
		"all replaced": func(j *job) {
			for id := range j.Queues() {
				j.destroy(id)
			}
			for range 5 {
				j.create(gpuB, kfd.QueueTypeComputeAQL)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			onEach(t, func(t *testing.T, f *fixture) {
				j := f.start()
				s := f.attach(j)
				f.between(func() { change(j) })
				f.must("suspend", s.Suspend(t.Context(), nil))
				f.await("all queues are suspended", j.allSuspended)
				f.must("resume", s.Resume(t.Context()))
				j.wantRunning()
			})
		})
	}
}

func TestTargetThatReplacesQueuesForEverIsRefused(t *testing.T) {
	onEachDriver(t, func(t *testing.T, f *fixture) {
		j := f.start()
		s := f.attach(j)
		left := 50 // far more than it tries
		i := f.machine.Inject(kfdtest.Fault{
			Op: driver.TrapOp(kfd.TrapSuspendQueues), Always: true,
			Do: func() {
				if left--; left >= 0 {
					j.destroy(1)
					j.create(gpuA, kfd.QueueTypeComputeAQL)
				}
			},
		})
		if err := s.Suspend(t.Context(), nil); err == nil {
			t.Fatal("the suspension worked")
		}
		if i.Hits() > 10 {
			t.Errorf("%d calls", i.Hits())
		}
		i.Remove()
		f.await("all queues run", j.allRun)
		f.must("suspend", s.Suspend(t.Context(), nil))
		j.wantSuspended()
	})
}

// A signal that interrupts the destruction of a suspended queue leaves it half
// destroyed where the driver has not learned better.
func TestQueueHalfDestroyedIsNotPassedOver(t *testing.T) {
	onEachDriver(t, func(t *testing.T, f *fixture) {
		j := f.start()
		s := f.attach(j)
		f.must("suspend", s.Suspend(t.Context(), nil))
		destroyer := j.NewThread()
		destroyed := make(chan error)
		go func() { destroyed <- destroyer.DestroyQueue(j.fd, 2) }()
		f.await("the destruction waits", destroyer.Blocked)
		destroyer.Interrupt()
		if err := receive(f, "the destruction", destroyed); err == nil {
			t.Fatal("the queue was destroyed")
		}
		f.must("resume", s.Resume(t.Context()))
		err := s.Suspend(t.Context(), nil)
		if j.Queues()[2].Destroying {
			if err == nil {
				t.Error("a suspension that leaves a queue running works")
			}
			j.wantRunning()
		} else {
			f.must("suspend", err)
			j.wantSuspended()
		}
		f.must("resume", s.Resume(t.Context()))
		j.destroy(2)
		f.must("suspend", s.Suspend(t.Context(), nil))
		j.wantSuspended()
	})
}

func TestDestructionOfASuspendedQueueEndsWithResume(t *testing.T) {
	onEachDriver(t, func(t *testing.T, f *fixture) {
		j := f.start()
		s := f.attach(j)
		f.must("suspend", s.Suspend(t.Context(), nil))
		destroyer := j.NewThread()
		destroyed := make(chan error)
		go func() { destroyed <- destroyer.DestroyQueue(j.fd, 2) }()
		f.await("the destruction waits", destroyer.Blocked)
		f.must("resume", s.Resume(t.Context()))
		f.must("destroy", receive(f, "the destruction", destroyed))
		f.must("suspend", s.Suspend(t.Context(), nil))
		j.wantSuspended()
	})
}

func TestCleanExitIsNotHeldUp(t *testing.T) {
	onEach(t, func(t *testing.T, f *fixture) {
		j := f.spawn()
		s := f.attach(j)
		// Each waits for an answer, and one answer was given ahead: more than that show
		// that they are answered.
		for range 5 {
			j.enable()
			receive(f, "the runtime came", f.births)
			j.create(gpuA, kfd.QueueTypeComputeAQL)
			f.must("suspend", s.Suspend(t.Context(), nil))
			j.wantSuspended()
			f.must("resume", s.Resume(t.Context()))
			j.destroy(0)
			j.disable()
			f.must("suspend", s.Suspend(t.Context(), nil))
			f.must("resume", s.Resume(t.Context()))
		}
		j.exitCleanly()
		wantErr(t, "suspend", s.Suspend(t.Context(), nil), mechanism.ErrGone)
		wantErr(t, "resume", s.Resume(t.Context()), mechanism.ErrGone)
		select {
		case err := <-f.lost:
			t.Errorf("lost gets %v of an exit", err)
		default:
		}
	})
}

func TestCleanExitWhileSuspendedEndsWithTheRuntime(t *testing.T) {
	onEachDriver(t, func(t *testing.T, f *fixture) {
		f.runtimeEndTime = time.Hour // it may take its time
		j := f.start()
		s := f.attach(j)
		f.must("suspend", s.Suspend(t.Context(), nil))
		j.disable() // the driver resumes
		j.wantRunning()
		var runtime *RuntimeError
		if err := s.Suspend(t.Context(), nil); !errors.As(err, &runtime) || !runtime.Ended || runtime.Queues != 4 {
			t.Errorf("suspending queues whose runtime has ended returns %v", err)
		}
		for id := range j.Queues() {
			j.destroy(id)
		}
		f.must("suspend", s.Suspend(t.Context(), nil))
		j.enable() // it may come back
		j.create(gpuA, kfd.QueueTypeComputeAQL)
		f.await("what was born is suspended", j.allSuspended)
		j.die(j.Kill)
	})
}

func TestTargetThatStaysWithoutItsRuntimeIsNotTakenForSuspended(t *testing.T) {
	onEachDriver(t, func(t *testing.T, f *fixture) {
		j := f.start()
		s := f.attach(j)
		f.must("suspend", s.Suspend(t.Context(), nil))
		j.disable() // the driver resumes
		want := &RuntimeError{Target: j.key(), State: kfd.RuntimeDisabled, Queues: 4, Ended: true}
		if diff := cmp.Diff(error(want), receive(f, "the loss", f.lost)); diff != "" {
			t.Errorf("lost (-want +got):\n%s", diff)
		}
		f.must("resume", s.Resume(t.Context()))
		f.must("close", s.Close())
		j.wantFree()
	})
}

// A target that announced itself to a daemon that died waits for ever, since the
// death does not release it.
func TestAttachReleasesATargetThatADeadDaemonLeftWaiting(t *testing.T) {
	onEachDriver(t, func(t *testing.T, f *fixture) {
		j := f.start()
		dead := f.machine.Spawn()
		f.must("seize", dead.Main().Seize(j.PID()))
		device, err := kfd.OpenWith(dead.Main(), kfd.DevicePath)
		f.must("open", err)
		_, w, err := dead.Main().Pipe(true)
		f.must("pipe", err)
		_, err = device.Enable(j.PID(), subscribed, w)
		f.must("enable", err)
		ended := make(chan error)
		go func() { ended <- j.Main().RuntimeDisable(j.fd) }()
		f.await("the job waits", j.Main().Blocked)
		dead.Kill()
		for id := range j.Queues() {
			f.must("destroy", j.NewThread().DestroyQueue(j.fd, id))
		}
		if !j.Main().Blocked() {
			t.Fatal("the job no longer waits")
		}
		f.attach(j)
		f.must("the end of the runtime", receive(f, "the end of the runtime", ended))
	})
}

func TestTargetWithQueuesAndNoRuntimeIsRefused(t *testing.T) {
	onEachDriver(t, func(t *testing.T, f *fixture) {
		j := f.spawn()
		j.create(gpuA, kfd.QueueTypeComputeAQL)
		_, err := f.Attach(t.Context(), j.key())
		want := RuntimeError{Target: j.key(), State: kfd.RuntimeDisabled, Queues: 1}
		if runtime, ok := errors.AsType[*RuntimeError](err); !ok || *runtime != want {
			t.Errorf("attach returns %v, want %v", err, &want)
		}
		j.wantFree()
	})
}

func TestTargetWithoutQueuesIsHeldUntilItHasSome(t *testing.T) {
	onEach(t, func(t *testing.T, f *fixture) {
		j := f.spawn()
		s := f.attach(j)
		f.must("suspend", s.Suspend(t.Context(), nil))
		j.enable()
		j.create(gpuA, kfd.QueueTypeComputeAQL)
		j.create(gpuB, kfd.QueueTypeSDMA)
		f.await("what was born is suspended", j.allSuspended)
		f.must("resume", s.Resume(t.Context()))
		j.wantRunning()
	})
}

func TestQueueMadeWithoutRuntimeEndsTheHold(t *testing.T) {
	onEachDriver(t, func(t *testing.T, f *fixture) {
		j := f.spawn()
		s := f.attach(j)
		j.create(gpuA, kfd.QueueTypeComputeAQL)
		if runtime, ok := errors.AsType[*RuntimeError](receive(f, "the loss", f.lost)); !ok || runtime.Ended {
			t.Errorf("lost gets %v", runtime)
		}
		f.await("the target is released", func() bool { s, _ := j.KFD(); return !s.Enabled })
		if err := s.Suspend(t.Context(), nil); !final(err) {
			t.Errorf("suspend returns %v", err)
		}
		f.must("resume", s.Resume(t.Context()))
		f.must("close", s.Close())
		j.wantFree()
	})
}

func TestSecondProcessOnASingleVMIDGPUIsRefusedAndReleased(t *testing.T) {
	for _, profile := range []string{"6.5", "6.12", "6.12.103", "7.2", "7.3"} {
		for _, runtimeFirst := range []bool{true, false} {
			t.Run(profile, func(t *testing.T) {
				f := newFixture(t, profile, schedulers["single-VMID"])
				first, second := f.start(), f.spawn()
				s := f.attach(first)
				var err error
				if runtimeFirst {
					second.enable()
					_, err = f.Attach(t.Context(), second.key())
				} else {
					f.attach(second)
					second.enable() // and here the driver finds out
					err = receive(f, "the loss", f.lost)
				}
				if runtime, ok := errors.AsType[*RuntimeError](err); !ok || runtime.State != kfd.RuntimeBusy {
					t.Errorf("the second process: %v", err)
				}
				f.await("it is released", func() bool { s, _ := second.KFD(); return !s.Enabled })
				second.create(gpuA, kfd.QueueTypeComputeAQL)
				second.exitCleanly()
				f.must("suspend", s.Suspend(t.Context(), nil))
				first.wantSuspended()
				f.must("resume", s.Resume(t.Context()))
				first.wantRunning()
			})
		}
	}
}

func TestProcessHasOneSessionAndAnotherAfterClose(t *testing.T) {
	onEachDriver(t, func(t *testing.T, f *fixture) {
		j := f.start()
		s := f.attach(j)
		if _, err := f.Attach(t.Context(), j.key()); err == nil {
			t.Error("a process has two sessions")
		}
		f.must("suspend", s.Suspend(t.Context(), nil))
		f.must("close", s.Close())
		j.wantFree()
		s = f.attach(j)
		f.must("suspend", s.Suspend(t.Context(), nil))
		j.wantSuspended()
		f.must("close", s.Close())
		j.wantFree()
	})
}

func TestProcessThatIsGoneIsNoFailure(t *testing.T) {
	onEachDriver(t, func(t *testing.T, f *fixture) {
		j := f.start()
		j.kill()
		_, err := f.Attach(t.Context(), j.key())
		wantErr(t, "attach to the dead", err, mechanism.ErrGone)
		other := f.start()
		_, err = f.Attach(t.Context(), gpreempt.ProcessKey{PID: other.PID(), Start: other.Start() + 1})
		wantErr(t, "attach to another of that pid", err, mechanism.ErrGone)
		other.wantFree()
	})
}

func TestOldSessionDoesNothingToTheNextProcessWithThePID(t *testing.T) {
	onEachDriver(t, func(t *testing.T, f *fixture) {
		j := f.start()
		old := f.attach(j)
		f.must("suspend", old.Suspend(t.Context(), nil))
		j.kill()
		next := &job{Process: f.machine.SpawnAt(j.PID()), f: f, vms: j.vms}
		f.mu.Lock()
		f.jobs[next.PID()] = next
		f.mu.Unlock()
		next.writeStat('S', 0)
		next.open()
		next.enable()
		next.create(gpuA, kfd.QueueTypeComputeAQL)
		s := f.attach(next)
		f.must("suspend", s.Suspend(t.Context(), nil))
		wantErr(t, "suspend", old.Suspend(t.Context(), nil), mechanism.ErrGone)
		wantErr(t, "resume", old.Resume(t.Context()), mechanism.ErrGone)
		f.must("close", old.Close())
		next.wantSuspended()
		f.must("resume", s.Resume(t.Context()))
	})
}

func TestDeathOfTheDaemonResumes(t *testing.T) {
	onEach(t, func(t *testing.T, f *fixture) {
		j := f.start()
		s, err := f.Attach(t.Context(), j.key())
		f.must("attach", err)
		f.must("suspend", s.Suspend(t.Context(), nil))
		j.wantSuspended()
		f.machine.Self().Kill()
		j.wantFree()
		_ = s.Close() // the dead have no say
	})
}
