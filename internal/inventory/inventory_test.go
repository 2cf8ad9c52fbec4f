package inventory_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// at returns the wall clock of the n-th scan.
func at(n int) time.Time { return time.Unix(int64(n), 0) }

// proc returns a process with compute queues of the given ids.
func proc(pid int32, start uint64, ids ...uint32) discovery.Proc {
	p := discovery.Proc{Process: gpreempt.Process{Key: gpreempt.ProcessKey{PID: pid, Start: start}, Comm: "python3"}}
	for _, id := range ids {
		p.Queues = append(p.Queues, gpreempt.Queue{
			Process: p.Key, ID: id, GPU: 63420, Type: gpreempt.QueueCompute, RingBytes: 1 << 20,
		})
	}
	return p
}

func snapshot(procs ...discovery.Proc) discovery.Snapshot {
	return discovery.Snapshot{Processes: procs}
}

// entry returns the n-th queue of p as first seen in a scan.
func entry(p discovery.Proc, n, seen int) gpreempt.QueueEntry {
	return gpreempt.QueueEntry{Queue: p.Queues[n], FirstSeen: at(seen)}
}

func TestApplyReturnsWhatChanged(t *testing.T) {
	renamed := proc(10, 1, 0, 1)
	renamed.Comm = "vllm"
	grown := proc(10, 1, 0, 1)
	grown.Queues[1].RingBytes *= 2
	moved := proc(10, 1, 0, 1)
	moved.Queues[0].GPU = 3183
	first := proc(10, 1, 0, 1)
	first.Incarnations = []uint64{71, 72}
	reborn := proc(10, 1, 0, 1)
	reborn.Incarnations = []uint64{71, 99}
	born := func(p ...discovery.Proc) []discovery.Proc { return p }
	const added, removed = inventory.Added, inventory.Removed

	tests := []struct {
		name          string
		before, after discovery.Snapshot
		want          inventory.Diff // revisions count on from those of before
	}{
		{
			name:   "nothing",
			before: snapshot(proc(10, 1, 0)), after: snapshot(proc(10, 1, 0)),
		},
		{
			name:   "a process is born",
			before: snapshot(proc(10, 1, 0)), after: snapshot(proc(9, 5, 3), proc(10, 1, 0), proc(11, 7)),
			want: inventory.Diff{
				Born:   born(proc(9, 5, 3), proc(11, 7)),
				Queues: []inventory.Change{{Revision: 2, Kind: added, Queue: entry(proc(9, 5, 3), 0, 2)}},
			},
		},
		{
			name:   "processes exit",
			before: snapshot(proc(9, 5, 3), proc(10, 1), proc(11, 1, 0, 4)), after: snapshot(proc(10, 1)),
			want: inventory.Diff{
				Gone: []gpreempt.ProcessKey{{PID: 9, Start: 5}, {PID: 11, Start: 1}},
				Queues: []inventory.Change{
					{Revision: 4, Kind: removed, Queue: entry(proc(9, 5, 3), 0, 1)},
					{Revision: 5, Kind: removed, Queue: entry(proc(11, 1, 0, 4), 0, 1)},
					{Revision: 6, Kind: removed, Queue: entry(proc(11, 1, 0, 4), 1, 1)},
				},
			},
		},
		{
			name:   "a pid is used again",
			before: snapshot(proc(10, 1, 0)), after: snapshot(proc(10, 2, 0)),
			want: inventory.Diff{
				Born: born(proc(10, 2, 0)),
				Gone: []gpreempt.ProcessKey{{PID: 10, Start: 1}},
				Queues: []inventory.Change{
					{Revision: 2, Kind: removed, Queue: entry(proc(10, 1, 0), 0, 1)},
					{Revision: 3, Kind: added, Queue: entry(proc(10, 2, 0), 0, 2)},
				},
			},
		},
		{
			name:   "queues are created and destroyed",
			before: snapshot(proc(10, 1, 1, 2, 5)), after: snapshot(proc(10, 1, 0, 2, 7)),
			want: inventory.Diff{
				Changed: born(proc(10, 1, 0, 2, 7)),
				Queues: []inventory.Change{
					{Revision: 4, Kind: added, Queue: entry(proc(10, 1, 0, 2, 7), 0, 2)},
					{Revision: 5, Kind: removed, Queue: entry(proc(10, 1, 1, 2, 5), 0, 1)},
					{Revision: 6, Kind: removed, Queue: entry(proc(10, 1, 1, 2, 5), 2, 1)},
					{Revision: 7, Kind: added, Queue: entry(proc(10, 1, 0, 2, 7), 2, 2)},
				},
			},
		},
		{
			name:   "a fact of the process changes",
			before: snapshot(proc(10, 1, 0, 1)), after: snapshot(renamed),
			want: inventory.Diff{Changed: born(renamed)},
		},
		{
			name:   "another ring under the same id",
			before: snapshot(proc(10, 1, 0, 1)), after: snapshot(grown),
			want: inventory.Diff{
				Changed: born(grown),
				Queues: []inventory.Change{
					{Revision: 3, Kind: removed, Queue: entry(proc(10, 1, 0, 1), 1, 1)},
					{Revision: 4, Kind: added, Queue: entry(grown, 1, 2)},
				},
			},
		},
		{
			name:   "another GPU under the same id",
			before: snapshot(proc(10, 1, 0, 1)), after: snapshot(moved),
			want: inventory.Diff{
				Changed: born(moved),
				Queues: []inventory.Change{
					{Revision: 3, Kind: removed, Queue: entry(proc(10, 1, 0, 1), 0, 1)},
					{Revision: 4, Kind: added, Queue: entry(moved, 0, 2)},
				},
			},
		},
		{
			name:   "another incarnation with the same facts",
			before: snapshot(first), after: snapshot(reborn),
			want: inventory.Diff{
				Changed: born(reborn),
				Queues: []inventory.Change{
					{Revision: 3, Kind: removed, Queue: entry(first, 1, 1)},
					{Revision: 4, Kind: added, Queue: entry(reborn, 1, 2)},
				},
			},
		},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			for n := range test.want.Queues {
				test.want.Queues[n].At = at(2)
			}
			v := inventory.New(64)
			v.Apply(at(1), test.before)
			before := v.Revision()
			got := v.Apply(at(2), test.after)
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("diff (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(test.after.Processes, v.Processes()); diff != "" {
				t.Errorf("processes (-want +got):\n%s", diff)
			}
			changes, err := v.Read(before, nil)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want.Queues, changes); diff != "" {
				t.Errorf("changes read (-want +got):\n%s", diff)
			}
			if got.Empty() != (test.name == "nothing") {
				t.Errorf("Empty() = %v", got.Empty())
			}
		})
	}
}

func TestQueuesKeepTheTimeTheyWereFirstSeen(t *testing.T) {
	v := inventory.New(8)
	v.Apply(at(1), snapshot(proc(10, 1, 0)))
	p := proc(10, 1, 0, 1)
	v.Apply(at(2), snapshot(p))
	v.Apply(at(3), snapshot(p))
	got, revision := v.Queues()
	want := []gpreempt.QueueEntry{entry(p, 0, 1), entry(p, 1, 2)}
	if diff := cmp.Diff(want, got); diff != "" || revision != 2 {
		t.Errorf("revision %d, want 2; queues (-want +got):\n%s", revision, diff)
	}
}

func TestInfoOfAQueueEndsWithIt(t *testing.T) {
	v := inventory.New(64)
	p := proc(10, 1, 0, 1)
	p.Incarnations = []uint64{71, 72}
	reported := []gpreempt.QueueInfo{{RingBase: 0x1000}, {Note: "two dumps could be meant"}}
	known := func(p discovery.Proc, n, seen, changed int, info gpreempt.QueueInfo) gpreempt.QueueEntry {
		e := entry(p, n, seen)
		e.Info, e.ChangedAt = info, at(changed)
		return e
	}
	check := func(when string, changes []inventory.Change, want ...gpreempt.QueueEntry) {
		t.Helper()
		got, revision := v.Queues()
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s: queues (-want +got):\n%s", when, diff)
		}
		if diff := cmp.Diff(want, v.QueuesOf(p.Key)); diff != "" {
			t.Errorf("%s: queues of the process (-want +got):\n%s", when, diff)
		}
		read, err := v.Read(revision-uint64(len(changes)), nil)
		if diff := cmp.Diff(changes, read, cmpopts.IgnoreFields(inventory.Change{}, "Revision")); diff != "" || err != nil {
			t.Errorf("%s: %v; changes (-want +got):\n%s", when, err, diff)
		}
	}
	modified := func(q gpreempt.QueueEntry) inventory.Change {
		return inventory.Change{Kind: inventory.Modified, At: q.ChangedAt, Queue: q}
	}

	v.Apply(at(1), snapshot(p))
	v.SetInfos(at(2), p, reported)
	both := []gpreempt.QueueEntry{known(p, 0, 1, 2, reported[0]), known(p, 1, 1, 2, reported[1])}
	check("reported", []inventory.Change{modified(both[0]), modified(both[1])}, both...)
	v.SetInfos(at(3), p, reported)
	check("reported again", []inventory.Change{modified(both[0]), modified(both[1])}, both...)
	v.SetInfos(at(4), p, []gpreempt.QueueInfo{{}})
	check("unknown again", []inventory.Change{modified(known(p, 0, 1, 4, gpreempt.QueueInfo{}))}, known(p, 0, 1, 4, gpreempt.QueueInfo{}), both[1])
	v.Apply(at(5), snapshot(p))
	v.SetInfos(at(5), p, reported)
	both[0] = known(p, 0, 1, 5, reported[0])
	check("reported after a change", []inventory.Change{modified(both[0])}, both...)

	reborn := p
	reborn.Incarnations = []uint64{99, 72}
	v.Apply(at(6), snapshot(reborn))
	check("one is another queue", []inventory.Change{
		{Kind: inventory.Removed, At: at(6), Queue: both[0]}, {Kind: inventory.Added, At: at(6), Queue: entry(p, 0, 6)},
	}, entry(p, 0, 6), both[1])
	late := []gpreempt.QueueInfo{{RingBase: 0x2000}, {RingBase: 0x3000}}
	v.SetInfos(at(7), p, late) // of the older list, which is right for one queue
	both[1] = known(p, 1, 1, 7, late[1])
	check("reported late", []inventory.Change{modified(both[1])}, entry(p, 0, 6), both[1])

	_, revision := v.Queues()
	successor := proc(10, 2, 0, 1)
	v.SetInfos(at(8), successor, reported) // not born yet
	v.SetInfos(at(8), proc(10, 0, 0, 1), reported)
	v.SetInfos(at(8), proc(12, 1, 0), reported)
	if got := v.Revision(); got != revision {
		t.Errorf("info of other processes led to revision %d, from %d", got, revision)
	}
	v.Apply(at(9), snapshot(successor))
	v.SetInfos(at(9), reborn, late)
	if got, _ := v.Queues(); !slices.Equal(got, []gpreempt.QueueEntry{entry(successor, 0, 9), entry(successor, 1, 9)}) {
		t.Errorf("the queues of a successor are %+v", got)
	}
}

func TestQueuesBornOnlyGrows(t *testing.T) {
	key := gpreempt.ProcessKey{PID: 10, Start: 1}
	v := inventory.New(8)
	another := proc(10, 1, 1)
	another.Queues[0].Type = gpreempt.QueueSDMA
	for n, step := range []struct {
		proc discovery.Proc
		want uint64
	}{
		{proc(10, 1), 0},
		{proc(10, 1, 0, 1), 2},
		{proc(10, 1, 1), 2},
		{another, 3},
		{proc(10, 1), 3},
		{proc(10, 1, 0), 4},
	} {
		v.Apply(at(n), snapshot(step.proc))
		if got := v.QueuesBorn(key); got != step.want {
			t.Errorf("step %d: %d born, want %d", n, got, step.want)
		}
	}
	v.Apply(at(9), snapshot(proc(10, 2, 0)))
	if got := v.QueuesBorn(key); got != 0 {
		t.Errorf("%d born in a process that left, want 0", got)
	}
}

func TestProcessIsFoundByKeyOrByPidAlone(t *testing.T) {
	v := inventory.New(8)
	p := proc(10, 7, 0)
	v.Apply(at(1), snapshot(proc(9, 1), p, proc(12, 1)))
	tests := []struct {
		key   gpreempt.ProcessKey
		found bool
	}{
		{gpreempt.ProcessKey{PID: 10, Start: 7}, true},
		{gpreempt.ProcessKey{PID: 10}, true},
		{gpreempt.ProcessKey{PID: 10, Start: 6}, false},
		{gpreempt.ProcessKey{PID: 11}, false},
		{gpreempt.ProcessKey{PID: 13}, false},
	}
	for _, test := range tests {
		want := discovery.Proc{}
		if test.found {
			want = p
		}
		got, found := v.Process(test.key)
		if diff := cmp.Diff(want, got); diff != "" || found != test.found {
			t.Errorf("%v: found %v, want %v (-want +got):\n%s", test.key, found, test.found, diff)
		}
	}
}

func TestGPUsAreThoseSet(t *testing.T) {
	v := inventory.New(1)
	want := []gpreempt.GPU{{ID: 63420, Node: 2}}
	v.SetGPUs(want)
	if diff := cmp.Diff(want, v.GPUs()); diff != "" {
		t.Errorf("GPUs (-want +got):\n%s", diff)
	}
}

func TestReadRefusesRevisionsItCannotContinueFrom(t *testing.T) {
	v := inventory.New(3)
	if changes, err := v.Read(0, nil); err != nil || len(changes) != 0 {
		t.Fatalf("the empty inventory: %v, %v", changes, err)
	}
	v.Apply(at(1), snapshot(proc(10, 1, 0, 1, 2, 3, 4))) // keeps 3..5
	for after, refused := range map[uint64]bool{0: true, 1: true, 2: false, 4: false, 5: false, 6: true, ^uint64(0): true} {
		changes, err := v.Read(after, nil)
		switch {
		case refused && (!errors.Is(err, inventory.ErrCompacted) || gpreempt.ReasonOf(err) != gpreempt.ReasonRevisionCompacted):
			t.Errorf("Read(%d): error %v, want ErrCompacted", after, err)
		case !refused && (err != nil || len(changes) != int(5-after)):
			t.Errorf("Read(%d): %d changes, error %v; want %d", after, len(changes), err, 5-after)
		}
	}
}

func TestWaitReturnsWithTheNextChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v := inventory.New(8)
		woken := make(chan error, 2)
		for range cap(woken) {
			go func() { woken <- v.Wait(t.Context(), 1) }()
		}
		synctest.Wait()
		v.Apply(at(1), snapshot(proc(10, 1, 0)))
		v.Apply(at(2), snapshot(proc(10, 1, 0)))
		synctest.Wait()
		if len(woken) != 0 {
			t.Fatal("Wait(1) returned at revision 1")
		}
		p := proc(10, 1, 0)
		v.SetInfos(at(2), p, make([]gpreempt.QueueInfo, 1))
		synctest.Wait()
		if len(woken) != 0 {
			t.Fatal("Wait(1) returned without a change")
		}
		v.SetInfos(at(3), p, []gpreempt.QueueInfo{{RingBase: 1}})
		for range cap(woken) {
			if err := <-woken; err != nil {
				t.Error(err)
			}
		}
		if err := v.Wait(t.Context(), 1); err != nil {
			t.Errorf("Wait behind the inventory: %v", err)
		}

		stop := errors.New("the stream ended")
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(stop)
		if err := v.Wait(ctx, 2); !errors.Is(err, stop) {
			t.Errorf("Wait: %v, want the cause of its context", err)
		}
	})
}

func TestConcurrentReadersSeeWholeScans(t *testing.T) {
	const scans = 500
	v := inventory.New(6 * scans)
	pair := []discovery.Proc{proc(10, 1, 0, 1), proc(11, 1)}
	swapped := []discovery.Proc{proc(10, 1), proc(11, 1, 0, 1)}
	v.Apply(at(0), snapshot(pair...))
	var wg sync.WaitGroup
	wg.Go(func() {
		for n := range scans {
			pair, swapped = swapped, pair
			v.Apply(at(n), snapshot(pair...))
			for _, p := range pair {
				v.SetInfos(at(n), p, []gpreempt.QueueInfo{{RingBase: 1}, {RingBase: 1}})
			}
		}
	})
	for range 3 {
		wg.Go(func() {
			for after := uint64(0); after < 2+6*scans; {
				if err := v.Wait(t.Context(), after); err != nil {
					t.Error(err)
					return
				}
				queues, revision := v.Queues()
				// Each scan has 4 changes, 2 queues removed and 2 added, and then 2 change their info.
				if len(queues) != 2 || queues[0].Process != queues[1].Process || queues[0].Info != queues[1].Info ||
					revision%6 != 0 && revision%6 != 2 {
					t.Errorf("revision %d has queues %v", revision, queues)
					return
				}
				v.Process(queues[0].Process)
				v.QueuesBorn(queues[0].Process)
				v.Processes()
				after = revision
			}
		})
	}
	wg.Wait()
}

func BenchmarkApplyUnchanged(b *testing.B) {
	var procs []discovery.Proc
	for n := range 1000 {
		procs = append(procs, proc(int32(n+1), 1, 0, 1, 2, 3, 4))
	}
	v := inventory.New(16384)
	v.Apply(at(0), snapshot(procs...))
	again := snapshot(slices.Clone(procs)...)
	b.ReportAllocs()
	for b.Loop() {
		if d := v.Apply(at(1), again); !d.Empty() {
			b.Fatal("something changed")
		}
	}
}
