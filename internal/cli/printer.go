package cli

import (
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// printer writes for people: lines and aligned tables. The first error of the
// output sticks in err.
type printer struct {
	w      io.Writer
	wide   bool
	colour bool
	err    error
}

func (a *app) printer() *printer {
	return &printer{
		w:    a.Out,
		wide: a.output == formatWide,
		colour: a.Terminal && a.Getenv("NO_COLOR") == "" &&
			a.Getenv("TERM") != "dumb",
	}
}

// style is how a cell stands out.
type style string

// The styles, as the parameters of the terminal's SGR sequence.
const (
	styleNone style = ""
	styleBold style = "1"
	styleGood style = "32"
	styleNote style = "33"
	styleBad  style = "31"
)

// cell is a piece of text. It is made printable when it is written: command
// names and labels are others' to choose, escape sequences included.
type cell struct {
	text  string
	style style
}

// text makes a cell as fmt.Sprint does.
func text(v any) cell { return cell{text: fmt.Sprint(v)} }

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

// line writes cells one behind the other.
func (p *printer) line(cells ...cell) {
	var b strings.Builder
	for _, c := range cells {
		b.WriteString(p.paint(c))
	}
	p.write(strings.TrimRight(b.String(), " ") + "\n")
}

// linef writes one line without style.
func (p *printer) linef(format string, args ...any) { p.line(cell{text: fmt.Sprintf(format, args...)}) }

// columns says what a table has: "NAME", ">NAME" to align right, "+NAME" or
// "+>NAME" for wide output only. A number behind the name, as in "NAME:12", is
// the least width.
type columns []string

// table writes rows under a head. Every row has a cell for every column, those
// of wide output included.
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

func (t *table) row(cells ...cell) {
	var row []cell
	for _, i := range t.shown {
		row = append(row, cells[i])
	}
	t.rows = append(t.rows, row)
}

// flush writes what was added since the last flush, each column as wide as the
// widest cell seen so far.
func (t *table) flush() {
	for _, row := range t.rows {
		for i, c := range row {
			t.widths[i] = max(t.widths[i], utf8.RuneCountInString(printable(c.text)))
		}
	}
	for _, row := range t.rows {
		line := []cell{{text: t.indent}}
		for i, c := range row {
			pad := cell{text: strings.Repeat(" ", t.widths[i]-utf8.RuneCountInString(printable(c.text)))}
			if t.right[i] {
				line = append(line, pad, c)
			} else {
				line = append(line, c, pad)
			}
			line = append(line, cell{text: "  "})
		}
		t.p.line(line...)
	}
	t.rows = slices.Delete(t.rows, 0, len(t.rows))
}
