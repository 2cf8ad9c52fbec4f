package targets

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

func TestActionsRunInOrderAndAreTimed(t *testing.T) {
	for _, watched := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			m := &machine{name: "fake", cost: 400 * time.Microsecond, watched: watched}
			r := newRig(t, nil, m)
			r.Attach(job)
			r.want(scheduler.Attached{Target: job, ReportsBirths: watched})
			r.Suspend(job, 1)
			time.Sleep(time.Millisecond)
			r.Resume(job, 2)
			time.Sleep(time.Millisecond)
			r.want(
				scheduler.Suspended{Target: job, Seq: 1, Took: m.cost},
				scheduler.Resumed{Target: job, Seq: 2, Took: m.cost},
			)
			r.Detach(job)
			r.want(scheduler.Detached{Target: job})
			m.wantCalls(t, "attach", "suspend", "resume", "close")
			r.detachAll()
		})
	}
}

func TestFailuresHaveAKind(t *testing.T) {
	hardware := &mechanism.HardwareError{GPUs: []gpreempt.GPUID{7}, Err: errors.New("unmap timed out")}
	for name, tc := range map[string]struct {
		fail   error
		panics bool
		want   scheduler.Cause
		gpus   []gpreempt.GPUID
	}{
		"gone":     {fail: mechanism.ErrGone, want: scheduler.CauseGone},
		"replaced": {fail: mechanism.ErrReplaced, want: scheduler.CauseReplaced},
		"debugged": {fail: mechanism.ErrDebugged, want: gpreempt.ReasonResisted},
		"resumed":  {fail: fmt.Errorf("%w 4 times", mechanism.ErrResumed), want: gpreempt.ReasonResisted},
		"traced":   {fail: &NotSuspendable{[]Rejection{{Mechanism: "fake", Reason: gpreempt.ReasonResisted}}}, want: gpreempt.ReasonResisted},
		"hardware": {fail: errors.Join(hardware, errors.New("resume failed too")), want: scheduler.CauseHardware, gpus: []gpreempt.GPUID{7}},
		"DRM":      {fail: &NotSuspendable{[]Rejection{{Mechanism: "fake", Reason: gpreempt.ReasonDRMQueues}}}, want: gpreempt.ReasonDRMQueues},
		"other":    {fail: errors.New("partial"), want: scheduler.CauseFailed},
		"panic":    {panics: true, want: scheduler.CauseFailed},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := &machine{name: "fake", watched: name != "other"}
				r := newRig(t, nil, m)
				r.attach(job)
				m.set(func(m *machine) { m.actionErr, m.panics = tc.fail, tc.panics })
				r.Suspend(job, 1)
				r.want(scheduler.Suspended{Target: job, Seq: 1, Result: tc.want, FailedGPUs: tc.gpus})
				r.Resume(job, 2)
				r.want(scheduler.Resumed{Target: job, Seq: 2, Result: tc.want, FailedGPUs: tc.gpus})
				m.set(func(m *machine) { m.panics = false })
				r.detachAll(job)
			})
		})
	}
}

// A tracer that an admin permits is no resistance, and what else fails is what it was.
func TestPermittedTracerIsAFailure(t *testing.T) {
	s := &Sessions{cfg: Config{Permitted: func(key gpreempt.ProcessKey) bool { return key == job }}}
	other := gpreempt.ProcessKey{PID: 5, Start: 5}
	var got []scheduler.Cause
	for _, err := range []error{mechanism.ErrDebugged, mechanism.ErrGone, nil} {
		for _, key := range []gpreempt.ProcessKey{job, other} {
			result, _ := s.result(key, err)
			got = append(got, result)
		}
	}
	want := []scheduler.Cause{scheduler.CauseFailed, gpreempt.ReasonResisted, scheduler.CauseGone, scheduler.CauseGone, "", ""}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("outcomes (-want +got):\n%s", diff)
	}
}

// The mechanism stop is used where a rule says so, in place of the freezer, or where an admin names it.
func TestStopIsUsedOnlyWhereARuleOrAnAdminSaysSo(t *testing.T) {
	for decision, want := range map[classify.Decision][]string{
		{}: {"dbgtrap", "freezer"},
		{OnResist: gpreempt.Resistance{Stop: true}}:                   {"dbgtrap", "stop"},
		{OnResist: gpreempt.Resistance{KillAfter: 3}}:                 {"dbgtrap", "freezer"},
		{Mechanism: "stop"}:                                           {"stop"},
		{Mechanism: "freezer"}:                                        {"freezer"},
		{NeverDebug: true, OnResist: gpreempt.Resistance{Stop: true}}: {"stop"},
	} {
		var got []string
		for _, name := range []string{"dbgtrap", "freezer", "stop"} {
			if Obstacle(name, discovery.Proc{}, decision) == nil {
				got = append(got, name)
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%+v (-want +got):\n%s", decision, diff)
		}
	}
}

func TestAttachThatFailsIsReportedAndLeavesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &machine{name: "fake", attachErr: mechanism.ErrGone}
		r := newRig(t, nil, m)
		r.Attach(job)
		r.want(scheduler.Attached{Target: job, Result: scheduler.CauseGone})
		r.wantState(job, State{})
		m.set(func(m *machine) { m.attachErr = errors.New("no permission") })
		r.Attach(job)
		r.want(scheduler.Attached{Target: job, Result: scheduler.CauseFailed})
		r.wantState(job, State{Choice: Choice{Rejected: []Rejection{{Mechanism: "fake", Why: "no permission"}}}, Err: mustState(t, r, job).Err})
		r.Suspend(job, 1) // nothing is attached
		r.want(scheduler.Suspended{Target: job, Seq: 1, Result: scheduler.CauseFailed})
		r.Resume(job, 2)
		r.want(scheduler.Resumed{Target: job, Seq: 2})
		r.Detach(job)
		r.want(scheduler.Detached{Target: job})
		r.detachAll()
	})
}

func mustState(t *testing.T, r *rig, target gpreempt.ProcessKey) State {
	t.Helper()
	st, known := r.State(target)
	if !known {
		t.Fatalf("nothing is known of %v", target)
	}
	return st
}

// What is attached and cannot be used is detached like anything else, by the scheduler.
func TestSessionThatCanOnlyBeClosedIsLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broken := errors.New("the runtime failed, and the target could not be released")
		m := &machine{name: "fake", stuckErr: broken, closeErrs: 1}
		r := newRig(t, nil, m)
		r.Attach(job)
		r.want(scheduler.Attached{Target: job}, scheduler.Lost{Target: job, Result: scheduler.CauseFailed})
		r.wantState(job, State{Err: broken})
		r.Detach(job)
		r.want(scheduler.Detached{Target: job, Result: scheduler.CauseFailed})
		r.Detach(job)
		r.want(scheduler.Detached{Target: job})
		r.detachAll()
	})
}

func TestDetachFollowsTheActionInFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &machine{name: "fake", cost: time.Millisecond}
		r := newRig(t, nil, m)
		r.attach(job)
		r.Suspend(job, 1)
		r.Detach(job) // it has left
		time.Sleep(2 * time.Millisecond)
		r.want(scheduler.Suspended{Target: job, Seq: 1, Took: m.cost}, scheduler.Detached{Target: job})
		m.wantCalls(t, "attach", "suspend", "close")
		r.detachAll()
	})
}

func TestCallThatHangsHoldsUpItsTargetOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &machine{name: "fake", cost: 9 * time.Second}
		r := newRig(t, nil, m)
		r.attach(job)
		r.attach(other)
		r.Suspend(job, 1)
		synctest.Wait()
		r.Detach(other)
		r.want(scheduler.Detached{Target: other})
		time.Sleep(10 * time.Second)
		r.forgetPosted()
		r.detachAll(job)
	})
}

// inspected is a machine that knows what its calls wait for.
type inspected struct{ *machine }

func (i inspected) WaitsForTarget(target gpreempt.ProcessKey) bool { return target == job }

func TestCallThatDoesNotReturnIsInspectedMeanwhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		knowing, other := &machine{name: "knowing", cost: 9 * time.Second}, &machine{name: "other"}
		r := newRig(t, nil, other, knowing)
		r.cfg.Mechanisms = []mechanism.Mechanism{other, inspected{knowing}}
		other.blocked = "fog"
		r.attach(job)
		r.Suspend(job, 1)
		r.Inspect(job, 2)
		synctest.Wait()
		r.want(scheduler.Inspected{Target: job, Seq: 2, Stuck: true})
		r.Inspect(gpreempt.ProcessKey{PID: 300, Start: 3}, 3)
		synctest.Wait()
		r.want(scheduler.Inspected{Target: gpreempt.ProcessKey{PID: 300, Start: 3}, Seq: 3})
		time.Sleep(10 * time.Second)
		r.forgetPosted()
		r.detachAll(job)
	})
}

func TestCloseGivesUpAndNothingStaysSuspended(t *testing.T) {
	for _, watched := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			m := &machine{name: "fake", cost: 9 * time.Second, watched: watched}
			r := newRig(t, nil, m)
			r.attach(job)
			r.Suspend(job, 1)
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			defer cancel()
			begin := time.Now()
			if err := r.Close(ctx); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("Close returns %v, want the deadline", err)
			}
			if waited := time.Since(begin); waited != 5*time.Second {
				t.Errorf("Close waited %v, want 5s", waited)
			}
			r.Attach(other) // nothing attaches any more
			time.Sleep(10 * time.Second)
			synctest.Wait()
			if open, suspended := m.state(); open != 0 || suspended {
				t.Errorf("%d sessions are open, suspended %v", open, suspended)
			}
			m.wantCalls(t, "attach", "suspend", "close")
		})
	}
}

func TestCloseGivesUpOnATargetThatCannotBeReleased(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &machine{name: "fake", closeErrs: -1}
		r := newRig(t, nil, m)
		r.attach(job)
		r.Detach(job)
		r.want(scheduler.Detached{Target: job, Result: scheduler.CauseFailed})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := r.Close(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Close returns %v", err)
		}
	})
}

func TestASuspendedTargetThatRunsGoesToTheSchedulerWithItsCauseAndToDiscovery(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &machine{name: "fake", watched: true}
		r := newRig(t, nil, m)
		r.attach(job)
		event := func(running mechanism.Running, err error) {
			t.Helper()
			m.set(func(m *machine) {
				m.handled = func() (mechanism.Report, error) { return mechanism.Report{Running: running, Changed: true}, err }
			})
			m.events <- struct{}{}
			synctest.Wait()
		}
		event(mechanism.NotRunning, nil)
		r.want()
		for running, cause := range map[mechanism.Running]scheduler.Cause{
			mechanism.NewQueue: scheduler.CauseNewQueue, mechanism.ResumedByAnother: scheduler.CauseResumedByAnother, mechanism.Lapsed: scheduler.CauseLapsed,
		} {
			event(running, nil)
			r.want(scheduler.Running{Target: job, Cause: cause})
		}
		m.set(func(m *machine) {
			m.handled = func() (mechanism.Report, error) { return mechanism.Report{Born: 3}, nil }
		})
		m.events <- struct{}{}
		synctest.Wait()
		r.want(scheduler.Running{Target: job, Cause: scheduler.CauseNewQueue, Suspended: 3})
		if len(r.looked) != 4 || r.looked[0] != job {
			t.Errorf("looked at %v", r.looked)
		}
		event(mechanism.NotRunning, mechanism.ErrGone) // discovery finds that
		r.want()
		broken := &mechanism.HardwareError{GPUs: []gpreempt.GPUID{7}, Err: errors.New("hung")}
		event(mechanism.NotRunning, broken)
		r.want(scheduler.Lost{Target: job, Result: scheduler.CauseHardware, FailedGPUs: []gpreempt.GPUID{7}})
		r.wantState(job, State{Err: broken})
		r.detachAll(job)
	})
}

func TestTargetThatCausesEventsAllTheTimeIsSuspendedAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &machine{name: "fake", watched: true}
		r := newRig(t, nil, m)
		r.attach(job)
		handled := 0
		m.set(func(m *machine) {
			m.handled = func() (mechanism.Report, error) {
				if handled++; handled%10 == 0 {
					r.Suspend(job, uint64(handled))
				}
				if handled < 200 {
					m.events <- struct{}{}
				}
				m.calls = append(m.calls, "handle")
				return mechanism.Report{}, nil
			}
		})
		m.events <- struct{}{}
		synctest.Wait()
		m.set(func(m *machine) {
			for n, call := range m.calls[1:] {
				if want := map[bool]string{true: "suspend", false: "handle"}[n%11 == 10]; call != want {
					t.Fatalf("call %d is %s, want %s", n, call, want)
				}
			}
		})
		r.detachAll(job)
	})
}

func TestMechanismWithAnObstacleIsInvalidated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out atomic.Value // the mechanism that is ruled out
		out.Store("")
		obstacle := func(name string) *mechanism.Evidence {
			if name == out.Load() {
				return &mechanism.Evidence{Check: "rule", Found: "it says so", Reason: "R", Remedy: "change it"}
			}
			return nil
		}
		assess := func(name string, _ gpreempt.ProcessKey) Assessment {
			if e := obstacle(name); e != nil {
				return Assessment{Evidence: *e}
			}
			return Assessment{Evidence: mechanism.Evidence{OK: true}}
		}
		best := &machine{name: "best", gate: make(chan struct{})}
		r := newRig(t, assess, best, &machine{name: "last"})
		lost := scheduler.Lost{Target: job, Result: scheduler.CauseFailed}

		r.Attach(job)
		synctest.Wait()
		out.Store("best") // while it is being attached
		close(best.gate)
		r.want(scheduler.Attached{Target: job}, lost)
		r.Detach(job)
		r.want(scheduler.Detached{Target: job})

		r.attach(job)
		r.wantState(job, State{Choice: Choice{Mechanism: "last", Why: "weather: fair", Rejected: []Rejection{
			{Mechanism: "best", Reason: "R", Why: "rule: it says so", Remedy: "change it"},
		}}})
		r.Invalidate(job, obstacle)
		r.want()
		out.Store("last")
		r.Invalidate(job, obstacle)
		r.want(lost)
		r.detachAll(job)
	})
}

func TestWhatHasLeftIsForgottenOnceItIsDetached(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &machine{name: "fake", closeErrs: 1}
		r := newRig(t, nil, m)
		r.attach(job)
		r.Forget(job)
		r.Detach(job)
		synctest.Wait()
		if _, known := r.State(job); !known {
			t.Error("forgotten while it is attached")
		}
		r.Detach(job)
		synctest.Wait()
		if _, known := r.State(job); known {
			t.Error("a process that left is still known")
		}
		m.set(func(m *machine) { m.attachErr = errors.New("no") })
		r.attach(other)
		r.Forget(other)
		if len(r.states) != 0 || len(r.history.failures) != 0 {
			t.Errorf("%d states and %d failures are kept", len(r.states), len(r.history.failures))
		}
		r.detachAll()
	})
}
