package cli

import (
	"bytes"
	"context"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/gpreempt/gpreempt/internal/term"

	"github.com/google/go-cmp/cmp"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
)

// Diagnose reports that the fake machine is usable, with limits.
func (m *machine) Diagnose(context.Context, *gpreemptv1.DiagnoseRequest) (*gpreemptv1.DiagnoseResponse, error) {
	const ok, warn, skip = gpreemptv1.CheckStatus_CHECK_STATUS_OK, gpreemptv1.CheckStatus_CHECK_STATUS_WARN, gpreemptv1.CheckStatus_CHECK_STATUS_SKIP
	return &gpreemptv1.DiagnoseResponse{
		Verdict: gpreemptv1.Verdict_VERDICT_LIMITED, Summary: "gpreempt can suspend offline work here; warnings: queue slots.",
		Remedy: "read the warnings", ByDaemon: true, Backend: "kfd", Version: "v0.3.0",
		Checks: []*gpreemptv1.Check{
			{Id: "gpu", Title: "AMD GPU", Status: ok, Found: "2 × mi300x"},
			{Id: "permission-rule", Title: "permission rule", Status: ok, Found: "process: " + strings.Repeat("a long explanation ", 10)},
			{Id: "queue-slots", Title: "queue slots", Status: warn, Found: "GPU 34535: 30 compute queues for 24 slots", Remedy: "have fewer"},
			{Id: "kernel-log", Title: "kernel log", Status: skip, Found: "uid 1000 may not read /dev/kmsg"},
		},
		Gpus: []*gpreemptv1.DiagnosedGpu{
			{
				GpuId: 34535, Node: 2, Name: "mi300x", GfxTargetVersion: 90402, Bdf: "0000:c1:00.0", XccCount: 8, DebugFirmware: true,
				DebugSharing: gpreemptv1.DebugSharing_DEBUG_SHARING_SEVERAL, QueueSlots: 24, ComputeQueues: 30, Hazard: gpreemptv1.HazardAction_HAZARD_ACTION_ALLOW,
			},
			{
				GpuId: 41235, Node: 3, Name: "gfx1100", GfxTargetVersion: 110000, Bdf: "0000:c6:00.0", XccCount: 1, Mes: true,
				ComputeQueues: 4, Hazard: gpreemptv1.HazardAction_HAZARD_ACTION_DENY, HazardReason: "resets (ROCm/rocm#1)",
			},
			{
				GpuId: 41236, Node: 4, Name: "mi50", GfxTargetVersion: 90006, XccCount: 1, DebugFirmware: true, QueueSlots: 24,
				DebugSharing: gpreemptv1.DebugSharing_DEBUG_SHARING_ONE, Hazard: gpreemptv1.HazardAction_HAZARD_ACTION_LIMIT, HazardReason: "one (ROCm/rocm#2)",
			},
		},
		Processes: []*gpreemptv1.DiagnosedProcess{
			{TargetId: "4242@1001", Pid: 4242, Comm: "python3", Offline: true, Mechanism: "freezer", Why: "cgroup: version 2", Rejected: []*gpreemptv1.Rejection{
				{Mechanism: "dbgtrap", Why: "debugger: rocgdb is attached", Remedy: "end it"}, {Mechanism: "criu", Why: "not enabled"},
			}},
			{TargetId: "4300@1002", Pid: 4300, Comm: "evil\x1b[31m", Offline: true},
			{TargetId: "5001@2000", Pid: 5001, Comm: "tritonserver", Why: "it is online"},
		},
	}, nil
}

func TestSymbolsNeedATerminalAndUTF8(t *testing.T) {
	tests := []struct {
		terminal bool
		env      map[string]string
		want     string
	}{
		{true, map[string]string{"LANG": "en_GB.UTF-8"}, "✓"},
		{true, map[string]string{"LANG": "C.utf8", "TERM": "xterm"}, "✓"},
		{true, map[string]string{"LANG": "C", "LC_CTYPE": "de_DE.UTF-8"}, "✓"},
		{true, map[string]string{"LANG": "en_GB.UTF-8", "LC_ALL": "C"}, "ok  "},
		{true, map[string]string{"LANG": "en_GB.UTF-8", "TERM": "dumb"}, "ok  "},
		{true, nil, "ok  "},
		{false, map[string]string{"LANG": "en_GB.UTF-8"}, "ok  "},
	}
	for _, tt := range tests {
		a := &term.App{IO: term.IO{Terminal: tt.terminal, Getenv: func(name string) string { return tt.env[name] }}}
		if got := mark(a, gpreemptv1.CheckStatus_CHECK_STATUS_OK); got != (term.Cell{Text: tt.want, Style: term.StyleGood}) {
			t.Errorf("terminal %v, %v: %q, want %q", tt.terminal, tt.env, got, tt.want)
		}
	}
}

func TestEveryVerdictHasItsExitCode(t *testing.T) {
	want := map[gpreemptv1.Verdict]int{
		gpreemptv1.Verdict_VERDICT_UNSPECIFIED: term.ExitOK, gpreemptv1.Verdict_VERDICT_READY: term.ExitOK, gpreemptv1.Verdict_VERDICT_LIMITED: term.ExitOK,
		gpreemptv1.Verdict_VERDICT_SIMULATED: term.ExitOK, gpreemptv1.Verdict_VERDICT_NOT_READY: 7, gpreemptv1.Verdict_VERDICT_NO_GPU: 8,
	}
	for n := range gpreemptv1.Verdict_name {
		v := gpreemptv1.Verdict(n)
		code := term.ExitOK
		if f, ok := verdictFailure(&gpreemptv1.DiagnoseResponse{Verdict: v}).(*term.Failure); ok { //nolint:errorlint // judge gives it bare
			code = f.Code
			var said bytes.Buffer
			if f.Print(&said, Program.Name); said.Len() > 0 {
				t.Errorf("%v: printed %q after the report", v, said.String())
			}
		}
		if code != want[v] {
			t.Errorf("%v: exit code %d, want %d", v, code, want[v])
		}
	}
}

func TestDoctorNeedsADaemonOrItsProgram(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	var stderr bytes.Buffer
	const socket = "/nonexistent/s"
	code := Program.Main(t.Context(), []string{"doctor", "--socket", socket}, strings.NewReader(""), &bytes.Buffer{}, &stderr, func(string) string { return "" })
	want := "gpctl: no daemon answers on " + socket + ": gpreemptd not found next to gpctl or in PATH\n  try: use --daemon\n"
	if got := stderr.String(); code != term.ExitUnreachable || got != want {
		t.Errorf("code %d, %q; want %d and %q", code, got, term.ExitUnreachable, want)
	}
}

// TestExitCodesAreDocumented compares the table of docs/api.md with gpctl --help.
func TestExitCodesAreDocumented(t *testing.T) {
	doc, err := os.ReadFile("../../docs/api.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := func(text, form string) map[string]string {
		found := map[string]string{}
		for _, m := range regexp.MustCompile(form).FindAllStringSubmatch(text, -1) {
			found[m[1]] = m[2]
		}
		return found
	}
	_, after, _ := strings.Cut(string(doc), "## Exit codes of gpctl")
	documented := rows(after, `(?m)^\| (\d+) \| (.+?) \|`)
	help := rows(Program.New(term.IO{Getenv: func(string) string { return "" }}).Long, `(?m)^  (\d+)  (.+)$`)
	if diff := cmp.Diff(help, documented); diff != "" {
		t.Errorf("docs/api.md (-help +documented):\n%s", diff)
	}
	if len(help) != term.ExitCannotTell+1 {
		t.Errorf("%d exit codes are documented, want %d", len(help), term.ExitCannotTell+1)
	}
}
