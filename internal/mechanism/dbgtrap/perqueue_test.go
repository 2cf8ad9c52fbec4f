package dbgtrap

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

func TestEachQueueHasACallOfItsOwn(t *testing.T) {
	onEach(t, func(t *testing.T, f *fixture) {
		j := f.start()
		by := f.PerQueue()
		s, err := by.Attach(t.Context(), j.key())
		f.must("attach", err)
		if got := by.Name(); got != "dbgtrap-per-queue" {
			t.Errorf("its name is %s", got)
		}
		if _, err := f.Attach(t.Context(), j.key()); err == nil {
			t.Error("the process has two sessions")
		}
		f.must("suspend", s.Suspend(t.Context()))
		j.wantSuspended()
		f.must("suspend again", s.Suspend(t.Context()))
		before := len(f.machine.Calls())
		f.must("resume", s.Resume(t.Context()))
		j.wantRunning()
		diff(t, "suspended", [][]uint32{{3}, {2}, {1}, {0}}, f.suspendCalls())
		var resumed [][]uint32
		for _, c := range f.machine.Calls()[before:] {
			if c.Op == driver.TrapOp(kfd.TrapResumeQueues) {
				resumed = append(resumed, c.Queues)
			}
		}
		diff(t, "resumed", [][]uint32{{3}, {2}, {1}, {0}}, resumed)
		f.must("close", s.Close())
		j.wantFree()
	})
}

func TestQueueThatFailsAfterOthersLeavesNothingSuspended(t *testing.T) {
	onEachDriver(t, func(t *testing.T, f *fixture) {
		j := f.start()
		s, err := f.PerQueue().Attach(t.Context(), j.key())
		f.must("attach", err)
		fault := f.machine.FailGPU(driver.TrapOp(kfd.TrapSuspendQueues), gpuA, unix.EIO) // its queues come last
		err = s.Suspend(t.Context())
		if _, ok := errors.AsType[*mechanism.HardwareError](err); !ok {
			t.Errorf("the error is %v", err)
		}
		j.wantRunning()
		fault.Remove()
		f.must("suspend", s.Suspend(t.Context()))
		j.wantSuspended()
		f.must("close", s.Close())
		j.wantFree()
	})
}
