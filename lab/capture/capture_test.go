package capture

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/lab/hiplog"
	"github.com/gpreempt/gpreempt/lab/kfdtrace"
)

const live = gpreemptv1.HqdState_HQD_STATE_LIVE

// A queue is idle only if no slot of its GPU may be its own, and the copies of a slot on other XCCs do
// not count.
func TestReadingsCountSlotsOfQueues(t *testing.T) {
	queue := func(target string, id, gpu uint32, backlog uint64) *gpreemptv1.Queue {
		return &gpreemptv1.Queue{TargetId: target, QueueId: id, GpuId: gpu, Type: "compute", Backlog: new(backlog), BacklogUnit: "packets"}
	}
	slot := func(target string, id, gpu, xcc uint32) *gpreemptv1.Hqd {
		return &gpreemptv1.Hqd{Kind: "cp", State: live, TargetId: target, QueueId: id, GpuId: gpu, Xcc: xcc, Quantum: 0x111}
	}
	r := Readings{}
	r.Add([]*gpreemptv1.Queue{queue("a", 0, 1, 3), queue("a", 1, 1, 9), queue("b", 0, 2, 0), queue("c", 0, 3, 5), {TargetId: "a", QueueId: 2, GpuId: 1, Type: "sdma"}},
		[]*gpreemptv1.Hqd{slot("a", 0, 1, 0), slot("a", 0, 1, 1), slot("x", 0, 1, 0), slot("", 0, 2, 0), {Kind: "sdma", State: live, TargetId: "a", QueueId: 2}})
	r.Add([]*gpreemptv1.Queue{queue("a", 0, 1, 1)}, nil)
	packets := func(n uint64) *uint64 { return &n }
	want := Readings{
		"a": {Readings: 2, Queues: 2, Backlog: packets(9), Active: 1, Idle: 1, Quanta: []uint32{0x111}}, // queue 1 is idle
		"b": {Readings: 1, Queues: 1, Backlog: packets(0)},                                              // the slot of nobody may be its own
		"c": {Readings: 1, Queues: 1, Backlog: packets(5)},                                              // its GPU was not read
	}
	if diff := cmp.Diff(want, r); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	all := &Seen{Readings: 2, Queues: 2, Backlog: packets(9), Active: 1, Idle: 1, Quanta: []uint32{0x111}}
	if diff := cmp.Diff(all, r.Of([]string{"b", "a", "a", "unknown", ""})); diff != "" {
		t.Errorf("together (-want +got):\n%s", diff)
	}
	if got := r.Of([]string{"unknown"}); got != nil {
		t.Errorf("nobody was seen as %+v", got)
	}
}

// trace is a recording in which queues were created in a time.
func trace(took time.Duration, kernelJobs uint64) *kfdtrace.Report {
	call := func(name string, n uint64) kfdtrace.FunctionCalls {
		return kfdtrace.FunctionCalls{Name: name, Latency: kfdtrace.Latency{Count: n, P99: took}}
	}
	return &kfdtrace.Report{
		Followed: 9, KernelCompute: &kernelJobs,
		Functions: []kfdtrace.FunctionCalls{
			call("kfd_ioctl_create_queue", 2), call("kfd_ioctl_destroy_queue", 2), call("pqm_create_queue", 2), call("init_mqd__2", 2), call("update_mqd", 2), call("allocate_mqd", 2),
		},
	}
}

func log(dispatches, backlog uint64) *hiplog.Analysis {
	return &hiplog.Analysis{Processes: []hiplog.Process{{Dispatches: dispatches}}, Queues: []hiplog.Queue{{}, {MaxBacklog: &hiplog.Backlog{Packets: backlog}}}}
}

func TestFiguresAreHeldAgainstTheirTargets(t *testing.T) {
	good := Case{Log: log(1000, 99), Trace: trace(999*time.Microsecond, 0), Seen: &Seen{Queues: 3, Active: 5, Quanta: []uint32{0x111}}}
	bad := Case{Log: log(2, 100), Trace: trace(time.Millisecond, 7), Seen: &Seen{Queues: 4, Active: 3, Idle: 1, Quanta: []uint32{0x111, 0x211}}}
	bad.Trace.Functions = append(bad.Trace.Functions, kfdtrace.FunctionCalls{Name: "load_mqd", Latency: kfdtrace.Latency{Count: 1}})
	for name, tc := range map[string]struct {
		cases []Case
		want  map[string]string // the values and the result
	}{
		"met": {[]Case{good}, map[string]string{
			"create a queue, p99": "999µs met", "compute queues of a process": "3 met", "MQD writes for a new queue": "2.0 met", "jobs on kernel queues (KCQ)": "0 met",
			"queue calls for a dispatch (else doorbell)": "0.004 met", "backlog of a queue, most packets": "99 met", "quantum of a slot": "1 ms met",
			"queues with a slot while it runs": "100 % met",
		}},
		"missed by one": {[]Case{good, bad}, map[string]string{
			"create a queue, p99": "999µs 1ms missed", "compute queues of a process": "3 4 missed", "MQD writes for a new queue": "2.0 2.5 missed",
			"jobs on kernel queues (KCQ)": "0 7 missed", "queue calls for a dispatch (else doorbell)": "0.004 2 missed", "backlog of a queue, most packets": "99 100 missed",
			"quantum of a slot": "1 ms 1 ms, 2 ms missed", "queues with a slot while it runs": "100 % 75 % missed",
		}},
		"one is unknown, and one missed": {[]Case{{}, bad}, map[string]string{
			"create a queue, p99": "unknown 1ms missed", "compute queues of a process": "unknown 4 missed", "MQD writes for a new queue": "unknown 2.5 missed",
			"jobs on kernel queues (KCQ)": "unknown 7 missed", "queue calls for a dispatch (else doorbell)": "unknown 2 missed", "backlog of a queue, most packets": "unknown 100 missed",
			"quantum of a slot": "unknown 1 ms, 2 ms missed", "queues with a slot while it runs": "unknown 75 % missed",
		}},
		"unknown": {[]Case{good, {Trace: &kfdtrace.Report{}, Log: &hiplog.Analysis{}, Seen: &Seen{}}}, map[string]string{
			"create a queue, p99": "999µs unknown unknown", "compute queues of a process": "3 unknown unknown", "MQD writes for a new queue": "2.0 unknown unknown",
			"jobs on kernel queues (KCQ)": "0 unknown unknown", "queue calls for a dispatch (else doorbell)": "0.004 unknown unknown",
			"backlog of a queue, most packets": "99 unknown unknown", "quantum of a slot": "1 ms unknown unknown", "queues with a slot while it runs": "100 % unknown unknown",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			got := map[string]string{}
			for _, f := range Figures(tc.cases) {
				got[f.Name] = strings.Join(f.Values, " ") + " " + string(f.Result)
				if unknown := strings.Contains(got[f.Name], "unknown"); unknown != (f.Learn != "") {
					t.Errorf("%s: to learn it: %q", got[f.Name], f.Learn)
				}
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// A target that one case misses is missed, wherever the unknown one stands.
func TestUnknownDoesNotHideAMissedTarget(t *testing.T) {
	missed, unknown := Case{Seen: &Seen{Queues: 4}}, Case{}
	for _, cases := range [][]Case{{missed, unknown}, {unknown, missed}} {
		for _, f := range Figures(cases) {
			if f.Name == "compute queues of a process" && f.Result != Missed {
				t.Errorf("%v: %s", f.Values, f.Result)
			}
		}
	}
}

// The backlog that the daemon read counts where there is no HIP log.
func TestBacklogIsThatOfTheDaemonWithoutALog(t *testing.T) {
	n := uint64(7)
	for _, f := range Figures([]Case{{Seen: &Seen{Backlog: &n}}}) {
		if strings.HasPrefix(f.Name, "backlog") && (f.Values[0] != "7" || f.Result != Met) {
			t.Errorf("%+v", f)
		}
	}
}

func TestReportSaysEachReasonOnce(t *testing.T) {
	r := Report{
		Origin: "emulated", Backend: "a model", Cases: []Summary{{Name: "cnn", Work: "python3 `cnn`.py", Seconds: 60, Steps: 120, Unit: "steps", Device: "device cpu: 2 threads"}, {Name: "b", Work: "b", Seconds: 60, Faults: []string{"it stood still"}}},
		Figures: Figures([]Case{{Seen: &Seen{Queues: 2}}, {}}), Missing: []string{"no HIP logs: none was written"},
	}
	r.Learn = Learning(r.Figures, "hardware")
	var b strings.Builder
	if err := r.Markdown(&b); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"# Capture on a model: EMULATED\n", "- **cnn**: `python3 'cnn'.py`, 60 s, 2 steps/s\n  - device cpu: 2 threads\n", "- **b**: `b`, 60 s, unknown progress\n  - it stood still\n",
		"| figure | target | cnn | b | result |\n| --- | --- | --- | --- | --- |\n", "| compute queues of a process | 1 to 3 | 2 | unknown | unknown |\n",
		"- no HIP logs: none was written\n", "- to learn create a queue, p99; MQD writes for a new queue; jobs on kernel queues (KCQ): " + fromTrace + "\n",
	} {
		if strings.Count(b.String(), want) != 1 {
			t.Errorf("%q is there %d times in\n%s", want, strings.Count(b.String(), want), b.String())
		}
	}
}

// The first line names what was missed, by whom. Nobody is sent to trace the driver of an emulated machine.
func TestVerdictNamesTheCaseThatMissed(t *testing.T) {
	cases := []Case{{Name: "one", Seen: &Seen{Queues: 10}}, {Name: "two", Seen: &Seen{Queues: 2}}}
	figures := Figures(cases)
	got := []string{Verdict(figures, []Summary{{Name: "one"}, {Name: "two"}}), strings.Join(figures[1].Row(), " | "), Verdict(nil, nil)}
	want := []string{
		"1 target missed (case one: compute queues of a process 10, target 1 to 3), 7 unknown", "compute queues of a process | 1 to 3 | 10 | 2 | missed by one", "no target missed",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if lines := strings.Join(Learning(figures, "emulated"), "\n"); strings.Contains(lines, "as root") || !strings.Contains(lines, "no driver to trace") {
		t.Error(lines)
	}
}
