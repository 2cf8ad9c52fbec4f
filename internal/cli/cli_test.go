package cli

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/gpreempt/gpreempt/internal/term"

	"github.com/rogpeppe/go-internal/testscript"
	"google.golang.org/grpc"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

var update = flag.Bool("update", false, "write the output of gpctl to the scripts of testdata")

func TestMain(m *testing.M) {
	time.Local = time.UTC
	api.Version = "v0.3.0"
	os.Exit(testutil.VerifyMain(m))
}

// TestScripts runs the scripts of testdata against a fake machine of their own:
//
//	gpctl ARGS        runs gpctl, which must succeed
//	gpctl <FILE ARGS  with standard input
//	exits CODE ARGS   runs gpctl, which must exit with CODE
//	terminal ARGS     runs gpctl as on a terminal
//	python FILE WANT  reads FILE by Python, where it is installed, and compares queues
//
// run-pass, run-fail, run-slow and run-other are the folders of runs, and $RUN that of a run with made-up figures.
//
// Sockets: GPREEMPT_SOCKET is the machine, $DENIED refuses all requests, $SILENT never
// answers, $DEAD has no listener.
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                "testdata",
		UpdateScripts:      *update,
		RequireUniqueNames: true,
		Setup: func(env *testscript.Env) error {
			test, ok := env.T().(testing.TB)
			if !ok {
				t.Fatal("testscript does not run a testing.TB")
			}
			sockets := []struct{ name, file string }{
				{term.SocketEnv, "machine.sock"}, {"DENIED", "denied.sock"}, {"SILENT", "silent.sock"}, {"DEAD", "dead.sock"},
			}
			for _, s := range sockets {
				env.Setenv(s.name, filepath.Join(env.WorkDir, s.file))
			}
			run, err := filepath.Abs(filepath.Join("..", "report", "testdata", "run"))
			if err != nil {
				return err
			}
			env.Setenv("RUN", run)
			serve(test, env.Getenv(term.SocketEnv), newMachine())
			serve(test, env.Getenv("DENIED"), newMachine(), grpc.UnaryInterceptor(denyAll))
			serve(test, env.Getenv("SILENT"), newMachine(), grpc.UnaryInterceptor(silence))
			if err := writeRuns(env.WorkDir); err != nil {
				return err
			}
			dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: env.Getenv("DEAD"), Net: "unix"})
			if err != nil {
				return err
			}
			dead.SetUnlinkOnClose(false)
			return dead.Close()
		},
		Cmds: map[string]func(ts *testscript.TestScript, neg bool, args []string){
			"gpctl":    func(ts *testscript.TestScript, _ bool, args []string) { runGpctl(ts, term.ExitOK, false, args) },
			"terminal": func(ts *testscript.TestScript, _ bool, args []string) { runGpctl(ts, term.ExitOK, true, args) },
			"exits": func(ts *testscript.TestScript, _ bool, args []string) {
				code, err := strconv.Atoi(args[0])
				ts.Check(err)
				runGpctl(ts, code, false, args[1:])
			},
			"python": python,
		},
	})
}

func runGpctl(ts *testscript.TestScript, want int, terminal bool, args []string) {
	stdin := ""
	if len(args) > 0 {
		if file, ok := strings.CutPrefix(args[0], "<"); ok {
			stdin, args = ts.ReadFile(file), args[1:]
		}
	}
	var stdout, stderr bytes.Buffer
	streams := term.IO{
		In: strings.NewReader(stdin), Out: &stdout, Err: &stderr, Getenv: ts.Getenv, Terminal: terminal, ErrTerminal: terminal,
		Environ: func() []string { return []string{"HOME=/root", "GPREEMPT_PRIORITY=9", "GPREEMPT_CLASS=online"} },
		Exec:    execve(&stdout),
		Background: func(args []string) error {
			fmt.Fprintln(&stderr, "in the background:", args[0], args[len(args)-1])
			return nil
		},
	}
	streams.Now, streams.Sleep = clock()
	code := Program.Run(context.Background(), args, streams)
	// The scripts work in any directory.
	work := strings.NewReplacer(ts.Getenv("WORK")+"/", "/run/")
	ts.Stdout().Write([]byte(work.Replace(stdout.String())))
	ts.Stderr().Write([]byte(work.Replace(stderr.String())))
	if code != want {
		ts.Fatalf("gpctl %s: exit code %d, want %d\n%s%s", strings.Join(args, " "), code, want, stdout.String(), stderr.String())
	}
}

// clock returns a clock that starts at noon and advances only in sleep.
func clock() (now func() time.Time, sleep func(context.Context, time.Duration) error) {
	at := noon
	return func() time.Time { return at }, func(ctx context.Context, d time.Duration) error {
		at = at.Add(d)
		return ctx.Err()
	}
}

func denyAll(context.Context, any, *grpc.UnaryServerInfo, grpc.UnaryHandler) (any, error) {
	return nil, refuse(gpreempt.CodePermissionDenied, gpreempt.ReasonNotAdmin, "uid 1000 is not an admin",
		"ask to be added to the group gpreempt-admin")
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
	serve(t, socket, gpreemptv1.UnimplementedAdminServiceServer{})
	var stderr bytes.Buffer
	code := Program.Main(t.Context(), []string{"status", "--socket", socket}, strings.NewReader(""), &bytes.Buffer{}, &stderr, func(string) string { return "" })
	if code != term.ExitFailure || !strings.HasPrefix(stderr.String(), "gpctl: the daemon does not know this command: ") {
		t.Errorf("code %d, stderr %q", code, stderr.String())
	}
}

func TestStatusCheckFailsWhenNothingCanBeSuspended(t *testing.T) {
	for code, want := range map[string]int{"": term.ExitOK, "UNKNOWN_GROUP": term.ExitOK, "NO_KFD": term.ExitNotReady, "NO_MECHANISM": term.ExitNotReady} {
		m := newMachine()
		m.warnings = nil
		if code != "" {
			m.warnings = []*gpreemptv1.Warning{{Code: code, Severity: "warning"}}
		}
		got, stdout, stderr := watchMachine(t, m, nil, "status", "--check")
		if got != want || stdout == "" || strings.Contains(stderr, "gpctl:") {
			t.Errorf("%q: code %d, want %d; stdout %q, stderr %q", code, got, want, stdout, stderr)
		}
	}
}

func TestLeaseNeedsAGPU(t *testing.T) {
	m := newMachine()
	m.gpus = nil
	code, stdout, stderr := watchMachine(t, m, nil, "lease", "create")
	if want := "gpctl: cannot create a lease: this host has no GPU\n  try: gpctl doctor\n"; code != term.ExitNoGPU || stdout != "" || stderr != want {
		t.Errorf("code %d, stdout %q, stderr %q, want %q", code, stdout, stderr, want)
	}
}

func TestSuggestionsAreNear(t *testing.T) {
	root := Program.New(term.IO{Getenv: func(string) string { return "" }})
	for word, want := range map[string]string{
		"stauts": "gpctl stats, gpctl status", "state": "gpctl stats, gpctl status", "versin": "gpctl version", "qeueu": "gpctl queue",
		"pol": "gpctl policy", "polizei": "one of ", "ps": "one of ",
	} {
		f, ok := errors.AsType[*term.Failure](term.UnknownSubcommand(root, word))
		if !ok || !strings.HasPrefix(f.Next, want) {
			t.Errorf("%s: %v, want %q", word, f, want)
		}
	}
}

func silence(ctx context.Context, _ any, _ *grpc.UnaryServerInfo, _ grpc.UnaryHandler) (any, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}
