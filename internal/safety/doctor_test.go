package safety

import (
	"bytes"
	gocmp "cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/emu/gpumodel"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// The verdicts.
const (
	ready     = gpreemptv1.Verdict_VERDICT_READY
	limited   = gpreemptv1.Verdict_VERDICT_LIMITED
	notReady  = gpreemptv1.Verdict_VERDICT_NOT_READY
	noGPU     = gpreemptv1.Verdict_VERDICT_NO_GPU
	simulated = gpreemptv1.Verdict_VERDICT_SIMULATED
)

// testHost is a change of a healthy fake host, and the verdict.
type testHost struct {
	name  string
	whole bool
	make  func(h *fakeHost)
	want  gpreemptv1.Verdict
}

// hosts are fake hosts, by the name of the golden file with their report: the whole
// report if whole is set, else only the checks that differ from the healthy host's.
var hosts = []testHost{
	{"mi300x", true, func(h *fakeHost) {
		h.cfg.Processes = func(context.Context) []*gpreemptv1.DiagnosedProcess {
			return []*gpreemptv1.DiagnosedProcess{
				{TargetId: "5001@50010", Pid: 5001, Comm: "tritonserver", Why: "it is online"},
				{
					TargetId: "4242@42420", Pid: 4242, Comm: "python3", Offline: true, Mechanism: "dbgtrap",
					Why: "KFD version: 1.17, which has DBG_TRAP; runtime: enabled",
				},
			}
		}
	}, ready},
	{"mi300x-diagnosis", true, func(h *fakeHost) { h.diagnosis() }, limited},
	{"gfx1100", true, func(h *fakeHost) {
		h.diagnosis()
		h.noGPUs()
		h.noPCI()
		h.node(1, 777, "ip discovery", 110000, 3, 8, 1, capable)
		h.device("0000:03:00.0", "0x1002", "0x030000")
		h.driver.Version, h.driver.Minor, h.driver.Profile = "1.23", 23, "7.2"
		h.write("proc/sys/kernel/osrelease", "7.2.13\n")
		h.cfg.Hazards = map[gpreempt.GPUID]Result{777: {Action: Limit, Reason: "MES may not answer when many queues go (ROCm/rocm#6273)"}}
	}, limited},
	{"no-gpu", true, func(h *fakeHost) { h.noDriver(); h.noPCI() }, noGPU},
	{"driver-without-gpu", true, func(h *fakeHost) { h.noGPUs(); h.noPCI() }, noGPU},
	{"unprivileged", true, func(h *fakeHost) {
		h.diagnosis()
		h.remove("proc/101") // of a daemon that has died
		h.remove("sys/class/kfd/kfd/proc/101")
		h.write("proc/self/status", processStatus("gpreemptd", 200, 0, 1000, 0))
		h.denied["proc/4242/environ"] = true
		h.noOpen = &fs.PathError{Op: "open", Path: "/dev/kfd", Err: syscall.EACCES}
		h.denied["dev/kmsg"], h.denied["sys/kernel/debug/kfd/mqds"] = true, true
	}, limited},
	{"simulated", true, func(h *fakeHost) {
		spec, err := gpumodel.PresetByName("mi300x")
		if err != nil {
			panic(err)
		}
		h.cfg.Root, h.cfg.Simulated = gpumodel.New(spec, 2, 1).FS(), "mi300x"
		h.cfg.OpenDriver = func() (Driver, error) { panic("opened the driver for a simulation") }
		h.cfg.Processes = func(context.Context) []*gpreemptv1.DiagnosedProcess {
			return []*gpreemptv1.DiagnosedProcess{{TargetId: "7@1", Pid: 7, Comm: "train", Offline: true, Mechanism: "sim", Why: "simulated"}}
		}
	}, simulated},
	{"driver-not-loaded", false, func(h *fakeHost) { h.noDriver() }, notReady},
	{"gpu-without-node", false, func(h *fakeHost) { h.noGPUs() }, notReady},
	{"gpu-hidden", false, func(h *fakeHost) {
		h.denied[topology+"nodes/2/gpu_id"], h.denied[topology+"nodes/3/gpu_id"] = true, true
	}, notReady},
	{"topology-unreadable", false, func(h *fakeHost) { h.write(topology+"nodes/2/properties", "simd_count x\n") }, limited},
	{"kernel-6.1", false, func(h *fakeHost) {
		h.write("proc/sys/kernel/osrelease", "6.1.0-37-amd64\n")
		h.noOpen = errors.New("KFD interface not supported: version 1.11 has no queue suspension; it needs 1.13")
	}, notReady},
	{"interface-unknown", false, func(h *fakeHost) { h.driver.Version, h.driver.Note = "1.31", "KFD interface 1.31 is not known" }, limited},
	{"no-device", false, func(h *fakeHost) { h.noOpen = syscall.ENOENT }, notReady},
	{"gpu-reset", false, func(h *fakeHost) { h.noOpen = syscall.EINVAL }, notReady},
	{"open-fails", false, func(h *fakeHost) { h.noOpen = syscall.ENOMEM }, notReady},
	{"yama-3", false, func(h *fakeHost) { h.write("proc/sys/kernel/yama/ptrace_scope", "3\n") }, notReady},
	{"no-yama", false, func(h *fakeHost) { h.remove("proc/sys/kernel/yama") }, ready},
	{"lockdown", false, func(h *fakeHost) { h.denied["sys/kernel/debug/kfd/mqds"] = true }, limited},
	{"mqds-not-read", false, func(h *fakeHost) { h.cfg.Debugfs = false }, ready},
	{"debugfs-missing", false, func(h *fakeHost) { h.remove("sys/kernel/debug") }, limited},
	{"drm-queues", false, func(h *fakeHost) {
		h.param("user_queue", "1")
		h.userQueue(31, 4242, "0000:c6:00.0")
		h.userQueue(32, 999, "0000:c6:00.0") // it does not use KFD
	}, limited},
	{"drm-queues-of-others", false, func(h *fakeHost) { h.param("user_queue", "2"); h.userQueue(32, 999, "0000:c6:00.0") }, ready},
	{"drm-queues-assumed", false, func(h *fakeHost) {
		h.param("user_queue", "1")
		h.write("proc/4242/environ", "A=1\x00HSA_ENABLE_DRM_DEBUG=1\x00")
	}, limited},
	{"drm-queues-unlisted", false, func(h *fakeHost) { h.param("user_queue", "1") }, limited},
	{"drm-queues-by-default", false, func(h *fakeHost) { h.param("user_queue", "-1") }, ready},
	{"drm-queues-off", false, func(h *fakeHost) { h.param("user_queue", "0") }, ready},
	{"cgroup-1", false, func(h *fakeHost) {
		h.remove("sys/fs/cgroup")
		h.write("sys/fs/cgroup/freezer/tasks", "")
	}, limited},
	{"cgroup-hybrid", false, func(h *fakeHost) {
		h.remove("sys/fs/cgroup/cgroup.controllers")
		h.write("sys/fs/cgroup/freezer/tasks", "")
		h.write("sys/fs/cgroup/unified/cgroup.procs", "")
	}, limited},
	{"no-cgroup", false, func(h *fakeHost) { h.remove("sys/fs/cgroup") }, limited},
	{"oversubscribed", false, func(h *fakeHost) {
		h.process(4300, "many", "many", 0, slices.Repeat([]gpreempt.GPUID{gpuA}, 23)...)
		h.param("num_kcq", "2")
	}, limited},
	{"slots-unknown", false, func(h *fakeHost) { h.node(3, gpuB, "mi300x", 90402, 0xc6, 0, 8, capable) }, ready},
	{"sched-policy-2", false, func(h *fakeHost) { h.param("sched_policy", "2") }, notReady},
	{"no-cwsr", false, func(h *fakeHost) { h.param("cwsr_enable", "0") }, notReady},
	{"parameters-strange", false, func(h *fakeHost) {
		h.param("sched_policy", "7")
		h.param("cwsr_enable", "Y\x1b[2J")
		h.remove("sys/module/amdgpu/parameters/num_kcq")
	}, limited},
	{"mixed-gpus", false, func(h *fakeHost) {
		h.node(3, gpuB, "mi50", 90006, 0xc6, 24, 1, capable&^0x20000000)
	}, notReady},
	{"gfx950", false, func(h *fakeHost) { h.node(3, gpuB, "mi350x", 90500, 0xc6, 24, 8, capable) }, limited},
	{"gfx950-dkms", false, func(h *fakeHost) {
		h.node(3, gpuB, "mi350x", 90500, 0xc6, 24, 8, capable)
		h.driver.Version, h.driver.Minor, h.driver.Profile = "1.18", 18, "amd-dkms"
	}, ready},
	{"container", false, func(h *fakeHost) {
		h.files["proc/self/ns/pid"].Data = []byte("pid:[4026532201]")
		h.noOpen = syscall.EPERM
		h.remove("dev/kmsg")
		h.remove("sys/kernel/debug/kfd")
	}, notReady},
	{"user-namespace", false, func(h *fakeHost) { h.write("proc/self/uid_map", "0 100000 65536\n") }, notReady},
	{"daemon-without-ptrace", false, func(h *fakeHost) {
		h.write("proc/self/status", processStatus("gpreemptd", 100, 0, 990, 1<<34))
	}, notReady},
	{"daemon-without-admin", false, func(h *fakeHost) {
		h.write("proc/self/status", processStatus("gpreemptd", 100, 0, 990, 1<<19))
		h.denied["dev/kmsg"], h.denied["sys/kernel/debug/kfd/mqds"] = true, true
	}, limited},
	{"second-daemon", false, func(h *fakeHost) {
		h.part(777, "gpreemptd", "gpreemptd serve")
		h.process(776, "gpreemptd", "gpreemptd serve", 0) // a user's program of the same name
		h.part(778, "gpreemptd", "gpreemptd diagnose")    // harmless
	}, notReady},
	{"parts-of-every-version", false, func(h *fakeHost) {
		h.part(300, "gpreempt-dumps", "gpreemptd debugfs-reader")
		h.part(301, "gpreempt-nvsup", "gpreemptd nvidia-supervisor")
		h.part(302, "gpreempt-later", "gpreemptd of-another-version")
	}, ready},
	{"a-user's-process-with-our-name", false, func(h *fakeHost) { h.process(303, "gpreempt-helper", "train", 0, gpuA) }, ready},
	{"hazard-everywhere", false, func(h *fakeHost) { h.deny(gpuA, gpuB) }, notReady},
	{"hazard-on-the-first", false, func(h *fakeHost) { h.deny(gpuA) }, limited},
	{"hazard-on-one", false, func(h *fakeHost) { h.deny(gpuB) }, limited},
	{"hazards-noted", false, func(h *fakeHost) {
		noted := Default().Check(Host{Kernel: "7.3.4"}, GPU{GFX: 90402}, "dbgtrap")
		h.cfg.Hazards = map[gpreempt.GPUID]Result{gpuA: noted, gpuB: noted}
	}, ready},
	{"no-mechanism-fits", false, func(h *fakeHost) {
		h.cfg.Processes = func(context.Context) []*gpreemptv1.DiagnosedProcess {
			return []*gpreemptv1.DiagnosedProcess{{
				TargetId: "4242@42420", Pid: 4242, Comm: "evil\x1b[31m", Offline: true, Rejected: []*gpreemptv1.Rejection{
					{Mechanism: "dbgtrap", Why: "debugger: evil\x1b[31m holds it", Remedy: "end it"}, {Mechanism: "criu", Why: "not enabled"},
				},
			}}
		}
	}, limited},
	{"ranks-without-a-job", false, func(h *fakeHost) { h.ranks("", "own-2", "container-3", "torch-4") }, limited},
	{"ranks-of-a-job", false, func(h *fakeHost) { h.ranks("torch-1", "torch-1", "torch-1", "torch-1", "torch-1") }, ready},
	{"queue-unreadable", false, func(h *fakeHost) { h.write("sys/class/kfd/kfd/proc/4242/queues/0/size", "x") }, limited},
	{"kernel-strange", false, func(h *fakeHost) { h.write("proc/sys/kernel/osrelease", "linux\n") }, limited},
	{"yama-2", false, func(h *fakeHost) { h.write("proc/sys/kernel/yama/ptrace_scope", "2\n") }, ready},
	{"yama-strange", false, func(h *fakeHost) { h.write("proc/sys/kernel/yama/ptrace_scope", "9\n") }, limited},
	{"sched-policy-1", false, func(h *fakeHost) { h.param("sched_policy", "1") }, ready},
	{"gfx950-7.2", false, func(h *fakeHost) {
		h.node(3, gpuB, "mi350x", 90500, 0xc6, 24, 8, capable)
		h.driver.Version, h.driver.Minor, h.driver.Profile = "1.23", 23, "7.2"
	}, ready},
	{"three-gpus", false, func(h *fakeHost) {
		h.node(4, 50000, "mi50", 90006, 0xd1, 24, 1, capable)
		h.cfg.Hazards = map[gpreempt.GPUID]Result{50000: {Action: Allow}}
	}, limited},
	{"no-hazard-table", false, func(h *fakeHost) { h.cfg.Hazards = nil }, ready},
	{"running-daemon-diagnosis", false, func(h *fakeHost) {
		healthy := mi300x() // whose daemon traces 4242
		h.diagnosis()
		for name, file := range healthy.files {
			if !strings.HasPrefix(name, "proc/self/") {
				h.files[name] = file
			}
		}
	}, ready},
	{"user-without-rights-beside-a-daemon", true, func(h *fakeHost) {
		h.cfg.ByDaemon, h.cfg.Processes = false, nil
		h.write("proc/self/status", processStatus("gpreemptd", 200, 0, 65534, 0))
		h.process(200, "gpreemptd", "gpreemptd diagnose", 0)
		h.denied["proc/4242/environ"], h.denied["proc/5001/environ"] = true, true
		h.denied["dev/kmsg"], h.denied["sys/kernel/debug/kfd/mqds"] = true, true
	}, limited},
	{"container-diagnosis", false, func(h *fakeHost) {
		h.diagnosis()
		h.files["proc/self/ns/pid"].Data = []byte("pid:[4026532201]")
	}, limited},
	{"user-namespace-diagnosis", false, func(h *fakeHost) {
		h.diagnosis()
		h.write("proc/self/uid_map", "0 1000 1\n")
	}, limited},
	{"files-denied", false, func(h *fakeHost) {
		for _, name := range []string{"proc/sys/kernel/yama/ptrace_scope", "proc/self/uid_map"} {
			h.denied[name] = true
		}
	}, ready},
	{"no-procfs", false, func(h *fakeHost) { h.remove("proc"); h.remove("sys/class/kfd/kfd/proc") }, notReady},
}

// deny makes the hazard table deny GPUs.
func (h *fakeHost) deny(denied ...gpreempt.GPUID) {
	for _, id := range denied {
		h.cfg.Hazards[id] = Result{
			Action: Deny, Reason: "suspending resets the GPU (ROCm/rocm#1)", Row: Row{Mechanisms: []string{"dbgtrap", "criu"}},
		}
	}
}

func TestReports(t *testing.T) {
	healthy := Examine(t.Context(), mi300x().cfg)
	for _, test := range hosts {
		t.Run(test.name, func(t *testing.T) {
			h := mi300x()
			test.make(h)
			report := Examine(t.Context(), h.cfg)
			if report.GetVerdict() != test.want {
				t.Errorf("verdict %v, want %v", report.GetVerdict(), test.want)
			}
			checkWhole(t, report)
			if !test.whole {
				report.Checks = slices.DeleteFunc(report.GetChecks(), func(c *gpreemptv1.Check) bool {
					return slices.ContainsFunc(healthy.GetChecks(), func(h *gpreemptv1.Check) bool { return proto.Equal(c, h) })
				})
			}
			got := textOf(report)
			path := filepath.Join("testdata", test.name+".txt")
			if *update {
				if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), got); diff != "" {
				t.Errorf("report (-want +got):\n%s", diff)
			}
		})
	}
}

// checkWhole checks properties of every report.
func checkWhole(t *testing.T, r *gpreemptv1.DiagnoseResponse) {
	t.Helper()
	var ids []string
	for _, c := range r.GetChecks() {
		ids = append(ids, c.GetId())
		fine := c.GetStatus() == gpreemptv1.CheckStatus_CHECK_STATUS_OK || c.GetStatus() == gpreemptv1.CheckStatus_CHECK_STATUS_SKIP
		unchecked := strings.HasPrefix(c.GetFound(), "not checked: ")
		if c.GetTitle() == "" || c.GetFound() == "" || (c.GetRemedy() == "") != (fine && !unchecked) {
			t.Errorf("check %v: want what was found, and a remedy only if it is not OK, or was not checked", c)
		}
		if c.GetFound() != gpreempt.Printable(c.GetFound()) {
			t.Errorf("check %s has control characters: %q", c.GetId(), c.GetFound())
		}
	}
	want := []string{
		"gpu", "kernel", "kfd-interface", "debug-firmware", "debug-sharing", "sched-policy", "cwsr", "queue-slots", "hazards",
		"rights", "namespaces", "yama", "daemon", "cgroup", "kernel-log", "debugfs", "user-queues", "processes", "jobs",
	}
	if diff := cmp.Diff(want, ids); diff != "" {
		t.Errorf("ids, which scripts rely on (-want +got):\n%s", diff)
	}
	var b bytes.Buffer
	if err := WriteReport(&b, r); err != nil {
		t.Fatal(err)
	}
	back := &gpreemptv1.DiagnoseResponse{}
	if err := protojson.Unmarshal(b.Bytes(), back); err != nil {
		t.Fatal(err)
	}
	if !proto.Equal(back, r) {
		t.Errorf("JSON reads as %v, want %v", back, r)
	}
}

func TestAHostWithoutGPUFailsOneCheck(t *testing.T) {
	h := mi300x()
	h.noDriver()
	h.noPCI()
	for _, c := range Examine(t.Context(), h.cfg).GetChecks() {
		if (c.GetStatus() == gpreemptv1.CheckStatus_CHECK_STATUS_SKIP) == (c.GetId() == "gpu") {
			t.Errorf("%s: %v, want the GPU to fail and all others to be skipped", c.GetId(), c.GetStatus())
		}
	}
}

func TestTheMessageHasEveryFact(t *testing.T) {
	h := mi300x()
	h.deny(gpuB)
	h.cfg.Hazards[50000] = Result{Action: Allow}
	h.node(3, gpuB, "mi50", 90006, 0xc6, 24, 1, capable)
	h.node(4, 50000, "gfx1100", 110000, 0xd1, 8, 1, 0)
	h.cfg.Processes = func(context.Context) []*gpreemptv1.DiagnosedProcess {
		return []*gpreemptv1.DiagnosedProcess{{
			TargetId: "4242@7", Pid: 4242, Comm: "python3", Offline: true, Mechanism: "freezer", Why: "cgroup: 2",
			Rejected: []*gpreemptv1.Rejection{{Mechanism: "dbgtrap", Why: "debugger: gdb", Remedy: "end it"}},
		}}
	}
	got := Examine(t.Context(), h.cfg)
	want := &gpreemptv1.DiagnoseResponse{
		Verdict: gpreemptv1.Verdict_VERDICT_NOT_READY, ByDaemon: true, Backend: "kfd", Version: "v0.3.0",
		Gpus: []*gpreemptv1.DiagnosedGpu{
			{
				GpuId: 34535, Node: 2, Name: "mi300x", GfxTargetVersion: 90402, Bdf: "0000:c1:00.0", XccCount: 8, DebugFirmware: true,
				DebugSharing: gpreemptv1.DebugSharing_DEBUG_SHARING_SEVERAL, QueueSlots: 24, ComputeQueues: 2, Hazard: gpreemptv1.HazardAction_HAZARD_ACTION_ALLOW,
			},
			{
				GpuId: 41235, Node: 3, Name: "mi50", GfxTargetVersion: 90006, Bdf: "0000:c6:00.0", XccCount: 1, DebugFirmware: true,
				DebugSharing: gpreemptv1.DebugSharing_DEBUG_SHARING_ONE, QueueSlots: 24, ComputeQueues: 2, Hazard: gpreemptv1.HazardAction_HAZARD_ACTION_DENY,
				HazardReason: "suspending resets the GPU (ROCm/rocm#1)",
			},
			{
				GpuId: 50000, Node: 4, Name: "gfx1100", GfxTargetVersion: 110000, Bdf: "0000:d1:00.0", XccCount: 1, Mes: true,
				DebugSharing: gpreemptv1.DebugSharing_DEBUG_SHARING_SEVERAL, QueueSlots: 8, Hazard: gpreemptv1.HazardAction_HAZARD_ACTION_ALLOW,
			},
		},
		Processes: []*gpreemptv1.DiagnosedProcess{{
			TargetId: "4242@7", Pid: 4242, Comm: "python3", Offline: true, Mechanism: "freezer", Why: "cgroup: 2",
			Rejected: []*gpreemptv1.Rejection{{Mechanism: "dbgtrap", Why: "debugger: gdb", Remedy: "end it"}},
		}},
		Summary: got.GetSummary(), Remedy: got.GetRemedy(), Checks: got.GetChecks(), // the golden files have these
	}
	if !proto.Equal(want, got) {
		t.Errorf("message\n%v\nwant\n%v", got, want)
	}
	if n, status := len(got.GetChecks()), got.GetChecks()[0].GetStatus(); n != 19 || status != gpreemptv1.CheckStatus_CHECK_STATUS_OK {
		t.Errorf("%d checks, the first %v", n, status)
	}
}

// brokenWriter takes nothing.
type brokenWriter struct{}

func (brokenWriter) Write([]byte) (int, error) { return 0, syscall.EPIPE }

func TestAReportThatCannotBeWrittenIsAnError(t *testing.T) {
	r := Examine(t.Context(), mi300x().cfg)
	if WriteReport(brokenWriter{}, r) == nil {
		t.Error("the error of the output was swallowed")
	}
}

func TestEveryCheckIsDocumented(t *testing.T) {
	doc, err := os.ReadFile("../../docs/api.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range Examine(t.Context(), mi300x().cfg).GetChecks() {
		if !bytes.Contains(doc, []byte("\n| `"+c.GetId()+"` |")) {
			t.Errorf("docs/api.md has no row for the check %s", c.GetId())
		}
	}
}

func TestGoldenFilesHaveTheirHost(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".txt")
		if !slices.ContainsFunc(hosts, func(h testHost) bool { return h.name == name }) {
			t.Errorf("%s belongs to no host", file)
		}
	}
}

// ranks adds offline processes of a user with these jobs, on one GPU and the other in turn.
// Those whose name begins with container or torch are local.
func (h *fakeHost) ranks(jobs ...string) {
	var reports []*gpreemptv1.DiagnosedProcess
	for i, job := range jobs {
		pid := 6001 + i
		h.process(pid, "python3", "python3 train.py", 101, []gpreempt.GPUID{gpuA, gpuB}[i%2])
		reports = append(reports, &gpreemptv1.DiagnosedProcess{
			Pid: int32(pid), Comm: "python3", Offline: true, Mechanism: "dbgtrap", Job: job,
			JobIsLocal: strings.HasPrefix(job, "container") || strings.HasPrefix(job, "torch"),
		})
	}
	h.cfg.Processes = func(context.Context) []*gpreemptv1.DiagnosedProcess { return reports }
}

// textOf returns a report as text.
func textOf(r *gpreemptv1.DiagnoseResponse) string {
	var b bytes.Buffer
	next := func(indent, remedy string) {
		if remedy != "" {
			fmt.Fprintf(&b, "%s  try: %s\n", indent, remedy)
		}
	}
	fmt.Fprintln(&b, r.GetSummary())
	next("", r.GetRemedy())
	for i, c := range r.GetChecks() {
		if r.GetVerdict() == gpreemptv1.Verdict_VERDICT_NO_GPU {
			break // the summary says it, and the other checks were skipped
		}
		if i == 0 {
			b.WriteByte('\n')
		}
		fmt.Fprintf(&b, "%-4s  %-18s  %s\n", api.EnumName(c.GetStatus()), c.GetTitle(), c.GetFound())
		next("    ", c.GetRemedy())
	}
	for i, p := range r.GetProcesses() {
		if i == 0 {
			fmt.Fprintln(&b, "\nHow each process of the driver would be suspended:")
		}
		fmt.Fprintf(&b, "  %d %s: by %s", p.GetPid(), p.GetComm(), gocmp.Or(p.GetMechanism(), "no mechanism"))
		if p.GetWhy() != "" {
			fmt.Fprintf(&b, "; %s", p.GetWhy())
		}
		b.WriteByte('\n')
		for _, no := range p.GetRejected() {
			fmt.Fprintf(&b, "    not by %s: %s\n", no.GetMechanism(), no.GetWhy())
			next("    ", no.GetRemedy())
		}
	}
	return b.String()
}
