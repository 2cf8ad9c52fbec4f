package events

import (
	"math"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// Upper bounds of the classic buckets, in seconds.
var (
	// From announcement to reply: a decision takes a microsecond, the longest wait is 10 s.
	callBounds = []float64{
		10e-6, 20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.2, 0.5, 1, 2, 5, 10,
	}
	// A lease lasts from one inference to as long as a client renews it.
	leaseBounds = []float64{1e-3, 5e-3, 10e-3, 50e-3, 0.1, 0.5, 1, 5, 10, 60, 600, 3600}
)

// histogram counts durations: as a native histogram of Prometheus's client, whose
// buckets are 9 % wide, and in classic buckets. The metrics and the statistics are made
// from it.
type histogram struct {
	prometheus.Histogram
	max time.Duration // guarded by Log.mu
}

// newHistogram returns the histogram of a metric for values of its labels.
func newHistogram(m *metric, bounds []float64, labels ...string) histogram {
	opts := prometheus.HistogramOpts{
		Name: m.name, Help: m.help, Buckets: bounds,
		NativeHistogramBucketFactor: 1.1, NativeHistogramZeroThreshold: time.Microsecond.Seconds(),
	}
	return histogram{Histogram: prometheus.NewHistogramVec(opts, m.labels).WithLabelValues(labels...).(prometheus.Histogram)}
}

// add counts a duration; below 0 it counts as 0.
func (h *histogram) add(d time.Duration) {
	d = max(d, 0)
	h.max = max(h.max, d)
	h.Observe(d.Seconds())
}

// Latency summarises durations.
type Latency struct {
	// Count is the number of durations ever.
	Count uint64
	// Mean is over all of them.
	Mean time.Duration
	// P50, P95 and P99 are nearest-rank percentiles over all of them, up to 9 % too
	// high. Max is the largest, exactly.
	P50, P95, P99, Max time.Duration
}

func (h *histogram) latency() Latency {
	var m dto.Metric
	_ = h.Write(&m) // the client's histogram returns no error
	counts, n, longest := m.GetHistogram(), m.GetHistogram().GetSampleCount(), h.max
	if n == 0 {
		return Latency{}
	}
	bounded := func(seconds float64) time.Duration {
		if ns := math.Round(seconds * float64(time.Second)); ns < float64(longest) {
			return time.Duration(ns)
		}
		return longest
	}
	return Latency{
		Count: n, Mean: bounded(counts.GetSampleSum() / float64(n)), Max: longest,
		P50: bounded(quantile(counts, 0.50)), P95: bounded(quantile(counts, 0.95)), P99: bounded(quantile(counts, 0.99)),
	}
}

// quantile returns the upper bound of the native bucket that has the nearest-rank
// quantile. The histogram must not be empty and must have no negative values.
func quantile(h *dto.Histogram, q float64) float64 {
	rank := max(1, uint64(math.Ceil(q*float64(h.GetSampleCount())-1e-9))) // 0.07 * 100 is more than 7
	seen := h.GetZeroCount()
	if rank <= seen {
		return 0
	}
	// Spans are runs of neighbouring buckets, and each delta is the difference of a
	// bucket's count to the one before. Bucket i ends at 2^(i / 2^schema).
	bucket, count, deltas := 0, int64(0), h.GetPositiveDelta()
	for _, span := range h.GetPositiveSpan() {
		bucket += int(span.GetOffset())
		for range span.GetLength() {
			count += deltas[0]
			deltas = deltas[1:]
			if seen += uint64(count); seen >= rank {
				return math.Exp2(math.Ldexp(float64(bucket), -int(h.GetSchema())))
			}
			bucket++
		}
	}
	return math.Inf(1)
}
