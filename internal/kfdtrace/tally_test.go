package kfdtrace

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestPercentilesAreNearestRankWithinOnePercent(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		list := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) time.Duration {
			top := rapid.SampledFrom([]int64{10, 300, 1e6, 1e12, math.MaxInt64}).Draw(t, "top")
			return time.Duration(rapid.Int64Range(0, top).Draw(t, "took"))
		}), 1, 300).Draw(t, "durations")
		var h histogram
		for _, d := range list {
			h.add(d)
		}
		slices.Sort(list)
		for _, p := range []float64{0.1, 50, 95, 99, 100} {
			want := list[int(math.Ceil(p/100*float64(len(list))))-1]
			got := h.percentile(p)
			if got < want || float64(got) > float64(want)*1.008 {
				t.Fatalf("p%v is %d, want %d or at most 0.8 %% more", p, got, want)
			}
		}
		if got := h.latency(); got.Count != uint64(len(list)) || got.Min != list[0] || got.Max != list[len(list)-1] {
			t.Fatalf("got %+v of %v", got, list)
		}
	})
}

func TestNoDurationsHaveNoLatency(t *testing.T) {
	var h histogram
	if diff := cmp.Diff(Latency{}, h.latency()); diff != "" {
		t.Error(diff)
	}
}

// Threads interleave, functions recurse: each end finds its beginning.
func TestProbesArePairedWithinTheirThread(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		tally := newTally()
		names := []string{"a", "b", "c"}
		for _, n := range names {
			tally.enter["enter_"+n], tally.leave["leave_"+n] = n, n
		}
		want := map[string]*histogram{}
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
				want[last.name] = &histogram{}
			}
			want[last.name].add(now - last.at)
			stacks[pid] = stack[:len(stack)-1]
		}
		running := uint64(0)
		for _, s := range stacks {
			running += uint64(len(s))
		}
		tally.tear()
		torn := uint64(0)
		for _, f := range tally.functionCalls(nil) {
			torn += f.Torn
			if h := want[f.Name]; h != nil {
				if diff := cmp.Diff(h.latency(), f.Latency); diff != "" {
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
	tally := newTally()
	tally.enter["enter_f"], tally.leave["leave_f"] = "f", "f"
	for _, l := range []line{
		{cpu: 0, at: 10, name: "enter_f"},
		{cpu: 1, at: 20, name: "enter_f"},
		{cpu: 0, at: 40, name: "leave_f"},
		{cpu: 1, at: 45, name: "leave_f"},
	} {
		l.kind = kindEvent
		tally.add(l)
	}
	if diff := cmp.Diff([]FunctionCalls{exactly("f", GroupOther, 30, 25)}, tally.functionCalls(nil)); diff != "" {
		t.Error(diff)
	}
}

func TestQueuesThatComeAndGoAreTold(t *testing.T) {
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
	var n nursery
	n.look(1, []discovery.Proc{process(10, 1, []uint64{5, 6}, 0, 1)})
	n.look(2, []discovery.Proc{process(10, 1, []uint64{5, 6}, 0, 1)})
	n.look(3, []discovery.Proc{process(10, 1, []uint64{5, 8}, 0, 1), process(11, 1, nil, 0)}) // id 1 was used again
	n.look(4, []discovery.Proc{process(11, 2, nil, 0)})                                       // the pid was used again
	want := []QueueChange{
		change(1, QueuePresent, 10, 0), change(1, QueuePresent, 10, 1),
		change(3, QueueBorn, 10, 1), change(3, QueueBorn, 11, 0), change(3, QueueGone, 10, 1),
		change(4, QueueBorn, 11, 0), change(4, QueueGone, 10, 0), change(4, QueueGone, 10, 1), change(4, QueueGone, 11, 0),
	}
	if diff := cmp.Diff(want, n.changes); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
