package targets

import (
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/safety"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// What makes the same calls has the same hazards, in each row of the table.
func TestHazardsOfACallForEachQueueAreThoseOfDbgtrap(t *testing.T) {
	gpus := []gpreempt.GPU{{ID: 7}}
	for _, action := range []safety.Action{safety.Deny, safety.Limit, safety.Allow} {
		h, _ := NewHazards(fstest.MapFS{}, gpus, []safety.Row{{
			ID: "here", GFX: []safety.GFXRange{{First: 0, Last: 1 << 30}}, Mechanisms: []string{"dbgtrap"}, Action: action, Why: "It says so.", Remedy: "none",
		}})
		want := h.Assess("dbgtrap", discovery.Proc{}, gpus)
		if diff := cmp.Diff(want, h.Assess("dbgtrap-per-queue", discovery.Proc{}, gpus)); diff != "" {
			t.Errorf("%v (-dbgtrap +dbgtrap-per-queue):\n%s", action, diff)
		}
		if want.Evidence.OK != (action != safety.Deny) || (len(want.Limited) > 0) != (action == safety.Limit) {
			t.Errorf("%v: %+v", action, want)
		}
	}
}
