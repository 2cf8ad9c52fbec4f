package inventory_test

import (
	"errors"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// drawSnapshot gives any host of few pids, starts, ids and facts, so that they
// meet again.
func drawSnapshot(t *rapid.T) discovery.Snapshot {
	var s discovery.Snapshot
	for pid := range int32(4) {
		if !rapid.Bool().Draw(t, "lives") {
			continue
		}
		key := gpreempt.ProcessKey{PID: pid + 1, Start: rapid.Uint64Range(1, 2).Draw(t, "start")}
		p := discovery.Proc{Process: gpreempt.Process{Key: key, UID: rapid.Uint32Range(0, 1).Draw(t, "uid")}}
		for id := range uint32(4) {
			if !rapid.Bool().Draw(t, "queue") {
				continue
			}
			p.Queues = append(p.Queues, gpreempt.Queue{
				Process: key, ID: id, GPU: gpreempt.GPUID(rapid.IntRange(1, 2).Draw(t, "gpu")),
			})
			p.Incarnations = append(p.Incarnations, rapid.Uint64Range(1, 2).Draw(t, "incarnation"))
		}
		s.Processes = append(s.Processes, p)
	}
	return s
}

// fold applies changes to a set of queues in the order of Queues.
func fold(t *rapid.T, queues []inventory.QueueEntry, changes []inventory.Change) []inventory.QueueEntry {
	queues = slices.Clone(queues)
	for _, c := range changes {
		n, found := slices.BinarySearchFunc(queues, c.Queue, func(a, b inventory.QueueEntry) int {
			if d := a.Process.Compare(b.Process); d != 0 {
				return d
			}
			return int(a.ID) - int(b.ID)
		})
		switch c.Kind {
		case inventory.Added:
			if found {
				t.Fatalf("%+v added twice", c)
			}
			queues = slices.Insert(queues, n, c.Queue)
		case inventory.Removed:
			if !found || queues[n] != c.Queue {
				t.Fatalf("%+v removed, but there is none", c)
			}
			queues = slices.Delete(queues, n, n+1)
		default:
			t.Fatalf("%+v: no scan modifies a queue", c)
		}
	}
	return queues
}

func TestFoldingTheChangesFromAnyKeptRevisionGivesTheQueues(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		capacity := rapid.IntRange(1, 40).Draw(t, "capacity")
		v := inventory.New(capacity)
		type state struct {
			revision uint64
			queues   []inventory.QueueEntry
		}
		states := []state{{}}
		born := map[gpreempt.ProcessKey]uint64{}
		for n := range rapid.IntRange(1, 12).Draw(t, "scans") {
			s := drawSnapshot(t)
			d := v.Apply(at(n), s)
			for _, c := range d.Queues {
				if c.Kind == inventory.Added {
					born[c.Queue.Process]++
				}
			}
			for _, key := range d.Gone {
				delete(born, key)
			}
			for _, p := range s.Processes {
				if got := v.QueuesBorn(p.Key); got != born[p.Key] {
					t.Fatalf("%v: %d queues born, want %d", p.Key, got, born[p.Key])
				}
			}
			queues, revision := v.Queues()
			states = append(states, state{revision, queues})
		}
		now := states[len(states)-1]
		for _, from := range states {
			changes, err := v.Read(from.revision, nil)
			if now.revision-from.revision > uint64(capacity) {
				if !errors.Is(err, inventory.ErrCompacted) {
					t.Fatalf("Read(%d) at %d with %d kept: error %v, want ErrCompacted", from.revision, now.revision, capacity, err)
				}
				continue
			}
			if err != nil {
				t.Fatal(err)
			}
			for n, c := range changes {
				if c.Revision != from.revision+uint64(n)+1 {
					t.Fatalf("revision %d is the %d-th after %d", c.Revision, n+1, from.revision)
				}
			}
			got := fold(t, from.queues, changes)
			if len(got) == 0 {
				got = nil
			}
			if diff := cmp.Diff(now.queues, got); diff != "" {
				t.Fatalf("from revision %d (-queues +folded):\n%s", from.revision, diff)
			}
		}
	})
}

// What Diff says of processes is what the two snapshots say.
func TestDiffAccountsForEveryProcess(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		before, after := drawSnapshot(t), drawSnapshot(t)
		v := inventory.New(64)
		v.Apply(at(1), before)
		got := v.Apply(at(2), after)
		got.Queues = nil

		var want inventory.Diff
		find := func(s discovery.Snapshot, key gpreempt.ProcessKey) (discovery.Proc, bool) {
			n := slices.IndexFunc(s.Processes, func(p discovery.Proc) bool { return p.Key == key })
			if n < 0 {
				return discovery.Proc{}, false
			}
			return s.Processes[n], true
		}
		for _, p := range before.Processes {
			if _, stays := find(after, p.Key); !stays {
				want.Gone = append(want.Gone, p.Key)
			}
		}
		for _, p := range after.Processes {
			if old, stayed := find(before, p.Key); !stayed {
				want.Born = append(want.Born, p)
			} else if !cmp.Equal(old, p) {
				want.Changed = append(want.Changed, p)
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatalf("diff (-want +got):\n%s", diff)
		}
	})
}
