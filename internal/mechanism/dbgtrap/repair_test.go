package dbgtrap

import (
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdtest"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// debugger is another program that debugs jobs.
type debugger struct {
	*kfdtest.Process
	f      *fixture
	device *kfd.Device
}

func (f *fixture) debugger() *debugger {
	f.t.Helper()
	d := &debugger{Process: f.machine.Spawn(), f: f}
	var err error
	d.device, err = kfd.OpenWith(d.Main(), kfd.DevicePath)
	f.must("the other debugger: open", err)
	return d
}

// enable traces the job and asks the driver for it.
func (d *debugger) enable(j *job) error {
	d.f.t.Helper()
	d.f.must("the other debugger: seize", d.Main().Seize(j.PID()))
	_, w, err := d.Main().Pipe(true)
	d.f.must("the other debugger: pipe", err)
	_, err = d.device.Enable(j.PID(), subscribed, w)
	return err
}

func (d *debugger) detach(j *job) {
	d.f.t.Helper()
	d.f.must("the other debugger: detach", d.Main().Detach(j.PID()))
}

func TestTargetOfAnotherDebuggerIsRefused(t *testing.T) {
	onNewRule(t, func(t *testing.T, f *fixture) {
		j, d := f.start(), f.debugger()
		f.must("enable", d.enable(j))
		if _, err := f.Attach(t.Context(), j.key()); err == nil {
			t.Error("a process somebody else traces is held")
		}
		undisturbed := func() {
			t.Helper()
			if _, err := d.device.Snapshot(j.PID(), 0); err != nil {
				t.Errorf("the other debugger is disturbed: %v", err)
			}
		}
		undisturbed()
		d.detach(j)
		_, err := f.Attach(t.Context(), j.key())
		wantErr(t, "attach", err, mechanism.ErrDebugged)
		undisturbed()
		d.Kill()
		s := f.attach(j)
		f.must("suspend", s.Suspend(t.Context(), nil))
		j.wantSuspended()
	})
}

// An ENABLE that is refused leaves the driver with a pointer to its caller, which outlives
// the caller.
func TestRefusedAttachLeavesNothingInTheDriver(t *testing.T) {
	onEachDriver(t, func(t *testing.T, f *fixture) {
		j, d := f.start(), f.debugger()
		f.must("enable", d.enable(j))
		d.detach(j)
		before, _ := j.KFD()
		_, err := f.Attach(t.Context(), j.key())
		wantErr(t, "attach", err, mechanism.ErrDebugged)
		after, _ := j.KFD()
		diff(t, "the target in the driver", before, after)
		f.machine.Self().Kill()
		j.kill()
	})
}

// The driver counts the targets of a debugger, and at its death resumes none if it counts none.
func TestTargetThatAnotherDebuggerTookToItsEndDoesNotCount(t *testing.T) {
	onEachDriver(t, func(t *testing.T, f *fixture) {
		foreign, own, d := f.start(), f.start(), f.debugger()
		f.must("enable", d.enable(foreign))
		d.detach(foreign)
		_, err := f.Attach(t.Context(), foreign.key())
		wantErr(t, "attach", err, mechanism.ErrDebugged)
		foreign.kill()
		s, err := f.Attach(t.Context(), own.key())
		f.must("attach", err)
		f.must("suspend", s.Suspend(t.Context(), nil))
		f.machine.Self().Kill()
		own.wantFree()
		_ = s.Close() // the dead have no say
	})
}

// The kernel forgets whom a dead debugger had suspended when another one's ENABLE,
// which failed, had taken its right.
func TestTargetThatADeadDebuggerLeftSuspendedRunsAgainAfterAWhile(t *testing.T) {
	onNewRule(t, func(t *testing.T, f *fixture) {
		j, dead, thief := f.start(), f.debugger(), f.debugger()
		f.must("enable", dead.enable(j))
		dead.detach(j)
		snapshot, err := dead.device.Snapshot(j.PID(), born)
		f.must("snapshot", err)
		_, err = dead.device.Suspend(j.PID(), idsOf(snapshot))
		f.must("suspend", err)
		wantErr(t, "the thief's ENABLE", thief.enable(j), unix.EALREADY)
		thief.detach(j)
		dead.Kill()
		j.wantSuspended() // or there is nothing to test
		_, err = f.Attach(t.Context(), j.key())
		wantErr(t, "attach", err, mechanism.ErrDebugged)
		j.wantSuspended()
		f.cfg.Deserted = func(gpreempt.ProcessKey) bool { return true }
		_, err = f.Attach(t.Context(), j.key())
		wantErr(t, "attach", err, mechanism.ErrDebugged)
		j.wantRunning()
	})
}

// debugItself is what the runtime's core dump does first.
func (j *job) debugItself() *kfd.Device {
	j.f.t.Helper()
	own, err := kfd.OpenWith(j.Main(), kfd.DevicePath)
	j.must("open", err)
	_, w, err := j.Main().Pipe(true)
	j.must("pipe", err)
	_, err = own.Enable(j.PID(), subscribed, w)
	j.must("enable", err)
	return own
}

func TestTargetThatDebugsItselfIsLeftAlone(t *testing.T) {
	t.Run("before", func(t *testing.T) {
		onEachDriver(t, func(t *testing.T, f *fixture) {
			j := f.start()
			own := j.debugItself()
			snapshot, err := own.Snapshot(j.PID(), born)
			f.must("snapshot", err)
			_, err = own.Suspend(j.PID(), idsOf(snapshot))
			f.must("suspend", err)
			before, _ := j.KFD()
			for range 2 {
				_, err = f.Attach(t.Context(), j.key())
				wantErr(t, "attach", err, mechanism.ErrDebugged)
			}
			after, _ := j.KFD()
			diff(t, "the target in the driver", before, after)
			f.must("disable", own.Disable(j.PID()))
			s := f.attach(j)
			f.must("suspend", s.Suspend(t.Context(), nil))
			j.wantSuspended()
		})
	})
	// Between the question whether anybody debugs a target and its ENABLE, the target may begin
	// to debug itself.
	t.Run("meanwhile", func(t *testing.T) {
		onEachDriver(t, func(t *testing.T, f *fixture) {
			j := f.start()
			f.machine.Inject(kfdtest.Fault{
				Op: driver.TrapOp(kfd.TrapGetQueueSnapshot), Caller: f.machine.Self(), Stage: kfdtest.After,
				Do: func() { j.debugItself() },
			})
			_, err := f.Attach(t.Context(), j.key())
			wantErr(t, "attach", err, mechanism.ErrDebugged)
			wantErr(t, "attach", err, unix.EALREADY)
			j.wantFree()
			f.machine.Self().Kill()
			j.kill()
		})
	})
}

func TestRightThatAnotherDebuggerTookIsTakenBack(t *testing.T) {
	onNewRule(t, func(t *testing.T, f *fixture) {
		for _, suspended := range []bool{false, true} {
			j, d := f.start(), f.debugger()
			s := f.attach(j)
			if suspended {
				f.must("suspend", s.Suspend(t.Context(), nil))
			}
			wantErr(t, "the other's ENABLE", d.enable(j), unix.EALREADY)
			d.detach(j)
			if suspended {
				f.must("resume", s.Resume(t.Context()))
				j.wantRunning()
			}
			f.must("suspend", s.Suspend(t.Context(), nil))
			j.wantSuspended()
			// Our death has to end it again.
			if state, _ := j.KFD(); state.Debugger != f.machine.Self().PID() {
				t.Errorf("the driver takes %d for the debugger", state.Debugger)
			}
			f.must("close", s.Close())
			j.wantFree()
		}
	})
}

func TestEventsAreServedAfterTheRightWasTaken(t *testing.T) {
	onNewRule(t, func(t *testing.T, f *fixture) {
		j, d := f.start(), f.debugger()
		s := f.attach(j)
		f.must("suspend", s.Suspend(t.Context(), nil))
		wantErr(t, "the other's ENABLE", d.enable(j), unix.EALREADY)
		d.detach(j)
		j.create(gpuA, kfd.QueueTypeComputeAQL)
		f.await("the new queue is suspended", j.allSuspended)
		wantErr(t, "the other's ENABLE", d.enable(j), unix.EALREADY)
		d.detach(j)
		f.must("resume", s.Resume(t.Context()))
		for id := range j.Queues() {
			j.destroy(id)
		}
		for range 3 {
			j.disable()
			j.enable()
		}
	})
}

func TestTargetThatAnotherDebuggerKeepsIsLostAndResumedWhenItCan(t *testing.T) {
	onNewRule(t, func(t *testing.T, f *fixture) {
		j, d := f.start(), f.debugger()
		s, err := f.Attach(t.Context(), j.key())
		f.must("attach", err)
		f.must("suspend", s.Suspend(t.Context(), nil))
		wantErr(t, "the other's ENABLE", d.enable(j), unix.EALREADY)
		wantErr(t, "resume", s.Resume(t.Context()), mechanism.ErrDebugged)
		if err := s.Close(); err == nil {
			t.Error("a target that could not be released is released")
		}
		if _, err := f.Attach(t.Context(), j.key()); err == nil {
			t.Error("it is held again")
		}
		d.Kill()
		f.await("the target is free", func() bool { s, _ := j.KFD(); return !s.Enabled && j.allRun() })
	})
}

func TestDebuggingThatSomebodyEndedIsEnabledAgainOnce(t *testing.T) {
	onEachDriver(t, func(t *testing.T, f *fixture) {
		j, d := f.start(), f.debugger()
		s := f.attach(j)
		end := func() {
			t.Helper()
			if !f.oldRule() {
				wantErr(t, "the other's ENABLE", d.enable(j), unix.EALREADY)
				d.detach(j) // the right stays: who still traces means to take over
			}
			f.must("the other's DISABLE", d.device.Disable(j.PID()))
		}
		f.must("suspend", s.Suspend(t.Context(), nil))
		before := len(f.suspendCalls())
		end()
		f.await("it is suspended again", func() bool { return len(f.suspendCalls()) > before && j.allSuspended() })
		f.must("suspend", s.Suspend(t.Context(), nil))
		j.create(gpuB, kfd.QueueTypeComputeAQL)
		f.await("a new queue is suspended", j.allSuspended)
		end()
		wantErr(t, "lost", receive(f, "the loss", f.lost), mechanism.ErrDebugged)
		f.await("the target is free", func() bool { s, _ := j.KFD(); return !s.Enabled && j.allRun() })
		f.must("close", s.Close())
	})
}

func TestTargetThatAnotherDebuggerTookOverIsLeftToIt(t *testing.T) {
	onNewRule(t, func(t *testing.T, f *fixture) {
		j, d := f.start(), f.debugger()
		s := f.attach(j)
		wantErr(t, "the other's ENABLE", d.enable(j), unix.EALREADY)
		f.must("the other's DISABLE", d.device.Disable(j.PID()))
		_, w, err := d.Main().Pipe(true)
		f.must("pipe", err)
		_, err = d.device.Enable(j.PID(), subscribed, w)
		f.must("the other's ENABLE", err)
		wantErr(t, "lost", receive(f, "the loss", f.lost), mechanism.ErrDebugged)
		f.must("close", s.Close())
		if _, err := d.device.Snapshot(j.PID(), 0); err != nil {
			t.Errorf("the other debugger was disturbed: %v", err)
		}
	})
}

func TestLostTraceIsTakenUpAgain(t *testing.T) {
	for _, profile := range []string{"6.5", "6.12"} {
		t.Run(profile, func(t *testing.T) {
			f := newFixture(t, profile, schedulers["HWS"])
			j := f.start()
			s := f.attach(j)
			f.must("suspend", s.Suspend(t.Context(), nil))
			f.mu.Lock()
			thread := f.threads[j.PID()]
			f.mu.Unlock()
			thread.losesTarget()
			j.create(gpuB, kfd.QueueTypeComputeAQL)
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
		})
	}
}

func TestAnswerThatWasCutShortByATheftIsGivenAfterIt(t *testing.T) {
	onNewRule(t, func(t *testing.T, f *fixture) {
		j, d := f.start(), f.debugger()
		f.attach(j)
		f.machine.Inject(kfdtest.Fault{
			Op: driver.TrapOp(kfd.TrapQueryExceptionInfo), Caller: f.machine.Self(), Stage: kfdtest.After,
			Do: func() {
				wantErr(t, "the other's ENABLE", d.enable(j), unix.EALREADY)
				d.detach(j)
			},
		})
		for id := range j.Queues() {
			j.destroy(id)
		}
		j.disable()
		f.await("the driver has an answer in hand again", func() bool { s, _ := j.KFD(); return s.Acks == 1 })
	})
}

func TestTargetThatIsTakenAfterAFailedResumeRunsWhenItCan(t *testing.T) {
	onNewRule(t, func(t *testing.T, f *fixture) {
		j, d := f.start(), f.debugger()
		s, err := f.Attach(t.Context(), j.key())
		f.must("attach", err)
		f.must("suspend", s.Suspend(t.Context(), nil))
		broken := f.machine.Fail(driver.TrapOp(kfd.TrapResumeQueues), f.machine.Self(), unix.EFAULT, true)
		wantErr(t, "resume", s.Resume(t.Context()), unix.EFAULT)
		wantErr(t, "the other's ENABLE", d.enable(j), unix.EALREADY)
		broken.Remove()
		if err := s.Close(); err == nil {
			t.Error("a target that could not be released is released")
		}
		d.Kill()
		f.await("the target is free", func() bool { s, _ := j.KFD(); return !s.Enabled && j.allRun() })
	})
}

// Where DISABLE asks for no right, a target is released although another program
// traces it.
func TestTargetWhoseTraceWasTakenIsReleased(t *testing.T) {
	for _, profile := range []string{"6.5", "6.12"} {
		t.Run(profile, func(t *testing.T) {
			f := newFixture(t, profile, schedulers["HWS"])
			j, d := f.start(), f.debugger()
			h := newDebuggee(f.Mechanism, j.key(), func() {})
			f.must("begin", h.begin(t.Context(), t.Context()))
			f.must("suspend", h.suspend(t.Context(), func() {}))
			f.threads[j.PID()].losesTarget()
			f.must("the other debugger: seize", d.Main().Seize(j.PID()))
			f.must("end", h.end(t.Context()))
			j.wantFree()
		})
	}
}

// Nothing tells a debugger that another one has taken its right: the driver would write to
// freed memory at the end of the target if that other one had ended before.
func TestRightThatWasTakenIsNoticedWithoutACall(t *testing.T) {
	for _, suspended := range []bool{false, true} {
		t.Run(fmt.Sprintf("suspended=%v", suspended), func(t *testing.T) {
			onNewRule(t, func(t *testing.T, f *fixture) {
				f.beats = beats{suspended: time.Hour, running: time.Hour}
				if suspended {
					f.beats.suspended = time.Millisecond
				} else {
					f.beats.running = time.Millisecond
				}
				j, d := f.start(), f.debugger()
				s := f.attach(j)
				if suspended {
					f.must("suspend", s.Suspend(t.Context(), nil))
				}
				// It does not trace the job at a beat, which would then end the session.
				f.machine.Inject(kfdtest.Fault{
					Op: driver.TrapOp(kfd.TrapQueryDebugEvent), Caller: f.machine.Self(), Target: j.Process,
					Do: func() {
						wantErr(t, "the other's ENABLE", d.enable(j), unix.EALREADY)
						d.detach(j)
						d.Kill()
					},
				})
				f.await("the right is taken back", func() bool {
					state, _ := j.KFD()
					return d.Dead() && state.Debugger == f.machine.Self().PID()
				})
				if suspended {
					j.wantSuspended()
				}
				j.kill()
			})
		})
	}
}
