package proc_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/proc"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestFactsAreThoseOfTheProcess(t *testing.T) {
	sleep, err := exec.LookPath("sleep")
	if err != nil {
		t.Skip("no program sleep")
	}
	exe, err := filepath.EvalSymlinks(sleep)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), sleep, "600")
	cmd.Args[0], cmd.Env = "python3", []string{"A=1", "B=2", "C=3"}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p, err := proc.Open("/", gpreempt.ProcessKey{PID: int32(cmd.Process.Pid)})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	got, err := p.Facts([]string{"A", "C", "D"})
	if err != nil {
		t.Fatal(err)
	}
	got.Cgroup, got.NamespacePIDs = gpreempt.Cgroup{}, nil
	want := gpreempt.Process{
		Key: p.Key(), Comm: filepath.Base(sleep), Cmdline: "python3 600", Exe: exe, UID: uint32(os.Geteuid()), GID: uint32(os.Getegid()),
		Env: map[string]string{"A": "1", "C": "3"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("facts (-want +got):\n%s", diff)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // killed
	if _, err := p.Facts(nil); !errors.Is(err, proc.ErrGone) {
		t.Errorf("facts of a process that has exited: %v, want %v", err, proc.ErrGone)
	}
}
