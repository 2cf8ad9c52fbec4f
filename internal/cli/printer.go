package cli

import (
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// printer writes lines and aligned tables for people. It keeps the first error of the
// output in err.
type printer struct {
	w      io.Writer
	wide   bool
	colour bool
	err    error
	// rec takes lines and tables instead of w, if it is not nil.
	rec *capture
}

func (a *app) printer() *printer {
	return &printer{
		w:    a.Out,
		rec:  a.rec,
		wide: a.output == formatWide,
		colour: a.Terminal && a.Getenv("NO_COLOR") == "" &&
			a.Getenv("TERM") != "dumb",
	}
}

// style is how a cell is highlighted.
type style string

// The styles, as the parameters of the terminal's SGR sequence.
const (
	styleNone style = ""
	styleBold style = "1"
	styleGood style = "32"
	styleNote style = "33"
	styleBad  style = "31"
)

// cell is a piece of text. It is made printable when it is written: users choose command
// names and labels, which may contain escape sequences.
type cell struct {
	text  string
	style style
}

// cellOf returns v if it is a cell, else a cell without style with the text of
// fmt.Sprint.
func cellOf(v any) cell {
	if c, ok := v.(cell); ok {
		return c
	}
	return cell{text: fmt.Sprint(v)}
}

func (p *printer) paint(c cell) string {
	s := printable(c.text)
	if p.colour && c.style != styleNone && s != "" {
		return "\x1b[" + string(c.style) + "m" + s + "\x1b[0m"
	}
	return s
}

func (p *printer) write(s string) {
	if p.err == nil {
		_, p.err = io.WriteString(p.w, s)
	}
}

// line writes a line of cells, or of values as fmt.Sprint formats them.
func (p *printer) line(values ...any) {
	if p.rec != nil {
		var cells []cell
		for _, v := range values {
			cells = append(cells, cellOf(v))
		}
		p.rec.blocks = append(p.rec.blocks, block{line: cells})
		return
	}
	var b strings.Builder
	for _, v := range values {
		b.WriteString(p.paint(cellOf(v)))
	}
	p.write(strings.TrimRight(b.String(), " ") + "\n")
}

// linef writes one line without style.
func (p *printer) linef(format string, args ...any) { p.line(fmt.Sprintf(format, args...)) }

// columns are the names of a table's columns: "NAME", ">NAME" to align right, "+NAME" or
// "+>NAME" for wide output only. A number after the name, as in "NAME:12", is the
// minimum width.
type columns []string

// table writes rows below a header. Every row has a value for every column, including
// those of wide output.
type table struct {
	p      *printer
	shown  []int
	right  []bool
	widths []int
	rows   [][]cell
	indent string
}

func (p *printer) table(indent string, cols columns) *table {
	t := &table{p: p, indent: indent}
	var head []cell
	for i, name := range cols {
		name, wide := strings.CutPrefix(name, "+")
		if wide && !p.wide {
			continue
		}
		name, right := strings.CutPrefix(name, ">")
		name, least, _ := strings.Cut(name, ":")
		width, _ := strconv.Atoi(least) // 0 without a number
		t.shown = append(t.shown, i)
		t.right = append(t.right, right)
		t.widths = append(t.widths, width)
		head = append(head, cell{text: name})
	}
	t.rows = append(t.rows, head)
	return t
}

func (t *table) row(values ...any) {
	var row []cell
	for _, i := range t.shown {
		row = append(row, cellOf(values[i]))
	}
	t.rows = append(t.rows, row)
}

// flush writes the rows added since the last flush, each column as wide as its widest
// cell so far.
func (t *table) flush() {
	if t.p.rec != nil {
		b := block{rows: t.rows[1:]}
		for i, c := range t.rows[0] {
			b.header = append(b.header, heading{c.text, t.right[i]})
		}
		t.p.rec.blocks = append(t.p.rec.blocks, b)
		return
	}
	for _, row := range t.rows {
		for i, c := range row {
			t.widths[i] = max(t.widths[i], utf8.RuneCountInString(printable(c.text)))
		}
	}
	for _, row := range t.rows {
		line := []any{t.indent}
		for i, c := range row {
			pad := strings.Repeat(" ", t.widths[i]-utf8.RuneCountInString(printable(c.text)))
			if t.right[i] {
				line = append(line, pad, c)
			} else {
				line = append(line, c, pad)
			}
			line = append(line, "  ")
		}
		t.p.line(line...)
	}
	t.rows = slices.Delete(t.rows, 0, len(t.rows))
}
