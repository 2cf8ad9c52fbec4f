package hiplog_test

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/lab/hiplog"
)

func analyze(t testing.TB, log string) *hiplog.Analysis {
	t.Helper()
	a, err := hiplog.Analyze(strings.NewReader(log))
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// at is a line of ROCm 6.3 at level 4 by pid 7001.
func at(us uint64, format string, args ...any) string { return by(7001, 0x7f01, us, format, args...) }

func by(pid int, tid, us uint64, format string, args ...any) string {
	return fmt.Sprintf(":4:rocvirtual.cpp           :1083: %010d us: [pid:%d tid: 0x%x] %s\n", us, pid, tid, fmt.Sprintf(format, args...))
}

// dispatch is a packet for the queue with its ring at hwq.
func dispatch(hwq, object, rptr, wptr uint64) string {
	return fmt.Sprintf("SWq=0x%x, HWq=0x%x, id=%d, Dispatch Header = 0xb02 (type=2), kernel_obj=0x%x, kernarg_address=0x0, completion_signal=0x0, "+
		"correlation_id=0, rptr=%d, wptr=%d", hwq>>4, hwq, hwq>>16&7, object, rptr, wptr)
}

func created(hwq uint64, priority int) string {
	return fmt.Sprintf("Created SWq=0x%x to map on HWq=0x%x with size 1024 with priority %d, cooperative: 0", hwq>>4, hwq, priority)
}

var ignoreCounts = cmpopts.IgnoreUnexported(hiplog.Mix{})

func TestLifeOfAQueue(t *testing.T) {
	const hwq = 0x7f8acd210000
	a := analyze(t, ""+
		at(100, "Number of allocated hardware queues with low priority: 0, with normal priority: 0, with high priority: 0, maximum per priority is: 4")+
		at(110, "%s", created(hwq, 2))+
		at(111, "Setting CU mask 0xff for hardware queue 0x%x", hwq)+
		at(112, "acquireQueue refCount: 0x%x (1)", hwq)+
		at(113, "Selected queue refCount: 0x%x (2)", hwq)+
		at(200, "Command (KernelExecution) enqueued: 0x2095b30 to queue: 0x1952020")+
		at(201, "ShaderName : gemm(float*)")+
		at(202, "%s", dispatch(hwq, 0xa0, 0, 0))+
		at(301, "ShaderName : gemm(float*)")+
		at(302, "%s", dispatch(hwq, 0xa0, 0, 1))+
		at(352, "%s", dispatch(hwq, 0xa0, 0, 2))+ // of a graph: the kernel was named before
		at(360, "SWq=0x1, HWq=0x%x, id=1, BarrierAND Header = 0x1503 (type=3), completion_signal=0x0, rptr=1, wptr=3", uint64(hwq))+
		at(402, "%s", dispatch(hwq, 0xb0, 4, 4))+ // never named
		at(500, "releaseQueue refCount:0x%x (1)", hwq)+
		at(501, "releaseQueue refCount:0x%x (0)", hwq)+
		at(502, "Deleting hardware queue 0x%x with refCount 0", hwq))
	no := false
	intervals := hiplog.Intervals{Count: 3, Min: 50, Mean: 200.0 / 3, P50: 50, P95: 100, P99: 100, Max: 100}
	want := &hiplog.Analysis{
		Totals: hiplog.Totals{
			Bytes: a.Bytes, Lines: 16, Records: 16, Levels: hiplog.Levels{4: 16}, FirstMicros: 100, LastMicros: 502, MinMicros: 100, MaxMicros: 502,
		},
		PIDs: []int32{7001}, PIDsInText: []int32{},
		Processes: []hiplog.Process{{
			PID: 7001, Records: 16, MinMicros: 100, MaxMicros: 502, TIDs: []hiplog.Address{0x7f01}, Threads: 1, Queues: 1, QueuesPerPriority: 4,
			Dispatches: 4, Barriers: 1, Intervals: intervals,
			Launches: hiplog.Mix{Total: 2, Distinct: 1, Top: []hiplog.KernelCount{{Name: "gemm(float*)", Count: 2}}},
		}},
		Queues: []hiplog.Queue{{
			PID: 7001, HWq: hwq, SWqs: []hiplog.Address{hwq >> 4, 1}, IDs: []uint32{1}, Streams: []hiplog.Address{0x1952020},
			SizePackets: 1024, Priority: hiplog.PriorityHigh, Cooperative: &no, CUMask: "ff",
			Created: &hiplog.Event{Line: 2, Micros: 110}, Deleted: &hiplog.Event{Line: 16, Micros: 502}, Creations: 1, Deletions: 1,
			Acquired: 1, Selected: 1, Released: 2, MaxRefCount: 2, Dispatches: 4, Barriers: 1,
			FirstDispatch: &hiplog.Event{Line: 8, Micros: 202}, LastDispatch: &hiplog.Event{Line: 13, Micros: 402}, Intervals: intervals,
			Kernels: hiplog.Mix{Total: 4, Distinct: 2, Top: []hiplog.KernelCount{
				{Name: "gemm(float*)", Count: 3}, {Name: "kernel_obj=0xb0", Count: 1},
			}},
			ReadIndex: &hiplog.Range{Max: 4}, WriteIndex: &hiplog.Range{Max: 4},
			MaxBacklog: &hiplog.Backlog{Packets: 2, Event: hiplog.Event{Line: 11, Micros: 352}},
		}},
		Warnings: []hiplog.Warning{},
	}
	if diff := cmp.Diff(want, a, ignoreCounts); diff != "" {
		t.Errorf("analysis (-want +got):\n%s", diff)
	}
}

func TestQueuesOfProcessesAreKeptApart(t *testing.T) {
	const hwq = 0x7f8acd210000
	a := analyze(t, by(1, 1, 10, "%s", dispatch(hwq, 1, 0, 0))+by(2, 1, 20, "%s", dispatch(hwq, 1, 0, 0))+by(1, 1, 30, "%s", dispatch(hwq, 1, 0, 1)))
	got := []string{}
	for _, q := range a.Queues {
		got = append(got, fmt.Sprintf("%d %v %d %d", q.PID, q.HWq, q.Dispatches, q.Intervals.Max))
	}
	if diff := cmp.Diff([]string{"1 0x7f8acd210000 2 20", "2 0x7f8acd210000 1 0"}, got); diff != "" {
		t.Errorf("queues (-want +got):\n%s", diff)
	}
}

// Each thread names its kernel before it writes the packet, and two may do so at the same
// time.
func TestKernelsGoToTheDispatchOfTheirThread(t *testing.T) {
	const hwq = 0x7f8acd210000
	a := analyze(t, ""+
		by(1, 0xa, 10, "ShaderName : one()")+by(1, 0xb, 11, "ShaderName : two()")+
		by(1, 0xb, 12, "%s", dispatch(hwq, 2, 0, 0))+by(1, 0xa, 13, "%s", dispatch(hwq+1<<16, 1, 0, 0)))
	got := []string{}
	for _, q := range a.Queues {
		got = append(got, fmt.Sprint(q.HWq, q.Kernels.Top))
	}
	if diff := cmp.Diff([]string{"0x7f8acd210000 [{two() 1}]", "0x7f8acd220000 [{one() 1}]"}, got); diff != "" {
		t.Errorf("kernels (-want +got):\n%s", diff)
	}
}

// ROCr writes its own packets from the threads that have just named a kernel or queued a
// command.
func TestPacketsOfROCrTakeNoNameAndNoStream(t *testing.T) {
	const hwq, utility = 0x7f8acd210000, 0x7f8acd000000
	a := analyze(t, ""+
		at(1, "Command (KernelExecution) enqueued: 0x1 to queue: 0x1952020")+at(2, "ShaderName : f()")+
		":amd_blit_kernel.cpp        :1301: 3 us: [pid:7001  tid:0x7f01] [***rocr***] HWq=0x7f8acd000000, id=0, Dispatch Header = 0x1402, "+
		"kernel_obj=0xc0, completion_signal=0x0, rptr=6, wptr=6\n"+
		at(4, "%s", dispatch(hwq, 0xa0, 0, 0))+
		at(5, "%s", dispatch(hwq+1<<16, 0xa0, 0, 0))) // of another stream, which is unknown
	got := []string{}
	for _, q := range a.Queues {
		got = append(got, fmt.Sprint(q.HWq, q.IDs, q.ROCrPackets, q.Streams, q.Kernels.Top))
	}
	want := []string{
		"0x7f8acd000000 [0] 1 [] [{kernel_obj=0xc0 1}]", "0x7f8acd210000 [1] 0 [0x1952020] [{f() 1}]", "0x7f8acd220000 [2] 0 [] [{f() 1}]",
	}
	if diff := cmp.Diff(want, got); diff != "" || a.ROCrRecords != 1 {
		t.Errorf("%d records of ROCr, packets (-want +got):\n%s", a.ROCrRecords, diff)
	}
}

// ROCm 6.1 and older print the hsa_queue_t at the creation of a queue, and its ring at its
// use: they cannot be joined.
func TestOldLogsAreNotJoined(t *testing.T) {
	const p = ":4:rocdevice.cpp            :3013: 1045551200 us: [pid:7001  tid:0x7f1a40f2a640] "
	a := analyze(t, ""+
		p+"created hardware queue 0x7f1a2c1b2000 with size 16384 with priority 2, cooperative: 0\n"+
		p+"acquireQueue refCount: 0x7f1a2c1b2000 (1)\n"+
		p+oldDispatch+"\n"+
		p+"HWq=0x7f1a2c1b2000, BarrierValue Header = 0x1500 AmdFormat = 0x2 (type=0), completion_signal=0x0\n"+
		p+"releaseQueue refCount:0x7f1a2c1b3000 (0)\n") // created before the log begins
	got := []string{}
	for _, q := range a.Queues {
		got = append(got, fmt.Sprintf("%v %v creations %d refs %d dispatches %d barriers %d %q", q.HWq, q.SWqs, q.Creations, q.Acquired+q.Released,
			q.Dispatches, q.Barriers, q.Priority))
	}
	want := []string{
		`0x0 [0x7f1a2c1b2000] creations 1 refs 1 dispatches 0 barriers 1 "high"`,
		`0x7f1a20c00000 [] creations 0 refs 0 dispatches 1 barriers 0 ""`,
		`0x0 [0x7f1a2c1b3000] creations 0 refs 1 dispatches 0 barriers 0 ""`,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("queues (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"no_kernel_names", "no_indices", "unjoined"}, codes(a)); diff != "" {
		t.Errorf("warnings (-want +got):\n%s", diff)
	}
}

func codes(a *hiplog.Analysis) []string {
	codes := []string{}
	for _, w := range a.Warnings {
		codes = append(codes, w.Code)
	}
	return codes
}

func TestIndicesWrapAt32Bits(t *testing.T) {
	const hwq, top = 0x7f8acd210000, 1 << 32
	a := analyze(t, at(1, "%s", dispatch(hwq, 1, top-4, top-2))+at(2, "%s", dispatch(hwq, 1, top-3, 1))+at(3, "%s", dispatch(hwq, 1, 0, 2)))
	q := a.Queues[0]
	want := []any{hiplog.Range{Min: top - 4, Max: top}, hiplog.Range{Min: top - 2, Max: top + 2}, uint64(4), uint64(0)}
	if diff := cmp.Diff(want, []any{*q.ReadIndex, *q.WriteIndex, q.MaxBacklog.Packets, q.OddIndices}); diff != "" {
		t.Errorf("rptr, wptr, backlog, odd (-want +got):\n%s", diff)
	}
}

// The indices of a new queue in the memory of an old one begin at 0 without wrapping.
func TestIndicesOfANewQueueBeginAtZero(t *testing.T) {
	const hwq = 0x7f8acd210000
	a := analyze(t, at(1, "%s", dispatch(hwq, 1, 3e9, 3e9))+at(2, "%s", created(hwq, 1))+at(3, "%s", dispatch(hwq, 1, 0, 1)))
	if diff := cmp.Diff(&hiplog.Range{Max: 3e9}, a.Queues[0].ReadIndex); diff != "" {
		t.Errorf("rptr (-want +got):\n%s", diff)
	}
}

// Packets of graphs print the slot of the ring, not the index, and have no backlog.
func TestInvalidIndicesHaveNoBacklog(t *testing.T) {
	const hwq = 0x7f8acd210000
	a := analyze(t, at(1, "%s", created(hwq, 1))+at(2, "%s", dispatch(hwq, 1, 5000, 5003))+at(3, "%s", dispatch(hwq, 1, 5001, 908)))
	q := a.Queues[0]
	if q.MaxBacklog.Packets != 3 || q.OddIndices != 1 || !slices.Contains(codes(a), "odd_indices") {
		t.Errorf("backlog %d, %d odd, warnings %v", q.MaxBacklog.Packets, q.OddIndices, codes(a))
	}
}

// The console of a wrapper prints the tail of a log and then parts of it again.
func TestRepeatedLinesAreNotNewQueues(t *testing.T) {
	const hwq = 0x7f8acd210000
	gone := at(900, "Deleting hardware queue 0x%x with refCount 0", hwq)
	a := analyze(t, gone+at(100, "%s", created(hwq, 1))+"--\n"+at(100, "%s", created(hwq, 1)))
	q := a.Queues[0]
	if len(a.Queues) != 1 || q.Creations != 1 || q.Created.Micros != 100 || q.Deleted.Micros != 900 || a.MinMicros != 100 || a.MaxMicros != 900 {
		t.Errorf("%d queues, the first with %d creations", len(a.Queues), q.Creations)
	}
	again := analyze(t, at(100, "%s", created(hwq, 1))+gone+at(1000, "%s", created(hwq, 1)))
	if q := again.Queues[0]; q.Creations != 2 || !slices.Contains(codes(again), "reused") {
		t.Errorf("%d creations at different times, warnings %v", q.Creations, codes(again))
	}
}

func TestLateThreadsHaveNoInterval(t *testing.T) {
	const hwq = 0x7f8acd210000
	a := analyze(t, at(100, "%s", dispatch(hwq, 1, 0, 0))+at(300, "%s", dispatch(hwq, 1, 0, 1))+at(250, "%s", dispatch(hwq, 1, 0, 2))+
		at(310, "%s", dispatch(hwq, 1, 0, 3)))
	want := hiplog.Intervals{Count: 2, Min: 10, Mean: 105, P50: 10, P95: 200, P99: 200, Max: 200, OutOfOrder: 1}
	if diff := cmp.Diff(want, a.Queues[0].Intervals); diff != "" {
		t.Errorf("intervals (-want +got):\n%s", diff)
	}
}

func TestPercentilesAreWithinTheirError(t *testing.T) {
	const hwq = 0x7f8acd210000
	r := rand.New(rand.NewPCG(1, 2))
	var log strings.Builder
	var all []uint64
	log.WriteString(at(0, "%s", dispatch(hwq, 1, 0, 0)))
	for us := uint64(0); len(all) < 5000; {
		step := uint64(1) << r.UintN(24)
		step += r.Uint64N(step)
		all = append(all, step)
		us += step
		log.WriteString(at(us, "%s", dispatch(hwq, 1, 0, 0)))
	}
	slices.Sort(all)
	got := analyze(t, log.String()).Queues[0].Intervals
	for p, v := range map[int]uint64{50: got.P50, 95: got.P95, 99: got.P99} {
		want := all[len(all)*p/100-1]
		if off := float64(v)/float64(want) - 1; off > 1.0/64 || off < -1.0/64 {
			t.Errorf("p%d is %d, %.2f %% off %d", p, v, 100*off, want)
		}
	}
	few := analyze(t, at(0, "%s", dispatch(hwq, 1, 0, 0))+at(1000, "%s", dispatch(hwq, 1, 0, 0))+at(1001234567, "%s", dispatch(hwq, 1, 0, 0)))
	if i := few.Queues[0].Intervals; i.P99 != i.Max {
		t.Errorf("p99 of two is %d, the largest %d", i.P99, i.Max)
	}
	if got.Min != all[0] || got.Max != all[len(all)-1] || got.Count != 5000 {
		t.Errorf("%+v, want from %d to %d", got, all[0], all[len(all)-1])
	}
}

func TestWarningsDescribeWhatTheLogLacks(t *testing.T) {
	const hwq = 0x7f8acd210000
	level3 := func(message string) string {
		return ":3:rocdevice.cpp            :480 : 6306213494 us:  " + message + "\n"
	}
	tests := map[string]struct {
		log  string
		want []string
	}{
		"level 3":               {level3(created(hwq, 1)), []string{"no_dispatches", "no_pids"}},
		"without LOG_QUEUE":     {at(1, "ShaderName : f()") + at(2, "%s", dispatch(hwq, 1, 0, 0)), []string{"no_creations"}},
		"without LOG_KERN":      {at(1, "%s", created(hwq, 1)) + at(2, "%s", dispatch(hwq, 1, 0, 0)), []string{"no_kernel_names"}},
		"shared with a program": {"x " + at(1, "%s", created(hwq, 1)), []string{"no_dispatches", "torn"}},
		"rotated by truncation": {"\x00\x00" + at(1, "%s", created(hwq, 1)), []string{"no_dispatches", "holes"}},
		"nothing":               {"hello\n", []string{}},
		"of another version":    {at(1, "Created SWq=1 on HWq=0x1"), []string{"unknown"}},
		"of no version known":   {":3:rocdevice.cpp:1: 12:00:01 created\n", []string{"unknown"}},
	}
	for name, tt := range tests {
		if diff := cmp.Diff(tt.want, codes(analyze(t, tt.log))); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// Logs of old versions, from public reports. ROCm 4.5 prints no process.
func TestLogsOfOldVersions(t *testing.T) {
	no := false
	tests := []struct {
		file     string
		pid      int32
		tids     []hiplog.Address
		queue    hiplog.Queue
		warnings []string
	}{
		{"k10-rocm45.log", 0, []hiplog.Address{0x7fb360ad23c0}, hiplog.Queue{
			HWq: 0x7fb360aa6000, SWqs: []hiplog.Address{0x7fb360aa6000}, SizePackets: 4096, Created: &hiplog.Event{Line: 2, Micros: 266505741000},
			Dispatches: 1, Barriers: 1,
			FirstDispatch: &hiplog.Event{Line: 3, Micros: 266505753655}, LastDispatch: &hiplog.Event{Line: 3, Micros: 266505753655},
			Kernels: hiplog.Mix{Total: 1, Distinct: 1, Top: []hiplog.KernelCount{{Name: "kernel_obj=0x7fb256104c00", Count: 1}}},
		}, []string{"no_pids", "no_kernel_names", "no_indices"}},
		{"k11-rocm52-pid-colon.log", 244319, []hiplog.Address{0x7f27f8672880}, hiplog.Queue{
			PID: 244319, SWqs: []hiplog.Address{0x7f27f4168000}, SizePackets: 4096, Created: &hiplog.Event{Line: 5, Micros: 7098562840537},
			Acquired: 1, RefCount: 1, MaxRefCount: 1, Kernels: hiplog.Mix{Top: []hiplog.KernelCount{}},
		}, []string{"no_dispatches", "unjoined"}},
		{"k15-rocm56-blank-line.log", 1255284, []hiplog.Address{0x7fcc46391bc0}, hiplog.Queue{
			PID: 1255284, SWqs: []hiplog.Address{0x7fcc3566a000}, SizePackets: 16384, Created: &hiplog.Event{Line: 3, Micros: 221750333436},
			Acquired: 1, RefCount: 1, MaxRefCount: 1, Kernels: hiplog.Mix{Top: []hiplog.KernelCount{}},
		}, []string{"no_dispatches", "unjoined"}},
	}
	for _, tt := range tests {
		a := analyze(t, string(testutil.Input(t, tt.file)))
		tt.queue.IDs, tt.queue.Streams = []uint32{}, []hiplog.Address{}
		tt.queue.Priority, tt.queue.Cooperative, tt.queue.Creations = hiplog.PriorityNormal, &no, 1
		if diff := cmp.Diff([]hiplog.Queue{tt.queue}, a.Queues, ignoreCounts); diff != "" {
			t.Errorf("%s: queues (-want +got):\n%s", tt.file, diff)
		}
		if p := a.Processes[0]; len(a.Processes) != 1 || p.PID != tt.pid || !slices.Equal(p.TIDs, tt.tids) || p.QueuesPerPriority != 4 {
			t.Errorf("%s: %+v", tt.file, a.Processes)
		}
		if diff := cmp.Diff(tt.warnings, codes(a)); diff != "" || a.TornLines+a.UnknownLines != 0 {
			t.Errorf("%s: %d torn lines, %d unknown, warnings (-want +got):\n%s", tt.file, a.TornLines, a.UnknownLines, diff)
		}
	}
}

func TestProcessIDsInTheProgramsOutput(t *testing.T) {
	a := analyze(t, "Process ID: 85406\nProcess ID:        85406\nPID: 12\nPID: x\nPID:0\nProcess ID: 99999999999\n"+at(1, "PID: 77"))
	if diff := cmp.Diff([]int32{85406, 12}, a.PIDsInText); diff != "" {
		t.Errorf("pids (-want +got):\n%s", diff)
	}
}

// Scripts rely on the field names.
func TestJSONIsStable(t *testing.T) {
	const hwq = 0x7f8acd210000
	a := analyze(t, at(1, "%s", created(hwq, 1))+at(2, "ShaderName : f<int>()\xff")+at(3, "%s", dispatch(hwq, 1, 0, 0)))
	got, err := json.MarshalIndent(a, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	want := readGolden(t, "analysis.json", got)
	if diff := cmp.Diff(want, string(got)+"\n"); diff != "" {
		t.Errorf("JSON (-want +got):\n%s", diff)
	}
	var back hiplog.Analysis
	if err := json.Unmarshal(got, &back); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(a, &back, ignoreCounts); diff != "" {
		t.Errorf("parsed back (-want +got):\n%s", diff)
	}
}
