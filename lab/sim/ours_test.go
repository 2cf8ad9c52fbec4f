package sim

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gpreempt/gpreempt/lab/scenario"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// sweptCosts are the times of a suspend and of a resume for which gpreempt is simulated on the
// published scenarios: nobody has measured them on an AMD GPU.
func sweptCosts() []time.Duration {
	return []time.Duration{
		50 * time.Microsecond, 100 * time.Microsecond, 200 * time.Microsecond, 400 * time.Microsecond,
		time.Millisecond, 2 * time.Millisecond, 5 * time.Millisecond,
	}
}

// ownRow is gpreempt on a published scenario with one policy and one cost. Ratios are to online work
// alone.
type ownRow struct {
	Scenario string
	Policy   string
	// Ahead is how much earlier than in the scenario the services announce, in ms: they have so
	// much more to do on the CPU first, also alone.
	Ahead float64
	// Cost of a suspend and of a resume, in ms.
	Cost  float64
	Mean  float64
	P99   float64
	TTFT  float64
	TPOT  float64
	Share float64
	// Preemptions is the most that one request caused.
	Preemptions int
	// Goal, whether it is met, and if not, which part of it and where the time goes.
	Goal   string
	Met    bool
	Reason string
}

// contest is a published scenario, with what gpreempt should reach there.
type contest struct {
	name      string
	goal      string
	scenarios []scenario.Scenario
	o         Options
	// share is what the offline work is relative to: all requests and steps without
	// preemption (as GPreempt counts), or offline work alone.
	overall bool
	misses  func(ownRow) []string
}

// ownRows simulates gpreempt on the published scenarios with every cost of sweptCosts and the
// presets balanced and strict, and with balanced and services that announce earlier. trace is the
// Azure LLM trace of 2023.
func ownRows(parameters []fittedParameter, trace []scenario.Arrival) ([]ownRow, error) {
	all, err := contests(parameters, trace)
	if err != nil {
		return nil, err
	}
	var rows []ownRow
	for _, c := range all {
		for _, way := range []struct {
			preset string
			ahead  time.Duration
		}{{"balanced", 0}, {"strict", 0}, {"balanced", announcedAhead}} {
			policy, err := scheduler.PresetByName(way.preset)
			if err != nil {
				return nil, err
			}
			for _, cost := range sweptCosts() {
				row, err := c.run(policy, cost, way.ahead)
				if err != nil {
					return nil, fmt.Errorf("%s: %w", c.name, err)
				}
				rows = append(rows, row)
			}
		}
	}
	return rows, nil
}

// announcedAhead is longer than every suspend of sweptCosts, the message to the daemon included.
const announcedAhead = 6 * time.Millisecond

func contests(parameters []fittedParameter, trace []scenario.Arrival) ([]contest, error) {
	values := map[string]float64{}
	for _, p := range parameters {
		values[p.Name] = p.Value
	}
	machine, err := gpreemptMachine(values)
	if err != nil {
		return nil, err
	}
	others, err := named("xsched-fig7-mi50", "llm-serving")
	if err != nil {
		return nil, err
	}
	list := []contest{
		{
			name: "GPreempt A to E, MI100", goal: "mean latency at most 1.05, 90 % of all requests", scenarios: machine, o: Options{Seed: validationSeed, Paced: true}, overall: true,
			misses: func(o ownRow) []string {
				return beyond(atMost("mean latency", o.Mean, 1.05), atLeast("requests", o.Share, 0.90))
			},
		},
		{
			name: "XSched figure 7, MI50", goal: "p99 at most 1.05", scenarios: others[:1], o: Options{Seed: validationSeed, Sharing: Sharing{Gain: values["gain"]}},
			misses: func(o ownRow) []string { return beyond(atMost("p99", o.P99, 1.05)) },
		},
	}
	llm := func(name string, s scenario.Scenario) contest {
		return contest{
			name: name, goal: "TTFT at most 1.05, TPOT at most 1.02, one preemption", scenarios: []scenario.Scenario{s}, o: Options{Seed: validationSeed},
			misses: func(o ownRow) []string {
				return beyond(atMost("TTFT", o.TTFT, 1.05), atMost("TPOT", o.TPOT, 1.02), atMost("preemptions", float64(o.Preemptions), 1))
			},
		}
	}
	list = append(list, llm("LLM serving, Poisson", others[1]))
	s := others[1]
	s.Online = slices.Clone(s.Online)
	s.Online[0].Arrivals = scenario.Arrivals{Kind: scenario.Trace, Speed: traceSpeed, Points: trace}
	return append(list, llm("LLM serving, Azure trace", s)), nil
}

// traceSpeed is at which the trace is replayed: the whole of it keeps one GPU busy all the time.
const traceSpeed = 0.1

type bound struct {
	name  string
	value float64
	limit float64
	least bool
}

func atMost(name string, v, limit float64) bound  { return bound{name, v, limit, false} }
func atLeast(name string, v, limit float64) bound { return bound{name, v, limit, true} }

// beyond returns the bounds that are not kept.
func beyond(bounds ...bound) []string {
	var missed []string
	for _, b := range bounds {
		if b.least && b.value < b.limit || !b.least && b.value > b.limit {
			missed = append(missed, fmt.Sprintf("%s %.3g", b.name, b.value))
		}
	}
	return missed
}

// run simulates all scenarios of a contest and returns the means of their figures.
func (c contest) run(policy scheduler.Policy, cost, ahead time.Duration) (ownRow, error) {
	row := ownRow{Scenario: c.name, Policy: policy.Preset, Ahead: ms(ahead), Cost: ms(cost), Goal: c.goal}
	n := float64(len(c.scenarios))
	var waiting, service, ceiling float64
	for _, s := range c.scenarios {
		s.Online = slices.Clone(s.Online)
		for i := range s.Online {
			s.Online[i].Prepare += ahead
		}
		o := c.o
		alone, err := measured(s, Scheme{Kind: OnlineAlone}, o)
		if err != nil {
			return row, err
		}
		base := Scheme{Kind: OfflineAlone}
		if c.overall {
			base = Scheme{Kind: None}
		}
		than, err := measured(s, base, o)
		if err != nil {
			return row, err
		}
		o.Costs = CostsOf(cost)
		got, err := measured(s, Scheme{Kind: GPreempt, Policy: policy}, o)
		if err != nil {
			return row, err
		}
		row.Mean += got.Mean / alone.Mean / n
		row.P99 += got.P99 / alone.P99 / n
		if alone.TTFT > 0 {
			row.TTFT += got.TTFT / alone.TTFT / n
			row.TPOT += got.TPOT / alone.TPOT / n
		}
		if c.overall {
			row.Share += got.Rate / than.Rate / n
			o.Costs = Costs{}
			free, err := measured(s, Scheme{Kind: GPreempt, Policy: policy}, o)
			if err != nil {
				return row, err
			}
			ceiling += free.Rate / than.Rate / n
		} else {
			row.Share += got.Work / than.Work / n
		}
		row.Preemptions = max(row.Preemptions, got.Preemptions)
		waiting += (got.Waiting - alone.Waiting) / alone.Mean / n
		service += (got.Service - alone.Service) / alone.Mean / n
	}
	missed := c.misses(row)
	row.Met = len(missed) == 0
	if !row.Met {
		row.Reason = fmt.Sprintf("%s; waiting for the GPU adds %.1f %%, cycles and sharing on it %.1f %%", strings.Join(missed, ", "), 100*waiting, 100*service)
		if c.overall {
			row.Reason += fmt.Sprintf("; at no cost the whole GPU for online work leaves %.1f %% of the requests", 100*ceiling)
		}
		if row.Preemptions > 1 {
			row.Reason += "; max_suspend or the share floor ends a suspension before the batch is empty"
		}
	}
	return row, nil
}
