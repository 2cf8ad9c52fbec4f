package kfdtrace

import (
	"bytes"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/stat/histogram"
)

func us(n float64) time.Duration { return time.Duration(n * 1000) }

func TestLinesAreParsed(t *testing.T) {
	for text, want := range map[string]line{
		// Linux 6.12.
		"            test-141     [000] .N...   129.570118: enter_kfd_open: (kfd_open+0x4/0xf0 [amdgpu])": {
			kind: kindEvent, pid: 141, at: us(129570118), name: "enter_kfd_open", text: "(kfd_open+0x4/0xf0 [amdgpu])",
		},
		"            test-141     [003] .....   129.567182: tracing_mark_write: gpreempt: begin": {
			kind: kindMarker, cpu: 3, pid: 141, at: us(129567182), name: markerEvent, text: marker,
		},
		"            test-141     [003] .....   129.567182: tracing_mark_write: hello": {
			kind: kindEvent, cpu: 3, pid: 141, at: us(129567182), name: markerEvent, text: "hello",
		},
		// The name of a task may be anything.
		" a [1] b-7: x-12 [7] y-9  [012] d..2. 22565.217920: sched_switch: prev_comm=a ==> b": {
			kind: kindEvent, cpu: 12, pid: 9, at: us(22565217920), name: "sched_switch", text: "prev_comm=a ==> b",
		},
		// With record-tgid.
		"          <...>-14449   (  14440) [000] ..... 22565.217920: sys_exit: NR 1 = 1": {
			kind: kindEvent, pid: 14449, at: us(22565217920), name: "sys_exit", text: "NR 1 = 1",
		},
		"          <idle>-0       [001] d..2.   12.000001: empty:": {kind: kindEvent, cpu: 1, at: us(12000001), name: "empty"},
		"CPU:3 [LOST 123 EVENTS]":                                  {kind: kindLost, cpu: 3, count: 123},
		"CPU:0 [LOST EVENTS]":                                      {kind: kindLost},
		"# tracer: nop":                                            {kind: kindNothing},
		"":                                                         {kind: kindNothing},
		// Cut short, or something else.
		"            test-141     [000] .N...   129.5701":                               {},
		"CPU:x [LOST 1 EVENTS]":                                                         {},
		"            test-141     [000] .N... no time: enter_kfd_open: (kfd_o":          {},
		"            test-141     [000] .N... 99999999999999999999.5: enter_kfd_open: ": {},
		"            test-141     [000] .N... 1.5: not an event":                        {},
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

// The file is of Debian's Linux 6.12 with the real amdgpu driver, in an emulator and
// without a GPU.
func TestRealTraceIsCounted(t *testing.T) {
	text, err := os.ReadFile("testdata/probes.txt")
	if err != nil {
		t.Fatal(err)
	}
	tally := drained(t, text, 77, tallyOf("vfs_open", "chrdev_open", "kfd_open", "kfd_release", "kfd_create_process"))
	if tally.unknown != 0 || tally.began != us(161723608) {
		t.Errorf("%d unknown lines, began at %v", tally.unknown, tally.began)
	}
	for _, f := range tally.functionCalls() {
		if f.Name == "kfd_create_process" && (f.Count != 3 || f.Max != us(23) || f.Min != us(3)) {
			t.Errorf("%+v", f)
		}
	}
	if diff := cmp.Diff([]string{"sched_switch", "sched_wakeup"}, names(tally.eventCounts())); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
}

func names(events []EventCount) []string {
	var list []string
	for _, e := range events {
		list = append(list, e.Name)
	}
	return list
}

func FuzzParseLine(f *testing.F) {
	text, err := os.ReadFile("testdata/probes.txt")
	if err != nil {
		f.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		f.Add(line)
	}
	f.Add("CPU:3 [LOST 123 EVENTS]")
	f.Fuzz(func(t *testing.T, text string) {
		l := parseLine(text)
		if l.at < 0 || l.cpu < 0 && l.kind != kindUnknown || l.pid < 0 && l.kind != kindUnknown && l.kind != kindNothing {
			t.Errorf("%q: a number is below 0: %+v", text, l)
		}
		switch l.kind {
		case kindEvent:
			if l.name == "" || !strings.Contains(text, l.name) {
				t.Errorf("%q: the name is %q", text, l.name)
			}
		case kindUnknown:
			if diff := cmp.Diff(line{}, l, cmp.AllowUnexported(line{})); diff != "" {
				t.Errorf("%q: not understood, but:\n%s", text, diff)
			}
		}
	})
}

func TestReadsMayEndAnywhere(t *testing.T) {
	text, err := os.ReadFile("testdata/probes.txt")
	if err != nil {
		t.Fatal(err)
	}
	text = append(text, "CPU:1 [LOST 3 EVENTS]"...) // the last line may have no newline
	functions := []string{"vfs_open", "kfd_open"}
	want := drained(t, text, readSize, tallyOf(functions...))
	for chunk := 1; chunk < 300; chunk += 13 {
		got := drained(t, text, chunk, tallyOf(functions...))
		if diff := cmp.Diff(want, got, cmp.AllowUnexported(tally{}, calls{}, histogram.Histogram{}, call{}, probe{})); diff != "" {
			t.Fatalf("in pieces of %d (-want +got):\n%s", chunk, diff)
		}
	}
}

// A line without an end must not take all memory, and the next one is read again.
func TestLineThatIsTooLongIsCut(t *testing.T) {
	tally := newTally()
	text := []byte("           train-77      [001] .....   10.100000: a: " + strings.Repeat("x", 3*maxLine) + "\nCPU:1 [LOST 3 EVENTS]\n")
	drained(t, text, 4096, tally)
	if tally.events["a"] != 1 || tally.lost != 3 {
		t.Errorf("events %v, %d lost", tally.events, tally.lost)
	}
}
