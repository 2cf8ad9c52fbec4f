package hiplog

import (
	"math"
	"math/bits"
)

// Intervals are the times between what follows each other, in microseconds. The
// percentiles are within 1/64 (1.6 %) of the true ones and exact below 64 µs; the
// rest is exact.
type Intervals struct {
	// Count is one less than there were events that came in order.
	Count uint64  `json:"count"`
	Min   uint64  `json:"min_us"`
	Mean  float64 `json:"mean_us"`
	P50   uint64  `json:"p50_us"`
	P95   uint64  `json:"p95_us"`
	P99   uint64  `json:"p99_us"`
	Max   uint64  `json:"max_us"`
	// OutOfOrder events had a time before an earlier line's and are in no interval:
	// threads take the time before they write.
	OutOfOrder uint64 `json:"out_of_order"`
}

// histogram counts values in buckets as wide as 1/32 of their values. It grows to
// at most 15 KiB.
type histogram struct {
	buckets  []uint64
	n        uint64
	sum      float64
	min, max uint64
	// last is the time of the latest event, where started.
	last       uint64
	started    bool
	outOfOrder uint64
}

// event notes something at a time.
func (h *histogram) event(at uint64) {
	switch {
	case !h.started:
		h.started = true
	case at < h.last:
		h.outOfOrder++
		return
	default:
		h.add(at - h.last)
	}
	h.last = at
}

func (h *histogram) add(v uint64) {
	b := bucket(v)
	if b >= len(h.buckets) {
		h.buckets = append(h.buckets, make([]uint64, b+1-len(h.buckets))...)
	}
	h.buckets[b]++
	if h.n == 0 || v < h.min {
		h.min = v
	}
	h.max = max(h.max, v)
	h.n++
	h.sum += float64(v)
}

// bucket numbers 0 to 63 one by one, and from there 32 for each power of two.
func bucket(v uint64) int {
	shift := max(0, bits.Len64(v)-6)
	return 32*shift + int(v>>shift)
}

// middle is the value that stands for a bucket.
func middle(b int) uint64 {
	if b < 64 {
		return uint64(b)
	}
	shift := b/32 - 1
	return uint64(b-32*shift)<<shift + (1<<shift-1)/2
}

func (h *histogram) percentile(p float64) uint64 {
	rank := uint64(math.Ceil(p / 100 * float64(h.n)))
	if rank == h.n {
		return h.max
	}
	seen := uint64(0)
	for b, n := range h.buckets {
		if seen += n; n > 0 && seen >= rank {
			return min(max(middle(b), h.min), h.max)
		}
	}
	return h.max
}

func (h *histogram) intervals() Intervals {
	i := Intervals{Count: h.n, OutOfOrder: h.outOfOrder}
	if h.n > 0 {
		i.Min, i.Max, i.Mean = h.min, h.max, h.sum/float64(h.n)
		i.P50, i.P95, i.P99 = h.percentile(50), h.percentile(95), h.percentile(99)
	}
	return i
}
