package e2e

import (
	"testing"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/emu/kfdemu"
)

func TestEmulatedAnnouncementSuspendsRealProcessesUntilComplete(t *testing.T) {
	m := emulate(t, kfdemu.Config{})
	job := m.work("--queues", "3", "--duration", "2000", "--runtime")
	d := m.start(atOnce)
	d.offlineTarget(job, 3)
	before := job.count()

	lease := d.announce(t.Context())
	m.checkFrozen(job)
	suspended := d.revision()
	d.complete(lease.GetLeaseId())
	d.awaitTarget(job.PID, suspended, gpreemptv1.TargetState_TARGET_STATE_RUNNING)
	m.checkRuns(job)
	d.eventually("the job goes on", func() bool { return job.count() > before })
	job.stop()
}

func TestEmulatedMachineIsCalledEmulated(t *testing.T) {
	d := emulate(t, kfdemu.Config{Machine: "mi210", Profile: "7.2"}).start(atOnce)
	const want = "emulated mi210 x1 with the rules of 7.2 (kfdemu)"
	if got := d.status().GetBackend(); got != want {
		t.Errorf("the backend is %q, want %q", got, want)
	}
	says(t, d.ctl("status").Out, want)
	says(t, d.ctl("gpu", "list").Err, "("+want+": no hardware is involved)")
}
