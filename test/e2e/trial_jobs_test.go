package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/emu/kfdemu"
)

// answering begins a trial with a server whose work the trial announces.
func answering() []string {
	return []string{"trial", "--online", "exec " + kfdemuBinary + " answer --packets 5 --duration 200", "--request", "stdin", "--ready", `"ready"`, "--answer", `"answer"`}
}

// A process that is stopped keeps its hardware slots: the freezer does not preempt. A verdict must see that.
func TestSlotsThatDoNotEmptyFailATrial(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{})
	d := m.start(unmanaged + "mechanisms: [freezer]\n")
	code, stdout, stderr := trialOf(t, m, d, append(answering(), "--arm", "protected",
		"--offline", fmt.Sprintf(workReports, kfdemuBinary+" work", ""),
		"--progress", workProgress, "--rate", "10", "--count", "30", "--repeats", "1", "--warm-up", "200ms", "--profile", written(t, "lenient.yaml", lenient),
		"--output-dir", filepath.Join(t.TempDir(), "run"))...)
	if code != 1 || !strings.Contains(stdout, "hardware slots had queues of suspended processes") || !strings.Contains(stdout, "FAIL (EMULATED, profile lenient): ") {
		t.Errorf("exit code %d:\n%s\n%s", code, stdout, stderr)
	}
}

// The plan of an hour runs as it is in a shorter time. Its verdict lacks nothing but the requests of the rest of the hour.
func TestHourOfStabilityRunsShortened(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{})
	d := m.start(unmanaged + "discovery: {debugfs: false}\n")
	dir := filepath.Join(t.TempDir(), "run")
	code, stdout, stderr := trialOf(t, m, d, append(answering(), "--plan", "stability-1h", "--duration", "12s", "--warm-up", "200ms", "-o", "json",
		"--offline", fmt.Sprintf(workReports, kfdemuBinary+" work", ""), "--progress", workProgress, "--output-dir", dir)...)
	var result struct {
		Verdict trialVerdict
		Arms    []trialSummary
	}
	if err := json.Unmarshal([]byte(stdout), &result); err != nil || code != 9 || len(result.Arms) != 1 || result.Arms[0].Latency.N == 0 || result.Arms[0].Suspends.N == 0 {
		t.Fatalf("exit code %d, %v\n%s\n%s", code, err, stdout, stderr)
	}
	run, err := readRun(dir)
	if err != nil {
		t.Fatal(err)
	}
	readings := 0
	for _, row := range run.Arms[0].Repeats[0].Samples {
		if row["name"] == "daemon_rss_mib" && row["value"] != "0" {
			readings++
		}
	}
	want := []string{
		fmt.Sprintf("protected: daemon_growth_mib: there are %d samples, and it needs at least 40", readings),
		fmt.Sprintf("protected: online_p99_ms: there are %d samples, and it needs at least 100", result.Arms[0].Latency.N),
	}
	if diff := cmp.Diff(want, result.Verdict.Reasons); diff != "" {
		t.Errorf("reasons (-want +got):\n%s", diff)
	}
	unverified := []string{"protected: whether the hardware slots of suspended processes are empty, in 1 of 1 repeats: " +
		"the daemon did not read them: cannot read the hardware slots: discovery.debugfs is false: set discovery.debugfs: true"}
	if diff := cmp.Diff(unverified, result.Verdict.Unverified); diff != "" {
		t.Errorf("not verified (-want +got):\n%s", diff)
	}
}

// Processes and a container that run already are neither started nor ended. The daemon does not know the container's name, and
// an engine does.
func TestTrialUsesJobsThatRunAlready(t *testing.T) {
	m := emulate(t, kfdemu.Config{})
	d := m.start(unmanaged)
	var jobs []*worker
	for range 3 {
		jobs = append(jobs, m.serve("--runtime", "--queues", "1", "--duration", "2000", "--occupancy", "300000"))
	}
	containerOf(t, jobs[2])
	d.eventually("the jobs are found", func() bool { return d.status().GetTargetCount() == 3 })
	engine := fmt.Sprintf(`#!/bin/sh
[ "$*" = "container inspect -- train" ] || { echo "Error: no such container: $4" >&2; exit 1; }
echo '[{"Id": "%064x", "Name": "/train", "State": {"Running": true}}]'
`, jobs[2].PID)
	bin := t.TempDir()
	for _, name := range []string{"docker", "podman", "nerdctl"} {
		if err := os.WriteFile(filepath.Join(bin, name), []byte(engine), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	dir := filepath.Join(t.TempDir(), "run")
	args := append(answering(), "--pid", fmt.Sprint(jobs[0].PID), "--pid", fmt.Sprint(jobs[1].PID), "--rate", "10", "--count", "40",
		"--repeats", "1", "--warm-up", "200ms", "--profile", written(t, "lenient.yaml", lenient), "--output-dir", dir, "--container")
	if code, stdout, stderr := trialOf(t, m, d, slices.Concat(args, []string{"gone"})...); code != 1 || !strings.Contains(stderr, "container gone: the daemon sees no process of it") ||
		!strings.Contains(stderr, "docker: Error: no such container: gone") {
		t.Errorf("a container that does not exist: exit code %d:\n%s\n%s", code, stdout, stderr)
	}
	code, stdout, stderr := trialOf(t, m, d, slices.Concat(args, []string{"train"})...)
	run, err := readRun(dir)
	if err != nil {
		t.Fatalf("exit code %d, %v\n%s\n%s", code, err, stdout, stderr)
	}
	var want []int32
	for _, job := range jobs {
		want = append(want, job.PID)
	}
	slices.Sort(want)
	if len(run.Arms) != 3 || !strings.Contains(stdout, "\nno arm online alone: the offline jobs run already\n") || !strings.HasPrefix(stdout, "PASS") {
		t.Errorf("exit code %d, %d arms:\n%s\n%s", code, len(run.Arms), stdout, stderr)
	}
	for _, arm := range run.Arms {
		offline, _ := pidsOf(t, dir, arm.Name, 0)
		slices.Sort(offline)
		if diff := cmp.Diff(want, offline); diff != "" || len(arm.Repeats) != 1 || arm.Repeats[0].Work == 0 {
			t.Errorf("exit code %d, %s (-want +got):\n%s\n%s\n%s", code, arm.Name, diff, stdout, stderr)
		}
	}
	for _, job := range jobs {
		if target := d.target(job.PID); target.GetSuspends() == 0 || target.GetState() != gpreemptv1.TargetState_TARGET_STATE_RUNNING ||
			target.GetClass() != gpreemptv1.Class_CLASS_UNMANAGED {
			t.Errorf("after the trial: %v", target)
		}
	}
	if why := run.Missing["HIP logs of running jobs"]; why != "they have the environment with which they were started" {
		t.Errorf("the folder lacks %v", run.Missing)
	}
}

// pidsOf returns the pids that the map of a run has of a repeat.
func pidsOf(t *testing.T, dir, arm string, repeat int) (offline, online []int32) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(dir, "pids.json"))
	if err != nil {
		t.Fatal(err)
	}
	var rows []struct {
		Arm, Role string
		Repeat    int
		PID       int32
	}
	if err := json.Unmarshal(text, &rows); err != nil {
		t.Fatal(err)
	}
	for _, row := range rows {
		switch {
		case row.Arm != arm || row.Repeat != repeat:
		case row.Role == "offline":
			offline = append(offline, row.PID)
		default:
			online = append(online, row.PID)
		}
	}
	return offline, online
}
