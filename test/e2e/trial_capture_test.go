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

// A capture has the queues of both cases as the emulated driver has them, and compares the HIP logs
// that they wrote; here the commands write those themselves.
func TestTwoCasesAreCapturedAndCompared(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{})
	d := m.start(unmanaged)
	dir := filepath.Join(t.TempDir(), "capture")
	work := func(queues, pid int) string {
		record := fmt.Sprintf(":3:rocdevice.cpp            :3048: 0000000110 us: [pid:%d tid: 0x7f01] Created SWq=0x7f8acd21000 to map on HWq=0x7f8acd210000 "+
			"with size 16384 with priority 1, cooperative: 0", pid)
		return fmt.Sprintf(`echo '%s' > "${AMD_LOG_LEVEL_FILE}_$$"; while sleep 0.05; do echo report; done | exec %s work --runtime --queues %d --depth 2 --duration 2000`,
			record, kfdemuBinary, queues)
	}
	code, stdout, stderr := trialOf(t, m, d, "capture", "cnn="+work(2, 7001), "transformer="+work(1, 7002),
		"--progress", workProgress, "--unit", "packets", "--duration", "3s", "--output-dir", dir, "-o", "json")
	var result struct {
		Origin string
		Cases  []struct {
			Name  string
			Steps float64
		}
		Figures []struct {
			Name   string
			Values []string
		}
		Missing    []string
		Comparison struct {
			Coincidences int
			Advice       struct{ Strategy string }
		}
	}
	if err := json.Unmarshal([]byte(stdout), &result); err != nil || code != 0 {
		t.Fatalf("exit code %d, %v\n%s\n%s", code, err, stdout, stderr)
	}
	values := map[string][]string{}
	for _, f := range result.Figures {
		values[f.Name] = f.Values
	}
	if diff := cmp.Diff([]string{"2", "1"}, values["compute queues of a process"]); diff != "" {
		t.Errorf("queues (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"no KFD trace: the machine is emulated, and this host's driver has no part in it"}, result.Missing); diff != "" {
		t.Errorf("missing (-want +got):\n%s", diff)
	}
	if result.Origin != "emulated" || result.Comparison.Coincidences != 1 || result.Comparison.Advice.Strategy != "stream_priority" {
		t.Errorf("%s", stdout)
	}
	for _, c := range result.Cases {
		if c.Steps <= 0 {
			t.Errorf("%s did nothing", c.Name)
		}
		if offline, _ := pidsOf(t, filepath.Join(dir, c.Name), "offline alone", 0); len(offline) != 1 {
			t.Errorf("%s: the pid map has %v", c.Name, offline)
		}
	}
	if text, err := os.ReadFile(filepath.Join(dir, "report.md")); err != nil || !strings.Contains(string(text), "| figure | target | cnn | transformer | result |") {
		t.Errorf("the report: %v\n%s", err, text)
	}
}

// The queues show whether the commands of an arm with stream priorities used them.
func TestStreamPrioritiesAreSeenInTheQueues(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{})
	d := m.start(unmanaged)
	const choose = `[ "$GPREEMPT_STREAM_PRIORITY" = -1 ] && p=high || p=normal; `
	for name, tc := range map[string]struct{ choose, want string }{
		"used": {choose: choose},
		"ignored": {
			choose: "p=normal; ",
			want:   "no online queue has a higher priority than the offline ones: the commands must make their streams with $GPREEMPT_STREAM_PRIORITY",
		},
	} {
		dir := filepath.Join(t.TempDir(), name)
		code, stdout, stderr := trialOf(t, m, d, "trial", "--arm", "stream priority", "--online", tc.choose+"exec "+kfdemuBinary+" answer --packets 5 --duration 200 --priority $p",
			"--request", "stdin", "--ready", `"ready"`, "--answer", `"answer"`, "--offline", fmt.Sprintf(workReports, kfdemuBinary+" work", ""), "--progress", workProgress,
			"--rate", "5", "--count", "10", "--repeats", "1", "--warm-up", "2s", "--profile", written(t, "lenient.yaml", lenient), "--output-dir", dir)
		run, err := readRun(dir)
		if err != nil {
			t.Fatalf("%s: exit code %d, %v\n%s\n%s", name, code, err, stdout, stderr)
		}
		got := ""
		for _, f := range run.Faults {
			got += fmt.Sprint(f.(map[string]any)["what"])
		}
		if late := run.Missing["check of stream priorities"]; late != "" {
			t.Logf("%s: not checked on this busy host: %s", name, late)
			tc.want = ""
		}
		if got != tc.want || run.Missing["effect of stream priorities"] == "" || len(run.Arms[0].Repeats) != 1 {
			t.Errorf("%s: fault %q, want %q; %v, %d repeats", name, got, tc.want, run.Missing, len(run.Arms[0].Repeats))
		}
	}
}
