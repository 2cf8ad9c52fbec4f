package debugfs_test

import (
	"fmt"
	"math"
	"runtime"
	"strconv"
	"testing"
	"time"

	"github.com/gpreempt/gpreempt/pkg/discovery/debugfs"
)

// manyMQDs is synthesised: processes with 4 compute queues, each on several XCCs, and one
// SDMA queue.
func manyMQDs(processes, xccs int) (b []byte, queues int) {
	var t text
	for p := range processes {
		t.linef("Process %d PASID %d:", p+1, p+1)
		t.linef("  SDMA queue on device f7bc")
		t.dump(4, s(p).gfx942())
		for i := range 4 {
			t.linef("  Compute queue on device f7bc")
			for _, x := range q(i).images(xccs) {
				t.dump(4, x)
			}
		}
		queues += 5
	}
	return []byte(t.String()), queues
}

// manyHQDs is synthesised: GPUs with 4 XCCs of 24 slots each, and 64 SDMA slots, like an
// MI308X.
func manyHQDs(gpus int) (b []byte, slots int) {
	var t text
	for g := range gpus {
		t.linef("Node %d, gpu_id %x:", g+2, 0xf000+g)
		for x := range 4 {
			t.linef("   Inst %d, HIQ on MEC 2 Pipe 0 Queue 0", x)
			t.at(4, 0xc914, q(0).registers())
			for i := range 24 {
				t.linef(" Inst %d,  CP Pipe %d, Queue %d", x, i/6, i%6+2)
				t.at(4, 0xc914, q(i).registers())
			}
		}
		for i := range 64 {
			t.linef("  SDMA Engine %d, RLC %d", i/8, i%8)
			t.sdmaRegisters(0x4e40, s(i).words(gfx9, 44), runs94...)
		}
		slots += 4*25 + 64
	}
	return []byte(t.String()), slots
}

// perItem runs f over text. In addition it reports the allocations for each queue or slot;
// and by the shortest of many runs, which a busy machine disturbs least, the speed, and how
// much longer it takes than a loop over the bytes that reads hexadecimal numbers: the two
// take turns, and what shares the processor slows both.
func perItem(b *testing.B, text []byte, items int, f func([]byte)) {
	b.Helper()
	b.SetBytes(int64(len(text)))
	b.ReportAllocs()
	for b.Loop() {
		f(text)
	}
	allocs := testing.AllocsPerRun(1, func() { f(text) })
	own, reading := time.Duration(math.MaxInt64), time.Duration(math.MaxInt64)
	var sum uint32
	for range 50 {
		start := time.Now()
		f(text)
		middle := time.Now()
		sum += addNumbers(text)
		own, reading = min(own, middle.Sub(start)), min(reading, time.Since(middle))
	}
	if sum == 0 {
		b.Fatal("no text")
	}
	b.ReportMetric(allocs/float64(items), "allocs/item")
	b.ReportMetric(float64(len(text))/own.Seconds()/1e6, "best-MB/s")
	b.ReportMetric(own.Seconds()/reading.Seconds(), "x-reading")
}

// addNumbers adds the hexadecimal numbers in text.
func addNumbers(text []byte) (sum uint32) {
	number := uint32(0)
	for _, c := range text {
		switch digit := digits[c]; {
		case digit < 16:
			number = number<<4 | uint32(digit)
		default:
			sum, number = sum+number, 0
		}
	}
	return sum + number
}

// digits are the values of hexadecimal digits, and 16 for other bytes.
var digits = func() (all [256]byte) {
	for c := range all {
		all[c] = 16
		if n, err := strconv.ParseUint(string(rune(c)), 16, 8); err == nil {
			all[c] = byte(n)
		}
	}
	return all
}()

func BenchmarkParseMQDs(b *testing.B) {
	for _, xccs := range []int{1, 4, 8} {
		text, queues := manyMQDs(16, xccs)
		b.Run(fmt.Sprintf("xccs=%d", xccs), func(b *testing.B) {
			perItem(b, text, queues, func(text []byte) {
				if d, err := debugfs.ParseMQDs(text); err != nil || len(d.Processes) != 16 {
					b.Fatal(err)
				}
			})
		})
	}
}

func BenchmarkParseHQDs(b *testing.B) {
	text, slots := manyHQDs(8)
	perItem(b, text, slots, func(text []byte) {
		if d, err := debugfs.ParseHQDs(text); err != nil || len(d.Nodes) != 8 {
			b.Fatal(err)
		}
	})
}

// BenchmarkDecodeSlots measures parsing and decoding.
func BenchmarkDecodeSlots(b *testing.B) {
	text, slots := manyHQDs(8)
	perItem(b, text, slots, func(text []byte) {
		if d, err := debugfs.ParseHQDs(text); err != nil || len(d.Slots()) != slots {
			b.Fatal(err)
		}
	})
}

// BenchmarkMatchQueues measures the join of one process with 8 queues.
func BenchmarkMatchQueues(b *testing.B) {
	var known []debugfs.Known
	var dumps []debugfs.MQD
	for i := range 8 {
		known, dumps = append(known, q(i).known(uint32(i), gpu)), append(dumps, q(i).dump(i, gpu, 4))
	}
	b.ReportAllocs()
	for b.Loop() {
		debugfs.MatchQueues(known, dumps, gfx942)
	}
}

// The budget of the parsers: 3 allocations for each queue.
func TestParsingAllocatesLittle(t *testing.T) {
	mqds, queues := manyMQDs(8, 8)
	hqds, slots := manyHQDs(1)
	for _, tc := range []struct {
		name  string
		items int
		parse func() error
	}{
		{"mqds", queues, func() error { _, err := debugfs.ParseMQDs(mqds); return err }},
		{"hqds", slots, func() error { _, err := debugfs.ParseHQDs(hqds); return err }},
	} {
		if got := testing.AllocsPerRun(5, func() {
			if err := tc.parse(); err != nil {
				t.Fatal(err)
			}
		}); got > 3*float64(tc.items) {
			t.Errorf("%s: %v allocations for %d", tc.name, got, tc.items)
		}
	}
}

// A text of only the most expensive lines must not need much more memory than itself.
func TestMemoryIsBoundedByTheText(t *testing.T) {
	const node, process = "Node 0, gpu_id 0:\n", "Process 1 PASID 1:\n"
	for _, tc := range []struct{ name, head, again string }{
		{"processes", "", process},
		{"queues without a dump", process, "  DIQ on device 1\n"},
		{"queues", process, "  DIQ on device 1\n    00000000: 00000000\n"},
		{"dumps", process + "  Compute queue on device 1\n", "    00000000: 00000000\n"},
		{"repeated dumps", process + "  SDMA queue on device 1\n", "    00000000: 00000000\n"},
		{"nodes", "", node},
		{"slots without registers", node, "  CP Pipe 0, Queue 0\n"},
		{"slots", node, "  CP Pipe 0, Queue 0\n    00000000: 00000000\n"},
		{"unknown lines", "", "?\n"},
		{"empty lines", "", "\n"},
		{"no lines", "", "?"},
		{"digits", process + "  Compute queue on device 1\n    00000000:", " 00000000"},
	} {
		text := []byte(tc.head)
		for len(text) < 1<<17 {
			text = append(text, tc.again...)
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		m, _ := debugfs.ParseMQDs(text)
		h, _ := debugfs.ParseHQDs(text)
		slots := h.Slots()
		runtime.ReadMemStats(&after)
		runtime.KeepAlive([]any{m, h, slots})
		if got := float64(after.TotalAlloc-before.TotalAlloc) / float64(len(text)); got > 40 {
			t.Errorf("%s: %.1f bytes allocated for each byte of text", tc.name, got)
		}
	}
}
