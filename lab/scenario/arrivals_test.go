package scenario

import (
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// gapsOf returns the times between arrivals, in seconds.
func gapsOf(all []Arrival) []float64 {
	var gaps []float64
	for i := 1; i < len(all); i++ {
		gaps = append(gaps, (all[i].At - all[i-1].At).Seconds())
	}
	return gaps
}

func meanAndCV(gaps []float64) (mean, cv float64) {
	for _, g := range gaps {
		mean += g / float64(len(gaps))
	}
	var square float64
	for _, g := range gaps {
		square += (g - mean) * (g - mean) / float64(len(gaps))
	}
	return mean, math.Sqrt(square) / mean
}

func near(got, want, share float64) bool { return math.Abs(got-want) <= share*want }

func TestGapsHaveTheMeanAndTheCVOfTheirKind(t *testing.T) {
	for _, c := range []struct {
		a  Arrivals
		cv float64
	}{
		{Arrivals{Kind: Constant, Rate: 20}, 0},
		{Arrivals{Kind: Poisson, Rate: 20}, 1},
		{Arrivals{Kind: Gamma, Rate: 20, CV: 0.12}, 0.12},
		{Arrivals{Kind: Gamma, Rate: 20, CV: 0.5}, 0.5},
		{Arrivals{Kind: Gamma, Rate: 20, CV: 1}, 1},
		{Arrivals{Kind: Gamma, Rate: 20, CV: 2}, 2},
		{Arrivals{Kind: Gamma, Rate: 20, CV: 4}, 4},
		// The statistics of vgg in DISB REAL: the cv of the pauses is computed from that of all gaps.
		{Arrivals{Kind: Bursts, Rate: 19.15, CV: 0.29, Burst: 4, BurstGap: 7 * ms}, 1.59},
	} {
		for seed := range uint64(3) {
			all := c.a.Times(seed, 10_000*time.Second)
			mean, cv := meanAndCV(gapsOf(all))
			if !near(mean, 1/c.a.Rate, 0.03) || math.Abs(cv-c.cv) > 0.05*c.cv+1e-6 {
				t.Errorf("%+v, seed %d: mean gap %.5f, want %.5f; cv %.3f, want %.3f", c.a, seed, mean, 1/c.a.Rate, cv, c.cv)
			}
			if n, want := float64(len(all)), c.a.Rate*10_000; !near(n, want, 0.03) {
				t.Errorf("%+v, seed %d: %v requests, want about %v", c.a, seed, n, want)
			}
		}
	}
}

func TestArrivalsAreInOrderAndTheSameForOneSeed(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a := Arrivals{
			Kind: rapid.SampledFrom([]ArrivalKind{Constant, Poisson, Gamma, Bursts}).Draw(t, "kind"),
			Rate: rapid.Float64Range(0.5, 2000).Draw(t, "rate"),
			CV:   rapid.Float64Range(0.01, 8).Draw(t, "cv"), Burst: rapid.IntRange(1, 8).Draw(t, "burst"),
		}
		a.BurstGap = time.Duration(rapid.Float64Range(0, 0.9).Draw(t, "gap") / a.Rate * float64(time.Second))
		seed := rapid.Uint64().Draw(t, "seed")
		d := time.Duration(rapid.Int64Range(int64(ms), int64(2*time.Second)).Draw(t, "duration"))
		all := a.Times(seed, d)
		if !slices.IsSortedFunc(all, func(x, y Arrival) int { return int(x.At - y.At) }) {
			t.Fatal("not in order")
		}
		if n := len(all); n > 0 && (all[0].At < 0 || all[n-1].At > d) {
			t.Fatalf("%v to %v, outside 0 to %v", all[0].At, all[n-1].At, d)
		}
		if diff := cmp.Diff(all, a.Times(seed, d)); diff != "" {
			t.Fatal(diff)
		}
	})
}

func TestSeedsHaveDifferentArrivals(t *testing.T) {
	for _, a := range []Arrivals{{Kind: Constant, Rate: 10}, {Kind: Poisson, Rate: 10}} {
		if cmp.Equal(a.Times(1, time.Second), a.Times(2, time.Second)) {
			t.Errorf("%+v: seeds 1 and 2 have the same arrivals", a)
		}
	}
}

func TestRequestsOfABurstAreItsGapApart(t *testing.T) {
	a := Arrivals{Kind: Bursts, Rate: 10, CV: 1, Burst: 3, BurstGap: 5 * ms}
	for i, gap := range gapsOf(a.Times(7, time.Minute)) {
		if i%3 != 2 && !near(gap, 0.005, 1e-6) {
			t.Errorf("gap %d is %v s", i, gap)
		}
	}
}

func TestClosedArrivalsAreOfTheSimulator(t *testing.T) {
	if all := (Arrivals{Kind: Closed, Clients: 3}).Times(1, time.Hour); all != nil {
		t.Errorf("%d arrivals", len(all))
	}
}

func ExampleArrivals_Times() {
	a := Arrivals{Kind: Trace, Speed: 2, Points: []Arrival{{At: 0}, {At: time.Second}, {At: 3 * time.Second}}}
	for _, r := range a.Times(1, time.Second) {
		fmt.Println(r.At)
	}
	// Output:
	// 0s
	// 500ms
}
