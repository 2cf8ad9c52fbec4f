package e2e

import (
	"slices"
	"testing"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/emu/kfdemu"
)

func TestEmulatedAnnouncementSuspendsRealProcessesUntilComplete(t *testing.T) {
	t.Parallel()
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

// On Linux 7.3 the enabling of the debugger leaves the default grace period in the register, and
// so would a suspension with a grace period of 0.
func TestEmulatedJobIsSuspendedAtOnceOnLinux73(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{Profile: "7.3"})
	job := m.work("--queues", "3", "--duration", "2000", "--runtime")
	d := m.start(atOnce)
	d.offlineTarget(job, 3)
	gpu := m.GPUs()[0].ID
	before, _ := m.Driver().GPU(gpu)
	lease := d.announce(t.Context())
	m.checkFrozen(job)
	after, _ := m.Driver().GPU(gpu)
	if grace := after.Grace[len(before.Grace):]; !slices.Equal(grace, []uint32{1}) {
		t.Errorf("the suspension had the grace periods %d, want 1", grace)
	}
	suspended := d.revision()
	d.complete(lease.GetLeaseId())
	d.awaitTarget(job.PID, suspended, gpreemptv1.TargetState_TARGET_STATE_RUNNING)
	m.checkRuns(job)
	job.stop()
}

func TestEmulatedMachineIsCalledEmulated(t *testing.T) {
	t.Parallel()
	d := emulate(t, kfdemu.Config{Machine: "mi210", Profile: "7.2"}).start(atOnce)
	const want = "emulated mi210 x1 with the rules of 7.2 (kfdemu)"
	if got := d.status().GetBackend(); got != want {
		t.Errorf("the backend is %q, want %q", got, want)
	}
	says(t, d.ctl("status").Out, want)
	says(t, d.ctl("gpu", "list").Err, "("+want+": no hardware is involved)")
}
