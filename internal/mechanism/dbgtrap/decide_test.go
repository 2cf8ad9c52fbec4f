package dbgtrap

import (
	"maps"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// shot is a snapshot of queues given as id, GPU and whether it is new.
type shot struct {
	id, gpu uint32
	born    bool
}

func entries(shots ...shot) []kfd.QueueSnapshotEntry {
	snapshot := make([]kfd.QueueSnapshotEntry, len(shots))
	for i, s := range shots {
		snapshot[i] = kfd.QueueSnapshotEntry{QueueID: s.id, GPUID: s.gpu}
		if s.born {
			snapshot[i].ExceptionStatus = born
		}
	}
	return snapshot
}

func TestSuspendPassAsksForWhatIsNotSuspended(t *testing.T) {
	c := newSuspendPass(idSet{0: {}, 3: {}})
	got := c.next(entries(shot{id: 4, born: true}, shot{id: 3}, shot{id: 2}, shot{id: 0, born: true}))
	// Queue 0 was suspended, but another has that id by now.
	if diff := cmp.Diff([]uint32{4, 2, 0}, got); diff != "" {
		t.Errorf("ids (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(idSet{3: {}}, c.suspended); diff != "" {
		t.Errorf("suspended (-want +got):\n%s", diff)
	}
}

func TestSuspendPassTakesInResults(t *testing.T) {
	snapshot := entries(shot{id: 1, gpu: 20}, shot{id: 2, gpu: 10}, shot{id: 3, gpu: 20})
	for _, tc := range []struct {
		name      string
		results   []kfd.QueueResult
		skipped   map[uint32]int
		again     bool
		failed    []gpreempt.GPUID
		refused   []uint32
		suspended idSet
	}{
		{
			name:      "all suspended",
			results:   []kfd.QueueResult{{ID: 1}, {ID: 2}, {ID: 3}},
			suspended: idSet{1: {}, 2: {}, 3: {}},
		},
		{
			name:      "one passed over",
			results:   []kfd.QueueResult{{ID: 1}, {ID: 2, Status: kfd.QueueSkipped}, {ID: 3}},
			again:     true,
			suspended: idSet{1: {}, 3: {}},
		},
		{
			name:      "one skipped for the second time",
			results:   []kfd.QueueResult{{ID: 2, Status: kfd.QueueSkipped}},
			skipped:   map[uint32]int{2: 1},
			again:     true,
			refused:   []uint32{2},
			suspended: idSet{},
		},
		{
			name: "a GPU failed",
			results: []kfd.QueueResult{
				{ID: 1, Status: kfd.QueueHardwareError}, {ID: 2}, {ID: 3, Status: kfd.QueueHardwareError},
			},
			failed:    []gpreempt.GPUID{20},
			suspended: idSet{2: {}},
		},
		{
			name:      "both GPUs failed",
			results:   []kfd.QueueResult{{ID: 1, Status: kfd.QueueHardwareError}, {ID: 2, Status: kfd.QueueHardwareError}},
			failed:    []gpreempt.GPUID{10, 20},
			suspended: idSet{},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := newSuspendPass(idSet{})
			maps.Copy(c.skipped, tc.skipped)
			again, failed, refused := c.take(tc.results, snapshot)
			if diff := cmp.Diff([]any{tc.again, tc.failed, tc.refused}, []any{again, failed, refused}); diff != "" {
				t.Errorf("result (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tc.suspended, c.suspended); diff != "" {
				t.Errorf("suspended (-want +got):\n%s", diff)
			}
		})
	}
}

func TestQueuePassedOverAndRebornBeginsAnew(t *testing.T) {
	c := newSuspendPass(idSet{})
	skipped := []kfd.QueueResult{{ID: 5, Status: kfd.QueueSkipped}}
	for range 5 {
		snapshot := entries(shot{id: 5, born: true})
		c.next(snapshot)
		if _, _, refused := c.take(skipped, snapshot); refused != nil {
			t.Fatalf("a queue that is another each time is refused: %v", refused)
		}
	}
	snapshot := entries(shot{id: 5})
	c.next(snapshot)
	if _, _, refused := c.take(skipped, snapshot); refused == nil {
		t.Error("a queue that the driver passes over although it is not new is tried for ever")
	}
}
