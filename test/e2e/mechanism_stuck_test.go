package e2e

import (
	"fmt"
	"testing"
	"time"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/emu/kfdemu"
)

// stuckNow is the reason of an answer while a target holds its own lock.
const stuckNow = gpreemptv1.QuiesceReason_QUIESCE_REASON_STUCK

// A job is in a long call of the driver, which holds the job's lock. The daemon finds that by the
// place in the kernel where its helper waits: the job alone is quarantined, and the GPU is not at
// fault.
func TestJobInALongCallOfTheDriverIsStuckAlone(t *testing.T) {
	t.Parallel()
	eachRule(t, func(t *testing.T, profile string) {
		t.Parallel()
		m := emulate(t, kfdemu.Config{Profile: profile})
		m.gpreemptd = gpreemptd // with a StuckAfter of 2 s
		gpu := m.GPUs()[0].ID
		stuck, other := m.work("--duration", "500", "--runtime"), m.work("--duration", "500", "--runtime")
		d := m.start(atOnce)
		d.offlineTarget(stuck, 1)
		d.offlineTarget(other, 1)
		release, ok := m.HoldMutex(stuck.PID)
		if !ok {
			t.Fatal("the job does not use the driver")
		}
		lease, answer := d.ask(10*time.Second, gpu)
		if answer.Quiesced || answer.Reason != stuckNow || answer.Suspended != 1 {
			t.Errorf("the announcement is answered %+v, want not quiet, stuck, and one target suspended", answer)
		}
		if d.breaker(gpu) {
			t.Error("the breaker of the GPU is open")
		}
		d.warned("STUCK")
		d.check(0, "holds its lock in the driver", "target", "explain", fmt.Sprint(stuck.PID))
		m.checkEach(stuck, 1, onGPU)
		m.checkEach(other, 1, offGPU)

		again, answer := d.ask(10*time.Second, gpu)
		checkSaid(t, "while it lasts", said{false, stuckNow, 1}, answer)
		d.complete(again)
		m.checkEach(other, 1, offGPU)
		release()
		d.eventually("the job is quarantined, and runs", func() bool { return d.target(stuck.PID).GetState() == quarantined })
		m.awaitEach(stuck, 1, onGPU)
		m.awaitProgress(stuck)
		m.checkEach(other, 1, offGPU)
		d.complete(lease)
		m.awaitEach(other, 1, onGPU)
		stuck.stop()
		other.stop()
	})
}
