package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/gpreempt/gpreempt/internal/stat"
)

// report has all results of one run.
type report struct {
	Taken     time.Time `json:"taken"`
	Go        string    `json:"go"`
	CPUs      int       `json:"cpus"`
	Quick     bool      `json:"quick"`
	Simulated string    `json:"simulated"`
	Series    []*series `json:"series"`
	Figures   []*figure `json:"figures"`
	// GoBenchmarks is the output of go test for sections j and k.
	GoBenchmarks string `json:"-"`
	// Skipped names what was not measured, and why.
	Skipped []string `json:"skipped,omitempty"`

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
	Section string    `json:"section"`
	Name    string    `json:"name"`
	Unit    string    `json:"unit"`
	Values  []float64 `json:"values"`
	Median  float64   `json:"median"`
	Min     float64   `json:"min"`
	Max     float64   `json:"max"`
	// Limit bounds the median, such as "<= 1.25"; "" for none.
	Limit string `json:"limit,omitempty"`
	Met   bool   `json:"met"`
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

// row returns a figure's row of the table.
func (f *figure) row() []string {
	return []string{
		f.Section, f.Name, strings.TrimSpace(number(f.Median) + " " + f.Unit), number(f.Min) + ".." + number(f.Max), f.Limit, f.verdict(),
	}
}

var columns = []string{"", "figure", "median", "repeats", "limit", ""}

// writeTable writes a table for people.
func (r *report) writeTable(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, strings.Join(columns, "\t"))
	for _, f := range r.Figures {
		fmt.Fprintln(w, strings.Join(f.row(), "\t"))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	for _, s := range r.Skipped {
		fmt.Fprintln(out, "SKIP", s)
	}
	_, err := fmt.Fprintln(out, simulated)
	return err
}

// writeBenchstat writes the input of benchstat: a line for each series and figure of each
// repeat.
func (r *report) writeBenchstat(out io.Writer) error {
	fmt.Fprintf(out, "goos: %s\ngoarch: %s\npkg: github.com/gpreempt/gpreempt/test/bench\n", runtime.GOOS, runtime.GOARCH)
	for _, s := range r.Series {
		for _, v := range s.Repeats {
			fmt.Fprintf(out, "Benchmark%s-%d %d %.0f ns/op %.0f p50-ns %.0f p99-ns\n", s.Name, r.CPUs, v.N, v.Mean, v.P50, v.P99)
		}
	}
	for _, f := range r.Figures {
		name := strings.NewReplacer(" ", "_", ",", "", "'", "").Replace(f.Name)
		for _, v := range f.Values {
			fmt.Fprintf(out, "BenchmarkFigure/section=%s/%s-%d 1 %.4g %s\n", f.Section, name, r.CPUs, v, f.Unit)
		}
	}
	_, err := io.WriteString(out, r.GoBenchmarks)
	return err
}

// write writes NAME.json and NAME.txt.
func (r *report) write(name string) error {
	text, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	var lines strings.Builder
	return errors.Join(
		os.MkdirAll(filepath.Dir(name), 0o750),
		os.WriteFile(name+".json", append(text, '\n'), 0o600),
		r.writeBenchstat(&lines),
		os.WriteFile(name+".txt", []byte(lines.String()), 0o600),
	)
}
