// Package histogram counts values where there are too many samples to keep.
package histogram

import (
	"math/bits"

	"github.com/gpreempt/gpreempt/internal/stat"
)

// Values below linear have a bucket each; above, each power of two has perDouble buckets.
const (
	linear    = 256
	perDouble = linear / 2
)

// Histogram counts values in buckets whose width is at most 1/128 of the value. It
// grows with the largest value, to at most 58 KiB. The zero value is empty. It is not
// safe for concurrent use.
type Histogram struct {
	buckets  []uint64
	count    uint64
	sum      float64
	min, max uint64
}

// Add counts a value.
func (h *Histogram) Add(v uint64) {
	i := bucketOf(v)
	if i >= len(h.buckets) {
		h.buckets = append(h.buckets, make([]uint64, i+1-len(h.buckets))...)
	}
	h.buckets[i]++
	if h.count == 0 || v < h.min {
		h.min = v
	}
	h.max = max(h.max, v)
	h.count++
	h.sum += float64(v)
}

// Merge counts all values of o.
func (h *Histogram) Merge(o *Histogram) {
	if o.count == 0 {
		return
	}
	if missing := len(o.buckets) - len(h.buckets); missing > 0 {
		h.buckets = append(h.buckets, make([]uint64, missing)...)
	}
	for i, n := range o.buckets {
		h.buckets[i] += n
	}
	if h.count == 0 || o.min < h.min {
		h.min = o.min
	}
	h.max = max(h.max, o.max)
	h.count += o.count
	h.sum += o.sum
}

// Count returns the number of values.
func (h *Histogram) Count() uint64 { return h.count }

// Sum returns the sum of all values.
func (h *Histogram) Sum() float64 { return h.sum }

// Mean returns the mean of all values, 0 without values.
func (h *Histogram) Mean() float64 {
	if h.count == 0 {
		return 0
	}
	return h.sum / float64(h.count)
}

// Min returns the smallest value, 0 without values.
func (h *Histogram) Min() uint64 { return h.min }

// Max returns the largest value, 0 without values.
func (h *Histogram) Max() uint64 { return h.max }

// Quantile returns the nearest-rank quantile (stat.Quantile), at most 0.8 %
// too high and exact below 256. It returns 0 when there are no values.
func (h *Histogram) Quantile(q float64) uint64 {
	if h.count == 0 {
		return 0
	}
	rank := stat.Rank(h.count, q)
	for i, n := range h.buckets {
		if n >= rank {
			return min(max(topOf(i), h.min), h.max)
		}
		rank -= n
	}
	return h.max
}

func bucketOf(v uint64) int {
	if v < linear {
		return int(v)
	}
	shift := bits.Len64(v) - bits.Len64(linear-1)
	return shift*perDouble + int(v>>shift)
}

// topOf returns the largest value of a bucket.
func topOf(bucket int) uint64 {
	if bucket < linear {
		return uint64(bucket)
	}
	shift := bucket/perDouble - 1
	return uint64(bucket-shift*perDouble+1)<<shift - 1
}
