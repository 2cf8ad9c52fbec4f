package gpumodel

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func (r rig) fault(kind FaultKind, gpu int, delay time.Duration) {
	r.Helper()
	r.ok(r.SetFault(Fault{Kind: kind, GPU: r.facts[gpu].ID, Delay: delay}))
}

// preempted suspends and resumes a process in the middle of the first of its n
// kernels, and runs everything to the end.
func preempted(r rig, n int) (gpreempt.ProcessKey, []*span) {
	r.Helper()
	a := r.start("a", 1, 0)
	r.AdvanceTo(ms)
	var spans []*span
	for range n {
		spans = append(spans, r.kernel(a, 0, 2*ms, 0.5))
	}
	r.AdvanceTo(2 * ms)
	r.suspend(a)
	r.AdvanceTo(10 * ms)
	r.resume(a)
	r.rest()
	return a, spans
}

func TestLostPacketIsCounted(t *testing.T) {
	for _, spec := range []Spec{hws(), mes()} {
		t.Run(spec.Name, func(t *testing.T) {
			r := newRig(t, spec, 1)
			r.fault(FaultLosePacket, 0, 0)
			a, spans := preempted(r, 3)
			want := ProcessCounters{Process: a, Comm: "a", Submitted: 3, Executed: 2, Lost: 1, Work: 2 * ms}
			if diff := cmp.Diff(want, r.counters(a)); diff != "" {
				t.Errorf("counters (-want +got):\n%s", diff)
			}
			if spans[0].Calls != 0 {
				t.Error("the signal of the lost packet was decremented")
			}
		})
	}
}

func TestRepeatedPacketIsCounted(t *testing.T) {
	for _, spec := range []Spec{hws(), mes()} {
		t.Run(spec.Name, func(t *testing.T) {
			r := newRig(t, spec, 1)
			r.fault(FaultRepeatPacket, 0, 0)
			a, spans := preempted(r, 3)
			want := ProcessCounters{Process: a, Comm: "a", Submitted: 3, Executed: 3, Repeated: 1, Work: 3 * ms}
			if diff := cmp.Diff(want, r.counters(a)); diff != "" {
				t.Errorf("counters (-want +got):\n%s", diff)
			}
			if got := spans[1].Started - spans[0].Ended; got != 2*ms {
				t.Errorf("the repetition took %v, want 2ms", got)
			}
		})
	}
}

func TestPacketRepeatedWhenTheProcessEndsIsCounted(t *testing.T) {
	r := newRig(t, hws(), 1)
	r.fault(FaultRepeatPacket, 0, 0)
	a := r.start("a", 1, 0)
	r.kernel(a, 0, 2*ms, 1)
	r.AdvanceTo(ms)
	r.suspend(a)
	r.AdvanceTo(2 * ms)
	r.resume(a)
	r.AdvanceTo(4 * ms)
	r.ok(r.EndProcess(a))
	want := ProcessCounters{Process: a, Comm: "a", Ended: true, Submitted: 1, Executed: 1, Work: 2 * ms}
	if diff := cmp.Diff(want, r.counters(a)); diff != "" {
		t.Errorf("counters (-want +got):\n%s", diff)
	}
}

func TestNothingIsLostOrRepeatedWithoutAFault(t *testing.T) {
	r := newRig(t, hws(), 1)
	a, _ := preempted(r, 3)
	want := ProcessCounters{Process: a, Comm: "a", Submitted: 3, Executed: 3, Work: 3 * ms}
	if diff := cmp.Diff(want, r.counters(a)); diff != "" {
		t.Errorf("counters (-want +got):\n%s", diff)
	}
}

func TestSuspendErrorIsReportedForTheQueuesOfThatGPU(t *testing.T) {
	r := newRig(t, hws(), 2)
	a := r.start("a", 2, 0, 1)
	kernel := r.kernel(a, 2, ms, 0.5)
	r.fault(FaultSuspendError, 1, 0)
	off := r.suspend(a)
	r.AdvanceTo(10 * ms)
	r.got(off, off.At, ResultOK, ResultOK, ResultError, ResultError)
	if kernel.Calls != 0 {
		t.Error("a queue of the failed GPU ran on: it is marked as suspended")
	}
	// It happens once, and a resume puts everything right.
	on := r.resume(a)
	r.rest()
	r.got(on, on.At, ResultOK, ResultOK, ResultOK, ResultOK)
	off = r.suspend(a)
	r.rest()
	r.got(off, off.At, ResultOK, ResultOK, ResultOK, ResultOK)
	if kernel.Calls != 1 {
		t.Errorf("the kernel ended %d times, want once", kernel.Calls)
	}
}

func TestSuspendErrorOnMESStopsAtTheQueue(t *testing.T) {
	r := newRig(t, mes(), 1)
	a := r.start("a", 2, 0)
	kernel := r.kernel(a, 1, 5*ms, 0.5)
	r.fault(FaultSuspendError, 0, 0)
	off := r.suspend(a)
	r.rest()
	r.got(off, off.At, ResultError, ResultError)
	if kernel.Calls != 1 {
		t.Error("the second queue does not run, though its removal was not attempted")
	}
}

func TestResumeErrorIsReportedAndTheQueuesRun(t *testing.T) {
	for _, spec := range []Spec{hws(), mes()} {
		t.Run(spec.Name, func(t *testing.T) {
			r := newRig(t, spec, 1)
			a := r.start("a", 1, 0)
			r.suspend(a)
			r.rest()
			r.fault(FaultResumeError, 0, 0)
			on := r.resume(a)
			kernel := r.kernel(a, 0, ms, 0.5)
			r.rest()
			r.got(on, on.At, ResultError)
			if kernel.Calls != 1 {
				t.Error("the queue does not run")
			}
		})
	}
}

func TestStuckSuspendHoldsTheGPUAndWhoeverComesAfter(t *testing.T) {
	r := newRig(t, hws(), 1)
	a, b := r.start("a", 1, 0), r.start("b", 1, 0)
	r.AdvanceTo(ms)
	r.fault(FaultSuspendStuck, 0, time.Second)
	offA, offB := r.suspend(a), r.suspend(b)
	r.rest()
	r.got(offA, 1*ms+time.Second+150*us, ResultOK)
	r.got(offB, 1*ms+time.Second+250*us, ResultOK)
}

func TestFaultsThatMakeNoSenseAreRefused(t *testing.T) {
	m := New(hws(), 1, 1)
	gpu := m.GPUs()[0].ID
	for _, f := range []Fault{{Kind: FaultLosePacket, GPU: gpu + 1}, {GPU: gpu}, {Kind: 99, GPU: gpu}, {Kind: FaultSuspendStuck, GPU: gpu}} {
		if err := m.SetFault(f); err == nil {
			t.Errorf("SetFault(%+v) was accepted", f)
		}
	}
}
