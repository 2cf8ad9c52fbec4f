package metrics

import (
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"google.golang.org/protobuf/testing/protocmp"
	"pgregory.net/rapid"

	"github.com/gpreempt/gpreempt/internal/events"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// TestHistogramsAreThoseOfTheClientLibrary has both count the same durations.
func TestHistogramsAreThoseOfTheClientLibrary(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		log := events.NewLog(1)
		bounds := slices.Sorted(maps.Keys(log.Totals(0).Wait.Coarse()))
		theirs := prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "h", Buckets: bounds, NativeHistogramBucketFactor: 1.1, NativeHistogramZeroThreshold: events.FineZero,
		})
		for range rapid.IntRange(0, 40).Draw(t, "durations") {
			d := time.Duration(rapid.Int64Range(0, int64(200*time.Hour)).Draw(t, "ns"))
			switch rapid.IntRange(0, 2).Draw(t, "size") {
			case 0:
				d %= 10 * time.Millisecond
			case 1: // where buckets end
				d = rapid.SampledFrom([]time.Duration{
					0, 1953125, 10 * time.Millisecond, 250 * time.Millisecond, 500 * time.Millisecond, time.Second, 2 * time.Second, 1024 * time.Second,
				}).Draw(t, "bound")
			}
			log.Answered(scheduler.Answer{Reason: scheduler.QuiesceDone, Waited: d}, events.Stages{})
			theirs.Observe(d.Seconds())
		}
		var want, got dto.Metric
		if err := theirs.Write(&want); err != nil {
			t.Fatal(err)
		}
		if err := newHistogram(stage.desc, &log.Totals(0).Wait, "wait").Write(&got); err != nil {
			t.Fatal(err)
		}
		// The sum is exact here and rounded at each step there; and the time is another.
		if want, got := want.Histogram.GetSampleSum(), got.Histogram.GetSampleSum(); got < want*(1-1e-9) || got > want*(1+1e-9) {
			t.Fatalf("the sum is %v, want %v", got, want)
		}
		if diff := cmp.Diff(want.Histogram, got.Histogram, protocmp.Transform(),
			protocmp.IgnoreFields(&dto.Histogram{}, "sample_sum", "created_timestamp")); diff != "" {
			t.Fatalf("histogram (-theirs +ours):\n%s", diff)
		}
	})
}
