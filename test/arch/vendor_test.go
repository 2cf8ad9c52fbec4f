package arch

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestOnlyTheSeamsKnowVendors: scheduler, policy, classification, API and clients know targets and
// queues, and no driver.
func TestOnlyTheSeamsKnowVendors(t *testing.T) {
	var knowing []string
	for _, entry := range table {
		if slices.Contains(entry.imports, "pkg/nvrm") {
			knowing = append(knowing, entry.pkg)
		}
	}
	want := []string{"internal/mechanism/nvchannels", "internal/daemon", "emu/nvrmtest"}
	if diff := cmp.Diff(want, knowing); diff != "" {
		t.Errorf("packages that may import pkg/nvrm (-want +got):\n%s", diff)
	}
}
