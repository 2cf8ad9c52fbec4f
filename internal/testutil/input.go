package testutil

import (
	"os"
	"path/filepath"
	"testing"
)

// Input returns a small text from a public report, whose right values are known. They are not a part
// of the project: they are in the directory shared/findings/inputs beside it, or in GPREEMPT_INPUTS.
// Without the directory the test is skipped.
func Input(t testing.TB, name string) []byte {
	t.Helper()
	dir, given := os.LookupEnv("GPREEMPT_INPUTS")
	for up := ".."; !given && len(up) < len("../../../../../../.."); up = filepath.Join(up, "..") {
		if info, err := os.Stat(filepath.Join(up, "shared", "findings", "inputs")); err == nil && info.IsDir() {
			dir, given = filepath.Join(up, "shared", "findings", "inputs"), true
		}
	}
	if !given {
		t.Skip("no inputs from public reports here: set GPREEMPT_INPUTS to their directory")
	}
	b, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	return b
}
