package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"slices"
)

// guarded lists the ratios that must not grow, with their last accepted values. Update a
// reference in the change that is intended to move it.
var guarded = []struct {
	figure    string
	of        func([]float64) float64 // selects one of the repeats
	reference float64
}{
	{"NotifyOnline+Complete / two unary echoes, p50, back to back", lowerQuartile, 1.08},
	{"announce+complete by Session / two stream echoes, p50, back to back", lowerQuartile, 1.18},
	{"SDK's Acquire by Session / stream echo, p50, back to back", lowerQuartile, 1.28},
	{"targets x GPUs 64x8 / 1x1, no cost, p50", lowerQuartile, 1.5},
	// 1.55 and 1.7 where they were measured. The two loops are not alike for every processor, and
	// half as much more is still found.
	{"parse mqds / read the numbers", slices.Min[[]float64], 1.7},
	{"parse hqds / read the numbers", slices.Min[[]float64], 1.9},
	{"scan 100 processes x 5 queues, unchanged / fewest system calls, CPU", lowerQuartile, 1.3},
}

// regression is the growth that must be detected. The limit is half way, to leave room
// for noise.
const regression = 1.5

// line is the growth beyond which a ratio counts as regressed: sqrt(regression).
const line = 1.2247

// tries is how often a ratio is measured before it counts as regressed. Another load
// that runs for some seconds makes all repeats of one try worse.
const tries = 5

// verdict is the result of a guarded ratio.
type verdict struct {
	section, figure            string
	reference, measured, limit float64
}

func (v verdict) regressed() bool { return v.measured > v.limit }

// lowerQuartile is used for interleaved sides: other load makes some repeats worse or
// better, while a change of ours makes all of them worse. For a loop that only computes,
// the minimum is steadier.
func lowerQuartile(all []float64) float64 {
	return slices.Sorted(slices.Values(all))[(len(all)-1)/4]
}

// compare compares the guarded ratios of a run with their references. Figures that were
// not measured are left out.
func (r *report) compare() (all []verdict) {
	for _, g := range guarded {
		for _, f := range r.Figures {
			if f.Name == g.figure {
				all = append(all, verdict{f.Section, g.figure, g.reference, g.of(f.Values), g.reference * line})
			}
		}
	}
	return all
}

// better returns the better of two tries of each ratio.
func better(first, second []verdict) []verdict {
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

// regressed returns the sections with a regressed ratio.
func regressed(all []verdict) (letters string) {
	for _, v := range all {
		if v.regressed() {
			letters += v.section
		}
	}
	return letters
}

// guard measures the guarded ratios, and those that seem to have grown again.
func guard(ctx context.Context, only string) (*report, []verdict, error) {
	first, err := measure(ctx, true, only)
	if err != nil {
		return nil, nil, err
	}
	verdicts := first.compare()
	for try := 1; try < tries && regressed(verdicts) != ""; try++ {
		fmt.Fprintln(os.Stderr, "a ratio has grown: measuring it again")
		next, err := measure(ctx, true, regressed(verdicts))
		if err != nil {
			return nil, nil, err
		}
		verdicts = better(verdicts, next.compare())
	}
	return first, verdicts, nil
}

// writeVerdicts writes a table for people.
func writeVerdicts(out io.Writer, all []verdict) error {
	rows := [][]string{{"guarded ratio", "reference", "now", "limit", ""}}
	for _, v := range all {
		result := "ok"
		if v.regressed() {
			result = "REGRESSED"
		}
		rows = append(rows, []string{v.figure, number(v.reference), number(v.measured), number(v.limit), result})
	}
	return writeRows(out, rows)
}
