package stat_test

import (
	"math"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/gpreempt/gpreempt/internal/stat"
	"github.com/gpreempt/gpreempt/internal/stat/histogram"
)

// quantile is the definition: the smallest sample that at least the share percent of
// all do not exceed.
func quantile(samples []uint64, percent int) uint64 {
	for _, candidate := range slices.Sorted(slices.Values(samples)) {
		within := 0
		for _, s := range samples {
			if s <= candidate {
				within++
			}
		}
		if within*100 >= percent*len(samples) {
			return candidate
		}
	}
	panic("no sample")
}

func TestQuantilesMatchTheirDefinition(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		samples := rapid.SliceOfN(rapid.Uint64Range(0, 200), 1, 120).Draw(t, "samples")
		percent := rapid.IntRange(0, 100).Draw(t, "percent")
		var h histogram.Histogram
		for _, s := range samples {
			h.Add(s)
		}
		want := quantile(samples, percent)
		q := float64(percent) / 100
		sorted := slices.Sorted(slices.Values(samples))
		if got := stat.Quantile(sorted, q); got != want {
			t.Fatalf("Quantile(%v, %v) = %d, want %d", sorted, q, got, want)
		}
		if got := h.Quantile(q); got != want { // exact below 256
			t.Fatalf("Histogram.Quantile(%v) of %v = %d, want %d", q, sorted, got, want)
		}
	})
}

func TestHistogramIsAtMostOnePartIn128TooHigh(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		samples := rapid.SliceOfN(rapid.Uint64(), 1, 50).Draw(t, "samples")
		percent := rapid.IntRange(1, 100).Draw(t, "percent")
		half := rapid.IntRange(0, len(samples)).Draw(t, "half")
		var h, rest histogram.Histogram
		for _, s := range samples[:half] {
			h.Add(s)
		}
		for _, s := range samples[half:] {
			rest.Add(s)
		}
		h.Merge(&rest)
		want := quantile(samples, percent)
		if got := h.Quantile(float64(percent) / 100); got < want || got-want > want/128 {
			t.Fatalf("%d %% of %v: %d, want %d", percent, samples, got, want)
		}
		if h.Count() != uint64(len(samples)) || h.Min() != slices.Min(samples) || h.Max() != slices.Max(samples) {
			t.Fatalf("%d values from %d to %d of %v", h.Count(), h.Min(), h.Max(), samples)
		}
		if got, want := h.Mean(), stat.Mean(samples); math.Abs(got-want) > want*1e-9 {
			t.Fatalf("mean %v, want %v", got, want)
		}
	})
}

func TestMedianMeanAndSpread(t *testing.T) {
	type figures struct {
		Median int
		Mean   float64
		Spread int
	}
	tests := []struct {
		samples []int
		want    figures
	}{
		{nil, figures{}},
		{[]int{3}, figures{3, 3, 0}},
		{[]int{9, 1, 2}, figures{2, 4, 8}},
		{[]int{8, 1, 4, 3}, figures{3, 4, 7}},
	}
	for _, test := range tests {
		got := figures{stat.Median(test.samples), stat.Mean(test.samples), stat.Spread(test.samples)}
		if diff := cmp.Diff(test.want, got); diff != "" {
			t.Errorf("%v (-want +got):\n%s", test.samples, diff)
		}
	}
}

func TestNoSamplesHaveZeroQuantiles(t *testing.T) {
	var h histogram.Histogram
	if got := [2]uint64{stat.Quantile[uint64](nil, 0.5), h.Quantile(0.5)}; got != [2]uint64{} {
		t.Errorf("quantiles of nothing: %v", got)
	}
}
