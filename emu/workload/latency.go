package workload

import (
	"math/bits"
	"time"
)

// latencies is a histogram of durations: 16 steps to each power of two of nanoseconds.
type latencies struct {
	steps [61 * 16]uint64
	n     uint64
}

func (l *latencies) add(d time.Duration) {
	l.steps[step(uint64(max(d, 0)))]++
	l.n++
}

func (l *latencies) merge(o *latencies) {
	for i, n := range o.steps {
		l.steps[i] += n
	}
	l.n += o.n
}

// step returns the step of a duration. Below 16 ns each duration has its own.
func step(ns uint64) int {
	shift := max(bits.Len64(ns)-5, 0)
	return shift<<4 + int(ns>>shift)
}

// quantile returns the upper end of the step that holds the q-th part of all durations,
// in microseconds.
func (l *latencies) quantile(q float64) float64 {
	rest := uint64(q * float64(l.n))
	for i, n := range l.steps {
		if n > rest {
			shift := max(i>>4-1, 0)
			return float64(uint64(i-shift<<4+1)<<shift) / 1000
		}
		rest -= n
	}
	return 0
}
