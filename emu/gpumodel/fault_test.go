package gpumodel

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func (r rig) fault(kind FaultKind) {
	r.Helper()
	r.ok(r.SetFault(r.facts[0].ID, kind))
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
			r.fault(FaultLosePacket)
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
			r.fault(FaultRepeatPacket)
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
	r.fault(FaultRepeatPacket)
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

func TestFaultsThatMakeNoSenseAreRefused(t *testing.T) {
	m := New(hws(), 1, 1)
	gpu := m.GPUs()[0].ID
	for _, f := range []struct {
		gpu  gpreempt.GPUID
		kind FaultKind
	}{{gpu + 1, FaultLosePacket}, {gpu, 0}, {gpu, 99}} {
		if err := m.SetFault(f.gpu, f.kind); err == nil {
			t.Errorf("fault %d of GPU %v was accepted", f.kind, f.gpu)
		}
	}
}
