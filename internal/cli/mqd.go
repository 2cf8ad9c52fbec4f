package cli

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/gpreempt/gpreempt/pkg/discovery/debugfs"
)

func (a *app) mqdCommand() *cobra.Command {
	return noun("mqd", "The driver's images of queues in memory", a.mqdDecode())
}

func (a *app) mqdDecode() *cobra.Command {
	var name string
	cmd := &cobra.Command{
		Use:   "decode FILE",
		Short: "Decode a dump of mqds from debugfs",
		Long: `Decodes a dump of the file mqds of amdkfd's debugfs directory: a line for each queue,
and for each XCC of it. Kernels 6.1 to 7.2, AMD's own driver; gfx9 to gfx12.

The image of a queue (MQD) is as of the moment it was last taken off the GPU: positions
and VMID are 0 until then, and out of date while it runs. There are no queue ids in it.
READ and WRITTEN are in dwords, 16 to an AQL packet; of SDMA queues in bytes.
HWPRIO is the priority the driver was given; with a ~ only which of HIP's it is near.
-o wide and -o json have more.

The layout of SDMA queues differs between GPUs: --gfx says which. Without, it is told
from the words where it can be.

` + fmt.Sprintf(aboutDumps, "mqds", "mqd"),
		Example:           "  gpctl mqd decode mqds.txt\n  gpctl mqd decode mqds.txt --gfx gfx942 -o json",
		Args:              operands("FILE"),
		ValidArgsFunction: files(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			gfx := uint32(0)
			if name != "" {
				var err error
				if gfx, err = parseGFX(name); err != nil {
					return usage(cmd, "%v", err)
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
			return a.showData(decoded, func(p *printer) { printMQDs(p, file, decoded) })
		},
	}
	cmd.Flags().StringVar(&name, "gfx", "", "the GPU, such as gfx942, for the layout of SDMA queues")
	complete(cmd, "gfx", []string{"gfx906", "gfx908", "gfx90a", "gfx942", "gfx950", "gfx1030", "gfx1100", "gfx1201"})
	return cmd
}

// decodedMQDs is a dump of mqds, decoded.
type decodedMQDs struct {
	Processes []decodedProcess `json:"processes"`
	Warnings  []dumpWarning    `json:"warnings"`
}

type decodedProcess struct {
	PID    int32        `json:"pid"`
	PASID  uint32       `json:"pasid"`
	Line   int          `json:"line"`
	Queues []decodedMQD `json:"queues"`
}

// decodedMQD is a queue: its images, of which there is one for each XCC of a
// compute queue and one of others.
type decodedMQD struct {
	Kind    string         `json:"kind"`
	GPU     uint32         `json:"gpu_id"`
	Line    int            `json:"line"`
	Compute []*computeJSON `json:"compute,omitempty"`
	SDMA    *sdmaJSON      `json:"sdma,omitempty"`
	// Problem says why it is not decoded, "" when it is.
	Problem string `json:"problem,omitempty"`

	compute []debugfs.Compute
	sdma    debugfs.SDMA
}

// decodeMQDs tells the meaning of all images of a dump.
func decodeMQDs(dump *debugfs.MQDDump, gfx uint32) *decodedMQDs {
	out := &decodedMQDs{Processes: []decodedProcess{}}
	writes := false
	for i := range dump.Processes {
		from := &dump.Processes[i]
		process := decodedProcess{PID: from.PID, PASID: from.PASID, Line: from.Line, Queues: []decodedMQD{}}
		for j := range from.Queues {
			q := decodeMQD(&from.Queues[j], gfx)
			for k := range q.compute {
				writes = writes || q.compute[k].WritesPriority()
			}
			process.Queues = append(process.Queues, q)
		}
		out.Processes = append(out.Processes, process)
	}
	for i := range out.Processes {
		for j := range out.Processes[i].Queues {
			q := &out.Processes[i].Queues[j]
			for k := range q.compute {
				q.Compute = append(q.Compute, computeForJSON(&q.compute[k], writes))
			}
		}
	}
	return out
}

func decodeMQD(m *debugfs.MQD, gfx uint32) decodedMQD {
	q := decodedMQD{Kind: m.Kind.String(), GPU: uint32(m.GPU), Line: m.Line}
	for _, words := range m.XCCs {
		var err error
		if m.Kind == debugfs.KindSDMA {
			if q.sdma, err = debugfs.DecodeSDMA(words, gfx); err == nil {
				q.SDMA = sdmaForJSON(&q.sdma)
			}
		} else {
			var c debugfs.Compute
			if c, err = debugfs.DecodeCompute(words); err == nil {
				q.compute = append(q.compute, c)
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
		p.line(cell{fmt.Sprintf("process %d", process.PID), styleBold}, text(fmt.Sprintf(", PASID %d: %s", process.PASID,
			count(len(process.Queues), "queue"))))
		t := p.table("  ", columns{
			">#", "KIND", ">GPU", ">XCC", ">HWPRIO", "PIPE PRIO", ">ADDRESS", ">RING", ">READ", ">WRITTEN", ">BEHIND", ">VMID", ">DOORBELL", "PACKETS",
			"+QUANTUM", "+>MQD", "+>READ POINTER AT", "+>WRITE POINTER AT", "+>SAVE AREA", "+>LAST GRID", "+LAYOUT", "+>LINE", "NOTE",
		})
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

// print writes a row for each image of the queue; n is its number in the dump.
func (q *decodedMQD) print(t *table, n int) {
	const fields = 23
	row := func(cells ...cell) {
		for len(cells) < fields {
			cells = append(cells, text("-"))
		}
		t.row(cells...)
	}
	switch {
	case q.Problem != "":
		cells := make([]cell, 0, fields)
		cells = append(cells, text(n), text(q.Kind), text(q.GPU))
		for len(cells) < fields-2 {
			cells = append(cells, text("-"))
		}
		row(append(cells, text(q.Line), cell{"not decoded: " + q.Problem, styleBad})...)
	case q.SDMA != nil:
		s := &q.sdma
		layout := s.Layout.String()
		if s.Inferred {
			layout += ", inferred"
		}
		note := cell{}
		if s.Layout == debugfs.SDMAUnknown {
			note = cell{"layout unknown: --gfx tells it", styleNote}
		}
		row(text(n), text(q.Kind), text(q.GPU), text("-"), text("-"), text("-"), text(address(s.RingBase)), text(ringSize(s.RingBase, s.RingBytes)),
			text(s.ReadPosition), text(s.WritePosition), text(sdmaBacklog(s)), text(s.VMID), text(fmt.Sprintf("0x%x", s.Doorbell*4)), text("SDMA"),
			text("-"), text(address(s.MQD)), text(address(s.ReadPointer)), text(address(s.WritePointer)), text("-"), text("-"), text(layout),
			text(q.Line), note)
	default:
		for xcc := range q.compute {
			c, view := &q.compute[xcc], q.Compute[xcc]
			number, note := text(""), cell{}
			if xcc == 0 {
				number = text(n)
			}
			if !c.Valid {
				note = cell{fmt.Sprintf("begins with %08x, which is no MQD of gfx9 to gfx12", c.Words[0]), styleBad}
			}
			row(number, text(q.Kind), text(q.GPU), text(xcc), text(inexact(view.Priority, view.PriorityExact)), text(pipePriorityName(c.PipePriority)),
				text(address(c.RingBase)), text(ringSize(c.RingBase, c.RingBytes)), text(c.ReadPosition), text(c.WritePosition), text(computeBacklog(c)), text(c.VMID),
				text(fmt.Sprintf("0x%x", c.Doorbell*4)), text(computePackets(c)), text(c.Quantum), text(address(c.MQD)), text(address(c.ReadPointer)),
				text(address(c.WritePointer)), text(saveArea(c)), text(fmt.Sprint(c.Grid)), text("-"), text(q.Line), note)
		}
	}
}
