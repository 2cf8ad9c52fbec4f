package sim_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/gpreempt/gpreempt/lab/scenario"
	"github.com/gpreempt/gpreempt/lab/sim"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// hour is 8 GPUs, each with a service at 20 requests a second and 10 offline queues.
func hour(processes int) scenario.Scenario {
	s := scenario.Scenario{Name: "hour", GPUs: 8, Duration: time.Hour}
	for g := range s.GPUs {
		s.Online = append(s.Online, scenario.Service{
			Name: fmt.Sprint("service", g), GPUs: []int{g}, Arrivals: scenario.Arrivals{Kind: scenario.Poisson, Rate: 20}, Prepare: millisecond,
			Request: scenario.Work{Kernels: 30, Mean: 200 * time.Microsecond, Occupancy: 0.9}, Priority: 11,
		})
		s.Offline = append(s.Offline, scenario.Job{
			Name: fmt.Sprint("train", g), GPUs: []int{g}, Processes: processes, Queues: 10 / processes,
			Step: scenario.Work{Kernels: 100, Mean: 25 * millisecond, Occupancy: 0.3},
		})
	}
	return s
}

// BenchmarkHour simulates one hour of 8 GPUs with 80 offline queues and 576 000 requests, in one
// process on each GPU and in ten.
func BenchmarkHour(b *testing.B) {
	for _, c := range []struct {
		processes int
		scheme    sim.Scheme
	}{
		{1, sim.Scheme{Kind: sim.GPreempt, Policy: scheduler.DefaultPolicy()}},
		{10, sim.Scheme{Kind: sim.GPreempt, Policy: scheduler.DefaultPolicy()}},
		{1, sim.Scheme{Kind: sim.BlockWait}},
		{1, sim.Scheme{Kind: sim.None}},
	} {
		b.Run(fmt.Sprintf("%s-%d-processes", c.scheme.Kind, 8*c.processes), func(b *testing.B) {
			s := hour(c.processes)
			for b.Loop() {
				r, err := sim.Run(s, c.scheme, sim.Options{Seed: 1, Costs: sim.DefaultCosts()})
				if err != nil {
					b.Fatal(err)
				}
				b.ReportMetric(float64(len(r.Requests)), "requests")
				b.ReportMetric(float64(len(r.Suspends)), "suspends")
			}
		})
	}
}
