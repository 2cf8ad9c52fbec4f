package cli

import (
	"slices"
	"strings"

	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/lab/evidence"
	"github.com/gpreempt/gpreempt/lab/report"
)

// printNumbers prints the three numbers that an output begins with.
func printNumbers(p *term.Printer, row string, columns [3]report.Column) {
	heads := term.Columns{""}
	latency, work := []any{row}, []any{report.RowWork}
	for _, c := range columns {
		heads = append(heads, ">"+strings.ToUpper(c.Name))
		latency, work = append(latency, c.Latency()), append(work, c.Work())
	}
	t := p.Table("", heads)
	t.Row(latency...)
	t.Row(work...)
	t.Flush()
}

// rowTTFT is the row of the latency of language models.
const rowTTFT = "99 of 100 first tokens within"

// setting is a row of a table that may have the figures of another one.
type setting struct {
	name  string
	cells []any
}

// joined returns rows of which those with the same cells are one, with the names of all.
func joined(rows []setting) []setting {
	var all []setting
	var names [][]string
	for _, r := range rows {
		i := slices.IndexFunc(all, func(o setting) bool { return slices.Equal(o.cells, r.cells) })
		if i < 0 {
			i = len(all)
			all, names = append(all, r), append(names, nil)
		}
		names[i] = append(names[i], r.name)
	}
	for i := range all {
		all[i].name = evidence.NameSettings(names[i])
	}
	return all
}

// printJoined prints the joined rows of a table, and reports whether there are fewer.
func printJoined(t *term.Table, rows []setting) bool {
	lines := joined(rows)
	for _, l := range lines {
		t.Row(append([]any{l.name}, l.cells...)...)
	}
	t.Flush()
	return len(lines) < len(rows)
}

// noDifference explains a table of joined rows.
const noDifference = "Settings with the same figures are one row: they make no difference here."
