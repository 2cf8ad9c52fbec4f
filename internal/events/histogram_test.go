package events

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	dto "github.com/prometheus/client_model/go"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// One scrape serves a Prometheus that asks for classic buckets and one that asks for
// native buckets.
func TestHistogramsAreClassicAndNative(t *testing.T) {
	log := NewLog(1)
	for _, waited := range []time.Duration{0, 3 * time.Millisecond, 3 * time.Millisecond, time.Minute} {
		log.Answered(scheduler.Answer{Reason: scheduler.CauseDone, Waited: waited}, Stages{})
	}
	var got dto.Metric
	if err := log.counters.wait.Write(&got); err != nil {
		t.Fatal(err)
	}
	var bounds []float64
	for _, bucket := range got.Histogram.Bucket {
		if count := bucket.GetCumulativeCount(); count == 3 {
			bounds = append(bounds, bucket.GetUpperBound())
		}
	}
	if diff := cmp.Diff([]float64{5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.2, 0.5, 1, 2, 5, 10}, bounds); diff != "" {
		t.Errorf("classic buckets that have three of the four (-want +got):\n%s", diff)
	}
	want := &dto.Metric{
		Label: []*dto.LabelPair{{Name: new("stage"), Value: new("wait")}},
		Histogram: &dto.Histogram{
			SampleCount: new(uint64(4)), SampleSum: new(60.006), Schema: new(int32(3)), ZeroThreshold: new(1e-6), ZeroCount: new(uint64(1)),
			// 2^(-67/8) s is 3.01 ms, and 2^(48/8) s is 64 s.
			PositiveSpan:  []*dto.BucketSpan{{Offset: new(int32(-67)), Length: new(uint32(1))}, {Offset: new(int32(114)), Length: new(uint32(1))}},
			PositiveDelta: []int64{2, -1},
		},
	}
	if diff := cmp.Diff(want, &got, protocmp.Transform(), protocmp.IgnoreFields(&dto.Histogram{}, "bucket", "created_timestamp")); diff != "" {
		t.Errorf("metric (-want +got):\n%s", diff)
	}
}
