package e2e

import (
	"testing"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdemu"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// atOnceRDNA is atOnce for GPUs that the built-in hazard table denies.
const atOnceRDNA = atOnce + `
safety:
  hazards:
    - id: tests
      gfx: ["gfx*"]
      action: allow
      why: it is emulated
`

// evict has the driver take a worker's queues off the GPUs for lack of memory.
func (m *emulated) evict(w *worker) {
	m.t.Helper()
	if err := m.Driver().Evict(m.space(w), kfd.TriggerTTM); err != nil {
		m.t.Fatalf("evict process %d: %v", w.PID, err)
	}
}

// restore undoes one eviction.
func (m *emulated) restore(w *worker) {
	m.t.Helper()
	if err := m.Driver().Restore(m.space(w)); err != nil {
		m.t.Fatalf("restore process %d: %v", w.PID, err)
	}
}

// space is a worker's address space.
func (m *emulated) space(w *worker) driver.MM {
	m.t.Helper()
	p, ok := m.process(w.PID)
	if !ok {
		m.t.Fatalf("the driver does not know process %d", w.PID)
	}
	return p.MM
}

// The driver keeps eviction and suspension apart: a queue runs when it is neither
// evicted nor suspended, in whatever order the two begin and end.
func TestEvictedJobRunsOnlyWhenNeitherMemoryNorALeaseKeepsItOff(t *testing.T) {
	t.Parallel()
	const (
		evict    = "evict"
		restore  = "restore"
		announce = "announce"
		complete = "complete"
	)
	for _, gpu := range []struct{ machine, config string }{{"mi300x", atOnce}, {"rx7900xtx", atOnceRDNA}} {
		t.Run(gpu.machine, func(t *testing.T) {
			m := emulate(t, kfdemu.Config{Machine: gpu.machine})
			job := m.work("--queues", "2", "--sdma", "--duration", "500", "--runtime")
			d := m.start(gpu.config)
			const queues = 3
			d.offlineTarget(job, queues)
			for _, order := range [][]string{
				{evict, restore, announce, complete},
				{evict, announce, restore, complete},
				{evict, announce, complete, restore},
				{announce, evict, restore, complete},
				{announce, evict, complete, restore},
				{announce, complete, evict, restore},
			} {
				var evicted, leased bool
				var lease string
				for _, step := range order {
					since := d.revision()
					switch step {
					case evict:
						m.evict(job)
						evicted = true
					case restore:
						m.restore(job)
						evicted = false
					case announce:
						lease = d.announce(t.Context()).GetLeaseId()
						leased = true
					case complete:
						d.complete(lease)
						d.awaitTarget(job.PID, since, running)
						leased = false
					}
					if want := (queueFlags{Suspended: leased, Running: !evicted && !leased}); !m.each(job.PID, queues, want) {
						t.Errorf("%v: after %s the queues are %+v, want each %+v", order, step, m.flags(job.PID), want)
					}
					if evicted || leased {
						m.checkStill(job)
					} else {
						m.awaitProgress(job)
					}
				}
			}
			d.eventually("the daemon tells that memory is short", func() bool { return d.warned("GPU_MEMORY_SHORT") != nil })
			job.stop()
		})
	}
}

// Memory comes back while the daemon is in the middle of a call.
func TestJobRestoredWhileSuspendedStaysOffTheGPU(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{})
	job := m.work("--queues", "2", "--duration", "500", "--runtime")
	d := m.start(atOnce)
	d.offlineTarget(job, 2)

	m.evict(job)
	suspending := m.halt(kfd.TrapSuspendQueues, job.PID)
	answer := d.announcing()
	suspending.await()
	m.restore(job)
	suspending.release()
	lease := d.answered(answer)
	m.checkEach(job, 2, offGPU)
	m.checkStill(job)

	m.evict(job)
	resuming := m.halt(kfd.TrapResumeQueues, job.PID)
	since := d.revision()
	d.complete(lease.GetLeaseId())
	resuming.await()
	m.restore(job)
	m.checkEach(job, 2, offGPU)
	resuming.release()
	d.awaitTarget(job.PID, since, running)
	m.checkEach(job, 2, onGPU)
	m.awaitProgress(job)
	job.stop()
}

// Whom the driver evicts may also end, or come to be known only then.
func TestEvictedJobThatStartsAndEndsDuringALeaseIsReleased(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{})
	job := m.work("--queues", "2", "--duration", "500", "--runtime")
	m.evict(job)
	d := m.start(atOnce)
	d.offlineTarget(job, 2)
	lease := d.announce(t.Context())
	late := m.work("--duration", "500", "--runtime")
	m.evict(late)
	m.awaitEach(late, 1, offGPU)
	job.kill()
	m.gone(d, job.PID)
	m.checkDebugs(d, 1)
	d.complete(lease.GetLeaseId())
	m.awaitEach(late, 1, queueFlags{})
	m.checkStill(late)
	m.restore(late)
	m.stays(d, late)
	late.stop()
}
