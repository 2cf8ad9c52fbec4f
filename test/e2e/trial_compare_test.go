package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/emu/kfdemu"
)

func TestCompareMeasuresPoliciesAndQueues(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{})
	d := m.start(unmanaged)
	dir := filepath.Join(t.TempDir(), "run")
	code, stdout, stderr := trialOf(t, m, d, "compare", "-o", "json", "--offline",
		fmt.Sprintf(strings.ReplaceAll(workReports, "--queues 2", "--queues {queues}"), kfdemuBinary+" work", ""), "--progress", workProgress,
		"--policy", "strict", "--policy", "balanced", "--queues", "1,3", "--processes", "2", "--iterations", "15", "--hold", "5ms", "--gap", "100ms",
		"--warm-up", "200ms", "--output-dir", dir)
	var result struct{ Arms []trialSummary }
	if err := json.Unmarshal([]byte(stdout), &result); err != nil || code != 0 {
		t.Fatalf("exit code %d: %v\n%s\n%s", code, err, stdout, stderr)
	}
	var names []string
	for _, arm := range result.Arms {
		names = append(names, arm.Arm)
		if arm.Latency.N != 15 || arm.Suspends.N == 0 || arm.Latency.Mean <= 0 || arm.Latency.Mean != arm.Announce.Mean {
			t.Errorf("%+v", arm)
		}
	}
	want := []string{
		"protected:strict, queues 1, processes 2", "protected:strict, queues 3, processes 2",
		"protected:balanced, queues 1, processes 2", "protected:balanced, queues 3, processes 2",
	}
	if diff := cmp.Diff(want, names); diff != "" {
		t.Error(diff)
	}
}

// Each scheme of the documents suspends in its arms, and what the daemon does not have is refused
// before anything runs; an arm of a plan is left out.
func TestCompareMeasuresMechanisms(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{})
	d := m.start(unmanaged + "mechanisms: [dbgtrap, freezer]\n")
	offline := fmt.Sprintf(strings.ReplaceAll(workReports, "--queues 2", "--queues {queues}"), kfdemuBinary+" work", "")
	compare := func(dir, mechanism string) (int, string, string) {
		return trialOf(t, m, d, "compare", "--offline", offline, "--progress", workProgress, "--mechanism", mechanism, "--mechanism", "dbgtrap",
			"--queues", "3", "--processes", "2", "--iterations", "10", "--hold", "5ms", "--warm-up", "200ms", "--output-dir", dir)
	}
	dir := filepath.Join(t.TempDir(), "run")
	code, stdout, stderr := compare(dir, "freezer")
	run, err := readRun(dir)
	if err != nil || code != 0 || !strings.Contains(stdout, "REDUCTION") {
		t.Fatalf("exit code %d, %v\n%s\n%s", code, err, stdout, stderr)
	}
	for i, want := range []string{"freezer", "dbgtrap"} {
		if arm := run.Arms[i]; arm.Mechanism != want || arm.Name != "protected::"+want+", queues 3, processes 2" || len(arm.Repeats) != 1 || len(arm.Repeats[0].Suspends) == 0 {
			t.Errorf("arm %s, mechanism %q, %d repeats", arm.Name, arm.Mechanism, len(arm.Repeats))
		}
	}
	if len(run.Faults) > 0 {
		t.Errorf("faults: %+v", run.Faults)
	}

	const missing = `the daemon has no mechanism "criu": it has dbgtrap, freezer`
	none := filepath.Join(t.TempDir(), "none")
	code, stdout, stderr = compare(none, "criu")
	if _, err := os.Stat(none); code == 0 || !strings.Contains(stderr, missing) || err == nil {
		t.Errorf("exit code %d, %v:\n%s\n%s", code, err, stdout, stderr)
	}

	plan := written(t, "plan.yaml", fmt.Sprintf(`version: 1
name: left-out
online: {command: 'while read -r request; do echo answer; done', request: stdin}
offline: {commands: [%q], progress: %q}
arrivals: {kind: constant, rate: 20}
count: 10
arms: ["protected::criu", "protected::dbgtrap"]
repeats: 1
warm_up: 200ms
profile: %s
`, fmt.Sprintf(workReports, kfdemuBinary+" work", ""), workProgress, written(t, "lenient.yaml", lenient)))
	dir = filepath.Join(t.TempDir(), "plan")
	code, stdout, stderr = trialOf(t, m, d, "trial", "--plan", plan, "--output-dir", dir)
	if code != 9 || !strings.Contains(stdout, "CANNOT TELL") || !strings.Contains(stdout, "protected::criu was left out: "+missing) {
		t.Errorf("exit code %d:\n%s\n%s", code, stdout, stderr)
	}
	if run, err = readRun(dir); err != nil || len(run.Arms[0].Repeats) != 0 || len(run.Arms[1].Repeats) != 1 {
		t.Errorf("%v, %+v", err, run)
	}
}

// An attached process is handed over to the mechanism that an admin chooses, and back.
func TestChosenMechanismReplacesTheAttachedOne(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{})
	d := m.start(strings.Replace(unmanaged, "preset: strict", "preset: strict\n  max_wait: 10s", 1) + "mechanisms: [dbgtrap, freezer]\n")
	w := m.serve("--runtime", "--queues", "2", "--duration", "2000")
	d.eventually("the job is found", func() bool { return d.target(w.PID).GetQueueCount() == 2 })
	pid := fmt.Sprint(w.PID)
	for _, tc := range []struct {
		want string
		args []string
	}{
		{"dbgtrap", nil},
		{"freezer", []string{"--mechanism", "freezer"}},
		{"dbgtrap", []string{"--mechanism", "dbgtrap"}},
	} {
		if r := d.ctl(append([]string{"target", "classify", pid, "offline"}, tc.args...)...); r.Code != 0 {
			t.Fatalf("classify %v: %+v", tc.args, r)
		}
		d.eventually("it is held by "+tc.want, func() bool { return d.target(w.PID).GetMechanism() == tc.want })
		if r := d.ctl("target", "suspend", pid, "--ttl", "1m"); r.Code != 0 || !strings.Contains(r.Out, "is suspended") {
			t.Errorf("by %s: %+v", tc.want, r)
		}
		if r := d.ctl("target", "resume", pid); r.Code != 0 {
			t.Errorf("by %s: %+v", tc.want, r)
		}
	}
	if r := d.ctl("target", "classify", pid, "offline", "--mechanism", "criu"); r.Code == 0 || !strings.Contains(r.Err, `no mechanism "criu"`) {
		t.Errorf("a mechanism that is not enabled: %+v", r)
	}
}
