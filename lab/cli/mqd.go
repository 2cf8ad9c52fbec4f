package cli

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/pkg/discovery/debugfs"
	"github.com/gpreempt/gpreempt/pkg/discovery/registers"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func decodeCommand(a *term.App) *cobra.Command {
	return term.Noun("decode", "Decode the driver's dumps of queues", mqdDecode(a), hqdDecode(a))
}

func mqdDecode(a *term.App) *cobra.Command {
	var name string
	cmd := &cobra.Command{
		Use:               "mqd FILE",
		Short:             "Decode a dump of mqds from debugfs",
		Args:              term.Operands("FILE"),
		ValidArgsFunction: files(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			gfx := uint32(0)
			if name != "" {
				var err error
				if gfx, err = gpreempt.ParseGFX(strings.ToLower(name)); err != nil {
					return term.Usage(cmd, "invalid --gfx %q; use a name such as gfx90a, gfx942 or gfx1100", name)
				}
			}
			file, data, err := readDump(a, args[0])
			if err != nil {
				return err
			}
			dump, err := debugfs.ParseMQDs(data)
			if err == nil && len(dump.Processes) == 0 {
				err = nothingIn(data, dump.Warnings)
			}
			if err != nil {
				return notADump(file, "mqd", data, err)
			}
			decoded := decodeMQDs(&dump, gfx)
			decoded.Warnings = warnDump(a, file, dump.Warnings)
			return a.Show(decoded, func(p *term.Printer) { printMQDs(p, file, decoded) })
		},
	}
	cmd.Flags().StringVar(&name, "gfx", "", "GPU, such as gfx942, for the layout of SDMA queues")
	term.Complete(cmd, "gfx", []string{"gfx906", "gfx908", "gfx90a", "gfx942", "gfx950", "gfx1030", "gfx1100", "gfx1201"})
	return cmd
}

// decodedMQDs is a dump of mqds, decoded.
type decodedMQDs struct {
	Processes []decodedProcess `json:"processes"`
	Warnings  []dumpWarning    `json:"warnings"`
}

// decodedProcess is a process; its pid is 0 if the text begins after its line.
type decodedProcess struct {
	PID    int32        `json:"pid"`
	PASID  uint32       `json:"pasid"`
	Line   int          `json:"line"`
	Queues []decodedMQD `json:"queues"`
}

// decodedMQD is a queue. A compute queue has an image for each XCC, others have one.
type decodedMQD struct {
	Kind    string         `json:"kind"`
	GPU     uint32         `json:"gpu_id"`
	Line    int            `json:"line"`
	Compute []*computeJSON `json:"compute,omitempty"`
	SDMA    *sdmaJSON      `json:"sdma,omitempty"`
	// Problem is the reason why it is not decoded, or "".
	Problem string `json:"problem,omitempty"`
}

// decodeMQDs decodes all images of a dump.
func decodeMQDs(dump *debugfs.MQDDump, gfx uint32) *decodedMQDs {
	out := &decodedMQDs{Processes: []decodedProcess{}}
	writes := false
	for i := range dump.Processes {
		from := &dump.Processes[i]
		process := decodedProcess{PID: from.PID, PASID: from.PASID, Line: from.Line, Queues: []decodedMQD{}}
		for j := range from.Queues {
			q := decodeMQD(&from.Queues[j], gfx)
			for _, c := range q.Compute {
				writes = writes || c.WritesPriority()
			}
			process.Queues = append(process.Queues, q)
		}
		out.Processes = append(out.Processes, process)
	}
	for i := range out.Processes {
		for _, q := range out.Processes[i].Queues {
			for _, c := range q.Compute {
				c.rank(writes)
			}
		}
	}
	return out
}

func decodeMQD(m *debugfs.MQD, gfx uint32) decodedMQD {
	q := decodedMQD{Kind: m.Kind.String(), GPU: uint32(m.GPU), Line: m.Line}
	if len(m.XCCs) == 0 {
		q.Problem = "the dump is not complete"
	}
	for _, words := range m.XCCs {
		var err error
		if m.Kind == debugfs.KindSDMA {
			var s debugfs.SDMA
			if s, err = debugfs.DecodeSDMA(words, gfx); err == nil {
				q.SDMA = sdmaForJSON(&s)
			}
		} else {
			var c registers.Compute
			if c, err = registers.DecodeCompute(words); err == nil {
				q.Compute = append(q.Compute, computeForJSON(&c))
			}
		}
		if err != nil {
			q.Problem = err.Error()
			return q
		}
	}
	return q
}

func printMQDs(p *term.Printer, file string, d *decodedMQDs) {
	queues := 0
	for i := range d.Processes {
		process := &d.Processes[i]
		name, pasid := "unknown process", ""
		if process.PID != 0 {
			name, pasid = fmt.Sprintf("process %d", process.PID), fmt.Sprintf(", PASID %d", process.PASID)
		}
		p.Line(term.Cell{Text: name, Style: term.StyleBold}, pasid+": "+term.Count(len(process.Queues), "queue"))
		t := p.Table("  ", slices.Concat(
			term.Columns{">#", "KIND", ">GPU", ">XCC", ">HWPRIO", "PIPE PRIO"}, registerColumns, term.Columns{"+>LAST GRID", "+LAYOUT", "+>LINE", "NOTE"},
		))
		for j := range process.Queues {
			process.Queues[j].print(t, queues+j+1)
		}
		t.Flush()
		p.Linef("")
		queues += len(process.Queues)
	}
	if len(d.Processes) == 0 {
		p.Linef("%s is empty: no process has queues", file)
		return
	}
	p.Linef("%s of %s", term.Count(queues, "queue"), term.NumberOf(len(d.Processes), "process", "processes"))
}

// print writes a row for each image of the queue. n is its number in the dump.
func (q *decodedMQD) print(t *term.Table, n int) {
	switch {
	case q.Problem != "":
		row := append([]any{n, q.Kind, q.GPU}, slices.Repeat([]any{"-"}, 3+len(registerColumns)+2)...)
		t.Row(append(row, q.Line, term.Cell{Text: "not decoded: " + q.Problem, Style: term.StyleBad})...)
	case q.SDMA != nil:
		layout, note := q.SDMA.Layout.String(), term.Cell{}
		if q.SDMA.Inferred {
			layout += ", inferred"
		}
		if q.SDMA.Layout == debugfs.SDMAUnknown {
			note = term.Cell{Text: "layout unknown: use --gfx", Style: term.StyleNote}
		}
		t.Row(slices.Concat([]any{n, q.Kind, q.GPU, "-", "-", "-"}, sdmaRegisters(q.SDMA.SDMA), []any{"-", layout, q.Line, note})...)
	default:
		for xcc, c := range q.Compute {
			number, note := "", term.Cell{}
			if xcc == 0 {
				number = strconv.Itoa(n)
			}
			if !c.Valid {
				note = term.Cell{Text: fmt.Sprintf("not an MQD of gfx9 to gfx12: begins with %08x", c.Words[0]), Style: term.StyleBad}
			}
			t.Row(slices.Concat([]any{
				number, q.Kind, q.GPU, xcc, term.Inexact(c.Priority, c.PriorityExact), term.PipePriorityName(c.PipePriority),
			}, computeRegisters(c.Compute), []any{c.Grid, "-", q.Line, note})...)
		}
	}
}
