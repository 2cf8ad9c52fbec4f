package sim_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/gpreempt/gpreempt/lab/scenario"
	"github.com/gpreempt/gpreempt/lab/sim"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
	"github.com/gpreempt/gpreempt/pkg/scheduler/parking"
)

// crowd has 33 queues for the 24 slots of an MI300X: one of a service, 8 of jobs that always work,
// and 24 of six jobs with a step now and then, so many a second.
func crowd(steps float64) scenario.Scenario {
	s := scenario.Scenario{
		Name: "crowd", GPUs: 1, Duration: time.Minute,
		Online: []scenario.Service{{
			Name: "serve", Priority: 11, Arrivals: scenario.Arrivals{Kind: scenario.Poisson, Rate: 20},
			Request: scenario.Work{Kernels: 10, Mean: 200 * time.Microsecond},
		}},
		Offline: []scenario.Job{{Name: "train", Processes: 2, Queues: 4, Priority: 3, Step: scenario.Work{Kernels: 20, Mean: 2 * time.Millisecond, Occupancy: 0.3}}},
	}
	for n := range 6 {
		s.Offline = append(s.Offline, scenario.Job{
			Name: fmt.Sprint("notebook-", n), Queues: 4, Step: scenario.Work{Kernels: 5, Mean: time.Millisecond, Occupancy: 0.2},
			Arrivals: &scenario.Arrivals{Kind: scenario.Poisson, Rate: steps},
		})
	}
	return s
}

// TestHQDBudgetKeepsTheOnlineQueueMapped prints the simulated figures of docs/lab/simulator.md.
func TestHQDBudgetKeepsTheOnlineQueueMapped(t *testing.T) {
	for _, test := range []struct {
		name     string
		steps    float64
		slots    int
		budget   parking.Budget
		from, to float64
		// always is when the online queue is mapped from then on, in ms; 0 for never.
		always float64
	}{
		{"slots for all", 0.02, 40, parking.Budget{}, 1, 1, 0},
		{"no budget", 0.02, 24, parking.Budget{}, 0.70, 0.76, 0},
		{"budget 10/80/10", 0.02, 24, parking.Budget{Online: 10, Offline: 80, Spare: 10}, 0.98, 1, 2000},
		{"budget 10/80/10, five times the steps", 0.1, 24, parking.Budget{Online: 10, Offline: 80, Spare: 10}, 0.98, 1, 2000},
		{"no budget, five times the steps", 0.1, 24, parking.Budget{}, 0.6, 0.9, 0},
	} {
		o := sim.Options{Seed: 1, Costs: sim.DefaultCosts(), Slots: test.slots, HQDBudget: test.budget}
		r, err := sim.Run(crowd(test.steps), sim.Scheme{Kind: sim.GPreempt, Policy: scheduler.DefaultPolicy()}, o)
		if err != nil {
			t.Fatal(err)
		}
		f := sim.Measure(r)
		t.Logf("simulated, %s: the online queue has a slot %.1f %% of the time, always from %.1f s on; latency mean %.2f ms, p99 %.2f ms; %d suspends, %.2f GPU seconds of offline work",
			test.name, 100**r.OnlineMapped, r.UnmappedUntil/1000, f.Mean, f.P99, len(r.Suspends), r.Work)
		if *r.OnlineMapped < test.from || *r.OnlineMapped > test.to {
			t.Errorf("%s: mapped %.4f of the time, want %v to %v", test.name, *r.OnlineMapped, test.from, test.to)
		}
		if test.always > 0 && r.UnmappedUntil > test.always {
			t.Errorf("%s: the online queue is unmapped until %.0f ms, want always mapped from %.0f ms on", test.name, r.UnmappedUntil, test.always)
		}
	}
}

func TestSlotsThatCannotBeAreRefused(t *testing.T) {
	for _, o := range []sim.Options{
		{Slots: -1},
		{HQDBudget: parking.Budget{Online: 10, Offline: 80, Spare: 10}},
		{Slots: 24, HQDBudget: parking.Budget{Online: 10}},
	} {
		if _, err := sim.Run(crowd(0.02), sim.Scheme{Kind: sim.None}, o); err == nil {
			t.Errorf("%d slots and budget %+v are accepted", o.Slots, o.HQDBudget)
		}
	}
}
