package cli

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/lab/scenario"
	"github.com/gpreempt/gpreempt/lab/sim"
)

// tradeoff is another way of sharing that is at least as good as every policy of gpreempt, in the p99
// and in offline work, and the same with requests at random times.
type tradeoff struct {
	Scheme sim.Kind `json:"scheme"`
	Policy string   `json:"policy"`
	// Fixed: the requests of the scenario come at fixed times. Random has both then, with as many
	// requests at random times: the scheme, and gpreempt with the policy.
	Fixed  bool     `json:"fixed"`
	Random []simArm `json:"random,omitempty"`

	turn time.Duration
	cost time.Duration // of a change of turns
}

// findTradeoff returns the first such way among the arms, nil for none.
func (f *simFlags) findTradeoff(s scenario.Scenario, arms []simArm) (*tradeoff, error) {
	var ours []simArm
	for _, a := range arms {
		if a.Scheme == sim.GPreempt {
			ours = append(ours, a)
		}
	}
	if len(ours) == 0 || ours[0].Requests == ours[0].Unfinished {
		return nil, nil
	}
	at := slices.IndexFunc(arms, func(a simArm) bool {
		switch a.Scheme {
		case sim.OfflineAlone, sim.OnlineAlone, sim.GPreempt, sim.Oracle:
			return false
		default:
		}
		return a.Unfinished == 0 && !slices.ContainsFunc(ours, func(g simArm) bool {
			return a.P99 > g.P99 || a.OfflineShare < g.OfflineShare
		})
	})
	if at < 0 {
		return nil, nil
	}
	own := ours[max(0, slices.IndexFunc(ours, func(g simArm) bool { return g.cost == arms[at].cost }))]
	t := &tradeoff{
		Scheme: arms[at].Scheme, Policy: own.Policy, turn: cmp.Or(arms[at].scheme.Quantum, sim.DefaultQuantum), cost: f.options(arms[at].cost).Costs.Disturb,
	}
	s.Online = slices.Clone(s.Online)
	for i := range s.Online {
		if a := &s.Online[i].Arrivals; a.Kind == scenario.Constant {
			a.Kind, t.Fixed = scenario.Poisson, true
		}
	}
	if !t.Fixed {
		return t, nil
	}
	t.Random = []simArm{arms[at], own}
	for i := range t.Random {
		a := &t.Random[i]
		figures, err := sim.Arm(a.name(), s, a.scheme, f.options(a.cost), f.repeats)
		if err != nil {
			return nil, &term.Failure{Code: term.ExitFailure, Message: err.Error()}
		}
		alone := a.Work / a.OfflineShare
		a.Figures = sim.Measure(figures.Repeats...)
		a.MeanRatio, a.P99Ratio, a.TTFTRatio, a.TPOTRatio, a.OfflineShare = 0, 0, 0, 0, a.Work/alone
	}
	return t, nil
}

// lines explain the way of sharing to a reader who asks why not to use it.
func (t *tradeoff) lines() (lines []string) {
	if t == nil {
		return nil
	}
	lines = append(lines, fmt.Sprintf("%s is at least as good in this scenario: it is modelled without a daemon and its messages.", t.Scheme))
	if t.Scheme == sim.TimeSlice {
		lines = []string{
			fmt.Sprintf("%s is at least as good in this scenario: a change of turns is modelled as %s, without a daemon and its messages, and ends", t.Scheme, term.Duration(t.cost)),
			fmt.Sprintf("with the work. A request waits only for what is left of a turn of %s. The driver's own turns are not such: they begin when", term.Duration(t.turn)),
			"queues outnumber the hardware slots, and no program chooses them.",
		}
	}
	if t.Fixed {
		var both []string
		for i := range t.Random {
			a := &t.Random[i]
			both = append(both, fmt.Sprintf("%s %s with %.1f %% of the offline work", a.name(), milli(a.P99), 100*a.OfflineShare))
		}
		lines = append(lines, "The requests come at fixed times, which suits it. With as many at random times, the p99 is:", "  "+both[0], "  "+both[1])
	}
	return lines
}
