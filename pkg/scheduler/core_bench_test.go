package scheduler

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// rig is a core with targets to announce over.
type rig struct {
	core    *Core
	now     Time
	lease   LeaseID
	request LeaseRequested
	events  []timedEvent // what Step got, when recorded
	record  bool
	steps   []time.Duration // how long each Step took, when measured
	clock   func() time.Duration
	todo    []Action
}

// timedEvent is an event and when it came.
type timedEvent struct {
	now Time
	Event
}

// newRig has some targets on the 8 GPUs, each with queues on as many GPUs as said
// and the rest spread, and some more on GPU 9, which no lease covers.
func newRig(targets, gpusEach, elsewhere int, covered ...gpreempt.GPUID) *rig {
	p, _ := PresetByName("strict")
	p.Linger, p.AttachAfter = 0, 0
	r := &rig{core: New(p, Limits{LeasesPerClient: 10, LeasesPerUser: 10, LeasesTotal: 10})}
	for id := range gpreempt.GPUID(9) {
		r.core.Step(0, GPUAdded{GPU: id + 1})
	}
	r.request = LeaseRequested{Client: ClientID{PID: 1}, GPUs: covered, Priority: 11, TTL: time.Second, MaxWait: time.Second}
	for range endedKept { // as many as are remembered
		r.round()
	}
	seen := func(i int, gpus []gpreempt.GPUID) {
		key := gpreempt.ProcessKey{PID: int32(i + 1), Start: 1}
		r.core.Step(r.now, TargetSeen{Target: key, Class: gpreempt.Offline, GPUs: gpus, Queues: 1})
		r.core.Step(r.now, Attached{Target: key})
	}
	for i := range targets {
		var gpus []gpreempt.GPUID
		for j := range gpusEach {
			gpus = append(gpus, gpreempt.GPUID((i+j)%8+1))
		}
		slices.Sort(gpus)
		seen(i, gpus)
	}
	for i := range elsewhere {
		seen(targets+i, []gpreempt.GPUID{9})
	}
	for range 3 { // slices have grown
		r.round()
	}
	return r
}

func (r *rig) step(ev Event) []Action {
	if r.record {
		r.events = append(r.events, timedEvent{r.now, ev})
	}
	if r.clock == nil {
		return r.core.Step(r.now, ev)
	}
	begin := r.clock()
	actions := r.core.Step(r.now, ev)
	r.steps = append(r.steps, r.clock()-begin)
	return actions
}

// round is one announcement from beginning to end: suspend, results, complete,
// resume, results. It returns the number of targets it moved.
func (r *rig) round() int {
	r.lease++
	r.request.Lease = r.lease
	moved := r.move(r.request)
	r.move(LeaseFinished{r.lease, EndCompleted})
	return moved
}

func (r *rig) move(ev Event) (moved int) {
	r.now += time.Millisecond
	r.todo = append(r.todo[:0], r.step(ev)...)
	for i := range r.todo {
		switch a := &r.todo[i]; a.Kind {
		case ActSuspend:
			moved++
			r.step(Suspended{Target: a.Target, Seq: a.Seq, Took: 400 * time.Microsecond})
		case ActResume:
			moved++
			r.step(Resumed{Target: a.Target, Seq: a.Seq, Took: 350 * time.Microsecond})
		}
	}
	return moved
}

var allEight = []gpreempt.GPUID{1, 2, 3, 4, 5, 6, 7, 8}

// BenchmarkRound is a whole announcement: each target covered is suspended and
// resumed. Per Step: the median, and that of the announcement itself.
func BenchmarkRound(b *testing.B) {
	for _, c := range []struct {
		name                        string
		targets, gpusEach, elswhere int
		covered                     []gpreempt.GPUID
	}{
		{"1-target", 1, 1, 0, allEight[:1]},
		{"64-targets-lease-on-1-of-8-gpus", 64, 1, 0, allEight[:1]},
		{"64-targets-lease-on-8-gpus", 64, 1, 0, allEight},
		{"64-targets-on-8-gpus-each", 64, 8, 0, allEight},
		{"1-target-1000-elsewhere", 1, 1, 1000, allEight[:1]},
	} {
		b.Run(c.name, func(b *testing.B) {
			r := newRig(c.targets, c.gpusEach, c.elswhere, c.covered...)
			b.ReportAllocs()
			moved := 0
			for b.Loop() {
				moved = r.round()
			}
			b.StopTimer()
			r.measure(b, moved)
		})
	}
}

// measure reports medians over some more rounds.
func (r *rig) measure(b *testing.B, moved int) {
	start := time.Now()
	r.clock = func() time.Duration { return time.Since(start) }
	var announce []time.Duration
	for range 300 {
		first := len(r.steps)
		r.round()
		announce = append(announce, r.steps[first])
	}
	r.clock = nil
	slices.Sort(r.steps)
	slices.Sort(announce)
	b.ReportMetric(float64(r.steps[len(r.steps)/2]), "p50-ns/step")
	b.ReportMetric(float64(announce[len(announce)/2]), "p50-ns/announce")
	b.ReportMetric(float64(moved), "targets")
}

// ahead makes the steps of whole announcements one by one: the events are those that
// another core had, made before, so that what is measured is Step alone.
type ahead struct {
	*rig
	twin *rig
}

func newAhead(targets int) *ahead {
	r := &ahead{newRig(targets, 1, 0, allEight...), newRig(targets, 1, 0, allEight...)}
	r.twin.record = true
	return r
}

// more makes the events of some rounds.
func (r *ahead) more() []timedEvent {
	clear(r.twin.events)
	r.twin.events = r.twin.events[:0]
	for range 100 {
		r.twin.round()
	}
	return r.twin.events
}

// BenchmarkStep is one Step of an announcement over 64 targets on 8 GPUs, from its
// beginning until they run again, and what Step itself allocates.
func BenchmarkStep(b *testing.B) {
	r := newAhead(64)
	var steps []time.Duration
	var events []timedEvent
	b.ReportAllocs()
	for b.Loop() {
		if len(events) == 0 {
			b.StopTimer()
			events = r.more()
			steps = slices.Grow(steps, len(events))
			b.StartTimer()
		}
		began := time.Now()
		r.core.Step(events[0].now, events[0].Event)
		steps = append(steps, time.Since(began))
		events = events[1:]
	}
	slices.Sort(steps)
	b.ReportMetric(float64(steps[len(steps)/2]), "p50-ns/step")
}

// TestAllocationsDoNotGrowWithTargets: what a round allocates is per event (an
// Event is an interface), not per target there is.
func TestAllocationsDoNotGrowWithTargets(t *testing.T) {
	perRound := map[string]float64{}
	perEvent := func(targets, elsewhere int, covered ...gpreempt.GPUID) float64 {
		r := newRig(targets, 1, elsewhere, covered...)
		events := 0
		allocs := testing.AllocsPerRun(200, func() { events = 2 + 2*r.round() })
		if want := 2 + 2*targets; events != want {
			t.Errorf("a round over %d targets has %d events, want %d", targets, events, want)
		}
		perRound[fmt.Sprintf("%d+%d", targets, elsewhere)] = allocs
		return allocs / float64(events)
	}
	for _, elsewhere := range []int{0, 64, 512} {
		perEvent(1, elsewhere, 1)
	}
	t.Log("allocations per round, by targets covered + elsewhere:", perRound)
	if perRound["1+0"] > 6 || perRound["1+64"] > perRound["1+0"] || perRound["1+512"] > perRound["1+0"] {
		t.Errorf("allocations per round: %v", perRound)
	}
	for _, targets := range []int{1, 64, 512} {
		if n := perEvent(targets, 0, allEight...); n > 1.05 {
			t.Errorf("%d targets: %.2f allocations per event, want the event itself", targets, n)
		}
	}
}
