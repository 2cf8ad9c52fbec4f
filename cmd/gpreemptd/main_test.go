package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/encoding/protojson"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// victimEnv makes this binary a process for the freezer: it echoes its input.
const victimEnv = "GPREEMPT_TEST_VICTIM"

func TestMain(m *testing.M) {
	if os.Getenv(victimEnv) != "" {
		if _, err := io.Copy(os.Stdout, os.Stdin); err != nil {
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(testutil.VerifyMain(m))
}

// ran is the result of a run of gpreemptd.
type ran struct {
	code     int
	out, err string
}

func runWith(args ...string) ran {
	var out, errs bytes.Buffer
	code := run(args, &out, &errs)
	return ran{code, out.String(), errs.String()}
}

// write returns a file with that text.
func write(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "gpreemptd.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestDefaultConfigPassesItsOwnCheck(t *testing.T) {
	text := runWith("config", "default")
	if text.code != 0 || text.err != "" || !strings.Contains(text.out, "socket: /run/gpreempt/gpreemptd.sock") {
		t.Fatalf("config default: %+v", text)
	}
	path := write(t, text.out)
	for _, args := range [][]string{{"config", "check", path}, {"config", "check", "--config", path}} {
		got := runWith(args...)
		got.out, _, _ = strings.Cut(got.out, "not checked: ") // of a host without a GPU
		if diff := cmp.Diff(ran{0, path + ": valid\n", ""}, got, cmp.AllowUnexported(ran{})); diff != "" {
			t.Errorf("%q: %s", args, diff)
		}
	}
}

func TestConfigCheckListsEveryError(t *testing.T) {
	for _, tc := range []struct {
		text  string
		wants []string // after the path
	}{
		{
			"policy:\n  preset: strikt\nlimits:\n  leases_per_user: 0\nsokcet: /run/x\n",
			[]string{":2:", "policy.preset", "did you mean strict?", ":4:", "limits.leases_per_user", "1 to 100000", ":5:", "sokcet", "did you mean socket?"},
		},
		{
			"rules:\n  - name: a\n    match:\n      comm: \"[\"\n    class: offline\n",
			[]string{":4:13:", `rules[0].match.comm: "["`, "add the ]"},
		},
		{"policy: [\n", []string{":1", "not valid YAML"}},
	} {
		path := write(t, tc.text)
		got := runWith("config", "check", path)
		if got.code != 1 || got.out != "" || !strings.Contains(got.err, path+":") {
			t.Errorf("%+v; want exit status 1, no output and the path", got)
		}
		for _, want := range tc.wants {
			if !strings.Contains(got.err, want) {
				t.Errorf("no %q in:\n%s", want, got.err)
			}
		}
	}
	missing := filepath.Join(t.TempDir(), "no.yaml")
	if got := runWith("config", "check", missing); got.code != 1 || !strings.Contains(got.err, missing) {
		t.Errorf("a missing file: %+v", got)
	}
}

func TestVersionIsACommandAndAFlag(t *testing.T) {
	want := ran{0, "gpreemptd " + api.VersionString() + "\n", ""}
	for _, arg := range []string{"version", "--version"} {
		if diff := cmp.Diff(want, runWith(arg), cmp.AllowUnexported(ran{})); diff != "" {
			t.Errorf("%s: %s", arg, diff)
		}
	}
}

func TestHelpNamesCommandsAndFlags(t *testing.T) {
	for _, tc := range []struct {
		args  []string
		wants []string
	}{
		{nil, []string{"serve", "config", "version"}},
		{[]string{"--help"}, []string{"serve", "config", "version"}},
		{[]string{"serve", "--help"}, []string{"--config", "--socket", "SIGHUP"}},
		{[]string{"config", "--help"}, []string{"default", "check"}},
	} {
		got := runWith(tc.args...)
		if got.code != 0 || got.err != "" {
			t.Errorf("%q: exit status %d, %q", tc.args, got.code, got.err)
		}
		for _, want := range tc.wants {
			if !strings.Contains(got.out, want) {
				t.Errorf("%q: no %q in the help:\n%s", tc.args, want, got.out)
			}
		}
	}
}

func TestInvalidCommandLinesAreErrors(t *testing.T) {
	bad := write(t, "limits:\n  leases_per_user: 0\n")
	for _, tc := range []struct {
		args []string
		want string
	}{
		{[]string{"srve"}, "try: gpreemptd serve"},
		{[]string{"serve", "now"}, `"now"`},
		{[]string{"serve", "--no-such-flag"}, "--no-such-flag"},
		{[]string{"serve", "--config", bad}, bad + ":2:"},
		{[]string{"serve", "--config", bad + ".not"}, bad + ".not"},
		{[]string{"config", "chekc"}, "try: gpreemptd config check"},
		{[]string{"config", "check", bad, bad}, "at most 1"},
		{[]string{"version", "please"}, `"please"`},
	} {
		got := runWith(tc.args...)
		if got.code != 1 || got.out != "" || !strings.HasPrefix(got.err, "gpreemptd: ") || !strings.Contains(got.err, tc.want) {
			t.Errorf("%q: %+v, want exit status 1 and an error with %q", tc.args, got, tc.want)
		}
	}
}

func TestCleanupResumesWhatACrashedDaemonLeftPaused(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("RUNTIME_DIRECTORY", dir)
	nothing := ran{0, "nothing was left paused\n", ""}
	if diff := cmp.Diff(nothing, runWith("--cleanup"), cmp.AllowUnexported(ran{})); diff != "" {
		t.Error(diff)
	}

	victim := exec.CommandContext(context.WithoutCancel(t.Context()), "/proc/self/exe")
	victim.Env = append(os.Environ(), victimEnv+"=1")
	in, err := victim.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := victim.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := victim.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(in.Close(), victim.Wait()); err != nil {
			t.Error(err)
		}
	})
	pid := int32(victim.Process.Pid)
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	stat, err := discovery.ParseProcStat(text)
	if err != nil {
		t.Fatal(err)
	}
	j, err := mechanism.OpenJournal(filepath.Join(dir, "journal"))
	if err != nil {
		t.Fatal(err)
	}
	entry := mechanism.JournalEntry{Mechanism: "freezer", Target: gpreempt.ProcessKey{PID: pid, Start: stat.Start}, At: time.Now()}
	if err := errors.Join(j.Begin(entry), victim.Process.Signal(syscall.SIGSTOP)); err != nil {
		t.Fatal(err)
	}

	// A daemon holds the journal.
	if got := runWith("--cleanup"); got.code != 0 || !strings.Contains(got.out, "is running") {
		t.Errorf("while a daemon runs: %+v", got)
	}
	if err := j.Close(); err != nil { // as when the daemon dies
		t.Fatal(err)
	}
	undone := ran{0, "processes resumed: 1\n", ""}
	if diff := cmp.Diff(undone, runWith("--cleanup"), cmp.AllowUnexported(ran{})); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(nothing, runWith("--cleanup"), cmp.AllowUnexported(ran{})); diff != "" {
		t.Error(diff)
	}
	if _, err := io.WriteString(in, "x"); err != nil {
		t.Fatal(err)
	}
	answer := make([]byte, 1)
	if err := out.(*os.File).SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(out, answer); err != nil {
		t.Errorf("the process does not run: %v", err)
	}
}

func TestDiagnosePrintsJSON(t *testing.T) {
	got := runWith("diagnose")
	var m gpreemptv1.DiagnoseResponse
	if err := protojson.Unmarshal([]byte(got.out), &m); err != nil || got.code != 0 || m.GetSummary() == "" {
		t.Fatalf("diagnose: %+v: %v", got, err)
	}
}
