package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
)

// guarded are the ratios that must not grow, with what they were when they were last
// looked at. Update a reference with the change that is meant to move it.
var guarded = []struct {
	figure    string
	of        func([]float64) float64 // which of the repeats is judged
	reference float64
}{
	{"NotifyOnline+Complete / two unary echoes, p50, back to back", lowerQuartile, 1.08},
	{"announce+complete by Session / two stream echoes, p50, back to back", lowerQuartile, 1.18},
	{"SDK's Acquire by Session / stream echo, p50, back to back", lowerQuartile, 1.28},
	{"targets x GPUs 64x8 / 1x1, no cost, p50", lowerQuartile, 1.5},
	{"parse mqds / look for newlines", slices.Min[[]float64], 43},
	{"parse hqds / look for newlines", slices.Min[[]float64], 45},
	{"scan 100 processes x 5 queues, unchanged / fewest system calls, CPU", lowerQuartile, 1.3},
}

// regression is how much worse a ratio is to be found out. The line is drawn half way,
// so that noise has as much room as there is.
const regression = 1.5

// line is where a ratio is taken for one that has grown: sqrt(regression).
const line = 1.2247

// tries is how often a ratio is measured before it has regressed. Whoever is on the
// machine for some seconds and takes its caches makes all repeats of a try worse.
const tries = 3

// verdict is what became of a guarded ratio.
type verdict struct {
	section, figure            string
	reference, measured, limit float64
}

func (v verdict) regressed() bool { return v.measured > v.limit }

// lowerQuartile is judged where two sides take turns: what else runs on the machine
// makes some repeats worse, or better, and a change of ours makes all worse. Of a loop
// that only computes, the least is steadier.
func lowerQuartile(all []float64) float64 {
	return slices.Sorted(slices.Values(all))[(len(all)-1)/4]
}

// judge compares the guarded ratios of a run with their references. A figure that was
// not measured is not in the answer.
func (r *report) judge() (all []verdict) {
	for _, g := range guarded {
		for _, f := range r.Figures {
			if f.Name == g.figure {
				all = append(all, verdict{f.Section, g.figure, g.reference, g.of(f.Values), g.reference * line})
			}
		}
	}
	return all
}

// again keeps the better of two tries of each ratio.
func again(first, second []verdict) []verdict {
	all := slices.Clone(first)
	for i := range all {
		for _, v := range second {
			if v.figure == all[i].figure && v.measured < all[i].measured {
				all[i] = v
			}
		}
	}
	return all
}

// regressed returns the sections of the ratios that have.
func regressed(all []verdict) (letters string) {
	for _, v := range all {
		if v.regressed() {
			letters += v.section
		}
	}
	return letters
}

// guard measures the guarded ratios, and what seems to have grown again.
func guard(ctx context.Context, only string) (*report, []verdict, error) {
	first, err := measure(ctx, true, only)
	if err != nil {
		return nil, nil, err
	}
	verdicts := first.judge()
	for try := 1; try < tries && regressed(verdicts) != ""; try++ {
		fmt.Fprintln(os.Stderr, "a ratio has grown; once more")
		next, err := measure(ctx, true, regressed(verdicts))
		if err != nil {
			return nil, nil, err
		}
		verdicts = again(verdicts, next.judge())
	}
	return first, verdicts, nil
}

// writeVerdicts writes them for people.
func writeVerdicts(out io.Writer, all []verdict) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, strings.Join([]string{"guarded ratio", "reference", "now", "limit", ""}, "\t"))
	for _, v := range all {
		result := "ok"
		if v.regressed() {
			result = "REGRESSED"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", v.figure, number(v.reference), number(v.measured), number(v.limit), result)
	}
	return w.Flush()
}
