package kmap

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdtest"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/testutil"
)

// The daemon dies before, in and after each call that it makes; all that again until it died
// GPREEMPT_CRASHES times. The next one finds nothing held, and suspends at once.
func TestDeathAtEveryCallLeavesEveryQueueRunning(t *testing.T) {
	deaths := 0
	for wanted := testutil.Number(t, "GPREEMPT_CRASHES", 1); deaths < wanted && !t.Failed(); {
		before := deaths
		for _, stage := range []kfdtest.Stage{kfdtest.Before, kfdtest.Hardware, kfdtest.After} {
			for nth, died := 1, true; died; nth++ {
				t.Run(fmt.Sprintf("%v %d", stage, nth), func(t *testing.T) {
					inWorld(t, driver.KmapProfile, hws, func(w *world) {
						if died = w.dieAt(stage, nth); died {
							deaths++
						}
					})
				})
			}
		}
		if deaths == before {
			t.Fatal("no daemon died")
		}
	}
	t.Logf("%d deaths; every queue runs", deaths)
}

// dieAt has a daemon die at its nth call, and reports whether it did.
func (w *world) dieAt(stage kfdtest.Stage, nth int) bool {
	w.Helper()
	jobs := []*kfdtest.Process{w.job(gpuA), w.job(gpuA, gpuB), w.job(gpuB)}
	first := w.daemon
	fault := kfdtest.Fault{Caller: first, Stage: stage, Nth: nth, Do: first.Kill}
	if stage == kfdtest.Hardware { // it is killed while the driver waits for the GPU
		fault.Do, fault.Hold = nil, true
	}
	death := w.machine.Inject(fault)
	ended := make(chan struct{})
	if fault.Hold {
		go func() {
			select {
			case <-death.Reached():
				first.Kill()
				death.Release()
			case <-ended:
			}
		}()
	}
	w.life(jobs)
	close(ended)
	synctest.Wait()
	died := death.Hits() > 0
	death.Remove()
	if died && !first.Dead() {
		w.Error("the daemon lives")
	}
	first.Kill()
	w.wantHeld(false, jobs...)
	_ = w.Close() // of one that has died
	w.start()
	sessions := w.attach(jobs...)
	w.wantErrors(w.SuspendAll(w.Context(), sessions), nil, nil, nil)
	w.wantHeld(true, jobs...)
	w.wantErrors(w.ResumeAll(w.Context(), sessions), nil, nil, nil)
	w.wantHeld(false, jobs...)
	return died
}

// life is what a daemon does with jobs, up to its death. Errors are that.
func (w *world) life(jobs []*kfdtest.Process) {
	var sessions []mechanism.Session
	for _, p := range jobs {
		s, err := w.Attach(w.Context(), p.Key())
		if err != nil {
			return
		}
		sessions = append(sessions, s)
	}
	w.SuspendAll(w.Context(), sessions)
	w.beats(Lease / 2)
	_ = sessions[0].Resume(w.Context())
	_ = sessions[0].Suspend(w.Context(), nil)
	time.Sleep(Lease + BeatEvery) // it hangs
	w.beats(BeatEvery)
	w.SuspendAll(w.Context(), sessions)
	w.ResumeAll(w.Context(), sessions)
	w.SuspendAll(w.Context(), sessions)
}
