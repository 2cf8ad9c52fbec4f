package e2e

import (
	"fmt"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdemu"
	"github.com/gpreempt/gpreempt/pkg/discovery/debugfs"
)

// withKmap has dbgtrap hold what kmap cannot.
const withKmap = "mechanisms: [kmap, dbgtrap]\n"

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

// checkLive checks where the queues of jobs stand, by the driver and by the slots, where a
// number of them is.
func (m *emulated) checkLive(jobs []*worker, queues int, want queueFlags, live int) {
	m.t.Helper()
	for _, w := range jobs {
		m.checkEach(w, queues, want)
	}
	if n := m.live(); n != live {
		m.t.Errorf("%d slots of the hardware have a queue, want %d", n, live)
	}
}

// Eight processes are suspended with one runlist cycle instead of eight, counted by the emulated
// machine: each cycle interrupts the online process on the GPU.
func TestKmapSuspendsEightProcessesWithOneRunlistCycle(t *testing.T) {
	t.Parallel()
	const processes = 8
	if reason := cannotEmulate(); reason != "" {
		t.Skip(reason)
	}
	// On a busy host some processes would join too late for the common call.
	file, err := filepath.Abs("../../internal/targets/batch.go")
	if err != nil {
		t.Fatal(err)
	}
	joined := changed(t, change{file, "const joinTime = 3 * time.Millisecond\n", "const joinTime = time.Minute\n"})
	for mechanism, cycles := range map[string]int{"kmap": 1, "dbgtrap": processes} {
		t.Run(mechanism, func(t *testing.T) {
			m := emulate(t, kfdemu.Config{Profile: driver.KmapProfile})
			m.gpreemptd = joined
			off := map[string]queueFlags{"kmap": keptOff, "dbgtrap": offGPU}[mechanism]
			online := m.serve("--duration", "200", "--rate", "200", "--runtime")
			var jobs []*worker
			for range processes {
				jobs = append(jobs, m.work("--duration", "2000", "--occupancy", "100000", "--rate", "50", "--runtime"))
			}
			d := m.start(atOnce + "mechanisms: [" + mechanism + "]\n")
			for _, w := range jobs {
				d.heldBy(mechanism, w, 1)
			}
			interrupted := func() int {
				state, _ := m.Driver().GPU(m.GPUs()[0].ID)
				return state.Cycled[online.PID]
			}
			before := interrupted()
			began := time.Now()
			lease := d.announce(t.Context())
			took, n := time.Since(began), interrupted()-before
			if n != cycles {
				t.Errorf("the suspend interrupted the online process %d times, want %d", n, cycles)
			}
			m.checkLive(jobs, 1, off, 1)
			m.checkStill(jobs[0])
			before, suspended := interrupted(), d.revision()
			d.complete(lease.GetLeaseId())
			for _, w := range jobs {
				d.awaitTarget(w.PID, suspended, gpreemptv1.TargetState_TARGET_STATE_RUNNING)
			}
			if n := interrupted() - before; n != cycles {
				t.Errorf("the resume interrupted the online process %d times, want %d", n, cycles)
			}
			// One process for each VMID: the ninth waits for its turn, at which no queue is live.
			m.eventually("the queues of eight processes are in slots", func() bool { return m.live() == 8 })
			for _, w := range jobs {
				m.checkEach(w, 1, onGPU)
				m.awaitProgress(w)
			}
			t.Logf("emulated: %d runlist cycles and %v until the GPU was quiet", n, took)
			tellFigures(t, "eight processes suspended by "+mechanism+", mi300x, driver of "+driver.KmapProfile, false, struct {
				Cycles       int           `json:"runlist_cycles"`
				UntilQuietNS time.Duration `json:"until_quiet_ns"`
			}{n, took})
			for _, w := range append(jobs, online) {
				w.stop()
			}
		})
	}
}

// A job that a lease keeps off its GPU runs after each end of the daemon, and while it hangs.
func TestNothingStaysHeldByKmap(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{Profile: driver.KmapProfile})
	load := []string{"--queues", "2", "--sdma", "--duration", "500", "--rate", "100", "--runtime"}
	jobs := []*worker{m.work(load...), m.work(load...)}
	begin := func() (*daemon, string) {
		t.Helper()
		d := m.start(atOnce + withKmap)
		for _, w := range jobs {
			d.heldBy("kmap", w, 3)
		}
		lease := d.announce(t.Context())
		m.checkLive(jobs, 3, keptOff, 0)
		return d, lease.GetLeaseId()
	}
	runs := func(what string) {
		t.Helper()
		m.awaitAll("everything runs "+what, jobs)
		m.checkLive(jobs, 3, onGPU, 6)
		for _, w := range jobs {
			m.awaitProgress(w)
		}
	}

	d, _ := begin()
	d.kill()
	runs("after the death of gpreemptd")

	d, lease := begin()
	d.freeze(m)
	runs("while gpreemptd hangs")
	d.signal(syscall.SIGCONT)
	for _, w := range jobs {
		m.awaitEach(w, 3, keptOff)
	}
	m.checkLive(jobs, 3, keptOff, 0)
	d.complete(lease)
	runs("after the lease")

	lease = d.announce(t.Context()).GetLeaseId()
	m.checkLive(jobs, 3, keptOff, 0)
	jobs[0].tell("exec work --queues 3 --duration 500 --rate 100 --runtime")
	jobs[0].await("ready") // the new program, which is found, and suspended like any other
	m.awaitEach(jobs[0], 3, keptOff)
	d.eventually("the new program is held", func() bool {
		g := d.target(jobs[0].PID)
		return g.GetMechanism() == "kmap" && g.GetState() == gpreemptv1.TargetState_TARGET_STATE_SUSPENDED
	})
	m.checkLive(jobs, 3, keptOff, 0)
	d.complete(lease)
	runs("after the lease with an exec")
	d.stop()
	runs("after the end of gpreemptd")
	for _, w := range jobs {
		w.stop()
	}
}

// On a kernel without the extension the next mechanism holds the job, and the reason says what
// to do.
func TestWithoutKfdKmapTheNextMechanismHoldsTheJob(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{Profile: "6.12"})
	job := m.work("--queues", "2", "--duration", "500", "--runtime")
	d := m.start(atOnce + withKmap)
	d.heldBy("dbgtrap", job, 2)
	says(t, d.ctl("target", "explain", "-o", "wide", fmt.Sprint(job.PID)).Out, "kfd_kmap: open /dev/kfd_kmap: no such file or directory")
	lease := d.announce(t.Context())
	m.checkLive([]*worker{job}, 2, offGPU, 0)
	d.complete(lease.GetLeaseId())
	m.awaitEach(job, 2, onGPU)
	job.stop()
}
