package e2e

import (
	"bytes"
	"fmt"
	"os"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdemu"
)

// endings starts a machine with a daemon and two jobs that it holds.
func endings(t *testing.T, profile string) (m *emulated, d *daemon, job, other *worker) {
	t.Helper()
	m = emulate(t, kfdemu.Config{Profile: profile})
	job = m.work("--queues", "2", "--duration", "500", "--runtime")
	other = m.work("--queues", "2", "--duration", "500", "--runtime")
	d = m.start(atOnce)
	d.offlineTarget(job, 2)
	d.offlineTarget(other, 2)
	return m, d, job, other
}

// eachRule runs a test with the driver before 6.12.103, where the daemon traces the jobs
// it holds, and after.
func eachRule(t *testing.T, test func(t *testing.T, profile string)) {
	for _, profile := range []string{"6.12", "6.12.103"} {
		t.Run(profile, func(t *testing.T) { test(t, profile) })
	}
}

func TestJobTerminatedWhileSuspendedEndsAfterTheLease(t *testing.T) {
	t.Parallel()
	eachRule(t, func(t *testing.T, profile string) {
		m, d, job, other := endings(t, profile)
		lease := d.announce(t.Context())
		job.tell("stop")
		m.elapse(20 * time.Millisecond)
		m.checkEach(job, 2, offGPU)
		d.complete(lease.GetLeaseId())
		job.finish()
		m.gone(d, job.PID)
		m.checkDebugs(d, 1)
		m.stays(d, other)
		other.stop()
	})
}

// A job that has nothing left to run destroys its queues and leaves: the driver lets
// it wait until the resume.
func TestJobThatExitsCleanlyWhileSuspendedEndsAfterTheLease(t *testing.T) {
	t.Parallel()
	eachRule(t, func(t *testing.T, profile string) {
		m, d, job, other := endings(t, profile)
		lease := d.announce(t.Context())
		for id := range uint32(2) {
			job.tell("destroy %d", id)
		}
		job.tell("stop")
		m.awaitEach(job, 2, queueFlags{Suspended: true, Destroying: true})
		m.elapse(20 * time.Millisecond)
		m.checkEach(job, 2, queueFlags{Suspended: true, Destroying: true})
		d.complete(lease.GetLeaseId())
		job.finish()
		m.gone(d, job.PID)
		m.checkDebugs(d, 1)
		m.stays(d, other)
		other.stop()
	})
}

func TestCleanExitOfAnAttachedJobReleasesEverything(t *testing.T) {
	t.Parallel()
	eachRule(t, func(t *testing.T, profile string) {
		m, d, job, other := endings(t, profile)
		fds, helper := d.fds(), m.helperOf(job)
		files, err := filesOf(helper)
		if err != nil {
			t.Fatal(err)
		}
		job.stop()
		m.gone(d, job.PID)
		m.checkDebugs(d, 1)
		other.stop()
		m.gone(d, other.PID)
		m.checkDebugs(d, 0)
		d.eventually("the daemon has at most as many files open as with two jobs", func() bool { return d.fds() <= fds })
		d.eventually("the helper of the job has fewer files open, or has ended", func() bool {
			n, err := filesOf(helper)
			return err != nil || n < files
		})
		m.stays(d)
	})
}

// leave has a worker end or become another by a command.
func (w *worker) leave(command string) func() { return func() { w.tell("%s", command) } }

func TestKilledJobReleasesEverything(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name   string
		end    func(*worker) func()
		signal syscall.Signal // it dies by, 0: it exits
	}{
		{"SIGKILL", func(w *worker) func() { return w.kill }, syscall.SIGKILL},
		{"SIGSEGV", func(w *worker) func() { return w.leave("crash") }, syscall.SIGSEGV},
		{"exit", func(w *worker) func() { return w.leave("exit") }, 0},
	} {
		for _, lease := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/suspended=%v", tc.name, lease), func(t *testing.T) {
				eachRule(t, func(t *testing.T, profile string) {
					m, d, job, other := endings(t, profile)
					if lease {
						id := d.announce(t.Context()).GetLeaseId()
						defer d.complete(id)
					}
					tc.end(job)()
					job.awaitEnd()
					status := job.cmd.ProcessState.Sys().(syscall.WaitStatus)
					if tc.signal != 0 && (!status.Signaled() || status.Signal() != tc.signal) || tc.signal == 0 && status != 0 {
						t.Errorf("the job ended with %v, want signal %v", job.cmd.ProcessState, tc.signal)
					}
					m.gone(d, job.PID)
					m.checkDebugs(d, 1)
					if lease {
						m.checkEach(other, 2, offGPU)
						m.checkStill(other)
						return
					}
					m.stays(d, other)
					other.stop()
				})
			})
		}
	}
}

// procState is the letter the kernel has for what a process does.
func procState(t *testing.T, pid int32) string {
	t.Helper()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	return string(stat[bytes.LastIndex(stat, []byte(") "))+2])
}

// A program that is stopped still has its queues suspended and resumed: the GPU does not
// ask the CPU. What it has in its rings is run.
func TestStoppedJobIsSuspendedAndResumed(t *testing.T) {
	t.Parallel()
	eachRule(t, func(t *testing.T, profile string) {
		m, d, job, other := endings(t, profile)
		lease := d.announce(t.Context())
		job.signal(syscall.SIGSTOP)
		m.eventually("the program is stopped", func() bool { return slices.Contains([]string{"T", "t"}, procState(t, job.PID)) })
		m.checkEach(job, 2, offGPU)
		d.complete(lease.GetLeaseId())
		m.awaitEach(job, 2, onGPU)

		// While it is stopped it is taken off the GPUs, too.
		lease = d.announce(t.Context())
		m.checkEach(job, 2, offGPU)
		if s := procState(t, job.PID); s != "T" && s != "t" {
			t.Errorf("the program is in state %s, want it stopped", s)
		}
		job.signal(syscall.SIGCONT)
		m.checkStill(job) // it answers
		d.complete(lease.GetLeaseId())
		m.awaitEach(job, 2, onGPU)
		m.awaitProgress(job)
		job.stop()
		other.stop()
	})
}

func TestProgramReplacedWhileSuspendedIsAttachedAgain(t *testing.T) {
	t.Parallel()
	eachRule(t, func(t *testing.T, profile string) {
		m, d, job, other := endings(t, profile)
		lease := d.announce(t.Context())
		before, _ := m.process(job.PID)
		job.tell("exec work --queues 3 --duration 500 --runtime")
		if ready := job.await("ready"); ready.PID != job.PID {
			t.Errorf("the new program is process %d, want %d", ready.PID, job.PID)
		}
		after, ok := m.process(job.PID)
		if !ok || after.MM == before.MM || len(after.Queues) != 3 {
			t.Errorf("the driver has %+v, want a new process with 3 queues", after)
		}
		m.checkEach(other, 2, offGPU)
		m.awaitEach(job, 3, offGPU)
		m.checkStill(job)
		d.complete(lease.GetLeaseId())
		m.awaitEach(job, 3, onGPU)
		m.stays(d, job, other)
		job.stop()
		other.stop()
		m.gone(d, job.PID)
		m.gone(d, other.PID)
		m.checkDebugs(d, 0)
	})
}

// The driver refuses a child the descriptor it inherited. The child lives on when the
// job is killed, and so do the open file and what the driver has of the job, except for its
// address space and its debugger.
func TestChildOfASuspendedJobIsNotAffected(t *testing.T) {
	t.Parallel()
	eachRule(t, func(t *testing.T, profile string) {
		m, d, job, other := endings(t, profile)
		lease := d.announce(t.Context())
		job.tell("fork 100")
		fork := job.await("fork")
		if syscall.Errno(fork.Errno) != syscall.EBADF || fork.PID == job.PID {
			t.Errorf("the driver told child %d %v, want EBADF", fork.PID, syscall.Errno(fork.Errno))
		}
		m.checkEach(job, 2, offGPU)
		m.checkStill(job)

		const longer = 600_000
		job.tell("fork %d", longer)
		child := job.await("fork").PID
		// The end of the job is seen when the child, which has its output, has ended, too.
		end := sync.OnceFunc(func() {
			if err := syscall.Kill(int(child), syscall.SIGKILL); err != nil {
				t.Errorf("end the child: %v", err)
			}
			job.awaitEnd()
		})
		defer end()
		job.signal(syscall.SIGKILL)
		d.eventually("the daemon has forgotten the job", func() bool { return d.target(job.PID) == nil })
		m.eventually("the driver has ended its address space and its debugging", func() bool {
			return slices.ContainsFunc(m.Driver().Processes(), func(p driver.ProcessState) bool {
				return p.PID == job.PID && p.MM == nil && !p.Enabled
			})
		})
		m.checkDebugs(d, 1)
		m.checkEach(other, 2, offGPU)
		d.complete(lease.GetLeaseId())
		m.stays(d, other)
		end()
		m.gone(d, job.PID)
		m.stays(d, other)
		other.stop()
	})
}

// A program that inherited an open file of the driver, and opens the driver itself, is another
// process of the driver with the same ID.
func TestProgramThatInheritsTheDriverHasItsOwnQueues(t *testing.T) {
	t.Parallel()
	eachRule(t, func(t *testing.T, profile string) {
		m := emulate(t, kfdemu.Config{Profile: profile})
		job := m.workAs("sh", "-c", `exec 3<>/dev/kfd; exec "$0" work --queues 2 --duration 500 --runtime`, trainBinary)
		d := m.start(atOnce)
		d.offlineTarget(job, 2)
		lease := d.announce(t.Context())
		m.checkEach(job, 2, offGPU)
		m.checkStill(job)
		d.complete(lease.GetLeaseId())
		m.awaitEach(job, 2, onGPU)
		m.awaitProgress(job)
		job.stop()
		m.gone(d, job.PID)
	})
}
