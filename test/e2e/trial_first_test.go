package e2e

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gpreempt/gpreempt/emu/kfdemu"
)

// The shortest trial of the documents has a verdict in its first line. It leaves nothing behind.
func TestShortestTrialOfTheDocuments(t *testing.T) {
	if why := cannotEmulate(); why != "" {
		t.Skip(why)
	}
	var command string
	commands := 0
	for _, s := range steps(readText(t, docs+"/trial.md")) {
		if commands++; strings.HasPrefix(s.command, "build/kfdemu run --daemon") {
			command = s.command
			break
		}
	}
	if command == "" || commands > 3 {
		t.Fatalf("%d commands until %q", commands, command)
	}
	dir, tmp := t.TempDir(), t.TempDir()
	cmd := exec.CommandContext(t.Context(), "sh", "-c", strings.ReplaceAll(command, "build/", filepath.Dir(kfdemuBinary)+"/")+" --count 10 --repeats 2 --output-dir "+filepath.Join(dir, "run"))
	cmd.Env = environment("TMPDIR=" + tmp)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	_ = cmd.Run() // its exit status is compared
	first, _, _ := strings.Cut(out.String(), "\n")
	// On a host that stands still the figures of its few requests may not decide.
	code := cmd.ProcessState.ExitCode()
	if !(code == 0 && strings.HasPrefix(first, "PASS (EMULATED, profile emulated): ") || code == 9 && strings.HasPrefix(first, "CANNOT TELL (EMULATED, profile emulated): ")) {
		t.Errorf("exit code %d:\n%s\n%s", code, &out, &errs)
	}
	run, err := readRun(filepath.Join(dir, "run"))
	if err != nil {
		t.Fatal(err)
	}
	for _, arm := range run.Arms {
		for _, r := range arm.Repeats {
			if readings := slices.DeleteFunc(r.Samples, func(row map[string]string) bool { return row["name"] != "daemon_rss_mib" || valueOf(row, "value") < 1 }); len(readings) == 0 {
				t.Errorf("%s: the memory of gpreemptd was not sampled", arm.Name)
			}
			if !slices.Contains([]string{"steps", ""}, r.WorkUnit) {
				t.Errorf("%s: its progress is in %s", arm.Name, r.WorkUnit)
			}
		}
	}
	if left, err := os.ReadDir(tmp); err != nil || len(left) > 0 {
		t.Errorf("it left %v, %v", left, err)
	}
}

// Work that cannot be measured ends a trial before its arms begin, with one sentence that says what to
// do: nothing is reported, and nothing is left running.
func TestTrialFailsBeforeItsArms(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{})
	d := m.start(unmanaged + "discovery: {debugfs: false}\n")
	work := kfdemuBinary + " work"
	answer := answering()[1:]
	job := []string{"--offline", fmt.Sprintf(workReports, work, "")}
	for name, tc := range map[string]struct {
		args []string
		want string
	}{
		"job that ends":                    {slices.Concat(answer, []string{"--offline", fmt.Sprintf(workReports, work, " --packets 1")}), "offline job 1 ended early"},
		"job without queues that ends":     {slices.Concat(answer, []string{"--offline", "sleep 0.3"}), "offline job 1 ended early"},
		"job without queues":               {slices.Concat(answer, []string{"--offline", "sleep 600"}), "job 1 has no GPU queue after 40s\n  try: it must use a GPU of this daemon"},
		"job that reports nothing":         {slices.Concat(answer, []string{"--offline", work + " --runtime"}), "job 1 reported no progress within 15s: its last line is "},
		"job that cannot be suspended":     {slices.Concat(answer, []string{"--offline", work + " --steps", "--progress", "step ([0-9]+)"}), "did not enable its ROCm runtime"},
		"policy that suspends nothing":     {slices.Concat(answer, job, []string{"--policy", "shadow"}), "the policy shadow suspends nothing\n  try: gpctl policy set balanced"},
		"failing request":                  {slices.Concat(job, []string{"--request", "echo out of memory >&2; exit 3"}), "the first request failed: exit status 3: out of memory\n  try: run the command of --request by hand"},
		"server that ends":                 {slices.Concat(job, []string{"--online", "exit 4", "--ready", "x", "--request", "stdin"}), "ended before it was ready, with exit status 4"},
		"server that announces nothing":    {slices.Concat(job, answer, []string{"--announce", "command"}), "the online command announced no request within 15s"},
		"server with more than the answer": {slices.Concat(job, answer[:4]), "wrote more lines than it got requests"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "run")
			code, stdout, stderr := trialOf(t, m, d, brokenTrial(t, dir, tc.args)...)
			if code != 1 || stdout != "" || strings.Count(stderr, tc.want) != 1 {
				t.Errorf("exit code %d, want %q:\n%s\n%s", code, tc.want, stdout, stderr)
			}
			if _, err := os.Stat(filepath.Join(dir, "run.json")); err == nil {
				t.Error("there is a run, although nothing was measured")
			}
			d.eventually("the jobs have ended", func() bool { return d.status().GetTargetCount() == 0 })
		})
	}
}
