package report

import (
	"fmt"
	"slices"
	"strings"

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

// place is where a value is among the limits of a threshold, from the best one.
type place int

const (
	below place = iota
	between
	above
)

func (p place) String() string { return [...]string{"stay", "consider", "next stage"}[p] }

func (t *threshold) place(v float64) place {
	switch {
	case v < t.low:
		return below
	case v <= t.high:
		return between
	}
	return above
}

// advice is a recommendation.
type advice string

const (
	adviceStay     advice = "keep it"
	adviceMeasure  advice = "measure again"
	adviceRepair   advice = "repair"
	adviceWork     advice = "more time for offline work"
	adviceTune     advice = "tune"
	adviceHardware advice = "measure on hardware"
	adviceConsider advice = "consider the next stage"
	adviceNext     advice = "go to the next stage"
)

// slow are the beginnings of the criteria that a faster suspension may improve.
var slow = []string{"online_", "ttft_", "tpot_", "suspend_", "resume_"}

// recommend is the recommendation that follows from a verdict: keep it for PASS and for nothing else.
// slowest is where the worst figure about time is among the thresholds of the design documents, whose
// next stages answer nothing but slow suspensions on hardware.
func recommend(v *evidence.Verdict, slowest place) advice {
	c := deciding(v)
	switch {
	case v.Result == evidence.Pass:
		return adviceStay
	case v.Result == evidence.CannotTell:
		return adviceMeasure
	case c == nil || strings.HasPrefix(c.Name, "daemon_"):
		return adviceRepair
	case !slices.ContainsFunc(slow, func(beginning string) bool { return strings.HasPrefix(c.Name, beginning) }):
		return adviceWork
	case v.Origin != evidence.Hardware:
		return adviceHardware
	}
	return [...]advice{adviceTune, adviceConsider, adviceNext}[slowest]
}

// slowness is where the worst figure about time is, of the protected arms that fail.
func slowness(all []arm, v *evidence.Verdict) (worst place) {
	for i := range all {
		a := &all[i]
		fails := func(c evidence.Criterion) bool { return c.Arm == a.Arm.Name && c.Result == evidence.Fail }
		if a.Kind != evidence.Protected || !slices.ContainsFunc(v.Criteria, fails) {
			continue
		}
		for _, t := range thresholds {
			if value, known := t.of(all, a); known && t.unit == "ms" {
				worst = max(worst, t.place(value))
			}
		}
	}
	return worst
}

// change says what would change the result of a verdict. It begins with the recommendation.
func change(v *evidence.Verdict, slowest place) string {
	does := recommend(v, slowest)
	text := ""
	switch does {
	case adviceStay:
		text = fmt.Sprintf("Keep these settings. More load or slower suspensions would change the verdict, when that figure reaches %s.", limitOf(nearest(v)))
	case adviceMeasure:
		text = "This is not a failure. Measure again, with more repeats or more requests, or choose other limits (--profile)."
		switch c := deciding(v); {
		case c == nil:
			text = "This is not a failure. Measure again without what is named above."
		case c.Busy:
			text = "This is not a failure. Measure again when nothing else runs on this host."
		}
	case adviceRepair:
		text = "Repair first what is named above. Limits say nothing about a run with errors."
	case adviceWork:
		text = "Give offline work more time with a higher share floor; requests wait longer then. The time that requests need themselves is lost in any case: a limit below it cannot be kept."
	case adviceTune, adviceHardware, adviceConsider, adviceNext:
		text = "Announce requests earlier (eta), let leases linger, and run fewer offline processes with more queues each."
	}
	switch {
	case does == adviceConsider:
		text += " If that is not enough, consider the next stage, a patched driver."
	case does == adviceNext:
		text += " Then go to the next stage, a patched driver: suspending is too slow by the thresholds below."
	case v.Origin != evidence.Hardware:
		text += " The figures are " + strings.ToUpper(string(v.Origin)) + ": decide by a trial on your GPU (gplab trial)."
	}
	return text
}

// adviceSection compares the figures with the thresholds of the design documents.
func adviceSection(all []arm) section {
	s := section{ID: "recommendation", Title: "Recommendation and thresholds"}
	s.text("The recommendation above follows from the verdict. The design documents have three thresholds of their own. They matter where the verdict is FAIL because " +
		"requests or suspensions are too slow on hardware: between the limits their next stage is worth considering, above them it is necessary.")
	limits := table{Title: "Thresholds", Head: []string{"figure", ">stay", ">consider", ">next stage"}}
	for _, t := range thresholds {
		limits.Rows = append(limits.Rows, []string{
			t.name, fmt.Sprintf("< %g %s", t.low, t.unit), fmt.Sprintf("%g to %g %s", t.low, t.high, t.unit), fmt.Sprintf("> %g %s", t.high, t.unit),
		})
	}
	t := table{Title: "Figures", Head: []string{"arm", "figure", ">value", "threshold"}}
	for i := range all {
		a := &all[i]
		if a.Kind != evidence.Protected {
			continue
		}
		for _, limit := range thresholds {
			row := []string{a.name, limit.name, "-", "not measured"}
			if value, known := limit.of(all, a); known {
				row[2], row[3] = number(value)+" "+limit.unit, limit.place(value).String()
			}
			t.Rows = append(t.Rows, row)
		}
	}
	if len(t.Rows) == 0 {
		s.text("There is no protected arm, so there is nothing to compare.")
		return s
	}
	s.text("Loss of offline work contains the time that requests need, which no stage returns; a share floor bounds it. " +
		"Stage 2 moves the calls into the kernel driver, one call for several processes and several queues, which removes the cost of one runlist " +
		"cycle for each process; it needs a patched driver. Stage 3 schedules inside the driver or the firmware, so that no call is needed for each request. " +
		"docs/design-documents.md says which parts of them cannot work as designed.")
	s.Tables = append(s.Tables, t, limits)
	return s
}
