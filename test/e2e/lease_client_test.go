package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/emu/workload"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// The client in Go and the one in C take the same arguments and say the same where there
// is no driver.
func TestBothClientsSayTheSameWithoutADriver(t *testing.T) {
	if _, err := os.Stat(kfd.DevicePath); err == nil {
		t.Skipf("%s is there, and the clients are for an emulated one", kfd.DevicePath)
	}
	for name, client := range map[string][]string{"go": {kfdemuBinary, "work"}, "c": {""}} {
		t.Run(name, func(t *testing.T) {
			if name == "c" {
				client[0] = clientInC(t)
				if client[0] == "" {
					t.Skip("no compiler")
				}
			}
			code, said, _ := execute(t, client, "--queues", "2", "--gpus", "all", "--runtime", "--packets", "3", "--duration", "100",
				"--occupancy", "1000000", "--rate", "0.5", "--depth", "2", "--sdma", "--churn", "--wait", "poll")
			var got workload.Message
			if err := json.Unmarshal(said, &got); err != nil {
				t.Fatalf("the client said %q: %v", said, err)
			}
			if !strings.HasPrefix(got.What, "open /dev/kfd: ") {
				t.Errorf("the client said %q went wrong", got.What)
			}
			got.What = ""
			const enoent = 2
			if diff := cmp.Diff(workload.Message{Event: "error", Errno: enoent}, got); code != 1 || diff != "" {
				t.Errorf("the client ended with %d and said (-want +got):\n%s", code, diff)
			}
			for _, wrong := range []string{"--queues -1", "--depth 0", "--wait long", "--rate x", "--rate 1e9", "--gpus x", "--gpus 0", "--speed 1", "now"} {
				if code, said, help := execute(t, client, strings.Fields(wrong)...); code != 2 || len(said) > 0 || len(help) == 0 {
					t.Errorf("%s: the client ended with %d, said %q and told %q", wrong, code, said, help)
				}
			}
		})
	}
}

// clientInC builds the client in C and returns its path, "" where there is no compiler.
func clientInC(t *testing.T) string {
	t.Helper()
	if _, err := exec.LookPath("cc"); err != nil {
		return ""
	}
	path := filepath.Join(t.TempDir(), "client")
	build := exec.CommandContext(t.Context(), "cc", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread", "-o", path, "testdata/kfdclient.c")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", build.Args, err, out)
	}
	return path
}

// Both clients do the same on an emulated machine, with drivers that check the memory of queues and
// with one that does not.
func TestBothClientsDoTheSameWork(t *testing.T) {
	inC := clientInC(t)
	if inC == "" {
		t.Skip("no compiler")
	}
	for _, profile := range []string{"6.5", "6.12", "7.2"} {
		t.Run(profile, func(t *testing.T) {
			var tallies []workload.Tally
			for _, client := range [][]string{{kfdemuBinary, "work"}, {inC}} {
				code, said, help := execute(t, slices.Concat([]string{kfdemuBinary, "run", "--profile", profile, "--machine", "mi210", "--"}, client),
					"--queues", "2", "--sdma", "--runtime", "--packets", "30", "--duration", "100", "--depth", "3")
				var last workload.Message
				for line := range bytes.Lines(said) {
					last = workload.Message{}
					if err := json.Unmarshal(line, &last); err != nil {
						t.Fatalf("%v said %q: %v", client, line, err)
					}
				}
				if code != 0 || last.Event != "done" || !last.OK {
					t.Fatalf("%v ended with %d and said %s%s", client, code, said, help)
				}
				tallies = append(tallies, workload.Tally{Packets: last.Packets, Count: last.Count, Hash: last.Hash})
			}
			if diff := cmp.Diff(tallies[0], tallies[1]); diff != "" {
				t.Errorf("the client in Go and the one in C (-go +c):\n%s", diff)
			}
		})
	}
}

// execute runs a client with nothing to read.
func execute(t *testing.T, client []string, args ...string) (code int, out, help []byte) {
	t.Helper()
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(t.Context(), client[0], append(slices.Clone(client[1:]), args...)...)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	var exit *exec.ExitError
	if err := cmd.Run(); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), stdout.Bytes(), stderr.Bytes()
}
