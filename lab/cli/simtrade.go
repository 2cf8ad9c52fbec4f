package cli

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/lab/scenario"
	"github.com/gpreempt/gpreempt/lab/sim"
)

// tradeoff is another way of sharing that is at least as good as every policy of gpreempt, in the p99
// and in offline work.
type tradeoff struct {
	Scheme sim.Kind `json:"scheme"`
	Policy string   `json:"policy"`
	// Why it is as good, and what it needs.
	Why string `json:"why"`
	// Change is made to the scenario to show what it costs, "" for none. Changed are the scheme and
	// gpreempt with the policy then.
	Change  string   `json:"change,omitempty"`
	Changed []simArm `json:"changed,omitempty"`
}

// The changes that show what other ways of sharing cost.
const (
	randomTimes = "as many requests at random times"
	longKernels = "offline kernels ten times as long"
)

// findTradeoffs returns such ways among the arms.
func (f *simFlags) findTradeoffs(s scenario.Scenario, arms []simArm) (found []tradeoff, err error) {
	var ours []simArm
	for _, a := range arms {
		if a.Scheme == sim.GPreempt {
			ours = append(ours, a)
		}
	}
	for _, a := range arms {
		t := tradeoff{Scheme: a.Scheme, Change: longKernels}
		switch a.Scheme {
		case sim.None:
			t.Why, t.Change = "suspending and resuming cost more here than they save.", ""
		case sim.Throttle:
			t.Why = "a library in each offline program holds its launches back, and requests share with the kernels in flight."
		case sim.BlockWait:
			t.Why = "a library in each offline program holds its launches back, and the kernels in flight are short here."
		case sim.Reset:
			t.Why, t.Change = "it kills kernels and runs them again, which their programs must permit.", ""
		case sim.TimeSlice:
			t.Why = fmt.Sprintf("the model changes turns in %s, without a daemon, and ends them with the work. amdgpu has no such turns.", term.Duration(f.options(a.cost).Costs.Disturb))
			t.Change = randomTimes
		case sim.Sequential:
			t.Why = "a request waits for a whole step of offline work, and steps are short here."
		default:
			continue
		}
		better := func(g simArm) bool {
			return g.Requests == g.Unfinished || g.P99 < a.P99 || g.OfflineShare > a.OfflineShare
		}
		if a.Unfinished > 0 || a.OfflineShare == 0 || len(ours) == 0 || slices.ContainsFunc(ours, better) {
			continue
		}
		own := ours[max(0, slices.IndexFunc(ours, func(g simArm) bool { return g.cost == a.cost }))]
		t.Policy = own.Policy
		other, changed := changedScenario(s, t.Change)
		if !changed {
			t.Change = ""
		}
		for _, arm := range []simArm{a, own} {
			if changed {
				if err := f.again(other, &arm); err != nil {
					return nil, err
				}
				t.Changed = append(t.Changed, arm)
			}
		}
		found = append(found, t)
	}
	return found, nil
}

// again simulates an arm with another scenario that has the same offline work.
func (f *simFlags) again(s scenario.Scenario, a *simArm) error {
	arm, err := sim.Arm(a.name(), s, a.scheme, f.options(a.cost), f.repeats)
	if err != nil {
		return &term.Failure{Code: term.ExitFailure, Message: err.Error()}
	}
	alone := a.Work / a.OfflineShare
	a.Figures = sim.Measure(arm.Repeats...)
	a.MeanRatio, a.P99Ratio, a.TTFTRatio, a.TPOTRatio, a.OfflineShare = 0, 0, 0, 0, a.Work/alone
	return nil
}

// changedScenario returns the scenario with a change, and whether it has something to change.
func changedScenario(s scenario.Scenario, change string) (_ scenario.Scenario, changed bool) {
	s.Online, s.Offline = slices.Clone(s.Online), slices.Clone(s.Offline)
	switch change {
	case randomTimes:
		for i := range s.Online {
			if a := &s.Online[i].Arrivals; a.Kind == scenario.Constant {
				a.Kind, changed = scenario.Poisson, true
			}
		}
	case longKernels:
		for i := range s.Offline {
			w := &s.Offline[i].Step
			w.Mean, w.P50, w.P90, w.Max, w.Total, changed = 10*w.Mean, 10*w.P50, 10*w.P90, 10*w.Max, 10*w.Total, s.Offline[i].Arrivals == nil
			if !changed {
				return s, false // its steps would overlap
			}
		}
	}
	return s, changed
}

// lines explain the way of sharing to a reader who asks why not to use it.
func (t *tradeoff) lines() []string {
	lines := []string{fmt.Sprintf("%s is at least as good here: %s", t.Scheme, t.Why)}
	var both []string
	for i := range t.Changed {
		a := &t.Changed[i]
		both = append(both, fmt.Sprintf("%s %s, %.1f %%", a.name(), milli(a.P99), 100*a.OfflineShare))
	}
	if len(both) > 0 {
		lines = append(lines, fmt.Sprintf("  With %s, p99 and offline work: %s.", t.Change, strings.Join(both, "; ")))
	}
	return lines
}
