package cli

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/lab/capture"
	"github.com/gpreempt/gpreempt/lab/evidence"
	"github.com/gpreempt/gpreempt/lab/hiplog"
	"github.com/gpreempt/gpreempt/lab/kfdtrace"
)

// hipLog is the HIP log of a process with one queue and some dispatches.
func hipLog(pid, dispatches int) string {
	text := fmt.Sprintf(":3:rocdevice.cpp            :3048: 0000000110 us: [pid:%d tid: 0x7f01] Created SWq=0x7f8acd21000 to map on HWq=0x7f8acd210000 with size 16384 with priority 1, cooperative: 0\n", pid)
	for i := range dispatches {
		text += fmt.Sprintf(":4:rocvirtual.cpp           :1083: 0000000%d us: [pid:%d tid: 0x7f01] SWq=0x7f8acd21000, HWq=0x7f8acd210000, id=1, "+
			"Dispatch Header = 0xb02 (type=2), kernel_obj=0xa0, kernarg_address=0x0, completion_signal=0x0, correlation_id=0, rptr=0, wptr=%d\n", 200+i, pid, i)
	}
	return text
}

// caseFolder writes the folder of a trial with a process, and its HIP logs.
func caseFolder(t *testing.T, pid int32, trace *kfdtrace.Report, logs ...string) string {
	t.Helper()
	dir := t.TempDir()
	err := evidence.WriteJSON(dir, evidence.PIDsFile, []map[string]any{{"pid": pid, "target": fmt.Sprintf("%d@1", pid)}})
	for _, sub := range []string{evidence.KFDDir, evidence.LogsDir} {
		if err == nil {
			err = os.Mkdir(filepath.Join(dir, sub), 0o700)
		}
	}
	if err == nil && trace != nil {
		err = evidence.WriteJSON(filepath.Join(dir, evidence.KFDDir), "offline-alone-1.json", kfdRecording{Kernel: "6.12", Report: trace})
	}
	for i, text := range logs {
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, evidence.LogsDir, fmt.Sprintf("offline-alone-1-job-1-1.hip_%d", i)), []byte(text), 0o600)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestCaptureSaysWhatBothCasesMade(t *testing.T) {
	none, backlog := uint64(0), uint64(3)
	trace := &kfdtrace.Report{Followed: 2, KernelCompute: &none, Functions: []kfdtrace.FunctionCalls{
		{Name: "kfd_ioctl_create_queue", Latency: kfdtrace.Latency{Count: 2, P99: 310 * time.Microsecond}},
		{Name: "pqm_create_queue", Latency: kfdtrace.Latency{Count: 2}},
		{Name: "init_mqd", Latency: kfdtrace.Latency{Count: 2}},
	}}
	run := &evidence.Run{Arms: []evidence.Arm{{Repeats: []evidence.Repeat{{Seconds: 60, Work: 600, WorkUnit: "steps"}}}}}
	readings := capture.Readings{
		"7001@1": {Readings: 60, Queues: 2, Active: 120, Quanta: []uint32{0x111}},
		"7002@1": {Readings: 60, Queues: 1, Active: 59, Idle: 1, Quanta: []uint32{0x111}, Backlog: &backlog},
	}
	folder := caseFolder(t, 7001, trace, hipLog(7001, 8), hipLog(7003, 4))
	if err := os.WriteFile(filepath.Join(folder, evidence.LogsDir, "offline-alone-1-job-1-1.log"), []byte("loading\ndevice cuda: MI300X\nstep 1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	elsewhere := filepath.Join(t.TempDir(), "hip")
	if err := os.WriteFile(elsewhere, []byte(hipLog(7002, 3)), 0o600); err != nil {
		t.Fatal(err)
	}
	// The first case has two processes, each with a log, and the log of the second was made elsewhere.
	a, first, err := readCase(&captured{name: "cnn", work: "python3 cnn.py"}, folder, run, readings)
	if err != nil {
		t.Fatal(err)
	}
	b, second, err := readCase(&captured{name: "chat", work: "pid:7002", logs: []string{elsewhere}}, caseFolder(t, 7002, nil), run, readings)
	if err != nil {
		t.Fatal(err)
	}
	cases := []capture.Case{a, b}
	r := capture.Report{
		Dir: "run1", Origin: "hardware", Backend: "the kernel's driver", Cases: []capture.Summary{first, second}, Figures: capture.Figures(cases),
		Missing: []string{"no KFD trace of chat: the plan has none"}, Comparison: hiplog.Compare(a.Log, b.Log),
	}
	r.Learn = capture.Learning(r.Figures, r.Origin)
	var out bytes.Buffer
	app := &term.App{IO: term.IO{Out: &out, Getenv: func(string) string { return "" }}, Output: "table"}
	p := app.Printer()
	printCapture(p, &r, "run1/report.md")
	said, _, _ := strings.Cut(out.String(), "\n  reason:")
	want := `1 target missed (case chat: queues with a slot while it runs 98 %, target 100 %), 4 unknown
capture on the kernel's driver: HARDWARE
cnn: python3 cnn.py, 60 s, 10 steps/s
  device cuda: MI300X
chat: pid:7002, 60 s, 10 steps/s

FIGURE                                      TARGET  CNN    CHAT     RESULT
create a queue, p99                         < 1 ms  310µs  unknown  unknown
compute queues of a process                 1 to 3  2      1        met
MQD writes for a new queue                  1 to 2  1.0    unknown  unknown
jobs on kernel queues (KCQ)                 0       0      unknown  unknown
queue calls for a dispatch (else doorbell)  < 1     0.167  unknown  unknown
backlog of a queue, most packets            < 100   7      2        met
quantum of a slot                           1 ms    1 ms   1 ms     met
queues with a slot while it runs            100 %   100 %  98 %     missed by chat

no KFD trace of chat: the plan has none
to learn create a queue, p99; MQD writes for a new queue; jobs on kernel queues (KCQ): run gplab capture as root on the host of the GPU, with a kernel that has kprobe events
to learn queue calls for a dispatch (else doorbell): it needs both, the KFD trace and a HIP log

stream priorities may be sufficient: create the online streams with hipStreamCreateWithPriority and -1 (high), the others with 0 (normal)`
	if diff := cmp.Diff(want, said); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if !strings.HasSuffix(out.String(), "\nrecordings: run1\nreport: run1/report.md\n") {
		t.Errorf("the end is\n%s", out.String())
	}
}

func TestCaseOfACommandHasAShortHIPLog(t *testing.T) {
	t.Setenv("AMD_LOG_MASK", "")
	c, err := parseCase("cnn=python3 cnn.py --x=1")
	if err != nil || len(c.plan.Offline.Commands) != 1 || c.plan.Offline.Commands[0] != "export AMD_LOG_MASK=0x98\npython3 cnn.py --x=1" {
		t.Errorf("%+v, %v", c, err)
	}
	t.Setenv("AMD_LOG_MASK", "0xff")
	if c, err = parseCase("cnn=python3 cnn.py"); err != nil || c.plan.Offline.Commands[0] != "python3 cnn.py" {
		t.Errorf("with a mask of its own: %+v, %v", c, err)
	}
	if c, err = parseCase("chat=container:vllm"); err != nil || !cmp.Equal(c.plan.Offline.Containers, []string{"vllm"}) {
		t.Errorf("a container: %+v, %v", c, err)
	}
}
