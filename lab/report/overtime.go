package report

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"

	"gonum.org/v1/plot/plotter"

	"github.com/gpreempt/gpreempt/internal/stat"
	"github.com/gpreempt/gpreempt/lab/evidence"
)

// timelineSpans bounds the spans of one timeline.
const timelineSpans = 160

// spanKinds are the values of Span.What in the order of their colours; the height of a span
// says the same.
var spanKinds = []spanKind{{"online", 0.8}, {"suspended", 0.2}, {"offline", 0.5}, {"switching", 1}}

type spanKind struct {
	name   string
	height float64
}

// timelineSection shows who had the GPUs in the beginning of one repeat of each arm.
func timelineSection(all []arm, origin string) section {
	s := section{ID: "timeline", Title: "Timeline"}
	t := table{Title: "Time of each kind in the shown stretch", Head: []string{"arm", "lane", "what", ">spans", ">ms", ">share"}}
	for i := range all {
		a := &all[i]
		for n, r := range a.Repeats {
			if len(r.Spans) > 0 {
				f, rows := timeline(a, n, r.Spans, origin)
				t.Rows = append(t.Rows, rows...)
				if len(rows) > 0 && !a.uncharted {
					s.Charts = append(s.Charts, f.draw())
				}
				break
			}
		}
	}
	if len(t.Rows) == 0 {
		s.text("The runs contain no spans.")
		return s
	}
	s.text("Who had the GPUs in the beginning of a repeat. The height of a bar distinguishes the kinds: switching is full, online high, offline half, suspended low.")
	s.Tables = append(s.Tables, t)
	return s
}

// timeline returns the figure of a repeat, and the rows of its table.
func timeline(a *arm, repeat int, spans []evidence.Span, origin string) (f *figure, rows [][]string) {
	spans = slices.DeleteFunc(slices.Clone(spans), func(s evidence.Span) bool { return !usable(s.From) || !usable(s.To) || s.To < s.From })
	slices.SortStableFunc(spans, func(a, b evidence.Span) int { return cmp.Compare(a.From, b.From) })
	spans = spans[:min(len(spans), timelineSpans)]
	type lane struct {
		gpu     int
		offline bool
	}
	lanes := map[lane]int{}
	end := 0.0
	for _, span := range spans {
		lanes[lane{span.GPU, span.What != spanKinds[0].name}] = 0
		end = max(end, span.To)
	}
	order := slices.SortedFunc(maps.Keys(lanes), func(a, b lane) int { // from below
		switch {
		case a.gpu != b.gpu:
			return cmp.Compare(b.gpu, a.gpu)
		case a.offline:
			return -1
		}
		return 1
	})
	f = &figure{
		title: fmt.Sprintf("%s: timeline of %s, repeat %d", origin, a.name, repeat+1),
		alt:   fmt.Sprintf("Spans of the first %s ms. The times are in the table below.", number(end)),
		x:     axis{label: "time (ms)"},
	}
	names := map[int]string{}
	for i, l := range order {
		lanes[l] = i
		names[i] = fmt.Sprintf("GPU %d online", l.gpu)
		if l.offline {
			names[i] = fmt.Sprintf("GPU %d offline", l.gpu)
		}
		f.y.lanes = append(f.y.lanes, names[i])
	}
	times, counts := map[[2]int]float64{}, map[[2]int]int{}
	for _, kind := range spanKinds {
		f.legend = append(f.legend, kind.name)
	}
	for _, span := range spans {
		kind := slices.IndexFunc(spanKinds, func(k spanKind) bool { return k.name == span.What })
		if kind < 0 {
			continue
		}
		at := lanes[lane{span.GPU, kind > 0}]
		low := float64(at) + 0.06
		f.boxes = append(f.boxes, box{x0: span.From, x1: span.To, y0: low, y1: low + 0.88*spanKinds[kind].height, series: kind})
		times[[2]int{at, kind}] += span.To - span.From
		counts[[2]int{at, kind}]++
	}
	for at := range slices.Backward(order) {
		for kind := range spanKinds {
			if k := [2]int{at, kind}; counts[k] > 0 {
				rows = append(rows, []string{a.name, names[at], spanKinds[kind].name, fmt.Sprint(counts[k]), number(times[k]), percent(times[k] / max(end, 1e-9))})
			}
		}
	}
	return f, rows
}

// machineSection shows the readings of the machine in time: one chart for each value.
func machineSection(all []arm, origin string) section {
	s := section{ID: "machine", Title: "Queues and utilisation over time"}
	s.text("Readings of the first repeat of each arm that has them; the table has those of all repeats.")
	t := table{Head: slices.Concat([]string{"value", "arm"}, figureHead)}
	names := map[string]bool{}
	for i := range all {
		for _, r := range all[i].Repeats {
			for _, sample := range r.Samples {
				for name := range sample.Values {
					names[name] = true
				}
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		f := figure{
			title: origin + ": " + clean(name),
			alt:   fmt.Sprintf("%s over time, a line for each arm. Its percentiles are in the table below.", clean(name)),
			x:     axis{label: "time (s)"}, y: axis{zero: true},
		}
		for i := range all {
			var values []float64
			var first plotter.XYs
			for _, r := range all[i].Repeats {
				var points plotter.XYs
				for _, sample := range r.Samples {
					if v, ok := sample.Values[name]; ok && usable(v) && usable(sample.At) {
						values = append(values, v)
						points = append(points, plotter.XY{X: sample.At / 1000, Y: v})
					}
				}
				if first == nil {
					first = points
				}
			}
			if len(values) > 0 {
				if !all[i].uncharted {
					f.series = append(f.series, series{name: all[i].name, number: i, points: thin(first)})
				}
				t.Rows = append(t.Rows, slices.Concat([]string{clean(name), all[i].name}, cells(evidence.Distribute(sorted(values)))))
			}
		}
		if len(f.series) > 0 {
			s.Charts = append(s.Charts, f.draw())
		}
	}
	if len(t.Rows) == 0 {
		s.Text = []string{"The machine was not sampled."}
		return s
	}
	s.Tables = append(s.Tables, t)
	return s
}

// thin returns at most curvePoints points, each the mean of those next to each other.
func thin(points plotter.XYs) plotter.XYs {
	n := (len(points) + curvePoints - 1) / curvePoints
	if n <= 1 {
		return points
	}
	var out plotter.XYs
	for group := range slices.Chunk(points, n) {
		var sum plotter.XY
		for _, p := range group {
			sum.X += p.X / float64(len(group))
			sum.Y += p.Y / float64(len(group))
		}
		out = append(out, sum)
	}
	return out
}

// windows is into how many stretches of time a repeat is divided.
const windows = 10

// stabilitySection shows how the figures of the repeats differ, and how they change in time.
func stabilitySection(all []arm, origin string) section {
	s := section{ID: "stability", Title: "Stability"}
	s.text("Each repeat by itself. Drift is the p99 of the last fifth of the repeat in proportion to that of the first fifth.")
	t := table{Head: []string{"arm", ">repeat", ">s", ">n", ">p50 ms", ">p99 ms", ">max ms", ">drift", ">offline work/s"}}
	overall := figure{
		title: origin + ": p99 of each repeat",
		alt:   "The p99 of each repeat, a line for each arm. A level line is stable. The figures are in the table below.",
		x:     axis{label: "repeat"}, y: axis{label: "p99 (ms)", zero: true},
	}
	for i := range all {
		a := &all[i]
		var line plotter.XYs
		inTime := figure{
			title: fmt.Sprintf("%s: p99 in time, %s", origin, a.name),
			alt:   "The p99 of each tenth of a repeat, a line for each repeat.",
			x:     axis{label: "time (s)"}, y: axis{label: "p99 (ms)", zero: true},
		}
		for n, r := range a.Repeats {
			f, tenths := inWindows(r)
			row := []string{a.name, fmt.Sprint(n + 1), number(r.Seconds), fmt.Sprint(f.N)}
			if f.N == 0 {
				row = append(row, "-", "-", "-", "-")
			} else {
				row = append(row, number(f.P50), number(f.P99), number(f.Max), drift(r))
				line = append(line, plotter.XY{X: float64(n + 1), Y: f.P99})
			}
			work := "-"
			if a.Kind != evidence.OnlineAlone && r.Seconds > 0 && usable(r.Work) {
				work = number(r.Work / r.Seconds)
			}
			t.Rows = append(t.Rows, append(row, work))
			if len(tenths) > 1 {
				inTime.series = append(inTime.series, series{name: fmt.Sprintf("repeat %d", n+1), number: n, points: tenths})
			}
		}
		if len(line) > 1 && !a.uncharted {
			overall.series = append(overall.series, series{name: a.name, number: i, points: line})
		}
		if a.Kind == evidence.Protected && !a.uncharted && len(inTime.series) > 0 {
			s.Charts = append(s.Charts, inTime.draw())
		}
	}
	if len(overall.series) > 0 {
		s.Charts = slices.Insert(s.Charts, 0, overall.draw())
	}
	s.Tables = append(s.Tables, t)
	return s
}

// inWindows returns the figures of a repeat, and the p99 of each tenth of it.
func inWindows(r evidence.Repeat) (evidence.Distribution, plotter.XYs) {
	var values []float64
	var of [windows][]float64
	for _, q := range r.Requests {
		if q.Failed != "" || !usable(q.Total) {
			continue
		}
		values = append(values, q.Total)
		if r.Seconds > 0 && usable(q.At) && usable(r.Seconds) {
			at := min(max(int(math.Floor(q.At/1000/r.Seconds*windows)), 0), windows-1)
			of[at] = append(of[at], q.Total)
		}
	}
	var points plotter.XYs
	for i, window := range of {
		if len(window) > 0 {
			points = append(points, plotter.XY{X: (float64(i) + 0.5) / windows * r.Seconds, Y: stat.Quantile(sorted(window), 0.99)})
		}
	}
	return evidence.Distribute(sorted(values)), points
}

// drift compares the p99 of the end of a repeat with that of its beginning.
func drift(r evidence.Repeat) string {
	var first, last []float64
	for _, q := range r.Requests {
		if q.Failed != "" || !usable(q.Total) || r.Seconds <= 0 {
			continue
		}
		switch at := q.At / 1000 / r.Seconds; {
		case at < 0.2:
			first = append(first, q.Total)
		case at >= 0.8:
			last = append(last, q.Total)
		}
	}
	if len(first) == 0 || len(last) == 0 || stat.Quantile(sorted(first), 0.99) <= 0 {
		return "-"
	}
	return number(stat.Quantile(sorted(last), 0.99) / stat.Quantile(sorted(first), 0.99))
}
