package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/emu/kfdemu"
)

// unmanaged is a config by which no process is offline: a trial classifies its jobs itself.
var unmanaged = func() string {
	before, _, _ := strings.Cut(atOnce, "rules:")
	return before + `safety:
  hazards:
    - {id: emulated, gfx: ["gfx*"], action: allow, why: It is emulated.}
`
}()

// lenient has limits that a busy host keeps: the tests are about what a trial does.
const lenient = `version: 1
name: lenient
limits: {online_max_ms: 60000, suspend_mean_ms: 60000, resume_mean_ms: 60000}
`

// workReports has the client report how far it is, twenty times a second.
const (
	workReports  = `while sleep 0.05; do echo report; done | exec %s --runtime --queues 2 --depth 2 --duration 2000 --occupancy 300000%s`
	workProgress = `\],"packets":\d+,"count":(\d+)`
)

// trialOf runs gplab on the machine.
func trialOf(t *testing.T, m *emulated, d *daemon, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	cmd := trialCommand(m, d, args...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil && cmd.ProcessState == nil {
		t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), out.String(), errs.String()
}

func trialCommand(m *emulated, d *daemon, args ...string) *exec.Cmd {
	cmd := m.Command(context.Background(), gplab, append([]string{"--socket", d.socket}, args...)...)
	cmd.Env = environment(cmd.Env...)
	return cmd
}

// serving returns the flags for a server: one in Python that announces its work by the SDK, or
// kfdemu answer, whose work the trial announces.
func serving(t *testing.T) []string {
	t.Helper()
	answer := kfdemuBinary + " answer --packets 10 --duration 200"
	for _, python := range []string{"/usr/bin/python3", "python3"} {
		if exec.CommandContext(t.Context(), python, "-c", "import google.protobuf").Run() != nil {
			continue
		}
		bindings, err := filepath.Abs("../../bindings/python")
		if err != nil {
			t.Fatal(err)
		}
		script := filepath.Join(t.TempDir(), "serve.py")
		text := `import subprocess, sys
import gpreempt
model = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
model.stdout.readline()
chat = gpreempt.online(gpus=gpreempt.ALL, label="chat", max_wait=5)
print("ready", flush=True)
for line in sys.stdin:
    with chat as lease:
        model.stdin.write("\n")
        model.stdin.flush()
        model.stdout.readline()
    print("answer", lease.protected, flush=True)
`
		if err := os.WriteFile(script, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return []string{
			"--online", fmt.Sprintf("PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=%s exec %s %s %s", bindings, python, script, answer),
			"--request", "stdin", "--ready", "^ready$", "--answer", "^answer", "--announce", "command",
		}
	}
	t.Log("no python3 with protobuf: the server is kfdemu answer")
	return []string{"--online", "exec " + answer, "--request", "stdin", "--ready", `"ready"`, "--answer", `"answer"`}
}

// written writes a file and returns its path.
func written(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestTrialMeasuresTwoCommandsOnAnEmulatedMachine(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{})
	d := m.start(unmanaged)
	before, err := d.admin.GetPolicy(t.Context(), &gpreemptv1.GetPolicyRequest{})
	if err != nil {
		t.Fatal(err)
	}
	job := kfdemuBinary + " work"
	if inC := clientInC(t); inC != "" {
		job = inC
	} else {
		t.Log("no compiler: the job is kfdemu work, and not the client in C")
	}
	dir := filepath.Join(t.TempDir(), "run")
	args := append([]string{
		"trial", "-o", "json", "--offline", fmt.Sprintf(workReports, job, ""), "--progress", workProgress, "--unit", "packets", "--rate", "20", "--count", "20",
		"--repeats", "2", "--warm-up", "300ms", "--policy", "share", "--profile", written(t, "lenient.yaml", lenient), "--output-dir", dir,
	}, serving(t)...)
	code, stdout, stderr := trialOf(t, m, d, args...)
	var result struct {
		Verdict trialVerdict
		Arms    []trialSummary
		Backend string
		Report  string
	}
	if err := json.Unmarshal([]byte(stdout), &result); err != nil {
		t.Fatalf("exit code %d: %v\n%s\n%s", code, err, stdout, stderr)
	}
	if code != 0 || result.Verdict.Result != "PASS" || result.Verdict.Origin != "emulated" || !strings.HasPrefix(result.Backend, "emulated") {
		t.Errorf("exit code %d: %s\n%s", code, stdout, stderr)
	}
	run, err := readRun(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for i, arm := range run.Arms {
		names = append(names, arm.Name)
		for n, r := range arm.Repeats {
			requests := 20
			if arm.Kind == "offline alone" {
				requests = 0
			}
			if len(r.Requests) != requests || r.Seconds <= 0 || len(r.Samples) == 0 || (r.Work > 0) != (arm.Kind != "online alone") {
				t.Errorf("%s, repeat %d: %d requests, %v s, %d samples, %v %s", arm.Name, n+1, len(r.Requests), r.Seconds, len(r.Samples), r.Work, r.WorkUnit)
			}
			protected := arm.Kind == "protected"
			if protected != (len(r.Suspends) > 0) || protected != (len(r.Resumes) > 0) || protected && result.Arms[i].Readings["hqds_active"] == 0 {
				t.Errorf("%s, repeat %d: %d suspends, %d resumes, %v", arm.Name, n+1, len(r.Suspends), len(r.Resumes), result.Arms[i].Readings)
			}
		}
	}
	if diff := cmp.Diff([]string{"offline alone", "online alone", "shared", "protected:share"}, names); diff != "" {
		t.Error(diff)
	}
	if protected := run.Arms[3]; protected.Mechanism != "dbgtrap" || protected.Policy != "share" {
		t.Errorf("mechanism %q, policy %q", protected.Mechanism, protected.Policy)
	}
	files, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil {
		t.Fatal(err)
	}
	for i := range files {
		files[i] = filepath.Base(files[i])
	}
	want := []string{"logs", "pids.json", "plan.yaml", "report.html", "report.md", "requests.csv", "resumes.csv", "run.json", "samples.csv", "spans.csv", "suspends.csv"}
	if diff := cmp.Diff(want, files); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
	if logs, err := filepath.Glob(filepath.Join(dir, "logs", "*.log")); err != nil || len(logs) != 2*3*2+2 { // and before the arms
		t.Errorf("%d logs: %v, %v", len(logs), logs, err)
	}
	missing := map[string]string{
		"KFD trace": "the machine is emulated, and this host's driver has no part in it", "HIP logs": "no command that the trial started wrote one at AMD_LOG_LEVEL=2",
	}
	if diff := cmp.Diff(missing, run.Missing); diff != "" {
		t.Errorf("what the folder lacks (-want +got):\n%s", diff)
	}
	if text, err := os.ReadFile(filepath.Join(dir, "report.md")); err != nil || !strings.Contains(string(text), "| no KFD trace | the machine is emulated, ") {
		t.Errorf("the report does not say that there is no KFD trace: %v\n%s", err, text)
	}
	for _, arm := range run.Arms {
		for repeat := range arm.Repeats {
			offline, online := pidsOf(t, dir, arm.Name, repeat)
			if (len(offline) == 1) != (arm.Kind != "online alone") || (len(online) > 1) != (arm.Kind != "offline alone") {
				t.Errorf("%s, repeat %d: the pid map has %v offline and %v online", arm.Name, repeat+1, offline, online)
			}
		}
	}
	after, err := d.admin.GetPolicy(t.Context(), &gpreemptv1.GetPolicyRequest{})
	if err != nil || !proto.Equal(before, after) {
		t.Errorf("the policy was %v and is %v: %v", before, after, err)
	}
	d.eventually("the jobs have ended", func() bool { return d.status().GetTargetCount() == 0 })

	if want := filepath.Join(dir, "report.html"); result.Report != want {
		t.Errorf("the report is %q, want %q", result.Report, want)
	}
	t.Run("its report in a browser", func(t *testing.T) { trialReport(t, result.Report, "lenient") })

	// The runs of one machine and plan can be compared, and a run with itself has ratio 1.
	if r := d.lab("trial", "compare", dir, dir); r.Code != 0 || !strings.Contains(r.Out, "online mean") || strings.Contains(r.Out, "differs") {
		t.Errorf("trial compare: %+v", r)
	}
	if r := d.lab("trial", "judge", dir, "--profile", "loss-5"); r.Code == 0 || !strings.Contains(r.Out, " (EMULATED, profile loss-5): ") {
		t.Errorf("trial judge: %+v", r)
	}
	if r := d.lab("trial", "--resume", dir); r.Code == 0 && !strings.HasPrefix(r.Out, "PASS (EMULATED, profile lenient): every limit is kept. ") {
		t.Errorf("resume of a complete run: %+v", r)
	}
}

// trialReport opens the report of a trial that passed.
func trialReport(t *testing.T, page, profile string) {
	t.Helper()
	b := startBrowser(t)
	b.resize(1280, 900, false)
	b.call("Page.navigate", map[string]any{"url": "file://" + page}, nil)
	b.await(`document.readyState === "complete" && document.querySelectorAll("section").length > 10`)
	for _, width := range []int{360, 1280} {
		b.resize(width, 900, false)
		if got := b.eval(`document.documentElement.scrollWidth`); got != float64(width) {
			t.Errorf("in a window of %d pixels the page is %v wide", width, got)
		}
		// The verdict, its profile and its origin are in the window without scrolling.
		got := b.eval(`[...document.querySelectorAll(".verdict, .origin")].map((part) => {
			const r = part.getBoundingClientRect();
			return part.innerText.split(":")[0] + (r.width > 0 && r.height > 0 && r.top >= 0 && r.bottom <= innerHeight ? "" : " is hidden");
		}).join()`)
		if want := "EMULATED,PASS (profile " + profile + ")"; got != want {
			t.Errorf("in a window of %d pixels the verdict is %v, want %s", width, got, want)
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.problems) > 0 {
		t.Errorf("the browser reports\n%s", strings.Join(b.problems, "\n"))
	}
}

// A trial replays the times of a trace and requests a URL, whose server it does not start.
func TestTrialReplaysATraceToAServer(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{})
	d := m.start(unmanaged)
	var served atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if served.Add(1); r.URL.Path != "/predict" {
			http.NotFound(w, r)
		}
	}))
	t.Cleanup(server.Close)
	trace := written(t, "trace.csv", "at_ms\n0\n100\n150\n400\n450\n700\n800\n1200\n")
	const lines = 8
	dir := filepath.Join(t.TempDir(), "run")
	code, stdout, stderr := trialOf(t, m, d, "trial", "--offline", fmt.Sprintf(workReports, kfdemuBinary+" work", ""), "--progress", workProgress, "--unit", "packets",
		"--request", server.URL+"/predict", "--trace", trace, "--count", fmt.Sprint(lines), "--arm", "shared", "--arm", "protected:strict", "--repeats", "1",
		"--warm-up", "200ms", "--profile", written(t, "lenient.yaml", lenient), "--output-dir", dir)
	run, err := readRun(dir)
	if err != nil || len(run.Arms) != 2 {
		t.Fatalf("exit code %d, %v\n%s\n%s", code, err, stdout, stderr)
	}
	for _, arm := range run.Arms {
		if len(arm.Repeats) != 1 || len(arm.Repeats[0].Requests) != lines {
			t.Errorf("%s: %+v", arm.Name, arm.Repeats)
			continue
		}
		for i, r := range arm.Repeats[0].Requests {
			if r["failed"] != "" || valueOf(r, "total_ms") <= 0 || i > 0 && valueOf(r, "at_ms") < valueOf(arm.Repeats[0].Requests[i-1], "at_ms") {
				t.Errorf("%s, request %d: %+v", arm.Name, i, r)
			}
		}
	}
	if got, want := served.Load(), int64(2*(lines+1)+2); got != want { // one before each repeat, and two before the arms
		t.Errorf("the server has answered %d requests, want %d", got, want)
	}
	if want := "report: " + filepath.Join(dir, "report.html"); !strings.Contains(stdout, want) || len(run.Arms[1].Repeats[0].Suspends) == 0 {
		t.Errorf("exit code %d:\n%s\n%s", code, stdout, stderr)
	}

	// A page that does not exist is a failed request, and the trial ends before its arms.
	code, stdout, stderr = trialOf(t, m, d, "trial", "--offline", fmt.Sprintf(workReports, kfdemuBinary+" work", ""), "--progress", workProgress,
		"--request", server.URL+"/gone", "--trace", trace, "--count", "3", "--arm", "protected", "--repeats", "1", "--warm-up", "200ms",
		"--profile", written(t, "lenient.yaml", lenient), "--output-dir", filepath.Join(t.TempDir(), "gone"))
	if code != 1 || !strings.Contains(stderr, "404") || strings.Contains(stdout, "PASS") {
		t.Errorf("exit code %d:\n%s\n%s", code, stdout, stderr)
	}
}

// A trial whose work does not do what it should is never a success.
func TestBrokenTrialNeverPasses(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{})
	d := m.start(unmanaged)
	work := kfdemuBinary + " work"
	answer := answering()[1:]
	job := []string{"--offline", fmt.Sprintf(workReports, work, "")}
	for name, tc := range map[string]struct {
		args []string
		want string
	}{
		"job that stands": {
			slices.Concat(answer, []string{"--offline", fmt.Sprintf(workReports, work, " --rate 0.001")}), "the offline work made no progress",
		},
		"packets that are lost": {
			// The job's last line says that the GPU did not run a packet.
			slices.Concat(answer, []string{
				"--offline", fmt.Sprintf(workReports, work, "") + ` | (trap "" TERM; exec sed -u '/"event":"done"/s/],"packets":/],"packets":9/')`,
			}), "packets of offline work were lost",
		},
		"requests that fail later": {
			slices.Concat(job, []string{"--online", `n=0; while [ $n -lt 5 ] && read -r line; do n=$((n + 1)); echo answer; done; exit 5`, "--request", "stdin"}),
			"requests failed, the first with: ",
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "run")
			code, stdout, stderr := trialOf(t, m, d, brokenTrial(t, dir, tc.args)...)
			// The reason is in the first line, and is said once.
			first, rest, _ := strings.Cut(stdout, "\n")
			if code != 1 || !strings.HasPrefix(first, "FAIL (EMULATED, profile lenient): ") || !strings.Contains(first, tc.want) || strings.Contains(rest, tc.want) {
				t.Errorf("exit code %d, want %q:\n%s\n%s", code, tc.want, stdout, stderr)
			}
			for _, name := range []string{"report.html", "report.md"} {
				if text, err := os.ReadFile(filepath.Join(dir, name)); err != nil || !strings.Contains(string(text), "EMULATED") || strings.Contains(string(text), "| PASS | lenient | emulated |") {
					t.Errorf("%s: %v\n%s", name, err, text)
				}
			}
			d.eventually("the jobs have ended", func() bool { return d.status().GetTargetCount() == 0 })
		})
	}
}

// brokenTrial is a short trial of a protected arm.
func brokenTrial(t *testing.T, dir string, args []string) []string {
	t.Helper()
	return append([]string{
		"trial", "--arm", "protected", "--progress", workProgress, "--rate", "10", "--count", "10", "--duration", "5s", "--repeats", "1", "--warm-up", "200ms",
		"--profile", written(t, "lenient.yaml", lenient), "--output-dir", dir,
	}, args...)
}

// Ctrl-C ends a trial and what it started, and undoes what it changed; --resume continues it.
func TestInterruptedTrialLeavesNothingAndIsContinued(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{})
	d := m.start(unmanaged)
	w := m.serve("--runtime", "--queues", "2", "--duration", "2000", "--occupancy", "300000")
	d.eventually("the job is found", func() bool { return d.target(w.PID).GetQueueCount() == 2 })
	dir := filepath.Join(t.TempDir(), "run")
	// The protected arm must not end before the interrupt, so its server, the third that is
	// started, reads only 20 of the 30 requests. The next are started by --resume.
	server, starts := serving(t), written(t, "starts", "")
	server[1] = fmt.Sprintf(`sh %s %s | %s`, written(t, "gate.sh", `echo >> $1
[ $(wc -l < $1) -eq 3 ] || exec cat
n=0
while [ $n -lt 20 ] && read -r line; do
	echo
	n=$((n + 1))
done
exec sleep 600
`), starts, server[1])
	cmd := trialCommand(m, d, append([]string{
		"trial", "--pid", fmt.Sprint(w.PID), "--arm", "shared", "--arm", "protected", "--rate", "10", "--count", "30", "--repeats", "1", "--warm-up", "200ms",
		"--policy", "balanced", "--profile", written(t, "lenient.yaml", lenient), "--output-dir", dir,
	}, server...)...)
	var out lines
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	stuck := time.AfterFunc(3*timeout, func() { _ = cmd.Process.Kill() })
	defer stuck.Stop()
	d.eventually("the protected arm suspends the job", func() bool {
		started, err := os.ReadFile(starts)
		target := d.target(w.PID)
		return err == nil && strings.Count(string(started), "\n") == 3 && target.GetClass() == gpreemptv1.Class_CLASS_OFFLINE && target.GetState() == gpreemptv1.TargetState_TARGET_STATE_SUSPENDED
	})
	if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // checked below
	if code := cmd.ProcessState.ExitCode(); code != 1 || !strings.Contains(out.String(), "was interrupted") || !strings.Contains(out.String(), "--resume "+dir) {
		t.Errorf("exit code %d:\n%s", code, &out)
	}
	d.eventually("the job is unmanaged and runs", func() bool {
		target := d.target(w.PID)
		return target.GetClass() == gpreemptv1.Class_CLASS_UNMANAGED && target.GetDecidedBy() == "default" && target.GetState() == gpreemptv1.TargetState_TARGET_STATE_RUNNING
	})
	d.eventually("the server has ended", func() bool { return d.status().GetTargetCount() == 1 })
	if policy := d.status().GetPolicy(); policy != "custom" {
		t.Errorf("the policy is %s", policy)
	}
	report := filepath.Join(dir, "report.md")
	if text, err := os.ReadFile(report); err != nil || !strings.Contains(string(text), "CANNOT TELL") || !strings.Contains(out.String(), dir+"/report.html") {
		t.Errorf("the report of the interrupted run: %v\n%s\n%s", err, text, &out)
	}
	run, err := readRun(dir)
	if err != nil || len(run.Arms[0].Repeats) != 1 || len(run.Arms[1].Repeats) != 0 {
		t.Fatalf("the folder has %+v: %v", run, err)
	}
	code, stdout, stderr := trialOf(t, m, d, "trial", "--resume", dir)
	for _, arm := range []string{"shared", "protected:balanced"} {
		if offline, _ := pidsOf(t, dir, arm, 0); !slices.Equal(offline, []int32{w.PID}) {
			t.Errorf("%s: the pid map has %v, want %d", arm, offline, w.PID)
		}
	}
	if run, err = readRun(dir); err != nil || len(run.Arms[1].Repeats) != 1 || len(run.Arms[1].Repeats[0].Suspends) == 0 || run.Arms[1].Repeats[0].Work == 0 {
		t.Errorf("exit code %d, %v\n%s\n%s", code, err, stdout, stderr)
	}
}
