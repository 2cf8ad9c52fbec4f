package scenario

import (
	"math"
	"math/rand/v2"
	"time"
)

// Alone returns how long the work takes when it is alone on the GPU.
func (w Work) Alone() time.Duration {
	if w.Total > 0 {
		return w.Total
	}
	return time.Duration(w.Kernels) * w.Mean
}

// Durations returns the durations of the kernels when they are alone on the GPU. Their sum is
// Alone. With P50, P90 and Max, they are the quantiles of the distribution below, the same for
// every seed; the seed sets their order.
//
// The distribution's inverse is monotone and goes through P50, P90 and Max. Between two of these
// it is lo * (hi/lo)^(v^k), where v is the part of the way from one to the other and the first
// segment begins at P50*P50/P90. k is the same in all segments and chosen so that the mean is
// Mean. Where no k reaches it, the durations are scaled.
func (w Work) Durations(seed uint64) []time.Duration {
	n := w.Kernels
	if n <= 0 {
		return nil
	}
	relative := make([]float64, n)
	if w.P50 == 0 || n == 1 {
		for i := range relative {
			relative[i] = 1
		}
	} else {
		w.quantiles(relative, w.curve(n))
	}
	//nolint:gosec // G404: the same seed must return the same durations
	rand.New(rand.NewPCG(seed, kernelStream)).Shuffle(n, func(i, j int) { relative[i], relative[j] = relative[j], relative[i] })
	return scaled(relative, w.Alone())
}

// quantiles sets x to the values of the inverse at 1/n, 2/n, ..., 1, in ns.
func (w Work) quantiles(x []float64, k float64) {
	p50, p90, most := float64(w.P50), float64(w.P90), float64(w.Max)
	for i := range x {
		u := float64(i+1) / float64(len(x))
		lo, hi, v := p90, most, (u-0.9)/0.1
		switch {
		case u <= 0.5:
			lo, hi, v = p50*p50/p90, p50, u/0.5
		case u <= 0.9:
			lo, hi, v = p50, p90, (u-0.5)/0.4
		}
		x[i] = lo * math.Pow(hi/lo, math.Pow(v, k))
	}
}

// curve returns the k with which the mean of n quantiles is nearest to Mean.
func (w Work) curve(n int) float64 {
	x := make([]float64, n)
	least, most := -6.0, 6.0 // of log2 k; the mean falls as k grows
	for range 40 {
		middle := (least + most) / 2
		w.quantiles(x, math.Exp2(middle))
		var sum float64
		for _, v := range x {
			sum += v
		}
		if sum > float64(w.Mean)*float64(n) {
			least = middle
		} else {
			most = middle
		}
	}
	return math.Exp2((least + most) / 2)
}

// scaled returns durations in the proportions of relative that sum up to total.
func scaled(relative []float64, total time.Duration) []time.Duration {
	var sum float64
	for _, v := range relative {
		sum += v
	}
	all := make([]time.Duration, len(relative))
	var run float64
	var before time.Duration
	for i, v := range relative {
		run += v
		end := time.Duration(math.Round(run / sum * float64(total)))
		all[i] = end - before
		before = end
	}
	all[len(all)-1] += total - before // rounding of the sum
	return all
}
