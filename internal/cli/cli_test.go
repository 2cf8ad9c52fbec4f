package cli

import (
	"bytes"
	"context"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/testscript"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/internal/testutil/clitest"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

var update = flag.Bool("update", false, "write the output of gpctl to the scripts of testdata")

func TestMain(m *testing.M) {
	time.Local = time.UTC
	api.Version = "v0.3.0"
	os.Exit(testutil.VerifyMain(m))
}

func TestScripts(t *testing.T) {
	clitest.Scripts(t, Program, *update, func(*testscript.Env) error { return nil })
}

func TestMainPrintsToItsStreams(t *testing.T) {
	var stdout, stderr bytes.Buffer
	code := Program.Main(t.Context(), []string{"version"}, strings.NewReader(""), &stdout, &stderr, func(string) string { return "" })
	if got, want := stdout.String(), "gpctl v0.3.0\n"; code != term.ExitOK || got != want || stderr.Len() > 0 {
		t.Errorf("code %d, stdout %q, stderr %q, want 0 and %q", code, got, stderr.String(), want)
	}
}

func TestOlderDaemonIsReported(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	clitest.Serve(t, socket, gpreemptv1.UnimplementedAdminServiceServer{})
	var stderr bytes.Buffer
	code := Program.Main(t.Context(), []string{"status", "--socket", socket}, strings.NewReader(""), &bytes.Buffer{}, &stderr, func(string) string { return "" })
	if code != term.ExitFailure || !strings.HasPrefix(stderr.String(), "gpctl: the daemon does not know this command: ") {
		t.Errorf("code %d, stderr %q", code, stderr.String())
	}
}

func TestStatusCheckFailsWhenNothingCanBeSuspended(t *testing.T) {
	for code, want := range map[string]int{"": term.ExitOK, "UNKNOWN_GROUP": term.ExitOK, "NO_KFD": term.ExitNotReady, "NO_MECHANISM": term.ExitNotReady} {
		m := clitest.NewMachine()
		m.Warnings = nil
		if code != "" {
			m.Warnings = []*gpreemptv1.Warning{{Code: code, Severity: "warning"}}
		}
		got, stdout, stderr := runOnClock(t, m, nil, "status", "--check")
		if got != want || stdout == "" || strings.Contains(stderr, "gpctl:") {
			t.Errorf("%q: code %d, want %d; stdout %q, stderr %q", code, got, want, stdout, stderr)
		}
	}
}

func TestLeaseNeedsAGPU(t *testing.T) {
	m := clitest.NewMachine()
	m.GPUs = nil
	code, stdout, stderr := runOnClock(t, m, nil, "lease", "create")
	if want := "gpctl: cannot create a lease: this host has no GPU\n  try: gpctl doctor\n"; code != term.ExitNoGPU || stdout != "" || stderr != want {
		t.Errorf("code %d, stdout %q, stderr %q, want %q", code, stdout, stderr, want)
	}
}

func TestSuggestionsAreNear(t *testing.T) {
	root := Program.New(term.IO{Getenv: func(string) string { return "" }})
	for word, want := range map[string]string{
		"stauts": "gpctl stats, gpctl status", "state": "gpctl stats, gpctl status", "versin": "gpctl version", "qeueu": "gpctl queue",
		"pol": "gpctl policy", "polizei": "gpctl --help", "tpo": "gpctl top",
	} {
		if m := term.Unknown(root, word); m.Next != want {
			t.Errorf("%s: %v, want %q", word, m, want)
		}
	}
}

func TestPresetsAreThoseOfTheDaemon(t *testing.T) {
	if diff := cmp.Diff(scheduler.PresetNames(), presets); diff != "" {
		t.Errorf("presets (-daemon +gpctl):\n%s", diff)
	}
}

// runOnClock runs gpctl against m on a clock that moves only while gpctl sleeps;
// slept, if it is not nil, is called with each pause.
func runOnClock(t *testing.T, m *clitest.Machine, slept func(time.Duration), args ...string) (code int, stdout, stderr string) {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "s")
	clitest.Serve(t, socket, m)
	var out, err bytes.Buffer
	streams := term.IO{In: strings.NewReader(""), Out: &out, Err: &err, Getenv: func(string) string { return "" }}
	now, sleep := clitest.Clock()
	streams.Now = now
	streams.Sleep = func(ctx context.Context, d time.Duration) error {
		if slept != nil {
			slept(d)
		}
		return sleep(ctx, d)
	}
	code = Program.Run(t.Context(), append(args, "--socket", socket), streams)
	return code, out.String(), err.String()
}

func TestShadowReportIsLastWhenShadowHasEnded(t *testing.T) {
	for _, inForce := range []bool{true, false} {
		var out bytes.Buffer
		p := topApp().Printer()
		p.W = &out
		printStats(p, &gpreemptv1.Statistics{Shadow: &gpreemptv1.ShadowReport{InForce: inForce}})
		if first := strings.Index(out.String(), "The policy ") < strings.Index(out.String(), "SINCE START"); first != inForce {
			t.Errorf("in force %t, first %t:\n%s", inForce, first, &out)
		}
	}
}
