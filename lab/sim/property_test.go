package sim_test

import (
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/gpreempt/gpreempt/lab/evidence"
	"github.com/gpreempt/gpreempt/lab/scenario"
	"github.com/gpreempt/gpreempt/lab/sim"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// drawScenario is any small scenario.
func drawScenario(t *rapid.T) scenario.Scenario {
	s := scenario.Scenario{Name: "drawn", GPUs: rapid.IntRange(1, 3).Draw(t, "gpus"), Duration: time.Duration(rapid.IntRange(100, 1500).Draw(t, "ms")) * millisecond}
	gpus := func() []int {
		first := rapid.IntRange(0, s.GPUs-1).Draw(t, "first gpu")
		var list []int
		for g := first; g <= rapid.IntRange(first, s.GPUs-1).Draw(t, "last gpu"); g++ {
			list = append(list, g)
		}
		return list
	}
	work := func() scenario.Work {
		return scenario.Work{
			Kernels: rapid.IntRange(1, 20).Draw(t, "kernels"), Mean: time.Duration(rapid.IntRange(10, 3000).Draw(t, "us")) * time.Microsecond,
			Occupancy: rapid.SampledFrom([]float64{0, 0.2, 0.5, 1}).Draw(t, "occupancy"),
		}
	}
	arrivals := func() scenario.Arrivals {
		return scenario.Arrivals{Kind: rapid.SampledFrom([]scenario.ArrivalKind{scenario.Constant, scenario.Poisson}).Draw(t, "arrivals"), Rate: float64(rapid.IntRange(1, 100).Draw(t, "rate"))}
	}
	for i := range rapid.IntRange(1, 3).Draw(t, "services") {
		o := scenario.Service{
			Name: fmt.Sprint("service", i), GPUs: gpus(), Arrivals: arrivals(), Prepare: time.Duration(rapid.IntRange(0, 2000).Draw(t, "prepare")) * time.Microsecond,
			Request: work(), Priority: rapid.IntRange(8, 15).Draw(t, "priority"),
		}
		if rapid.IntRange(0, 3).Draw(t, "llm") == 0 {
			o.Request, o.LLM, o.Arrivals.Rate = scenario.Work{}, model(), 2
		}
		s.Online = append(s.Online, o)
	}
	for i := range rapid.IntRange(0, 3).Draw(t, "jobs") {
		j := scenario.Job{
			Name: fmt.Sprint("job", i), GPUs: gpus(), Processes: rapid.IntRange(1, 3).Draw(t, "processes"), Queues: rapid.IntRange(1, 3).Draw(t, "queues"),
			Step: work(), Priority: rapid.IntRange(0, 7).Draw(t, "job priority"),
		}
		if rapid.Bool().Draw(t, "steps arrive") {
			a := arrivals()
			j.Arrivals = &a
		}
		s.Offline = append(s.Offline, j)
	}
	return s
}

func drawCosts(t *rapid.T) sim.Costs {
	us := func(name string, most int) time.Duration {
		return time.Duration(rapid.IntRange(0, most).Draw(t, name)) * time.Microsecond
	}
	c := sim.Costs{Suspend: us("suspend", 5000), Resume: us("resume", 5000), PerQueue: us("per queue", 50), Notify: us("notify", 300), Reset: us("reset", 300)}
	c.Disturb = min(us("disturb", 5000), c.Suspend, c.Resume)
	return c
}

// unbroken is a policy that nothing ends a suspension under but the lease.
func unbroken() scheduler.Policy {
	p := strict()
	p.MaxSuspend = 10 * time.Minute
	return p
}

func TestWorkIsConserved(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s, o := drawScenario(t), sim.Options{Seed: rapid.Uint64().Draw(t, "seed"), Costs: drawCosts(t)}
		scheme := sim.Scheme{Kind: rapid.SampledFrom(sim.Kinds()).Draw(t, "kind"), InFlight: rapid.IntRange(0, 3).Draw(t, "in flight")}
		scheme.Policy = rapid.SampledFrom(append(scheduler.Presets(), unbroken())).Draw(t, "policy")
		r, err := sim.Run(s, scheme, o)
		if err != nil {
			t.Fatal(err)
		}
		if most := float64(s.GPUs) * r.Seconds; r.Work < 0 || r.Work > most*(1+1e-9) {
			t.Fatalf("offline work of %v GPU seconds on GPUs that had %v", r.Work, most)
		}
		alone := map[string]float64{}
		for _, service := range s.Online {
			if service.LLM == nil {
				alone[service.Name] = float64(service.Prepare+service.Request.Alone()) / 1e6
			}
		}
		for _, q := range r.Requests {
			if err := checkRequest(q, alone[q.Server]); err != nil {
				t.Fatal(err)
			}
		}
		if scheme.Kind == sim.GPreempt {
			checkDaemon(t, s, scheme.Policy, o.Costs, r)
		}
	})
}

func checkRequest(q evidence.Request, alone float64) error {
	const rounding = 1e-5 // of milliseconds
	switch sum := q.Announce + q.Start + q.Service; {
	case q.Failed != "":
		return nil
	case q.Total < alone-rounding:
		return fmt.Errorf("%+v takes less than alone: %v ms", q, alone)
	case q.Announce < 0 || q.Start < 0 || q.Service < 0 || sum > q.Total+rounding || sum < q.Total-rounding:
		return fmt.Errorf("the parts of %+v do not sum up", q)
	}
	return nil
}

func checkDaemon(t *rapid.T, s scenario.Scenario, p scheduler.Policy, c sim.Costs, r evidence.Repeat) {
	most := float64(p.MaxWait+2*c.Notify) / 1e6
	for _, q := range r.Requests {
		if q.Announce > most+1e-5 {
			t.Fatalf("%+v waited for its announcement longer than max_wait: %v ms", q, most)
		}
		if q.Preemptions > 1 && p == unbroken() {
			t.Fatalf("%+v caused more than one preemption", q)
		}
	}
	if p.Shadow && len(r.Suspends) > 0 {
		t.Fatalf("a shadow policy suspends %d times", len(r.Suspends))
	}
	if floor := p.ShareFloor; floor > 0 && len(s.Offline) > 0 && r.Work == 0 && s.Offline[0].Arrivals == nil && r.Seconds > p.MaxSuspend.Seconds()+1 {
		t.Fatal("offline work with a share floor did nothing")
	}
}

func TestOfflineAloneIsTheMost(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s, o := drawScenario(t), sim.Options{Seed: 1, Costs: drawCosts(t)}
		alone, err := sim.Run(s, sim.Scheme{Kind: sim.OfflineAlone}, o)
		if err != nil {
			t.Fatal(err)
		}
		for _, kind := range sim.Kinds() {
			if kind == sim.Sequential { // begins at the beginning of a step
				continue
			}
			r, err := sim.Run(s, sim.Scheme{Kind: kind, Policy: unbroken()}, o)
			if err != nil {
				t.Fatal(err)
			}
			if r.Work > alone.Work+1e-6 {
				t.Fatalf("%s: offline work %v, more than alone: %v", kind, r.Work, alone.Work)
			}
		}
	})
}
