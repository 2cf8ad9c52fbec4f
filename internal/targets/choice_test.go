package targets

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// three returns three mechanisms, best first.
func three() (best, middle, last *machine) {
	return &machine{name: "best"}, &machine{name: "middle"}, &machine{name: "last"}
}

func TestBestUsableMechanismIsChosenAndTheOthersAreExplained(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		best, middle, last := three()
		middle.blocked = "fog"
		r := newRig(t, func(name string, _ gpreempt.ProcessKey) Assessment {
			return Assessment{Evidence: mechanism.Evidence{
				Check: "hazard table", Found: "row 7", OK: name != "best", Remedy: "update the firmware",
			}}
		}, best, middle, last)
		r.attach(job)
		want := Choice{
			Mechanism: "last", Why: "weather: fair",
			Rejected: []Rejection{
				{Mechanism: "best", Why: "hazard table: row 7", Remedy: "update the firmware"},
				{Mechanism: "middle", Why: "weather: fog", Remedy: "wait"},
			},
		}
		r.wantState(job, State{Choice: want})
		const line = "weather: fair; not best: hazard table: row 7 (update the firmware); middle: weather: fog (wait)"
		if got := want.String(); got != line {
			t.Errorf("in one line: %s\nwant %s", got, line)
		}
		if diff := cmp.Diff(want, r.Preview(t.Context(), job)); diff != "" {
			t.Errorf("preview (-want +got):\n%s", diff)
		}
		r.detachAll(job)
	})
}

func TestAttachThatFailsGoesToTheNextMechanism(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		best, middle, last := three()
		best.attachErr = errors.New("a debugger is there")
		r := newRig(t, nil, best, middle, last)
		r.attach(job)
		r.wantState(job, State{Choice: Choice{
			Mechanism: "middle", Why: "weather: fair",
			Rejected: []Rejection{{Mechanism: "best", Why: "a debugger is there"}},
		}})
		// Another attempt would disturb the debugger again.
		if got := r.Preview(t.Context(), job).Mechanism; got != "middle" {
			t.Errorf("right after: %s, want middle", got)
		}
		r.detachAll(job)
	})
}

func TestNoUsableMechanismIsAnErrorThatNamesEveryReason(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		best, middle, last := three()
		for _, m := range []*machine{best, middle, last} {
			m.blocked = "storm"
		}
		for _, tc := range []struct {
			r    *rig
			want string
		}{
			{newRig(t, nil, best, middle, last), "best: weather: storm (wait); middle: weather: storm (wait); last: weather: storm (wait)"},
			{newRig(t, nil), "no mechanism is enabled and usable: the config key mechanisms names those to use, gpctl status shows why they cannot be used"},
		} {
			tc.r.Attach(job)
			tc.r.want(scheduler.Attached{Target: job, Result: scheduler.CauseFailed})
			if err := mustState(t, tc.r, job).Err; err == nil || err.Error() != tc.want {
				t.Errorf("error %v, want %s", err, tc.want)
			}
		}
	})
}

func TestTargetThatLeftIsNoReasonToTryTheNextMechanism(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		best, middle, last := three()
		best.attachErr = mechanism.ErrGone
		r := newRig(t, nil, best, middle, last)
		r.Attach(job)
		r.want(scheduler.Attached{Target: job, Result: scheduler.CauseGone})
		middle.wantCalls(t)
	})
}

// at is when the history of a test begins.
var at = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// rejects reports whether h rejects best on target at now.
func rejects(h *history, now time.Duration, target gpreempt.ProcessKey) bool {
	return h.reject(now, "best", target, Assessment{Evidence: mechanism.Evidence{OK: true}}) != nil
}

func TestFailureKeepsAMechanismAwayForATimeThatDoublesUpToAnHour(t *testing.T) {
	h, broken := newHistory(at), errors.New("it did not stop")
	now := time.Duration(0)
	fail := func(wait time.Duration) {
		t.Helper()
		h.fail(now, "best", job, broken)
		if now += wait; !rejects(h, now-1, job) || rejects(h, now, job) || rejects(h, now-1, other) {
			t.Errorf("at %v it is not tried again after %v", now, wait)
		}
	}
	for wait := 10 * time.Second; wait < time.Hour; wait *= 2 {
		fail(wait)
	}
	for range 80 {
		fail(time.Hour)
	}
	now += time.Hour + 1 // it has done well since
	fail(10 * time.Second)
	want := &Rejection{Mechanism: "best", Why: "it failed on this target and is not tried again before 2026-01-02T03:04:15Z: it did not stop"}
	h = newHistory(at)
	h.fail(0, "best", job, broken)
	if diff := cmp.Diff(want, h.reject(time.Second, "best", job, Assessment{Evidence: mechanism.Evidence{OK: true}})); diff != "" {
		t.Errorf("rejection (-want +got):\n%s", diff)
	}
	h.forget(job)
	if rejects(h, time.Second, job) {
		t.Error("the failure of a process that has left is remembered")
	}
}

func TestWaitDoesNotGrowWhileADebuggerOrACallIsThere(t *testing.T) {
	for _, err := range []error{mechanism.ErrDebugged, mechanism.ErrWaiting} {
		h, now := newHistory(at), time.Duration(0)
		for range 80 {
			h.fail(now, "best", job, fmt.Errorf("process 100: %w", err))
			if now += 10 * time.Second; !rejects(h, now-1, job) || rejects(h, now, job) {
				t.Fatalf("%v: at %v it is not tried again after 10 s", err, now)
			}
		}
	}
}

func TestNewProgramHasFailedNothing(t *testing.T) {
	h := newHistory(at)
	h.fail(0, "best", job, mechanism.ErrReplaced)
	if rejects(h, 0, job) {
		t.Error("the mechanism is kept away")
	}
}

// A resume is tried again until it works.
func TestActionThatFailsAgainAndAgainIsOneFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		best, middle, last := three()
		r := newRig(t, nil, best, middle, last)
		r.attach(job)
		act := func(err error, action func(gpreempt.ProcessKey, uint64)) {
			t.Helper()
			best.set(func(m *machine) { m.actionErr = err })
			action(job, 1)
			synctest.Wait()
		}
		broken := errors.New("it does not go on")
		act(nil, r.Suspend)
		for range 5 {
			act(broken, r.Resume)
		}
		act(nil, r.Resume)
		act(broken, r.Suspend)
		time.Sleep(20*time.Second - 1) // of the second failure
		if got := r.Preview(t.Context(), job).Mechanism; got != "middle" {
			t.Errorf("after two failures: %s, want middle", got)
		}
		time.Sleep(time.Nanosecond)
		if got := r.Preview(t.Context(), job).Mechanism; got != "best" {
			t.Errorf("after the time of two failures: %s, want best", got)
		}
		best.set(func(m *machine) { m.actionErr = nil })
		r.detachAll(job)
	})
}

func TestTargetThatLeavesIsNoFailureOfItsMechanism(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		best, middle, last := three()
		r := newRig(t, nil, best, middle, last)
		r.attach(job)
		best.set(func(m *machine) { m.actionErr = mechanism.ErrGone })
		r.Suspend(job, 1)
		synctest.Wait()
		if len(r.history.failures) != 0 {
			t.Errorf("failures: %v", r.history.failures)
		}
		r.detachAll(job)
	})
}

func TestLimitedMechanismIsAttachedToOneTargetPerGPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		best, middle, last := three()
		r := newRig(t, func(name string, _ gpreempt.ProcessKey) Assessment {
			a := Assessment{Evidence: mechanism.Evidence{OK: true}}
			if name == "best" {
				a.Limited = []gpreempt.GPUID{1, 2}
			}
			return a
		}, best, middle, last)
		r.attach(other)
		r.attach(job)
		r.wantState(job, State{Choice: Choice{
			Mechanism: "middle", Why: "weather: fair",
			Rejected: []Rejection{{
				Mechanism: "best", Why: "on GPU 1 it can be attached to one process at a time, and is attached to process 200",
				Remedy: "another mechanism in the config key mechanisms can be used: criu, freezer",
			}},
		}})
		r.Detach(other)
		r.Detach(job)
		r.forgetPosted()
		r.attach(job)
		r.wantState(job, State{Choice: Choice{Mechanism: "best", Why: "weather: fair"}})
		r.detachAll(job)
	})
}

// cycle suspends and resumes a target.
func (r *rig) cycle() {
	r.t.Helper()
	r.Suspend(job, 1)
	synctest.Wait()
	r.Resume(job, 2)
	r.forgetPosted()
}

func TestBetterMechanismReplacesTheOneOfARunningTarget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		best, middle, last := three()
		best.blocked, best.watched = "fog", true
		r := newRig(t, nil, best, middle, last)
		r.attach(job)
		best.set(func(m *machine) { m.blocked = "" })
		r.cycle()
		best.wantCalls(t) // too early
		time.Sleep(scheduler.SearchInterval)
		r.Suspend(job, 1)
		synctest.Wait()
		r.forgetPosted()
		r.Resume(job, 2)
		r.want(scheduler.Resumed{Target: job, Seq: 2}, scheduler.Attached{Target: job, ReportsBirths: true})
		r.wantState(job, State{Choice: Choice{Mechanism: "best", Why: "weather: fair"}})
		if open, _ := middle.state(); open != 0 {
			t.Error("the other mechanism is still attached")
		}
		r.cycle()
		best.wantCalls(t, "attach", "suspend", "resume")
		r.detachAll(job)
	})
}

func TestSuspendedTargetKeepsItsMechanism(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		best, middle, last := three()
		best.blocked = "fog"
		r := newRig(t, nil, best, middle, last)
		r.attach(job)
		time.Sleep(scheduler.SearchInterval)
		gate := make(chan struct{})
		best.set(func(m *machine) { m.blocked, m.gate = "", gate })
		r.cycle()
		r.Suspend(job, 3)
		synctest.Wait()
		close(gate)
		synctest.Wait()
		r.Suspend(job, 4) // for a new queue, say
		synctest.Wait()
		if open, suspended := middle.state(); open != 1 || !suspended {
			t.Error("the target ran for a moment: its mechanism was replaced while it was suspended")
		}
		r.Resume(job, 5)
		synctest.Wait()
		if open, _ := middle.state(); open != 0 {
			t.Error("the mechanism was not replaced after the resume")
		}
		if open, _ := best.state(); open != 1 {
			t.Error("the better mechanism was not attached")
		}
		r.detachAll(job)
	})
}

func TestWhatIsFoundAfterADetachIsNotAttached(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		best, middle, last := three()
		best.blocked = "fog"
		r := newRig(t, nil, best, middle, last)
		r.attach(job)
		time.Sleep(scheduler.SearchInterval)
		gate := make(chan struct{})
		best.set(func(m *machine) { m.blocked, m.gate = "", gate })
		r.cycle()
		r.Detach(job)
		r.want(scheduler.Detached{Target: job})
		close(gate)
		synctest.Wait()
		best.wantCalls(t)
		r.detachAll()
	})
}

func TestTargetWhoseMechanismCannotBeReplacedKeepsIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		best, middle, last := three()
		best.blocked = "fog"
		r := newRig(t, nil, best, middle, last)
		r.attach(job)
		best.set(func(m *machine) { m.blocked, m.attachErr = "", errors.New("it cannot attach") })
		time.Sleep(scheduler.SearchInterval)
		r.cycle()
		middle.wantCalls(t, "attach", "suspend", "resume", "close", "attach")
		middle.set(func(m *machine) { m.blocked = "fog" })
		last.set(func(m *machine) { m.blocked = "fog" })
		best.set(func(m *machine) { m.attachErr = errors.New("again") })
		time.Sleep(time.Hour)
		r.Suspend(job, 1)
		synctest.Wait()
		r.forgetPosted()
		r.Resume(job, 2)
		r.want(scheduler.Resumed{Target: job, Seq: 2}, scheduler.Lost{Target: job, Result: scheduler.CauseFailed})
		r.detachAll(job)
	})
}
