package e2e

import (
	"testing"
	"time"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/emu/kfdemu"
	"github.com/gpreempt/gpreempt/pkg/discovery/debugfs"
)

// live returns how many queues of programs are in the slots of the hardware, by the file hqds as
// a program of the machine reads it (CP_HQD_ACTIVE).
func (m *emulated) live() (n int) {
	m.t.Helper()
	if err := m.WriteDebugfs(); err != nil {
		m.t.Fatal(err)
	}
	text, err := m.Command(m.t.Context(), "cat", "/"+debugfs.HQDs).Output()
	if err != nil {
		m.t.Fatal(err)
	}
	dump, err := debugfs.ParseHQDs(text)
	if err != nil {
		m.t.Fatal(err)
	}
	for _, s := range dump.Slots() {
		if s.State == debugfs.Live && s.Kind != debugfs.SlotHIQ && s.XCC == 0 {
			n++
		}
	}
	return n
}

// Each of eight processes costs the online process on their GPU an interruption by a runlist cycle,
// counted by the emulated machine.
func TestEachSuspendedProcessCostsARunlistCycle(t *testing.T) {
	t.Parallel()
	const processes = 8
	m := emulate(t, kfdemu.Config{Profile: "6.12"})
	online := m.serve("--duration", "200", "--rate", "200", "--runtime")
	var jobs []*worker
	for range processes {
		jobs = append(jobs, m.work("--duration", "2000", "--occupancy", "100000", "--rate", "50", "--runtime"))
	}
	d := m.start(atOnce)
	for _, w := range jobs {
		d.heldBy("dbgtrap", w, 1)
	}
	interrupted := func() int {
		state, _ := m.Driver().GPU(m.GPUs()[0].ID)
		return state.Cycled[online.PID]
	}
	before := interrupted()
	began := time.Now()
	lease := d.announce(t.Context())
	took, n := time.Since(began), interrupted()-before
	if n != processes {
		t.Errorf("the suspend interrupted the online process %d times, want %d", n, processes)
	}
	for _, w := range jobs {
		m.checkEach(w, 1, offGPU)
	}
	if n := m.live(); n != 1 {
		t.Errorf("%d slots of the hardware have a queue, want 1", n)
	}
	m.checkStill(jobs[0])
	before, suspended := interrupted(), d.revision()
	d.complete(lease.GetLeaseId())
	for _, w := range jobs {
		d.awaitTarget(w.PID, suspended, gpreemptv1.TargetState_TARGET_STATE_RUNNING)
	}
	if n := interrupted() - before; n != processes {
		t.Errorf("the resume interrupted the online process %d times, want %d", n, processes)
	}
	// One process for each VMID: the ninth waits for its turn, at which no queue is live.
	m.eventually("the queues of eight processes are in slots", func() bool { return m.live() == 8 })
	for _, w := range jobs {
		m.checkEach(w, 1, onGPU)
		m.awaitProgress(w)
	}
	t.Logf("emulated: %d runlist cycles and %v until the GPU was quiet", n, took)
	tellFigures(t, "eight processes suspended, mi300x, driver of 6.12", false, struct {
		Cycles       int           `json:"runlist_cycles"`
		UntilQuietNS time.Duration `json:"until_quiet_ns"`
	}{n, took})
	for _, w := range append(jobs, online) {
		w.stop()
	}
}
