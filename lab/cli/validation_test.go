//go:build !race

// The race detector makes a minute of simulation six minutes of it, and finds nothing: check-gen runs this test.

package cli

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/term"
)

// TestValidationDocumentIsFresh compares docs/reference/validation.md with what the simulator says now.
func TestValidationDocumentIsFresh(t *testing.T) {
	if testing.Short() {
		t.Skip("simulates for many seconds")
	}
	var out, stderr bytes.Buffer
	args := []string{"sim", "validate", "--markdown", "--trace", azureTrace(t)}
	if code := Program.Run(t.Context(), args, term.IO{Out: &out, Err: &stderr, Getenv: func(string) string { return "" }}); code != term.ExitOK {
		t.Fatalf("exit code %d: %s", code, &stderr)
	}
	if strings.Contains(out.String(), "| **missed** |  |") {
		t.Error("a row is missed without a reason")
	}
	const name = "../../docs/reference/validation.md"
	if *update {
		if err := os.WriteFile(name, out.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	file, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(file), out.String()); diff != "" {
		t.Errorf("docs/reference/validation.md is not what gplab sim validate --markdown prints; run this test with -update:\n%s", diff)
	}
}
