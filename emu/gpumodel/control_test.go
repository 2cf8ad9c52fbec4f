package gpumodel

import (
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
	r.done(off, 4*ms+100*us+80*us+50*us)

	on := r.resume(victim)
	r.rest()
	back := 20*ms + 100*us + 50*us + 40*us
	r.done(on, back)
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
	r.done(off, 1*ms+100*us+60*us+50*us+20*us)
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
	r.done(off, 2*ms+3*30*us+40*us)
	r.AdvanceTo(20 * ms)
	r.ran(kernel, 1*ms, 11*ms)
	on := r.resume(victim)
	r.rest()
	r.done(on, 20*ms+3*20*us+20*us)
	// It ran until the second removal and again from the second addition.
	r.ran(held, 1*ms, 20*ms+2*20*us+20*us+9*ms-30*us)
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
	r.done(off, 1*ms+2*150*us)
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
	r.done(offA, 1*ms+150*us)
	r.done(offB, 1*ms+300*us)
	r.done(onA, 1*ms+450*us)
}

func TestNothingIsMappedWhenNothingIsLeft(t *testing.T) {
	r := newRig(t, hws(), 1)
	a := r.start("a", 1, 0)
	r.AdvanceTo(1 * ms)
	cycles := r.GPUCounters()[0].SchedulerCycles
	off := r.suspend(a)
	r.rest()
	r.done(off, 1*ms+100*us)
	again := r.suspend(a)
	r.done(again, 1*ms+100*us)
	on := r.resume(a)
	r.rest()
	r.done(on, 1*ms+150*us)
	if got := r.GPUCounters()[0].SchedulerCycles - cycles; got != 1 {
		t.Errorf("%d runlist cycles, want 1: mapping completes the cycle that unmapped everything", got)
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
	want := []QueueIndexes{{ID: 0, Read: 1, Write: 1}, {ID: 1, Read: 0, Write: 1}}
	if diff := cmp.Diff(want, r.Indexes(a)); diff != "" {
		t.Errorf("queues (-want +got):\n%s", diff)
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
			r.done(off, r.Now())
			late := r.kernel(a, born, ms, 0.5)
			r.AdvanceTo(2 * time.Second)
			if late.Calls != 0 {
				t.Error("the new queue runs on after the second suspend")
			}
		})
	}
}

func TestSuspendAtNoCostIsDoneWhenItReturns(t *testing.T) {
	for _, preset := range Presets() {
		t.Run(preset.Name, func(t *testing.T) {
			r := newRig(t, zeroCost(preset), 2)
			a := r.start("a", 3, 0, 1)
			kernel := r.kernel(a, 0, ms, 1)
			r.AdvanceTo(400 * us)
			off := r.suspend(a)
			r.done(off, 400*us)
			if _, ok := r.Next(); ok {
				t.Error("something is left to happen")
			}
			r.AdvanceTo(ms)
			on := r.resume(a)
			r.done(on, ms)
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
			near(t, "resume", on.At-1500*ms, spec.resumeTime(2, 2, 1))
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
	if d := spec.resumeTime(1, 4, 1); d < 315*us || d > 385*us {
		t.Errorf("resume = %v, want near 0.35 ms", d)
	}
}
