package e2e

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/gpumodel"
	"github.com/gpreempt/gpreempt/emu/kfdemu"
)

// withFreezer has a job that dbgtrap cannot hold stopped on the CPU.
const withFreezer = "mechanisms: [dbgtrap, freezer]\n"

// firmware is a kind of scheduler and what can be had of it.
type firmware struct {
	name string
	gpu  gpumodel.Spec
	// config lets the hazard table allow what it does not know.
	config string
	// held are the mechanisms that hold two jobs on one GPU, the first to come first.
	held [2]string
}

// firmwares are those with a different way to schedule and to debug.
func firmwares(t *testing.T) []firmware {
	t.Helper()
	spec := func(name string) gpumodel.Spec {
		s, err := gpumodel.PresetByName(name)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	gfx908 := spec("mi210")
	gfx908.Name, gfx908.GFX = "gfx908", 90008
	return []firmware{
		{"HWS, a VMID each", spec("mi300x"), atOnce, [2]string{"dbgtrap", "dbgtrap"}},
		{"HWS, one VMID", gfx908, atOnce, [2]string{"dbgtrap", "freezer"}},
		{"MES", spec("rx7900xtx"), atOnceRDNA, [2]string{"dbgtrap", "dbgtrap"}},
	}
}

// heldBy waits until the daemon holds a worker with so many queues by a mechanism.
func (d *daemon) heldBy(mechanism string, w *worker, queues int) {
	d.t.Helper()
	d.eventually("the job is held by "+mechanism, func() bool {
		g := d.target(w.PID)
		return g.GetMechanism() == mechanism && int(g.GetQueueCount()) == queues
	})
}

// checkAway checks that a worker that a mechanism suspended stands still.
func (m *emulated) checkAway(mechanism string, w *worker, queues int) {
	m.t.Helper()
	if mechanism == "dbgtrap" {
		m.checkEach(w, queues, offGPU)
		m.checkStill(w)
		return
	}
	if s := procState(m.t, w.PID); s != "T" {
		m.t.Errorf("worker %d is in state %s, want it stopped", w.PID, s)
	}
}

// Two jobs on two GPUs: one with queues and copies on both, one on the second only.
func TestEveryDriverSuspendsOnEveryFirmware(t *testing.T) {
	t.Parallel()
	type machine struct {
		profile string
		firmware
	}
	var all []machine
	for _, profile := range driver.Profiles() {
		for _, f := range firmwares(t) {
			all = append(all, machine{profile, f})
		}
	}
	for _, f := range some(6, all) {
		t.Run(f.profile+"/"+f.name, func(t *testing.T) {
			m := emulate(t, kfdemu.Config{Profile: f.profile, Spec: f.gpu, GPUs: 2})
			wide := m.work("--queues", "2", "--sdma", "--duration", "500", "--runtime")
			d := m.start(f.config + withFreezer)
			d.heldBy(f.held[0], wide, 6)
			narrow := m.work("--gpus", m.gpuFlag(1), "--sdma", "--duration", "500", "--runtime")
			d.heldBy(f.held[1], narrow, 2)

			lease, answer := d.ask(longest)
			checkSaid(t, "on both GPUs", said{true, done, 2}, answer)
			m.checkAway(f.held[0], wide, 6)
			m.checkAway(f.held[1], narrow, 2)
			d.complete(lease)
			m.awaitEach(wide, 6, onGPU)
			m.awaitEach(narrow, 2, onGPU)
			m.awaitProgress(wide)
			m.awaitProgress(narrow)

			lease, answer = d.ask(longest, m.GPUs()[0].ID)
			checkSaid(t, "on the first GPU", said{true, done, 1}, answer)
			m.checkAway(f.held[0], wide, 6)
			m.checkEach(narrow, 2, onGPU)
			m.awaitProgress(narrow)
			d.complete(lease)
			m.awaitEach(wide, 6, onGPU)
			wide.stop()
			narrow.stop()
			m.gone(d, wide.PID)
			m.gone(d, narrow.PID)
			m.checkDebugs(d, 0)
		})
	}
}

// A GPU with one VMID for debugging admits one job. The answer reports that the other one
// runs; when the first has exited, the daemon attaches to the other.
func TestSecondJobOnAGPUWithOneDebugVMIDRunsAndIsAttachedLater(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{Spec: firmwares(t)[1].gpu})
	first := m.work("--duration", "500", "--runtime")
	d := m.start(atOnce)
	d.heldBy("dbgtrap", first, 1)
	second := m.work("--duration", "500", "--runtime")
	d.eventually("the daemon says why not the other one", func() bool { return d.target(second.PID).GetAttachError() != "" })
	says(t, d.target(second.PID).GetAttachError(), "one process")
	lease, answer := d.ask(longest)
	checkSaid(t, "with one job of two", said{false, cannotSuspend, 1}, answer)
	m.checkEach(first, 1, offGPU)
	m.checkEach(second, 1, onGPU)
	m.awaitProgress(second)
	if state, _ := m.Driver().GPU(m.GPUs()[0].ID); state.DebugOwner != first.PID {
		t.Errorf("process %d has the VMID for debugging, want %d", state.DebugOwner, first.PID)
	}
	d.complete(lease)
	m.awaitEach(first, 1, onGPU)
	first.stop()
	d.heldBy("dbgtrap", second, 1)
	lease, answer = d.ask(longest)
	checkSaid(t, "with the other job", said{true, done, 1}, answer)
	m.checkAway("dbgtrap", second, 1)
	d.complete(lease)
	m.awaitEach(second, 1, onGPU)
	second.stop()
}

// The hazard table denies a GPU: the daemon does nothing that touches the GPU, and the
// answer reports it.
func TestJobOnAGPUTheHazardTableDeniesIsNotTouched(t *testing.T) {
	t.Parallel()
	denied := atOnce + `
safety:
  hazards:
    - id: tests
      gfx: ["gfx*"]
      action: deny
      why: it hung in a test
`
	for _, f := range firmwares(t) {
		t.Run(f.name, func(t *testing.T) {
			m := emulate(t, kfdemu.Config{Spec: f.gpu})
			job := m.work("--duration", "500", "--runtime")
			d := m.start(denied)
			d.eventually("the daemon says why", func() bool { return d.target(job.PID).GetAttachError() != "" })
			says(t, d.target(job.PID).GetAttachError(), "it hung in a test")
			lease, answer := d.ask(longest)
			checkSaid(t, "with a job that may not be touched", said{false, cannotSuspend, 0}, answer)
			m.checkEach(job, 1, onGPU)
			m.awaitProgress(job)
			calls := m.events(func(e kfdemu.Event) bool { return e.Kind == kfdemu.EventCall && e.Target == job.PID })
			if diff := cmp.Diff([]kfdemu.Event(nil), calls); diff != "" {
				t.Errorf("calls of the daemon about the job (-want +got):\n%s", diff)
			}
			d.complete(lease)
			d.stop()

			next := m.start(denied + withFreezer)
			next.heldBy("freezer", job, 1)
			lease, answer = next.ask(longest)
			checkSaid(t, "with a job that is stopped", said{true, done, 1}, answer)
			m.checkAway("freezer", job, 1)
			next.complete(lease)
			m.awaitProgress(job)
			job.stop()
		})
	}
}
