package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/testutil"
)

// runDemo runs a short demo and returns its figures.
func runDemo(t *testing.T, kfdemu, env []string, args ...string) (called, string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*timeout)
	defer cancel()
	var out, errs bytes.Buffer
	args = slices.Concat(kfdemu[1:], []string{"demo", "--json", "-", "--repeats", "1", "--duration", "400ms"}, args)
	cmd := exec.CommandContext(ctx, kfdemu[0], args...)
	cmd.Env, cmd.Stdout, cmd.Stderr, cmd.Dir = environment(env...), &out, &errs, t.TempDir()
	if err := cmd.Run(); err != nil {
		t.Fatalf("kfdemu demo: %v\n%s", err, errs.String())
	}
	var result struct {
		called
		Suspends, Resumes uint64
		Runs              []struct {
			Arm      string
			Executed uint64 `json:"offline_packets_executed"`
			Lost     uint64 `json:"offline_packets_lost"`
			Repeated uint64 `json:"offline_packets_repeated"`
		}
	}
	if err := json.Unmarshal(out.Bytes(), &result); err != nil {
		t.Fatalf("%v in %s\n%s", err, out.String(), errs.String())
	}
	for _, run := range result.Runs {
		if run.Lost != 0 || run.Repeated != 0 || run.Executed == 0 != (run.Arm == "online alone") {
			t.Errorf("%s: %d packets ran, %d were lost and %d ran twice", run.Arm, run.Executed, run.Lost, run.Repeated)
		}
	}
	if result.Suspends == 0 || result.Suspends != result.Resumes {
		t.Errorf("%d suspends, %d resumes", result.Suspends, result.Resumes)
	}
	return result.called, errs.String()
}

// called is what a demo calls its figures.
type called struct {
	Simulated, Emulated bool
	Backend, Machine    string
}

func TestDemoUsesAnEmulatedMachineWhereThereCanBeOne(t *testing.T) {
	t.Parallel()
	if reason := cannotEmulate(); reason != "" {
		t.Skip(reason)
	}
	result, said := runDemo(t, []string{kfdemuBinary}, nil, "--machine", "mi210")
	want := called{Emulated: true, Backend: "emulated mi210 x1 with the rules of 6.12 (kfdemu)", Machine: "mi210"}
	if diff := cmp.Diff(want, result); diff != "" {
		t.Error(diff)
	}
	if strings.Contains(said, "simulated") {
		t.Errorf("it says\n%s", said)
	}
}

func TestDemoUsesTheEmulatedMachineItRunsOn(t *testing.T) {
	t.Parallel()
	if reason := cannotEmulate(); reason != "" {
		t.Skip(reason)
	}
	result, _ := runDemo(t, []string{kfdemuBinary, "run", "--machine", "mi308x", "--profile", "7.2", "--", kfdemuBinary}, nil)
	want := called{Emulated: true, Backend: "emulated mi308x x1 with the rules of 7.2 (kfdemu)", Machine: "mi308x"}
	if diff := cmp.Diff(want, result); diff != "" {
		t.Error(diff)
	}
}

func TestDemoIsSimulatedWhenAskedTo(t *testing.T) {
	t.Parallel()
	result, said := runDemo(t, []string{kfdemuBinary}, nil, "--sim")
	want := called{Simulated: true, Backend: "simulated mi300x", Machine: "mi300x"}
	if diff := cmp.Diff(want, result); diff != "" {
		t.Error(diff)
	}
	if strings.Contains(said, "emulated") {
		t.Errorf("it says\n%s", said)
	}
}

func TestDemoWithoutADaemonToStartIsSimulatedAndSaysSo(t *testing.T) {
	t.Parallel()
	alone := filepath.Join(t.TempDir(), "kfdemu")
	if err := os.Link(kfdemuBinary, alone); err != nil {
		t.Fatal(err)
	}
	result, said := runDemo(t, []string{alone}, []string{"PATH="})
	if !result.Simulated || result.Emulated {
		t.Errorf("called %+v", result)
	}
	says(t, said, "demo: simulated, because no machine can be emulated here: there is no gpreemptd beside kfdemu or in PATH")
}

// Ctrl-C, or the end of the terminal, ends a demo and everything it started, also while it
// starts, and it says nothing of that.
func TestDemoThatIsInterruptedLeavesNothing(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name   string
		args   []string
		signal syscall.Signal
		early  bool // before it says that it runs
		code   int
	}{
		{name: "live, Ctrl-C", args: []string{"--live"}, signal: syscall.SIGINT},
		{name: "live, end of the terminal", args: []string{"--live"}, signal: syscall.SIGHUP},
		{name: "live and simulated, Ctrl-C", args: []string{"--live", "--sim"}, signal: syscall.SIGINT},
		{name: "live and simulated, end of the terminal", args: []string{"--live", "--sim"}, signal: syscall.SIGHUP},
		{name: "starting", signal: syscall.SIGINT, early: true, code: 130},
		{name: "live, starting", args: []string{"--live"}, signal: syscall.SIGINT, early: true},
		{name: "starting and simulated", args: []string{"--sim"}, signal: syscall.SIGINT, early: true, code: 130},
	} {
		t.Run(tc.name, func(t *testing.T) {
			simulated := slices.Contains(tc.args, "--sim")
			if reason := cannotEmulate(); reason != "" && !simulated {
				t.Skip(reason)
			}
			tmp := testutil.TempSocketDir(t)
			cmd := exec.Command(kfdemuBinary, append([]string{"demo"}, tc.args...)...)
			var errs lines
			cmd.Env, cmd.Stderr = environment("TMPDIR="+tmp), &errs
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			stuck := time.AfterFunc(3*timeout, func() { _ = cmd.Process.Kill() })
			defer stuck.Stop()
			said := bufio.NewScanner(out)
			if tc.early {
				for entries := []os.DirEntry{}; len(entries) == 0; { // it has begun when it has a directory
					if entries, err = os.ReadDir(tmp); err != nil {
						t.Fatal(err)
					}
				}
			} else {
				var socket string
				for socket == "" && said.Scan() {
					_, socket, _ = strings.Cut(said.Text(), "GPREEMPT_SOCKET=")
				}
				status, err := exec.CommandContext(t.Context(), gpctl, "--socket", socket, "status").CombinedOutput()
				if err != nil {
					t.Errorf("gpctl status: %v\n%s\n%s", err, status, &errs)
				}
				if !simulated {
					says(t, string(status), "on emulated mi300x")
				}
			}
			if err := cmd.Process.Signal(tc.signal); err != nil {
				t.Error(err)
			}
			for said.Scan() {
			}
			_ = cmd.Wait() // judged below
			if code := cmd.ProcessState.ExitCode(); code != tc.code || strings.Contains(errs.String(), "rpc error") || strings.Contains(errs.String(), "systemctl") {
				t.Errorf("it ended with %d, want %d, and wrote\n%s", code, tc.code, &errs)
			}
			left, err := os.ReadDir(tmp)
			if err != nil || len(left) > 0 {
				t.Errorf("left: %v, %v", left, err)
			}
		})
	}
}
