package main

import (
	"context"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestSummaryHasMeanAndPercentiles(t *testing.T) {
	var samples []time.Duration
	for i := range 101 {
		samples = append(samples, time.Duration(100-i)) // 100 to 0, not in order
	}
	want := summary{N: 101, Mean: 50, P50: 50, P99: 99}
	if diff := cmp.Diff(want, summarize(samples)); diff != "" {
		t.Error(diff)
	}
	want = summary{N: 1, Mean: 7, P50: 7, P99: 7}
	if diff := cmp.Diff(want, summarize([]time.Duration{7})); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(summary{}, summarize(nil)); diff != "" {
		t.Error(diff)
	}
}

func TestRatiosAreOfTheSameRepeat(t *testing.T) {
	over, under := new(series), new(series)
	for _, repeat := range [][2]time.Duration{{30, 20}, {100, 50}} {
		over.samples, under.samples = []time.Duration{repeat[0]}, []time.Duration{repeat[1]}
		over.endRepeat()
		under.endRepeat()
	}
	if diff := cmp.Diff([]float64{1.5, 2}, ratios(p50, over, under, 1)); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]float64{0.75, 1}, ratios(p99, over, under, 2)); diff != "" {
		t.Errorf("against twice the lower side:\n%s", diff)
	}
	if diff := cmp.Diff([]float64{0.03, 0.1}, micros(p50, over)); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]float64{30. / 20, 100. / 25}, quotients(each(p99, over), []float64{20, 25})); diff != "" {
		t.Error(diff)
	}
}

func TestFirstCallOfABlockIsNotCounted(t *testing.T) {
	a, b := &series{Name: "a"}, &series{Name: "b"}
	var order string
	side := func(s *series) turn {
		return func(context.Context) error {
			order += s.Name
			s.samples = append(s.samples, time.Duration(len(order)))
			return nil
		}
	}
	if err := interleave(t.Context(), 2, 2, rhythm{block: 2}, []*series{a, b}, side(a), side(b)); err != nil {
		t.Fatal(err)
	}
	const repeat = "aaabbb" + "bbbaaa" // who begins changes
	if order != repeat+repeat {
		t.Errorf("the order was %s, want %s twice", order, repeat)
	}
	// Of a, the calls 2, 3, 11 and 12; then 14, 15, 23 and 24.
	want := []summary{{N: 4, Mean: 7, P50: 3, P99: 12}, {N: 4, Mean: 19, P50: 15, P99: 24}}
	if diff := cmp.Diff(want, a.Repeats); diff != "" {
		t.Error(diff)
	}
}
