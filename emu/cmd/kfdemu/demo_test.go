package main

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestDemoUsesTheEmulatedMachineItRunsOn(t *testing.T) {
	for _, test := range []struct{ label, asked, want, err string }{
		{label: "mi300x x1 with the rules of 6.12 (kfdemu)", want: "mi300x"},
		{label: "mi210 x1 with the rules of 7.2 (kfdemu)", asked: "mi210", want: "mi210"},
		{label: "mi210 x1 with the rules of 7.2 (kfdemu)", asked: "mi300x", err: "--machine mi300x asks for another"},
		{label: "mi300x x8 with the rules of 6.12 (kfdemu)", err: "the demo needs a machine with one GPU"},
		{label: "strange", err: `it calls itself "strange"`},
	} {
		got, err := emulatedMachine(test.label, test.asked)
		if got != test.want || (err == nil) != (test.err == "") || err != nil && err.Error() != test.err {
			t.Errorf("%q, asked for %q: %q, %v", test.label, test.asked, got, err)
		}
	}
}

func TestDemoOnAnEmulatedMachineHasTheFlagsThatWereGiven(t *testing.T) {
	cmd := demoCommand()
	args := []string{"--machine", "mi210", "--repeats", "2", "--json", "figures.json", "--live", "--duration", "3s", "--seed", "7", "--svg", "bars.svg", "--top"}
	if err := cmd.ParseFlags(args); err != nil {
		t.Fatal(err)
	}
	want := []string{
		"--daemon=build/gpreemptd", "--duration=3s", "--json=figures.json", "--live=true", "--machine=mi210", "--repeats=2", "--seed=7", "--svg=bars.svg", "--top=true",
	}
	if diff := cmp.Diff(want, again(cmd, "build/gpreemptd")); diff != "" {
		t.Error(diff)
	}
}

func TestDaemonIsFoundBesideTheEmulatorOrInPATH(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	_, err := find(filepath.Join(t.TempDir(), "kfdemu"), "gpreemptd")
	if err == nil || !strings.Contains(err.Error(), "there is no gpreemptd beside kfdemu or in PATH") {
		t.Error(err)
	}
}
