package debugfs_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/discovery/debugfs"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func parseHQDs(t *testing.T, text string) debugfs.HQDDump {
	t.Helper()
	d, err := debugfs.ParseHQDs([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// The runs of registers of an SDMA slot.
var (
	runs9   = []int{19, 6, 7, 10}
	runs94  = []int{19, 6, 7, 12}
	runs11  = []int{7, 11, 1, 12, 12}
	runs12  = []int{49}
	runsBad = []int{20, 20}
)

func TestHQDsOfEachKernelAreParsed(t *testing.T) {
	cp := some(56, 1)
	hiq := some(56, 2)
	for _, tc := range []struct {
		name string
		text func(*text)
		want debugfs.HQDDump
	}{
		{"6.1: no Inst", func(t *text) {
			t.linef("Node 1, gpu_id 8a31:")
			t.linef("  HIQ on MEC 2 Pipe 0 Queue 0")
			t.at(4, 0xc914, hiq)
			t.linef("  CP Pipe 3, Queue 7")
			t.at(4, 0xc914, cp)
			t.linef("  SDMA Engine 1, RLC 7")
			t.sdmaRegisters(0x4e40, some(42, 3), runs9...)
		}, debugfs.HQDDump{Nodes: []debugfs.HQDNode{{Node: 1, GPU: 0x8a31, Line: 1, Slots: []debugfs.HQD{
			{Kind: debugfs.SlotHIQ, MEC: 2, Line: 2, Address: 0xc914, Registers: hiq},
			{Kind: debugfs.SlotCP, MEC: 1, Pipe: 3, Queue: 7, Line: 10, Address: 0xc914, Registers: cp},
			{Kind: debugfs.SlotSDMA, Pipe: 1, Queue: 7, Line: 18, Address: 0x4e40, Registers: some(42, 3)},
		}}}}},
		{"6.12 and later: everything again for each XCC, which are 2 and 3 of a partition; a node that is stopped", func(t *text) {
			t.linef("Node 2, gpu_id f7bc:")
			t.linef(" Device is stopped")
			t.linef("Node 3, gpu_id f05b:")
			for _, x := range []int{2, 3} {
				t.linef("   Inst %d, HIQ on MEC 2 Pipe 0 Queue 0", x)
				t.at(4, 0xc914, hiq)
				t.linef(" Inst %d,  CP Pipe 0, Queue 2", x)
				t.at(4, 0xc914, cp)
			}
			t.linef("  SDMA Engine 8, RLC 0")
			t.sdmaRegisters(0x4e40, some(44, 3), runs94...)
		}, debugfs.HQDDump{Nodes: []debugfs.HQDNode{
			{Node: 2, GPU: 0xf7bc, Line: 1, Stopped: true},
			{Node: 3, GPU: 0xf05b, Line: 3, Slots: []debugfs.HQD{
				{Kind: debugfs.SlotHIQ, XCC: 2, MEC: 2, Line: 4, Address: 0xc914, Registers: hiq},
				{Kind: debugfs.SlotCP, XCC: 2, MEC: 1, Queue: 2, Line: 12, Address: 0xc914, Registers: cp},
				{Kind: debugfs.SlotHIQ, XCC: 3, MEC: 2, Line: 20, Address: 0xc914, Registers: hiq},
				{Kind: debugfs.SlotCP, XCC: 3, MEC: 1, Queue: 2, Line: 28, Address: 0xc914, Registers: cp},
				{Kind: debugfs.SlotSDMA, Pipe: 8, Line: 36, Address: 0x4e40, Registers: some(44, 3)},
			}},
		}}},
		{"gfx11 and gfx12", func(t *text) {
			t.linef("Node 1, gpu_id 2f1c:")
			t.linef(" Inst 0,  CP Pipe 0, Queue 2")
			t.at(4, 0xc824, cp)
			t.linef("  SDMA Engine 0, RLC 0")
			t.sdmaRegisters(0x4e40, some(43, 3), runs11...)
			t.linef("  SDMA Engine 0, RLC 1")
			t.sdmaRegisters(0x4e40, some(49, 3), runs12...)
		}, debugfs.HQDDump{Nodes: []debugfs.HQDNode{{Node: 1, GPU: 0x2f1c, Line: 1, Slots: []debugfs.HQD{
			{Kind: debugfs.SlotCP, MEC: 1, Queue: 2, Line: 2, Address: 0xc824, Registers: cp},
			{Kind: debugfs.SlotSDMA, Line: 10, Address: 0x4e40, Registers: some(43, 3)},
			{Kind: debugfs.SlotSDMA, Queue: 1, Line: 19, Address: 0x4e40, Registers: some(49, 3)},
		}}}}},
		{"what no kernel known prints", func(t *text) {
			t.linef("Node 1, gpu_id 2f1c:")
			t.linef("  GFX Pipe 0, Queue 0")
			t.at(4, 0xc824, cp)
			t.linef(" Inst 0,  CP Pipe 0, Queue 2")
			t.at(4, 0xc824, cp[:54])
			t.linef("  SDMA Engine 0, RLC 0")
			t.sdmaRegisters(0x4e40, some(40, 3), runsBad...)
			t.linef(" Inst 0,  CP Pipe 0, Queue 3")
			t.linef("the end")
			t.linef("Node 2, gpu_id 2f1d:")
		}, debugfs.HQDDump{
			Nodes: []debugfs.HQDNode{
				{Node: 1, GPU: 0x2f1c, Line: 1, Slots: []debugfs.HQD{
					{Kind: debugfs.SlotCP, MEC: 1, Queue: 2, Line: 10, Address: 0xc824, Registers: cp[:54]},
					{Kind: debugfs.SlotSDMA, Line: 18, Address: 0x4e40, Registers: some(40, 3)},
				}},
				{Node: 2, GPU: 0x2f1d, Line: 27},
			},
			Warnings: []debugfs.Warning{
				{2, `the slot is skipped: "  GFX Pipe 0, Queue 0"`},
				{10, "54 registers are not decoded: unknown GPU"},
				{18, "40 registers are not decoded: unknown GPU"},
				{25, "the slot is skipped: it has only 0 registers"},
				{26, `the line is skipped: "the end"`},
			},
		}},
		{"nothing", func(*text) {}, debugfs.HQDDump{}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var b text
			tc.text(&b)
			if diff := cmp.Diff(tc.want, parseHQDs(t, b.String())); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestHQDsThatEndEarlyAreParsedAsFarAsComplete(t *testing.T) {
	var b text
	b.linef("Node 2, gpu_id f7bc:")
	var ends []int // of the slots, without the last newline
	end := func() { ends = append(ends, b.Len()-1) }
	for q := range 3 {
		b.linef(" Inst 0,  CP Pipe 0, Queue %d", q)
		b.at(4, 0xc914, some(56, uint32(q)))
		end()
	}
	for q := range 2 {
		b.linef("  SDMA Engine 0, RLC %d", q)
		b.sdmaRegisters(0x4e40, some(44, uint32(q)), runs94...)
		end()
		ends[len(ends)-1]++ // its last row is not full: only the newline shows that it is complete
	}
	all := b.String()
	slots := parseHQDs(t, all).Nodes[0].Slots
	for cut := range len(all) + 1 {
		got := parseHQDs(t, all[:cut])
		n := 0
		for _, end := range ends {
			if end <= cut {
				n++
			}
		}
		var have []debugfs.HQD
		if len(got.Nodes) > 0 {
			have = got.Nodes[0].Slots
		}
		if !slices.EqualFunc(slots[:n], have, func(a, b debugfs.HQD) bool {
			return a.Line == b.Line && slices.Equal(a.Registers, b.Registers)
		}) {
			t.Fatalf("cut after %d of %d bytes (-want +got):\n%s", cut, len(all), cmp.Diff(slots[:n], have))
		}
		whole := cut == 0 || cut == strings.IndexByte(all, '\n')+1 || slices.Contains(ends, cut) || slices.Contains(ends, cut-1)
		if !whole && len(got.Warnings) == 0 {
			t.Fatalf("cut after %d of %d bytes: no warning", cut, len(all))
		}
	}
}

func TestMalformedHQDsAreErrorsWithLineAndColumn(t *testing.T) {
	const (
		node = "Node 2, gpu_id f7bc:\n"
		cp   = " Inst 0,  CP Pipe 0, Queue 2\n"
		row  = "    0000c914: 00000000 00000000 00000000 00000000 00000000 00000000 00000000 00000000\n"
	)
	for _, tc := range []struct {
		text         string
		line, column int
		problem      string
	}{
		{"Node two, gpu_id f7bc:\n", 1, 6, "want a decimal number below 2^31"},
		{"Node 2, gpu_id 63420\n", 1, 21, `want ":"`},
		{cp, 1, 1, "a slot before any node"},
		{" Device is stopped\n", 1, 1, "a device before any node"},
		{node + row, 2, 1, "data outside a slot"},
		{node + " Inst 0, CP Pipe 0, Queue 2\n", 2, 8, `want ",  CP Pipe "`},
		{node + "   Inst 0, HIQ on MEC 2, Pipe 0 Queue 0\n", 2, 24, `want " Pipe "`},
		{node + "  SDMA Engine 0, RLC 0:\n", 2, 23, "want the end of the line"},
		{node + "  HIQ on MEC 2 Pipe 0\n", 2, 22, `want " Queue "`},
		{node + "  CP Pipe 2, Queue x\n", 2, 20, "want a decimal number below 2^31"},
		{node + cp + "    0000c915: 00000000\n", 3, 5, "want an address that is a multiple of 4"},
		{node + cp + row + "    0000c914: 00000000\n", 4, 5, "want an address from 0000c934 on"},
		{node + cp + "    0000c914: 00000000\n    0000c918: 00000000\n", 4, 5, "want an address above 0000c918: a row continues until it has 8 words"},
		{node + cp + "    0000c914: 0000000x\n", 3, 22, "want 8 hexadecimal digits of a word"},
	} {
		_, err := debugfs.ParseHQDs([]byte(tc.text))
		got, ok := errors.AsType[*discovery.ParseError](err)
		if !ok {
			t.Errorf("%q: error %v, want a *discovery.ParseError", tc.text, err)
			continue
		}
		if diff := cmp.Diff(&discovery.ParseError{Line: tc.line, Column: tc.column, Problem: tc.problem}, got); diff != "" {
			t.Errorf("%q (-want +got):\n%s", tc.text, diff)
		}
	}
}

func TestLiveAndStaleSlotsAreDistinguished(t *testing.T) {
	q := queue{mqd: 0x6ed000, ring: 0x7f0000000000, ringBytes: 1 << 20, vmid: 3, live: true, aql: true}
	left := q.registers()
	left[2] = 0
	reset := make([]uint32, 56)
	reset[4] = 0x0be05301 // of an unused slot in the capture of section 7.2
	d := dma{ring: 0x7f0000200000, ringBytes: 1 << 20, vmid: 3, enabled: true, idle: true}
	listening, busy, behind := d, d, d
	listening.listens = true
	busy.idle = false
	behind.rptr, behind.wptr = 64, 128
	gone := d
	gone.enabled = false
	used := d
	used.rptr, used.wptr = 4096, 4096
	var b text
	var want []debugfs.SlotState
	b.linef("Node 2, gpu_id f7bc:")
	for _, cp := range []struct {
		registers []uint32
		state     debugfs.SlotState
	}{{q.registers(), debugfs.Live}, {left, debugfs.Stale}, {reset, debugfs.Empty}} {
		b.linef(" Inst 0,  CP Pipe 0, Queue 2")
		b.at(4, 0xc914, cp.registers)
		want = append(want, cp.state)
	}
	for _, layout := range []struct {
		words [8]int
		runs  []int
		n     int
	}{{gfx9, runs9, 42}, {gfx9, runs94, 44}, {gfx11, runs11, 43}, {gfx12, runs12, 49}} {
		for _, slot := range []struct {
			dma
			state debugfs.SlotState
		}{
			{d, debugfs.Stale},
			{used, debugfs.Stale},
			{gone, debugfs.Stale},
			{dma{idle: true}, debugfs.Empty},
			{listening, debugfs.Live},
			{busy, debugfs.Live},
			{behind, debugfs.Live},
		} {
			b.linef("  SDMA Engine 1, RLC 0")
			b.sdmaRegisters(0x4e40, slot.words(layout.words, layout.n), layout.runs...)
			want = append(want, slot.state)
		}
	}
	dump := parseHQDs(t, b.String())
	if len(dump.Warnings) != 0 {
		t.Error(dump.Warnings)
	}
	var got []debugfs.SlotState
	for _, s := range dump.Slots() {
		if s.GPU != 0xf7bc || s.Node != 2 {
			t.Errorf("a slot of GPU %x, node %d", uint32(s.GPU), s.Node)
		}
		got = append(got, s.State)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestSlotsOfUnknownGPUsAreOmitted(t *testing.T) {
	var b text
	b.linef("Node 1, gpu_id 2f1c:")
	b.linef(" Inst 0,  CP Pipe 0, Queue 2")
	b.at(4, 0xc824, some(54, 1))
	b.linef("  SDMA Engine 0, RLC 0")
	b.at(4, 0x4e40, some(130, 1))
	b.linef(" Inst 0,  CP Pipe 0, Queue 3")
	b.at(4, 0xc824, some(56, 1))
	dump := parseHQDs(t, b.String())
	if slots := dump.Slots(); len(slots) != 1 || slots[0].Queue != 3 || len(dump.Warnings) != 2 {
		t.Errorf("%d slots, warnings %v", len(slots), dump.Warnings)
	}
}

func TestRandomHQDsAreParsedBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var b text
		want := debugfs.HQDDump{}
		line := 1
		old := rapid.Bool().Draw(t, "6.1")
		runs := rapid.SampledFrom([][]int{runs9, runs94, runs11, runs12}).Draw(t, "SDMA")
		count := 0
		for _, n := range runs {
			count += n
		}
		words := func(n int) []uint32 {
			w := rapid.SliceOfN(rapid.Uint32(), 4, 4).Draw(t, "words")
			return slices.Repeat(w, (n+3)/4)[:n]
		}
		small := rapid.IntRange(0, 1<<31-1)
		for range rapid.IntRange(0, 3).Draw(t, "nodes") {
			n := debugfs.HQDNode{Node: small.Draw(t, "node"), GPU: gpreempt.GPUID(rapid.Uint32().Draw(t, "GPU")), Line: line}
			b.linef("Node %d, gpu_id %x:", n.Node, uint32(n.GPU))
			line++
			if rapid.Bool().Draw(t, "stopped") {
				n.Stopped = true
				b.linef(" Device is stopped")
				line++
				want.Nodes = append(want.Nodes, n)
				continue
			}
			for range rapid.IntRange(0, 6).Draw(t, "slots") {
				h := debugfs.HQD{
					Kind: debugfs.SlotKind(rapid.IntRange(0, 2).Draw(t, "kind")), Pipe: small.Draw(t, "pipe"), Queue: small.Draw(t, "queue"),
					Line: line, Address: rapid.Uint32Range(0, 1<<28).Draw(t, "address") * 4,
				}
				if !old && h.Kind != debugfs.SlotSDMA {
					h.XCC = small.Draw(t, "XCC")
				}
				switch h.Kind {
				case debugfs.SlotHIQ:
					h.MEC = small.Draw(t, "MEC")
					if old {
						b.linef("  HIQ on MEC %d Pipe %d Queue %d", h.MEC, h.Pipe, h.Queue)
					} else {
						b.linef("   Inst %d, HIQ on MEC %d Pipe %d Queue %d", h.XCC, h.MEC, h.Pipe, h.Queue)
					}
				case debugfs.SlotCP:
					h.MEC = 1
					if old {
						b.linef("  CP Pipe %d, Queue %d", h.Pipe, h.Queue)
					} else {
						b.linef(" Inst %d,  CP Pipe %d, Queue %d", h.XCC, h.Pipe, h.Queue)
					}
				case debugfs.SlotSDMA:
					b.linef("  SDMA Engine %d, RLC %d", h.Pipe, h.Queue)
				}
				line++
				if h.Kind == debugfs.SlotSDMA {
					h.Registers = words(count)
					b.sdmaRegisters(h.Address, h.Registers, runs...)
					for _, n := range runs {
						line += (n + 7) / 8
					}
				} else {
					h.Registers = words(56)
					b.at(4, h.Address, h.Registers)
					line += 7
				}
				n.Slots = append(n.Slots, h)
			}
			want.Nodes = append(want.Nodes, n)
		}
		got, err := debugfs.ParseHQDs([]byte(b.String()))
		if err != nil {
			t.Fatalf("%v in\n%s", err, b.String())
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatalf("(-want +got):\n%s", diff)
		}
	})
}
