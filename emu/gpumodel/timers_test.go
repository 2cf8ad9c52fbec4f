package gpumodel

import (
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// TestTimersFireInOrder sets, moves and stops timers at random and compares with a
// list that is sorted.
func TestTimersFireInOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var heap timers
		all := make([]timer, 20)
		var model []*timer // in the order they were set
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			x := &all[rapid.IntRange(0, len(all)-1).Draw(t, "timer")]
			stop := rapid.IntRange(0, 2).Draw(t, "stop") == 0
			at := time.Duration(rapid.IntRange(0, 9).Draw(t, "at"))
			if !stop && x.set() && x.at == at {
				continue // It keeps its place among its equals.
			}
			model = slices.DeleteFunc(model, func(o *timer) bool { return o == x })
			if stop {
				heap.stop(x)
			} else {
				heap.start(x, at)
				model = append(model, x)
			}
		}
		slices.SortStableFunc(model, func(a, b *timer) int { return int(a.at - b.at) })
		index := func(x *timer) int {
			return slices.IndexFunc(all, func(o timer) bool { return o.order == x.order && o.at == x.at })
		}
		var want, got []int
		for _, x := range model {
			want = append(want, index(x))
		}
		for x := heap.first(); x != nil; x = heap.first() {
			heap.stop(x)
			got = append(got, index(x))
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatalf("order (-want +got):\n%s", diff)
		}
	})
}
