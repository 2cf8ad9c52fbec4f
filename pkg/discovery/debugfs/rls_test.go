package debugfs_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/discovery/debugfs"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// header is that of a PM4 packet of type 3 (pm_build_pm4_header).
func header(opcode debugfs.Opcode, words int) uint32 {
	return 3<<30 | uint32(words-2)<<16 | uint32(opcode)<<8
}

// runlist is one of gfx942: a process with a compute queue and one of SDMA engine
// 9, and the way back to its beginning.
func runlist() []uint32 {
	var w []uint32
	w = append(w, header(debugfs.OpMapProcess, 21), 10<<25|1<<24|1<<22|8<<18|1<<17|1<<16|0x8003,
		0x12345001, 0x7f, 0xaaaa, 0xbbbb, 0x01c15760, 0x800000ff, 0x02c15760, 0xff, 0, 0, 0, 2<<22|1<<7|64,
		0xd0d0, 1, 2, 3, 4, 0, 0)
	w = append(w, header(debugfs.OpMapQueues, 7), 1<<29|1<<12|1<<4, 0x1008<<2, 0x017ba000, 0x1, 0xc1576038, 0x7f61)
	w = append(w, header(debugfs.OpMapQueues, 7), 1<<29|1<<26|2<<21|1<<4|2<<2, 0x284<<2, 0x01000000, 0, 0x2c000038, 0x7f0b)
	w = append(w, header(debugfs.OpRunList, 4), 0x8000, 0x2, 2<<24|1<<23|1<<22|1<<20|48)
	return append(w, make([]uint32, 48-39)...)
}

func TestRunlistsAreSplitIntoPackets(t *testing.T) {
	var b text
	b.linef("Node 1, gpu_id f7bc:")
	b.dump(2, runlist())
	b.linef("Node 2, gpu_id f05b:")
	b.linef("  No active runlist")
	b.linef("Node 3, gpu_id 8a31:")
	b.dump(2, some(3, 1))
	d, err := debugfs.ParseRunlists([]byte(b.String()))
	if err != nil {
		t.Fatal(err)
	}
	want := debugfs.RunlistDump{Runlists: []debugfs.Runlist{
		{Node: 1, GPU: 0xf7bc, Line: 1, Active: true, Words: runlist()},
		{Node: 2, GPU: 0xf05b, Line: 8},
		{Node: 3, GPU: 0x8a31, Line: 10, Active: true, Words: some(3, 1)},
	}}
	if diff := cmp.Diff(want, d); diff != "" {
		t.Fatalf("(-want +got):\n%s", diff)
	}
	packets := d.Runlists[0].Packets()
	wantPackets := []debugfs.Packet{
		{Offset: 0, Opcode: debugfs.OpMapProcess},
		{Offset: 21, Opcode: debugfs.OpMapQueues},
		{Offset: 28, Opcode: debugfs.OpMapQueues},
		{Offset: 35, Opcode: debugfs.OpRunList},
	}
	if diff := cmp.Diff(wantPackets, packets, cmpopts.IgnoreFields(debugfs.Packet{}, "Words")); diff != "" {
		t.Fatalf("packets (-want +got):\n%s", diff)
	}
	process, ok := packets[0].MapProcess()
	if diff := cmp.Diff(debugfs.MapProcess{
		PASID: 0x8003, Quantum: 10, DebugVMID: 8, NewDebug: true, DebugQueue: true, CleanerShader: true, SingleMemoryOps: true,
		PageTable: 0x7f12345001, TrapHandler: 0xff01c1576000, TrapMemory: 0xff02c1576000, Queues: 2, SDMA: true, GWS: 64,
		Extended: true, DebugControl: 0xd0d0, Watch: [4]uint32{1, 2, 3, 4},
	}, process); diff != "" || !ok {
		t.Errorf("MAP_PROCESS %t (-want +got):\n%s", ok, diff)
	}
	compute, ok := packets[1].MapQueues()
	if diff := cmp.Diff(debugfs.MapQueues{
		Queues: 1, GWS: true, Doorbell: 0x1008, MQD: 0x1017ba000, WritePointer: 0x7f61c1576038,
	}, compute); diff != "" || !ok {
		t.Errorf("MAP_QUEUES %t (-want +got):\n%s", ok, diff)
	}
	sdma, ok := packets[2].MapQueues()
	if diff := cmp.Diff(debugfs.MapQueues{
		SDMA: true, Engine: 9, Static: true, Type: 2, Queues: 1, Doorbell: 0x284, MQD: 0x1000000, WritePointer: 0x7f0b2c000038,
	}, sdma); diff != "" || !ok {
		t.Errorf("MAP_QUEUES of SDMA %t (-want +got):\n%s", ok, diff)
	}
	again, ok := packets[3].RunList()
	if diff := cmp.Diff(debugfs.RunList{Base: 0x200008000, Dwords: 48, Chain: true, Valid: true, Processes: 2}, again); diff != "" || !ok {
		t.Errorf("RUN_LIST %t (-want +got):\n%s", ok, diff)
	}
	for i := range packets {
		_, a := packets[i].MapProcess()
		_, b := packets[i].MapQueues()
		_, c := packets[i].RunList()
		if n := []bool{a, b, c}; len(slices.DeleteFunc(n, func(is bool) bool { return !is })) != 1 {
			t.Errorf("packet %d is %t %t %t", i, a, b, c)
		}
	}
}

func TestPacketsOfNoKnownFormAreLeftRaw(t *testing.T) {
	short := debugfs.Packet{Opcode: debugfs.OpMapProcess, Words: []uint32{header(debugfs.OpMapProcess, 15)}}
	if _, ok := short.MapProcess(); ok {
		t.Error("a MAP_PROCESS packet of another size was decoded")
	}
	for engine, want := range map[uint32]bool{0: true, 1 << 26: false, 2 << 26: true, 3 << 26: true, 4 << 26: false, 3 << 2: false, 1<<2 | 7<<26: true} {
		p := debugfs.Packet{Opcode: debugfs.OpMapQueues, Words: []uint32{header(debugfs.OpMapQueues, 7), engine, 0, 0, 0, 0, 0}}
		if m, ok := p.MapQueues(); ok != want {
			t.Errorf("MAP_QUEUES with %#x: %+v, %t", engine, m, ok)
		}
	}
	for _, tc := range []struct {
		name  string
		words []uint32
		want  []debugfs.Packet
	}{
		{"none", nil, nil},
		{"zeros", make([]uint32, 8), nil},
		{"no packet", []uint32{1, 2, 0}, []debugfs.Packet{{Words: []uint32{1, 2}}}},
		{"an opcode not known", []uint32{header(0x10, 2), 5}, []debugfs.Packet{{Opcode: 0x10, Words: []uint32{header(0x10, 2), 5}}}},
		{
			"a packet that ends in zeros",
			[]uint32{header(0x10, 4), 5, 0, 0, 0},
			[]debugfs.Packet{{Opcode: 0x10, Words: []uint32{header(0x10, 4), 5, 0, 0}}},
		},
		{
			"a packet that goes on behind the end",
			[]uint32{header(0x10, 2), 5, header(0x10, 3), 5},
			[]debugfs.Packet{{Opcode: 0x10, Words: []uint32{header(0x10, 2), 5}}, {Offset: 2, Words: []uint32{header(0x10, 3), 5}}},
		},
	} {
		r := debugfs.Runlist{Words: tc.words}
		if diff := cmp.Diff(tc.want, r.Packets()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tc.name, diff)
		}
	}
}

func TestRunlistTextThatIsNotAsExpected(t *testing.T) {
	const node = "Node 1, gpu_id f7bc:\n"
	row := "  00000000:" + strings.Repeat(" 00000001", 8) + "\n"
	for _, tc := range []struct {
		text         string
		line, column int
		problem      string
	}{
		{"Node 1 gpu_id f7bc:\n", 1, 7, `want ", gpu_id "`},
		{row, 1, 1, "a runlist before any node"},
		{"  No active runlist\n", 1, 1, "a runlist before any node"},
		{node + row + "  No active runlist\n", 3, 3, "want more of the runlist, or another node"},
		{node + row + row, 3, 3, "want offset 00000020"},
		{node + "  00000000: 00000001\n  00000004: 00000001\n", 3, 3, "want another node: the row above ended the runlist"},
		{node + "  00000000: 0000000x\n", 2, 20, "want 8 hexadecimal digits of a word"},
	} {
		_, err := debugfs.ParseRunlists([]byte(tc.text))
		got, ok := errors.AsType[*discovery.ParseError](err)
		if !ok {
			t.Errorf("%q: error %v, want a *discovery.ParseError", tc.text, err)
			continue
		}
		if diff := cmp.Diff(&discovery.ParseError{Line: tc.line, Column: tc.column, Problem: tc.problem}, got); diff != "" {
			t.Errorf("%q (-want +got):\n%s", tc.text, diff)
		}
	}
	for _, tc := range []struct {
		text string
		want debugfs.RunlistDump
	}{
		{"", debugfs.RunlistDump{}},
		{node + "  Runlist of old\n", debugfs.RunlistDump{
			Runlists: []debugfs.Runlist{{Node: 1, GPU: 0xf7bc, Line: 1}},
			Warnings: []debugfs.Warning{{2, `the line is passed over: "  Runlist of old"`}},
		}},
		{node + row[:30], debugfs.RunlistDump{
			Runlists: []debugfs.Runlist{{Node: 1, GPU: 0xf7bc, Line: 1}},
			Warnings: []debugfs.Warning{{2, `the text ends within a line, which is passed over: "  00000000: 00000001 00000001 "`}},
		}},
		{node + strings.TrimSuffix(row, "\n"), debugfs.RunlistDump{
			Runlists: []debugfs.Runlist{{Node: 1, GPU: 0xf7bc, Line: 1, Active: true, Words: []uint32{1, 1, 1, 1, 1, 1, 1, 1}}},
		}},
	} {
		got, err := debugfs.ParseRunlists([]byte(tc.text))
		if diff := cmp.Diff(tc.want, got); diff != "" || err != nil {
			t.Errorf("%q: %v (-want +got):\n%s", tc.text, err, diff)
		}
	}
}

func TestRandomRunlistsAreReadBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var b text
		want := debugfs.RunlistDump{}
		line := 1
		for range rapid.IntRange(0, 4).Draw(t, "nodes") {
			r := debugfs.Runlist{Node: rapid.IntRange(0, 1<<31-1).Draw(t, "node"), GPU: gpreempt.GPUID(rapid.Uint32().Draw(t, "GPU")), Line: line}
			b.linef("Node %d, gpu_id %x:", r.Node, uint32(r.GPU))
			line++
			if n := rapid.IntRange(0, 100).Draw(t, "words"); n == 0 {
				b.linef("  No active runlist")
				line++
			} else {
				r.Active, r.Words = true, slices.Repeat(rapid.SliceOfN(rapid.Uint32(), 4, 4).Draw(t, "words"), 25)[:n]
				b.dump(2, r.Words)
				line += (n + 7) / 8
			}
			want.Runlists = append(want.Runlists, r)
		}
		got, err := debugfs.ParseRunlists([]byte(b.String()))
		if diff := cmp.Diff(want, got); diff != "" || err != nil {
			t.Fatalf("%v (-want +got):\n%s", err, diff)
		}
	})
}
