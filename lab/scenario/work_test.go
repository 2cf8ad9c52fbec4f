package scenario

import (
	"math"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func sum(all []time.Duration) (total time.Duration) {
	for _, d := range all {
		total += d
	}
	return total
}

// rank returns the value of nearest rank for q of sorted values, and its neighbours.
func rank(sorted []time.Duration, q float64) (below, at, above time.Duration) {
	i := int(math.Ceil(q*float64(len(sorted)))) - 1
	return sorted[max(i-1, 0)], sorted[i], sorted[min(i+1, len(sorted)-1)]
}

func TestKernelsOfAModelHaveItsMeanAndPercentiles(t *testing.T) {
	for _, name := range Models() {
		w := models[name]
		w.Total = 0 // as measured one by one
		got := w.Durations(1)
		slices.Sort(got)
		if mean := float64(sum(got)) / float64(len(got)); !near(mean, float64(w.Mean), 1e-6) {
			t.Errorf("%s: mean %v, want %v", name, time.Duration(mean), w.Mean)
		}
		for _, q := range []struct {
			q    float64
			want time.Duration
		}{{0.5, w.P50}, {0.9, w.P90}, {1, w.Max}} {
			below, at, above := rank(got, q.q)
			// The value of a fraction of a rank lies between two kernels.
			if tolerance := time.Microsecond; q.want < below-tolerance || q.want > above+tolerance {
				t.Errorf("%s: p%.0f is %v (between %v and %v), want %v", name, 100*q.q, at, below, above, q.want)
			}
		}
		w.Total = models[name].Total
		if got := sum(w.Durations(1)); got != w.Total {
			t.Errorf("%s: all kernels take %v, want %v", name, got, w.Total)
		}
	}
}

func TestDurationsSumUpToTheWorkAlone(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		duration := func(name string, least, most time.Duration) time.Duration {
			return time.Duration(rapid.Int64Range(int64(least), int64(most)).Draw(t, name))
		}
		w := Work{Kernels: rapid.IntRange(1, 300).Draw(t, "kernels"), Mean: duration("mean", 1000, 10*ms)}
		if rapid.Bool().Draw(t, "distribution") {
			w.P50 = duration("p50", 1000, 10*ms)
			w.P90 = duration("p90", w.P50, 20*ms)
			w.Max = duration("max", w.P90, 100*ms)
		}
		if rapid.Bool().Draw(t, "total") {
			w.Total = duration("total", time.Duration(w.Kernels), time.Second)
		}
		seed := rapid.Uint64().Draw(t, "seed")
		got := w.Durations(seed)
		if len(got) != w.Kernels || sum(got) != w.Alone() || slices.Min(got) < 0 {
			t.Fatalf("%d kernels of %v in all, the shortest %v; want %d of %v", len(got), sum(got), slices.Min(got), w.Kernels, w.Alone())
		}
		if diff := cmp.Diff(got, w.Durations(seed)); diff != "" {
			t.Fatal(diff)
		}
	})
}

func TestWithoutPercentilesAllKernelsHaveTheMean(t *testing.T) {
	got := Work{Kernels: 3, Mean: 2 * ms}.Durations(5)
	if diff := cmp.Diff([]time.Duration{2 * ms, 2 * ms, 2 * ms}, got); diff != "" {
		t.Error(diff)
	}
	if got := (Work{}).Durations(1); got != nil {
		t.Errorf("no work has %v", got)
	}
}

func TestSeedSetsTheOrderOfKernelsOnly(t *testing.T) {
	w := models["resnet152-mi50"]
	w.Total = 0
	a, b := w.Durations(1), w.Durations(2)
	if cmp.Equal(a, b) {
		t.Error("seeds 1 and 2 have the same order")
	}
	slices.Sort(a)
	slices.Sort(b)
	for i := range a {
		if d := a[i] - b[i]; d < -2 || d > 2 { // ns, of rounding
			t.Errorf("kernel %d takes %v with one seed and %v with another", i, a[i], b[i])
		}
	}
}
