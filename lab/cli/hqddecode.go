package cli

import (
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/pkg/discovery/debugfs"
	"github.com/gpreempt/gpreempt/pkg/discovery/registers"
)

func hqdDecode(a *term.App) *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use:               "hqd FILE",
		Short:             "Decode a dump of hqds from debugfs",
		Args:              term.Operands("FILE"),
		ValidArgsFunction: files(1),
		RunE: func(_ *cobra.Command, args []string) error {
			file, data, err := readDump(a, args[0])
			if err != nil {
				return err
			}
			dump, err := debugfs.ParseHQDs(data)
			if err == nil && len(dump.Nodes) == 0 {
				err = nothingIn(data, dump.Warnings)
			}
			if err != nil {
				return notADump(file, "hqd", data, err)
			}
			decoded := decodeHQDs(&dump, all)
			decoded.Warnings = warnDump(a, file, dump.Warnings)
			return a.Show(decoded, func(p *term.Printer) { printHQDs(p, file, decoded) })
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "include empty and stale slots and the driver's own queues")
	return cmd
}

// decodedHQDs is a dump of hqds, decoded.
type decodedHQDs struct {
	Nodes    []decodedNode `json:"nodes"`
	Slots    []decodedSlot `json:"slots"`
	Warnings []dumpWarning `json:"warnings"`
}

// decodedNode is a GPU. The driver's own slots are not counted.
type decodedNode struct {
	Node    int    `json:"node"`
	GPU     uint32 `json:"gpu_id"`
	Stopped bool   `json:"stopped"`
	Live    int    `json:"live"`
	Stale   int    `json:"stale"`
	Empty   int    `json:"empty"`
}

type decodedSlot struct {
	Node    int          `json:"node"`
	GPU     uint32       `json:"gpu_id"`
	Kind    string       `json:"kind"`
	XCC     int          `json:"xcc"`
	MEC     int          `json:"mec"`
	Pipe    int          `json:"pipe"`
	Slot    int          `json:"slot"`
	State   string       `json:"state"`
	Address jsonAddress  `json:"register_address"`
	Compute *computeJSON `json:"compute,omitempty"`
	SDMA    *sdmaJSON    `json:"sdma,omitempty"`

	slot *debugfs.Slot
}

// decodeHQDs decodes the slots of a dump: those in use, or all.
func decodeHQDs(dump *debugfs.HQDDump, all bool) *decodedHQDs {
	out := &decodedHQDs{Nodes: []decodedNode{}, Slots: []decodedSlot{}}
	for i := range dump.Nodes {
		n := &dump.Nodes[i]
		out.Nodes = append(out.Nodes, decodedNode{Node: n.Node, GPU: uint32(n.GPU), Stopped: n.Stopped})
	}
	slots := dump.Slots()
	writes := false
	for i := range slots {
		s := &slots[i]
		writes = writes || s.Kind == debugfs.SlotCP && s.State == debugfs.Live && s.Compute.WritesPriority()
	}
	for i := range slots {
		s := &slots[i]
		for j := range out.Nodes {
			if n := &out.Nodes[j]; n.Node == s.Node && n.GPU == uint32(s.GPU) && s.Kind != debugfs.SlotHIQ {
				switch s.State {
				case debugfs.Live:
					n.Live++
				case debugfs.Stale:
					n.Stale++
				case debugfs.Empty:
					n.Empty++
				}
			}
		}
		if (s.State != debugfs.Live || s.Kind == debugfs.SlotHIQ) && !all {
			continue
		}
		d := decodedSlot{
			Node: s.Node, GPU: uint32(s.GPU), Kind: s.Kind.String(), XCC: s.XCC, MEC: s.MEC, Pipe: s.Pipe, Slot: s.Queue, State: s.State.String(),
			Address: jsonAddress(s.Address), slot: s,
		}
		if s.Kind == debugfs.SlotSDMA {
			d.SDMA = sdmaForJSON(&s.SDMA)
		} else {
			c := registers.Of(s.Compute)
			d.Compute = computeForJSON(&c)
			d.Compute.rank(writes)
		}
		out.Slots = append(out.Slots, d)
	}
	return out
}

func printHQDs(p *term.Printer, file string, d *decodedHQDs) {
	if len(d.Nodes) == 0 {
		p.Linef("%s is empty: no GPU", file)
		return
	}
	if len(d.Slots) > 0 {
		t := p.Table("", slices.Concat(
			term.Columns{">NODE", ">GPU", "KIND", ">XCC", "+>MEC", ">PIPE", ">SLOT", "STATE", ">PRIO", "PIPE PRIO"},
			registerColumns, term.Columns{"+>DEQUEUE", "+>ERROR", "+>REGISTERS AT"},
		))
		for i := range d.Slots {
			d.Slots[i].print(t)
		}
		t.Flush()
		p.Linef("")
	}
	for _, n := range d.Nodes {
		if n.Stopped {
			p.Line(fmt.Sprintf("node %d, GPU %d: ", n.Node, n.GPU), term.Cell{Text: "the scheduler is stopped", Style: term.StyleBad})
			continue
		}
		p.Linef("node %d, GPU %d: %d of %s in use, %d stale", n.Node, n.GPU, n.Live, term.Count(n.Live+n.Stale+n.Empty, "slot"), n.Stale)
	}
}

func (d *decodedSlot) print(t *term.Table) {
	state := term.Cell{Text: d.State}
	if d.slot.State == debugfs.Live {
		state.Style = term.StyleGood
	}
	row := []any{d.Node, d.GPU, d.Kind, d.XCC, d.MEC, d.Pipe, d.Slot, state}
	if d.SDMA != nil {
		row = slices.Concat(row, []any{"-", "-"}, sdmaRegisters(&d.slot.SDMA), []any{"-", "-"})
	} else {
		c := d.Compute.Compute
		row = slices.Concat(row, []any{c.QueuePriority, term.PipePriorityName(c.PipePriority)}, computeRegisters(c), []any{c.DequeueRequest, c.Error})
	}
	t.Row(append(row, term.Address(uint64(d.Address)))...)
}
