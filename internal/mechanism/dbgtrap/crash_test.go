package dbgtrap

import (
	"fmt"
	"testing"

	"github.com/gpreempt/gpreempt/emu/kfdtest"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// The daemon dies before, in and after each call that it makes in a session, under both
// permission rules and kinds of firmware; all that again until it died GPREEMPT_CRASHES times.
func TestDeathAtEveryCallLeavesEveryQueueRunning(t *testing.T) {
	deaths := 0
	for wanted := testutil.Number(t, "GPREEMPT_CRASHES", 1); deaths < wanted && !t.Failed(); {
		before := deaths
		for _, profile := range []string{"6.12", "7.2", "7.3"} {
			for _, firmware := range []string{"HWS", "MES"} {
				for _, stage := range []kfdtest.Stage{kfdtest.Before, kfdtest.Hardware, kfdtest.After} {
					for nth, died := 1, true; died; nth++ {
						t.Run(fmt.Sprintf("%s %s, %v %d", profile, firmware, stage, nth), func(t *testing.T) {
							if died = dieAt(t, profile, schedulers[firmware], stage, nth); died {
								deaths++
							}
						})
					}
				}
			}
		}
		if deaths == before {
			t.Fatal("no daemon died")
		}
	}
	t.Logf("%d deaths; every queue runs", deaths)
}

// dieAt runs a session of a daemon that dies at its nth call or step of the hardware, and
// reports whether it did.
func dieAt(t *testing.T, profile string, gfx uint32, stage kfdtest.Stage, nth int) bool {
	t.Helper()
	f := newFixture(t, profile, gfx)
	j := f.start()
	self := f.machine.Self()
	death := f.machine.Inject(kfdtest.Fault{Caller: self, Stage: stage, Nth: nth, Do: self.Kill})
	defer death.Remove()
	f.session(j)
	if death.Hits() == 0 {
		return false
	}
	f.await("every queue runs", func() bool { s, _ := j.KFD(); return !s.Enabled && j.allRun() })
	return true
}

// session is what a daemon does with a job, up to its death. Errors are that.
func (f *fixture) session(j *job) {
	f.t.Helper()
	s, err := f.Attach(f.t.Context(), j.key())
	if err != nil {
		return
	}
	defer func() { _ = s.Close() }()
	if s.Suspend(f.t.Context(), nil) == nil {
		j.create(gpuA, kfd.QueueTypeComputeAQL)
		f.await("the new queue is suspended, or the daemon is dead", func() bool { return j.allSuspended() || f.machine.Self().Dead() })
	}
	_ = s.Resume(f.t.Context())
	_ = s.Suspend(f.t.Context(), nil)
	_ = s.Resume(f.t.Context())
	_ = s.Suspend(f.t.Context(), nil)
}
