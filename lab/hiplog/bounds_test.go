package hiplog_test

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/lab/hiplog"
)

// heapWatch reads from r and records the largest live heap.
type heapWatch struct {
	r     io.Reader
	every int64
	read  int64
	next  int64
	most  uint64
}

func (h *heapWatch) Read(p []byte) (int, error) {
	n, err := h.r.Read(p)
	if h.read += int64(n); h.read >= h.next {
		h.next = h.read + h.every
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		h.most = max(h.most, m.HeapAlloc)
	}
	return n, err
}

// A log of any size needs the same memory. GPREEMPT_LOG_BYTES makes it larger or
// smaller than 1 GiB.
func TestAGibibyteNeedsAFewMebibytes(t *testing.T) {
	size := 1 << 30
	if s := os.Getenv("GPREEMPT_LOG_BYTES"); s != "" {
		if _, err := fmt.Sscan(s, &size); err != nil {
			t.Fatalf("GPREEMPT_LOG_BYTES: %v", err)
		}
	} else if testing.Short() || raceEnabled {
		size = 32 << 20
	}
	// Making a log takes longer than reading it: one part is read repeatedly.
	g := &generator{left: 1 << 62, queues: 4, kernels: 40}
	for g.buf.Len() < 4<<20 {
		g.write()
	}
	part, times := g.buf.Bytes(), size/g.buf.Len()+1
	var parts []io.Reader
	for range times {
		parts = append(parts, bytes.NewReader(part))
	}
	var before runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	watch := &heapWatch{r: io.MultiReader(parts...), every: int64(size) / 16}
	a, err := hiplog.Analyze(watch)
	if err != nil {
		t.Fatal(err)
	}
	if used := int64(watch.most) - int64(before.HeapAlloc); used > 4<<20 {
		t.Errorf("%d KiB of heap for %d MiB", used>>10, a.Bytes>>20)
	}
	p := a.Processes[0]
	got := []uint64{a.Bytes, a.Lines, a.Records, p.Dispatches, p.Launches.Total, uint64(p.Launches.Distinct), uint64(len(a.Queues)), a.OtherLines + a.TornLines}
	n := uint64(times) * g.launch
	want := []uint64{uint64(times * len(part)), 7 * n, 7 * n, n, n, 40, 4, 0}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("bytes, lines, records, dispatches, launches, kernels, queues, other and torn lines (-want +got):\n%s", diff)
	}
}

// Everything that can be new in every line is bounded: queues, processes, threads, kernels,
// streams.
func TestLogWithNewNamesInEveryLineIsBounded(t *testing.T) {
	const launches = 25000
	i := 0
	lines := readerFunc(func(p []byte) (int, error) {
		if i == launches {
			return 0, io.EOF
		}
		pid, tid, hwq := 1+i/40, uint64(i), 0x7f0000000000+uint64(i)<<16
		block := by(pid, tid, uint64(i), "Command (KernelExecution) enqueued: 0x1 to queue: 0x%x", i+1) +
			by(pid, tid, uint64(i), "ShaderName : f<%d>()%s", i, strings.Repeat("x", i%3000)) +
			by(pid, tid, uint64(i), "%s", dispatch(hwq, uint64(i), 0, 0))
		i++
		return copy(p, block), nil
	})
	var before runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	watch := &heapWatch{r: lines, every: 8 << 20}
	a, err := hiplog.Analyze(watch)
	if err != nil {
		t.Fatal(err)
	}
	if used := int64(watch.most) - int64(before.HeapAlloc); used > 32<<20 {
		t.Errorf("%d KiB of heap", used>>10)
	}
	if len(a.Queues) != 512 || len(a.Processes) != 512 || a.Untracked == 0 || a.Records != 3*launches || a.TornLines != 0 {
		t.Errorf("%d queues, %d processes, %d untracked of %d records, %d torn", len(a.Queues), len(a.Processes), a.Untracked, a.Records, a.TornLines)
	}
	total, others, threads := uint64(0), uint64(0), 0
	for _, p := range a.Processes {
		threads += p.Threads
		total += p.Launches.Total
		others += p.Launches.Others
	}
	if want := uint64(512 * 40); total != want || others != want-4096 {
		t.Errorf("%d launches, %d of them others, want %d and %d", total, others, want, want-4096)
	}
	if threads > 4096 {
		t.Errorf("%d threads", threads)
	}
	for _, want := range []string{"kernels_capped", "untracked"} {
		if !strings.Contains(fmt.Sprint(codes(a)), want) {
			t.Errorf("warnings %v lack %s", codes(a), want)
		}
	}
}

func TestNamesBeyondTheirBoundAreDistinguished(t *testing.T) {
	long := strings.Repeat("x", 3000)
	a := analyze(t, at(1, "ShaderName : %sa", long)+at(2, "ShaderName : %sb", long)+at(3, "ShaderName : %sa", long))
	top := a.Processes[0].Launches.Top
	if len(top) != 2 || top[0].Count != 2 || len(top[0].Name) > 1100 || top[0].Name == top[1].Name {
		t.Errorf("%d names", len(top))
	}
}

func TestKernelsOfAQueueAreBounded(t *testing.T) {
	const hwq = 0x7f8acd210000
	var log strings.Builder
	for i := range 1500 {
		log.WriteString(at(1, "ShaderName : f<%d>()", i%1200) + at(1, "%s", dispatch(hwq, uint64(i%1200+1), 0, 0)))
	}
	m := analyze(t, log.String()).Queues[0].Kernels
	// The 176 beyond 1024 occur once, the first 300 twice.
	if m.Total != 1500 || m.Others != 176 || m.Distinct != 1024 || len(m.Top) != 50 || m.Top[0].Count != 2 {
		t.Errorf("%d launches, %d others, %d kernels, %d in the list", m.Total, m.Others, m.Distinct, len(m.Top))
	}
}

func TestKernelObjectsAreBounded(t *testing.T) {
	const hwq, objects = 0x7f8acd210000, 16384
	var log strings.Builder
	for i := range uint64(objects + 1) {
		log.WriteString(at(1, "ShaderName : f()") + at(1, "%s", dispatch(hwq, i+1, 0, 0)))
	}
	log.WriteString(at(2, "%s", dispatch(hwq, objects, 0, 0)) + at(2, "%s", dispatch(hwq, objects+1, 0, 0)))
	want := []hiplog.KernelCount{{Name: "f()", Count: objects + 2}, {Name: "kernel_obj=0x4001", Count: 1}}
	if diff := cmp.Diff(want, analyze(t, log.String()).Queues[0].Kernels.Top); diff != "" {
		t.Errorf("kernels (-want +got):\n%s", diff)
	}
}
