package main

import (
	"strings"
	"testing"
)

// asMeasured returns the guarded ratios times a factor, with some repeats made worse as by
// a busy machine.
func asMeasured(factor float64) *report {
	r := new(report)
	for _, g := range guarded {
		at := g.reference * factor
		r.Figures = append(r.Figures, newFigure("x", g.figure, "x", []float64{9 * at, 0.95 * at, at, 1.4 * at, 2 * at, at, 1.3 * at, 0.9 * at, 1.6 * at}))
	}
	return r
}

func TestGuardFindsARegressionByHalfAndNoNoise(t *testing.T) {
	if got := asMeasured(1).compare(); regressed(got) != "" || len(got) != len(guarded) {
		t.Errorf("without a change: %+v", got)
	}
	for i, g := range guarded {
		r := asMeasured(1)
		slower := asMeasured(regression)
		r.Figures[i] = slower.Figures[i]
		for _, v := range r.compare() {
			if v.regressed() != (v.figure == g.figure) {
				t.Errorf("%s has grown by half: %+v", g.figure, v)
			}
		}
	}
}

func TestSecondTryClearsWhatWasNoise(t *testing.T) {
	bad, good := asMeasured(regression).compare(), asMeasured(1).compare()
	if regressed(better(bad, good))+regressed(better(good, bad)) != "" {
		t.Error("a good second run does not clear the first")
	}
	if regressed(better(bad, bad)) == "" {
		t.Error("two bad runs are not a regression")
	}
	// A ratio that the second run did not measure stays.
	if regressed(better(bad, good[1:])) != bad[0].section {
		t.Error("a ratio missing in the second run was dropped")
	}
}

func TestVerdictsNameWhatHasRegressed(t *testing.T) {
	var out strings.Builder
	if err := writeVerdicts(&out, asMeasured(regression).compare()); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(out.String(), "| REGRESSED |\n"); n != len(guarded) {
		t.Errorf("%d of %d reported as regressed:\n%s", n, len(guarded), &out)
	}
}
