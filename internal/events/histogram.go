package events

import (
	"math"
	"math/bits"
	"slices"
	"time"
)

// HistogramSchema is the resolution of Histogram.Fine, as Prometheus numbers it: 8
// buckets to each factor of 2, so that a quantile is off by 4.5 % at most.
const HistogramSchema = 3

// The fine buckets reach from 2^-20 s, a microsecond, to 2^20 s, 12 days. What is
// shorter counts as zero, and what is longer is in the last.
const (
	finePerOctave = 1 << HistogramSchema
	fineLowest    = -20
	fineHighest   = 20
	fineBuckets   = (fineHighest - fineLowest) * finePerOctave
)

// FineZero is the longest duration that counts as zero in the fine buckets, in seconds.
const FineZero = 1.0 / (1 << -fineLowest)

// fineBounds are the upper bounds of the fine buckets from 1/2 to 1.
var fineBounds = func() (bounds [finePerOctave]float64) {
	for i := range bounds {
		bounds[i] = math.Pow(2, float64(i+1)/finePerOctave-1)
	}
	return bounds
}()

const coarseMax = 20

// Upper bounds of the coarse buckets, at most coarseMax.
var (
	// What happens between an announcement and its answer: a microsecond is one
	// decision, 10 s the longest wait there is.
	callBounds = []time.Duration{
		10 * time.Microsecond, 20 * time.Microsecond, 50 * time.Microsecond,
		100 * time.Microsecond, 200 * time.Microsecond, 500 * time.Microsecond,
		1 * time.Millisecond, 2 * time.Millisecond, 5 * time.Millisecond,
		10 * time.Millisecond, 20 * time.Millisecond, 50 * time.Millisecond,
		100 * time.Millisecond, 200 * time.Millisecond, 500 * time.Millisecond,
		1 * time.Second, 2 * time.Second, 5 * time.Second, 10 * time.Second,
	}
	// Leases live from one inference to as long as a client renews them.
	leaseBounds = []time.Duration{
		1 * time.Millisecond, 5 * time.Millisecond, 10 * time.Millisecond, 50 * time.Millisecond,
		100 * time.Millisecond, 500 * time.Millisecond, 1 * time.Second, 5 * time.Second, 10 * time.Second,
		time.Minute, 10 * time.Minute, time.Hour,
	}
)

// Histogram counts durations by how long they were: in few buckets between round
// numbers, and in many of one relative width. It is a value: a copy is a snapshot.
// The zero value is an empty histogram.
type Histogram struct {
	count uint64
	// sumHigh and sumLow are the 128-bit sum in nanoseconds: 64 bits would
	// overflow after 292 years of lease time, a few months at 1000 leases.
	sumHigh, sumLow uint64
	// bounds are those of coarse; what is above the last is in none.
	bounds []time.Duration
	coarse [coarseMax]uint64
	zero   uint64
	fine   [fineBuckets]uint64
}

// add counts a duration, which is not below 0. It allocates nothing.
func (h *Histogram) add(d time.Duration) {
	h.count++
	var carry uint64
	h.sumLow, carry = bits.Add64(h.sumLow, uint64(d), 0)
	h.sumHigh += carry
	if at, _ := slices.BinarySearch(h.bounds, d); at < len(h.bounds) {
		h.coarse[at]++
	}
	if at := fineBucket(d.Seconds()); at < 0 {
		h.zero++
	} else {
		h.fine[at]++
	}
}

// fineBucket returns the index of the fine bucket, below 0 for zero.
func fineBucket(seconds float64) int {
	if seconds <= FineZero {
		return -1
	}
	part, octave := math.Frexp(seconds) // part is from 1/2 to below 1
	if part == 0.5 {
		part, octave = 1, octave-1 // a bucket has its upper bound
	}
	within := 0
	for fineBounds[within] < part {
		within++
	}
	return min((octave-1-fineLowest)*finePerOctave+within, fineBuckets-1)
}

// Count is the number of durations.
func (h *Histogram) Count() uint64 { return h.count }

// Sum is all of them together, in seconds.
func (h *Histogram) Sum() float64 {
	return (float64(h.sumHigh)*(1<<64) + float64(h.sumLow)) / float64(time.Second)
}

// mean is over all of them; 0 when there is none.
func (h *Histogram) mean() time.Duration {
	if h.count == 0 {
		return 0
	}
	mean, _ := bits.Div64(h.sumHigh, h.sumLow, h.count)
	return time.Duration(mean)
}

// Coarse returns how many durations were at most as long as each bound, in seconds.
func (h *Histogram) Coarse() map[float64]uint64 {
	all := make(map[float64]uint64, len(h.bounds))
	var below uint64
	for i, bound := range h.bounds {
		below += h.coarse[i]
		all[bound.Seconds()] = below
	}
	return all
}

// Fine returns the number of durations of at most FineZero, and the buckets of
// HistogramSchema that are not empty: bucket i ends at 2^(i/8) s.
func (h *Histogram) Fine() (zero uint64, buckets map[int]int64) {
	buckets = map[int]int64{}
	for i, n := range h.fine {
		if n > 0 {
			buckets[i+1+fineLowest*finePerOctave] = int64(n)
		}
	}
	return h.zero, buckets
}
