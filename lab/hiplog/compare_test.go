package hiplog_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/lab/hiplog"
)

// workload is the log of a process with its own queues, each of which dispatches a kernel
// every 100 µs from start on, with backlog packets pending.
func workload(pid int, start, backlog uint64, kernel string, rings ...uint64) string {
	var b strings.Builder
	for i, ring := range rings {
		b.WriteString(by(pid, 1, start+uint64(i), "%s", created(ring, 1)))
	}
	for n := range uint64(10) {
		for _, ring := range rings {
			b.WriteString(by(pid, 1, start+10+100*n, "ShaderName : %s", kernel))
			b.WriteString(by(pid, 1, start+10+100*n, "%s", dispatch(ring, 1, n, n+backlog)))
		}
	}
	return b.String()
}

const ringA, ringB = 0x7f8acd210000, 0x7f8acd220000

func TestCompareAdvises(t *testing.T) {
	own := workload(1, 1000, 3, "f()", ringA)
	noPIDs := func(us int) string {
		return fmt.Sprintf(":3:rocdevice.cpp            :480 : %d us:  ", us) + created(ringA, 1) + "\n"
	}
	tests := []struct {
		name, a, b string
		want       hiplog.Strategy
		says       []string // in the reasons and limits
	}{
		{"queues of their own that keep up", own, workload(2, 1000, 5, "g()", ringB), hiplog.StreamPriority, []string{
			"at most 5 packets were pending", "no hardware queue is in both logs", "does not interrupt a running kernel",
		}},
		{"the same address in another process", own, workload(2, 1000, 5, "g()", ringA), hiplog.StreamPriority, []string{
			"1 ring is at the same address in both logs by coincidence",
		}},
		{"a deep backlog", own, workload(2, 1000, 200, "g()", ringB), hiplog.SuspendResume, []string{"in B, up to 200 packets were pending"}},
		{"one after the other", own, workload(2, 99000, 0, "g()", ringB), hiplog.StreamPriority, []string{"do not overlap in time"}},
		{"the same log", own, own, hiplog.SuspendResume, []string{"1 hardware queue is used by both logs", "as separate processes"}},
		{"the same pid in another run", own, workload(1, 5000, 0, "f()", ringA), hiplog.StreamPriority, []string{"by coincidence"}},
		{"the same pid, the creation in one log only", own, by(1, 1, 7000, "%s", dispatch(ringA, 1, 0, 0)), hiplog.Undetermined, []string{
			"they can repeat in containers",
		}},
		{"without pids, created at different times", noPIDs(10), noPIDs(20), hiplog.StreamPriority, []string{"do not show whether the queues are contended"}},
		{"without pids, one creation", noPIDs(10), noPIDs(10), hiplog.SuspendResume, nil},
		{"without pids, two creations at once", noPIDs(10), strings.Replace(noPIDs(10), "SWq=0x7f8", "SWq=0x7f9", 1), hiplog.StreamPriority, []string{"by coincidence"}},
		{"without pids, queues one after the other", noPIDs(10) + noPIDs(20), noPIDs(20) + noPIDs(30), hiplog.Undetermined, nil},
		{"without pids and creations", noPIDs(10), at(1, "%s", dispatch(ringA, 1, 0, 0)), hiplog.Undetermined, []string{"has no process ids", "AMD_LOG_LEVEL=4"}},
		{"ROCm 6.1", own, v57 + "created hardware queue 0x7f1a2c1b2000 with size 16384 with priority 2, cooperative: 0\n" + v57 + oldDispatch, hiplog.StreamPriority, []string{
			"1 queue is not compared: ROCm 6.1 and older",
		}},
		{"no queues", own, at(1, "No HW event"), hiplog.Undetermined, []string{"A has 1 hardware queue, B has 0 hardware queues"}},
	}
	for _, tt := range tests {
		a, b := analyze(t, tt.a), analyze(t, tt.b)
		for _, c := range []*hiplog.Comparison{hiplog.Compare(a, b), hiplog.Compare(b, a)} {
			if c.Advice.Strategy != tt.want || c.Advice.Text == "" {
				t.Errorf("%s: %s: %s %q", tt.name, c.Advice.Strategy, c.Advice.Text, c.Advice.Reasons)
			}
		}
		advice := hiplog.Compare(a, b).Advice
		said := strings.Join(append(advice.Reasons, advice.Limits...), "\n")
		for _, want := range tt.says {
			if !strings.Contains(said, want) {
				t.Errorf("%s: missing %q:\n%s", tt.name, want, said)
			}
		}
	}
}

func TestCompareCountsQueuesAndKernels(t *testing.T) {
	a := analyze(t, workload(1, 1000, 0, "shared()", ringA, ringB)+workload(1, 3000, 0, "a()", ringB))
	b := analyze(t, workload(2, 1500, 0, "shared()", ringA)+workload(2, 2500, 0, "b()", ringA)+workload(2, 5000, 0, "b()", ringA+1<<20))
	c := hiplog.Compare(a, b)
	got := map[string]any{
		"common": c.Common, "coincidences": c.Coincidences, "unknown": c.Unknown, "only a": c.OnlyA, "only b": c.OnlyB,
		"kernels": c.Kernels, "common kernels": c.CommonKernels, "distinct": c.DistinctKernels, "overlap": *c.KernelOverlap,
		"dispatches": []uint64{c.A.Dispatches, c.B.Dispatches}, "together": c.OverlapMicros,
		"matches": c.Matches, "every": []uint64{c.A.Processes[0].Intervals.Max, c.B.Processes[0].Intervals.P50},
	}
	want := map[string]any{
		"common": 0, "coincidences": 1, "unknown": 0, "only a": 2, "only b": 2,
		"kernels":        []hiplog.SharedKernel{{Name: "shared()", A: 20, B: 10}, {Name: "b()", B: 20}, {Name: "a()", A: 10}},
		"common kernels": 1, "distinct": 3, "overlap": 1.0 / 3,
		"dispatches": []uint64{30, 30}, "together": uint64(3910 - 1500),
		"matches": []hiplog.Match{{
			HWq: ringA, PIDA: 1, PIDB: 2, Verdict: hiplog.Coincidence, Why: "the processes differ, and addresses of different processes are independent",
		}},
		"every": []uint64{1100, 100},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("comparison (-want +got):\n%s", diff)
	}
}

// The comparison of B and A has the results of that of A and B.
func TestCompareIsSymmetric(t *testing.T) {
	a := analyze(t, workload(1, 1000, 0, "shared()", ringA, ringB))
	b := analyze(t, workload(1, 1500, 300, "other()", ringB)+workload(2, 1600, 0, "shared()", ringA))
	x, y := hiplog.Compare(a, b), hiplog.Compare(b, a)
	if x.Common != y.Common || x.Unknown != y.Unknown || x.Coincidences != y.Coincidences || x.OnlyA != y.OnlyB || x.OnlyB != y.OnlyA ||
		x.OverlapMicros != y.OverlapMicros || *x.KernelOverlap != *y.KernelOverlap || x.Advice.Strategy != y.Advice.Strategy {
		t.Errorf("one way %+v\nthe other %+v", x, y)
	}
}
