package hiplog_test

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/lab/hiplog"
)

// The prefixes, the mistake of September 2024, and that of ROCr.
const (
	v45      = ":4:rocvirtual.cpp           :843 : 266505753655 us: [7f1a40f2a640] "
	v56      = ":3:rocdevice.cpp            :2621: 0000000042 us: 7001 : [tid:0x7f1a40f2a640] "
	v57      = ":3:rocdevice.cpp            :2621: 1045551200 us: [pid:7001  tid:0x7f1a40f2a640] "
	v63      = ":4:rocvirtual.cpp           :1083: 20161701400 us: [pid:459769 tid: 0x7f8edc1c4400] "
	v63Level = ":3:rocdevice.cpp            :480 : 6306213494 us:  "
	slip     = ":3:rocdevice.cpp            :480 : 6306213494d us: [pid:7 tid: 0x0a1b2] "
	bare     = ":3:                         :0   : 6306213494 us:  " // AMD_LOG_MASK without 0x10000
	rocr     = ":amd_blit_kernel.cpp        :1301: 6306213494 us: [pid:7001  tid:0x7f1a40f2a640] [***rocr***] "
)

// The forms of dispatch lines.
const (
	oldDispatch = "HWq=0x7f1a20c00000, Dispatch Header = 0xb02 (type=2, barrier=1, acquire=1, release=1), setup=1, grid=[256, 1, 1], " +
		"workgroup=[256, 1, 1], private_seg_size=0, group_seg_size=0, kernel_obj=0x7f1a1f2007c0, kernarg_address=0x7f1a1e600000, completion_signal=0x0"
	newDispatch = "SWq=0x7f8edc1a8000, HWq=0x7f8acd200000, id=1, Dispatch Header = 0xb02 (type=2, barrier=1, acquire=1, release=1), setup=3, " +
		"grid=[1024, 1, 1], workgroup=[32, 1, 1], private_seg_size=0, group_seg_size=0, kernel_obj=0x7f8ed23d8800, " +
		"kernarg_address=0x7f8acce00000, completion_signal=0x0, correlation_id=0, rptr=12, wptr=34"
	// With queues distributed over pipes, and of a packet with clusters: June 2026.
	pipeDispatch = "SWq=0x7f8edc1a8000, HWq=0x7f8acd200000, id=1, virtual_pipe_id=1, Dispatch Header = 0xb02 (type=2, barrier=1, acquire=1, release=1), " +
		"setup=3, cluster_count=[1, 1, 1], cluster_size=[1, 1, 1], workgroup=[32, 1, 1], private_seg_size=0, group_seg_size=0, " +
		"kernel_obj=0x7f8ed23d8800, kernarg_address=0x7f8acce00000, dep_signal=0x0, completion_signal=0x0, rptr=12, wptr=34"
)

// scan collects the records of a log, their slices copied.
func scan(t testing.TB, log string) ([]hiplog.Record, hiplog.Totals) {
	t.Helper()
	var records []hiplog.Record
	totals, err := hiplog.Scan(strings.NewReader(log), func(r *hiplog.Record) error {
		kept := *r
		kept.Source, kept.Message, kept.Mask, kept.Name = slices.Clone(r.Source), slices.Clone(r.Message), slices.Clone(r.Mask), slices.Clone(r.Name)
		records = append(records, kept)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return records, totals
}

func TestEveryPrefixIsParsed(t *testing.T) {
	want := func(level int, source string, line, us uint64, pid int32, tid uint64) hiplog.Record {
		return hiplog.Record{
			Line: 1, Level: level, Source: []byte(source), SourceLine: line, Micros: us, PID: pid, TID: tid, Message: []byte("No HW event"), ID: -1,
		}
	}
	fromROCr := want(-1, "amd_blit_kernel.cpp", 1301, 6306213494, 7001, 0x7f1a40f2a640)
	fromROCr.ROCr = true
	for prefix, want := range map[string]hiplog.Record{
		v45:      want(4, "rocvirtual.cpp", 843, 266505753655, 0, 0x7f1a40f2a640),
		v56:      want(3, "rocdevice.cpp", 2621, 42, 7001, 0x7f1a40f2a640),
		v57:      want(3, "rocdevice.cpp", 2621, 1045551200, 7001, 0x7f1a40f2a640),
		v63:      want(4, "rocvirtual.cpp", 1083, 20161701400, 459769, 0x7f8edc1c4400),
		v63Level: want(3, "rocdevice.cpp", 480, 6306213494, 0, 0),
		slip:     want(3, "rocdevice.cpp", 480, 6306213494, 7, 0xa1b2),
		bare:     want(3, "", 0, 6306213494, 0, 0),
		rocr:     fromROCr,
	} {
		got, _ := scan(t, prefix+"No HW event\r\n")
		if diff := cmp.Diff([]hiplog.Record{want}, got); diff != "" {
			t.Errorf("%q (-want +got):\n%s", prefix, diff)
		}
	}
}

func TestEveryLineHasItsOwnThread(t *testing.T) {
	const a, b, none = ":4:a.cpp:1: 1 us: [pid:7 tid: 0x2] x\n", ":4:a.cpp:1: 1 us: [pid:8 tid: 0x2] x\n", ":4:a.cpp:1: 1 us:  x\n"
	records, _ := scan(t, a+a+none+a+b+none+none+b)
	got := []int32{}
	for _, r := range records {
		got = append(got, r.PID)
	}
	if diff := cmp.Diff([]int32{7, 7, 0, 7, 8, 0, 0, 8}, got); diff != "" {
		t.Errorf("pids (-want +got):\n%s", diff)
	}
}

func TestEveryMessageAboutQueuesIsParsed(t *testing.T) {
	type r = hiplog.Record
	tests := []struct {
		message string
		want    hiplog.Record // what differs from an empty one
	}{
		{"created hardware queue 0x7f1a2c1b2000 with size 16384 with priority 2, cooperative: 1", r{
			Kind: hiplog.Created, Old: true, SWq: 0x7f1a2c1b2000, Size: 16384, Priority: 2, Cooperative: true,
		}},
		{"Created SWq=0x7f36633ca000 to map on HWq=0x7f3660c00000 with size 16384 with priority 0, cooperative: 0", r{
			Kind: hiplog.Created, New: true, SWq: 0x7f36633ca000, HWq: 0x7f3660c00000, Size: 16384,
		}},
		{"number of allocated hardware queues with low priority: 1, with normal priority: 2, with high priority: 3, maximum per priority is: 4", r{
			Kind: hiplog.Allocated, Old: true, Low: 1, Normal: 2, High: 3, PerPriority: 4,
		}},
		{"Number of allocated hardware queues with low priority: 0, with normal priority: 4, with high priority: 0, maximum per priority is: 8", r{
			Kind: hiplog.Allocated, New: true, Normal: 4, PerPriority: 8,
		}},
		{"selected queue refCount: 0x7f1a2c1b2000 (2)", r{Kind: hiplog.Selected, Old: true, Queue: 0x7f1a2c1b2000, RefCount: 2}},
		{"Selected queue refCount: 0x7f3660c00000 (3)", r{Kind: hiplog.Selected, New: true, Queue: 0x7f3660c00000, RefCount: 3}},
		{"acquireQueue refCount: 0x7f3660c00000 (1)", r{Kind: hiplog.Acquired, Queue: 0x7f3660c00000, RefCount: 1}},
		{"releaseQueue refCount:0x7f3660c00000 (0)", r{Kind: hiplog.Released, Queue: 0x7f3660c00000}},
		{"deleting hardware queue 0x7f1a2c1b2000 with refCount 0", r{Kind: hiplog.Deleted, Queue: 0x7f1a2c1b2000}},
		{"Deleting hardware queue 0x7f3660c00000 with refCount 0", r{Kind: hiplog.Deleted, Queue: 0x7f3660c00000}},
		{"Deleting hostcall buffer 0x7f3660000000 for hardware queue 0x7f3660c00000", r{}},
		{"setting CU mask 0x00000000ffffffff for hardware queue 0x7f1a2c1b2000", r{
			Kind: hiplog.CUMask, Mask: []byte("00000000ffffffff"), Queue: 0x7f1a2c1b2000,
		}},
		{"Setting CU mask 0xf for hardware queue 0x7f3660c00000", r{Kind: hiplog.CUMask, Mask: []byte("f"), Queue: 0x7f3660c00000}},
		{oldDispatch, r{Kind: hiplog.Dispatch, Old: true, HWq: 0x7f1a20c00000, KernelObject: 0x7f1a1f2007c0}},
		{newDispatch, r{
			Kind: hiplog.Dispatch, New: true, SWq: 0x7f8edc1a8000, HWq: 0x7f8acd200000, ID: 1, KernelObject: 0x7f8ed23d8800,
			ReadIndex: 12, WriteIndex: 34, Indexed: true,
		}},
		{pipeDispatch, r{
			Kind: hiplog.Dispatch, New: true, SWq: 0x7f8edc1a8000, HWq: 0x7f8acd200000, ID: 1, KernelObject: 0x7f8ed23d8800,
			ReadIndex: 12, WriteIndex: 34, Indexed: true,
		}},
		{newDispatch + ", next=0x5", r{
			Kind: hiplog.Dispatch, New: true, SWq: 0x7f8edc1a8000, HWq: 0x7f8acd200000, ID: 1, KernelObject: 0x7f8ed23d8800,
			ReadIndex: 12, WriteIndex: 34, Indexed: true,
		}},
		{"HWq=0x7f1a20c00000, BarrierAND Header = 0x1503 (type=3, barrier=1, acquire=2, release=2), dep_signal=[0x0, 0x0, 0x0, 0x0, 0x0], " +
			"completion_signal=0x7f8ad13ff900", r{Kind: hiplog.Barrier, Old: true, HWq: 0x7f1a20c00000}},
		{"HWq=0x7f1a2c1b2000, BarrierValue Header = 0x1500 AmdFormat = 0x2 (type=0, barrier=1, acquire=2, release=2), signal=0x7f1a1e000000, " +
			"value = 0x1 mask = 0xff cond: EQ, completion_signal=0x0", r{Kind: hiplog.Barrier, Old: true, SWq: 0x7f1a2c1b2000}},
		{"SWq=0x7f8edc1a8000, HWq=0x7f8acd200000, id=1, BarrierAND Header = 0x1503 (type=3, barrier=1, acquire=2, release=2), " +
			"dep_signal=[0x0, 0x0, 0x0, 0x0, 0x0], completion_signal=0x7f8ad13ff900, rptr=0, wptr=1", r{
			Kind: hiplog.Barrier, New: true, SWq: 0x7f8edc1a8000, HWq: 0x7f8acd200000, ID: 1, WriteIndex: 1, Indexed: true,
		}},
		{"SWq=0x7f8edc1a8000, HWq=0x7f8acd200000, id=1, BarrierValue Header = 0x1500 AmdFormat = 0x2 (type=0), completion_signal=0x0", r{
			Kind: hiplog.Barrier, New: true, SWq: 0x7f8edc1a8000, HWq: 0x7f8acd200000, ID: 1,
		}},
		// The newest source: a word before the kind, another name, indices of 64 bits.
		{"SWq=0x7f8edc1a8000, HWq=0x7f8acd200000, id=2, Graph Barrier-OR Header = 0x1503 (type=5), completion_signal=0x0, rptr=4294967296, wptr=4294967299", r{
			Kind: hiplog.Barrier, New: true, SWq: 0x7f8edc1a8000, HWq: 0x7f8acd200000, ID: 2, ReadIndex: 1 << 32, WriteIndex: 1<<32 + 3, Indexed: true,
		}},
		{"[***rocr***] HWq=0x7f8ac0000000, id=0, Barrier Header = 0x1503 (type=3), dep_signal=[0x0 0x0 0x0 0x0 0x0], completion_signal=0x0 rptr=6, wptr=7", r{
			Kind: hiplog.Barrier, ROCr: true, HWq: 0x7f8ac0000000, ID: 0, ReadIndex: 6, WriteIndex: 7, Indexed: true,
			Message: []byte("HWq=0x7f8ac0000000, id=0, Barrier Header = 0x1503 (type=3), dep_signal=[0x0 0x0 0x0 0x0 0x0], completion_signal=0x0 rptr=6, wptr=7"),
		}},
		{"ShaderName : std::pair<int, void*> f<3>(int*, int)", r{Kind: hiplog.Kernel, Name: []byte("std::pair<int, void*> f<3>(int*, int)")}},
		{"Graph ShaderName : g(int), device id : 3", r{Kind: hiplog.Kernel, Name: []byte("g(int)")}},
		{"Command (KernelExecution) enqueued: 0x2095b30 to queue: 0x1952020", r{Kind: hiplog.Enqueued, Stream: 0x1952020}},
		{"Command (CopyHostToDevice) enqueued: 0x7f693a0", r{}},
		{"Command 0x20b8d70 complete (Wall: 20161701438, CPU: 0, GPU: 0 us)", r{}},
		{"Free hsa memory (nil)", r{}},
		{"hipMalloc: Returned hipSuccess : 0x7f3660900000: duration: 34 us", r{
			Timed: true, Duration: 34, Message: []byte("hipMalloc: Returned hipSuccess : 0x7f3660900000"),
		}},
		{"hipLaunchKernel: Returned hipSuccess : : duration: 500 us", r{Timed: true, Duration: 500, Message: []byte("hipLaunchKernel: Returned hipSuccess : ")}},
	}
	for _, tt := range tests {
		want := tt.want
		want.Line, want.Level, want.Source, want.SourceLine, want.Micros = 1, 4, []byte("rocvirtual.cpp"), 1083, 20161701400
		want.PID, want.TID = 459769, 0x7f8edc1c4400
		if want.Message == nil {
			want.Message = []byte(tt.message)
		}
		if want.ID == 0 && !want.ROCr {
			want.ID = -1
		}
		got, totals := scan(t, v63+tt.message)
		if diff := cmp.Diff([]hiplog.Record{want}, got); diff != "" || totals.TornLines != 0 {
			t.Errorf("%s: %d torn lines (-want +got):\n%s", tt.message, totals.TornLines, diff)
		}
	}
}

// A line about a queue that is cut anywhere is torn, or the cut is after the parsed part or
// in the digits of its last number.
func TestCutLinesAreTornOrRight(t *testing.T) {
	for _, dispatch := range []string{newDispatch, pipeDispatch} {
		whole, _ := scan(t, v63+dispatch)
		for n := range len(dispatch) {
			got, totals := scan(t, v63+dispatch[:n])
			if len(got) != 1 {
				t.Fatalf("cut at %d: %d records", n, len(got))
			}
			r := got[0]
			if r.Kind == hiplog.Dispatch && (r.HWq != whole[0].HWq || r.SWq != whole[0].SWq || r.ID != 1) {
				t.Errorf("cut at %d: dispatch to %v of %v with id %d", n, r.HWq, r.SWq, r.ID)
			}
			if r.KernelObject != 0 && r.KernelObject != whole[0].KernelObject {
				t.Errorf("cut at %d: kernel object %v", n, r.KernelObject)
			}
			at := strings.Index(dispatch, "completion_signal=0x") + len("completion_signal=0x")
			if wantTorn := n >= len("SWq=") && n < at; (totals.TornLines == 1) != wantTorn || totals.UnknownLines != 0 {
				t.Errorf("cut at %d: %d torn lines, %d unknown", n, totals.TornLines, totals.UnknownLines)
			}
		}
	}
	// Of the others, each has a beginning that is like no other message, and ends in a number.
	for begins, message := range map[string]string{
		"created hardware queue ": "created hardware queue 0x7f1a2c1b2000 with size 16384 with priority 2, cooperative: 1",
		"Created SWq=":            "Created SWq=0x7f36633ca000 to map on HWq=0x7f3660c00000 with size 16384 with priority 0, cooperative: 0",
		"number of allocated hardware queues with low priority: ": "number of allocated hardware queues with low priority: 1, with normal priority: 2, " +
			"with high priority: 3, maximum per priority is: 4",
		"acquireQueue refCount:":    "acquireQueue refCount: 0x7f3660c00000 (1)",
		"Deleting hardware queue ":  "Deleting hardware queue 0x7f3660c00000 with refCount 0",
		"Setting CU mask 0x":        "Setting CU mask 0xf for hardware queue 0x7",
		"Command (f) enqueued: 0x1": "Command (f) enqueued: 0x1 to queue: 0x2",
	} {
		for n := len(begins); n < len(message); n++ {
			_, totals := scan(t, v63+message[:n])
			if wantTorn := message[:n] != "Command (f) enqueued: 0x1"; (totals.TornLines == 1) != wantTorn || totals.UnknownLines != 0 {
				t.Errorf("%q: %d torn lines, %d unknown", message[:n], totals.TornLines, totals.UnknownLines)
			}
		}
	}
}

// What another version of the runtime writes is unknown, not damaged; what is overwritten within a
// word is damaged.
func TestUnknownFormsAreNotDamage(t *testing.T) {
	const created = "created hardware queue 0x7f1a2c1b2000 with size 16384"
	type lines struct{ Unknown, Torn uint64 }
	for text, want := range map[string]lines{
		v63 + created + ", engine 3, cooperative: 1":                                                                   {Unknown: 1},
		v63 + created + " on pipe 1 with priority 2, cooperative: 1":                                                   {Unknown: 1},
		v63 + "created hardware queue #5 with size 16384":                                                              {Unknown: 1},
		v63 + "acquireQueue refCount: 0x7f3660c00000 is 1":                                                             {Unknown: 1},
		v63 + "SWq=0x7f8edc1a8000, HWq=0x7f8acd200000, id=1, Copy Header = 0x1, x=1":                                   {Unknown: 1},
		v63 + "SWq=0x7f8edc1a8000 on HWq=0x7f8acd200000":                                                               {Unknown: 1},
		":3:rocdevice.cpp            :480 : 6306213494 us: {thread 7} " + created:                                      {},
		":3:rocdevice.cpp            :480 : 6306213494 us: [thread 7] " + created + " with priority 2, cooperative: 1": {Unknown: 1},
		":3:rocdevice.cpp            :480 : 12:00:01.5: " + created:                                                    {Unknown: 1},
		":3:rocdevice.cpp            :fn: 1 us: x":                                                                     {Unknown: 1},

		v63 + created + " with prioHello":                 {Torn: 1},
		v63 + "created hardware queue 0x7f1aHello, world": {Torn: 1},
		v63 + "SWq=0x7f8edc1aHello":                       {Torn: 1},
		v63 + "SWq=0x7f8edc1a8000, HWq=0x7f8acd200000, id=1, SWq=0x7f8edc1a8000, HWq=0x7f8acd200000, id=1, Dispatch Header = 0x1, completion_signal=0x0": {Torn: 1},
		v63 + "SWq=0x7f8edc1a8000, HWq=0x7f8acd200000, id=1, virt, Dispatch Header = 0x1, completion_signal=0x0":                                         {Torn: 1},
		v63 + "SWq=0x7f8edc1a8000, HWq=0x7f8acd200000, id=1x, Dispatch Header = 0x1, completion_signal=0x0":                                              {Torn: 1},
	} {
		_, totals := scan(t, text)
		if diff := cmp.Diff(want, lines{totals.UnknownLines, totals.TornLines}); diff != "" {
			t.Errorf("%s (-want +got):\n%s", text, diff)
		}
	}
}

// kinds formats the records of a log briefly.
func kinds(records []hiplog.Record) []string {
	said := []string{}
	for _, r := range records {
		said = append(said, fmt.Sprintf("%d:%d %s", r.Line, r.Micros, r.Message))
	}
	return said
}

func TestLinesOfConcurrentWriters(t *testing.T) {
	const a, b = ":3:a.cpp:1: 10 us:  first", ":4:b.cpp:22  : 20 us: [pid:1 tid: 0x2] second"
	tests := []struct {
		name, log  string
		want       []string
		torn, rest uint64 // lines
	}{
		{"two records in a line", a + b + "\n", []string{"1:10 first", "1:20 second"}, 1, 0},
		{"behind the program's text", "Step 1/9 " + a + "\n" + b + "\n", []string{"1:10 first", "2:20 second"}, 1, 0},
		{"in the middle of a prefix", ":3:a.cpp   :1" + b + "\n", []string{"1:20 second"}, 1, 0},
		{"a level in front of another", ":3" + b + "\n", []string{"1:20 second"}, 1, 0},
		{"the end of a packet some lines later", a + "\nStep 1/9\nal=0x0, rptr=0, wptr=1\n", []string{"1:10 first"}, 1, 1},
		{"the end of an old packet", a + "\ncompletion_signal=0x7f00\n", []string{"1:10 first"}, 1, 0},
		{"the end of a call", a + "\nccess : 0x1: duration: 34 us\n", []string{"1:10 first"}, 1, 0},
		{"a prefix in two lines", ":3:hip_module.c\n" + a + "\npp  :480 : 0000000012 us: text\n", []string{"2:10 first"}, 2, 0},
		{"a time of the program's own", "took 1234 us: slow\nstep took 34 us\n", []string{}, 0, 2},
		{"a frame", "│ " + a + " │\n", []string{"1:10 first │"}, 1, 0},
		{"a progress bar", " 10%|█\r 20%|██\r" + a + "\r\r\n", []string{"1:10 first"}, 1, 0},
		{"colours", "\x1b[0;32m" + a[:9] + "\x1b[1m" + a[9:] + "\x1b[0m\n", []string{"1:10 first"}, 0, 0},
		{"a colour cut off", a + "\x1b[3\n" + b + "\x1b\n", []string{"1:10 first", "2:20 second"}, 0, 0},
		{"invalid UTF-8", a + "\xff\xfe\n", []string{"1:10 first\xff\xfe"}, 0, 0},
		{"no text", ":3:a.cpp:1: 10 us:  \n", []string{"1:10 "}, 0, 0},
		{"only what looks like a prefix", ":3:\n:\n::3::\n:x:a.cpp:1: 1 us: x\n", []string{}, 0, 4},
		{"a hole", strings.Repeat("\x00", 300<<10) + a + "\n", []string{"1:10 first"}, 0, 0},
		{"a hole in a line", a[:12] + strings.Repeat("\x00", 300<<10) + b + "\n", []string{"1:20 second"}, 1, 0},
	}
	for _, tt := range tests {
		for _, reader := range []func(io.Reader) io.Reader{
			func(r io.Reader) io.Reader { return r }, iotest.OneByteReader, iotest.DataErrReader,
		} {
			var got []hiplog.Record
			totals, err := hiplog.Scan(reader(strings.NewReader(tt.log)), func(r *hiplog.Record) error {
				kept := *r
				kept.Message = slices.Clone(r.Message)
				got = append(got, kept)
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, kinds(got)); diff != "" || totals.TornLines != tt.torn || totals.OtherLines != tt.rest {
				t.Errorf("%s: %d torn, %d other lines, want %d, %d (-want +got):\n%s", tt.name, totals.TornLines, totals.OtherLines, tt.torn, tt.rest, diff)
			}
			if totals.Bytes != uint64(len(tt.log)) || totals.NULBytes != uint64(strings.Count(tt.log, "\x00")) {
				t.Errorf("%s: %d bytes, %d NULs", tt.name, totals.Bytes, totals.NULBytes)
			}
		}
	}
}

func TestEndlessLinesAreCutAndCounted(t *testing.T) {
	long := v63 + "ShaderName : " + strings.Repeat("x", 1<<20)
	got, totals := scan(t, long+"\n"+v63+"No HW event\n"+strings.Repeat("y", 1<<20))
	if len(got) != 2 || len(got[0].Message) > 64<<10 || string(got[1].Message) != "No HW event" || got[1].Line != 2 {
		t.Errorf("%d records", len(got))
	}
	if totals.Lines != 3 || totals.CutLines != 2 || totals.OtherLines != 1 || totals.Bytes != uint64(len(long)+1<<20+len(v63)+len("No HW event")+2) {
		t.Errorf("totals %+v", totals)
	}
}

func TestScanEndsWithTheFirstError(t *testing.T) {
	broken := errors.New("broken")
	stop := func(*hiplog.Record) error { return broken }
	if totals, err := hiplog.Scan(strings.NewReader(v63+"a\n"+v63+"b\n"), stop); !errors.Is(err, broken) || totals.Records != 1 {
		t.Errorf("%v after %d records, want the callback's error after 1", err, totals.Records)
	}
	failing := io.MultiReader(strings.NewReader(v63+"a\n"+v63+"b"), iotest.ErrReader(broken))
	totals, err := hiplog.Scan(failing, func(*hiplog.Record) error { return nil })
	if !errors.Is(err, broken) || totals.Records != 2 {
		t.Errorf("%v after %d records, want the reader's error after 2", err, totals.Records)
	}
	stuck := readerFunc(func([]byte) (int, error) { return 0, nil })
	if _, err := hiplog.Scan(stuck, stop); !errors.Is(err, io.ErrNoProgress) {
		t.Errorf("a reader without progress: %v, want %v", err, io.ErrNoProgress)
	}
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }
