package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/gpreempt/gpreempt/internal/stat"
)

// report has all results of one run.
type report struct {
	taken   time.Time
	cpus    int
	Series  []*series
	Figures []*figure
	// GoBenchmarks is the output of go test for sections j and k.
	GoBenchmarks string
	// Skipped names what was not measured, and why.
	Skipped []string

	missing []string // the figures without a value
}

// whole returns an error that names the figures without a value.
func (r *report) whole() error {
	if len(r.missing) == 0 {
		return nil
	}
	return fmt.Errorf("go test printed no value for %s: was a benchmark renamed?", strings.Join(r.missing, "; "))
}

const simulated = "All GPUs are simulated or emulated and their times modelled: nothing here says how long a GPU takes."

// figure has one value for each repeat, and a limit.
type figure struct {
	Section string
	Name    string
	Unit    string
	Values  []float64
	Median  float64
	Min     float64
	Max     float64
	// Limit bounds the median, such as "<= 1.25"; "" for none.
	Limit string
	Met   bool
}

func newFigure(section, name, unit string, all []float64) *figure {
	return &figure{Section: section, Name: name, Unit: unit, Values: all, Median: stat.Median(all), Min: slices.Min(all), Max: slices.Max(all), Met: true}
}

func (f *figure) atMost(limit float64) {
	f.Limit, f.Met = fmt.Sprintf("<= %v", limit), f.Median <= limit
}

func (f *figure) atLeast(limit float64) {
	f.Limit, f.Met = fmt.Sprintf(">= %v", limit), f.Median >= limit
}

// verdict returns "met", "MISSED", or "" without a limit.
func (f *figure) verdict() string {
	switch {
	case f.Limit == "":
		return ""
	case f.Met:
		return "met"
	default:
		return "MISSED"
	}
}

// number formats v with at least two digits.
func number(v float64) string {
	switch {
	case v >= 100:
		return fmt.Sprintf("%.0f", v)
	case v >= 10:
		return fmt.Sprintf("%.1f", v)
	case v >= 0.1 || v == 0:
		return fmt.Sprintf("%.2f", v)
	default:
		return fmt.Sprintf("%.2g", v)
	}
}

// writeTable writes the figures as a table of Markdown, as docs/performance.md has it.
func (r *report) writeTable(out io.Writer) error {
	rows := [][]string{{"", "figure", "median", "repeats", "limit", ""}}
	for _, f := range r.Figures {
		rows = append(rows, []string{
			f.Section, f.Name, strings.TrimSpace(number(f.Median) + " " + f.Unit), number(f.Min) + ".." + number(f.Max), f.Limit, f.verdict(),
		})
	}
	fmt.Fprintf(out, "`make bench` on %s with %d CPUs, %s. %s\n\n", r.taken.Format("2 January 2006"), r.cpus, runtime.Version(), simulated)
	err := writeRows(out, rows)
	for _, s := range r.Skipped {
		fmt.Fprintf(out, "\nSkipped: %s\n", s)
	}
	return err
}

// writeRows writes a table of Markdown, whose first row is the head.
func writeRows(out io.Writer, rows [][]string) (err error) {
	for i, row := range rows {
		if i == 1 {
			_, err = fmt.Fprintf(out, "|%s\n", strings.Repeat("---|", len(row)))
		}
		_, rowErr := fmt.Fprintf(out, "| %s |\n", strings.Join(row, " | "))
		err = errors.Join(err, rowErr)
	}
	return err
}

// writeBenchstat writes the input of benchstat: a line for each series and figure of each
// repeat.
func (r *report) writeBenchstat(out io.Writer) error {
	fmt.Fprintf(out, "goos: %s\ngoarch: %s\npkg: github.com/gpreempt/gpreempt/test/bench\n", runtime.GOOS, runtime.GOARCH)
	for _, s := range r.Series {
		for _, v := range s.Repeats {
			fmt.Fprintf(out, "Benchmark%s-%d %d %.0f ns/op %.0f p50-ns %.0f p99-ns\n", s.Name, r.cpus, v.N, v.Mean, v.P50, v.P99)
		}
	}
	for _, f := range r.Figures {
		name := strings.NewReplacer(" ", "_", ",", "", "'", "").Replace(f.Name)
		for _, v := range f.Values {
			fmt.Fprintf(out, "BenchmarkFigure/section=%s/%s-%d 1 %.4g %s\n", f.Section, name, r.cpus, v, f.Unit)
		}
	}
	_, err := io.WriteString(out, r.GoBenchmarks)
	return err
}

// write writes the file name for benchstat.
func (r *report) write(name string) error {
	var lines strings.Builder
	return errors.Join(
		os.MkdirAll(filepath.Dir(name), 0o750),
		r.writeBenchstat(&lines),
		os.WriteFile(name, []byte(lines.String()), 0o600),
	)
}
