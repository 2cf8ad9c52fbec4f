package scheduler

import (
	"cmp"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// TestTimerHeapIsASortedList: whatever is set, moved and cleared, timers come out
// by due time, and in the order they were set in when due together.
func TestTimerHeapIsASortedList(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var heap timerHeap
		timers := make([]timer, 12)
		type entry struct {
			due   Time
			order int
			t     *timer
		}
		var list []entry
		order := 0
		index := func(tm *timer) int { return slices.IndexFunc(list, func(e entry) bool { return e.t == tm }) }
		pick := func(t *rapid.T) *timer { return &timers[rapid.IntRange(0, len(timers)-1).Draw(t, "timer")] }
		t.Repeat(map[string]func(*rapid.T){
			"set": func(t *rapid.T) {
				tm, due := pick(t), Time(rapid.IntRange(0, 5).Draw(t, "due"))
				heap.set(tm, due)
				i := index(tm)
				if i >= 0 && list[i].due == due {
					return // setting it to what it is keeps its turn
				}
				if i >= 0 {
					list = slices.Delete(list, i, i+1)
				}
				order++
				list = append(list, entry{due, order, tm})
				slices.SortFunc(list, func(a, b entry) int { return cmp.Or(cmp.Compare(a.due, b.due), cmp.Compare(a.order, b.order)) })
			},
			"clear": func(t *rapid.T) {
				tm := pick(t)
				heap.clear(tm)
				if i := index(tm); i >= 0 {
					list = slices.Delete(list, i, i+1)
				}
			},
			"pop": func(t *rapid.T) {
				now := Time(rapid.IntRange(-1, 6).Draw(t, "now"))
				got := heap.popDue(now)
				if len(list) == 0 || list[0].due > now {
					if got != nil {
						t.Fatalf("popped a timer due at %v at %v", got.due, now)
					}
					return
				}
				if got != list[0].t {
					t.Fatalf("popped the wrong timer: %+v, want %+v", got, list[0])
				}
				list = list[1:]
			},
			"": func(t *rapid.T) {
				if len(heap.items) != len(list) {
					t.Fatalf("%d timers armed, want %d", len(heap.items), len(list))
				}
				due, ok := heap.next()
				if ok != (len(list) > 0) || ok && due != list[0].due {
					t.Fatalf("next is %v, %v; want %v", due, ok, list)
				}
				for i := range timers {
					if armed := index(&timers[i]) >= 0; armed != (timers[i].index != 0) {
						t.Fatalf("timer %d: armed %v, index %d", i, armed, timers[i].index)
					}
				}
			},
		})
	})
}
