package report

import (
	"fmt"
	"maps"
	"math"
	"slices"

	"gonum.org/v1/plot/plotter"

	"github.com/gpreempt/gpreempt/internal/stat"
	"github.com/gpreempt/gpreempt/lab/evidence"
)

// armSection is the table of arms.
func armSection(all []arm) section {
	s := section{ID: "arms", Title: "Arms"}
	s.text("Latency in ms, of the requests with a result, by nearest rank over all repeats. Spread is that of the repeats' own p99. " +
		"Offline work is for each second, and its share is that of offline work alone.")
	t := table{Head: slices.Concat([]string{"arm", "kind", "mechanism", "policy", ">repeats"}, figureHead, []string{">spread", ">failed", ">offline work", ">share"})}
	tokens := table{Title: "Time to first token and time per output token, ms", Head: []string{"arm", ">n", ">TTFT p50", ">TTFT p99", ">TPOT p50", ">TPOT p99"}}
	for i := range all {
		a := &all[i]
		spread, work, share := "-", "-", "-"
		if a.sum.Repeats > 1 && a.sum.Latency.N > 0 {
			spread = number(a.sum.Latency.SpreadP99)
		}
		if a.Kind != evidence.OnlineAlone && a.sum.Seconds > 0 {
			work = number(a.sum.WorkRate) + " " + a.unit() + "/s"
		}
		if part, known := kept(all, a); known {
			share = percent(part)
		}
		t.Rows = append(t.Rows, slices.Concat(
			[]string{a.name, string(a.Kind), or(clean(a.Mechanism)), or(clean(a.Policy)), fmt.Sprint(a.sum.Repeats)},
			cells(a.sum.Latency), []string{spread, fmt.Sprint(a.sum.Failed), work, share}))
		if first, next := a.sum.TTFT, a.sum.TPOT; first.N > 0 {
			tokens.Rows = append(tokens.Rows, []string{a.name, fmt.Sprint(first.N), number(first.P50), number(first.P99), number(next.P50), number(next.P99)})
		}
	}
	s.Tables = append(s.Tables, t)
	for _, more := range []table{tokens, serviceTable(all), ratioTable(all)} {
		if len(more.Rows) > 0 {
			s.Tables = append(s.Tables, more)
		}
	}
	return s
}

// ratioTable compares the protected arms of each trial with the first of their size, without rows when
// there are no others. Simulations have their frontier for that.
func ratioTable(all []arm) table {
	t := table{
		Title: "Protected arms against the first with as many queues and processes",
		Head:  []string{"arm", "against", "figure", ">against it", ">arm", "unit", ">ratio", ">from", ">to", ">reduction"},
	}
	seen := map[*evidence.Run]bool{}
	for i := range all {
		run := all[i].run
		if seen[run] || run.Command != "trial" && run.Command != "compare" {
			continue
		}
		seen[run] = true
		for _, r := range evidence.Within(run) {
			t.Rows = append(t.Rows, []string{
				clean(r.Arm), clean(r.Base), r.Figure, number(r.A), number(r.B), r.Unit, number(r.Ratio), number(r.Low), number(r.High), percent(1 - r.Ratio),
			})
		}
	}
	return t
}

// serviceTable has the latency of each service, without rows when there are not several.
func serviceTable(all []arm) table {
	t := table{Title: "Latency of each service, ms", Head: slices.Concat([]string{"service", "arm"}, figureHead)}
	names := map[string]bool{}
	for i := range all {
		for _, r := range all[i].Repeats {
			for _, q := range r.Requests {
				names[q.Server] = true
			}
		}
	}
	if len(names) < 2 {
		return t
	}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		for i := range all {
			var values []float64
			for _, r := range all[i].Repeats {
				for _, q := range r.Requests {
					if q.Server == name && q.Failed == "" && usable(q.Total) {
						values = append(values, q.Total)
					}
				}
			}
			if len(values) > 0 {
				t.Rows = append(t.Rows, slices.Concat([]string{or(clean(name)), all[i].name}, cells(evidence.Distribute(sorted(values)))))
			}
		}
	}
	return t
}

// latencySection is the distribution of the latency.
func latencySection(all []arm, left int, origin string) section {
	s := section{ID: "latency", Title: "Latency of requests"}
	if left > 0 {
		s.text("%d more arms have no charts here and below. Their figures are in the tables.", left)
	}
	curves := figure{
		title: origin + ": cumulative distribution of latency",
		alt:   "For each arm, the share of requests that took at most the time on the axis. A curve further left is faster. The figures are in the table of arms.",
		x:     axis{label: "latency (ms)", log: true}, y: axis{label: "share of requests", low: 0, high: 1},
	}
	for i := range all {
		if !all[i].uncharted && len(all[i].latencies) > 0 {
			curves.series = append(curves.series, series{name: all[i].name, number: i, points: cumulative(all[i].latencies), steps: true})
		}
	}
	if len(curves.series) == 0 {
		s.text("No request has a result.")
		return s
	}
	s.Charts = append(s.Charts, curves.draw())
	for i := range all {
		if a := &all[i]; !a.uncharted && len(a.latencies) > 0 {
			s.Charts = append(s.Charts, histogram(origin+": latency, "+a.name, "latency (ms)", a.latencies, i).draw())
		}
	}
	s.Tables = append(s.Tables, quantiles(all))
	return s
}

// quantiles is the table of the curves.
func quantiles(all []arm) table {
	t := table{Title: "Latency in ms that a share of the requests does not exceed", Head: []string{"arm"}}
	shares := []float64{0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999}
	for _, q := range shares {
		t.Head = append(t.Head, fmt.Sprintf(">%g %%", 100*q))
	}
	for i := range all {
		if len(all[i].latencies) == 0 {
			continue
		}
		row, values := []string{all[i].name}, all[i].latencies
		for _, q := range shares {
			row = append(row, number(stat.Quantile(values, q)))
		}
		t.Rows = append(t.Rows, row)
	}
	return t
}

// curvePoints is how many points of a curve are drawn; the ends are among them.
const curvePoints = 300

// cumulative returns the empirical distribution of sorted values, as a logarithmic axis shows it.
func cumulative(values []float64) plotter.XYs {
	n := len(values)
	points := plotter.XYs{{X: max(values[0], least), Y: 0}}
	last := -1
	for i := range min(n, curvePoints) {
		at := n - 1
		if m := min(n, curvePoints); m > 1 {
			at = i * (n - 1) / (m - 1)
		}
		if at != last {
			points = append(points, plotter.XY{X: max(values[at], least), Y: float64(at+1) / float64(n)})
		}
		last = at
	}
	return points
}

// bins is how many bars a histogram has.
const bins = 32

// histogram returns the figure of a distribution: on a logarithmic axis when the largest value is
// at least five times the smallest.
func histogram(title, label string, values []float64, series int) *figure {
	values = sorted(values)
	low, high := max(values[0], least), max(values[len(values)-1], least)
	logarithmic := high >= 5*low
	if high-low < high/100 {
		low, high = low-low/20, high+high/20
	}
	at := func(share float64) float64 {
		if logarithmic {
			return low * math.Pow(high/low, share)
		}
		return low + (high-low)*share
	}
	counts := make([]int, bins)
	for _, v := range values {
		share := (max(v, least) - low) / (high - low)
		if logarithmic {
			share = math.Log(max(v, least)/low) / math.Log(high/low)
		}
		counts[min(max(int(share*bins), 0), bins-1)]++
	}
	f := &figure{
		title: title,
		alt:   fmt.Sprintf("Histogram of %d values from %s to %s, median %s.", len(values), number(values[0]), number(values[len(values)-1]), number(stat.Quantile(values, 0.5))),
		x:     axis{label: label, log: logarithmic, low: low, high: high}, y: axis{label: "share (%)", zero: true},
	}
	for i, n := range counts {
		if n > 0 {
			share := 100 * float64(n) / float64(len(values))
			f.y.high = max(f.y.high, share*1.05)
			f.boxes = append(f.boxes, box{x0: at(float64(i) / bins), x1: at((float64(i) + 0.92) / bins), y1: share, series: series})
		}
	}
	return f
}

// suspendSection is about the durations of suspending and resuming.
func suspendSection(all []arm, origin string) section {
	s := section{ID: "suspend", Title: "Suspend and resume"}
	s.text("Durations in ms, as the daemon or the model reports them: from the call until all targets of a lease are suspended, and until they run again.")
	t := table{Head: slices.Concat([]string{"arm", "what"}, figureHead)}
	for i := range all {
		for _, part := range []struct {
			what string
			of   func(evidence.Repeat) []evidence.Timed
		}{{"suspend", suspends}, {"resume", resumes}} {
			values := timed(&all[i], part.of)
			if len(values) == 0 {
				continue
			}
			if !all[i].uncharted {
				s.Charts = append(s.Charts, histogram(origin+": "+part.what+", "+all[i].name, part.what+" (ms)", values, i).draw())
			}
			t.Rows = append(t.Rows, slices.Concat([]string{all[i].name, part.what}, cells(evidence.Distribute(sorted(values)))))
		}
	}
	if len(t.Rows) == 0 {
		s.Text = []string{"No suspension was measured."}
		return s
	}
	s.Tables = append(s.Tables, t)
	return s
}
