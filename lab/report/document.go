package report

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/gpreempt/gpreempt/lab/evidence"
)

// document is what all forms of a report have in common.
type document struct {
	Title string
	// Origin is the word that every chart has, such as SIMULATED, and OriginText explains it.
	Origin, OriginText string
	// About are when the runs began and what they ran, below the title.
	About []string
	// Answers are the first screen, one for each run, with Chart.
	Answers []Answer
	Chart   *chart
	// Sections are folded.
	Sections []section
}

// section is a part of a document: text, then charts, then tables, then a file.
type section struct {
	ID, Title string
	Text      []string
	Charts    []chart
	Tables    []table
	File      string
}

// table is a table of texts.
type table struct {
	Title string
	// Above is what is true of every row.
	Above string
	// Whole tables are not compacted.
	Whole bool
	// Head are the names of the columns; ">NAME" aligns to the right.
	Head []string
	Rows [][]string
}

func (s *section) text(format string, args ...any) {
	s.Text = append(s.Text, fmt.Sprintf(format, args...))
}

// add adds the tables that have rows.
func (s *section) add(tables ...table) {
	for _, t := range tables {
		if len(t.Rows) > 0 {
			s.Tables = append(s.Tables, t)
		}
	}
}

// arm is an arm of one of the runs with what the sections need of it.
type arm struct {
	*evidence.Arm
	run *evidence.Run
	sum evidence.Summary
	// name is unique in the document. settings are the names of all arms that it stands for.
	name     string
	settings []string
	// uncharted arms are in the tables only.
	uncharted bool
	// latencies are the totals of the requests that have a result, sorted.
	latencies []float64
}

// arms returns the arms of all runs.
func arms(runs []evidence.Run) []arm {
	var all []arm
	names := map[string]int{}
	for i := range runs {
		summaries := evidence.Summarize(&runs[i])
		for j, sum := range summaries { // one for each arm
			a := arm{Arm: &runs[i].Arms[j], run: &runs[i], sum: sum} //nolint:gosec // G602: j is an index of Arms
			a.name = clean(a.Arm.Name)
			if len(runs) > 1 {
				a.name = clean(runs[i].Name) + ": " + a.name
			}
			if names[a.name]++; names[a.name] > 1 {
				a.name += fmt.Sprintf(" (%d)", names[a.name])
			}
			a.latencies = sorted(a.requests(func(q *evidence.Request) float64 { return q.Total }))
			all = append(all, a)
		}
	}
	return all
}

// requests returns a value of each request that has a result.
func (a *arm) requests(of func(*evidence.Request) float64) []float64 {
	var values []float64
	for _, r := range a.Repeats {
		for i := range r.Requests {
			if q := &r.Requests[i]; q.Failed == "" && usable(q.Total) && usable(of(q)) {
				values = append(values, of(q))
			}
		}
	}
	return values
}

// unit is the unit of the offline work.
func (a *arm) unit() string { return or(clean(a.sum.WorkUnit)) }

// kept returns which part of its work alone the offline work of an arm did, and whether that is
// known.
func kept(all []arm, a *arm) (share float64, known bool) {
	for i := range all {
		if all[i].run == a.run && all[i].Kind == evidence.OfflineAlone {
			return a.sum.WorkRelative, all[i].sum.WorkRate > 0 && a.Kind != evidence.OnlineAlone
		}
	}
	return 0, false
}

// timed returns durations of all repeats.
func timed(a *arm, of func(evidence.Repeat) []evidence.Timed) []float64 {
	var values []float64
	for _, r := range a.Repeats {
		for _, d := range of(r) {
			if usable(d.MS) {
				values = append(values, d.MS)
			}
		}
	}
	return values
}

func suspends(r evidence.Repeat) []evidence.Timed { return r.Suspends }
func resumes(r evidence.Repeat) []evidence.Timed  { return r.Resumes }

// usable reports whether a value can be shown: a file may contain anything.
func usable(v float64) bool { return v > -1e12 && v < 1e12 }

// cells are the figures of a distribution as the cells of a row, "-" without values.
func cells(d evidence.Distribution) []string {
	if d.N == 0 {
		return []string{"0", "-", "-", "-", "-", "-", "-"}
	}
	return []string{strconv.Itoa(d.N), number(d.Mean), number(d.Std), number(d.P50), number(d.P95), number(d.P99), number(d.Max)}
}

// figureHead are the columns of cells.
var figureHead = []string{">n", ">mean", ">std", ">p50", ">p95", ">p99", ">max"}

// number formats a value with three digits.
func number(v float64) string {
	switch size := math.Abs(v); {
	case size >= 1e6:
		return fmt.Sprintf("%.3g", v)
	case size >= 99.95:
		return fmt.Sprintf("%.0f", v)
	case size >= 9.995:
		return fmt.Sprintf("%.1f", v)
	case size >= 0.9995 || v == 0:
		return fmt.Sprintf("%.2f", v)
	}
	return fmt.Sprintf("%.3f", v)
}

// percent formats a share.
func percent(share float64) string { return fmt.Sprintf("%.1f %%", 100*share) }

// clean replaces characters that are not printable: names are those of files and programs.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if r == utf8.RuneError || !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, s)
}

// cut shortens a text to n characters.
func cut(s string, n int) string {
	if utf8.RuneCountInString(s) <= n {
		return s
	}
	return string([]rune(s)[:n-1]) + "…"
}

// origins returns the word for what the runs were measured on, and what it means.
func origins(runs []evidence.Run) (word, text string) {
	texts := map[evidence.Origin]string{
		evidence.Simulated: "a model in virtual time, without processes: no figure is of hardware",
		evidence.Emulated:  "real processes and a real daemon on a modelled GPU: no figure is of hardware",
		evidence.Hardware:  "a daemon that serves the driver of a host",
	}
	var words, all []string
	seen := map[evidence.Origin]bool{}
	for i := range runs {
		o := runs[i].Origin
		if seen[o] {
			continue
		}
		seen[o] = true
		text, ok := texts[o]
		if !ok {
			text = "the run does not say what it was measured on"
		}
		words, all = append(words, strings.ToUpper(clean(string(o)))), append(all, text)
	}
	word = strings.Join(words, ", ")
	if word == "" {
		word = "UNKNOWN ORIGIN"
	}
	return word, strings.Join(all, "; ")
}

// sorted returns a sorted copy.
func sorted(values []float64) []float64 { return slices.Sorted(slices.Values(values)) }

// or returns s, or "-" for "".
func or(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
