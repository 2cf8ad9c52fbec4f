package cli

import (
	"bytes"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/term"
)

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
	if len(help) != term.ExitNoGPU+1 {
		t.Errorf("%d exit codes are documented, want %d", len(help), term.ExitNoGPU+1)
	}
}
