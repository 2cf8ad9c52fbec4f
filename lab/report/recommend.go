package report

import (
	"fmt"

	"github.com/gpreempt/gpreempt/lab/evidence"
)

// threshold is a limit of the design documents: below low their stage 1, which suspends queues
// from outside, is sufficient; above high their next stage is necessary.
type threshold struct {
	name, unit string
	low, high  float64
	of         func(all []arm, a *arm) (value float64, known bool)
}

var thresholds = []threshold{
	{"mean time to suspend", "ms", 3, 10, func(_ []arm, a *arm) (float64, bool) {
		return a.sum.Suspends.Mean, a.sum.Suspends.N > 0
	}},
	{"p99 of online latency", "ms", 30, 50, func(_ []arm, a *arm) (float64, bool) {
		return a.sum.Latency.P99, a.sum.Latency.N > 0
	}},
	{"loss of offline work", "%", 10, 20, func(all []arm, a *arm) (float64, bool) {
		share, known := kept(all, a)
		return 100 * (1 - share), known
	}},
}

// The recommendations, from the best one.
const (
	adviceStay     = "stay"
	adviceConsider = "consider the next stage"
	adviceNext     = "go to the next stage"
)

// advice returns what the documents recommend for a value.
func (t *threshold) advice(v float64) string {
	switch {
	case v < t.low:
		return adviceStay
	case v <= t.high:
		return adviceConsider
	}
	return adviceNext
}

// adviceSection is the recommendation of the design documents for each protected arm of gpreempt.
func adviceSection(all []arm) section {
	s := section{ID: "recommendation", Title: "Recommendation"}
	s.text("The design documents decide by three figures whether the first stage, suspending queues from outside the process, is sufficient. The worst one decides.")
	limits := table{Title: "Thresholds", Head: []string{"figure", ">stay", ">consider", ">next stage"}}
	for _, t := range thresholds {
		limits.Rows = append(limits.Rows, []string{
			t.name, fmt.Sprintf("< %g %s", t.low, t.unit), fmt.Sprintf("%g to %g %s", t.low, t.high, t.unit), fmt.Sprintf("> %g %s", t.high, t.unit),
		})
	}
	t := table{Title: "Figures", Head: []string{"arm", "figure", ">value", "recommendation"}}
	for i := range all {
		a := &all[i]
		if a.Kind != evidence.Protected || a.Policy == "" && a.run.Origin == evidence.Simulated {
			continue // the simulator's baselines have no policy
		}
		worst, missing, slow := adviceStay, 0, false
		for _, limit := range thresholds {
			value, known := limit.of(all, a)
			if !known {
				t.Rows = append(t.Rows, []string{a.name, limit.name, "-", "cannot tell: not measured"})
				missing++
				continue
			}
			advice := limit.advice(value)
			t.Rows = append(t.Rows, []string{a.name, limit.name, number(value) + " " + limit.unit, advice})
			if advice == adviceNext || advice == adviceConsider && worst == adviceStay {
				worst = advice
			}
			slow = slow || limit.unit == "ms" && advice != adviceStay
		}
		switch {
		case missing == len(thresholds):
			s.text("%s: cannot tell, because nothing was measured.", a.name)
		case missing > 0:
			s.text("%s: %s, by the figures that were measured; %d of %d are missing.", a.name, worst, missing, len(thresholds))
		default:
			s.text("%s: %s.", a.name, worst)
		}
		if worst != adviceStay && !slow {
			s.text("Only the loss of offline work of %s is beyond its threshold. The time that requests need is a part of it, which no stage returns; a share floor bounds it.", a.name)
		}
		if a.run.Origin != evidence.Hardware {
			s.text("The figures of %s are %s. They say what the model does; decide by figures of hardware.", a.name, a.run.Origin)
		}
	}
	if len(t.Rows) == 0 {
		s.text("There is no protected arm of gpreempt, so there is nothing to recommend.")
		return s
	}
	s.text("The next stages: stage 2 moves the calls into the kernel driver, one call for several processes and several queues, which removes the cost of one runlist " +
		"cycle for each process; it needs a patched driver. Stage 3 schedules inside the driver or the firmware, so that no call is needed for each request. " +
		"docs/design-documents.md says which parts of them cannot work as designed.")
	s.Tables = append(s.Tables, t, limits)
	return s
}
