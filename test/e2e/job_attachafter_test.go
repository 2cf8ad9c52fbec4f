package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdemu"
)

// attachLater is atOnce with the default attach_after.
var attachLater = strings.Replace(atOnce, "attach_after: 0s", "attach_after: 30s", 1)

// shortJobs counts the runlist cycles on GPU A, on which a process works that nobody
// suspends, while five jobs on GPU B start and end and nobody announces anything: those that
// the daemon's calls cause.
func shortJobs(t *testing.T, config string) (cycles int, d *daemon) {
	t.Helper()
	m := emulate(t, kfdemu.Config{GPUs: 2})
	online := m.serve("--gpus", m.gpuFlag(0), "--queues", "2", "--duration", "500", "--runtime")
	d = m.start(config)
	d.eventually("the online process is known", func() bool { return d.target(online.PID).GetQueueCount() == 2 })
	from := m.now()
	workers := []int32{online.PID}
	for range 5 {
		job := m.work("--gpus", m.gpuFlag(1), "--queues", "2", "--duration", "500", "--runtime")
		workers = append(workers, job.PID)
		d.eventually("the job is known", func() bool { return d.target(job.PID).GetQueueCount() == 2 })
		if config == atOnce {
			d.offlineTarget(job, 2)
		}
		m.awaitProgress(job)
		job.stop()
		m.gone(d, job.PID)
	}
	all, _, _ := m.log.since(from)
	for _, e := range all {
		if e.Kind == kfdemu.EventStep && e.Op == string(driver.StepMap) && e.GPU == m.GPUs()[0].ID && !slices.Contains(workers, e.PID) { // a helper of the daemon
			cycles++
		}
	}
	online.stop()
	return cycles, d
}

// Jobs that are shorter than attach_after do not interrupt processes on other GPUs by being
// attached to. Attaching at once does, and is counted.
func TestShortJobsDoNotDisturbOtherGPUs(t *testing.T) {
	t.Parallel()
	if cycles, d := shortJobs(t, attachLater); cycles != 0 {
		t.Errorf("%d runlist cycles of the daemon on a GPU that the jobs do not use, want none:\n%s", cycles, d.ctl("stats").Out)
	}
	cycles, d := shortJobs(t, atOnce)
	if cycles == 0 {
		t.Error("attaching at once costs no runlist cycle on the other GPU: the test shows nothing")
	}
	var counted uint64
	for line := range strings.SplitSeq(d.ctl("stats").Out, "\n") {
		if rest, ok := strings.CutPrefix(line, "attach cycles"); ok {
			if _, err := fmt.Sscan(rest, &counted); err != nil {
				t.Fatal(err)
			}
		}
	}
	if counted < uint64(cycles) {
		t.Errorf("gpctl stats counts %d attach cycles, the driver made %d for the daemon", counted, cycles)
	}
}

// The first lease that covers a GPU of a job attaches to it, and waits for that.
func TestFirstLeaseAttachesAndSuspends(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{GPUs: 2})
	covered := m.work("--gpus", m.gpuFlag(0), "--queues", "2", "--duration", "500", "--runtime")
	other := m.work("--gpus", m.gpuFlag(1), "--queues", "2", "--duration", "500", "--runtime")
	d := m.start(attachLater)
	for _, w := range []*worker{covered, other} {
		d.eventually("the job is known", func() bool { return d.target(w.PID).GetQueueCount() == 2 })
	}
	d.check(0, "attach_after ends in", "target", "explain", fmt.Sprint(covered.PID))
	lease, answer := d.ask(10*time.Second, m.GPUs()[0].ID)
	checkSaid(t, "the first lease", said{true, done, 1}, answer)
	m.checkFrozen(covered)
	if got := d.target(other.PID).GetMechanism(); got != "" {
		t.Errorf("%s is attached to a job that no lease covers", got)
	}
	d.complete(lease)
	m.awaitEach(covered, 2, onGPU)
	m.checkRuns(other)

	// An order of an admin attaches too. Its answer comes after max_wait, and an attach may
	// take longer.
	d.check(0, "suspended", "target", "suspend", fmt.Sprint(other.PID), "--ttl", "1m")
	m.awaitEach(other, 2, offGPU)
	m.checkFrozen(other)
	d.check(0, "running", "target", "resume", fmt.Sprint(other.PID))
	m.awaitEach(other, 2, onGPU)
	covered.stop()
	other.stop()
}

// Under the policy shadow nothing is attached to, and what is attached is released when it
// comes into force.
func TestShadowAttachesToNothing(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{})
	job := m.work("--queues", "2", "--duration", "500", "--runtime")
	d := m.start(strings.Replace(atOnce, "preset: strict", "preset: shadow", 1))
	d.eventually("the job is known", func() bool { return d.target(job.PID).GetQueueCount() == 2 })
	_, answer := d.ask(10 * time.Second)
	checkSaid(t, "under shadow", said{false, gpreemptv1.QuiesceReason_QUIESCE_REASON_SHADOW, 0}, answer)
	if p, _ := m.process(job.PID); p.Enabled || d.target(job.PID).GetMechanism() != "" {
		t.Errorf("the job is debugged under a shadow policy: %+v", p)
	}
	d.check(0, "the policy is strict", "policy", "set", "strict")
	d.eventually("the job is suspended", func() bool { return d.target(job.PID).GetState() == suspended })
	d.check(0, "the policy is shadow", "policy", "set", "shadow")
	m.eventually("nobody debugs the job", func() bool {
		p, _ := m.process(job.PID)
		return !p.Enabled
	})
	m.awaitEach(job, 2, onGPU)
	job.stop()
}
