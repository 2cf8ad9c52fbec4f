package clitest

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/testscript"
	"google.golang.org/grpc"

	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Scripts runs the scripts of testdata against a fake machine of their own. With update it
// writes the output into them.
//
//	PROGRAM ARGS        runs the program, which must succeed
//	PROGRAM <FILE ARGS  with standard input
//	exits CODE ARGS     runs it, and it must exit with CODE
//	terminal ARGS       runs it as on a terminal
//	python FILE WANT    reads FILE by Python, where it is installed, and compares queues
//
// Sockets: GPREEMPT_SOCKET is the machine, $DENIED refuses all requests, $SILENT never
// answers, $DEAD has no listener.
func Scripts(t *testing.T, program *term.Program, update bool, setup func(*testscript.Env) error) {
	t.Helper()
	run := func(ts *testscript.TestScript, want int, terminal bool, args []string) {
		runProgram(ts, program, want, terminal, args)
	}
	testscript.Run(t, testscript.Params{
		Dir:                "testdata",
		UpdateScripts:      update,
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
			Serve(test, env.Getenv(term.SocketEnv), NewMachine())
			Serve(test, env.Getenv("DENIED"), NewMachine(), grpc.UnaryInterceptor(denyAll))
			Serve(test, env.Getenv("SILENT"), NewMachine(), grpc.UnaryInterceptor(silence))
			if err := setup(env); err != nil {
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
			program.Name: func(ts *testscript.TestScript, _ bool, args []string) { run(ts, term.ExitOK, false, args) },
			"terminal":   func(ts *testscript.TestScript, _ bool, args []string) { run(ts, term.ExitOK, true, args) },
			"exits": func(ts *testscript.TestScript, _ bool, args []string) {
				code, err := strconv.Atoi(args[0])
				ts.Check(err)
				run(ts, code, false, args[1:])
			},
			"python": python,
		},
	})
}

func runProgram(ts *testscript.TestScript, program *term.Program, want int, terminal bool, args []string) {
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
	}
	streams.Now, streams.Sleep = Clock()
	code := program.Run(context.Background(), args, streams)
	// The scripts work in any directory.
	work := strings.NewReplacer(ts.Getenv("WORK")+"/", "/run/")
	for w, text := range map[io.Writer]string{ts.Stdout(): stdout.String(), ts.Stderr(): stderr.String()} {
		_, err := io.WriteString(w, work.Replace(text))
		ts.Check(err)
	}
	if code != want {
		ts.Fatalf("%s %s: exit code %d, want %d\n%s%s", program.Name, strings.Join(args, " "), code, want, stdout.String(), stderr.String())
	}
}

// Clock returns a clock that starts at noon and advances only in sleep.
func Clock() (now func() time.Time, sleep func(context.Context, time.Duration) error) {
	at := Noon
	return func() time.Time { return at }, func(ctx context.Context, d time.Duration) error {
		at = at.Add(d)
		return ctx.Err()
	}
}

func denyAll(context.Context, any, *grpc.UnaryServerInfo, grpc.UnaryHandler) (any, error) {
	return nil, Refuse(gpreempt.CodePermissionDenied, gpreempt.ReasonNotAdmin, "uid 1000 is not an admin",
		"ask to be added to the group gpreempt-admin")
}

func silence(ctx context.Context, _ any, _ *grpc.UnaryServerInfo, _ grpc.UnaryHandler) (any, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

// execve is a fake for a machine with few files. It prints what would be executed.
func execve(stdout io.Writer) func(path string, args, env []string) error {
	return func(path string, args, env []string) error {
		switch path {
		case "/usr/bin/train", "./train", "/bin/sh":
			fmt.Fprintf(stdout, "%s %q\n%s\n", path, args, strings.Join(env, "\n"))
			return nil
		case "/usr/bin/script":
			return syscall.ENOEXEC
		case "/opt/bin/data", "/usr/bin/data":
			return syscall.EACCES
		case "/opt/bin/file/train":
			return syscall.ENOTDIR
		case "/usr/bin/huge":
			return syscall.E2BIG
		}
		return syscall.ENOENT
	}
}

// python compares the list that Python reads from a file with the wanted one.
func python(ts *testscript.TestScript, _ bool, args []string) {
	interpreter, err := exec.LookPath("python3")
	if err != nil {
		ts.Logf("skipped: no python3 to read %s", args[0])
		return
	}
	const read = "import runpy, sys\nfor q in runpy.run_path(sys.argv[1])['queues']: print(q)"
	got, err := exec.CommandContext(context.Background(), interpreter, "-c", read, ts.MkAbs(args[0])).CombinedOutput()
	if err != nil {
		ts.Fatalf("python3: %v\n%s", err, got)
	}
	if diff := cmp.Diff(ts.ReadFile(args[1]), string(got)); diff != "" {
		ts.Fatalf("list in %s (-want +got):\n%s", args[0], diff)
	}
}
