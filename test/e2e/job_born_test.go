package e2e

import (
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdemu"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// A queue that is born runs until the driver's event is answered. From then on it does
// not run before the lease ends, whichever of the daemon's sources is slow: the
// driver's event, its snapshot, its answer, or the scan of the process list.
func TestQueueBornDuringALeaseDoesNotRunUntilItEnds(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		late kfd.TrapOp
	}{
		{"nothing is late", 0},
		{"the scan comes before the event is looked at", kfd.TrapQueryDebugEvent},
		{"the snapshot is late", kfd.TrapGetQueueSnapshot},
		{"the suspension is late", kfd.TrapSuspendQueues},
	} {
		t.Run(tc.name, func(t *testing.T) {
			m := emulate(t, kfdemu.Config{})
			job := m.work("--duration", "500", "--runtime")
			d := m.start(atOnce)
			d.offlineTarget(job, 1)
			lease := d.announce(t.Context())
			from := m.now()
			if tc.late != 0 {
				// Three scans come meanwhile.
				m.Inject(kfdemu.Fault{Op: driver.TrapOp(tc.late), Target: job.PID, Delay: 150 * time.Millisecond, Always: true})
			}
			for range 3 {
				job.create()
			}
			m.awaitEach(job, 4, offGPU)
			d.offlineTarget(job, 4)
			m.checkStill(job)
			m.checkEach(job, 4, offGPU)
			m.checkNoResume(job, from)
			d.eventually("the job counts as suspended", func() bool { return d.target(job.PID).GetState() == suspended })
			d.complete(lease.GetLeaseId())
			m.awaitEach(job, 4, onGPU)
			m.awaitProgress(job)
			job.stop()
		})
	}
}

// The driver answers for the queues it was asked about; one that was born since the
// daemon looked is not among them.
func TestQueueBornBetweenSnapshotAndSuspendIsSuspended(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{})
	job := m.work("--duration", "500", "--runtime")
	d := m.start(atOnce)
	d.offlineTarget(job, 1)
	suspending := m.halt(kfd.TrapSuspendQueues, job.PID)
	answer := d.announcing()
	suspending.await()
	job.create()
	suspending.release()
	lease := d.answered(answer)
	m.awaitEach(job, 2, offGPU)
	m.checkStill(job)
	d.complete(lease.GetLeaseId())
	m.awaitEach(job, 2, onGPU)
	job.stop()
}

func TestQueueCreatedDuringASuspendIsSuspended(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{})
	job := m.work("--duration", "500", "--runtime")
	d := m.start(atOnce)
	d.offlineTarget(job, 1)
	slow := m.Inject(kfdemu.Fault{Step: driver.StepUnmap, Op: driver.TrapOp(kfd.TrapSuspendQueues), Target: job.PID, Delay: 100 * time.Millisecond})
	from := m.now()
	answer := d.announcing()
	m.await("the queues are being suspended", from, func(e kfdemu.Event) bool { return e.Kind == kfdemu.EventFault })
	job.create() // the driver has the process locked
	if slow.Hits() != 1 {
		t.Errorf("%d suspensions were slow, want 1", slow.Hits())
	}
	lease := d.answered(answer)
	m.awaitEach(job, 2, offGPU)
	m.checkStill(job)
	d.complete(lease.GetLeaseId())
	m.awaitEach(job, 2, onGPU)
	job.stop()
}

func TestQueueBornWhileTheJobIsResumedRuns(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{})
	job := m.work("--duration", "500", "--runtime")
	d := m.start(atOnce)
	d.offlineTarget(job, 1)
	lease := d.announce(t.Context())
	resuming := m.halt(kfd.TrapResumeQueues, job.PID)
	since := d.revision()
	d.complete(lease.GetLeaseId())
	resuming.await()
	job.create()
	resuming.release()
	d.awaitTarget(job.PID, since, running)
	m.awaitEach(job, 2, onGPU)
	m.awaitProgress(job)
	job.stop()
}

func TestQueueBornWhileTheDaemonAttachesIsKnown(t *testing.T) {
	t.Parallel()
	for _, op := range []kfd.TrapOp{kfd.TrapEnable, kfd.TrapSendRuntimeEvent, kfd.TrapGetQueueSnapshot} {
		t.Run(op.String(), func(t *testing.T) {
			m := emulate(t, kfdemu.Config{})
			job := m.work("--duration", "500", "--runtime")
			attaching := m.halt(op, job.PID)
			d := m.start(atOnce)
			attaching.await()
			job.create()
			attaching.release()
			d.offlineTarget(job, 2)
			lease := d.announce(t.Context())
			m.checkEach(job, 2, offGPU)
			m.checkStill(job)
			d.complete(lease.GetLeaseId())
			m.awaitEach(job, 2, onGPU)
			job.stop()
		})
	}
}

// The driver destroys no queue that a debugger has suspended (wait_on_destroy_queue).
func TestQueueDestroyedWhileSuspendedIsGoneAfterTheLease(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{})
	job := m.work("--queues", "2", "--duration", "500", "--runtime")
	d := m.start(atOnce)
	d.offlineTarget(job, 2)
	lease := d.announce(t.Context())
	old, born, keeps := uint32(0), job.create(), uint32(1)
	m.awaitEach(job, 3, offGPU)
	for _, id := range []uint32{old, born} {
		job.tell("destroy %d", id)
		m.eventually("the queue waits to be destroyed", func() bool { return m.flags(job.PID)[id].Destroying })
	}
	m.elapse(20 * time.Millisecond)
	dying := queueFlags{Suspended: true, Destroying: true}
	if diff := cmp.Diff(map[uint32]queueFlags{old: dying, born: dying, keeps: offGPU}, m.flags(job.PID)); diff != "" {
		t.Errorf("the queues during the lease (-want +got):\n%s", diff)
	}
	d.complete(lease.GetLeaseId())
	for range 2 {
		job.await("destroyed")
	}
	if diff := cmp.Diff(map[uint32]queueFlags{keeps: onGPU}, m.flags(job.PID)); diff != "" {
		t.Errorf("the queues after the lease (-want +got):\n%s", diff)
	}
	d.offlineTarget(job, 1)
	job.stop()
}

// The next lease begins while the queues that waited for the end of the one before are
// being destroyed.
func TestNextLeaseHandlesQueuesBeingDestroyed(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{})
	job := m.work("--queues", "6", "--duration", "500", "--runtime")
	d := m.start(atOnce)
	d.offlineTarget(job, 6)
	lease := d.announce(t.Context())
	for id := range uint32(5) {
		job.tell("destroy %d", id)
		m.eventually("the queue waits to be destroyed", func() bool { return m.flags(job.PID)[id].Destroying })
	}
	d.complete(lease.GetLeaseId())
	next := d.announce(t.Context())
	d.complete(next.GetLeaseId())
	for range 5 {
		job.await("destroyed")
	}
	m.awaitEach(job, 1, onGPU)
	last := d.announce(t.Context())
	m.checkEach(job, 1, offGPU)
	d.complete(last.GetLeaseId())
	m.awaitEach(job, 1, onGPU)
	job.stop()
}

func TestRealJobThatStartsDuringALeaseIsSuspendedUntilItEnds(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{GPUs: 2})
	d := m.start(atOnce)
	lease := d.announce(t.Context())
	if lease.GetReason() != gpreemptv1.QuiesceReason_QUIESCE_REASON_NOTHING_TO_DO {
		t.Errorf("answered %v on empty GPUs", lease.GetReason())
	}
	job := m.work("--queues", "2", "--sdma", "--duration", "500", "--runtime")
	m.awaitEach(job, 6, offGPU)
	d.offlineTarget(job, 6)
	d.eventually("the job counts as suspended", func() bool { return d.target(job.PID).GetState() == suspended })
	m.checkStill(job)
	m.checkEach(job, 6, offGPU)
	since := d.revision()
	d.complete(lease.GetLeaseId())
	d.awaitTarget(job.PID, since, running)
	m.awaitEach(job, 6, onGPU)
	m.awaitProgress(job)
	job.stop()
	m.gone(d, job.PID)
	m.checkDebugs(d, 0)
}

// A process is a target from its first queue on to its last.
func TestJobThatRecreatesItsOnlyQueueDuringALeaseIsSuspended(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{})
	job := m.work("--queues", "0", "--duration", "500", "--runtime")
	d := m.start(atOnce)
	lease := d.announce(t.Context())
	for range 3 {
		id := job.create()
		m.awaitEach(job, 1, offGPU)
		d.eventually("the job counts as suspended", func() bool { return d.target(job.PID).GetState() == suspended })
		job.tell("destroy %d", id)
		m.awaitEach(job, 1, queueFlags{Suspended: true, Destroying: true})
		d.complete(lease.GetLeaseId())
		job.await("destroyed")
		lease = d.announce(t.Context())
	}
	d.eventually("a process without queues is not a target", func() bool { return d.target(job.PID) == nil })
	job.stop()
	m.gone(d, job.PID)
	m.checkDebugs(d, 0)
	d.complete(lease.GetLeaseId())
}

// Whenever the daemon asks what is new there is one queue more.
func TestJobThatKeepsCreatingQueuesIsSuspendedSoon(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{})
	job := m.work("--duration", "500", "--runtime")
	d := m.start(atOnce)
	d.offlineTarget(job, 1)
	const most = 60
	var born atomic.Int32
	atSuspend, announced := make(chan int32, 1), make(chan struct{})
	goOn := sync.OnceFunc(func() { close(announced) })
	t.Cleanup(goOn)
	m.Inject(kfdemu.Fault{Op: driver.TrapOp(kfd.TrapQueryDebugEvent), Target: job.PID, Always: true, Do: func() {
		n := born.Add(1)
		if n == 1 {
			<-announced // else all of them may be born before
		}
		if n <= most {
			job.create()
		}
	}})
	m.Inject(kfdemu.Fault{Op: driver.TrapOp(kfd.TrapSuspendQueues), Target: job.PID, Do: func() { atSuspend <- born.Load() }})
	since := d.revision()
	job.create() // from here on one thing leads to another
	answer := d.announcing()
	d.events.await("the job is to be suspended", since, func(e *gpreemptv1.Event) bool {
		return e.GetKind() == gpreemptv1.EventKind_EVENT_KIND_LEASE && e.GetToLease() == gpreemptv1.LeaseState_LEASE_STATE_QUIESCING
	})
	goOn()
	lease := d.answered(answer)
	if n := <-atSuspend; n > most/2 {
		t.Errorf("the job was suspended after %d new queues", n)
	}
	m.eventually("all of it is suspended", func() bool { return m.each(job.PID, most+2, offGPU) })
	d.complete(lease.GetLeaseId())
	m.awaitEach(job, most+2, onGPU)
	job.stop()
}

// All of a job's threads that wait to destroy a queue go on at once when a lease ends,
// and the driver lets them one after another.
func TestJobThatDestroysManyQueuesBetweenTwoLeasesIsSuspendedInTheSecond(t *testing.T) {
	t.Parallel()
	eachRule(t, func(t *testing.T, profile string) {
		for queues := 40; !suspendedWhileDestroying(t, profile, queues); queues /= 2 {
			if queues < 4 {
				t.Fatalf("a call of the driver takes seconds also with %d queues", queues)
			}
			t.Logf("on this busy host a call of the driver takes seconds with %d queues", queues)
		}
	})
}

// suspendedWhileDestroying checks a job that destroys all its queues but one. False: the host is
// so busy that a call of the driver takes seconds behind the others, and no announcement may wait
// that long.
func suspendedWhileDestroying(t *testing.T, profile string, queues int) bool {
	t.Helper()
	m := emulate(t, kfdemu.Config{Profile: profile})
	job := m.work("--queues", strconv.Itoa(queues), "--duration", "500", "--runtime")
	d := m.start(atOnce)
	d.offlineTarget(job, queues)
	lease := d.announce(t.Context()).GetLeaseId()
	for id := range queues - 1 {
		job.tell("destroy %d", id+1)
	}
	m.eventually("its threads wait in the driver", func() bool {
		waiting := 0
		for _, q := range m.flags(job.PID) {
			if q.Destroying {
				waiting++
			}
		}
		return waiting == queues-1
	})
	from := m.now()
	d.complete(lease)
	lease, answer := d.ask(longest)
	if !answer.Quiesced {
		m.await(fmt.Sprintf("answer %+v without a call of the driver that takes long", answer), from, func(e kfdemu.Event) bool {
			return e.Kind == kfdemu.EventCall && e.Target == job.PID && e.Took >= float64(time.Second.Microseconds())
		})
		job.kill()
		m.gone(d, job.PID)
		return false
	}
	m.awaitEach(job, 1, offGPU)
	if got := d.target(job.PID); got.GetState() != suspended {
		t.Errorf("the job is %v, want it suspended", got)
	}
	d.complete(lease)
	m.awaitEach(job, 1, onGPU)
	job.stop()
	return true
}
