package evidence

import (
	"cmp"
	"math"
	"slices"

	"github.com/gpreempt/gpreempt/internal/stat"
)

// Distribution summarizes samples in milliseconds. Percentiles are by nearest rank over all
// repeats.
type Distribution struct {
	N    int     `json:"n"`
	Mean float64 `json:"mean"`
	// Std is the standard deviation of a sample, 0 for fewer than two.
	Std float64 `json:"std"`
	P50 float64 `json:"p50"`
	P95 float64 `json:"p95"`
	P99 float64 `json:"p99"`
	Max float64 `json:"max"`
	// SpreadP50 and SpreadP99 are the differences between the largest and the smallest of the
	// repeats' own percentiles; nothing is known of them with Repeats below 2.
	SpreadP50 float64 `json:"spread_p50"`
	SpreadP99 float64 `json:"spread_p99"`
}

// Summary summarizes the repeats of an arm.
type Summary struct {
	Arm     string  `json:"arm"`
	Kind    ArmKind `json:"kind"`
	Repeats int     `json:"repeats"`
	Seconds float64 `json:"seconds"`
	// Latency is of the requests that have a result; Announce, Start and Service are its parts,
	// and TTFT and TPOT those of an LLM's requests.
	Latency  Distribution `json:"latency"`
	Announce Distribution `json:"announce"`
	Start    Distribution `json:"start"`
	Service  Distribution `json:"service"`
	TTFT     Distribution `json:"ttft"`
	TPOT     Distribution `json:"tpot"`
	Suspends Distribution `json:"suspends"`
	Resumes  Distribution `json:"resumes"`
	Failed   int          `json:"failed"`
	// Preemptions are the suspensions that the requests caused, where that is known.
	Preemptions int `json:"preemptions"`
	Unprotected int `json:"unprotected"`
	NotQuiet    int `json:"not_quiet"`
	// WorkRate is the offline work done in a second, and WorkSpread the difference between the
	// largest and the smallest rate of a repeat. WorkRelative is the rate as a part of that of
	// offline work alone, 0 when that is not known.
	WorkUnit     string  `json:"work_unit,omitempty"`
	WorkRate     float64 `json:"work_rate"`
	WorkSpread   float64 `json:"work_spread"`
	WorkRelative float64 `json:"work_relative"`
	Lost         uint64  `json:"lost"`
	Repeated     uint64  `json:"repeated"`
	// Readings are the means of the values of samples, by name.
	Readings map[string]float64 `json:"readings,omitempty"`
}

// Summarize returns a summary of each arm, in the order of the run.
func Summarize(run *Run) []Summary {
	alone := 0.0
	if i := run.first(OfflineAlone); i >= 0 {
		alone = workRate(run.Arms[i].Repeats)
	}
	all := make([]Summary, len(run.Arms))
	for i := range run.Arms {
		all[i] = summarize(&run.Arms[i], alone)
	}
	return all
}

// first returns the index of the first arm of a kind, or -1.
func (run *Run) first(kind ArmKind) int {
	return slices.IndexFunc(run.Arms, func(a Arm) bool { return a.Kind == kind })
}

func summarize(a *Arm, alone float64) Summary {
	s := Summary{
		Arm: a.Name, Kind: a.Kind, Repeats: len(a.Repeats),
		Latency: distribution(a.Repeats, latencies), Announce: distribution(a.Repeats, part(func(q *Request) float64 { return q.Announce })),
		Start:   distribution(a.Repeats, part(func(q *Request) float64 { return q.Start })),
		Service: distribution(a.Repeats, part(func(q *Request) float64 { return q.Service })),
		TTFT:    distribution(a.Repeats, part(func(q *Request) float64 { return q.TTFT })),
		TPOT:    distribution(a.Repeats, part(func(q *Request) float64 { return q.TPOT })), Suspends: distribution(a.Repeats, suspends),
		Resumes: distribution(a.Repeats, resumes), WorkRate: workRate(a.Repeats),
	}
	var rates []float64
	sums, counts := map[string]float64{}, map[string]float64{}
	for i := range a.Repeats {
		r := &a.Repeats[i]
		s.Seconds += r.Seconds
		s.Unprotected += r.Unprotected
		s.NotQuiet += r.NotQuiet
		s.Lost += r.Lost
		s.Repeated += r.Repeated
		if r.WorkUnit != "" {
			s.WorkUnit = r.WorkUnit
		}
		for _, q := range r.Requests {
			s.Preemptions += q.Preemptions
			if q.Failed != "" {
				s.Failed++
			}
		}
		rates = append(rates, workRate(a.Repeats[i:i+1]))
		for _, sample := range r.Samples {
			for name, v := range sample.Values {
				sums[name] += v
				counts[name]++
			}
		}
	}
	s.WorkSpread = stat.Spread(rates)
	if alone > 0 {
		s.WorkRelative = s.WorkRate / alone
	}
	for name, sum := range sums {
		sums[name] = sum / counts[name]
	}
	if len(sums) > 0 {
		s.Readings = sums
	}
	return s
}

// series is what a distribution is of: the samples of a repeat.
type series func(r *Repeat) []float64

func latencies(r *Repeat) []float64 {
	return part(func(q *Request) float64 { return q.Total })(r)
}

// part returns a part of the latency of each request that has a result. A part that is 0 in all
// of them was not measured.
func part(of func(q *Request) float64) series {
	return func(r *Repeat) []float64 {
		var values []float64
		measured := false
		for i := range r.Requests {
			if q := &r.Requests[i]; q.Failed == "" {
				values = append(values, of(q))
				measured = measured || of(q) != 0
			}
		}
		if !measured {
			return nil
		}
		return values
	}
}

func suspends(r *Repeat) []float64 { return durations(r.Suspends) }
func resumes(r *Repeat) []float64  { return durations(r.Resumes) }

func durations(list []Timed) []float64 {
	values := make([]float64, len(list))
	for i, d := range list {
		values[i] = d.MS
	}
	return values
}

// pool returns the sorted samples of all repeats.
func pool(repeats []Repeat, of series) (all []float64) {
	for i := range repeats {
		all = append(all, of(&repeats[i])...)
	}
	slices.Sort(all)
	return all
}

// Distribute returns the distribution of sorted values, without a spread.
func Distribute(sorted []float64) Distribution {
	if len(sorted) == 0 {
		return Distribution{}
	}
	return Distribution{
		N: len(sorted), Mean: stat.Mean(sorted), Std: deviation(sorted), P50: stat.Quantile(sorted, 0.5), P95: stat.Quantile(sorted, 0.95),
		P99: stat.Quantile(sorted, 0.99), Max: sorted[len(sorted)-1],
	}
}

func distribution(repeats []Repeat, of series) Distribution {
	d := Distribute(pool(repeats, of))
	var p50, p99 []float64
	for i := range repeats {
		if own := pool(repeats[i:i+1], of); len(own) > 0 {
			p50, p99 = append(p50, stat.Quantile(own, 0.5)), append(p99, stat.Quantile(own, 0.99))
		}
	}
	d.SpreadP50, d.SpreadP99 = stat.Spread(p50), stat.Spread(p99)
	return d
}

// deviation returns the standard deviation of a sample.
func deviation(values []float64) float64 {
	if len(values) < 2 {
		return 0
	}
	mean, sum := stat.Mean(values), 0.0
	for _, v := range values {
		sum += (v - mean) * (v - mean)
	}
	return math.Sqrt(sum / float64(len(values)-1))
}

// workRate returns the offline work done in a second, 0 without any.
func workRate(repeats []Repeat) float64 {
	work, seconds := 0.0, 0.0
	for _, r := range repeats {
		work += r.Work
		seconds += r.Seconds
	}
	if seconds <= 0 {
		return 0
	}
	return work / seconds
}

// busyShare returns the share of time in which at least one request was in progress.
func busyShare(repeats []Repeat) float64 {
	busy, seconds := 0.0, 0.0
	for _, r := range repeats {
		seconds += r.Seconds
		order := slices.Clone(r.Requests)
		slices.SortFunc(order, func(a, b Request) int { return cmp.Compare(a.At, b.At) })
		end := 0.0
		for _, q := range order {
			until := q.At + q.Total
			busy += max(0, until-max(q.At, end)) / 1000
			end = max(end, until)
		}
	}
	if seconds <= 0 {
		return 0
	}
	return min(1, busy/seconds)
}
