package gpumodel

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestKernelsOfAQueueRunInOrderOneByOne(t *testing.T) {
	r := newRig(t, hws(), 1)
	a := r.start("a", 1, 0)
	r.AdvanceTo(ms)
	first := r.kernel(a, 0, 2*ms, 0.1)
	second := r.kernel(a, 0, 3*ms, 0.1)
	r.rest()
	r.ran(first, 1*ms, 3*ms)
	r.ran(second, 3*ms, 6*ms)
}

func TestOverlapStartsBeforeTheOneAheadHasEnded(t *testing.T) {
	r := newRig(t, hws(), 1)
	a := r.start("a", 1, 0)
	r.AdvanceTo(ms)
	first := r.kernel(a, 0, 4*ms, 0.5)
	over := r.packet(a, 0, Packet{Duration: 1 * ms, Occupancy: 0.5, Overlap: true})
	barrier := r.kernel(a, 0, 1*ms, 0.5)
	r.AdvanceTo(3 * ms)
	// The read index stays at the oldest packet that has not ended.
	if n, _, err := r.QueueBacklog(a, 0); err != nil || n != 3 {
		t.Errorf("backlog = %d, %v; want 3 packets", n, err)
	}
	r.rest()
	r.ran(first, 1*ms, 5*ms)
	r.ran(over, 1*ms, 2*ms)
	r.ran(barrier, 5*ms, 6*ms)
}

func TestKernelsShareTheGPUWhenTheyDoNotFit(t *testing.T) {
	r := newRig(t, hws(), 1)
	a := r.start("a", 1, 0)
	b := r.start("b", 1, 0)
	r.AdvanceTo(ms)
	// Alone for 1 ms, at half speed for 6 ms, then alone again.
	long := r.kernel(a, 0, 6*ms, 1)
	r.AdvanceTo(2 * ms)
	short := r.kernel(b, 0, 3*ms, 1)
	r.rest()
	r.ran(short, 2*ms, 8*ms)
	r.ran(long, 1*ms, 10*ms)
}

func TestKernelsThatFitDoNotSlowEachOther(t *testing.T) {
	r := newRig(t, hws(), 1)
	a := r.start("a", 1, 0)
	b := r.start("b", 1, 0)
	r.AdvanceTo(ms)
	x := r.kernel(a, 0, 6*ms, 0.7)
	y := r.kernel(b, 0, 3*ms, 0.3)
	r.rest()
	r.ran(x, 1*ms, 7*ms)
	r.ran(y, 1*ms, 4*ms)
}

func TestCopiesShareTheLinkAndLeaveTheComputeUnitsAlone(t *testing.T) {
	spec := hws()
	spec.CopyRate, spec.LinkRate = 1e9, 1e9 // 1 ms per MB, one at a time at full speed
	r := newRig(t, spec, 1)
	a := r.start("a", 1, 0)
	up := r.queue(a, 0, gpreempt.QueueSDMA)
	down := r.queue(a, 0, gpreempt.QueueSDMA)
	r.rest()
	r.AdvanceTo(ms)
	kernel := r.kernel(a, 0, 4*ms, 1)
	x := r.packet(a, up, Packet{Bytes: 2e6})
	r.AdvanceTo(2 * ms)
	y := r.packet(a, down, Packet{Bytes: 1e6})
	r.rest()
	r.ran(kernel, 1*ms, 5*ms)
	r.ran(x, 1*ms, 4*ms)
	r.ran(y, 2*ms, 4*ms)
}

func TestSDMAQueuesRunOut(t *testing.T) {
	spec := hws()
	spec.SDMAEngines, spec.SDMAQueuesPerEngine = 1, 2
	r := newRig(t, spec, 1)
	a := r.start("a", 0)
	r.queue(a, 0, gpreempt.QueueSDMA)
	second := r.queue(a, 0, gpreempt.QueueSDMA)
	r.queue(a, 0, gpreempt.QueueSDMAXGMI)
	if _, err := r.CreateQueue(a, r.facts[0].ID, gpreempt.QueueSDMA, 64); err == nil {
		t.Error("a third queue on an engine with two was created")
	}
	r.ok(r.DestroyQueue(a, second))
	r.queue(a, 0, gpreempt.QueueSDMA)
}

func TestRingTakesAsManyPacketsAsItHolds(t *testing.T) {
	r := newRig(t, hws(), 1)
	a := r.start("a", 0)
	id, err := r.CreateQueue(a, r.facts[0].ID, gpreempt.QueueCompute, 16)
	r.ok(err)
	for range 16 {
		r.kernel(a, id, ms, 1)
	}
	if err := r.Submit(a, id, Packet{Duration: ms, Occupancy: 1}); err == nil {
		t.Error("a full ring took a packet")
	}
	r.rest()
	r.kernel(a, id, ms, 1)
}

// Four processes with two queues each on a GPU with four slots: two sets of two
// processes take turns, each turn being one runlist cycle.
func TestQueuesThatDoNotFitTakeTurns(t *testing.T) {
	spec := hws()
	spec.Slots, spec.Quantum = 4, 10*ms
	r := newRig(t, spec, 1)
	var procs []gpreempt.ProcessKey
	for _, comm := range []string{"a", "b", "c", "d"} {
		procs = append(procs, r.start(comm, 2, 0))
	}
	r.AdvanceTo(100 * ms)
	before := r.GPUCounters()[0].SchedulerCycles

	var spans []*span
	for _, p := range procs {
		spans = append(spans, r.kernel(p, 0, 15*ms, 0.5))
	}
	r.rest()
	// A turn interrupts two kernels of half the GPU: 100+80+50 µs, and 40 more
	// when it restores what an earlier turn interrupted.
	r.ran(spans[0], 100*ms, 120*ms+230*us+5*ms+270*us)
	r.ran(spans[1], 100*ms, 120*ms+230*us+5*ms+270*us)
	r.ran(spans[2], 110*ms+230*us, 130*ms+230*us+5*ms+2*270*us-80*us)
	r.ran(spans[3], 110*ms+230*us, 130*ms+230*us+5*ms+2*270*us-80*us)
	if got := r.GPUCounters()[0].SchedulerCycles - before; got != 3 {
		t.Errorf("%d runlist cycles, want 3", got)
	}
}

func TestProcessesBeyondTheVMIDsTakeTurns(t *testing.T) {
	spec := hws()
	spec.VMIDs, spec.Quantum = 2, 10*ms
	r := newRig(t, spec, 1)
	a, b, c := r.start("a", 1, 0), r.start("b", 1, 0), r.start("c", 1, 0)
	r.AdvanceTo(100 * ms)
	first := r.kernel(a, 0, ms, 1)
	last := r.kernel(c, 0, ms, 0.5)
	r.rest()
	r.ran(first, 100*ms, 101*ms)
	r.ran(last, 110*ms+150*us, 111*ms+150*us)

	// With b suspended everybody fits, and no turn is needed.
	r.suspend(b)
	r.rest()
	before := r.GPUCounters()[0].SchedulerCycles
	r.AdvanceTo(300 * ms)
	first = r.kernel(a, 0, 30*ms, 0.5)
	last = r.kernel(c, 0, 30*ms, 0.5)
	r.rest()
	r.ran(first, 300*ms, 330*ms)
	r.ran(last, 300*ms, 330*ms)
	if got := r.GPUCounters()[0].SchedulerCycles - before; got != 0 {
		t.Errorf("%d runlist cycles, want 0", got)
	}
}

func TestQueuesThatDoNotFitTakeTurnsOnMES(t *testing.T) {
	spec := mes()
	spec.Slots, spec.Quantum = 2, 10*ms
	r := newRig(t, spec, 1)
	a, b, c := r.start("a", 1, 0), r.start("b", 1, 0), r.start("c", 1, 0)
	r.AdvanceTo(100 * ms)
	x := r.kernel(a, 0, 12*ms, 0.25)
	y := r.kernel(b, 0, 12*ms, 0.25)
	z := r.kernel(c, 0, 12*ms, 0.25)
	r.rest()
	// The first turn maps c and a, so a runs on and b keeps its place until the
	// second one maps b and c.
	r.ran(x, 100*ms, 112*ms)
	r.ran(z, 110*ms+20*us, 122*ms+20*us)
	r.ran(y, 100*ms, 122*ms+30*us)
}

func TestWorkIsThatOfTheTimeOnTheGPU(t *testing.T) {
	r := newRig(t, hws(), 2)
	a := r.start("a", 2, 0)
	r.AdvanceTo(ms)
	cycles := r.GPUCounters()[0].SchedulerCycles
	r.kernel(a, 0, 4*ms, 0.5)
	r.AdvanceTo(2 * ms)
	r.kernel(a, 1, 4*ms, 0.5)
	r.AdvanceTo(3 * ms)
	want := []GPUCounters{{GPU: r.facts[0].ID, SchedulerCycles: cycles}, {GPU: r.facts[1].ID}}
	if diff := cmp.Diff(want, r.GPUCounters()); diff != "" {
		t.Errorf("GPU counters (-want +got):\n%s", diff)
	}
	if got, want := r.counters(a).Work, 1500*us; got != want {
		t.Errorf("work so far = %v, want %v", got, want)
	}
	r.suspend(a)
	r.AdvanceTo(50 * ms)
	r.resume(a)
	r.rest()
	if got, want := r.counters(a).Work, 4*ms; got != want {
		t.Errorf("work = %v, want %v", got, want)
	}
}

func TestEndOfAProcessAbandonsItsPacketsAndFreesTheGPU(t *testing.T) {
	r := newRig(t, hws(), 1)
	a := r.start("a", 1, 0)
	b := r.start("b", 1, 0)
	r.AdvanceTo(ms)
	for range 3 {
		r.kernel(a, 0, 2*ms, 1)
	}
	r.AdvanceTo(4 * ms)
	r.ok(r.EndProcess(a))
	r.rest()
	want := ProcessCounters{Process: a, Comm: "a", Ended: true, Submitted: 3, Executed: 1, Abandoned: 2, Work: 2 * ms}
	if diff := cmp.Diff(want, r.counters(a)); diff != "" {
		t.Errorf("counters (-want +got):\n%s", diff)
	}
	r.AdvanceTo(10 * ms)
	r.ran(r.kernelAndRest(b, ms), 10*ms, 11*ms)
	if err := r.EndProcess(a); err == nil {
		t.Error("the process ended twice")
	}
}

func (r rig) kernelAndRest(key gpreempt.ProcessKey, d time.Duration) *span {
	s := r.kernel(key, 0, d, 1)
	r.rest()
	return s
}

// The birth of c's queue is under way when the turn is due, so the turn is late; the set
// that gets it still has its whole quantum.
func TestQuantumIsCountedFromTheEndOfTheTurn(t *testing.T) {
	spec := hws()
	spec.Slots, spec.Quantum = 1, 10*ms
	r := newRig(t, spec, 1)
	a, b, c := r.start("a", 1, 0), r.start("b", 1, 0), r.start("c", 0)
	r.AdvanceTo(100 * ms)
	r.kernel(a, 0, time.Second, 0.5)
	whole := r.kernel(b, 0, 10*ms, 0.5)
	r.AdvanceTo(110*ms - 50*us)
	r.queue(c, 0, gpreempt.QueueCompute)
	r.AdvanceTo(150 * ms)
	// The turn comes between the two halves of that cycle, when nothing is mapped.
	unmapped := 110*ms - 50*us + 100*us + 40*us
	turn := unmapped + 50*us
	r.ran(whole, turn, turn+10*ms)
}
