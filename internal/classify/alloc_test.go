//go:build !race

// The race detector has sync.Pool, in which package regexp keeps its memory, drop some at random.

package classify_test

import (
	"testing"

	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestDecideAndMatchingAllocateNothing(t *testing.T) {
	last := everything()
	last.Cmdline = "*--model=*"
	c := compile(t, classify.Rule{Name: "train", Match: last, Class: gpreempt.Offline})
	tagged := training
	tagged.Env = map[string]string{
		"RANK": "3", "GPREEMPT_CLASS": "BATCH", "AMD_QUEUE_TAG": "Offline_AI", "AMD_QUEUE_PRIORITY": "two",
	}
	if got, want := c.Decide(&tagged), (classify.Decision{Class: gpreempt.Offline, By: "tag"}); got != want {
		t.Errorf("decision %+v, want %+v", got, want)
	}
	dst := make([]bool, 2)
	if allocs := testing.AllocsPerRun(100, func() { c.Decide(&tagged); c.Matching(&tagged, dst) }); allocs != 0 {
		t.Errorf("%v allocations, want 0", allocs)
	}
}
