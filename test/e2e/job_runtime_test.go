package e2e

import (
	"syscall"
	"testing"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdemu"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// A runtime that does not enable itself for debugging cannot be suspended through the
// debugger's interface, and the answer reports that the GPUs are not quiet.
func TestJobWithoutRuntimeKeepsRunningAndTheAnswerReportsIt(t *testing.T) {
	t.Parallel()
	eachRule(t, func(t *testing.T, profile string) {
		m := emulate(t, kfdemu.Config{Profile: profile})
		old := m.work("--queues", "2", "--duration", "500")
		job := m.work("--duration", "500", "--runtime")
		d := m.start(atOnce)
		d.offlineTarget(job, 1)
		d.eventually("the daemon says why", func() bool { return d.target(old.PID).GetAttachError() != "" })
		says(t, d.target(old.PID).GetAttachError(), "did not enable its ROCm runtime for debugging", "ROCm of 6.0 or later")

		lease, answer := d.ask(longest)
		checkSaid(t, "with a job that cannot be suspended", said{false, cannotSuspend, 1}, answer)
		m.checkEach(job, 1, offGPU)
		m.checkEach(old, 2, onGPU)
		m.awaitProgress(old)
		m.checkDebugs(d, 1)
		d.complete(lease)
		m.awaitEach(job, 1, onGPU)
		old.stop()
		job.stop()
	})
}

func TestJobWithoutRuntimeIsPausedByTheNextMechanism(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{})
	old := m.work("--queues", "2", "--duration", "500")
	d := m.start(atOnce + "mechanisms: [dbgtrap, freezer]\n")
	d.eventually("the next mechanism holds the job", func() bool { return d.target(old.PID).GetMechanism() == "freezer" })
	says(t, d.target(old.PID).GetMechanismWhy(), "did not enable its ROCm runtime for debugging")
	lease, answer := d.ask(longest)
	checkSaid(t, "with a job that is stopped", said{true, done, 1}, answer)
	if s := procState(t, old.PID); s != "T" {
		t.Errorf("the job is in state %s, want it stopped", s)
	}
	m.checkEach(old, 2, onGPU) // with what was in them
	m.checkDebugs(d, 0)
	d.complete(lease)
	m.awaitProgress(old)
	old.stop()
	m.gone(d, old.PID)
}

// The driver lets a runtime wait for the debugger's answer when it comes and when it
// goes; here it does so in every order with what the daemon does.
func TestRuntimeStartAndStopDoNotBlock(t *testing.T) {
	t.Parallel()
	eachRule(t, func(t *testing.T, profile string) {
		m := emulate(t, kfdemu.Config{Profile: profile})
		job := m.work("--duration", "500", "--runtime")
		other := m.work("--duration", "500", "--runtime")
		d := m.start(atOnce)
		d.offlineTarget(job, 1)
		d.offlineTarget(other, 1)
		last := uint32(0)
		for range 10 {
			job.tell("destroy %d", last)
			job.await("destroyed")
			job.tell("rtdisable")
			job.await("rtdisabled")
			job.tell("rtenable")
			job.await("rtenabled")
			last = job.create()
			lease := d.announce(t.Context())
			d.complete(lease.GetLeaseId())
		}
		d.offlineTarget(job, 1)
		lease := d.announce(t.Context())
		if n := lease.GetSuspendedTargets(); n != 2 {
			t.Errorf("%d targets are suspended, want 2", n)
		}
		m.checkEach(job, 1, offGPU)
		m.checkEach(other, 1, offGPU)
		d.complete(lease.GetLeaseId())
		m.awaitEach(job, 1, onGPU)
		job.stop()
		other.stop()
	})
}

// Helpers answer runtimes, so that none waits for a daemon that is stopped.
func TestRuntimeDoesNotWaitForAStoppedDaemon(t *testing.T) {
	t.Parallel()
	eachRule(t, func(t *testing.T, profile string) {
		m := emulate(t, kfdemu.Config{Profile: profile})
		job := m.work("--duration", "500", "--runtime")
		d := m.start(atOnce)
		d.offlineTarget(job, 1)
		d.signal(syscall.SIGSTOP)
		m.eventually("the daemon is stopped", func() bool { return procState(t, int32(d.process.Process.Pid)) == "T" })
		job.tell("destroy 0")
		job.await("destroyed")
		job.tell("rtdisable")
		job.await("rtdisabled")
		job.tell("rtenable")
		job.await("rtenabled")
		d.signal(syscall.SIGCONT)
		job.create()
		d.offlineTarget(job, 1)
		lease := d.announce(t.Context())
		m.awaitEach(job, 1, offGPU)
		d.complete(lease.GetLeaseId())
		m.awaitEach(job, 1, onGPU)
		job.stop()
		m.gone(d, job.PID)
		m.checkDebugs(d, 0)
	})
}

// A daemon that dies between hearing of a runtime and answering it has answered before.
func TestRuntimeDoesNotWaitForADaemonThatDied(t *testing.T) {
	t.Parallel()
	for _, op := range []kfd.TrapOp{kfd.TrapQueryDebugEvent, kfd.TrapQueryExceptionInfo, kfd.TrapSendRuntimeEvent} {
		t.Run(op.String(), func(t *testing.T) {
			m := emulate(t, kfdemu.Config{})
			job := m.work("--duration", "500", "--runtime")
			d := m.start(atOnce)
			d.offlineTarget(job, 1)
			// It still has its queue, and the daemon holds it.
			m.Inject(kfdemu.Fault{Op: driver.TrapOp(op), Caller: int32(d.process.Process.Pid), Target: job.PID, Kill: kfdemu.KillCaller})
			job.tell("rtdisable")
			job.await("rtdisabled")
			d.checkExit(-1)
			m.eventually("the driver has released the job", func() bool {
				p, _ := m.process(job.PID)
				return !p.Enabled && m.each(job.PID, 1, onGPU)
			})
			job.tell("destroy 0")
			job.await("destroyed")
			job.tell("rtenable")
			job.await("rtenabled")
			job.create()

			next := m.start(atOnce)
			next.offlineTarget(job, 1)
			lease := next.announce(t.Context())
			m.checkEach(job, 1, offGPU)
			next.complete(lease.GetLeaseId())
			m.awaitEach(job, 1, onGPU)
			job.stop()
		})
	}
}

// A runtime that is shut down takes its queues back: the driver resumes them. A program
// does that on its way out, but this one stays.
func TestProgramThatEndsItsRuntimeInALeaseIsNotReportedSuspended(t *testing.T) {
	t.Parallel()
	eachRule(t, func(t *testing.T, profile string) {
		m := emulate(t, kfdemu.Config{Profile: profile})
		job := m.work("--duration", "500", "--runtime")
		d := m.start(atOnce)
		d.offlineTarget(job, 1)
		lease := d.announce(t.Context())
		job.tell("rtdisable")
		job.await("rtdisabled")
		m.awaitEach(job, 1, onGPU)
		d.eventually("the daemon does not say that it is suspended", func() bool { return d.target(job.PID).GetState() != suspended })
		job.stop()
		m.gone(d, job.PID)
		d.complete(lease.GetLeaseId())
	})
}
