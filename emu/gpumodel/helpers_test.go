package gpumodel

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	us = time.Microsecond
	ms = time.Millisecond
)

// hws is a small GPU with round costs and no jitter.
func hws() Spec {
	s, _ := PresetByName("mi300x")
	s.Costs = Costs{Unmap: 100 * us, Map: 50 * us, Save: 80 * us, Restore: 40 * us}
	return s
}

// mes is its counterpart that schedules queue by queue.
func mes() Spec {
	s, _ := PresetByName("rx7900xtx")
	s.Costs = Costs{RemoveQueue: 30 * us, AddQueue: 20 * us, Save: 80 * us, Restore: 40 * us}
	return s
}

// rig is a machine under test; a call that fails ends the test.
type rig struct {
	testing.TB
	*Lab
}

func newRig(t testing.TB, spec Spec, gpus int) rig {
	t.Helper()
	return rig{t, NewLab(spec, gpus, 1)}
}

func (r rig) ok(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

// start returns a process with queues compute queues on each of gpus, settled.
func (r rig) start(comm string, queues int, gpus ...int) gpreempt.ProcessKey {
	r.Helper()
	key, err := r.StartProcess(ProcSpec{Comm: comm})
	r.ok(err)
	for _, g := range gpus {
		for range queues {
			r.queue(key, g, gpreempt.QueueCompute)
		}
	}
	r.rest()
	return key
}

func (r rig) queue(key gpreempt.ProcessKey, gpu int, typ gpreempt.QueueType) uint32 {
	r.Helper()
	id, err := r.CreateQueue(key, r.facts[gpu].ID, typ, 64)
	r.ok(err)
	return id
}

// rest runs until nothing is left to happen.
func (r rig) rest() {
	for next, ok := r.Next(); ok; next, ok = r.Next() {
		r.AdvanceTo(next)
	}
}

// kernel submits a kernel and gives where its times will be found.
func (r rig) kernel(key gpreempt.ProcessKey, queue uint32, d time.Duration, occupancy float64) *span {
	r.Helper()
	return r.packet(key, queue, Packet{Duration: d, Occupancy: occupancy})
}

// span is when a packet started and ended; calls is how often Done was called.
type span struct {
	Started, Ended time.Duration
	Calls          int
}

func (r rig) packet(key gpreempt.ProcessKey, queue uint32, k Packet) *span {
	r.Helper()
	s := &span{}
	k.Done = func(started, ended time.Duration) { *s = span{started, ended, s.Calls + 1} }
	r.ok(r.Submit(key, queue, k))
	return s
}

func (r rig) ran(s *span, started, ended time.Duration) {
	r.Helper()
	if diff := cmp.Diff(span{started, ended, 1}, *s); diff != "" {
		r.Errorf("packet (-want +got):\n%s", diff)
	}
}

func (r rig) suspend(key gpreempt.ProcessKey, ids ...uint32) *clock {
	c, done := r.clock()
	r.Suspend(key, ids, done)
	return c
}

func (r rig) resume(key gpreempt.ProcessKey) *clock {
	c, done := r.clock()
	r.Resume(key, nil, done)
	return c
}

func (r rig) counters(key gpreempt.ProcessKey) ProcessCounters {
	r.Helper()
	c, ok := r.ProcessCounters(key)
	if !ok {
		r.Fatalf("no counters of %v", key)
	}
	return c
}
