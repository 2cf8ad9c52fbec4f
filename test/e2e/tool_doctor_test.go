package e2e

import (
	"bytes"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
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
	if again != code || !strings.Contains(words, m.GetSummary()) || !strings.Contains(words, "No daemon answers on "+socket) {
		t.Errorf("exit status %d, then %d with %s", code, again, words)
	}
}
