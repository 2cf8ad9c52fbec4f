// Package stat computes quantiles and means of samples in memory.
package stat

import (
	"math"
	"slices"
)

// Number is what a sample can be.
type Number interface {
	~int | ~int32 | ~int64 | ~uint32 | ~uint64 | ~float32 | ~float64
}

// Quantile returns the nearest-rank quantile of the samples, which must be sorted: the
// smallest sample that at least the share q of all samples do not exceed, 0 <= q <= 1.
// It returns 0 when there are no samples.
func Quantile[T Number](sorted []T, q float64) T {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[Rank(uint64(len(sorted)), q)-1]
}

// Rank returns which of n sorted samples is their nearest-rank quantile, from 1 to n;
// n must not be 0.
func Rank(n uint64, q float64) uint64 {
	// 0.07 * 100 is slightly more than 7: without the correction the rank would be 8.
	rank := math.Ceil(q*float64(n) - 1e-9)
	return min(max(uint64(max(rank, 0)), 1), n)
}

// Median returns the middle sample, or the mean of the two in the middle when their
// number is even. The samples need not be sorted. It returns 0 without samples.
func Median[T Number](samples []T) T {
	if len(samples) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(samples))
	low, high := sorted[(len(sorted)-1)/2], sorted[len(sorted)/2]
	return low + (high-low)/2
}

// Mean returns the arithmetic mean, 0 when there are no samples.
func Mean[T Number](samples []T) float64 {
	if len(samples) == 0 {
		return 0
	}
	sum := 0.0
	for _, s := range samples {
		sum += float64(s)
	}
	return sum / float64(len(samples))
}

// Spread returns the difference of the largest and the smallest sample, 0 without
// samples.
func Spread[T Number](samples []T) T {
	if len(samples) == 0 {
		return 0
	}
	return slices.Max(samples) - slices.Min(samples)
}
