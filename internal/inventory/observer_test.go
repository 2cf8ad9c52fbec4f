package inventory_test

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestScansAreFrequentWhileThingsChangeAndRareOtherwise(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeHost(t)
		w.start(7, 0)
		w.run()
		scans := func() int { return locked(w, func() int { return len(w.diffs) }) }
		time.Sleep(time.Minute)
		before := scans()
		time.Sleep(10 * time.Second)
		if n := scans() - before; n < 9 || n > 11 {
			t.Errorf("%d scans in 10 quiet seconds, want about one a second", n)
		}
		w.start(8, 0)
		time.Sleep(210 * time.Millisecond)
		if _, known := w.inventory.Process(gpreempt.ProcessKey{PID: 8}); !known {
			t.Error("a new process is not known after 210 ms")
		}
		before = scans()
		time.Sleep(700 * time.Millisecond)
		if n := scans() - before; n < 2 {
			t.Errorf("%d scans in the 700 ms after a change, want several", n)
		}
	})
}

func TestNewQueuesOfAProcessAreReadAtOnceAndAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeHost(t)
		key := w.start(7, 0)
		w.start(8, 0)
		w.run()
		time.Sleep(time.Minute)
		w.create(7, 1)
		w.with(func() { clear(w.opened); w.diffs = nil })
		w.LookAt(key)
		synctest.Wait()
		proc, _ := w.inventory.Process(key)
		diffs := locked(w, func() []inventory.Diff { return w.diffs })
		if len(diffs) != 1 || len(diffs[0].Queues) != 1 {
			t.Fatalf("changes %+v, want one queue", diffs)
		}
		change := diffs[0].Queues[0]
		want := inventory.Diff{
			Changed: []discovery.Proc{proc},
			Queues: []inventory.Change{{Revision: 3, Kind: inventory.Added, At: change.At, Queue: gpreempt.QueueEntry{
				Queue: gpreempt.Queue{Process: key, ID: 1, GPU: gpu, Type: gpreempt.QueueCompute, RingBytes: 8192}, FirstSeen: change.At,
			}}},
		}
		if diff := cmp.Diff(want, diffs[0]); diff != "" {
			t.Errorf("changes (-want +got):\n%s", diff)
		}
		for name, n := range locked(w, func() map[string]int { return maps.Clone(w.opened) }) {
			if strings.HasPrefix(name, "proc/8/") || strings.HasPrefix(name, kfdDir+"proc/8/") {
				t.Errorf("%s of another process is opened %d times", name, n)
			}
		}
	})
}

func TestAProcessThatNoScanFoundIsScanned(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeHost(t)
		w.start(7, 0)
		w.run()
		time.Sleep(time.Minute)
		key := w.start(8, 0)
		w.LookAt(key)
		synctest.Wait()
		if diff := cmp.Diff(map[string]uint64{"7/0": 0, "8/0": 0}, w.rings()); diff != "" {
			t.Errorf("queues (-want +got):\n%s", diff)
		}
	})
}

func TestRingsComeFromDumpsAndSnapshots(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeHost(t)
		key := w.start(7, 0, 1)
		w.put(mqdsFile, "Process 7 PASID 7:\n"+mqd(0x7f0000200000, 1, 11)+mqd(0x7f0000100000, 0, 7))
		w.run()
		time.Sleep(2 * time.Second)
		want := map[string]uint64{"7/0": 0x7f0000100000, "7/1": 0x7f0000200000}
		if diff := cmp.Diff(want, w.rings()); diff != "" {
			t.Errorf("rings (-want +got):\n%s", diff)
		}
		if got := locked(w, func() []int32 { return slices.Clone(w.described) }); !slices.Equal(got, []int32{7}) {
			t.Errorf("described processes %v, want 7 once", got)
		}
		// A queue born in a held process is known by its snapshot at once.
		info := gpreempt.QueueInfo{Source: gpreempt.FromSnapshot, RingBase: 0x7f0000400000, AQL: true}
		w.with(func() { w.snapshots[key] = map[uint32]gpreempt.QueueInfo{3: info} })
		w.create(7, 3)
		w.LookAt(key)
		synctest.Wait()
		want["7/3"] = 0x7f0000400000
		if diff := cmp.Diff(want, w.rings()); diff != "" {
			t.Errorf("rings (-want +got):\n%s", diff)
		}
	})
}
