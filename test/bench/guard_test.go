package main

import (
	"strings"
	"testing"
)

// asMeasured has the guarded ratios times a factor, with repeats that a busy machine has
// made worse.
func asMeasured(factor float64) *report {
	r := new(report)
	for _, g := range guarded {
		at := g.reference * factor
		r.Figures = append(r.Figures, newFigure("x", g.figure, "x", []float64{9 * at, 0.95 * at, at, 1.4 * at, 2 * at, at, 1.3 * at, 0.9 * at, 1.6 * at}))
	}
	return r
}

func TestGuardFindsARegressionByHalfAndNoNoise(t *testing.T) {
	if got := asMeasured(1).judge(); regressed(got) != "" || len(got) != len(guarded) {
		t.Errorf("nothing has changed, and it says %+v", got)
	}
	for i, g := range guarded {
		r := asMeasured(1)
		slower := asMeasured(regression)
		r.Figures[i] = slower.Figures[i]
		for _, v := range r.judge() {
			if v.regressed() != (v.figure == g.figure) {
				t.Errorf("%s has grown by half, and it says %+v", g.figure, v)
			}
		}
	}
}

func TestSecondTryClearsWhatWasNoise(t *testing.T) {
	bad, good := asMeasured(regression).judge(), asMeasured(1).judge()
	if regressed(again(bad, good))+regressed(again(good, bad)) != "" {
		t.Error("one run of two is good, and it does not count")
	}
	if regressed(again(bad, bad)) == "" {
		t.Error("both runs are bad, and it finds nothing")
	}
	// What the second run did not measure stays.
	if regressed(again(bad, good[1:])) != bad[0].section {
		t.Error("a ratio the second run does not have is forgotten")
	}
}

func TestVerdictsNameWhatHasRegressed(t *testing.T) {
	var out strings.Builder
	if err := writeVerdicts(&out, asMeasured(regression).judge()); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(out.String(), "REGRESSED\n"); n != len(guarded) {
		t.Errorf("%d of %d are said to have regressed:\n%s", n, len(guarded), &out)
	}
}
