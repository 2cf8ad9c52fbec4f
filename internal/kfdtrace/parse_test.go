package kfdtrace

import (
	"bytes"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func us(n float64) time.Duration { return time.Duration(n * 1000) }

func TestLinesAreRead(t *testing.T) {
	for text, want := range map[string]line{
		// Linux 6.12.
		"            test-141     [000] .N...   129.570118: enter_kfd_open: (kfd_open+0x4/0xf0 [amdgpu])": {
			kind: kindEvent, pid: 141, at: us(129570118), name: "enter_kfd_open", text: "(kfd_open+0x4/0xf0 [amdgpu])",
		},
		"            test-141     [003] .....   129.567182: tracing_mark_write: gpreempt: begin": {
			kind: kindMarker, cpu: 3, pid: 141, at: us(129567182), name: markerEvent, text: "begin",
		},
		"            test-141     [003] .....   129.567182: tracing_mark_write: hello": {
			kind: kindEvent, cpu: 3, pid: 141, at: us(129567182), name: markerEvent, text: "hello",
		},
		// A task may be called anything.
		" a [1] b-7: x-12 [7] y-9  [012] d..2. 22565.217920: sched_switch: prev_comm=a ==> b": {
			kind: kindEvent, cpu: 12, pid: 9, at: us(22565217920), name: "sched_switch", text: "prev_comm=a ==> b",
		},
		// With record-tgid, and without irq-info.
		"          <...>-14449   (  14440) [000] 22565.217920: sys_exit: NR 1 = 1": {
			kind: kindEvent, pid: 14449, at: us(22565217920), name: "sys_exit", text: "NR 1 = 1",
		},
		"          <idle>-0       [001] d..2.   12.000001: empty:": {kind: kindEvent, cpu: 1, at: us(12000001), name: "empty"},
		"CPU:3 [LOST 123 EVENTS]":                                  {kind: kindLost, cpu: 3, count: 123},
		"CPU:0 [LOST EVENTS]":                                      {kind: kindLost},
		"  129.570118 |   0)    test-143    | ! 162.041 us  |  kfd_release [amdgpu]();": {
			kind: kindReturn, pid: 143, at: us(129570118), took: us(162.041), leaf: true, name: "kfd_release",
		},
		"  129.570118 |  11)    test-143    | $ 12345678 us |  f();": {
			kind: kindReturn, cpu: 11, pid: 143, at: us(129570118), took: us(12345678), leaf: true, name: "f",
		},
		"  129.570118 |   0)   a | b-143    |               |      kfd_open [amdgpu]() {": {
			kind: kindCall, pid: 143, at: us(129570118), name: "kfd_open",
		},
		"  129.570118 |   0)    test-143    | + 17.065 us   |      } /* execute_queues_cpsch.constprop.0 [amdgpu] */": {
			kind: kindReturn, pid: 143, at: us(129570118), took: us(17.065), name: "execute_queues_cpsch.constprop.0",
		},
		// Linux 6.15 can print arguments, 6.5 what is returned.
		"  129.570118 |   0)    test-143    |               |  f [m](a=0x1, b=2) {":       {kind: kindCall, pid: 143, at: us(129570118), name: "f"},
		"  129.570118 |   0)    test-143    |   0.250 us    |  f(a=0x1); /* = 0x0 */":     {kind: kindReturn, pid: 143, at: us(129570118), took: 250, leaf: true, name: "f"},
		"  129.570118 |   0)    test-143    |   0.250 us    |  } /* f [m] = 0x0 */":       {kind: kindReturn, pid: 143, at: us(129570118), took: 250, name: "f"},
		"  129.570118 |   0)    test-143    |               |  /* gpreempt: begin */":     {kind: kindMarker, pid: 143, at: us(129570118), text: "begin"},
		"  129.570118 |   0)    test-143    |               |    /* amdgpu_iv: ih:0 x */": {kind: kindEvent, pid: 143, at: us(129570118), name: "amdgpu_iv", text: "ih:0 x"},
		"  129.570118 |   0)    test-143    |   ==========> |":                            {kind: kindNothing, pid: 143, at: us(129570118)},
		" ------------------------------------------":                                     {kind: kindNothing},
		" 0)    test-141    =>   rcu_pre-18  ":                                            {kind: kindNothing},
		"# tracer: function_graph":                                                        {kind: kindNothing},
		"":                                                                                {kind: kindNothing},
		// Cut short, or something else.
		"            test-141     [000] .N...   129.5701":                      {},
		"  129.570118 |   0)    test-143    |               |  kfd_open":       {},
		"  129.570118 |   0)    test-143    | ! 162.041":                       {},
		"  129.570118 |   0)    test-143    |":                                 {},
		"  129.570118 |   0)    test-143    | many us       |  kfd_open();":    {},
		" 0) 1.2 us | kfd_open();":                                             {},
		"CPU:x [LOST 1 EVENTS]":                                                {},
		"  99999999999999999999.5 |   0)    test-143    |   1.0 us |  f();":    {},
		"            test-141     [000] .N... no time: enter_kfd_open: (kfd_o": {},
	} {
		if diff := cmp.Diff(want, parseLine(text), cmp.AllowUnexported(line{})); diff != "" {
			t.Errorf("%q (-want +got):\n%s", text, diff)
		}
	}
}

// drained returns what a reader makes of a text that comes in chunks.
func drained(t testing.TB, text []byte, chunk int, tally *tally) *tally {
	t.Helper()
	var raw bytes.Buffer
	r := &reader{pipe: &textPipe{text, chunk}, raw: &raw, tally: tally, buf: make([]byte, readSize)}
	if err := r.drain(); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(text, raw.Bytes()) {
		t.Fatalf("%d bytes of %d were written", raw.Len(), len(text))
	}
	return tally
}

type textPipe struct {
	text  []byte
	chunk int
}

func (p *textPipe) ReadSome(b []byte) (int, error) {
	n := copy(b[:min(p.chunk, len(b))], p.text)
	p.text = p.text[n:]
	return n, nil
}

func (p *textPipe) Close() error { return nil }

// The files are of Debian's Linux 6.12 with the real amdgpu driver, in an emulator
// and without a GPU.
func TestRealTracesAreCounted(t *testing.T) {
	graph, err := os.ReadFile("testdata/graph.txt")
	if err != nil {
		t.Fatal(err)
	}
	probes, err := os.ReadFile("testdata/probes.txt")
	if err != nil {
		t.Fatal(err)
	}
	probed := newTally()
	for _, f := range []string{"vfs_open", "chrdev_open", "kfd_open", "kfd_release", "kfd_create_process"} {
		probed.enter["enter_"+f], probed.leave["leave_"+f] = f, f
	}
	type summary struct {
		Lines, Unknown uint64
		Began          time.Duration
		Calls          map[string]Latency
		Events         []EventCount
	}
	of := func(tally *tally) summary {
		s := summary{tally.lines, tally.unknown, tally.began, map[string]Latency{}, tally.eventCounts()}
		for _, f := range tally.functionCalls(nil) {
			s.Calls[f.Name] = f.Latency
		}
		return s
	}
	byGraph := of(drained(t, graph, 100, newTally()))
	for name, f := range byGraph.Calls { // the percentiles have their own test
		byGraph.Calls[name] = Latency{Count: f.Count, Min: f.Min, Max: f.Max}
	}
	want := summary{
		Lines: uint64(bytes.Count(graph, []byte("\n"))), Began: us(140376327),
		Calls: map[string]Latency{
			"vfs_open": {Count: 4, Min: us(15.323), Max: us(4242.176)}, "chrdev_open": {Count: 3, Min: us(9.615), Max: us(32.298)},
			"kfd_open": {Count: 3, Min: us(6.239), Max: us(23.565)}, "kfd_create_process": {Count: 3, Min: us(3.546), Max: us(17.065)},
			"kfd_release": {Count: 3, Min: us(2.754), Max: us(14.842)},
		},
		Events: []EventCount{{"sched_switch", 3}, {"sched_wakeup", 2}},
	}
	if diff := cmp.Diff(want, byGraph); diff != "" {
		t.Errorf("graph (-want +got):\n%s", diff)
	}
	byProbes := of(drained(t, probes, 77, probed))
	if byProbes.Unknown != 0 || byProbes.Began != us(161723608) {
		t.Errorf("probes: got %+v", byProbes)
	}
	if f := byProbes.Calls["kfd_create_process"]; f.Count != 3 || f.Max != us(23) || f.Min != us(3) {
		t.Errorf("probes: kfd_create_process %+v", f)
	}
}

func FuzzParseLine(f *testing.F) {
	for _, name := range []string{"testdata/graph.txt", "testdata/probes.txt"} {
		text, err := os.ReadFile(name)
		if err != nil {
			f.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			f.Add(line)
		}
	}
	f.Add("CPU:3 [LOST 123 EVENTS]")
	f.Add(" 129.570118 |   0)    test-143    | many us       |  kfd_open();")
	f.Fuzz(func(t *testing.T, text string) {
		l := parseLine(text)
		if l.at < 0 || l.took < 0 || l.cpu < 0 && l.kind != kindUnknown || l.pid < 0 && l.kind != kindUnknown && l.kind != kindNothing {
			t.Errorf("%q: a number is below 0: %+v", text, l)
		}
		switch l.kind {
		case kindEvent, kindCall, kindReturn:
			if l.name == "" || !strings.Contains(text, l.name) {
				t.Errorf("%q: the name is %q", text, l.name)
			}
		case kindUnknown:
			if diff := cmp.Diff(line{}, l, cmp.AllowUnexported(line{})); diff != "" {
				t.Errorf("%q: not understood, and yet:\n%s", text, diff)
			}
		}
	})
}

func TestLinesMayBeCutAnywhere(t *testing.T) {
	for _, name := range []string{"testdata/graph.txt", "testdata/probes.txt"} {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		text = append(text, "CPU:1 [LOST 3 EVENTS]"...) // the last line may have no end
		want := drained(t, text, readSize, newTally())
		for chunk := 1; chunk < 300; chunk += 13 {
			got := drained(t, text, chunk, newTally())
			if diff := cmp.Diff(want, got, cmp.AllowUnexported(tally{}, calls{}, histogram{}, call{}, thread{})); diff != "" {
				t.Fatalf("%s in pieces of %d (-want +got):\n%s", name, chunk, diff)
			}
		}
	}
}

// A line without an end must not take all memory, and the next one is read again.
func TestLineThatIsTooLongIsCut(t *testing.T) {
	tally := newTally()
	text := []byte("   10.000000 |   0)    train-77    |               |  /* a: " + strings.Repeat("x", 3*maxLine) + " */\nCPU:1 [LOST 3 EVENTS]\n")
	drained(t, text, 4096, tally)
	if tally.lines != 2 || tally.lost != 3 {
		t.Errorf("%d lines, %d lost", tally.lines, tally.lost)
	}
}
