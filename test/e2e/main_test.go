// Package e2e runs the built gpreemptd and gpctl against each other on simulated and
// emulated GPUs, and checks only what a user can see.
package e2e

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gpreempt/gpreempt/internal/testutil"

	// What the binaries are made of. The tests do not use it; the imports make go
	// test run them again, and not take them from its cache, when it changes.
	_ "github.com/gpreempt/gpreempt/internal/cli"
	_ "github.com/gpreempt/gpreempt/internal/daemon"
)

// The paths of the binaries under test, and of the clients of an emulated GPU.
// trainBinary is kfdemuBinary by the name of an offline job, strangersBinary that of
// the tests where another user can run it.
var gpreemptd, gpctl, gplab, gpaccept, kfdemuBinary, simBinary, trainBinary, strangersBinary string

// busyHostDaemon is gpreemptd with longer times, as is simBinary. The emulated driver runs in the process of the
// test: when a busy host does not run that, it looks like a GPU that hangs, an announcement is answered before its
// GPUs are quiet, and the end of the daemon is cut short.
var busyHostDaemon string

func testMain(m *testing.M) int {
	dir, err := os.MkdirTemp("", "gpreempt-e2e-")
	if err != nil {
		fmt.Fprintln(os.Stderr, "e2e: no directory for the binaries:", err)
		return 1
	}
	defer os.RemoveAll(dir)
	if err := build(dir); err != nil {
		fmt.Fprintln(os.Stderr, "e2e: the binaries cannot be built:", err)
		return 1
	}
	setBinaries(dir)
	strangersBinary = filepath.Join(dir, "stranger")
	if err := copySelf(strangersBinary); err != nil {
		fmt.Fprintln(os.Stderr, "e2e: no copy of the tests for other users:", err)
		return 1
	}
	return testutil.VerifyMain(m)
}

// copySelf puts the test binary where every user can run it. It has to be done before a
// test starts: a file that is open for writing while some other test forks stays so in
// the child until that becomes its program, and cannot be run for as long (ETXTBSY).
func copySelf(path string) error {
	data, err := os.ReadFile(os.Args[0])
	if err != nil {
		return err
	}
	if err := os.WriteFile(path, data, 0o755); err != nil {
		return err
	}
	return os.Chmod(filepath.Dir(path), 0o711)
}

// racing reports whether the programs are built with the race detector: with that of the tests, or by
// the environment.
func racing() bool { return raceDetector || os.Getenv("GPREEMPT_E2E_RACE") != "" }

// build puts the binaries into dir.
func build(dir string) error {
	waits, err := busyHost()
	if err != nil {
		return err
	}
	busy, err := overlay(dir, waits...)
	if err != nil {
		return err
	}
	var race []string
	if racing() {
		race = []string{"-race"}
	}
	const root = "../.."
	return errors.Join(
		goBuild(root, dir, race, "./cmd/gpreemptd", "./cmd/gpctl", "./accept/cmd/gpaccept"),
		goBuild("../../lab", dir, race, "./cmd/gplab"),
		goBuild(root, filepath.Join(dir, "busy"), append(race, "-overlay", busy), "./cmd/gpreemptd"),
		goBuild(root, filepath.Join(dir, "sim"), append(race, "-overlay", busy), "./emu/cmd/kfdemu"), // it runs the daemon, too
		// What stands for others' programs is built as those are: without the detector.
		goBuild(root, dir, nil, "./emu/cmd/kfdemu"),
		os.Link(filepath.Join(dir, "kfdemu"), filepath.Join(dir, "train")),
	)
}

// goBuild builds programs of a module into a directory.
func goBuild(module, dir string, flags []string, programs ...string) error {
	cmd := exec.Command("go", slices.Concat([]string{"build", "-buildvcs=false", "-o", dir + string(filepath.Separator)}, flags, programs)...)
	cmd.Dir = module
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build %v: %w\n%s", programs, err, out)
	}
	return nil
}

// setBinaries sets the paths of what build has put into dir.
func setBinaries(dir string) {
	gpreemptd, gpctl, gplab, gpaccept = filepath.Join(dir, "gpreemptd"), filepath.Join(dir, "gpctl"), filepath.Join(dir, "gplab"), filepath.Join(dir, "gpaccept")
	kfdemuBinary, simBinary = filepath.Join(dir, "kfdemu"), filepath.Join(dir, "sim", "kfdemu")
	trainBinary, busyHostDaemon = filepath.Join(dir, "train"), filepath.Join(dir, "busy", "gpreemptd")
}

// busyHost returns the changes of the source for busyHostDaemon.
func busyHost() (changes []change, err error) {
	for _, c := range []change{
		{"pkg/scheduler/core.go", "\tStuckAfter = 2 * time.Second\n", "\tStuckAfter = 10 * time.Minute\n"},
		{"pkg/scheduler/admit.go", "\tMaxWaitLimit = 10 * time.Second\n", "\tMaxWaitLimit = time.Minute\n"},
		{"internal/daemon/daemon.go", "\tresumeAllTime = 10 * time.Second\n", "\tresumeAllTime = time.Minute\n"},
		{"internal/daemon/daemon.go", "\tdetachTime    = 5 * time.Second\n\tendTime       = 5 * time.Second\n", "\tdetachTime    = time.Minute\n\tendTime       = time.Minute\n"},
	} {
		if c.file, err = filepath.Abs(filepath.Join("../..", c.file)); err != nil {
			return nil, err
		}
		changes = append(changes, c)
	}
	return changes, nil
}

// change replaces a text that a source file contains once.
type change struct{ file, was, is string }

// overlay writes the changed files into dir, and an overlay for go build, whose path it returns.
func overlay(dir string, changes ...change) (file string, err error) {
	replace := map[string]string{}
	for i, c := range changes {
		text, err := os.ReadFile(cmp.Or(replace[c.file], c.file))
		if err != nil {
			return "", err
		}
		if strings.Count(string(text), c.was) != 1 {
			return "", fmt.Errorf("%s does not contain %q exactly once: update the change in this test", c.file, c.was)
		}
		changed := filepath.Join(dir, fmt.Sprintf("%d-%s", i, filepath.Base(c.file)))
		if err := os.WriteFile(changed, []byte(strings.Replace(string(text), c.was, c.is, 1)), 0o600); err != nil {
			return "", err
		}
		replace[c.file] = changed
	}
	text, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", err
	}
	file = filepath.Join(dir, "overlay.json")
	return file, os.WriteFile(file, text, 0o600)
}

// changed builds a gpreemptd with the changes and those of busyHostDaemon, and returns its path.
func changed(t *testing.T, changes ...change) (program string) {
	t.Helper()
	if raceDetector {
		t.Skip("a gpreemptd of its own is built without the race detector: make e2e does")
	}
	waits, err := busyHost()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	file, err := overlay(dir, append(changes, waits...)...)
	if err != nil {
		t.Fatal(err)
	}
	if err := goBuild("../..", dir, []string{"-overlay", file}, "./cmd/gpreemptd"); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, "gpreemptd")
}

// lasts skips a test that takes long or depends on a measured time where a change is tested (-short). make nightly runs it.
func lasts(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("it lasts, or depends on a measured time: make nightly runs it")
	}
}

// some returns a few of the cases, others in each run, where a change is tested (-short), and all without.
func some[T any](few int, all []T) []T {
	if !testing.Short() || few >= len(all) {
		return all
	}
	chosen := make([]T, 0, few)
	for _, i := range slices.Sorted(slices.Values(rand.Perm(len(all))[:few])) {
		chosen = append(chosen, all[i])
	}
	return chosen
}
