package dbgtrap

import (
	"context"
	"errors"
	"path/filepath"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdtest"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// used are the calls a session makes to the driver in its life.
var used = []kfd.TrapOp{
	kfd.TrapEnable, kfd.TrapSendRuntimeEvent, kfd.TrapGetQueueSnapshot, kfd.TrapQueryDebugEvent, kfd.TrapQueryExceptionInfo,
	kfd.TrapSuspendQueues, kfd.TrapResumeQueues, kfd.TrapDisable,
}

func wantHardware(t *testing.T, what string, err error, gpus ...gpreempt.GPUID) {
	t.Helper()
	hardware, ok := errors.AsType[*mechanism.HardwareError](err)
	if !ok {
		t.Errorf("%s returns %v, want a hardware error", what, err)
		return
	}
	diff(t, what+": the GPUs that failed", gpus, hardware.GPUs)
}

func TestGPUThatFailsToSuspendIsNamedAndEverythingRuns(t *testing.T) {
	onEach(t, func(t *testing.T, f *fixture) {
		j := f.start()
		s := f.attach(j)
		broken := f.machine.FailGPU(driver.TrapOp(kfd.TrapSuspendQueues), gpuB, unix.EIO)
		wantHardware(t, "suspend", s.Suspend(t.Context(), nil), gpuB)
		j.wantRunning()
		broken.Remove()
		f.must("suspend", s.Suspend(t.Context(), nil))
		j.wantSuspended()
		f.must("resume", s.Resume(t.Context()))
		j.wantRunning()
	})
}

func TestGPUThatFailsToResumeIsNamedAndTriedAgain(t *testing.T) {
	onEach(t, func(t *testing.T, f *fixture) {
		j := f.start()
		s := f.attach(j)
		f.must("suspend", s.Suspend(t.Context(), nil))
		broken := f.machine.FailGPU(driver.TrapOp(kfd.TrapResumeQueues), gpuA, unix.EIO)
		err := s.Resume(t.Context())
		if f.machine.GPU(gpuA).Adds > 0 { // MES: nothing reports which of them it is
			wantHardware(t, "resume", err, gpuA, gpuB)
		} else {
			wantHardware(t, "resume", err, gpuA)
		}
		j.wantRunning()
		broken.Remove()
		f.must("resume", s.Resume(t.Context()))
		f.await("all queues are on the GPU", func() bool {
			for _, q := range j.Queues() {
				if !q.Running {
					return false
				}
			}
			return true
		})
		f.must("resume", s.Resume(t.Context()))
		j.wantRunning()
	})
}

func TestGPUThatFailsForANewQueueEndsTheHold(t *testing.T) {
	onEach(t, func(t *testing.T, f *fixture) {
		j := f.start()
		s := f.attach(j)
		f.must("suspend", s.Suspend(t.Context(), nil))
		f.machine.FailGPU(driver.TrapOp(kfd.TrapSuspendQueues), gpuB, unix.EIO)
		j.create(gpuB, kfd.QueueTypeComputeAQL)
		wantHardware(t, "lost", receive(f, "the loss", f.lost), gpuB)
		f.await("all queues run", j.allRun)
		if err := s.Suspend(t.Context(), nil); err == nil {
			t.Error("a session that has ended suspends")
		}
		f.must("resume", s.Resume(t.Context()))
		f.must("close", s.Close())
		j.wantFree()
	})
}

func TestSuspendWhoseCallerHasGivenUpIsUndone(t *testing.T) {
	onEach(t, func(t *testing.T, f *fixture) {
		j := f.start()
		s := f.attach(j)
		hang := f.machine.Hang(driver.TrapOp(kfd.TrapSuspendQueues))
		ctx, cancel := context.WithCancelCause(t.Context())
		enough := errors.New("that is enough")
		suspended := make(chan error)
		go func() { suspended <- s.Suspend(ctx, nil) }()
		receive(f, "the hang", hang.Reached())
		cancel(enough)
		hang.Remove()
		wantErr(t, "suspend", receive(f, "the suspension", suspended), enough)
		j.wantRunning()
		wantErr(t, "suspend again", s.Suspend(ctx, nil), enough)
		f.must("suspend", s.Suspend(t.Context(), nil))
		j.wantSuspended()
	})
}

func TestSuspendIsReportedOnlyWhenAllQueuesAreSuspended(t *testing.T) {
	onEach(t, func(t *testing.T, f *fixture) {
		j := f.start()
		s := f.attach(j)
		reported := 0
		then := func() {
			reported++
			j.wantSuspended()
		}
		suspend := func(ctx context.Context) error {
			return s.do(func() error { return s.session.Suspend(ctx, then) })
		}
		f.must("suspend", suspend(t.Context()))
		f.must("resume", s.Resume(t.Context()))
		gone, cancel := context.WithCancel(t.Context())
		f.between(func() { j.destroy(1); j.create(gpuA, kfd.QueueTypeComputeAQL) })
		f.must("suspend with a birth in between", suspend(t.Context()))
		f.must("resume", s.Resume(t.Context()))
		f.between(cancel)
		wantErr(t, "suspend that is given up", suspend(gone), context.Canceled)
		broken := f.machine.FailGPU(driver.TrapOp(kfd.TrapSuspendQueues), gpuB, unix.EIO)
		wantHardware(t, "suspend", suspend(t.Context()), gpuB)
		broken.Remove()
		if reported != 2 {
			t.Errorf("done was called %d times, want 2", reported)
		}
	})
}

func TestOtherTargetsAreNotHeldUpByAHang(t *testing.T) {
	onEachDriver(t, func(t *testing.T, f *fixture) {
		stuck, other := f.start(), f.start()
		s, o := f.attach(stuck), f.attach(other)
		hang := f.machine.Inject(kfdtest.Fault{Op: driver.TrapOp(kfd.TrapSuspendQueues), Hold: true})
		failed := make(chan error)
		go func() { failed <- s.Suspend(t.Context(), nil) }()
		receive(f, "the hang", hang.Reached())
		f.must("suspend", o.Suspend(t.Context(), nil))
		other.wantSuspended()
		f.must("resume", o.Resume(t.Context()))
		other.exitCleanly()
		hang.Remove()
		f.must("suspend", receive(f, "the suspension", failed))
	})
}

func TestAttachGivenUpLeavesTheTargetFree(t *testing.T) {
	for _, op := range []kfd.TrapOp{kfd.TrapEnable, kfd.TrapSendRuntimeEvent, kfd.TrapGetQueueSnapshot} {
		t.Run(op.String(), func(t *testing.T) {
			onEachDriver(t, func(t *testing.T, f *fixture) {
				j := f.start()
				hang := f.machine.Inject(kfdtest.Fault{Op: driver.TrapOp(op), Stage: kfdtest.After, Hold: true})
				ctx, cancel := context.WithCancel(t.Context())
				attached := make(chan error)
				go func() {
					_, err := f.Attach(ctx, j.key())
					attached <- err
				}()
				receive(f, "the hang", hang.Reached())
				cancel()
				hang.Remove()
				wantErr(t, "attach", receive(f, "the attach", attached), context.Canceled)
				j.wantFree()
				s := f.attach(j)
				f.must("suspend", s.Suspend(t.Context(), nil))
				f.must("close", s.Close())
				j.wantFree()
			})
		})
	}
}

// life is a session from its beginning to its end, with a runtime that goes and a
// queue that is born, whatever the calls say.
func (f *fixture) life(j *job) (errs []error) {
	s, err := f.Attach(f.t.Context(), j.key())
	if err != nil {
		return []error{err}
	}
	errs = append(errs, s.Suspend(f.t.Context(), nil))
	if !j.Dead() {
		_, _ = j.Main().CreateQueue(j.fd, gpuA, kfd.QueueTypeComputeAQL) // it may be dead
	}
	errs = append(errs, s.Suspend(f.t.Context(), nil))
	errs = append(errs, s.Resume(f.t.Context()))
	if !j.Dead() {
		_ = j.Main().RuntimeDisable(j.fd)
	}
	if err := s.Suspend(f.t.Context(), nil); !endedRuntime(err) {
		errs = append(errs, err)
	}
	return append(errs, s.Close())
}

// endedRuntime reports whether queues cannot be suspended because the runtime has ended.
func endedRuntime(err error) bool {
	runtime, ok := errors.AsType[*RuntimeError](err)
	return ok && runtime.Ended
}

func TestInterruptedCallsLoseNothing(t *testing.T) {
	for _, op := range used {
		for name, stage := range map[string]kfdtest.Stage{"before": kfdtest.Before, "after": kfdtest.After} {
			t.Run(op.String()+" "+name, func(t *testing.T) {
				onEachDriver(t, func(t *testing.T, f *fixture) {
					j := f.start()
					i := f.machine.Inject(kfdtest.Fault{Op: driver.TrapOp(op), Stage: stage, Errno: unix.EINTR})
					s := f.attach(j)
					f.must("suspend", s.Suspend(t.Context(), nil))
					j.wantSuspended()
					j.create(gpuB, kfd.QueueTypeSDMA)
					f.await("the new queue is suspended", j.allSuspended)
					f.must("resume", s.Resume(t.Context()))
					j.wantRunning()
					for id := range j.Queues() {
						j.destroy(id)
					}
					for range 3 {
						j.disable()
						j.enable()
					}
					j.create(gpuA, kfd.QueueTypeComputeAQL)
					f.must("suspend", s.Suspend(t.Context(), nil))
					j.wantSuspended()
					f.must("close", s.Close())
					j.wantFree()
					if i.Hits() == 0 {
						t.Error("nothing was interrupted")
					}
				})
			})
		}
	}
}

func TestTargetThatDiesAtAnyPointIsGone(t *testing.T) {
	for _, op := range used {
		for name, stage := range map[string]kfdtest.Stage{"before": kfdtest.Before, "after": kfdtest.After} {
			t.Run(op.String()+" "+name, func(t *testing.T) {
				onEachDriver(t, func(t *testing.T, f *fixture) {
					j := f.start()
					i := f.machine.Inject(kfdtest.Fault{Op: driver.TrapOp(op), Caller: f.machine.Self(), Stage: stage, Do: j.kill})
					for _, err := range f.life(j) {
						if err != nil && !errors.Is(err, mechanism.ErrGone) {
							t.Errorf("%v, want ErrGone", err)
						}
					}
					if i.Hits() == 0 {
						t.Error("it did not die")
					}
					select {
					case err := <-f.lost:
						t.Errorf("lost gets %v of a death", err)
					default:
					}
				})
			})
		}
	}
}

func TestTargetThatReplacesItsProgramAtAnyPointIsReleased(t *testing.T) {
	for _, op := range used {
		for name, stage := range map[string]kfdtest.Stage{"before": kfdtest.Before, "after": kfdtest.After} {
			t.Run(op.String()+" "+name, func(t *testing.T) {
				onEachDriver(t, func(t *testing.T, f *fixture) {
					j := f.start()
					f.machine.Inject(kfdtest.Fault{Op: driver.TrapOp(op), Caller: f.machine.Self(), Stage: stage, Do: j.exec})
					for _, err := range f.life(j) {
						if err != nil && !errors.Is(err, mechanism.ErrReplaced) && !errors.Is(err, mechanism.ErrGone) {
							t.Errorf("%v, want mechanism.ErrReplaced", err)
						}
					}
					j.wantFree()
					// The next program can be held like any other.
					j.open()
					j.enable()
					j.create(gpuA, kfd.QueueTypeComputeAQL)
					s := f.attach(j)
					f.must("suspend", s.Suspend(t.Context(), nil))
					j.wantSuspended()
				})
			})
		}
	}
}

func TestReplacedProgramIsReported(t *testing.T) {
	onEachDriver(t, func(t *testing.T, f *fixture) {
		j := f.start()
		s := f.attach(j)
		f.must("suspend", s.Suspend(t.Context(), nil))
		j.exec()
		wantErr(t, "lost", receive(f, "the loss", f.lost), mechanism.ErrReplaced)
		wantErr(t, "suspend", s.Suspend(t.Context(), nil), mechanism.ErrReplaced)
		f.must("close", s.Close())
	})
}

func TestUnexpectedAnswersLeaveTheTargetFree(t *testing.T) {
	for _, op := range used {
		for _, errno := range []unix.Errno{unix.EFAULT, unix.ENOMEM, unix.EPERM, unix.EINVAL, unix.EBUSY} {
			if op == kfd.TrapDisable && errno == unix.EINVAL {
				continue // there it means that nothing is left to do
			}
			t.Run(op.String()+" "+errno.Error(), func(t *testing.T) {
				onNewRule(t, func(t *testing.T, f *fixture) {
					fault := kfdtest.Fault{Op: driver.TrapOp(op), Caller: f.machine.Self(), Errno: errno}
					// Everything runs when the daemon receives the error, and not only after Close.
					j := f.start()
					s, err := f.Attach(t.Context(), j.key())
					f.must("attach", err)
					f.must("suspend", s.Suspend(t.Context(), nil))
					i := f.machine.Inject(fault)
					j.create(gpuB, kfd.QueueTypeComputeAQL)
					f.await("the new queue is suspended, or the session is lost", func() bool { return j.allSuspended() || len(f.lost) > 0 })
					if len(f.lost) > 0 {
						j.wantRunning()
					}
					i.Remove()
					_ = s.Close() // it may have to be called again
					j = f.start()
					f.machine.Inject(fault)
					f.life(j)
					f.await("the target is free", func() bool { s, _ := j.KFD(); return !s.Enabled && j.allRun() })
				})
			})
		}
	}
}

// A suspension takes a queue that was just born with it, and does not ask for the event of the
// birth: that is taken in afterwards.
func TestBirthThatCannotBeTakenInAfterASuspensionEndsTheHoldAndEverythingRuns(t *testing.T) {
	onEach(t, func(t *testing.T, f *fixture) {
		j := f.start()
		s := f.attach(j)
		f.must("suspend", s.do(func() error { // no event is handled meanwhile
			j.create(gpuB, kfd.QueueTypeComputeAQL)
			f.machine.Inject(kfdtest.Fault{Op: driver.TrapOp(kfd.TrapQueryDebugEvent), Caller: f.machine.Self(), Errno: unix.EFAULT})
			err := s.session.Suspend(t.Context(), nil)
			j.wantSuspended()
			return err
		}))
		wantErr(t, "lost", receive(f, "the loss", f.lost), unix.EFAULT)
		j.wantRunning()
		wantErr(t, "suspend", s.Suspend(t.Context(), nil), unix.EFAULT)
		j.wantRunning()
		f.must("resume", s.Resume(t.Context()))
		f.must("close", s.Close())
		j.wantFree()
		s = f.attach(j)
		f.must("suspend", s.Suspend(t.Context(), nil))
		j.wantSuspended()
	})
}

func TestPanicIsAnErrorAndEverythingRuns(t *testing.T) {
	onEachDriver(t, func(t *testing.T, f *fixture) {
		j := f.start()
		s := f.attach(j)
		f.machine.Inject(kfdtest.Fault{
			Op: driver.TrapOp(kfd.TrapSuspendQueues), Stage: kfdtest.After, Do: func() { panic("out of cheese") },
		})
		if err := s.Suspend(t.Context(), nil); err == nil {
			t.Error("a suspension that panicked worked")
		}
		j.wantRunning()
		f.must("suspend", s.Suspend(t.Context(), nil))
		j.wantSuspended()
	})
}

func TestMainThreadThatEndsLeavesTheProcessHeld(t *testing.T) {
	onEachDriver(t, func(t *testing.T, f *fixture) {
		j := f.start()
		other := j.NewThread()
		s := f.attach(j)
		f.must("suspend", s.Suspend(t.Context(), nil))
		j.endMain(other)
		f.must("resume", s.Resume(t.Context()))
		j.wantRunning()
		f.must("suspend", s.Suspend(t.Context(), nil))
		j.wantSuspended()
		f.must("close", s.Close())
		j.wantFree()
	})
}

// Of a process with threads that is killed, the main thread is gone before the
// others are, and the driver has released it before it is gone from proc.
func TestProcessThatIsAboutToVanishIsGone(t *testing.T) {
	onEachDriver(t, func(t *testing.T, f *fixture) {
		j := f.start()
		other := j.NewThread()
		s := f.attach(j)
		j.writeStatOf(filepath.Join(j.dir(), "task", strconv.Itoa(int(other.TID()))), other.TID(), 'R', 4, 2)
		j.writeStat('Z', 4)
		j.Kill()
		wantErr(t, "suspend", s.Suspend(t.Context(), nil), mechanism.ErrGone)
		f.must("close", s.Close())
		select {
		case err := <-f.lost:
			t.Errorf("lost gets %v of a death", err)
		default:
		}
	})
}

func TestMainThreadThatEndsCannotBeRegained(t *testing.T) {
	onNewRule(t, func(t *testing.T, f *fixture) {
		j, d := f.start(), f.debugger()
		other := j.NewThread()
		s, err := f.Attach(t.Context(), j.key())
		f.must("attach", err)
		f.must("suspend", s.Suspend(t.Context(), nil))
		wantErr(t, "the other's ENABLE", d.enable(j), unix.EALREADY)
		j.endMain(other)
		if err := s.Resume(t.Context()); !final(err) {
			t.Errorf("resume returns %v", err)
		}
		if err := s.Close(); err == nil {
			t.Error("a target that could not be released is released")
		}
		j.kill()
	})
}

func TestCloseResumesWhereResumeDoesNot(t *testing.T) {
	onEachDriver(t, func(t *testing.T, f *fixture) {
		j := f.start()
		s := f.attach(j)
		f.must("suspend", s.Suspend(t.Context(), nil))
		broken := f.machine.Fail(driver.TrapOp(kfd.TrapResumeQueues), f.machine.Self(), unix.EFAULT, true)
		for range 3 {
			wantErr(t, "resume", s.Resume(t.Context()), unix.EFAULT)
		}
		f.must("close", s.Close())
		j.wantFree()
		broken.Remove()
	})
}
