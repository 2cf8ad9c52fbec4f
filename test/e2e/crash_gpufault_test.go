package e2e

import (
	"context"
	"fmt"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdemu"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// said is what the answer to an announcement says about the GPUs.
type said struct {
	Quiesced  bool
	Reason    gpreemptv1.QuiesceReason
	Suspended uint32
}

const (
	done        = gpreemptv1.QuiesceReason_QUIESCE_REASON_DONE
	nothingToDo = gpreemptv1.QuiesceReason_QUIESCE_REASON_NOTHING_TO_DO
	tooLong     = gpreemptv1.QuiesceReason_QUIESCE_REASON_MAX_WAIT
	unsafeNow   = gpreemptv1.QuiesceReason_QUIESCE_REASON_UNSAFE

	quarantined = gpreemptv1.TargetState_TARGET_STATE_QUARANTINED
)

// ask announces work on some GPUs, on all if none are named, and returns the lease and
// the answer.
func (d *daemon) ask(maxWait time.Duration, gpus ...gpreempt.GPUID) (lease string, answer said) {
	d.t.Helper()
	req := announcement()
	req.MaxWait = durationpb.New(d.waitFor(maxWait))
	for _, id := range gpus {
		req.Gpus = append(req.Gpus, &gpreemptv1.GpuSelector{By: &gpreemptv1.GpuSelector_GpuId{GpuId: uint32(id)}})
	}
	resp, err := d.online.NotifyOnline(d.t.Context(), req)
	if err != nil {
		d.t.Fatal(err)
	}
	return resp.GetLeaseId(), said{resp.GetQuiesced(), resp.GetReason(), resp.GetSuspendedTargets()}
}

// checkSaid checks the answer to an announcement.
func checkSaid(t *testing.T, when string, want, got said) {
	t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("%s: answer (-want +got):\n%s", when, diff)
	}
}

// breaker reports whether that of a GPU is open.
func (d *daemon) breaker(id gpreempt.GPUID) bool {
	d.t.Helper()
	resp, err := d.admin.ListGpus(d.t.Context(), &gpreemptv1.ListGpusRequest{})
	if err != nil {
		d.t.Fatal(err)
	}
	for _, gpu := range resp.GetGpus() {
		if gpu.GetGpuId() == uint32(id) {
			return gpu.GetBreakerOpen()
		}
	}
	d.t.Fatalf("the daemon does not know GPU %v", id)
	return false
}

// failing starts a machine of two GPUs with a job on both, one on each alone, and a
// daemon that holds them. On both GPUs there is online work, too, which goes on.
func failing(t *testing.T, gpu string, config string) (m *emulated, d *daemon, both, first, second *worker) {
	t.Helper()
	m = emulate(t, kfdemu.Config{Machine: gpu, GPUs: 2})
	both = m.work("--queues", "2", "--duration", "500", "--runtime")
	first = m.work("--gpus", m.gpuFlag(0), "--duration", "500", "--runtime")
	second = m.work("--gpus", m.gpuFlag(1), "--duration", "500", "--runtime")
	online := m.serve("--duration", "200")
	t.Cleanup(func() {
		if !t.Failed() {
			m.awaitProgress(online)
			online.stop()
		}
	})
	d = m.start(config)
	d.offlineTarget(both, 4)
	d.offlineTarget(first, 1)
	d.offlineTarget(second, 1)
	return m, d, both, first, second
}

// gpuFlag names a GPU to a worker.
func (m *emulated) gpuFlag(index int) string { return fmt.Sprint(m.GPUs()[index].ID) }

// A machine whose driver changes all queues of a GPU at once, and one that takes them
// one by one.
var schedulers = []struct {
	machine, config string
	// off and on are the steps of the hardware by which queues leave and come back.
	off, on driver.StepKind
	// names reports whether the driver says which GPU did not take queues back.
	names bool
}{
	{"mi300x", atOnce, driver.StepUnmap, driver.StepMap, true},
	{"rx7900xtx", atOnceRDNA, driver.StepRemove, driver.StepAdd, false},
}

// A job is suspended on all its GPUs or on none. What the one GPU does has no effect on
// jobs that are on the other.
func TestSuspensionThatFailsOnOneOfTwoGPUsIsUndoneAndReported(t *testing.T) {
	t.Parallel()
	for _, s := range schedulers {
		t.Run(s.machine, func(t *testing.T) {
			m, d, both, first, second := failing(t, s.machine, s.config)
			good, bad := m.GPUs()[0].ID, m.GPUs()[1].ID
			fault := m.Inject(kfdemu.Fault{Step: s.off, Op: driver.TrapOp(kfd.TrapSuspendQueues), GPU: bad, Target: both.PID, Errno: syscall.ETIME, Nth: 1})
			since := d.revision()
			lease, answer := d.ask(10 * time.Second)
			if answer.Quiesced || answer.Reason != unsafeNow {
				t.Errorf("with one GPU failing: answer %+v, want not quiet, unsafe", answer)
			}
			if fault.Hits() != 1 {
				t.Errorf("the GPU failed %d times, want once", fault.Hits())
			}
			d.awaitTarget(both.PID, since, quarantined)
			m.awaitEach(both, 4, onGPU)
			m.awaitEach(second, 1, onGPU)
			m.checkEach(first, 1, offGPU)
			m.checkStill(first)
			m.awaitProgress(both)
			m.awaitProgress(second)
			if got := [2]bool{d.breaker(good), d.breaker(bad)}; got != [2]bool{false, true} {
				t.Errorf("the breakers of the good and the bad GPU are open: %v, want the bad one's", got)
			}
			d.check(0, "breaker", "target", "explain", fmt.Sprint(second.PID))
			d.check(0, "run (decides)  ends in 4m", "target", "explain", fmt.Sprint(both.PID))
			d.complete(lease)
			m.awaitEach(first, 1, onGPU)

			// On the good GPU all is as before, but for the job that failed.
			lease, answer = d.ask(10*time.Second, good)
			checkSaid(t, "on the good GPU", said{false, unsafeNow, 1}, answer)
			m.checkEach(first, 1, offGPU)
			m.awaitEach(both, 4, onGPU) // attaching to it again takes it off for a moment
			d.complete(lease)
			m.awaitEach(first, 1, onGPU)
			both.stop()
			m.gone(d, both.PID)
			lease, answer = d.ask(10*time.Second, good)
			checkSaid(t, "on the good GPU without the job", said{true, done, 1}, answer)
			m.checkStill(first)
			d.complete(lease)
			m.awaitEach(first, 1, onGPU)
			first.stop()
			second.stop()
		})
	}
}

// The daemon retries queues that a GPU failed to map until the GPU maps them.
func TestResumeThatFailsOnOneOfTwoGPUsIsRetriedUntilEveryQueueRuns(t *testing.T) {
	t.Parallel()
	for _, s := range schedulers {
		for _, step := range []driver.StepKind{s.off, s.on} {
			if s.off == driver.StepRemove && step == s.off {
				continue // nothing is removed to resume
			}
			for _, times := range []int{1, 7} {
				t.Run(fmt.Sprintf("%s/%s/%d times", s.machine, step, times), func(t *testing.T) {
					m, d, both, first, second := failing(t, s.machine, s.config)
					good, bad := m.GPUs()[0].ID, m.GPUs()[1].ID
					lease, answer := d.ask(10 * time.Second)
					checkSaid(t, "before the GPU fails", said{true, done, 3}, answer)
					for range times {
						m.Inject(kfdemu.Fault{Step: step, Op: driver.TrapOp(kfd.TrapResumeQueues), GPU: bad, Target: both.PID, Errno: syscall.ETIME, Nth: 1})
					}
					d.complete(lease)
					for _, w := range []*worker{both, first, second} {
						m.eventually("every queue runs", func() bool { return m.allOn(w) })
						m.awaitProgress(w)
					}
					if times == 1 {
						// The suspend was undone immediately.
						d.eventually("the job counts as running", func() bool { return d.target(both.PID).GetState() == running })
						lease, answer := d.ask(10 * time.Second)
						checkSaid(t, "after the GPU failed once", said{true, done, 3}, answer)
						d.complete(lease)
					} else {
						d.eventually("the job is left alone", func() bool {
							return d.target(both.PID).GetState() == quarantined
						})
					}
					// Where the driver does not name the GPU it may be any of the job's.
					if got, want := [2]bool{d.breaker(good), d.breaker(bad)}, [2]bool{times > 1 && !s.names, times > 1}; got != want {
						t.Errorf("the breakers of the good and the bad GPU are open: %v, want %v", got, want)
					}
					if times > 1 {
						suspended := uint32(0)
						if s.names {
							suspended = 1
						}
						lease, answer := d.ask(10 * time.Second)
						checkSaid(t, "after the GPU kept failing", said{false, unsafeNow, suspended}, answer)
						d.complete(lease)
					}
					for _, w := range []*worker{both, first, second} {
						m.eventually("every queue runs", func() bool { return m.allOn(w) })
					}
					both.stop()
					first.stop()
					second.stop()
				})
			}
		}
	}
}

// allOn reports whether all queues of a worker are on the GPU.
func (m *emulated) allOn(w *worker) bool {
	p, ok := m.process(w.PID)
	return ok && m.each(w.PID, len(p.Queues), onGPU)
}

// hang makes the suspension of a job hang on a GPU, as when the firmware does not answer. A real
// driver fails the call after 9 s, the emulated one here when giveUp is called.
func (m *emulated) hang(w *worker, gpu gpreempt.GPUID) (giveUp func()) {
	until := make(chan struct{})
	giveUp = sync.OnceFunc(func() { close(until) })
	m.t.Cleanup(giveUp) // also when the test fails before
	m.Inject(kfdemu.Fault{
		Step: driver.StepUnmap, Op: driver.TrapOp(kfd.TrapSuspendQueues), GPU: gpu, Target: w.PID, Until: until, Errno: syscall.ETIME, Nth: 1,
	})
	return giveUp
}

// The driver holds the lock of a GPU that does not answer, and takes those of all GPUs
// of a process, one after the other, to suspend and resume it (suspend_queues,
// resume_queues): until it gives up, after 9 s, what a job is on other GPUs has to wait,
// too. The daemon reports it, and opens the GPU's breaker after 2 s.
func TestHangingSuspensionIsReportedAndUndone(t *testing.T) {
	t.Parallel()
	for bad := range 2 { // the index of the GPU
		t.Run(fmt.Sprint("GPU ", bad), func(t *testing.T) {
			t.Parallel()
			m := emulate(t, kfdemu.Config{GPUs: 2})
			m.gpreemptd = gpreemptd // with a StuckAfter of 2 s
			wellGPU, illGPU := m.gpuFlag(1-bad), m.gpuFlag(bad)
			bad, good := m.GPUs()[bad].ID, m.GPUs()[1-bad].ID
			well := m.work("--gpus", wellGPU, "--queues", "2", "--duration", "500", "--runtime")
			ill := m.work("--gpus", illGPU, "--queues", "2", "--duration", "500", "--runtime")
			d := m.start(atOnce)
			d.offlineTarget(well, 2)
			d.offlineTarget(ill, 2)
			onGood, answer := d.ask(10*time.Second, good)
			checkSaid(t, "before the GPU hangs", said{true, done, 1}, answer)

			giveUp := m.hang(ill, bad)
			from := m.now()
			const maxWait = 300 * time.Millisecond
			began := time.Now()
			onBad, answer := d.ask(maxWait, bad)
			if took := time.Since(began); took < maxWait {
				t.Errorf("the announcement was answered after %v, want not before %v", took, maxWait)
			}
			checkSaid(t, "while the GPU hangs", said{false, tooLong, 0}, answer)
			if got := d.target(ill.PID).GetState(); got != gpreemptv1.TargetState_TARGET_STATE_SUSPENDING {
				t.Errorf("the job whose GPU hangs is %v, want it suspending", got)
			}
			// What is suspended already is quiet.
			second, answer := d.ask(10*time.Second, good)
			checkSaid(t, "on the other GPU", said{true, done, 1}, answer)
			m.checkEach(well, 2, offGPU)
			m.checkStill(well)

			d.events.await("the breaker opens before the driver gives up", 0, func(e *gpreemptv1.Event) bool {
				return e.GetKind() == gpreemptv1.EventKind_EVENT_KIND_BREAKER && e.GetGpuId() == uint32(bad) && e.GetCause() == string(scheduler.CauseHung)
			})
			if d.breaker(good) {
				t.Error("the breaker of the good GPU is open before anything was asked of it")
			}
			third, answer := d.ask(10*time.Second, bad)
			checkSaid(t, "after 2 s", said{false, unsafeNow, 0}, answer)
			d.check(0, "breaker", "target", "explain", fmt.Sprint(ill.PID))
			d.check(0, "gpreemptd", "status") // what the probes in Kubernetes ask
			for _, lease := range []string{onBad, third, onGood, second} {
				d.complete(lease)
			}

			giveUp()
			m.await("the driver gives up", from, func(e kfdemu.Event) bool {
				return e.Kind == kfdemu.EventStep && e.Target == ill.PID && e.Errno == "ETIME"
			})
			m.awaitEach(well, 2, onGPU)
			m.awaitEach(ill, 2, onGPU)
			m.awaitProgress(ill)
			m.awaitProgress(well)
			d.eventually("the job whose GPU hung is left alone", func() bool {
				return d.target(ill.PID).GetState() == quarantined
			})
			d.eventually("the other job counts as running", func() bool { return d.target(well.PID).GetState() == running })
			lease, answer := d.ask(10*time.Second, bad)
			checkSaid(t, "after the GPU hung", said{false, unsafeNow, 0}, answer)
			d.complete(lease)
			ill.stop()
			well.stop()
		})
	}
}

// newcomer starts a job and checks that it goes through a lease like any other.
func (m *emulated) newcomer(d *daemon) {
	m.t.Helper()
	fresh := m.work("--queues", "2", "--duration", "500", "--runtime")
	d.eventually("the new job can be suspended", func() bool { return d.target(fresh.PID).GetMechanism() == "dbgtrap" })
	lease := d.announce(m.t.Context())
	m.checkFrozen(fresh)
	m.checkStill(fresh)
	d.complete(lease.GetLeaseId())
	m.eventually("every queue runs", func() bool { return m.allOn(fresh) })
	m.awaitProgress(fresh)
	fresh.stop()
	m.gone(d, fresh.PID)
}

// A reset takes the queues of every process away permanently: the driver keeps them
// evicted. Jobs that come later are suspended and resumed as ever.
func TestJobsStartedAfterAResetAreServed(t *testing.T) {
	t.Parallel()
	for _, when := range []string{"idle", "suspended"} {
		t.Run(when, func(t *testing.T) {
			m := emulate(t, kfdemu.Config{GPUs: 2})
			job := m.work("--duration", "500", "--runtime")
			d := m.start(atOnce)
			d.offlineTarget(job, 2)
			lease := ""
			if when == "suspended" {
				lease = d.announce(t.Context()).GetLeaseId()
			}
			m.reset(m.GPUs()[1].ID, nil)
			m.checkEach(job, 2, queueFlags{Suspended: lease != ""})
			since := d.revision()
			if lease != "" {
				d.complete(lease)
				d.awaitTarget(job.PID, since, running)
			}
			m.checkEach(job, 2, queueFlags{})
			m.checkStill(job)
			m.newcomer(d)

			// What the reset left does not affect new jobs.
			lease = d.announce(t.Context()).GetLeaseId()
			m.checkEach(job, 2, offGPU)
			job.kill()
			m.gone(d, job.PID)
			d.complete(lease)
			m.newcomer(d)
			m.checkDebugs(d, 0)
		})
	}
}

// reset resets a GPU; meanwhile is done before it is over.
func (m *emulated) reset(gpu gpreempt.GPUID, meanwhile func()) {
	m.t.Helper()
	if err := m.ResetGPU(gpu, meanwhile); err != nil {
		m.t.Fatal(err)
	}
}

// The driver answers EIO for what a GPU is asked while it is reset.
func TestSuspensionDuringAResetIsUndoneAndReported(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{GPUs: 2})
	well := m.work("--gpus", m.gpuFlag(0), "--duration", "500", "--runtime")
	d := m.start(atOnce)
	d.offlineTarget(well, 1)
	good, bad := m.GPUs()[0].ID, m.GPUs()[1].ID
	ill := m.spawn(m.Command(context.Background(), trainBinary, "work", "--gpus", m.gpuFlag(1), "--queues", "2", "--duration", "500", "--runtime"))
	ill.await("ready")
	d.offlineTarget(ill, 2)

	suspending := m.halt(kfd.TrapSuspendQueues, ill.PID)
	since := d.revision()
	answer := d.announcing()
	suspending.await()
	m.reset(bad, func() {
		suspending.release()
		resp := <-answer
		checkSaid(t, "during a reset", said{false, unsafeNow, 1}, said{resp.GetQuiesced(), resp.GetReason(), resp.GetSuspendedTargets()})
		d.complete(resp.GetLeaseId())
	})
	d.awaitTarget(ill.PID, since, quarantined)
	m.awaitEach(ill, 2, queueFlags{}) // the reset keeps them off
	if got := [2]bool{d.breaker(good), d.breaker(bad)}; got != [2]bool{false, true} {
		t.Errorf("the breakers of the good and the bad GPU are open: %v, want the bad one's", got)
	}
	ill.kill()
	m.gone(d, ill.PID)
	well.kill() // it lost its queue, too
	m.gone(d, well.PID)
	m.checkDebugs(d, 0)
	fresh := m.work("--gpus", m.gpuFlag(0), "--duration", "500", "--runtime")
	d.offlineTarget(fresh, 1)
	lease, after := d.ask(10*time.Second, good)
	checkSaid(t, "on the other GPU after the reset", said{true, done, 1}, after)
	d.complete(lease)
	m.awaitEach(fresh, 1, onGPU)
	fresh.stop()
}
