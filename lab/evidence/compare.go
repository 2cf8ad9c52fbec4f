package evidence

import (
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"

	"github.com/gpreempt/gpreempt/internal/stat"
)

// The resampling of Compare. The seed is fixed: the same runs have the same intervals.
const (
	resamples = 1000
	seed      = 19
)

// Ratio is a figure of an arm in two runs, or of two arms: that of B divided by that of A, with the interval that
// contains 95 % of the ratios of resampled runs. Resampling draws repeats, and samples in them.
type Ratio struct {
	Arm string `json:"arm"`
	// Base is the arm of A, if it is another arm of the same run.
	Base   string  `json:"base,omitempty"`
	Figure string  `json:"figure"`
	Unit   string  `json:"unit"`
	A      float64 `json:"a"`
	B      float64 `json:"b"`
	Ratio  float64 `json:"ratio"`
	Low    float64 `json:"low"`
	High   float64 `json:"high"`
	// NA and NB are the numbers of samples.
	NA int `json:"n_a"`
	NB int `json:"n_b"`
}

// UnlikeError says in what two runs differ that must not be compared.
type UnlikeError struct{ Differences []string }

// Error returns one line for each difference.
func (e *UnlikeError) Error() string {
	return "the runs are unlike and cannot be compared:\n  " + strings.Join(e.Differences, "\n  ")
}

// Compare returns the figures of the arms that both runs have. The error is an *UnlikeError when
// their command, origin, plan or environment differ; keys of the environment in except may differ.
func Compare(a, b *Run, except ...string) ([]Ratio, error) {
	var different []string
	differ := func(what, of, other string) {
		if of != other {
			different = append(different, fmt.Sprintf("%s: %s and %s", what, orNone(of), orNone(other)))
		}
	}
	differ("command", a.Command, b.Command)
	differ("origin", string(a.Origin), string(b.Origin))
	differ("backend", a.Backend, b.Backend)
	if left, right := a.asked(b), b.asked(a); left != right {
		different = append(different, "plan: "+firstDifference(left, right))
	}
	for _, key := range Keys(a, b) {
		if !slices.Contains(except, key) {
			differ(key, a.Environment[key], b.Environment[key])
		}
	}
	if len(different) > 0 {
		return nil, &UnlikeError{different}
	}
	var ratios []Ratio
	for i := range a.Arms {
		if j := slices.IndexFunc(b.Arms, func(arm Arm) bool { return arm.Name == a.Arms[i].Name }); j >= 0 {
			ratios = append(ratios, compareArms(&a.Arms[i], &b.Arms[j])...)
		}
	}
	return ratios, nil
}

// Keys returns the keys of the environments of two runs, sorted.
func Keys(a, b *Run) []string {
	keys := maps.Clone(a.Environment)
	if keys == nil {
		keys = map[string]string{}
	}
	maps.Copy(keys, b.Environment)
	return slices.Sorted(maps.Keys(keys))
}

// asked returns the plan for a comparison with another run: without the rate, if both trials chose theirs, which
// is a figure of the host and nothing that was asked for.
func (run *Run) asked(other *Run) string {
	if run.ChosenRate == 0 || other.ChosenRate == 0 {
		return run.Plan
	}
	rate := "rate: " + strconv.FormatFloat(run.ChosenRate, 'g', -1, 64)
	lines := strings.Split(run.Plan, "\n")
	return strings.Join(slices.DeleteFunc(lines, func(line string) bool { return strings.TrimSpace(line) == rate }), "\n")
}

// ChosenRates says which rates two trials chose, "" if they are the same.
func ChosenRates(a, b *Run) string {
	if a.ChosenRate == b.ChosenRate || a.ChosenRate == 0 || b.ChosenRate == 0 {
		return ""
	}
	return fmt.Sprintf("The trials chose the rate by how long a request took: %g and %g requests per second.", a.ChosenRate, b.ChosenRate)
}

// Within returns the figures of each protected arm against those of the first with as many queues
// and processes: the ratio is B to A, where A is the first.
func Within(run *Run) (ratios []Ratio) {
	first := map[string]*Arm{}
	for i := range run.Arms {
		arm := &run.Arms[i]
		if arm.Kind != Protected || arm.Missing != "" {
			continue
		}
		_, size, _ := strings.Cut(arm.Name, ", ")
		base := first[size]
		if base == nil {
			first[size] = arm
			continue
		}
		for _, r := range compareArms(base, arm) {
			r.Arm, r.Base = arm.Name, base.Name
			ratios = append(ratios, r)
		}
	}
	return ratios
}

func orNone(s string) string {
	if s == "" {
		return "none"
	}
	return s
}

// firstDifference returns the first line in which two texts differ.
func firstDifference(a, b string) string {
	left, right := strings.Split(a, "\n"), strings.Split(b, "\n")
	for i := range max(len(left), len(right)) {
		x, y := "", ""
		if i < len(left) {
			x = left[i]
		}
		if i < len(right) {
			y = right[i]
		}
		if x != y {
			return fmt.Sprintf("line %d is %q and %q", i+1, strings.TrimSpace(x), strings.TrimSpace(y))
		}
	}
	return "the same"
}

// compared are the figures of Compare.
var compared = []struct {
	name, unit string
	of         series
	statistic  func(sorted []float64) float64
	least      int
}{
	{"online mean", "ms", latencies, stat.Mean[float64], 1},
	{"online p50", "ms", latencies, quantile(0.5), 1},
	{"online p99", "ms", latencies, quantile(0.99), minForP99},
	{"suspend mean", "ms", suspends, stat.Mean[float64], 1},
	{"suspend p99", "ms", suspends, quantile(0.99), minForP99},
	{"resume mean", "ms", resumes, stat.Mean[float64], 1},
	{"resume p99", "ms", resumes, quantile(0.99), minForP99},
	{"offline work", "1/s", func(r *Repeat) []float64 {
		if r.WorkUnit == "" || r.Seconds <= 0 {
			return nil
		}
		return []float64{r.Work / r.Seconds}
	}, stat.Mean[float64], 1},
}

func compareArms(a, b *Arm) (ratios []Ratio) {
	for _, c := range compared {
		left, right := groups(a, c.of), groups(b, c.of)
		one, other := slices.Sorted(slices.Values(slices.Concat(left...))), slices.Sorted(slices.Values(slices.Concat(right...)))
		if len(one) < c.least || len(other) < c.least || len(one) == 0 || len(other) == 0 {
			continue
		}
		r := Ratio{Arm: a.Name, Figure: c.name, Unit: c.unit, A: c.statistic(one), B: c.statistic(other), NA: len(one), NB: len(other)}
		if r.A == 0 {
			continue
		}
		r.Ratio = r.B / r.A
		random := rand.New(rand.NewPCG(seed, seed)) //nolint:gosec // G404: the interval must be repeatable
		var drawn []float64
		for range resamples {
			x := c.statistic(draw(left, random))
			y := c.statistic(draw(right, random))
			if ratio := y / x; !math.IsNaN(ratio) && !math.IsInf(ratio, 0) {
				drawn = append(drawn, ratio)
			}
		}
		slices.Sort(drawn)
		r.Low, r.High = stat.Quantile(drawn, 0.025), stat.Quantile(drawn, 0.975)
		ratios = append(ratios, r)
	}
	return ratios
}

// groups returns the samples of each repeat that has some.
func groups(a *Arm, of series) (lists [][]float64) {
	for i := range a.Repeats {
		if list := of(&a.Repeats[i]); len(list) > 0 {
			lists = append(lists, list)
		}
	}
	return lists
}

// maxDrawn bounds the samples of a repeat that are drawn, which bounds the time of a comparison;
// with fewer samples the interval is slightly wider than it could be.
const maxDrawn = 2000

// draw returns a sorted resample: of the repeats, and of the samples of each.
func draw(lists [][]float64, random *rand.Rand) (drawn []float64) {
	for range lists {
		list := lists[random.IntN(len(lists))]
		for range min(len(list), maxDrawn) {
			drawn = append(drawn, list[random.IntN(len(list))])
		}
	}
	slices.Sort(drawn)
	return drawn
}
