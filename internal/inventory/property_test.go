package inventory_test

import (
	"context"
	"errors"
	"maps"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// drawSnapshot returns any host of few pids, starts, ids and facts, so that they
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

// drawInfos returns something to say of the queues of p, of few things, so that it is
// often what was said before; now and then of fewer or more queues than there are.
func drawInfos(t *rapid.T, p discovery.Proc) []gpreempt.QueueInfo {
	infos := make([]gpreempt.QueueInfo, rapid.IntRange(max(len(p.Queues)-1, 0), len(p.Queues)+1).Draw(t, "infos"))
	for n := range infos {
		infos[n].RingBase = rapid.Uint64Range(0, 2).Draw(t, "ring")
	}
	return infos
}

// compareQueues orders queues as Queues does.
func compareQueues(a, b gpreempt.QueueEntry) int {
	if d := a.Process.Compare(b.Process); d != 0 {
		return d
	}
	return int(a.ID) - int(b.ID)
}

// fold applies changes to a set of queues in the order of Queues.
func fold(t *rapid.T, queues []gpreempt.QueueEntry, changes []inventory.Change) []gpreempt.QueueEntry {
	queues = slices.Clone(queues)
	for _, c := range changes {
		n, found := slices.BinarySearchFunc(queues, c.Queue, compareQueues)
		switch c.Kind {
		case inventory.Added:
			if found || c.Queue.Info != (gpreempt.QueueInfo{}) || !c.Queue.ChangedAt.IsZero() {
				t.Fatalf("%+v added twice, or with something known of it", c)
			}
			queues = slices.Insert(queues, n, c.Queue)
		case inventory.Modified:
			if !found || queues[n].Queue != c.Queue.Queue || queues[n].FirstSeen != c.Queue.FirstSeen || queues[n].Info == c.Queue.Info {
				t.Fatalf("%+v modified, but it is another queue, or nothing of it changed", c)
			}
			queues[n] = c.Queue
		case inventory.Removed:
			if !found || queues[n] != c.Queue {
				t.Fatalf("%+v removed, but it does not exist", c)
			}
			queues = slices.Delete(queues, n, n+1)
		}
	}
	return queues
}

// model is what an inventory is to hold, kept in the plainest way: each queue under
// everything that makes it the one it is.
type model struct {
	processes []discovery.Proc
	queues    map[identity]gpreempt.QueueEntry
	born      map[gpreempt.ProcessKey]uint64
}

type identity struct {
	gpreempt.Queue
	incarnation uint64
}

func (m *model) apply(n int, s discovery.Snapshot) {
	queues := map[identity]gpreempt.QueueEntry{}
	born := map[gpreempt.ProcessKey]uint64{}
	for _, p := range s.Processes {
		born[p.Key] = m.born[p.Key]
		for q, queue := range p.Queues {
			id := identity{queue, p.Incarnations[q]}
			entry, stayed := m.queues[id]
			if !stayed {
				entry = gpreempt.QueueEntry{Queue: queue, FirstSeen: at(n)}
				born[p.Key]++
			}
			queues[id] = entry
		}
	}
	m.processes, m.queues, m.born = s.Processes, queues, born
}

func (m *model) setInfos(n int, p discovery.Proc, infos []gpreempt.QueueInfo) {
	for q, queue := range p.Queues[:min(len(p.Queues), len(infos))] {
		id := identity{queue, p.Incarnations[q]}
		if entry, lives := m.queues[id]; lives && entry.Info != infos[q] {
			entry.Info, entry.ChangedAt = infos[q], at(n)
			m.queues[id] = entry
		}
	}
}

func (m *model) list() []gpreempt.QueueEntry {
	return slices.SortedFunc(maps.Values(m.queues), compareQueues)
}

// Whatever scans and infos come, the inventory holds what the model holds, and the
// changes from any kept revision on lead to it.
func TestFoldingTheChangesFromAnyKeptRevisionGivesTheQueues(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		capacity := rapid.IntRange(1, 40).Draw(t, "capacity")
		v := inventory.New(capacity)
		m := &model{}
		type state struct {
			revision uint64
			queues   []gpreempt.QueueEntry
		}
		states := []state{{}}
		var seen []discovery.Proc // living and dead
		type given struct{ now, then []gpreempt.QueueEntry }
		var out []given // what was given out, and a copy
		for n := range rapid.IntRange(1, 16).Draw(t, "steps") {
			before := v.Revision()
			if len(seen) == 0 || rapid.Bool().Draw(t, "scan") {
				s := drawSnapshot(t)
				seen = append(seen, s.Processes...)
				v.Apply(at(n), s)
				m.apply(n, s)
			} else {
				p := rapid.SampledFrom(seen).Draw(t, "process")
				infos := drawInfos(t, p)
				v.SetInfos(at(n), p, infos)
				m.setInfos(n, p, infos)
			}
			ctx, cancel := context.WithCancel(t.Context())
			if v.Revision() == before {
				cancel()
			}
			if err := v.Wait(ctx, before); (err == nil) != (v.Revision() > before) {
				t.Fatalf("Wait(%d) at %d: %v", before, v.Revision(), err)
			}
			cancel()
			queues, revision := v.Queues()
			if want := m.list(); !slices.Equal(want, queues) {
				t.Fatalf("step %d: queues (-want +got):\n%s", n, cmp.Diff(want, queues))
			}
			for _, p := range seen {
				if got := v.QueuesBorn(p.Key); got != m.born[p.Key] {
					t.Fatalf("%v: %d queues born, want %d", p.Key, got, m.born[p.Key])
				}
				of := slices.DeleteFunc(m.list(), func(q gpreempt.QueueEntry) bool { return q.Process != p.Key })
				got := v.QueuesOf(p.Key)
				if !slices.Equal(of, got) {
					t.Fatalf("queues of %v (-want +got):\n%s", p.Key, cmp.Diff(of, got))
				}
				out = append(out, given{got, of})
			}
			states = append(states, state{revision, queues})
		}
		for _, g := range out {
			if !slices.Equal(g.now, g.then) {
				t.Fatalf("what was given out became something else (-then +now):\n%s", cmp.Diff(g.then, g.now))
			}
		}
		if diff := cmp.Diff(m.processes, v.Processes(), cmpopts.EquateEmpty()); diff != "" {
			t.Fatalf("processes (-want +got):\n%s", diff)
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
			if got := fold(t, from.queues, changes); !slices.Equal(now.queues, got) {
				t.Fatalf("from revision %d (-queues +folded):\n%s", from.revision, cmp.Diff(now.queues, got))
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
