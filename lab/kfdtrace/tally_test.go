package kfdtrace

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/gpreempt/gpreempt/internal/stat/histogram"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// tallyOf follows functions by events of their own name.
func tallyOf(names ...string) *tally {
	t := newTally()
	for _, n := range names {
		t.follow(n, function{name: n, group: GroupOther})
	}
	return t
}

// Threads interleave, functions recurse: each end is paired with its beginning.
func TestCallsArePairedWithinTheirThread(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		names := []string{"a", "b", "c"}
		tally := tallyOf(names...)
		want := map[string]*histogram.Histogram{}
		type open struct {
			name string
			at   time.Duration
		}
		stacks := map[int][]open{}
		random := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		now := time.Duration(0)
		for range 500 {
			now += time.Duration(random.IntN(1000))
			pid := 1 + random.IntN(3)
			stack := stacks[pid]
			if random.IntN(2) == 0 || len(stack) == 0 {
				name := names[random.IntN(3)]
				tally.add(line{kind: kindEvent, pid: pid, cpu: random.IntN(8), at: now, name: "enter_" + name})
				stacks[pid] = append(stack, open{name, now})
				continue
			}
			last := stack[len(stack)-1]
			tally.add(line{kind: kindEvent, pid: pid, cpu: random.IntN(8), at: now, name: "leave_" + last.name})
			if want[last.name] == nil {
				want[last.name] = &histogram.Histogram{}
			}
			want[last.name].Add(uint64(now - last.at))
			stacks[pid] = stack[:len(stack)-1]
		}
		running := uint64(0)
		for _, s := range stacks {
			running += uint64(len(s))
		}
		tally.tear()
		torn := uint64(0)
		for _, f := range tally.functionCalls() {
			torn += f.Torn
			if h := want[f.Name]; h != nil {
				if diff := cmp.Diff(latency(h), f.Latency); diff != "" {
					t.Fatalf("%s (-want +got):\n%s", f.Name, diff)
				}
			}
		}
		if torn != running {
			t.Fatalf("%d torn calls, want %d", torn, running)
		}
	})
}

func TestIdleThreadsOfCPUsAreDifferentThreads(t *testing.T) {
	tally := tallyOf("f")
	for _, l := range []line{
		{cpu: 0, at: 10, name: "enter_f"},
		{cpu: 1, at: 20, name: "enter_f"},
		{cpu: 0, at: 40, name: "leave_f"},
		{cpu: 1, at: 45, name: "leave_f"},
	} {
		l.kind = kindEvent
		tally.add(l)
	}
	if diff := cmp.Diff([]FunctionCalls{exactly("f", GroupOther, 30, 25)}, tally.functionCalls()); diff != "" {
		t.Error(diff)
	}
}

func TestFunctionsAreListedByGroupAndTotalTime(t *testing.T) {
	tally := newTally()
	for _, f := range []function{{name: "fast", group: GroupQueue}, {name: "slow", group: GroupQueue}, {name: "mqd", group: GroupMQD}} {
		tally.follow(f.name, f)
	}
	for at, name := range []string{"enter_mqd", "enter_slow", "enter_fast", "leave_fast", "leave_slow", "leave_mqd"} {
		tally.add(line{kind: kindEvent, pid: 1, at: time.Duration(at), name: name})
	}
	want := []FunctionCalls{exactly("slow", GroupQueue, 3), exactly("fast", GroupQueue, 1), exactly("mqd", GroupMQD, 5)}
	if diff := cmp.Diff(want, tally.functionCalls()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestQueueChangesAreReported(t *testing.T) {
	process := func(pid int32, start uint64, incarnations []uint64, ids ...uint32) discovery.Proc {
		p := discovery.Proc{Process: gpreempt.Process{
			Key: gpreempt.ProcessKey{PID: pid, Start: start}, Comm: "train", NamespacePIDs: []int32{7},
			Cgroup: gpreempt.Cgroup{ContainerID: "c0ffee"},
		}, Incarnations: incarnations}
		for _, id := range ids {
			p.Queues = append(p.Queues, gpreempt.Queue{Process: p.Key, ID: id, GPU: 9})
		}
		return p
	}
	change := func(at time.Duration, word string, pid int32, id uint32) QueueChange {
		return QueueChange{
			At: at, Change: word, PID: pid, Comm: "train", NamespacePIDs: []int32{7}, ContainerID: "c0ffee", QueueID: id, GPU: 9,
			Type: gpreempt.QueueType(0).String(),
		}
	}
	var tracker queueTracker
	tracker.update(1, []discovery.Proc{process(10, 1, []uint64{5, 6}, 0, 1)})
	tracker.update(2, []discovery.Proc{process(10, 1, []uint64{5, 6}, 0, 1)})
	tracker.update(3, []discovery.Proc{process(10, 1, []uint64{5, 8}, 0, 1), process(11, 1, nil, 0)}) // id 1 was reused
	tracker.update(4, []discovery.Proc{process(11, 2, nil, 0)})                                       // the pid was reused
	want := []QueueChange{
		change(1, QueuePresent, 10, 0), change(1, QueuePresent, 10, 1),
		change(3, QueueCreated, 10, 1), change(3, QueueCreated, 11, 0), change(3, QueueDestroyed, 10, 1),
		change(4, QueueCreated, 11, 0), change(4, QueueDestroyed, 10, 0), change(4, QueueDestroyed, 10, 1), change(4, QueueDestroyed, 11, 0),
	}
	if diff := cmp.Diff(want, tracker.changes); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
