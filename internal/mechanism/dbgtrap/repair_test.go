package dbgtrap

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdtest"
	"github.com/gpreempt/gpreempt/internal/mechanism"
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
		if _, err := d.device.Snapshot(j.PID(), 0); err != nil {
			t.Errorf("the other debugger is disturbed: %v", err)
		}
		d.detach(j)
		_, err := f.Attach(t.Context(), j.key())
		wantErr(t, "attach", err, mechanism.ErrDebugged)
		wantErr(t, "attach", err, unix.EALREADY)
		// It can help itself the way we do, because we do not trace the process.
		wantErr(t, "the other's ENABLE", d.enable(j), unix.EALREADY)
		if _, err := d.device.Snapshot(j.PID(), 0); err != nil {
			t.Errorf("the other debugger cannot get its right back: %v", err)
		}
		d.Kill()
		s := f.attach(j)
		f.must("suspend", s.Suspend(t.Context()))
		j.wantSuspended()
	})
}

// The kernel forgets whom a dead debugger had suspended when another one's ENABLE,
// which failed, had taken its right.
func TestTargetThatADeadDebuggerLeftSuspendedRunsAgain(t *testing.T) {
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
		thief.Kill()
		j.wantSuspended() // or there is nothing to test
		_, err = f.Attach(t.Context(), j.key())
		wantErr(t, "attach", err, mechanism.ErrDebugged)
		j.wantRunning()
	})
}

func TestTargetThatDebugsItselfIsRefused(t *testing.T) {
	onEachDriver(t, func(t *testing.T, f *fixture) {
		j := f.start()
		own, err := kfd.OpenWith(j.Main(), kfd.DevicePath) // as the runtime's core dump does
		f.must("open", err)
		_, w, err := j.Main().Pipe(true)
		f.must("pipe", err)
		_, err = own.Enable(j.PID(), subscribed, w)
		f.must("enable", err)
		_, err = f.Attach(t.Context(), j.key())
		wantErr(t, "attach", err, mechanism.ErrDebugged)
		if s, _ := j.KFD(); !s.Enabled {
			t.Error("its own debugging was ended")
		}
		f.must("disable", own.Disable(j.PID()))
		s := f.attach(j)
		f.must("suspend", s.Suspend(t.Context()))
		j.wantSuspended()
	})
}

func TestRightThatAnotherDebuggerTookIsTakenBack(t *testing.T) {
	onNewRule(t, func(t *testing.T, f *fixture) {
		for _, suspended := range []bool{false, true} {
			j, d := f.start(), f.debugger()
			s := f.attach(j)
			if suspended {
				f.must("suspend", s.Suspend(t.Context()))
			}
			wantErr(t, "the other's ENABLE", d.enable(j), unix.EALREADY)
			d.detach(j)
			if suspended {
				f.must("resume", s.Resume(t.Context()))
				j.wantRunning()
			}
			f.must("suspend", s.Suspend(t.Context()))
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
		f.must("suspend", s.Suspend(t.Context()))
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
		f.must("suspend", s.Suspend(t.Context()))
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
		f.must("suspend", s.Suspend(t.Context()))
		before := len(f.suspendCalls())
		end()
		f.await("it is suspended again", func() bool { return len(f.suspendCalls()) > before && j.allSuspended() })
		f.must("suspend", s.Suspend(t.Context()))
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
			f.must("suspend", s.Suspend(t.Context()))
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
		f.must("suspend", s.Suspend(t.Context()))
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
