package evidence

import (
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"unicode"
)

// table is one kind of samples and its CSV file. The first two columns of each row are the name
// of the arm and the index of the repeat, from 0.
type table struct {
	file    string
	columns []string
	// rows returns the rows of a repeat, and add adds one to it.
	rows func(r *Repeat) [][]string
	add  func(r *Repeat, row row) error
}

// row is a row without its first two columns. It keeps the first error.
type row struct {
	fields []string
	err    *error
}

func (r row) text(i int) string { return clean(r.fields[i]) }

func (r row) number(i int) float64 {
	v, err := strconv.ParseFloat(r.fields[i], 64)
	if err != nil || !finite(v) {
		r.fail("%q is not a number", r.fields[i])
	}
	return v
}

func (r row) whole(i int) int {
	v, err := strconv.Atoi(r.fields[i])
	if err != nil {
		r.fail("%q is not a whole number", r.fields[i])
	}
	return v
}

func (r row) fail(format string, args ...any) {
	if *r.err == nil {
		*r.err = fmt.Errorf(format, args...)
	}
}

// clean returns a text in one line, as a CSV file keeps it.
func clean(s string) string {
	return strings.Map(func(c rune) rune {
		if unicode.IsControl(c) {
			return ' '
		}
		return c
	}, strings.ToValidUTF8(s, "?"))
}

func number(v float64) string { return strconv.FormatFloat(v, 'g', -1, 64) }

var tables = []*table{
	{
		file:    "requests.csv",
		columns: []string{"at_ms", "total_ms", "announce_ms", "start_ms", "service_ms", "ttft_ms", "tpot_ms", "preemptions", "failed", "server"},
		rows: func(r *Repeat) (rows [][]string) {
			for _, q := range r.Requests {
				rows = append(rows, []string{
					number(q.At), number(q.Total), number(q.Announce), number(q.Start), number(q.Service), number(q.TTFT), number(q.TPOT),
					strconv.Itoa(q.Preemptions), clean(q.Failed), clean(q.Server),
				})
			}
			return rows
		},
		add: func(r *Repeat, f row) error {
			r.Requests = append(r.Requests, Request{
				At: f.number(0), Total: f.number(1), Announce: f.number(2), Start: f.number(3), Service: f.number(4), TTFT: f.number(5),
				TPOT: f.number(6), Preemptions: f.whole(7), Failed: f.text(8), Server: f.text(9),
			})
			return *f.err
		},
	},
	timedTable("suspends.csv", func(r *Repeat) *[]Timed { return &r.Suspends }),
	timedTable("resumes.csv", func(r *Repeat) *[]Timed { return &r.Resumes }),
	{
		file:    "samples.csv",
		columns: []string{"sample", "at_ms", "name", "value"},
		rows: func(r *Repeat) (rows [][]string) {
			for i, s := range r.Samples {
				for _, name := range slices.Sorted(maps.Keys(s.Values)) {
					rows = append(rows, []string{strconv.Itoa(i), number(s.At), clean(name), number(s.Values[name])})
				}
			}
			return rows
		},
		add: func(r *Repeat, f row) error {
			index, at, name, value := f.whole(0), f.number(1), f.text(2), f.number(3)
			switch n := len(r.Samples); {
			case *f.err != nil:
			case index == n:
				r.Samples = append(r.Samples, Sample{At: at, Values: map[string]float64{name: value}})
			case index != n-1 || r.Samples[n-1].At != at:
				f.fail("sample %d at %v ms is out of order", index, at)
			default:
				if _, twice := r.Samples[index].Values[name]; twice {
					f.fail("sample %d has two values %s", index, name)
				}
				r.Samples[index].Values[name] = value
			}
			return *f.err
		},
	},
	{
		file:    "spans.csv",
		columns: []string{"from_ms", "to_ms", "gpu", "what", "name"},
		rows: func(r *Repeat) (rows [][]string) {
			for _, s := range r.Spans {
				rows = append(rows, []string{number(s.From), number(s.To), strconv.Itoa(s.GPU), clean(s.What), clean(s.Name)})
			}
			return rows
		},
		add: func(r *Repeat, f row) error {
			r.Spans = append(r.Spans, Span{From: f.number(0), To: f.number(1), GPU: f.whole(2), What: f.text(3), Name: f.text(4)})
			return *f.err
		},
	},
}

func timedTable(file string, list func(r *Repeat) *[]Timed) *table {
	return &table{
		file:    file,
		columns: []string{"at_ms", "ms"},
		rows: func(r *Repeat) (rows [][]string) {
			for _, d := range *list(r) {
				rows = append(rows, []string{number(d.At), number(d.MS)})
			}
			return rows
		},
		add: func(r *Repeat, f row) error {
			*list(r) = append(*list(r), Timed{At: f.number(0), MS: f.number(1)})
			return *f.err
		},
	}
}

func (t *table) header() []string { return append([]string{"arm", "repeat"}, t.columns...) }

// encode writes the rows of all repeats and returns their number.
func (t *table) encode(w io.Writer, run *Run) (n int, err error) {
	out := csv.NewWriter(w)
	err = out.Write(t.header())
	for _, arm := range run.Arms {
		for i := range arm.Repeats {
			for _, row := range t.rows(&arm.Repeats[i]) {
				if slices.Contains(row, "NaN") || slices.Contains(row, "+Inf") || slices.Contains(row, "-Inf") {
					return n, fmt.Errorf("a sample of arm %q is not a number", arm.Name)
				}
				err = errors.Join(err, out.Write(append([]string{arm.Name, strconv.Itoa(i)}, row...)))
				n++
			}
		}
	}
	out.Flush()
	return n, errors.Join(err, out.Error())
}

// decode adds the rows of the repeats of a run to them, and returns their number.
func (t *table) decode(r io.Reader, run *Run) (n int, err error) {
	in := csv.NewReader(r)
	in.FieldsPerRecord = len(t.header())
	in.ReuseRecord = true
	head, err := in.Read()
	if err != nil {
		return 0, err
	}
	if !slices.Equal(head, t.header()) {
		return 0, fmt.Errorf("its columns are not %s", strings.Join(t.header(), ","))
	}
	arms := map[string]*Arm{}
	for i := range run.Arms {
		arms[run.Arms[i].Name] = &run.Arms[i]
	}
	for {
		fields, err := in.Read()
		if errors.Is(err, io.EOF) {
			return n, nil
		}
		if err != nil {
			return n, err
		}
		line, _ := in.FieldPos(0)
		arm, failed := arms[fields[0]], error(nil)
		index := row{fields, &failed}.whole(1)
		switch {
		case arm == nil:
			failed = fmt.Errorf("the run has no arm %q", fields[0])
		case failed != nil:
		case index < 0:
			failed = errors.New("a repeat is negative")
		case index >= len(arm.Repeats):
			continue
		default:
			failed = t.add(&arm.Repeats[index], row{fields[2:], &failed})
		}
		if failed != nil {
			return n, fmt.Errorf("line %d: %w", line, failed)
		}
		n++
	}
}
