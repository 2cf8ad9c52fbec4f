package sim

import (
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/internal/stat"
	"github.com/gpreempt/gpreempt/lab/evidence"
	"github.com/gpreempt/gpreempt/lab/scenario"
)

// Figures are what most comparisons need of one run. Times are in milliseconds; percentiles are
// by nearest rank over all requests that have a result.
type Figures struct {
	Requests int `json:"requests"`
	// Unfinished requests have no result.
	Unfinished int     `json:"unfinished"`
	Mean       float64 `json:"mean_ms"`
	P50        float64 `json:"p50_ms"`
	P90        float64 `json:"p90_ms"`
	P95        float64 `json:"p95_ms"`
	P99        float64 `json:"p99_ms"`
	Max        float64 `json:"max_ms"`
	// Waiting is the mean time until the first kernel began, and Service that from there to
	// the result.
	Waiting float64 `json:"waiting_ms"`
	Service float64 `json:"service_ms"`
	// TTFT and TPOT are of LLMs: their means and 99th percentiles.
	TTFT    float64 `json:"ttft_ms,omitempty"`
	TTFTP99 float64 `json:"ttft_p99_ms,omitempty"`
	TPOT    float64 `json:"tpot_ms,omitempty"`
	TPOTP99 float64 `json:"tpot_p99_ms,omitempty"`
	// Preemptions is the most that one request caused.
	Preemptions int `json:"preemptions"`
	Suspends    int `json:"suspends"`
	// Work is the offline work in GPU seconds, and Rate the requests and steps that were done
	// in a second.
	Work float64 `json:"work_gpu_seconds"`
	Rate float64 `json:"requests_and_steps_per_s"`
}

// Measure returns the figures of the repeats of a run: over all requests, and the means of
// Suspends, Work and Rate.
func Measure(repeats ...evidence.Repeat) Figures {
	var f Figures
	var total, ttft, tpot []float64
	var rate, waiting, service float64
	for _, r := range repeats {
		f.Requests += len(r.Requests)
		f.Suspends += len(r.Suspends)
		f.Work += r.Work
		done := 0
		for _, q := range r.Requests {
			if q.Failed != "" {
				f.Unfinished++
				continue
			}
			done++
			total = append(total, q.Total)
			waiting += q.Announce + q.Start
			service += q.Service
			if q.TTFT > 0 {
				ttft = append(ttft, q.TTFT)
			}
			if q.TPOT > 0 {
				tpot = append(tpot, q.TPOT)
			}
			f.Preemptions = max(f.Preemptions, q.Preemptions)
		}
		rate += (float64(done) + steps(r)) / r.Seconds
	}
	if n := len(total); n > 0 {
		f.Waiting, f.Service = waiting/float64(n), service/float64(n)
	}
	if n := len(repeats); n > 0 {
		f.Suspends /= n
		f.Work /= float64(n)
		f.Rate = rate / float64(n)
	}
	slices.Sort(total)
	slices.Sort(ttft)
	slices.Sort(tpot)
	f.Mean, f.P50, f.P90, f.P95, f.P99, f.Max = stat.Mean(total), stat.Quantile(total, 0.5), stat.Quantile(total, 0.9), stat.Quantile(total, 0.95), stat.Quantile(total, 0.99), stat.Quantile(total, 1)
	f.TTFT, f.TTFTP99, f.TPOT, f.TPOTP99 = stat.Mean(ttft), stat.Quantile(ttft, 0.99), stat.Mean(tpot), stat.Quantile(tpot, 0.99)
	return f
}

func steps(r evidence.Repeat) float64 {
	var names []string
	for name := range r.Steps {
		names = append(names, name)
	}
	slices.Sort(names) // sums of floats depend on the order
	sum := 0.0
	for _, name := range names {
		sum += r.Steps[name]
	}
	return sum
}

// measured runs a scheme and returns its figures.
func measured(s scenario.Scenario, scheme Scheme, o Options) (Figures, error) {
	r, err := Run(s, scheme, o)
	return Measure(r), err
}

func scaleTime(d time.Duration, factor float64) time.Duration {
	return time.Duration(float64(d) * factor)
}
