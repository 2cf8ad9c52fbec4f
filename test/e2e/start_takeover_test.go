package e2e

import (
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/gpreempt/gpreempt/emu/kfdemu"
	"github.com/gpreempt/gpreempt/internal/testutil"
)

// One daemon serves a host, whatever its socket.
func TestSecondDaemonOnAMachineIsRefused(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{})
	job := m.work("--queues", "2", "--duration", "500", "--runtime")
	dir := testutil.TempSocketDir(t)
	first := m.startIn(dir, atOnce)
	first.offlineTarget(job, 2)
	lease := first.announce(t.Context())
	from := m.now()

	second := prepare(t, testutil.TempSocketDir(t), atOnce, onHost)
	second.process = m.Command(t.Context(), gpreemptd, "serve", "--socket", second.socket, "--config", second.config)
	second.process.Env, second.process.Stderr = environment("RUNTIME_DIRECTORY="+dir), second.log
	second.run()
	second.checkExit(1)
	says(t, second.log.String(), fmt.Sprintf("another gpreemptd (pid %d)", first.process.Process.Pid), filepath.Join(dir, "gpreemptd.lock"), "try: ", "stop that one first")

	m.checkEach(job, 2, offGPU)
	m.checkNoResume(job, from)
	m.checkStill(job)
	first.complete(lease.GetLeaseId())
	m.awaitEach(job, 2, onGPU)
	m.stays(first, job)
	job.stop()
}

// A daemon of another runtime directory does not know of the first one. What it finds
// debugged it cannot suspend, and says so. It takes over when the first one is dead.
func TestDaemonTakesAJobOverWhenItsPreviousDaemonIsDead(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		profile string
		// leased: it starts during a lease of the first one. With the other rule the
		// daemon that attaches to the job resumes it: a job that a dead debugger suspended
		// would stay suspended.
		leased bool
		// why is the reason of the refusal.
		why string
	}{
		{"6.12", true, "(gpreempt-helper), a part of gpreempt, traces it"},
		{"6.12.103", false, "another debugger holds the process on the GPU"},
	} {
		t.Run(tc.profile, func(t *testing.T) {
			t.Parallel()
			m := emulate(t, kfdemu.Config{Profile: tc.profile})
			job := m.work("--queues", "2", "--duration", "500", "--runtime")
			first := m.start(atOnce)
			first.offlineTarget(job, 2)
			var lease string
			if tc.leased {
				lease = first.announce(t.Context()).GetLeaseId()
			}

			from := m.now()
			second := m.start(atOnce)
			second.eventually("the second daemon says that it cannot suspend the job", func() bool { return second.target(job.PID).GetAttachError() != "" })
			second.check(0, "cannot be suspended: dbgtrap: ", "target", "list")
			second.check(0, tc.why, "target", "list")
			second.check(0, tc.why, "target", "explain", fmt.Sprint(job.PID))
			taken, answer := second.ask(10 * time.Second)
			checkSaid(t, "by the second daemon", said{false, cannotSuspend, 0}, answer)
			if tc.leased {
				m.checkEach(job, 2, offGPU)
				m.checkNoResume(job, from)
				m.checkStill(job)
				first.complete(lease)
			}
			m.awaitEach(job, 2, onGPU)

			lease = first.announce(t.Context()).GetLeaseId()
			m.checkEach(job, 2, offGPU)
			first.complete(lease)
			m.awaitEach(job, 2, onGPU)

			first.kill()
			// The second one has a lease.
			second.awaitTarget(job.PID, 0, suspended)
			m.checkEach(job, 2, offGPU)
			m.checkStill(job)
			m.checkDebugs(second, 1)
			second.complete(taken)
			m.awaitEach(job, 2, onGPU)
			m.stays(second, job)
			job.stop()
		})
	}
}
