package e2e

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/encoding/protojson"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/emu/kfdemu"
)

func TestDoctorReportsThatASimulatedMachineIsNotTheHost(t *testing.T) {
	d := start(t, "# defaults\n")
	var m gpreemptv1.DiagnoseResponse
	d.ctlJSON(&m, "doctor")
	if m.GetVerdict() != gpreemptv1.Verdict_VERDICT_SIMULATED || m.GetBackend() != "simulated mi300x" || !m.GetByDaemon() {
		t.Errorf("the daemon's diagnosis: %v", &m)
	}
}

func TestDoctorRunsDiagnoseWithoutADaemon(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "nobody.sock")
	look := func(args ...string) (int, string) {
		var out bytes.Buffer
		cmd := exec.CommandContext(t.Context(), gpctl, append([]string{"--socket", socket, "doctor"}, args...)...)
		cmd.Env, cmd.Stdout = environment(), &out
		if err := cmd.Run(); err != nil && cmd.ProcessState == nil {
			t.Fatal(err)
		}
		return cmd.ProcessState.ExitCode(), out.String()
	}
	code, text := look("-o", "json")
	var m gpreemptv1.DiagnoseResponse
	if err := protojson.Unmarshal([]byte(text), &m); err != nil {
		t.Fatalf("exit status %d: %v in %s", code, err, text)
	}
	// What it finds is the host's affair, but it is one of these.
	want := map[gpreemptv1.Verdict][]int{
		gpreemptv1.Verdict_VERDICT_READY:     {0},
		gpreemptv1.Verdict_VERDICT_LIMITED:   {0},
		gpreemptv1.Verdict_VERDICT_NOT_READY: {7},
		gpreemptv1.Verdict_VERDICT_NO_GPU:    {8},
	}
	if !slices.Contains(want[m.GetVerdict()], code) || m.GetByDaemon() || m.GetSummary() == "" {
		t.Errorf("exit status %d with %v", code, &m)
	}
	again, words := look()
	if again != code || !strings.Contains(words, m.GetSummary()) || !strings.Contains(words, "no daemon answers on "+socket) {
		t.Errorf("exit status %d, then %d with %s", code, again, words)
	}
}

// judged matches the lines of an output that warn or advise, and the rows about processes.
var judged = regexp.MustCompile(`(?m)^(warn|fail|warning|error|  try:|ok +processes|ok +rights|ok +daemon).*`)

// What gpreempt has on the host (the daemon, its helpers, the readers of debugfs) is no stranger to any of its
// commands: it is not counted, and nobody is advised to end it. As root and as a user without rights.
func TestPartsOfGpreemptAreNoStrangersWhileTargetsAreSuspended(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("needs root, to be another user")
	}
	eachRule(t, func(t *testing.T, profile string) {
		t.Parallel()
		m := emulate(t, kfdemu.Config{Profile: profile})
		d := m.start(atOnce)
		served := fmt.Sprint(d.process.Process.Pid)
		// runs runs gpctl doctor on the machine, which runs gpreemptd diagnose if the daemon is not asked.
		runs := func(socket string, as ...string) string {
			cmd := m.Command(t.Context(), "/usr/bin/env", slices.Concat(as, []string{gpctl, "--socket", socket, "doctor", "--daemon", gpreemptd, "-o", "wide"})...)
			cmd.Env = environment()
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Errorf("doctor %q: %v\n%s", as, err, out)
			}
			return string(out)
		}
		nobody := []string{"setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"}
		none := filepath.Join(t.TempDir(), "none.sock")
		said := func() map[string]string {
			return map[string]string{
				"doctor": d.ctl("doctor", "-o", "wide").Out, "status": d.ctl("status", "-o", "wide").Out,
				"doctor, no daemon": runs(none), "doctor, no daemon, as nobody": runs(none, nobody...), "doctor, as nobody": runs(d.socket, nobody...),
			}
		}
		lines := func(said map[string]string) map[string][]string {
			all := map[string][]string{}
			for what, text := range said {
				all[what] = judged.FindAllString(text, -1)
			}
			return all
		}
		before := lines(said())
		for what, all := range before {
			now := "2 processes with 4 queues"
			if strings.Contains(what, "nobody") {
				now += "; without CAP_SYS_PTRACE 2 facts about them cannot be read" // their programs
			}
			for i, line := range all {
				before[what][i] = strings.Replace(line, "0 processes with 0 queues", now, 1)
			}
		}

		train := m.work("--queues", "2", "--duration", "500", "--runtime")
		other := m.work("--queues", "2", "--duration", "500", "--runtime")
		d.offlineTarget(train, 2)
		d.offlineTarget(other, 2)
		lease := d.announce(t.Context())
		m.checkEach(train, 2, offGPU)
		m.checkEach(other, 2, offGPU)
		parts := d.helpers()
		if len(parts) < 2 {
			t.Fatalf("the daemon has the parts %v, want a helper for each target", parts)
		}
		during := said()
		if diff := cmp.Diff(before, lines(during)); diff != "" {
			t.Errorf("what it warns about changes with a suspension (-before +during):\n%s", diff)
		}
		during["explain"] = d.ctl("target", "explain", fmt.Sprint(train.PID), "-o", "wide").Out
		during["top"] = d.ctl("top", "--once", "200x60", "--every", "100ms").Out
		during["targets"] = d.ctl("target", "list", "-o", "wide").Out
		for what, text := range during {
			if !strings.Contains(text, "\n") {
				t.Errorf("%s says %q", what, text)
			}
			for _, pid := range parts {
				if regexp.MustCompile(fmt.Sprintf(`\b%d\b`, pid)).MatchString(text) {
					t.Errorf("%s names our process %d:\n%s", what, pid, text)
				}
			}
			for _, stranger := range []string{"gpreempt-helper", "gpreempt-dumps", "debugger", "traces it", "end that"} {
				if strings.Contains(text, stranger) {
					t.Errorf("%s says %q:\n%s", what, stranger, text)
				}
			}
			if strings.HasPrefix(what, "doctor, ") {
				says(t, text, "gpreemptd runs, pid "+served, "the daemon runs as uid 0 with CAP_SYS_PTRACE")
			}
		}
		if text := during["doctor, as nobody"]; strings.Contains(text, "gpctl as root") || strings.Contains(text, "permission denied: check") {
			t.Errorf("as nobody:\n%s", text)
		} else {
			says(t, text, "The daemon refused this user: permission denied on the daemon's socket "+d.socket)
		}
		d.complete(lease.GetLeaseId())
		m.stays(d, train, other)
		train.stop()
		other.stop()
	})
}
