package report

import (
	"fmt"
	"strings"

	"github.com/gpreempt/gpreempt/internal/stat"
	"github.com/gpreempt/gpreempt/lab/evidence"
)

// part is a part of a request's latency.
type part struct {
	name string
	of   func(*evidence.Request) float64
	// means says what it means when this part dominates.
	means string
}

var parts = []part{
	{
		"announcement", func(r *evidence.Request) float64 { return r.Announce },
		"requests wait until the offline work is suspended. An earlier announcement hides it behind the work on the CPU, a linger avoids " +
			"it for requests that follow each other, and max_wait bounds it. If the suspend durations are as long, only a faster mechanism helps.",
	},
	{
		"start", func(r *evidence.Request) float64 { return r.Start },
		"requests wait between the answer of the daemon and their first kernel: the server prepares them, or the GPU still executes other work. " +
			"Look at the utilisation, and whether every process with queues on this GPU is offline or online.",
	},
	{
		"service", func(r *evidence.Request) float64 { return r.Service },
		"requests spend their time in the service itself. If that is longer than alone, other work shares the GPU, its memory or the CPU with it; " +
			"if not, preemption cannot make it faster.",
	},
	{
		"rest", func(r *evidence.Request) float64 { return max(r.Total-r.Announce-r.Start-r.Service, 0) },
		"most of the latency is in no measured part: queueing in the client or the server, or parts that the command does not report.",
	},
}

// breakdown is the mean of each part over requests whose latency is in a range.
func breakdown(a *arm, low, high float64) (mean [4]float64, n int) {
	for _, r := range a.Repeats {
		for i := range r.Requests {
			q := &r.Requests[i]
			if q.Failed != "" || !usable(q.Total) || q.Total < low || q.Total > high {
				continue
			}
			n++
			for j := range parts {
				if v := parts[j].of(q); usable(v) {
					mean[j] += v
				}
			}
		}
	}
	for j := range mean {
		mean[j] /= float64(max(n, 1))
	}
	return mean, n
}

// measured reports whether the parts of an arm's latency were measured.
func measured(a *arm) bool {
	for _, r := range a.Repeats {
		for i := range r.Requests {
			if q := &r.Requests[i]; q.Announce > 0 || q.Start > 0 || q.Service > 0 {
				return true
			}
		}
	}
	return false
}

// partSections are the parts of the latency and what they mean.
func partSections(all []arm, origin string) []section {
	s := section{ID: "parts", Title: "Parts of the latency"}
	b := section{ID: "bottlenecks", Title: "Bottlenecks"}
	t := table{
		Title: "Mean of each part in ms: of the typical requests (up to p50) and of the slow ones (from p95)",
		Head:  []string{"arm", "requests", ">n"},
	}
	chart := figure{
		title: origin + ": mean parts of the latency",
		alt:   "For each arm, a bar with the mean parts of the latency of typical requests, and one of slow requests. The figures are in the table below.",
		x:     axis{label: "latency (ms)"},
	}
	for _, p := range parts {
		t.Head = append(t.Head, ">"+p.name)
		chart.legend = append(chart.legend, p.name)
	}
	for i := range all {
		a := &all[i]
		if len(a.latencies) == 0 || !measured(a) {
			continue
		}
		values := a.latencies
		var means [2][4]float64
		for j, range_ := range []struct {
			name      string
			low, high float64
		}{
			{"typical", values[0], stat.Quantile(values, 0.5)},
			{"slow", stat.Quantile(values, 0.95), values[len(values)-1]},
		} {
			mean, n := breakdown(a, range_.low, range_.high)
			means[j] = mean
			row := []string{a.name, range_.name, fmt.Sprint(n)}
			lane, left := float64(len(chart.y.lanes)), 0.0
			for k, v := range mean {
				row = append(row, number(v))
				if v > 0 && !a.uncharted {
					chart.boxes = append(chart.boxes, box{x0: left, x1: left + v, y0: lane + 0.15, y1: lane + 0.85, series: k})
					left += v
				}
			}
			if !a.uncharted {
				chart.y.lanes = append(chart.y.lanes, a.name+", "+range_.name)
			}
			t.Rows = append(t.Rows, row)
		}
		b.Text = append(b.Text, bottleneck(a, means[0], means[1]))
	}
	if len(t.Rows) == 0 {
		s.text("No arm has measured parts of the latency.")
		return []section{s}
	}
	s.Charts, s.Tables = append(s.Charts, chart.draw()), append(s.Tables, t)
	return []section{s, b}
}

// bottleneck describes which part dominates the latency of an arm, and which one grows most in slow
// requests.
func bottleneck(a *arm, typical, slow [4]float64) string {
	total, largest, grows := 0.0, 0, 0
	for j := range parts {
		total += slow[j]
		if slow[j] > slow[largest] {
			largest = j
		}
		if slow[j]-typical[j] > slow[grows]-typical[grows] {
			grows = j
		}
	}
	if total <= 0 {
		return a.name + ": the parts of the latency are all 0."
	}
	text := fmt.Sprintf("%s: of the slow requests' latency, %s is %s (%s ms): %s", a.name, percent(slow[largest]/total), parts[largest].name, number(slow[largest]), parts[largest].means)
	if by := slow[grows] - typical[grows]; grows != largest && by > 0 {
		text += fmt.Sprintf(" Compared with typical requests, %s grows most, by %s ms: %s", parts[grows].name, number(by), parts[grows].means)
	}
	return strings.TrimSpace(text)
}
