package e2e

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/accept"
	"github.com/gpreempt/gpreempt/emu/kfdemu"
)

// everywhere are the stages that need no GPU that executes code. The emulated machine has whole
// GPUs, so that cpx has no partition there; its stage runs on the models of package accept.
var everywhere = []string{
	"fingerprint", "conformance", "attach", "heartbeat", "copies", "latency", "online-gap", "grace", "held", "birth", "destroy", "register", "exit", "holder-killed",
}

// acceptance returns a command that accepts the first GPU of a new emulated machine. It
// writes its pid first.
func acceptance(ctx context.Context, t *testing.T, out string) *exec.Cmd {
	t.Helper()
	if reason := cannotEmulate(); reason != "" {
		t.Skip(reason)
	}
	script := fmt.Sprintf(`echo $$; exec %s --quick --out %s --gpu "$(cat /sys/class/kfd/kfd/topology/nodes/1/gpu_id)"`, gpaccept, out)
	cmd := exec.CommandContext(ctx, kfdemuBinary, "run", "--gpus", "2", "--profile", "6.12.117", "--", "sh", "-c", script)
	cmd.Env, cmd.Stderr = environment(), os.Stderr
	return cmd
}

// readAcceptance returns a report, whose sums must be right.
func readAcceptance(t *testing.T, path string) accept.Report {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	r, err := accept.Verify(f)
	if err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	return r
}

// checkAcceptance checks that every stage that can ran, and the others have a reason.
func checkAcceptance(t *testing.T, r accept.Report, text string, more ...string) {
	t.Helper()
	ran := map[string]bool{}
	for _, name := range slices.Concat(everywhere, more) {
		ran[name] = true
	}
	want, got := map[string]accept.Verdict{}, map[string]accept.Verdict{}
	for _, row := range r.Rows {
		got[row.Stage], want[row.Stage] = row.Verdict, accept.NotRun
		if ran[row.Stage] {
			want[row.Stage] = accept.Emulated
		}
		if row.Verdict == accept.NotRun && (row.Why == "" || row.Why == "not reached") {
			t.Errorf("%s did not run: %q", row.Stage, row.Why)
		}
		if row.Criteria == "" {
			t.Errorf("%s has no criteria", row.Stage)
		}
		if notes := strings.Join(row.Notes, "\n"); row.Stage == "grace" && (len(row.Measures) != 6 || !strings.Contains(notes, "EMULATED, on ") || !strings.Contains(notes, "no difference by its rule")) {
			t.Errorf("grace: %d measures, %q", len(row.Measures), notes)
		}
	}
	if diff := cmp.Diff(want, got); diff != "" || r.Verdict != accept.Emulated || strings.Contains(text, "PASS") {
		t.Errorf("the verdict is %s (-want +got):\n%s\n%s", r.Verdict, diff, text)
	}
}

func TestAcceptanceOfAnEmulatedGPURunsEveryStageThatNeedsNoWaves(t *testing.T) {
	t.Parallel()
	out := filepath.Join(t.TempDir(), "report.tgz")
	text, err := acceptance(t.Context(), t, out).Output()
	if err != nil {
		t.Errorf("gpaccept: %v", err)
	}
	checkAcceptance(t, readAcceptance(t, out), string(text), "peer-copies")
}

func TestAcceptanceRefusesAHostInUse(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{})
	w := m.work("--queues", "1")
	out := filepath.Join(t.TempDir(), "report.tgz")
	cmd := m.Command(t.Context(), gpaccept, "--quick", "--out", out, "--gpu", m.GPUs()[0].ID.String())
	cmd.Env = environment()
	text, err := cmd.CombinedOutput()
	if want := fmt.Sprintf("%d (train)", w.PID); err == nil || !strings.Contains(string(text), want) {
		t.Errorf("it says %q (%v), want a refusal that names %s", text, err, want)
	}
	if _, err := os.Stat(out); err == nil {
		t.Error("there is a report of an acceptance that did not begin")
	}
	w.stop()
}

func TestAcceptanceThatIsKilledLeavesAReport(t *testing.T) {
	t.Parallel()
	out := filepath.Join(t.TempDir(), "report.tgz")
	cmd := acceptance(t.Context(), t, out)
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(pipe)
	pid := 0
	for lines.Scan() {
		if pid == 0 {
			if pid, err = strconv.Atoi(lines.Text()); err != nil {
				t.Fatal(err)
			}
		}
		if f := strings.Fields(lines.Text()); len(f) > 1 && f[0] == "begins" && f[1] == "heartbeat" {
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := cmd.Wait(); err == nil {
		t.Error("the acceptance was not killed")
	}
	r := readAcceptance(t, out)
	got := map[string]accept.Verdict{"all": r.Verdict}
	for _, row := range r.Rows {
		if row.Stage == "attach" || row.Stage == "heartbeat" || row.Stage == "copies" {
			got[row.Stage] = row.Verdict
		}
	}
	want := map[string]accept.Verdict{"all": accept.Interrupted, "attach": accept.Emulated, "heartbeat": accept.Interrupted, "copies": accept.NotRun}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// A helper may be killed, or be abandoned in a call that does not return.
func TestAcceptanceWhoseHelperIsKilledFails(t *testing.T) {
	t.Parallel()
	out := filepath.Join(t.TempDir(), "report.tgz")
	cmd := acceptance(t.Context(), t, out)
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var killer sync.WaitGroup
	ended := make(chan struct{})
	lines := bufio.NewScanner(pipe)
	pid := ""
	for lines.Scan() {
		if pid == "" {
			pid = lines.Text()
		}
		if f := strings.Fields(lines.Text()); len(f) > 1 && f[0] == "begins" && f[1] == "heartbeat" {
			killer.Go(func() { killHelpers(pid, ended) })
		}
	}
	close(ended)
	killer.Wait()
	if err := cmd.Wait(); err == nil {
		t.Error("the acceptance succeeded")
	}
	r := readAcceptance(t, out)
	for _, row := range r.Rows {
		if row.Stage == "heartbeat" && (r.Verdict != accept.Fail || row.Verdict != accept.Fail || !strings.Contains(row.Why, "helper process")) {
			t.Errorf("%s: %+v, want a failure that names the helper", r.Verdict, row)
		}
	}
}

// killHelpers kills the helpers of a process until ended is closed.
func killHelpers(parent string, ended <-chan struct{}) {
	for {
		select {
		case <-ended:
			return
		default:
		}
		lists, _ := filepath.Glob("/proc/" + parent + "/task/*/children") // none: it has ended
		for _, list := range lists {
			text, _ := os.ReadFile(list)
			for child := range strings.FieldsSeq(string(text)) {
				comm, _ := os.ReadFile("/proc/" + child + "/comm")
				if pid, err := strconv.Atoi(child); err == nil && string(comm) == "gpreempt-helper\n" {
					_ = syscall.Kill(pid, syscall.SIGKILL) // it may have ended
				}
			}
		}
	}
}

func TestSoftGPUAcceptance(t *testing.T) {
	m := onSoftGPU(t)
	out := filepath.Join(t.TempDir(), "report.tgz")
	cmd := exec.Command(gpaccept, "--quick", "--out", out, "--gpu", m.gpu(0))
	cmd.Env = environment()
	text, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("gpaccept: %v", err)
	}
	t.Logf("%s", text)
	checkAcceptance(t, readAcceptance(t, out), string(text))
}
