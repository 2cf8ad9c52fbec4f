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
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/emu/demo"
	"github.com/gpreempt/gpreempt/internal/testutil"
)

// playDemo plays a short demo by the command of a gpctl, and returns what it found out. A machine that is
// as busy as that of tests may keep it from its promises about time, and nothing else.
func playDemo(t *testing.T, gpctl, env []string, args ...string) (*demo.Result, string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*timeout)
	defer cancel()
	var out, errs bytes.Buffer
	args = slices.Concat(gpctl[1:], []string{"demo", "-o", "json", "--repeats", "1", "--duration", "400ms", "--daemon", gpreemptd}, args)
	cmd := exec.CommandContext(ctx, gpctl[0], args...)
	cmd.Env, cmd.Stdout, cmd.Stderr, cmd.Dir = environment(env...), &out, &errs, t.TempDir()
	err := cmd.Run()
	if err != nil && !strings.Contains(errs.String(), "the demo did not keep its promise") {
		t.Fatalf("gpctl demo: %v\n%s", err, errs.String())
	}
	var result demo.Result
	if err := json.Unmarshal(out.Bytes(), &result); err != nil {
		t.Fatalf("%v in %s\n%s", err, out.String(), errs.String())
	}
	for _, run := range result.Runs {
		if run.Lost != 0 || run.Repeated != 0 || run.Executed == 0 != (run.Arm == demo.OnlineAlone) {
			t.Errorf("%s: %d packets ran, %d were lost and %d ran twice", run.Arm, run.Executed, run.Lost, run.Repeated)
		}
	}
	if result.Suspends == 0 || result.Suspends != result.Resumes {
		t.Errorf("%d suspends, %d resumes", result.Suspends, result.Resumes)
	}
	return &result, errs.String()
}

// called is what a demo calls its figures.
type called struct {
	Simulated, Emulated bool
	Backend, Machine    string
}

func calledBy(r *demo.Result) called {
	return called{r.Simulated, r.Emulated, r.Backend, r.Machine}
}

func TestDemoIsPlayedOnAnEmulatedMachineWhereThereCanBeOne(t *testing.T) {
	if reason := cannotEmulate(); reason != "" {
		t.Skip(reason)
	}
	result, said := playDemo(t, []string{gpctl}, nil, "--machine", "mi210")
	want := called{Emulated: true, Backend: "emulated mi210 x1 with the rules of 6.12 (kfdemu)", Machine: "mi210"}
	if diff := cmp.Diff(want, calledBy(result)); diff != "" {
		t.Error(diff)
	}
	if strings.Contains(said, "simulated") {
		t.Errorf("it says\n%s", said)
	}
}

func TestDemoIsPlayedOnTheEmulatedMachineItRunsOn(t *testing.T) {
	if reason := cannotEmulate(); reason != "" {
		t.Skip(reason)
	}
	result, _ := playDemo(t, []string{kfdemuBinary, "run", "--machine", "mi308x", "--profile", "7.2", "--", gpctl}, nil)
	want := called{Emulated: true, Backend: "emulated mi308x x1 with the rules of 7.2 (kfdemu)", Machine: "mi308x"}
	if diff := cmp.Diff(want, calledBy(result)); diff != "" {
		t.Error(diff)
	}
}

func TestDemoIsSimulatedWhenAskedTo(t *testing.T) {
	result, said := playDemo(t, []string{gpctl}, nil, "--sim")
	want := called{Simulated: true, Backend: "simulated mi300x", Machine: "mi300x"}
	if diff := cmp.Diff(want, calledBy(result)); diff != "" {
		t.Error(diff)
	}
	if strings.Contains(said, "emulated") {
		t.Errorf("it says\n%s", said)
	}
}

func TestDemoWithoutAnEmulatorIsSimulatedAndSaysSo(t *testing.T) {
	alone := filepath.Join(t.TempDir(), "gpctl")
	if err := os.Link(gpctl, alone); err != nil {
		t.Fatal(err)
	}
	result, said := playDemo(t, []string{alone}, []string{"PATH="})
	if !result.Simulated || result.Emulated {
		t.Errorf("called %+v", calledBy(result))
	}
	says(t, said, "demo: simulated, because no machine for it can be emulated here: there is no kfdemu beside gpctl or in PATH")
}

func TestLiveDemoRunsUntilInterruptedAndLeavesNothing(t *testing.T) {
	for _, arg := range []string{"", "--sim"} {
		t.Run("demo "+arg, func(t *testing.T) {
			if reason := cannotEmulate(); reason != "" && arg == "" {
				t.Skip(reason)
			}
			tmp := testutil.TempSocketDir(t)
			args := slices.DeleteFunc([]string{"demo", "--live", "--daemon", gpreemptd, arg}, func(s string) bool { return s == "" })
			cmd := exec.Command(gpctl, args...)
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
			var socket string
			said := bufio.NewScanner(out)
			for socket == "" && said.Scan() {
				_, socket, _ = strings.Cut(said.Text(), "GPREEMPT_SOCKET=")
			}
			status, err := exec.CommandContext(t.Context(), gpctl, "--socket", socket, "status").CombinedOutput()
			if err != nil {
				t.Errorf("gpctl status: %v\n%s\n%s", err, status, &errs)
			}
			if want := "on emulated mi300x"; arg == "" {
				says(t, string(status), want)
			}
			if err := cmd.Process.Signal(os.Interrupt); err != nil {
				t.Error(err)
			}
			for said.Scan() {
			}
			if err := cmd.Wait(); err != nil {
				t.Errorf("it ended with: %v\n%s", err, &errs)
			}
			left, err := os.ReadDir(tmp)
			if err != nil || len(left) > 0 {
				t.Errorf("left: %v, %v", left, err)
			}
		})
	}
}
