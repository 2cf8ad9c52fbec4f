package debugfs_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/discovery/debugfs"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// some returns n words that encode their position.
func some(n int, from uint32) []uint32 {
	words := make([]uint32, n)
	for i := range words {
		words[i] = from + uint32(i)*0x01010101
	}
	return words
}

func parseMQDs(t *testing.T, text string) debugfs.MQDDump {
	t.Helper()
	d, err := debugfs.ParseMQDs([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestMQDsOfEachKernelAreParsed(t *testing.T) {
	var (
		compute  = some(512, 1)
		second   = some(512, 2)
		large    = some(1024, 3)
		sdma     = some(128, 4)
		sdma10   = some(130, 5)
		adjacent = some(128, 6)
		diq      = some(512, 7)
	)
	for _, tc := range []struct {
		name string
		text func(*text)
		want debugfs.MQDDump
	}{
		{"6.1: hexadecimal PASID, one dump for each queue", func(t *text) {
			t.linef("Process 4211 PASID 0x8003:")
			t.linef("  SDMA queue on device 8a31")
			t.dump(4, sdma)
			t.linef("  Compute queue on device 8a31")
			t.dump(4, compute)
		}, debugfs.MQDDump{Processes: []debugfs.MQDProcess{{PID: 4211, PASID: 0x8003, Line: 1, Queues: []debugfs.MQD{
			{Kind: debugfs.KindSDMA, GPU: 0x8a31, Line: 2, XCCs: [][]uint32{sdma}},
			{Kind: debugfs.KindCompute, GPU: 0x8a31, Line: 19, XCCs: [][]uint32{compute}},
		}}}}},
		{"6.12: an SDMA queue behind a compute queue of two XCCs is repeated, of the memory behind", func(t *text) {
			t.linef("Process 1 PASID 0x8001:")
			t.linef("  SDMA queue on device f7bc")
			t.dump(4, sdma)
			t.linef("  Compute queue on device f7bc")
			t.dump(4, compute)
			t.dump(4, second)
			t.linef("  SDMA queue on device f7bc")
			t.dump(4, sdma)
			t.dump(4, adjacent)
			t.linef("  DIQ on device f7bc")
			t.dump(4, diq)
			t.dump(4, compute)
			t.linef("  Compute queue on device f7bc")
			t.dump(4, second)
			t.dump(4, compute)
		}, debugfs.MQDDump{Processes: []debugfs.MQDProcess{{PID: 1, PASID: 0x8001, Line: 1, Queues: []debugfs.MQD{
			{Kind: debugfs.KindSDMA, GPU: 0xf7bc, Line: 2, XCCs: [][]uint32{sdma}},
			{Kind: debugfs.KindCompute, GPU: 0xf7bc, Line: 19, XCCs: [][]uint32{compute, second}},
			{Kind: debugfs.KindSDMA, GPU: 0xf7bc, Line: 148, XCCs: [][]uint32{sdma}},
			{Kind: debugfs.KindDIQ, GPU: 0xf7bc, Line: 181, XCCs: [][]uint32{diq}},
			{Kind: debugfs.KindCompute, GPU: 0xf7bc, Line: 310, XCCs: [][]uint32{second, compute}},
		}}}}},
		{"7.2: the pid for a PASID, a secondary context with the same pid, a process without queues", func(t *text) {
			t.linef("Process 77 PASID 77:")
			t.linef("  Compute queue on device 2f1c")
			t.dump(4, large)
			t.linef("Process 77 PASID 77:")
			t.linef("  SDMA queue on device 2f1c")
			t.dump(4, sdma10)
			t.linef("Process 78 PASID 78:")
		}, debugfs.MQDDump{Processes: []debugfs.MQDProcess{
			{PID: 77, PASID: 77, Line: 1, Queues: []debugfs.MQD{{Kind: debugfs.KindCompute, GPU: 0x2f1c, Line: 2, XCCs: [][]uint32{large}}}},
			{PID: 77, PASID: 77, Line: 131, Queues: []debugfs.MQD{{Kind: debugfs.KindSDMA, GPU: 0x2f1c, Line: 132, XCCs: [][]uint32{sdma10}}}},
			{PID: 78, PASID: 78, Line: 150},
		}}},
		{"a text that begins within the data of a queue", func(t *text) {
			t.at(4, 256, sdma[64:])
			t.linef("  SDMA queue on device f7bc")
			t.dump(4, sdma)
			t.linef("Process 5 PASID 0x8001:")
			t.at(4, 0, sdma)
			t.linef("  SDMA queue on device f7bc")
			t.dump(4, sdma)
		}, debugfs.MQDDump{
			Processes: []debugfs.MQDProcess{
				{Line: 9, Queues: []debugfs.MQD{{Kind: debugfs.KindSDMA, GPU: 0xf7bc, Line: 9, XCCs: [][]uint32{sdma}}}},
				{PID: 5, PASID: 0x8001, Line: 26, Queues: []debugfs.MQD{{Kind: debugfs.KindSDMA, GPU: 0xf7bc, Line: 43, XCCs: [][]uint32{sdma}}}},
			},
			Warnings: []debugfs.Warning{
				{1, "data is skipped: the line of its queue is missing"},
				{9, "the process is unknown: its line is missing"},
				{27, "data is skipped: the line of its queue is missing"},
			},
		}},
		{"a queue without its first rows", func(t *text) {
			t.linef("Process 5 PASID 0x8001:")
			t.linef("  Compute queue on device f7bc")
			t.at(4, 64, compute[16:])
			t.dump(4, second)
			t.linef("  SDMA queue on device f7bc")
			t.dump(4, sdma)
		}, debugfs.MQDDump{
			Processes: []debugfs.MQDProcess{{PID: 5, PASID: 0x8001, Line: 1, Queues: []debugfs.MQD{
				{Kind: debugfs.KindCompute, GPU: 0xf7bc, Line: 2},
				{Kind: debugfs.KindSDMA, GPU: 0xf7bc, Line: 129, XCCs: [][]uint32{sdma}},
			}}},
			Warnings: []debugfs.Warning{{2, "the data of the queue is skipped: its first rows are missing, it begins at offset 00000040"}},
		}},
		{"queues the driver does not understand either", func(t *text) {
			t.linef("Process 5 PASID 0x8001:")
			t.linef("  Bad user queue type 9 on device f7bc")
			t.linef("  Queue node with bad user queue type 9 on device f7bc")
			t.linef("  Bad kernel queue type 2 on device f7bc")
			t.linef("  Weird: Queue node with neither kernel nor user queue")
			t.linef("  SDMA queue on device f7bc")
			t.dump(4, sdma)
		}, debugfs.MQDDump{
			Processes: []debugfs.MQDProcess{{PID: 5, PASID: 0x8001, Line: 1, Queues: []debugfs.MQD{
				{Kind: debugfs.KindSDMA, GPU: 0xf7bc, Line: 6, XCCs: [][]uint32{sdma}},
			}}},
			Warnings: []debugfs.Warning{
				{2, `the queue is skipped: "  Bad user queue type 9 on device f7bc"`},
				{3, `the queue is skipped: "  Queue node with bad user queue type 9 on device f7bc"`},
				{4, `the queue is skipped: "  Bad kernel queue type 2 on device f7bc"`},
				{5, `the queue is skipped: "  Weird: Queue node with neither kernel nor user queue"`},
			},
		}},
		{"lines of no kernel known: a kind of queue with its data, and one between rows", func(t *text) {
			t.linef("hello")
			t.linef("Process 5 PASID 5:")
			t.linef("  Quantum queue on device f7bc")
			t.dump(4, compute)
			t.linef("  SDMA queue on device f7bc")
			t.at(4, 0, sdma[:64])
			t.linef("    engine 3")
			t.linef("    eeeeeee 3")
			t.linef("     00000000: 00000000")
			t.linef("    ")
			t.at(4, 256, sdma[64:])
			t.linef("")
		}, debugfs.MQDDump{
			Processes: []debugfs.MQDProcess{{PID: 5, PASID: 5, Line: 2, Queues: []debugfs.MQD{
				{Kind: debugfs.KindSDMA, GPU: 0xf7bc, Line: 68, XCCs: [][]uint32{sdma}},
			}}},
			Warnings: []debugfs.Warning{
				{1, `the line is skipped: "hello"`},
				{3, `the queue is skipped: "  Quantum queue on device f7bc"`},
				{77, `the line is skipped: "    engine 3"`},
				{78, `the line is skipped: "    eeeeeee 3"`},
				{79, `the line is skipped: "     00000000: 00000000"`},
				{80, `the line is skipped: "    "`},
				{89, `the line is skipped: ""`},
			},
		}},
		{"a dump of a size not known", func(t *text) {
			t.linef("Process 5 PASID 5:")
			t.linef("  Compute queue on device f7bc")
			t.dump(4, compute[:300])
			t.linef("  Compute queue on device f7bc")
			t.dump(4, compute)
		}, debugfs.MQDDump{
			Processes: []debugfs.MQDProcess{{PID: 5, PASID: 5, Line: 1, Queues: []debugfs.MQD{
				{Kind: debugfs.KindCompute, GPU: 0xf7bc, Line: 2, XCCs: [][]uint32{compute[:300]}},
				{Kind: debugfs.KindCompute, GPU: 0xf7bc, Line: 41, XCCs: [][]uint32{compute}},
			}}},
			Warnings: []debugfs.Warning{{2, "a dump of 1200 bytes has an unknown size"}},
		}},
		{"a queue without a dump", func(t *text) {
			t.linef("Process 5 PASID 5:")
			t.linef("  Compute queue on device f7bc")
			t.linef("Process 6 PASID 6:")
		}, debugfs.MQDDump{
			Processes: []debugfs.MQDProcess{
				{PID: 5, PASID: 5, Line: 1, Queues: []debugfs.MQD{{Kind: debugfs.KindCompute, GPU: 0xf7bc, Line: 2}}},
				{PID: 6, PASID: 6, Line: 3},
			},
			Warnings: []debugfs.Warning{{2, "the queue has no complete dump"}},
		}},
		{"nothing", func(*text) {}, debugfs.MQDDump{}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var b text
			tc.text(&b)
			if diff := cmp.Diff(tc.want, parseMQDs(t, b.String())); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestMalformedMQDsAreErrorsWithLineAndColumn(t *testing.T) {
	const (
		process = "Process 1 PASID 1:\n"
		compute = "  Compute queue on device f7bc\n"
		row     = "    00000000: 00000000 00000000 00000000 00000000 00000000 00000000 00000000 00000000\n"
	)
	for _, tc := range []struct {
		text         string
		line, column int
		problem      string
	}{
		{"Process x PASID 1:\n", 1, 9, "want a decimal number below 2^31"},
		{"Process 0 PASID 1:\n", 1, 9, "want a positive pid"},
		{"Process 2147483648 PASID 1:\n", 1, 9, "want a decimal number below 2^31"},
		{"Process 1 PASID 0x:\n", 1, 19, "want a hexadecimal number below 2^32, in lower case"},
		{"Process 1 PASID -1:\n", 1, 17, "want a decimal number below 2^32, or a hexadecimal one after 0x"},
		{"Process 1 PASID 1\n", 1, 18, `want ":"`},
		{"Process 1 PASID 1: \n", 1, 19, "want the end of the line"},
		{"Process 1 pasid 1:\n", 1, 10, `want " PASID "`},
		{process + "  Compute queue on device 0xf7bc\n", 2, 28, "want the end of the line"},
		{process + "  Compute queue on device 1f7bcf7bc\n", 2, 27, "want a hexadecimal number below 2^32, in lower case"},
		{process + "  SDMA queue on device 0001:01:00.0\n", 2, 28, "want the end of the line"},
		{process + "  DIQ on device \n", 2, 17, "want a hexadecimal number below 2^32, in lower case"},
		{process + compute + row + "    00000040: 00000000\n", 4, 5, "want offset 00000020, or 00000000 of the next dump"},
		{process + compute + "    00000000: 00000000\n    00000004: 00000000\n", 4, 5, "want offset 00000000 of the next dump: the row above ended this one"},
		{process + compute + "    0000000: 00000000\n", 3, 12, "want 8 hexadecimal digits of an address"},
		{process + compute + "    00000000 00000000\n", 3, 13, "want a colon after the address"},
		{process + compute + "    00: 00000000\n", 3, 7, "want 8 hexadecimal digits of an address"},
		{process + compute + "    00000000x: 00000000\n", 3, 13, "want a colon after the address"},
		{process + compute + "    00000000\n", 3, 13, "want a colon after the address"},
		{process + compute + "    00000000: 00000000.00000000\n", 3, 23, "want a space before the next word"},
		{process + compute + "    00000000:\n", 3, 14, "want at least one word"},
		{process + compute + "    00000000:  00000000\n", 3, 15, "want 8 hexadecimal digits of a word"},
		{process + compute + "    00000000: 0000000g\n", 3, 22, "want 8 hexadecimal digits of a word"},
		{process + compute + "    00000000: 0000000A\n", 3, 22, "want 8 hexadecimal digits of a word"},
		{process + compute + "    00000000: 00000000 0000\n", 3, 28, "want 8 hexadecimal digits of a word"},
		{process + compute + "    00000000: 00000000 \n", 3, 24, "want 8 hexadecimal digits of a word"},
		{process + compute + strings.TrimSuffix(row, "\n") + " 00000000\n", 3, 86, "want no more than 8 words in a row"},
	} {
		_, err := debugfs.ParseMQDs([]byte(tc.text))
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

func TestWarningsAreBounded(t *testing.T) {
	got := parseMQDs(t, strings.Repeat("what is this\n", 1000)).Warnings
	if len(got) != 33 || got[32] != (debugfs.Warning{1000, "968 more warnings"}) {
		t.Errorf("%d warnings, the last is %+v", len(got), got[len(got)-1])
	}
	got = parseMQDs(t, strings.Repeat("\xff\x00", 1<<20)+"\n").Warnings
	if len(got) != 1 || len(got[0].Text) > 400 {
		t.Errorf("a warning of %d bytes for one long line", len(got[0].Text))
	}
}

// The text of a random state is parsed to that state.
func TestRandomMQDsAreParsedBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var b text
		want := debugfs.MQDDump{}
		line := 1
		dump := func(n int) []uint32 {
			words := rapid.SliceOfN(rapid.Uint32(), 4, 4).Draw(t, "words")
			words = slices.Repeat(words, (n+3)/4)[:n]
			b.dump(4, words)
			line += (n + 7) / 8
			return words
		}
		large := rapid.Bool().Draw(t, "gfx12.1")
		gfx10 := rapid.Bool().Draw(t, "gfx10")
		xccs := rapid.IntRange(1, 4).Draw(t, "XCCs")
		for range rapid.IntRange(0, 3).Draw(t, "processes") {
			p := debugfs.MQDProcess{PID: int32(rapid.IntRange(1, 1<<31-1).Draw(t, "pid")), PASID: rapid.Uint32().Draw(t, "PASID"), Line: line}
			format := rapid.SampledFrom([]string{"Process %d PASID %d:", "Process %d PASID 0x%x:"}).Draw(t, "form")
			b.linef(format, p.PID, p.PASID)
			line++
			sticky := 1
			for range rapid.IntRange(0, 3).Draw(t, "queues") {
				q := debugfs.MQD{Kind: debugfs.Kind(rapid.IntRange(0, 2).Draw(t, "kind")), GPU: gpreempt.GPUID(rapid.Uint32().Draw(t, "GPU")), Line: line}
				n := 512
				switch q.Kind {
				case debugfs.KindCompute:
					b.linef("  Compute queue on device %x", uint32(q.GPU))
					sticky = xccs
					if large {
						n = 1024
					}
				case debugfs.KindSDMA:
					b.linef("  SDMA queue on device %x", uint32(q.GPU))
					n = 128
					if gfx10 {
						n = 130
					}
				case debugfs.KindDIQ:
					b.linef("  DIQ on device %x", uint32(q.GPU))
				}
				line++
				for x := range sticky {
					words := dump(n)
					if q.Kind == debugfs.KindCompute || x == 0 {
						q.XCCs = append(q.XCCs, words)
					}
				}
				p.Queues = append(p.Queues, q)
			}
			want.Processes = append(want.Processes, p)
		}
		got, err := debugfs.ParseMQDs([]byte(b.String()))
		if err != nil {
			t.Fatalf("%v in\n%s", err, b.String())
		}
		if !slices.EqualFunc(want.Processes, got.Processes, func(a, b debugfs.MQDProcess) bool {
			return a.PID == b.PID && a.PASID == b.PASID && a.Line == b.Line && slices.EqualFunc(a.Queues, b.Queues, sameMQD)
		}) || len(got.Warnings) > 0 {
			t.Fatalf("(-want +got):\n%s", cmp.Diff(want, got))
		}
	})
}

func TestKindsHaveNames(t *testing.T) {
	got := fmt.Sprint(debugfs.KindCompute, debugfs.KindSDMA, debugfs.KindDIQ, debugfs.Kind(9),
		debugfs.SlotCP, debugfs.SlotHIQ, debugfs.SlotSDMA, debugfs.SlotKind(9), debugfs.Empty, debugfs.Stale, debugfs.Live, debugfs.SlotState(9),
		debugfs.SDMAUnknown, debugfs.SDMAGFX9, debugfs.SDMAGFX11, debugfs.SDMAGFX12)
	want := "compute sdma diq kind(9) cp hiq sdma kind(9) empty stale live state(9) unknown gfx9/gfx10 gfx11 gfx12"
	if got != want {
		t.Errorf("%s, want %s", got, want)
	}
}
