package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/gpreempt/gpreempt/internal/stat"
)

// report has the results of a run.
type report struct {
	options options
	taken   time.Time
	cpus    int
	load    string // load average of the machine

	kinds []kind
	plain int // bytes of a scrape, not compressed

	from, to usage
	traffic  traffic // in between
	down     float64
	slowest  [2]float64

	answered      []answered
	groups        []group
	disk          disk
	before, after usage // the rollout
}

// loadAverage returns that of the last minute.
func loadAverage() string {
	text, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "unknown"
	}
	return strings.Fields(string(text) + " ")[0]
}

const mega = 1 << 20

// write writes the tables as Markdown, as docs/lab/fleet-scale.md has them.
func (r *report) write(out io.Writer) error {
	w := &tables{out: out}
	hosts := float64(r.options.hosts)
	w.printf("`make fleet-scale` on %s with %d CPUs, a load of %s. %d SIMULATED hosts with %d GPUs, scraped every %v for %v by a real Prometheus.\n",
		r.taken.Format("2 January 2006"), r.cpus, r.load, r.options.hosts, r.options.gpus, r.options.interval, r.options.window)

	w.head("series of a host", "")
	all := 0
	for _, k := range r.kinds {
		w.row(k.name, fmt.Sprint(k.series))
		all += k.series
	}
	w.row("all that it serves", fmt.Sprint(all))
	w.row("in Prometheus, its own of each host included", fmt.Sprintf("%.0f", r.to.series/hosts))

	took := r.to.at.Sub(r.from.at).Seconds()
	w.head("scraping", "")
	w.row("series in Prometheus", fmt.Sprintf("%.0f", r.to.series))
	w.row("bytes of a scrape", fmt.Sprintf("%d, compressed %d", r.plain, r.traffic.bytes/max(r.traffic.requests, 1)))
	w.row("bytes/s of all hosts, compressed", fmt.Sprintf("%.0f", float64(r.traffic.bytes)/took))
	w.row("scrapes/s, samples/s", fmt.Sprintf("%.1f, %.0f", float64(r.traffic.requests)/took, (r.to.added-r.from.added)/took))
	w.row("hosts with a failed scrape", fmt.Sprintf("%.0f", r.down))
	w.row("longest scrape of a host: 99th percentile, greatest", fmt.Sprintf("%.2f s, %.2f s", r.slowest[0], r.slowest[1]))
	w.row("CPU of Prometheus, of one core", fmt.Sprintf("%.1f %%", 100*(r.to.cpu-r.from.cpu).Seconds()/took))
	w.row("resident memory of Prometheus", fmt.Sprintf("%d MiB", r.to.resident/mega))
	w.row("bytes of a sample on disk: chunks, index", fmt.Sprintf("%.2f, %.2f", float64(r.disk.chunks)/r.disk.samples, float64(r.disk.index)/r.disk.samples))

	if len(r.answered) > 0 {
		w.head("queries", "number", "p50", "p95", "slowest", "samples read", "series of the largest answer")
	}
	for _, a := range r.answered {
		times, samples, series := a.times(), 0.0, 0
		for _, q := range a.asked {
			samples += q.samples
			series = max(series, q.series)
		}
		w.row(a.set, fmt.Sprint(len(times)), millis(stat.Quantile(times, 0.5)), millis(stat.Quantile(times, 0.95)), millis(a.slowest().took), fmt.Sprintf("%.0f", samples), fmt.Sprint(series))
	}
	if len(r.groups) > 0 {
		w.head("rules", "number", "last evaluation of all")
	}
	for _, g := range r.groups {
		w.row(g.Name, fmt.Sprint(len(g.Rules)), fmt.Sprintf("%.0f ms", 1e3*g.EvaluationTime))
	}

	w.head("a rollout that changes a label of every host", "before", "after")
	w.row("series in Prometheus", fmt.Sprintf("%.0f", r.before.series), fmt.Sprintf("%.0f", r.after.series))
	w.row("resident memory", fmt.Sprintf("%d MiB", r.before.resident/mega), fmt.Sprintf("%d MiB", r.after.resident/mega))

	if len(r.answered) > 0 {
		w.printf("\nThe slowest query of each set:\n\n")
	}
	for _, a := range r.answered {
		w.printf("- %s, %s: `%s`\n", a.set, millis(a.slowest().took), a.slowest().query)
	}
	return w.err
}

func millis(d time.Duration) string { return fmt.Sprintf("%.1f ms", d.Seconds()*1e3) }

// tables writes Markdown, until an error.
type tables struct {
	out io.Writer
	err error
}

func (w *tables) printf(format string, args ...any) {
	if w.err == nil {
		_, w.err = fmt.Fprintf(w.out, format, args...)
	}
}

func (w *tables) row(cells ...string) { w.printf("| %s |\n", strings.Join(cells, " | ")) }

// head begins a table.
func (w *tables) head(cells ...string) {
	w.printf("\n")
	w.row(cells...)
	w.printf("|%s\n", strings.Repeat("---|", len(cells)))
}
