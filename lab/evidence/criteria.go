package evidence

import (
	"fmt"
	"math"

	"github.com/gpreempt/gpreempt/internal/stat"
)

// criterion is a figure of a protected arm that a profile may limit.
type criterion struct {
	unit, meaning string
	// atLeast: the limit is the least value; otherwise the figure must be below it.
	atLeast bool
	// extent: it is how much was measured. With less, the run is too short, and not failed.
	extent bool
	// base is the arm that the figure compares with, "" for none. A comparison needs two
	// repeats of both arms, without which nothing is known of its accuracy.
	base ArmKind
	// least is how many samples it needs of what, in the protected arm and in base.
	least int
	of    series
	// ofSuspends: without a suspend there is no sample.
	ofSuspends bool
	// perRequest: each request that does not fail is a sample.
	perRequest bool
	// figure returns the figure of some repeats. NaN means that it was not measured.
	figure func(arm, base []Repeat) float64
}

// minForP99 is how many samples a 99th percentile needs: with fewer it is the largest sample.
const (
	minForP99 = 100
	minForP95 = 20
	minForP50 = 10
)

var criteria = map[string]criterion{
	"online_mean_ms": ofSeries(latencies, "mean latency of online requests", 1, stat.Mean[float64]),
	"online_p95_ms":  ofRequests(latencies, "95th percentile of the latency of online requests", minForP95, quantile(0.95)),
	"online_p99_ms":  ofRequests(latencies, "99th percentile of the latency of online requests", minForP99, quantile(0.99)),
	"online_max_ms":  ofSeries(latencies, "largest latency of an online request", 1, quantile(1)),
	"ttft_p99_ms": ofSeries(part(func(q *Request) float64 { return q.TTFT }), "99th percentile of the time to the first token",
		minForP99, quantile(0.99)),
	"tpot_p99_ms": ofSeries(part(func(q *Request) float64 { return q.TPOT }), "99th percentile of the time for each further token",
		minForP99, quantile(0.99)),
	"suspend_mean_ms": ofSuspends(suspends, "mean duration of a suspend", 1, stat.Mean[float64]),
	"suspend_p50_ms":  ofSuspends(suspends, "median duration of a suspend", minForP50, quantile(0.5)),
	"suspend_p99_ms":  ofSuspends(suspends, "99th percentile of the duration of a suspend", minForP99, quantile(0.99)),
	"suspend_max_ms":  ofSuspends(suspends, "longest suspend", 1, quantile(1)),
	"resume_mean_ms":  ofSuspends(resumes, "mean duration of a resume", 1, stat.Mean[float64]),
	"resume_p50_ms":   ofSuspends(resumes, "median duration of a resume", minForP50, quantile(0.5)),
	"resume_p99_ms":   ofSuspends(resumes, "99th percentile of the duration of a resume", minForP99, quantile(0.99)),
	"resume_max_ms":   ofSuspends(resumes, "longest resume", 1, quantile(1)),
	"online_mean_ratio": {
		unit: "times", meaning: "mean latency of online requests, as a multiple of that of online alone", base: OnlineAlone, least: 1, of: latencies,
		figure: func(arm, base []Repeat) float64 {
			return stat.Mean(pool(arm, latencies)) / stat.Mean(pool(base, latencies))
		},
	},
	"online_p50_ratio": {
		unit: "times", meaning: "median latency of online requests, as a multiple of that of online alone", base: OnlineAlone, least: minForP50, of: latencies, perRequest: true,
		figure: func(arm, base []Repeat) float64 {
			return quantile(0.5)(pool(arm, latencies)) / quantile(0.5)(pool(base, latencies))
		},
	},
	"online_p99_ratio": {
		unit: "times", meaning: "99th percentile of the latency of online requests, as a multiple of that of online alone", base: OnlineAlone,
		least: minForP99, of: latencies, perRequest: true,
		figure: func(arm, base []Repeat) float64 {
			return quantile(0.99)(pool(arm, latencies)) / quantile(0.99)(pool(base, latencies))
		},
	},
	"offline_loss_percent": {
		unit: "%", meaning: "offline work that is not done, of what offline work alone does in the same time", base: OfflineAlone, figure: loss,
	},
	"offline_overhead_percent": {
		unit: "%", meaning: "offline_loss_percent less the share of time in which a request was in progress", base: OfflineAlone,
		figure: func(arm, base []Repeat) float64 { return loss(arm, base) - 100*busyShare(arm) },
	},
	"utilisation_percent": {
		unit: "%", meaning: "mean of the driver's gpu_busy_percent of the busiest GPU", atLeast: true, least: 1, of: reading(GPUBusy),
		figure: func(arm, _ []Repeat) float64 { return stat.Mean(pool(arm, reading(GPUBusy))) },
	},
	"daemon_cpu_percent": {
		unit: "%", meaning: "mean share of a processor that gpreemptd and its helpers used", least: 1, of: reading(DaemonCPU),
		figure: func(arm, _ []Repeat) float64 { return 100 * stat.Mean(pool(arm, reading(DaemonCPU))) },
	},
	"daemon_growth_mib": {
		unit: "MiB", meaning: "memory of gpreemptd and its helpers in the last quarter of a repeat, beyond that in the second quarter", least: minForGrowth,
		of: reading(DaemonRSS), figure: func(arm, _ []Repeat) float64 { return growth(arm) },
	},
	"protected_seconds": {
		unit: "s", meaning: "time that was measured", atLeast: true, extent: true,
		figure: func(arm, _ []Repeat) float64 {
			seconds := 0.0
			for _, r := range arm {
				seconds += r.Seconds
			}
			return seconds
		},
	},
}

// ofSeries returns a criterion about times in ms.
func ofSeries(of series, meaning string, least int, statistic func([]float64) float64) criterion {
	return criterion{
		unit: "ms", meaning: meaning, least: least, of: of,
		figure: func(arm, _ []Repeat) float64 { return statistic(pool(arm, of)) },
	}
}

// ofRequests is ofSeries for the latency of requests.
func ofRequests(of series, meaning string, least int, statistic func([]float64) float64) criterion {
	c := ofSeries(of, meaning, least, statistic)
	c.perRequest = true
	return c
}

// ofSuspends is ofSeries for what only a suspend gives.
func ofSuspends(of series, meaning string, least int, statistic func([]float64) float64) criterion {
	c := ofSeries(of, meaning, least, statistic)
	c.ofSuspends = true
	return c
}

// minForGrowth is how many readings of the memory a growth needs.
const minForGrowth = 40

// growth returns the largest growth of the daemon's memory in a repeat. The first quarter does not
// count: a program takes memory when it begins to work.
func growth(repeats []Repeat) float64 {
	most := math.NaN()
	for i := range repeats {
		values := reading(DaemonRSS)(&repeats[i])
		if n := len(values) / 4; n > 0 {
			g := stat.Mean(values[len(values)-n:]) - stat.Mean(values[n:2*n])
			if math.IsNaN(most) || g > most {
				most = g
			}
		}
	}
	return most
}

func quantile(q float64) func([]float64) float64 {
	return func(sorted []float64) float64 { return stat.Quantile(sorted, q) }
}

func loss(arm, base []Repeat) float64 { return 100 * (1 - workRate(arm)/workRate(base)) }

// reading returns the values that samples have of a name.
func reading(name string) series {
	return func(r *Repeat) (values []float64) {
		for _, s := range r.Samples {
			if v, ok := s.Values[name]; ok {
				values = append(values, v)
			}
		}
		return values
	}
}

// evaluate compares the figure of an arm with a limit. base are the repeats that it compares
// with, nil when the run has none.
func (c criterion) evaluate(name string, limit float64, arm *Arm, base []Repeat) Criterion {
	got := Criterion{Arm: arm.Name, Name: name, Unit: c.unit, Limit: limit, AtLeast: c.atLeast, Result: CannotTell}
	if why := c.missing(arm, base); why != "" {
		got.Why = why
		return got
	}
	figure := c.figure(arm.Repeats, base)
	if math.IsNaN(figure) || math.IsInf(figure, 0) {
		got.Why = "it was not measured"
		return got
	}
	got.Figure = &figure
	spread := 0.0
	if figures := c.each(arm.Repeats, base); !c.extent && len(figures) > 1 {
		spread = stat.Spread(figures)
		got.Spread = &spread
	}
	within := figure < limit
	if c.atLeast {
		within = figure >= limit
	}
	switch {
	case math.Abs(figure-limit) < spread:
		got.Why = fmt.Sprintf("it differs by %s %s between the repeats, which is more than the distance to the limit %s; repeat more often, or longer",
			short(spread), c.unit, short(limit))
	case within:
		got.Result = Pass
	case c.extent:
		got.Why = fmt.Sprintf("it is %s %s, and %s are needed", short(figure), c.unit, short(limit))
	default:
		got.Result = Fail
		got.Why = fmt.Sprintf("it is %s %s, and the limit is %s", short(figure), c.unit, short(limit))
	}
	return got
}

// missing returns what an evaluation lacks, "" if nothing.
func (c criterion) missing(arm *Arm, base []Repeat) string {
	if c.base != "" {
		switch {
		case base == nil:
			return fmt.Sprintf("the run has no arm %q to compare with", c.base)
		case len(base) < 2 || len(arm.Repeats) < 2:
			return "a comparison needs at least two repeats of both arms"
		}
	}
	if c.of == nil {
		return ""
	}
	lists := [][]Repeat{arm.Repeats}
	if c.base != "" {
		lists = append(lists, base)
	}
	for _, repeats := range lists {
		switch n := len(pool(repeats, c.of)); {
		case n == 0 && c.ofSuspends && len(pool(arm.Repeats, suspends)) == 0:
			return nothingSuspended
		case n == 0:
			return "there is no sample of it"
		case n < c.least:
			return fmt.Sprintf("there are %d samples, and it needs at least %d", n, c.least)
		}
	}
	return ""
}

// Short reports whether a repeat of an arm, one of planned ones, has fewer samples than its part of
// what a limit of the profile needs.
func (p Profile) Short(kind ArmKind, r *Repeat, planned int) bool {
	return p.lacks(kind, func(least int, of series) bool { return len(of(r))*planned < least })
}

// Least returns how many requests each repeat of an arm must have so that each limit has its samples, 0
// for any number.
func (p Profile) Least(kind ArmKind, planned int) (requests int) {
	p.lacks(kind, func(least int, _ series) bool {
		requests = max(requests, (least+planned-1)/planned)
		return false
	})
	return requests
}

// lacks reports whether lack is true of a limit that needs samples of requests, or of the suspends
// that they cause.
func (p Profile) lacks(kind ArmKind, lack func(least int, of series) bool) bool {
	for name := range p.Limits {
		c := criteria[name]
		if c.least > 1 && (c.perRequest || c.ofSuspends) && (kind == Protected || kind == c.base) && lack(c.least, c.of) {
			return true
		}
	}
	return false
}

// each returns the figure of each repeat. Repeats of the same number were measured near each other
// in time.
func (c criterion) each(arm, base []Repeat) (figures []float64) {
	for i := range arm {
		var against []Repeat
		if c.base != "" {
			if i >= len(base) {
				break
			}
			against = base[i : i+1]
		}
		if f := c.figure(arm[i:i+1], against); !math.IsNaN(f) && !math.IsInf(f, 0) {
			figures = append(figures, f)
		}
	}
	return figures
}

// short formats a figure for people.
func short(v float64) string {
	switch {
	case math.Abs(v) >= 100:
		return fmt.Sprintf("%.0f", v)
	case math.Abs(v) >= 10:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.2f", v)
}
