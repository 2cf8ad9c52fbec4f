package cli

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpreempt/gpreempt/pkg/discovery/debugfs"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func (a *app) mqdCommand() *cobra.Command {
	return noun("mqd", "The driver's queue descriptors in memory", a.mqdDecode())
}

func (a *app) mqdDecode() *cobra.Command {
	var name string
	cmd := &cobra.Command{
		Use:               "decode FILE",
		Short:             "Decode a dump of mqds from debugfs",
		Args:              operands("FILE"),
		ValidArgsFunction: files(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			gfx := uint32(0)
			if name != "" {
				var err error
				if gfx, err = gpreempt.ParseGFX(strings.ToLower(name)); err != nil {
					return usage(cmd, "invalid --gfx %q; use a name such as gfx90a, gfx942 or gfx1100", name)
				}
			}
			file, data, err := a.readDump(args[0])
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
			decoded.Warnings = a.warnDump(file, dump.Warnings)
			return a.show(decoded, func(p *printer) { printMQDs(p, file, decoded) })
		},
	}
	cmd.Flags().StringVar(&name, "gfx", "", "GPU, such as gfx942, for the layout of SDMA queues")
	complete(cmd, "gfx", []string{"gfx906", "gfx908", "gfx90a", "gfx942", "gfx950", "gfx1030", "gfx1100", "gfx1201"})
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
			var c debugfs.Compute
			if c, err = debugfs.DecodeCompute(words); err == nil {
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

func printMQDs(p *printer, file string, d *decodedMQDs) {
	queues := 0
	for i := range d.Processes {
		process := &d.Processes[i]
		name, pasid := "unknown process", ""
		if process.PID != 0 {
			name, pasid = fmt.Sprintf("process %d", process.PID), fmt.Sprintf(", PASID %d", process.PASID)
		}
		p.line(cell{name, styleBold}, pasid+": "+count(len(process.Queues), "queue"))
		t := p.table("  ", slices.Concat(
			columns{">#", "KIND", ">GPU", ">XCC", ">HWPRIO", "PIPE PRIO"}, registerColumns, columns{"+>LAST GRID", "+LAYOUT", "+>LINE", "NOTE"},
		))
		for j := range process.Queues {
			process.Queues[j].print(t, queues+j+1)
		}
		t.flush()
		p.linef("")
		queues += len(process.Queues)
	}
	if len(d.Processes) == 0 {
		p.linef("%s is empty: no process has queues", file)
		return
	}
	p.linef("%s of %s", count(queues, "queue"), numberOf(len(d.Processes), "process", "processes"))
}

// print writes a row for each image of the queue. n is its number in the dump.
func (q *decodedMQD) print(t *table, n int) {
	switch {
	case q.Problem != "":
		row := append([]any{n, q.Kind, q.GPU}, slices.Repeat([]any{"-"}, 3+len(registerColumns)+2)...)
		t.row(append(row, q.Line, cell{"not decoded: " + q.Problem, styleBad})...)
	case q.SDMA != nil:
		layout, note := q.SDMA.Layout.String(), cell{}
		if q.SDMA.Inferred {
			layout += ", inferred"
		}
		if q.SDMA.Layout == debugfs.SDMAUnknown {
			note = cell{"layout unknown: use --gfx", styleNote}
		}
		t.row(slices.Concat([]any{n, q.Kind, q.GPU, "-", "-", "-"}, sdmaRegisters(q.SDMA.SDMA), []any{"-", layout, q.Line, note})...)
	default:
		for xcc, c := range q.Compute {
			number, note := "", cell{}
			if xcc == 0 {
				number = strconv.Itoa(n)
			}
			if !c.Valid {
				note = cell{fmt.Sprintf("not an MQD of gfx9 to gfx12: begins with %08x", c.Words[0]), styleBad}
			}
			t.row(slices.Concat([]any{
				number, q.Kind, q.GPU, xcc, inexact(c.Priority, c.PriorityExact), pipePriorityName(c.PipePriority),
			}, computeRegisters(c.Compute), []any{c.Grid, "-", q.Line, note})...)
		}
	}
}
