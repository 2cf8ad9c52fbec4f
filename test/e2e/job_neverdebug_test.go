package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/gpreempt/gpreempt/emu/kfdemu"
)

// A rule with never_debug keeps debuggers off a job, also off one that is attached to when the
// rule comes into force: it runs on under leases, which are answered as not quiet.
func TestNeverDebugReleasesAJobAndAttachesToNone(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{})
	job := m.work("--queues", "2", "--duration", "500", "--runtime")
	d := m.start(atOnce)
	d.offlineTarget(job, 2)
	neverDebug := strings.ReplaceAll(atOnce, "class: offline", "class: offline\n    never_debug: true")
	d.reload(neverDebug)
	d.eventually("the job is released", func() bool { return strings.Contains(d.target(job.PID).GetAttachError(), "never-debug") })
	lease, answer := d.ask(10*time.Second, m.GPUs()[0].ID)
	checkSaid(t, "a lease that cannot suspend the job", said{false, cannotSuspend, 0}, answer)
	m.awaitEach(job, 2, onGPU) // the release unmaps them for a moment
	d.check(0, "never_debug: no debugger attaches to it", "target", "explain", fmt.Sprint(job.PID))
	d.complete(lease)

	d.reload(atOnce)
	d.offlineTarget(job, 2)
	lease, answer = d.ask(10*time.Second, m.GPUs()[0].ID)
	checkSaid(t, "a lease under the old rule", said{true, done, 1}, answer)
	m.checkFrozen(job)
	d.complete(lease)
	m.awaitEach(job, 2, onGPU)
	job.stop()
}
