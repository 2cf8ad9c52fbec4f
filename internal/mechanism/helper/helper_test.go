package helper

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

var profiles = []string{"6.5", "6.12", "6.12.103", "7.2", "7.3"}

func onEach(t *testing.T, test func(t *testing.T, f *fixture)) {
	t.Helper()
	for _, profile := range profiles {
		t.Run(profile, func(t *testing.T) { test(t, newFixture(t, profile)) })
	}
}

func TestTargetIsSuspendedAndResumedByItsHelper(t *testing.T) {
	onEach(t, func(t *testing.T, f *fixture) {
		job := f.job()
		s := f.attach(job)
		done := false
		f.must("suspend", s.Suspend(t.Context(), func() { done = true; f.wantSuspended(job, 1) }))
		if !done {
			t.Error("the end of the suspension was not reported")
		}
		state, _ := job.KFD()
		if debugger := state.Debugger; debugger == f.machine.Self().PID() || int(debugger) != s.helper.PID {
			t.Errorf("process %d debugs the target, want helper %d", debugger, s.helper.PID)
		}
		queues, held := f.Queues(job.Key())
		if !held || len(queues) != 1 || queues[0].GPUID != uint32(gpu) {
			t.Errorf("queues %v, held %v", queues, held)
		}
		f.must("resume", s.Resume(t.Context()))
		f.wantSuspended(job, 0)
		f.must("close", s.Close())
		f.must("close again", s.Close())
		if _, held := f.Queues(job.Key()); held {
			t.Error("a released target is held")
		}
		if n, took := f.Calls(); n == 0 || took < 0 {
			t.Errorf("%d calls of %v", n, took)
		}
	})
}

func TestSuspensionWhoseCallerHasGivenUpIsUndone(t *testing.T) {
	f := newFixture(t, "7.2")
	job := f.job()
	s := f.attach(job)
	ctx, cancel := context.WithCancelCause(t.Context())
	gaveUp := errors.New("gave up")
	hang := f.machine.Hang("DBG_TRAP SUSPEND_QUEUES")
	go func() {
		<-hang.Reached()
		cancel(gaveUp)
		hang.Remove()
	}()
	err := s.Suspend(ctx, func() { t.Error("it is reported") })
	if !errors.Is(err, gaveUp) {
		t.Errorf("suspend returns %v", err)
	}
	f.wantSuspended(job, 0)
	f.must("close", s.Close())
}

func TestHelperOfAReleasedTargetIsUsedAgain(t *testing.T) {
	f := newFixture(t, "7.2")
	used := map[int]bool{}
	for range 10 {
		job := f.job()
		s := f.attach(job)
		used[s.helper.PID] = true
		f.must("suspend", s.Suspend(t.Context(), nil))
		f.must("close", s.Close())
		state, _ := job.KFD()
		if state.Enabled || len(job.Suspended()) > 0 {
			t.Errorf("after close: %+v", state)
		}
		job.Kill()
	}
	if len(used) > 2 { // the one that is started ahead may come before
		t.Errorf("10 targets, one after another, had %d helpers", len(used))
	}
}

// A user may have any number of processes with queues, and the daemon has not any amount of memory.
func TestNumberOfHelpersIsBounded(t *testing.T) {
	f := newFixture(t, "7.2")
	f.Pool.mu.Lock() // a helper is being started ahead
	f.most = 3
	f.Pool.mu.Unlock()
	var sessions []*session
	for len(sessions) < f.most {
		// The last place may be that of a helper that is being started ahead.
		s, err := f.Attach(t.Context(), f.job().Key())
		if err == nil {
			sessions = append(sessions, s.(*session))
		} else if !strings.Contains(err.Error(), "the maximum") {
			t.Fatal(err)
		}
	}
	job := f.job()
	if _, err := f.Attach(t.Context(), job.Key()); err == nil || !strings.Contains(err.Error(), "3 helper processes are running, the maximum") {
		t.Errorf("one more attach returns %v", err)
	}
	if state, _ := job.KFD(); state.Enabled {
		t.Error("a process that was refused is debugged")
	}
	for _, s := range sessions {
		f.must("suspend", s.Suspend(t.Context(), nil))
	}
	f.must("close one", sessions[0].Close())
	s := f.attach(job)
	f.must("suspend", s.Suspend(t.Context(), nil))
	for _, s := range append(sessions[1:], s) {
		f.must("close", s.Close())
	}
}

// The end of a spare is seen by one goroutine, and the next target comes in another.
func TestSpareThatHasEndedIsNotUsed(t *testing.T) {
	f := newFixture(t, "7.2")
	dead, err := f.startOne()
	f.must("start", err)
	dead.Kill()
	testutil.Receive(t, dead.Ended, "the end of the helper")
	f.Pool.mu.Lock()
	f.spares = append(f.spares, dead)
	f.Pool.mu.Unlock()
	s := f.attach(f.job())
	if s.helper == dead {
		t.Error("a target has a helper that has ended")
	}
	f.must("close", s.Close())
}

// A helper may be killed by anybody who may, and by the kernel for lack of memory.
func TestEndOfAHelperReleasesItsTargetOnly(t *testing.T) {
	onEach(t, func(t *testing.T, f *fixture) {
		job, other := f.job(), f.job()
		s, o := f.attach(job), f.attach(other)
		f.must("suspend", s.Suspend(t.Context(), nil))
		f.must("suspend the other", o.Suspend(t.Context(), nil))
		s.helper.Kill()
		f.await("the target runs", func() bool { return len(job.Suspended()) == 0 })
		testutil.Receive(t, s.Events(), "an event")
		if _, err := s.Handle(t.Context()); err == nil || errors.Is(err, mechanism.ErrGone) {
			t.Errorf("the end of the helper is %v", err)
		}
		if _, err := s.Handle(t.Context()); err != nil {
			t.Errorf("it is reported again: %v", err)
		}
		if err := s.Suspend(t.Context(), nil); err == nil {
			t.Error("a target without a helper is suspended")
		}
		testutil.Receive(t, s.helper.Ended, "the end of the helper")
		f.must("resume", s.Resume(t.Context()))
		f.must("close", s.Close())
		f.wantSuspended(other, 1)
		again := f.attach(job)
		f.must("suspend again", again.Suspend(t.Context(), nil))
		f.wantSuspended(job, 1)
		f.must("close", again.Close())
		f.must("close the other", o.Close())
	})
}

// A target that holds its own lock keeps its helper, and nobody else.
func TestTargetThatHoldsItsLockKeepsItsHelperOnly(t *testing.T) {
	onEach(t, func(t *testing.T, f *fixture) {
		job, other := f.job(), f.job()
		s, o := f.attach(job), f.attach(other)
		f.must("suspend the other", o.Suspend(t.Context(), nil))
		release := job.HoldMutex()
		f.callTime = time.Millisecond
		err := s.Suspend(t.Context(), nil)
		f.callTime = callTime
		if err == nil {
			t.Fatal("a target that holds its lock is suspended")
		}
		if err := s.Close(); err == nil {
			t.Error("a target is released by a helper that has not ended")
		}
		f.sessions.Remove(s.target, s)
		if _, err := f.Attach(t.Context(), job.Key()); !errors.Is(err, mechanism.ErrWaiting) {
			t.Errorf("an attach while a helper waits for the lock returns %v", err)
		}
		f.wantSuspended(other, 1)
		f.must("resume the other", o.Resume(t.Context()))
		f.wantSuspended(other, 0)
		f.must("close the other", o.Close())
		release()
		testutil.Receive(t, s.helper.Ended, "the end of the helper")
		f.must("close", s.Close())
		f.wantSuspended(job, 0)
	})
}

// The kernel releases what a helper has suspended, closes its socket, and only then ends its traces:
// until then nobody else can attach, and our own helper would pass for another debugger.
func TestHelperThatStillTracesItsTargetHasNotEnded(t *testing.T) {
	f := newFixture(t, "6.5")
	job := f.job()
	s := f.attach(job)
	f.must("suspend", s.Suspend(t.Context(), nil))
	dying := make(chan struct{})
	die := sync.OnceFunc(func() { close(dying) })
	t.Cleanup(die)
	f.mu.Lock()
	f.dying = dying
	f.mu.Unlock()
	s.helper.Kill()
	f.await("the target runs", func() bool { return len(job.Suspended()) == 0 })
	testutil.Receive(t, s.Events(), "an event") // it has closed its socket
	if err := s.Close(); err == nil {
		t.Fatal("a target is released that a helper traces")
	}
	die()
	testutil.Receive(t, s.helper.Ended, "the end of the helper")
	f.must("close", s.Close())
	again := f.attach(job)
	f.must("suspend again", again.Suspend(t.Context(), nil))
	f.must("close again", again.Close())
}

// While a GPU resets, the driver lets its processes wait with their lock held.
func TestTargetThatWaitsForAResetKeepsItsHelper(t *testing.T) {
	onEach(t, func(t *testing.T, f *fixture) {
		job := f.job()
		s := f.attach(job)
		release := sync.OnceFunc(job.HoldMutex())
		t.Cleanup(release)
		f.callTime = time.Millisecond
		asked := 0
		f.sinceFailure = func() time.Duration {
			if asked++; asked == 3 {
				release()
			}
			return 0
		}
		f.must("suspend", s.Suspend(t.Context(), nil))
		if asked < 3 {
			t.Errorf("the reset was asked for %d times", asked)
		}
		f.callTime = callTime
		f.wantSuspended(job, 1)
		f.must("close", s.Close())
	})
}

func TestErrorsOfAHelperAreThoseOfTheMechanism(t *testing.T) {
	api := &gpreempt.Error{Code: gpreempt.CodeFailedPrecondition, Reason: gpreempt.ReasonGPUWithoutVM, Message: "no VM", Next: "open it"}
	for _, err := range []error{
		fmt.Errorf("process 1: %w", mechanism.ErrGone), fmt.Errorf("process 1: %w", mechanism.ErrReplaced),
		fmt.Errorf("process 1: %w", mechanism.ErrDebugged), &mechanism.HardwareError{GPUs: []gpreempt.GPUID{7, 8}, Err: errors.New("hung")},
		fmt.Errorf("process 1: %w", api), errors.New("another"),
	} {
		got := (&message{Err: newFailure(err)}).err()
		diff(t, "text", err.Error(), got.Error())
		for _, known := range []error{mechanism.ErrGone, mechanism.ErrReplaced, mechanism.ErrDebugged} {
			if errors.Is(got, known) != errors.Is(err, known) {
				t.Errorf("%q is %q: %v", got, known, errors.Is(got, known))
			}
		}
		want, _ := errors.AsType[*mechanism.HardwareError](err)
		hardware, _ := errors.AsType[*mechanism.HardwareError](got)
		if (want == nil) != (hardware == nil) || want != nil && fmt.Sprint(want.GPUs) != fmt.Sprint(hardware.GPUs) {
			t.Errorf("hardware error %v, want %v", hardware, want)
		}
		diff(t, "reason", gpreempt.ReasonOf(err), gpreempt.ReasonOf(got))
	}
	if err := (&message{Err: newFailure(nil)}).err(); err != nil {
		t.Errorf("no failure is %v", err)
	}
}

// Between the driver's notice and the scheduler a birth is handed over four times: by the driver's pipe
// and the event of the session in the helper, by one message to the daemon, and by the event of the
// daemon's session, whose owner calls Handle. Nobody asks the helper, which has suspended the queue by then.
func TestBirthInASuspendedProcessIsSuspendedByItsHelperAndReportedOnce(t *testing.T) {
	onEach(t, func(t *testing.T, f *fixture) {
		job := f.job()
		s := f.attach(job)
		f.must("suspend", s.Suspend(t.Context(), nil))
		f.heard()
		f.bear(job)
		testutil.Receive(t, s.Events(), "an event")
		f.wantSuspended(job, 2)
		r, err := s.Handle(t.Context())
		f.must("handle", err)
		diff(t, "report", mechanism.Report{Born: 1, Changed: true}, r)
		diff(t, "messages: each request would have a result", []kind{kindHandled}, f.heard())
		if queues, _ := f.Queues(job.Key()); len(queues) != 2 {
			t.Errorf("%d queues are listed, want 2", len(queues))
		}
		f.must("resume", s.Resume(t.Context()))
		f.wantSuspended(job, 0)
		f.must("close", s.Close())
	})
}

func TestDebuggerIsTakenForDeadAfterTwoMinutes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, target := &Mechanism{debugged: map[gpreempt.ProcessKey]time.Time{}}, gpreempt.ProcessKey{PID: 1, Start: 1}
		for range 2 {
			m.noteDebugged(target, true)
			time.Sleep(foreignTime)
		}
		diff(t, "debugged for", 2*foreignTime, m.debuggedFor(target))
		m.noteDebugged(target, false)
		diff(t, "debugged for, after its end", time.Duration(0), m.debuggedFor(target))
		m.noteDebugged(target, true)
		time.Sleep(time.Hour + 1)
		m.noteDebugged(gpreempt.ProcessKey{PID: 2, Start: 2}, true)
		if _, kept := m.debugged[target]; kept {
			t.Error("a target is remembered that nobody asks for")
		}
	})
}
