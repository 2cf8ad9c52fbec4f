package term

import (
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Printer writes lines and aligned tables for people. It keeps the first error of the
// output in err.
type Printer struct {
	W    io.Writer
	Wide bool
	// Width is the number of cells of a line that tables must fit into, 0 for any number.
	Width  int
	colour bool
	Err    error
	// rec takes lines and tables instead of w, if it is not nil.
	rec *Capture
}

// Printer returns the printer for the output of this run.
func (a *App) Printer() *Printer {
	return &Printer{
		W:    a.Out,
		rec:  a.Rec,
		Wide: a.Output == FormatWide,
		colour: a.Terminal && a.Getenv("NO_COLOR") == "" &&
			a.Getenv("TERM") != "dumb",
	}
}

// Style is how a cell is highlighted.
type Style string

// The styles, as the parameters of the terminal's SGR sequence.
const (
	StyleNone Style = ""
	StyleBold Style = "1"
	StyleGood Style = "32"
	StyleNote Style = "33"
	StyleBad  Style = "31"
	// StyleState is in reverse video: what the whole screen depends on.
	StyleState Style = "7"
)

// Cell is a piece of text. It is made printable when it is written: users choose command
// names and labels, which may contain escape sequences.
type Cell struct {
	Text  string
	Style Style
}

// CellOf returns v if it is a cell, else a cell without style with the text of
// fmt.Sprint.
func CellOf(v any) Cell {
	if c, ok := v.(Cell); ok {
		return c
	}
	return Cell{Text: fmt.Sprint(v)}
}

func (p *Printer) paint(c Cell) string {
	s := Printable(c.Text)
	if p.colour && c.Style != StyleNone && s != "" {
		return "\x1b[" + string(c.Style) + "m" + s + "\x1b[0m"
	}
	return s
}

func (p *Printer) Write(s string) {
	if p.Err == nil {
		_, p.Err = io.WriteString(p.W, s)
	}
}

// Line writes a line of cells, or of values as fmt.Sprint formats them.
func (p *Printer) Line(values ...any) {
	if p.rec != nil {
		var cells []Cell
		for _, v := range values {
			cells = append(cells, CellOf(v))
		}
		p.rec.Blocks = append(p.rec.Blocks, Block{Line: cells})
		return
	}
	var b strings.Builder
	for _, v := range values {
		b.WriteString(p.paint(CellOf(v)))
	}
	p.Write(strings.TrimRight(b.String(), " ") + "\n")
}

// Linef writes one line without style. A format that is several lines is for Lines.
func (p *Printer) Linef(format string, args ...any) {
	if strings.Contains(format, "\n") {
		panic(fmt.Sprintf("one line has several: %q", format))
	}
	p.Line(fmt.Sprintf(format, args...))
}

// Lines writes a text of the program itself that has several lines, each as narrow as the printer.
func (p *Printer) Lines(text string) {
	for line := range strings.SplitSeq(text, "\n") {
		for _, part := range Wrap(line, p.Width) {
			p.Line(part)
		}
	}
}

// Wrap breaks a line at spaces into parts of at most width cells, 0 for any number. Those after the first are indented as
// the line is, by two cells more. Sequences for a terminal in it take no cells.
func Wrap(line string, width int) (parts []string) {
	indent := "  " + line[:len(line)-len(strings.TrimLeft(line, " "))]
	if len(indent) > width/2 {
		indent = ""
	}
	for width > 0 {
		cells, space, end := 0, 0, 0
		for i := 0; i < len(line) && end == 0; {
			if line[i] == '\x1b' {
				i += strings.IndexByte(line[i:], 'm') + 1
				continue
			}
			if line[i] == ' ' && strings.Trim(line[:i], " ") != "" {
				space = i
			}
			if cells++; cells > width {
				if end = space; end == 0 {
					end = i
				}
			}
			_, n := utf8.DecodeRuneInString(line[i:])
			i += n
		}
		if end == 0 {
			break
		}
		parts = append(parts, line[:end])
		line = indent + strings.TrimLeft(line[end:], " ")
	}
	return append(parts, line)
}

// Columns are the names of a table's columns: "NAME", ">NAME" to align right, "+NAME" or
// "+>NAME" for wide output only, "-NAME" or "->NAME" to leave it out before the others where a
// line is too narrow. A number after the name, as in "NAME:12", is the minimum width; the last column is cut below it
// when no other can be left out.
type Columns []string

// Table writes rows below a header. Every row has a value for every column, including
// those of wide output.
type Table struct {
	P      *Printer
	shown  []int
	right  []bool
	minor  []bool // left out first
	widths []int
	least  []int // the width that was asked for
	rows   [][]Cell
	indent string
}

// Table begins a table; indent is before each of its lines.
func (p *Printer) Table(indent string, cols Columns) *Table {
	t := &Table{P: p, indent: indent}
	var head []Cell
	for i, name := range cols {
		name, wide := strings.CutPrefix(name, "+")
		if wide && !p.Wide {
			continue
		}
		name, minor := strings.CutPrefix(name, "-")
		name, right := strings.CutPrefix(name, ">")
		name, least, _ := strings.Cut(name, ":")
		width, _ := strconv.Atoi(least) // 0 without a number
		t.shown = append(t.shown, i)
		t.right = append(t.right, right)
		t.minor = append(t.minor, minor)
		t.widths, t.least = append(t.widths, width), append(t.least, width)
		head = append(head, Cell{Text: name})
	}
	t.rows = append(t.rows, head)
	return t
}

// Row adds a row with a value for each column.
func (t *Table) Row(values ...any) {
	var row []Cell
	for _, i := range t.shown {
		row = append(row, CellOf(values[i]))
	}
	t.rows = append(t.rows, row)
}

// Flush writes the rows added since the last flush, each column as wide as its widest
// cell so far.
func (t *Table) Flush() {
	if t.P.rec != nil {
		b := Block{Rows: t.rows[1:]}
		for i, c := range t.rows[0] {
			b.Header = append(b.Header, Heading{c.Text, t.right[i]})
		}
		t.P.rec.Blocks = append(t.P.rec.Blocks, b)
		return
	}
	for _, row := range t.rows {
		for i, c := range row {
			t.widths[i] = max(t.widths[i], utf8.RuneCountInString(Printable(c.Text)))
		}
	}
	t.fit()
	for _, row := range t.rows {
		line := []any{t.indent}
		for i, c := range row {
			pad := strings.Repeat(" ", t.widths[i]-utf8.RuneCountInString(Printable(c.Text)))
			if t.right[i] {
				line = append(line, pad, c)
			} else {
				line = append(line, c, pad)
			}
			line = append(line, "  ")
		}
		t.P.Line(line...)
	}
	t.rows = slices.Delete(t.rows, 0, len(t.rows))
}

// leastCut is the least number of cells of a text that is cut to fit.
const leastCut = 10

// fit leaves out columns, minor ones and then those on the right first, until the table is as
// narrow as the printer. A text in the last column is cut instead where enough of it is left.
func (t *Table) fit() {
	for t.P.Width > 0 && len(t.widths) > 1 && len(t.rows) > 0 {
		last := len(t.widths) - 1
		over := utf8.RuneCountInString(t.indent) + 2*last - t.P.Width
		for _, width := range t.widths {
			over += width
		}
		if over <= 0 {
			return
		}
		enough := max(leastCut, utf8.RuneCountInString(t.rows[0][last].Text))
		if slices.Contains(t.minor, true) {
			enough = max(enough, t.least[last])
		}
		if rest := t.widths[last] - over; !t.right[last] && rest >= enough {
			t.widths[last] = rest
			for _, row := range t.rows {
				row[last].Text = Cut(Printable(row[last].Text), rest)
			}
			return
		}
		out := last
		for i, minor := range t.minor {
			if minor {
				out = i
			}
		}
		t.shown, t.right, t.minor = slices.Delete(t.shown, out, out+1), slices.Delete(t.right, out, out+1), slices.Delete(t.minor, out, out+1)
		t.widths, t.least = slices.Delete(t.widths, out, out+1), slices.Delete(t.least, out, out+1)
		for i, row := range t.rows {
			t.rows[i] = slices.Delete(row, out, out+1)
		}
	}
}

// Capture keeps what a printer would print.
type Capture struct{ Blocks []Block }

// Block is a line, or the rows of a table with their header.
type Block struct {
	Line []Cell
	// Header is nil for a line.
	Header []Heading
	Rows   [][]Cell
}

// Heading is the name of a column.
type Heading struct {
	Name  string
	Right bool
}
