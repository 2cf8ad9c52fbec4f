package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/testutil"
)

func TestSoftGPUProgramsProveTheirPackets(t *testing.T) {
	m := onSoftGPU(t)
	packets := fmt.Sprint(m.times(2000, 100))
	for _, args := range []string{"--queues 2", "--queues 2 --wait poll", "--queues 0 --sdma", "--queues 1 --sdma --churn"} {
		t.Run(args, func(t *testing.T) {
			w := m.serve(append([]string{"--packets", packets, "--rate", "0", "--duration", "100"}, strings.Fields(args)...)...)
			w.finish()
			m.awaitEach(w, 0, softState{})
		})
	}
}

func TestSoftGPUEachSuspensionIsSeenInTheDriversRunlist(t *testing.T) {
	m := onSoftGPU(t)
	job := m.work("--queues", "2")
	d := m.start(atOnce)
	queues := 2 * len(m.gpus)
	d.offlineTarget(job, queues)
	pairs := m.times(1000, 50)
	for i := range pairs {
		before := m.unmaps()
		lease := m.announce(d)
		if !m.each(job.PID, queues, softOff) {
			t.Fatalf("pair %d: the announcement was answered, and the driver has %+v", i, m.queues(job.PID))
		}
		for gpu, n := range m.unmaps() {
			if n <= before[gpu] {
				t.Errorf("pair %d: the driver did not unmap the queues of GPU %d", i, m.gpus[gpu])
			}
		}
		d.complete(lease)
		m.awaitEach(job, queues, softOn)
	}
	m.awaitProgress(job)
	job.stop()
	t.Logf("%d announcements, each seen in the runlists of %d GPUs, and each resume; %d more were too slow", pairs, len(m.gpus), m.slow)
}

func TestSoftGPUPacketsRunOnceWhileTheJobIsSuspendedAndResumed(t *testing.T) {
	m := onSoftGPU(t)
	packets := uint64(m.times(100_000, 4_000))
	// As many a second as an emulated CPU executes beside all else.
	job := m.work("--queues", "2", "--duration", "50", "--rate", "200", "--depth", "64", "--wait", "poll")
	d := m.start(atOnce)
	d.offlineTarget(job, 2*len(m.gpus))
	leases := 0
	for ; leases < 10 || job.count() < packets; leases++ {
		d.complete(m.announce(d))
	}
	job.tell("stop")
	report := job.finish()
	if report.Packets != report.Count || report.Count < packets {
		t.Errorf("the job says %s, want at least %d packets, each run once", report.Line, packets)
	}
	t.Logf("%d packets across %d leases: each ran once and in order", report.Count, leases)
}

func TestSoftGPUKilledDaemonLeavesEveryQueueMapped(t *testing.T) {
	m := onSoftGPU(t)
	job := m.work("--queues", "2")
	queues := 2 * len(m.gpus)
	deaths := m.times(200, 6)
	for i := range deaths {
		d := m.start(atOnce)
		d.offlineTarget(job, queues)
		lease := m.announce(d)
		m.checkEach(job, queues, softOff)
		var call sync.WaitGroup // it ends with the daemon
		switch i % 3 {
		case 1: // while it resumes the job
			call.Go(func() {
				_, _ = d.online.Complete(t.Context(), &gpreemptv1.CompleteRequest{LeaseId: lease})
			})
		case 2: // while it suspends the job
			d.complete(lease)
			m.awaitEach(job, queues, softOn)
			call.Go(func() { _, _ = d.online.NotifyOnline(t.Context(), announcement()) })
		}
		d.kill()
		call.Wait()
		m.awaitEach(job, queues, softOn)
		m.awaitProgress(job)
		if t.Failed() {
			t.Fatalf("death %d", i)
		}
		if i%20 == 19 {
			t.Logf("%d deaths", i+1)
		}
	}
	job.stop()
	t.Logf("every queue was mapped again after each of %d deaths", deaths)
}

func TestSoftGPUQueueBornDuringALeaseIsSuspended(t *testing.T) {
	m := onSoftGPU(t)
	other := m.serve("--gpus", m.gpu(0))
	job := m.work("--gpus", m.gpu(0))
	d := m.start(atOnce)
	d.offlineTarget(job, 1)
	lease := m.announce(d)
	for range 3 {
		job.create()
	}
	m.awaitEach(job, 4, softOff)
	d.offlineTarget(job, 4)
	m.checkStill(job, other)

	// The driver destroys no queue that a debugger has suspended.
	job.tell("destroy 0")
	m.eventually("the queue waits to be destroyed", func() bool {
		return m.queues(job.PID)[softQueue{m.gpus[0], 0}] == softState{Suspended: true, Destroying: true}
	})
	d.complete(lease)
	job.await("destroyed")
	m.awaitEach(job, 3, softOn)
	job.stop()
	other.stop()
	m.gone(d, job.PID)
}

func TestSoftGPUJobThatStartsDuringALeaseIsSuspended(t *testing.T) {
	m := onSoftGPU(t)
	d := m.start(atOnce)
	lease := m.announce(d)
	job := m.work("--sdma")
	queues := 2 * len(m.gpus)
	m.awaitEach(job, queues, softOff)
	d.complete(lease)
	m.awaitEach(job, queues, softOn)
	m.awaitProgress(job)
	job.stop()
}

func TestSoftGPUProgramReplacedWhileSuspendedIsSuspended(t *testing.T) {
	m := onSoftGPU(t)
	job := m.work("--gpus", m.gpu(0), "--queues", "2")
	d := m.start(atOnce)
	d.offlineTarget(job, 2)
	lease := m.announce(d)
	job.tell("exec work --gpus %s --queues 3 --duration 2000 --rate 20 --runtime", m.gpu(0))
	if ready := job.await("ready"); ready.PID != job.PID {
		t.Errorf("the new program is process %d, want %d", ready.PID, job.PID)
	}
	m.awaitEach(job, 3, softOff)
	d.complete(lease)
	m.awaitEach(job, 3, softOn)
	m.awaitProgress(job)
	job.stop()
	m.gone(d, job.PID)
}

func TestSoftGPUChildOfASuspendedJobIsNotAffected(t *testing.T) {
	m := onSoftGPU(t)
	other := m.serve("--gpus", m.gpu(0))
	job := m.work("--gpus", m.gpu(0), "--queues", "2")
	d := m.start(atOnce)
	d.offlineTarget(job, 2)
	lease := m.announce(d)
	job.tell("fork 100")
	if fork := job.await("fork"); syscall.Errno(fork.Errno) != syscall.EBADF || fork.PID == job.PID {
		t.Errorf("the driver told child %d %v, want EBADF", fork.PID, syscall.Errno(fork.Errno))
	}
	m.checkEach(job, 2, softOff)
	m.checkStill(job, other)
	d.complete(lease)
	m.awaitEach(job, 2, softOn)
	job.stop()
	other.stop()
}

func TestSoftGPUJobKilledWhileSuspendedIsForgotten(t *testing.T) {
	m := onSoftGPU(t)
	job, other := m.work("--queues", "2"), m.work("--queues", "2")
	queues := 2 * len(m.gpus)
	d := m.start(atOnce)
	d.offlineTarget(job, queues)
	d.offlineTarget(other, queues)
	lease := m.announce(d)
	job.kill()
	m.gone(d, job.PID)
	m.checkEach(other, queues, softOff)
	d.complete(lease)
	m.awaitEach(other, queues, softOn)
	m.awaitProgress(other)
	other.stop()
}

// Since 7.2 the driver unmaps the queues of a job where its memory is released: in the job, or in the packet
// processor, which the unmap waits for (emu/softgpu/channel.c).
func TestSoftGPUJobsThatDieTogetherResetNoGPU(t *testing.T) {
	m := onSoftGPU(t)
	resets := func() (all []string) {
		for _, node := range m.lines("nodes") {
			all = append(all, node["resets"])
		}
		return all
	}
	before := resets()
	for range m.times(100, 5) {
		var jobs []*worker
		for range 4 {
			jobs = append(jobs, m.work("--rate", "200"))
		}
		for _, w := range jobs {
			w.signal(syscall.SIGKILL)
		}
		for _, w := range jobs {
			w.kill()
			m.awaitEach(w, 0, softState{})
		}
		if diff := cmp.Diff(before, resets()); diff != "" {
			t.Fatalf("the driver has reset a GPU (-before +after):\n%s", diff)
		}
	}
}

func TestSoftGPUAnnouncementForOneGPUSuspendsOnlyTheJobsThere(t *testing.T) {
	m := onSoftGPU(t)
	if len(m.gpus) < 2 {
		t.Skip("it needs two GPUs")
	}
	first, second := m.work("--gpus", m.gpu(0), "--queues", "2"), m.work("--gpus", m.gpu(1), "--queues", "2")
	d := m.start(atOnce)
	d.offlineTarget(first, 2)
	d.offlineTarget(second, 2)
	for i, jobs := range [][2]*worker{{first, second}, {second, first}} {
		lease, answer := d.ask(longest, m.gpus[i])
		checkSaid(t, "on one GPU", said{true, done, 1}, answer)
		m.checkEach(jobs[0], 2, softOff)
		m.checkEach(jobs[1], 2, softOn)
		m.checkStill(jobs[0], jobs[1])
		d.complete(lease)
		m.awaitEach(jobs[0], 2, softOn)
	}
	first.stop()
	second.stop()
}

// A second daemon, of whatever runtime directory, is refused and changes nothing. When the first one is dead,
// it takes over.
func TestSoftGPUSecondDaemonTakesOver(t *testing.T) {
	m := onSoftGPU(t)
	job := m.work("--queues", "2")
	queues := 2 * len(m.gpus)
	first := m.start(atOnce)
	first.offlineTarget(job, queues)
	lease := m.announce(first)
	dir := testutil.TempSocketDir(t)
	second := prepare(t, dir, atOnce, onHost)
	second.process.Env = environment("RUNTIME_DIRECTORY=" + dir)
	second.run()
	second.checkExit(1)
	says(t, second.log.String(), fmt.Sprintf("another gpreemptd (pid %d) holds /proc/1/root/run/gpreemptd.lock", first.process.Process.Pid), "stop that one first")
	m.checkEach(job, queues, softOff)
	first.complete(lease)
	m.awaitEach(job, queues, softOn)

	first.kill()
	second = m.startIn(dir, atOnce)
	second.offlineTarget(job, queues)
	lease = m.announce(second)
	m.checkEach(job, queues, softOff)
	second.complete(lease)
	m.awaitEach(job, queues, softOn)
	m.awaitProgress(job)
	job.stop()
}

func TestSoftGPUJobUnderADebuggerIsAttachedAfterIt(t *testing.T) {
	m := onSoftGPU(t)
	job := m.work("--gpus", m.gpu(0), "--queues", "2")
	rocgdb := debug(t, exec.Command(os.Args[0]))
	rocgdb.obey("ok", "seize %d", job.PID)
	rocgdb.obey("ok", "enable %d", job.PID)
	d := m.start(atOnce)
	d.eventually("the daemon says why it cannot suspend the job", func() bool { return d.target(job.PID).GetAttachError() != "" })
	lease, answer := d.ask(longest)
	checkSaid(t, "of a job that another debugs", said{false, cannotSuspend, 0}, answer)
	m.checkEach(job, 2, softOn)

	rocgdb.obey("ok", "disable %d", job.PID)
	rocgdb.obey("ok", "leave")
	d.awaitTarget(job.PID, 0, suspended)
	m.checkEach(job, 2, softOff)
	d.complete(lease)
	m.awaitEach(job, 2, softOn)
	job.stop()
}

func TestSoftGPULaterDebuggerDoesNotResumeTheJob(t *testing.T) {
	m := onSoftGPU(t)
	other := m.serve("--gpus", m.gpu(0))
	job := m.work("--gpus", m.gpu(0), "--queues", "2")
	d := m.start(atOnce)
	d.offlineTarget(job, 2)
	lease := m.announce(d)
	rocgdb := debug(t, exec.Command(os.Args[0]))
	rocgdb.obey("ok", "seize %d", job.PID)
	m.checkEach(job, 2, softOff)
	rocgdb.obey("EALREADY", "enable %d", job.PID)
	m.checkEach(job, 2, softOff)
	m.checkStill(job, other)
	d.complete(lease)
	rocgdb.obey("ok", "leave")
	m.awaitEach(job, 2, softOn)
	m.awaitProgress(job)
	job.stop()
	other.stop()
}

// The checkpoint interface evicts the queues of a process.
func TestSoftGPUCheckpointMechanismEvictsAndRestores(t *testing.T) {
	m := onSoftGPU(t)
	m.awaitReads()
	other := m.serve("--gpus", m.gpu(0))
	job := m.work("--gpus", m.gpu(0), "--queues", "2")
	d := m.start(atOnce + "mechanisms: [criu]\n")
	d.heldBy("criu", job, 2)
	d.eventually("the job has slots", func() bool { return len(d.slots(job)) >= 2 })
	for range m.times(100, 5) {
		lease := m.announce(d)
		m.checkEach(job, 2, softState{Evicted: true})
		d.complete(lease)
		m.awaitEach(job, 2, softOn)
	}
	lease := m.announce(d)
	m.checkStill(job, other)
	d.eventually("the suspended job has no slot", func() bool { return len(d.slots(job)) == 0 })
	if diff := cmp.Diff(softOn, m.queues(other.PID)[softQueue{m.gpus[0], 0}]); diff != "" {
		t.Errorf("the queue of the other process (-want +got):\n%s", diff)
	}
	d.complete(lease)
	m.awaitEach(job, 2, softOn)
	job.stop()
	other.stop()
}
