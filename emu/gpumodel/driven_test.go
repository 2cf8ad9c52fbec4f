package gpumodel

import (
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// at returns where a queue has everything.
func (r rig) at(id uint32, gpu int, typ gpreempt.QueueType) QueueSpec {
	return r.queueSpec(id, r.facts[gpu].ID, typ, 64)
}

// attached returns a process with queues compute queues on GPU 0, not mapped.
func (r rig) attached(comm string, queues int) gpreempt.ProcessKey {
	r.Helper()
	key, err := r.StartProcess(ProcSpec{Comm: comm})
	r.ok(err)
	for id := range queues {
		r.ok(r.AttachQueue(key, r.at(uint32(id), 0, gpreempt.QueueCompute)))
	}
	return key
}

// clock is when something was done, and how often.
type clock struct {
	At    time.Duration
	Calls int
}

func (r rig) clock() (*clock, func()) {
	c := &clock{}
	return c, func() { *c = clock{r.Now(), c.Calls + 1} }
}

func (r rig) unmap() *clock {
	r.Helper()
	c, done := r.clock()
	r.ok(r.Unmap(r.facts[0].ID, 0, done))
	return c
}

func (r rig) mapAll(runlist ...QueueRef) *clock {
	r.Helper()
	c, done := r.clock()
	r.ok(r.Map(r.facts[0].ID, runlist, done))
	return c
}

func (r rig) add(ref QueueRef) *clock {
	r.Helper()
	c, done := r.clock()
	r.ok(r.AddQueue(ref, done))
	return c
}

func (r rig) remove(ref QueueRef) *clock {
	r.Helper()
	c, done := r.clock()
	r.ok(r.RemoveQueue(ref, done))
	return c
}

func (r rig) done(c *clock, at time.Duration) {
	r.Helper()
	if diff := cmp.Diff(clock{at, 1}, *c); diff != "" {
		r.Errorf("done (-want +got):\n%s", diff)
	}
}

// progress of the oldest packet in flight, -1 for none.
func (r rig) progress(ref QueueRef) float64 {
	done, ok := r.Progress(ref)
	if !ok {
		return -1
	}
	return done
}

// offs records the calls of OnUnmap's function, with the progress of the packet.
type off struct {
	Queue QueueRef
	At    time.Duration
	Done  float64
}

func (r rig) offs() *[]off {
	var all []off
	r.OnUnmap(func(ref QueueRef) { all = append(all, off{ref, r.Now(), r.progress(ref)}) })
	return &all
}

func TestPacketKeepsItsPlaceOverUnmapAndMap(t *testing.T) {
	r := newRig(t, hws(), 1)
	offs := r.offs()
	a, b := r.attached("a", 1), r.attached("b", 1)
	first, second := QueueRef{a, 0}, QueueRef{b, 0}

	// What is not mapped does nothing.
	ka, kb := r.kernel(a, 0, 10*ms, 0.5), r.kernel(b, 0, 30*ms, 0.5)
	r.AdvanceTo(ms)
	if got := r.progress(first); got != -1 {
		t.Errorf("a queue that was never mapped is %v through its packet", got)
	}
	r.done(r.unmap(), ms) // There was nothing to take off.

	// Nothing was in flight yet, so there is nothing to restore.
	mapped := r.mapAll(first, second)
	r.AdvanceTo(ms + 50*us + 4*ms)
	r.done(mapped, ms+50*us)
	if got := []float64{r.progress(first), r.progress(second)}; !cmp.Equal(got, []float64{0.4, 4. / 30}) {
		t.Errorf("after 4 ms: %v", got)
	}

	// Both fill half of the GPU, so the whole is saved.
	began := r.Now()
	unmapped := r.unmap()
	r.AdvanceTo(began + 100*us + 80*us - 1)
	if unmapped.Calls != 0 {
		t.Error("unmapped before the time that takes")
	}
	r.AdvanceTo(began + 3*ms)
	r.done(unmapped, began+100*us+80*us)
	if diff := cmp.Diff([]off{{first, began, 0.4}, {second, began, 4. / 30}}, *offs); diff != "" {
		t.Errorf("taken off (-want +got):\n%s", diff)
	}

	// Half of it comes back.
	mapped = r.mapAll(first)
	r.AdvanceTo(began + 20*ms)
	r.done(mapped, began+3*ms+50*us+20*us)
	r.ran(ka, ms+50*us, began+3*ms+70*us+6*ms)
	if got := r.progress(second); got != 4./30 || kb.Calls != 0 {
		t.Errorf("a queue that is not in the runlist is %v through its packet", got)
	}

	// A Map without Unmap takes off first what runs: nothing of a is left in flight.
	mapped = r.mapAll(second)
	r.AdvanceTo(began + 21*ms)
	r.done(mapped, began+20*ms+100*us+50*us+20*us)
	r.rest()
	r.ran(kb, ms+50*us, began+20*ms+170*us+26*ms)
	if got := r.GPUCounters()[0].SchedulerCycles; got != 3 {
		t.Errorf("%d cycles, want 3", got)
	}
	if n := len(*offs); n != 2 {
		t.Errorf("%d queues with a packet in flight were taken off, want 2: %+v", n, *offs)
	}
}

func TestQueuesGoOneByOneOnADrivenMES(t *testing.T) {
	r := newRig(t, mes(), 1)
	offs := r.offs()
	a, b := r.attached("a", 1), r.attached("b", 1)
	first, second := QueueRef{a, 0}, QueueRef{b, 0}
	x, y := r.add(first), r.add(second)
	r.rest()
	r.done(x, 20*us)
	r.done(y, 40*us)

	began := r.Now()
	ka, kb := r.kernel(a, 0, 10*ms, 0.5), r.kernel(b, 0, 10*ms, 0.5)
	r.AdvanceTo(began + 4*ms)
	x = r.remove(first)
	if diff := cmp.Diff([]off{{first, began + 4*ms, 0.4}}, *offs); diff != "" {
		t.Errorf("taken off (-want +got):\n%s", diff)
	}
	r.AdvanceTo(began + 12*ms)
	r.done(x, began+4*ms+30*us+40*us)
	r.ran(kb, began, began+10*ms)
	r.done(r.remove(first), r.Now()) // It is off already.
	x = r.add(first)
	r.rest()
	r.done(x, began+12*ms+20*us+20*us)
	r.ran(ka, began, began+12*ms+40*us+6*ms)
	r.done(r.add(first), r.Now())
	if got := r.GPUCounters()[0].SchedulerCycles; got != 4 {
		t.Errorf("%d removals and additions, want 4", got)
	}
}

// TestSetsOfADrivenMachineTakeTurns: six kernels of 3 ms on two slots are gone through
// two by two, 1 ms each, and there are no turns while everything is off.
func TestSetsOfADrivenMachineTakeTurns(t *testing.T) {
	for _, c := range []struct {
		spec Spec
		over time.Duration
	}{
		// The second set, in the middle of whose turn it was, is the first to have a whole
		// one again.
		{hws(), 25 * ms},
		// The queue that is added first is mapped.
		{mes(), 26 * ms},
	} {
		t.Run(c.spec.Name, func(t *testing.T) {
			spec := zeroCost(c.spec)
			spec.Slots, spec.Quantum = 2, ms
			r := newRig(t, spec, 1)
			key := r.attached("p", 6)
			var all []QueueRef
			var spans []*span
			for id := range uint32(6) {
				all = append(all, QueueRef{key, id})
				spans = append(spans, r.kernel(key, id, 3*ms, 0.5))
			}
			on, takeOff := func() { r.mapAll(all...) }, func() { r.unmap() }
			if spec.MES {
				on = func() {
					for _, ref := range all {
						r.add(ref)
					}
				}
				takeOff = func() {
					for _, ref := range all {
						r.remove(ref)
					}
				}
			}
			progress := func(when string) {
				t.Helper()
				var got []float64
				for _, ref := range all {
					got = append(got, r.progress(ref))
				}
				if diff := cmp.Diff([]float64{2. / 3, 2. / 3, 1.5 / 3, 1.5 / 3, 1. / 3, 1. / 3}, got); diff != "" {
					t.Errorf("%s (-want +got):\n%s", when, diff)
				}
			}
			on()
			r.AdvanceTo(4*ms + ms/2)
			progress("after 4.5 ms")
			nothing := func(when string) {
				t.Helper()
				if next, ok := r.Next(); ok {
					t.Errorf("%s something happens at %v", when, next)
				}
			}
			takeOff()
			nothing("with everything off")
			r.AdvanceTo(20 * ms)
			progress("while off")
			on()
			r.ok(r.ClearGPU(r.facts[0].ID))
			nothing("after a reset")
			on()
			r.rest()
			for id, s := range spans {
				if s.Calls != 1 {
					t.Errorf("kernel %d ended %d times", id, s.Calls)
				}
			}
			if got := r.Now(); got != c.over {
				t.Errorf("over at %v, want %v", got, c.over)
			}
		})
	}
}

func TestClearGPULosesNothing(t *testing.T) {
	for _, spec := range []Spec{hws(), mes()} {
		t.Run(spec.Name, func(t *testing.T) {
			r := newRig(t, spec, 1)
			offs := r.offs()
			key := r.attached("p", 2)
			refs := []QueueRef{{key, 0}, {key, 1}}
			on := func() *clock {
				if spec.MES {
					r.add(refs[0])
					return r.add(refs[1])
				}
				return r.mapAll(refs...)
			}
			on()
			r.rest()
			began := r.Now()
			x, y := r.kernel(key, 0, 10*ms, 0.4), r.kernel(key, 1, 10*ms, 0.4)
			r.AdvanceTo(began + 3*ms)

			// In the middle of taking something off.
			var pending *clock
			if spec.MES {
				pending = r.remove(refs[0])
			} else {
				pending = r.unmap()
			}
			cycles := r.GPUCounters()[0].SchedulerCycles
			r.AdvanceTo(began + 3*ms + 5*us)
			r.ok(r.ClearGPU(r.facts[0].ID))
			r.done(pending, r.Now())
			if next, ok := r.Next(); ok {
				t.Errorf("after a reset, something happens at %v", next)
			}
			r.AdvanceTo(began + 5*ms)
			// The other one ran on for as long as MES let it.
			ran := 3 * ms
			if spec.MES {
				ran += 5 * us
			}
			want := []float64{0.3, float64(ran) / float64(10*ms)}
			if got := []float64{r.progress(refs[0]), r.progress(refs[1])}; !cmp.Equal(want, got) {
				t.Errorf("progress %v, want %v", got, want)
			}
			if len(*offs) != 2 {
				t.Errorf("taken off: %+v", *offs)
			}
			if got := r.GPUCounters()[0].SchedulerCycles; got != cycles {
				t.Errorf("the reset took %d cycles", got-cycles)
			}

			// In the middle of mapping it again, and then afterwards.
			pending = on()
			r.ok(r.ClearGPU(r.facts[0].ID))
			r.done(pending, began+5*ms)
			r.rest()
			if x.Calls+y.Calls != 0 {
				t.Error("a kernel ended on a GPU that was reset")
			}
			on()
			r.AdvanceTo(r.Now() + ms)
			r.ok(r.ClearGPU(r.facts[0].ID))
			if on(); !spec.MES {
				// A reset ends the cycle that Unmap began: the Map that follows is one of its own.
				r.pass()
				r.unmap()
				r.pass()
				r.ok(r.ClearGPU(r.facts[0].ID))
				on()
				if got := r.GPUCounters()[0].SchedulerCycles; got != cycles+5 {
					t.Errorf("%d cycles, want 5", got-cycles)
				}
			}
			r.rest()
			if c := r.counters(key); x.Calls != 1 || y.Calls != 1 || c.Executed != 2 || c.Lost != 0 {
				t.Errorf("kernels ended %d and %d times: %+v", x.Calls, y.Calls, c)
			}
		})
	}
}

// pass lets a cycle end.
func (r rig) pass() { r.AdvanceTo(r.Now() + 500*us) }

func TestEndOfAProcessLeavesADrivenScheduleAlone(t *testing.T) {
	for _, spec := range []Spec{hws(), mes()} {
		r := newRig(t, spec, 1)
		a, b := r.attached("a", 1), r.attached("b", 1)
		if spec.MES {
			r.add(QueueRef{a, 0})
			r.add(QueueRef{b, 0})
		} else {
			r.mapAll(QueueRef{a, 0}, QueueRef{b, 0})
		}
		r.rest()
		began, cycles := r.Now(), r.GPUCounters()[0].SchedulerCycles
		offs := r.offs()
		gone, stays := r.kernel(a, 0, ms, 0.5), r.kernel(b, 0, ms, 0.5)
		r.AdvanceTo(began + ms/2)
		r.ok(r.Machine.EndProcess(a))
		r.rest()
		r.ran(stays, began, began+ms)
		if got := r.GPUCounters()[0].SchedulerCycles; got != cycles || gone.Calls != 0 || len(*offs) != 0 {
			t.Errorf("%s: %d cycles, want %d; the kernel of the process ended %d times, its queue was taken off with one: %v", spec.Name, got, cycles, gone.Calls, *offs)
		}
		if c := r.counters(a); c.Abandoned != 1 {
			t.Errorf("%s: %+v", spec.Name, c)
		}
	}
}

func TestPacketsTakeUpTheRingTheySay(t *testing.T) {
	r := newRig(t, hws(), 1)
	key, err := r.StartProcess(ProcSpec{})
	r.ok(err)
	spec := r.at(3, 0, gpreempt.QueueSDMA)
	spec.RingBytes = 1024
	r.ok(r.AttachQueue(key, spec))
	for i := range 256 {
		r.packet(key, 3, Packet{Bytes: int64(1 + i), RingBytes: 4})
	}
	if err := r.Submit(key, 3, Packet{Bytes: 1, RingBytes: 4}); !errors.Is(err, ErrRingFull) {
		t.Errorf("257 packets of 4 bytes on 1024: %v", err)
	}
	r.mapAll(QueueRef{key, 3})
	r.rest()
	slot := func() place {
		q, err := r.Machine.queue(key, 3)
		r.ok(err)
		return q.now()
	}
	// The positions do not wrap.
	r.packet(key, 3, Packet{Bytes: 1, RingBytes: 1000})
	if err := r.Submit(key, 3, Packet{Bytes: 1, RingBytes: 28}); !errors.Is(err, ErrRingFull) {
		t.Errorf("1028 of 1024 bytes: %v", err)
	}
	r.packet(key, 3, Packet{Bytes: 1, RingBytes: 24})
	if got := slot(); got.read != 1024 || got.write != 2048 {
		t.Errorf("positions %+v", got)
	}
	r.rest()
	r.packet(key, 3, Packet{Bytes: 1})
	if got := slot(); got.read != 2048 || got.write != 2112 {
		t.Errorf("positions %+v", got)
	}
}

func TestRealtimeRunsADrivenMachine(t *testing.T) {
	r := newRig(t, hws(), 1)
	key := r.attached("p", 1)
	ref := QueueRef{key, 0}
	rt := startRealtime(t, r.Machine)
	wait := func(change func(m *Machine, done func()) error) {
		t.Helper()
		done := make(chan struct{})
		rt.Do(func(m *Machine) { r.ok(change(m, func() { close(done) })) })
		<-done
	}
	gpu := r.facts[0].ID
	wait(func(m *Machine, done func()) error { return m.Map(gpu, []QueueRef{ref}, done) })
	await(t, rt, key, 0, Packet{Duration: 300 * us, Occupancy: 1})
	wait(func(m *Machine, done func()) error { return m.Unmap(gpu, 0, done) })
}

// In a grace period the kernels that run may end, and no other begins.
func TestUnmapWaitsForKernelsInItsGracePeriod(t *testing.T) {
	for name, c := range map[string]struct {
		kernel, grace time.Duration
		// unmapped is when that is over, and ended when the kernel is.
		unmapped, ended time.Duration
	}{
		"none":                          {500 * us, 0, 180 * us, 770 * us},
		"shorter than the kernel":       {500 * us, 30 * us, 210 * us, 770 * us},
		"longer than the kernel":        {20 * us, 30 * us, 120 * us, 20 * us},
		"as long as the driver's limit": {400 * us, longestGrace, 500 * us, 400 * us},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, hws(), 1)
			key := r.start("p", 1, 0)
			began := r.Now()
			ref := QueueRef{key, 0}
			first := r.kernel(key, 0, c.kernel, 1)
			second := r.kernel(key, 0, 100*us, 1)
			unmapped, done := r.clock()
			r.ok(r.Unmap(r.facts[0].ID, c.grace, done))
			r.rest()
			r.done(unmapped, began+c.unmapped)
			r.mapAll(ref)
			r.rest()
			r.ran(first, began, began+c.ended)
			if second.Calls != 1 || second.Started < began+c.unmapped {
				t.Errorf("the second kernel: %+v", *second)
			}
		})
	}
}
