package cli

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// demoWith runs gpctl demo where the emulator is a shell script.
func demoWith(t *testing.T, script string, args ...string) (became []string, stderr string) {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "kfdemu"), []byte("#!/bin/sh\n"+script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir)
	var errs bytes.Buffer
	Run(t.Context(), append([]string{"demo", "--daemon", filepath.Join(dir, "none")}, args...), IO{
		Out: io.Discard, Err: &errs, Getenv: func(string) string { return "" }, Environ: func() []string { return nil },
		Exec: func(path string, args, _ []string) error {
			became = append([]string{strings.TrimPrefix(path, dir)}, args...)
			for i, arg := range became {
				became[i] = strings.ReplaceAll(arg, dir, "DIR")
			}
			return nil
		},
	})
	return became, strings.ReplaceAll(errs.String(), dir, "DIR")
}

func TestDemoBecomesTheEmulatorWithWhatWasAskedFor(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	became, said := demoWith(t, `[ "$*" = "check --trace --machine mi210" ]`, "--machine", "mi210", "--repeats", "2", "-o", "json",
		"--live", "--duration", "3s", "--json", "figures.json", "--seed", "7")
	want := []string{
		"/kfdemu", "DIR/kfdemu", "run", "--machine", "mi210", "--seed", "7", "--",
		self, "demo", "--daemon=DIR/none", "--duration=3s", "--json=figures.json", "--live=true", "--machine=mi210", "--output=json",
		"--repeats=2", "--seed=7",
	}
	if diff := cmp.Diff(want, became); diff != "" || said != "" {
		t.Errorf("it became (-want +got):\n%s\nand said %q", diff, said)
	}
}

func TestDemoSaysWhyItSimulates(t *testing.T) {
	became, said := demoWith(t, "echo kfdemu: no seccomp >&2; echo here >&2; exit 125")
	const want = "demo: simulated, because no machine for it can be emulated here: no seccomp here\n"
	if became != nil || !strings.HasPrefix(said, want) {
		t.Errorf("it became %q and said %q, want %q", became, said, want)
	}
}

func TestDemoIsNotEmulatedWhenASimulationIsAskedFor(t *testing.T) {
	became, said := demoWith(t, "exit 0", "--sim")
	if became != nil || strings.Contains(said, "because") {
		t.Errorf("it became %q and said %q", became, said)
	}
}

func TestDemoTakesTheEmulatedMachineItRunsOn(t *testing.T) {
	for _, test := range []struct{ label, asked, want, err string }{
		{label: "mi300x x1 with the rules of 6.12 (kfdemu)", want: "mi300x"},
		{label: "mi210 x1 with the rules of 7.2 (kfdemu)", asked: "mi210", want: "mi210"},
		{label: "mi210 x1 with the rules of 7.2 (kfdemu)", asked: "mi300x", err: "--machine mi300x asks for another"},
		{label: "mi300x x8 with the rules of 6.12 (kfdemu)", err: "the demo is played on a machine with one GPU"},
		{label: "strange", err: `it calls itself "strange"`},
	} {
		got, err := emulatedMachine(test.label, test.asked)
		if got != test.want || (err == nil) != (test.err == "") || err != nil && err.Error() != test.err {
			t.Errorf("%q, asked for %q: %q, %v", test.label, test.asked, got, err)
		}
	}
}
