package gpumodel

import (
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestPreemptedKernelKeepsItsPlace(t *testing.T) {
	r := newRig(t, hws(), 1)
	victim := r.start("victim", 1, 0)
	r.start("other", 1, 0)
	r.AdvanceTo(1 * ms)
	kernel := r.kernel(victim, 0, 10*ms, 1)
	next := r.kernel(victim, 0, 2*ms, 1)

	r.AdvanceTo(4 * ms)
	off := r.suspend(victim)
	r.AdvanceTo(20 * ms)
	r.got(off, 4*ms+100*us+80*us+50*us, ResultOK)

	on := r.resume(victim)
	r.rest()
	back := 20*ms + 100*us + 50*us + 40*us
	r.got(on, back, ResultOK)
	r.ran(kernel, 1*ms, back+7*ms)
	r.ran(next, back+7*ms, back+9*ms)
}

func TestSuspendTakesTimeInProportionToWhatIsResident(t *testing.T) {
	r := newRig(t, hws(), 1)
	victim := r.start("victim", 1, 0)
	other := r.start("other", 1, 0)
	r.AdvanceTo(1 * ms)
	r.kernel(victim, 0, 10*ms, 0.25)
	r.kernel(other, 0, 10*ms, 0.5)
	// Both are saved, the other is restored.
	off := r.suspend(victim)
	r.AdvanceTo(5 * ms)
	r.got(off, 1*ms+100*us+60*us+50*us+20*us, ResultOK)
}

func TestOnHWSEverybodyOnTheGPUWaitsForTheCycle(t *testing.T) {
	r := newRig(t, hws(), 2)
	victim := r.start("victim", 2, 0)
	busy := r.start("busy", 1, 0)
	r.start("idle", 1, 0)
	elsewhere := r.start("elsewhere", 1, 1)
	r.AdvanceTo(1 * ms)
	r.kernel(victim, 0, 100*ms, 0.5)
	kernel := r.kernel(busy, 0, 10*ms, 0.5)
	away := r.kernel(elsewhere, 0, 10*ms, 0.5)
	r.AdvanceTo(2 * ms)
	r.suspend(victim)
	r.AdvanceTo(50 * ms)
	r.ran(kernel, 1*ms, 11*ms+100*us+80*us+50*us+20*us)
	r.ran(away, 1*ms, 11*ms)
	got := map[string]uint64{}
	for _, c := range r.Counters() {
		got[c.Comm] = c.CollateralCycles
	}
	if diff := cmp.Diff(map[string]uint64{"victim": 0, "busy": 1, "idle": 0, "elsewhere": 0}, got); diff != "" {
		t.Errorf("collateral cycles (-want +got):\n%s", diff)
	}
}

func TestOnMESOthersRunOnAndQueuesGoOneByOne(t *testing.T) {
	r := newRig(t, mes(), 1)
	victim := r.start("victim", 3, 0)
	other := r.start("other", 1, 0)
	r.AdvanceTo(1 * ms)
	cycles := r.GPUCounters()[0].SchedulerCycles
	held := r.kernel(victim, 1, 10*ms, 0.5)
	kernel := r.kernel(other, 0, 10*ms, 0.5)
	r.AdvanceTo(2 * ms)
	off := r.suspend(victim)
	r.AdvanceTo(5 * ms)
	r.got(off, 2*ms+3*30*us+40*us, ResultOK, ResultOK, ResultOK)
	r.AdvanceTo(20 * ms)
	r.ran(kernel, 1*ms, 11*ms)
	on := r.resume(victim)
	r.rest()
	r.got(on, 20*ms+3*20*us+20*us, ResultOK, ResultOK, ResultOK)
	// It ran until the second removal and again from the second addition.
	r.ran(held, 1*ms, 20*ms+2*20*us+20*us+9*ms-30*us)
	if got := r.counters(other).CollateralCycles; got != 0 {
		t.Errorf("%d collateral cycles, want 0", got)
	}
	if got := r.GPUCounters()[0].SchedulerCycles - cycles; got != 6 {
		t.Errorf("%d removals and additions, want 6", got)
	}
}

func TestGPUsOfAProcessAreHandledOneAfterTheOther(t *testing.T) {
	r := newRig(t, hws(), 3)
	victim := r.start("victim", 2, 0, 2)
	r.start("other", 1, 0, 1, 2)
	r.AdvanceTo(1 * ms)
	off := r.suspend(victim)
	r.rest()
	r.got(off, 1*ms+2*150*us, ResultOK, ResultOK, ResultOK, ResultOK)
}

func TestSuspendsOnOneGPUAreSerialised(t *testing.T) {
	r := newRig(t, hws(), 1)
	a, b := r.start("a", 1, 0), r.start("b", 1, 0)
	r.start("other", 1, 0)
	r.AdvanceTo(1 * ms)
	offA := r.suspend(a)
	offB := r.suspend(b)
	onA := r.resume(a)
	r.rest()
	r.got(offA, 1*ms+150*us, ResultOK)
	r.got(offB, 1*ms+300*us, ResultOK)
	r.got(onA, 1*ms+450*us, ResultOK)
}

func TestNothingIsMappedWhenNothingIsLeft(t *testing.T) {
	r := newRig(t, hws(), 1)
	a := r.start("a", 1, 0)
	r.AdvanceTo(1 * ms)
	cycles := r.GPUCounters()[0].SchedulerCycles
	off := r.suspend(a)
	r.rest()
	r.got(off, 1*ms+100*us, ResultOK)
	again := r.suspend(a)
	r.got(again, 1*ms+100*us, ResultOK)
	on := r.resume(a)
	r.rest()
	r.got(on, 1*ms+150*us, ResultOK)
	if got := r.GPUCounters()[0].SchedulerCycles - cycles; got != 2 {
		t.Errorf("%d runlist cycles, want 2", got)
	}
}

func TestSuspendedQueueTakesPacketsAndDoesNothing(t *testing.T) {
	r := newRig(t, hws(), 1)
	a := r.start("a", 2, 0)
	r.AdvanceTo(1 * ms)
	r.suspend(a, 1)
	r.rest()
	frozen := r.kernel(a, 1, ms, 0.5)
	r.AdvanceTo(10 * ms)
	runs := r.kernel(a, 0, ms, 0.5)
	r.AdvanceTo(time.Minute)
	r.ran(runs, 10*ms, 11*ms)
	want := Backlog{Packets: 1, Queues: []QueueIndexes{{ID: 0, Read: 1, Write: 1}, {ID: 1, Read: 0, Write: 1}}}
	b, err := r.Backlog(a)
	r.ok(err)
	if diff := cmp.Diff(want, b); diff != "" {
		t.Errorf("backlog (-want +got):\n%s", diff)
	}
	r.resume(a)
	r.rest()
	r.ran(frozen, time.Minute+150*us, time.Minute+1150*us)
}

func TestQueueBornWhileSuspendedRuns(t *testing.T) {
	for _, spec := range []Spec{hws(), mes()} {
		t.Run(spec.Name, func(t *testing.T) {
			r := newRig(t, spec, 1)
			a := r.start("a", 1, 0)
			r.suspend(a)
			r.rest()
			frozen := r.kernel(a, 0, ms, 0.5)
			born := r.queue(a, 0, gpreempt.QueueCompute)
			runs := r.kernel(a, born, ms, 0.5)
			r.AdvanceTo(time.Second)
			if frozen.Calls != 0 || runs.Calls != 1 {
				t.Errorf("the old queue ran %d packets, the new one %d; want 0 and 1", frozen.Calls, runs.Calls)
			}
			// A second suspend takes in the new queue as well.
			off := r.suspend(a)
			r.rest()
			r.got(off, r.Now(), ResultOK, ResultOK)
			late := r.kernel(a, born, ms, 0.5)
			r.AdvanceTo(2 * time.Second)
			if late.Calls != 0 {
				t.Error("the new queue runs on after the second suspend")
			}
		})
	}
}

func TestUnknownAndDoubleIDsAreGone(t *testing.T) {
	r := newRig(t, hws(), 1)
	a := r.start("a", 2, 0)
	off := r.suspend(a, 1, 7, 1)
	r.rest()
	want := []QueueResult{{ID: 1, GPU: r.facts[0].ID}, {ID: 7, Result: ResultGone}, {ID: 1, Result: ResultGone}}
	if diff := cmp.Diff(want, off.Results); diff != "" {
		t.Errorf("results (-want +got):\n%s", diff)
	}
}

func TestProcessThatEndsInTheMiddleOfASuspendIsGone(t *testing.T) {
	for _, spec := range []Spec{hws(), mes()} {
		t.Run(spec.Name, func(t *testing.T) {
			r := newRig(t, spec, 2)
			a := r.start("a", 1, 0, 1)
			other := r.start("other", 1, 0, 1)
			r.AdvanceTo(1 * ms)
			off := r.suspend(a)
			later := r.resume(a)
			r.AdvanceTo(1*ms + 10*us)
			r.ok(r.EndProcess(a))
			r.rest()
			for _, o := range []*outcome{off, later} {
				for _, q := range o.Results {
					if q.Result != ResultGone {
						t.Errorf("results = %+v, want all gone", o.Results)
					}
				}
				if o.At == 0 {
					t.Error("a request was never answered")
				}
			}
			if err := r.Suspend(a, nil, nil); !errors.Is(err, ErrNoProcess) {
				t.Errorf("Suspend = %v, want ErrNoProcess", err)
			}
			r.AdvanceTo(5 * ms)
			r.ran(r.kernelAndRest(other, ms), 5*ms, 6*ms)
		})
	}
}

func TestDestroyOfASuspendedQueueWaitsForTheResume(t *testing.T) {
	r := newRig(t, hws(), 1)
	a := r.start("a", 2, 0)
	r.suspend(a)
	r.rest()
	r.ok(r.DestroyQueue(a, 0))
	b, err := r.Backlog(a)
	r.ok(err)
	if len(b.Queues) != 2 {
		t.Errorf("queues = %+v, want both", b.Queues)
	}
	off := r.suspend(a)
	r.rest()
	r.got(off, r.Now(), ResultGone, ResultOK)
	on := r.resume(a)
	r.rest()
	r.got(on, r.Now(), ResultGone, ResultOK)
	b, err = r.Backlog(a)
	r.ok(err)
	if diff := cmp.Diff([]QueueIndexes{{ID: 1}}, b.Queues); diff != "" {
		t.Errorf("queues (-want +got):\n%s", diff)
	}
}

func TestSuspendAtNoCostIsDoneWhenItReturns(t *testing.T) {
	for _, preset := range Presets() {
		t.Run(preset.Name, func(t *testing.T) {
			r := newRig(t, ZeroCost(preset), 2)
			a := r.start("a", 3, 0, 1)
			kernel := r.kernel(a, 0, ms, 1)
			r.AdvanceTo(400 * us)
			off := r.suspend(a)
			r.got(off, 400*us, make([]Result, 6)...)
			if _, ok := r.Next(); ok {
				t.Error("something is left to happen")
			}
			r.AdvanceTo(ms)
			on := r.resume(a)
			r.got(on, ms, make([]Result, 6)...)
			r.rest()
			r.ran(kernel, 0, 1600*us)
		})
	}
}

func TestEveryPresetSuspendsInTheTimeItSays(t *testing.T) {
	for _, spec := range Presets() {
		t.Run(spec.Name, func(t *testing.T) {
			spec.Costs.Jitter = 0
			r := newRig(t, spec, 2)
			victim := r.start("victim", 2, 0, 1)
			r.start("other", 1, 0, 1)
			r.AdvanceTo(time.Second)
			for q := range uint32(4) {
				r.kernel(victim, q, time.Second, 0.5)
			}
			off := r.suspend(victim)
			r.AdvanceTo(1500 * ms)
			near(t, "suspend", off.At-time.Second, spec.SuspendTime(2, 2, 1))
			on := r.resume(victim)
			r.AdvanceTo(2 * time.Second)
			near(t, "resume", on.At-1500*ms, spec.ResumeTime(2, 2, 1))
		})
	}
}

// near allows for the rounding of the parts of a sum.
func near(t *testing.T, what string, got, want time.Duration) {
	t.Helper()
	if d := got - want; d < -10 || d > 10 {
		t.Errorf("%s took %v, want %v", what, got, want)
	}
}

func TestModelledTimesOfAFullMI300X(t *testing.T) {
	spec, err := PresetByName("mi300x")
	if err != nil {
		t.Fatal(err)
	}
	if d := spec.SuspendTime(1, 4, 1); d < 360*us || d > 440*us {
		t.Errorf("suspend = %v, want near 0.4 ms", d)
	}
	if d := spec.ResumeTime(1, 4, 1); d < 315*us || d > 385*us {
		t.Errorf("resume = %v, want near 0.35 ms", d)
	}
}
