package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdemu"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

const queueReset = gpreemptv1.QuiesceReason_QUIESCE_REASON_QUEUE_RESET

// alike starts a job whose memory is at the addresses at which any other run has it
// (ADDR_NO_RANDOMIZE).
func alike(t *testing.T, cmd *exec.Cmd) *worker {
	t.Helper()
	const addrNoRandomize = 0x40000
	runtime.LockOSThread() // the personality is the thread's, and that of what it starts
	defer runtime.UnlockOSThread()
	before, _, errno := syscall.RawSyscall(syscall.SYS_PERSONALITY, addrNoRandomize, 0, 0) //nolint:forbidigo // no package has the call
	if errno != 0 {
		t.Skipf("the personality cannot be changed here: %v", errno)
	}
	defer func() { _, _, _ = syscall.RawSyscall(syscall.SYS_PERSONALITY, before, 0, 0) }() //nolint:forbidigo // as above
	return spawn(t, cmd)
}

func (m *emulated) alike(args ...string) *worker {
	m.t.Helper()
	cmd := m.Command(context.Background(), trainBinary, append([]string{"work"}, args...)...)
	cmd.Env = append(cmd.Environ(), "GOMAXPROCS=1") // the order in which its threads map memory differs less
	w := alike(m.t, cmd)
	w.await("ready")
	return w
}

// like starts a job with its ring at the address of that of w. The order in which the threads of
// a program map memory may differ.
func (m *emulated) like(w *worker, args ...string) *worker {
	m.t.Helper()
	_, want := m.ring(w, false)
	for range 200 {
		o := m.alike(args...)
		if _, ring := m.ring(o, false); ring == want {
			return o
		}
		o.kill()
	}
	m.t.Fatal("no two jobs have their rings at one address")
	return nil
}

// ring returns the ID and the ring's address of a queue of a worker.
func (m *emulated) ring(w *worker, sdma bool) (id uint32, ring uint64) {
	m.t.Helper()
	for _, p := range m.Driver().Processes() {
		for _, q := range p.Queues {
			if p.PID == w.PID && (q.Type == kfd.QueueTypeSDMA) == sdma {
				return q.ID, q.Ring
			}
		}
	}
	m.t.Fatalf("job %d has no such queue", w.PID)
	return 0, 0
}

// resetTally is what a daemon made of the resets that were injected.
type resetTally struct {
	injected, noticed int
	// quiet were answered so. accused is how often the only suspect was not hit, missed how often
	// the process that was hit was no suspect. misnamed is how often the driver named another.
	quiet, accused, missed, misnamed int
}

// Of two jobs on each GPU, with rings at one address, a queue of the older one does not leave the
// GPU when that job is suspended. SUSPEND_QUEUES returns success.
func TestQueueThatTheDriverResetsIsNoticed(t *testing.T) {
	t.Parallel()
	// 200 resets in all: the breaker of a GPU is open for 30 s, so that each eight need a daemon of their own.
	gpus, rounds := 8, 9
	if testing.Short() {
		gpus, rounds = 2, 1
	}
	for _, tc := range some(1, []struct {
		profile string
		sdma    bool
	}{
		{"6.12.117", false},
		{"7.3", false},
		{"7.2", true},
	}) {
		t.Run(fmt.Sprintf("%s/sdma %v", tc.profile, tc.sdma), func(t *testing.T) {
			m := emulate(t, kfdemu.Config{Profile: tc.profile, GPUs: gpus})
			var hit, others []*worker
			for g := range gpus {
				args := []string{"--gpus", m.gpuFlag(g), "--duration", "2000", "--runtime"}
				queues := args
				if tc.sdma {
					queues = append(slices.Clone(args), "--sdma")
				}
				hit = append(hit, m.alike(queues...))
				others = append(others, m.like(hit[g], args...))
			}
			want := resetTally{injected: rounds * gpus, noticed: rounds * gpus}
			if !tc.sdma {
				want.misnamed = want.injected
			}
			var got resetTally
			for range rounds {
				d := m.start(atOnce)
				for g := range gpus {
					d.offlineTarget(hit[g], len(m.queuesOf(hit[g])))
					d.offlineTarget(others[g], 1)
				}
				for g := range gpus {
					got.add(m.resetOnce(d, m.GPUs()[g].ID, hit[g], tc.sdma))
				}
				d.stop()
			}
			if got != want {
				t.Errorf("%+v, want %+v", got, want)
			}
			for _, w := range append(hit, others...) {
				w.kill()
			}
		})
	}
}

func (a *resetTally) add(b resetTally) {
	a.injected += b.injected
	a.noticed += b.noticed
	a.quiet += b.quiet
	a.accused += b.accused
	a.missed += b.missed
	a.misnamed += b.misnamed
}

func (m *emulated) queuesOf(w *worker) []driver.QueueState {
	for _, p := range m.Driver().Processes() {
		if p.PID == w.PID {
			return p.Queues
		}
	}
	return nil
}

// resetOnce has a queue of a job hang while the job is suspended.
func (m *emulated) resetOnce(d *daemon, gpu gpreempt.GPUID, w *worker, sdma bool) resetTally {
	m.t.Helper()
	id, _ := m.ring(w, sdma)
	fault := m.Inject(kfdemu.Fault{
		Step: driver.StepUnmap, Op: driver.TrapOp(kfd.TrapSuspendQueues), GPU: gpu, Target: w.PID, Nth: 1,
		Reset: &driver.QueueOf{PID: w.PID, ID: id},
	})
	defer fault.Remove()
	since := d.revision()
	tally := resetDuring(d, gpu, w, func() {})
	tally.injected = fault.Hits()
	d.eventually("the job runs", func() bool { return m.allOn(w) })
	events, _, _ := d.events.after(since)
	tally.noticed = 0
	for _, e := range events {
		if e.GetKind() == gpreemptv1.EventKind_EVENT_KIND_RESET && e.GetGpuId() == uint32(gpu) {
			tally.noticed++
		}
	}
	return tally
}

// resetDuring announces work on a GPU, of which a queue of a job does not leave it until answered is
// called.
func resetDuring(d *daemon, gpu gpreempt.GPUID, w *worker, answered func()) (tally resetTally) {
	d.t.Helper()
	since := d.revision()
	lease, answer := d.ask(10*time.Second, gpu)
	answered()
	tally.injected = 1
	if answer.Quiesced {
		tally.quiet++
	} else if answer.Reason != queueReset {
		d.t.Errorf("the answer is %+v, want the reason %v", answer, queueReset)
	}
	e := d.events.await("the reset", since, func(e *gpreemptv1.Event) bool {
		return e.GetKind() == gpreemptv1.EventKind_EVENT_KIND_RESET && e.GetGpuId() == uint32(gpu)
	})
	tally.noticed++
	if pidOf(e.GetTargetId()) != w.PID {
		tally.misnamed++
		if !strings.Contains(e.GetMessage(), "any of") {
			tally.accused++
		}
	}
	d.awaitTarget(w.PID, since, quarantined)
	if explained := d.ctl("target", "explain", fmt.Sprint(w.PID)); !strings.Contains(explained.Out, "the driver reset a queue") {
		tally.missed++
	}
	if !d.breaker(gpu) {
		d.t.Errorf("the breaker of GPU %v is closed", gpu)
	}
	d.complete(lease)
	return tally
}

// The same on the real driver: TestQueueThatTheDriverResetsIsNoticed.
func TestSoftGPUQueueThatTheDriverResetsIsNoticed(t *testing.T) {
	m := onSoftGPU(t)
	var hit, others []*worker
	for g := range m.gpus {
		for _, jobs := range []*[]*worker{&hit, &others} {
			w := alike(t, exec.Command(trainBinary, "work", "--duration", "2000", "--rate", "20", "--runtime", "--gpus", m.gpu(g)))
			w.await("ready")
			*jobs = append(*jobs, w)
		}
	}
	jobs := slices.Concat(hit, others)
	// begin starts a daemon, which knows nothing of breakers and quarantines. The driver leaves a queue off that it
	// resets, or takes for the one that it resets, while that is not suspended; the next resume maps it
	// (set_queue_as_reset, resume_single_queue).
	begin := func() *daemon {
		d := m.start(atOnce)
		for _, w := range jobs {
			d.offlineTarget(w, 1)
		}
		lease := m.announce(d)
		for _, w := range jobs {
			m.checkEach(w, 1, softOff)
		}
		d.complete(lease)
		for _, w := range jobs {
			m.awaitEach(w, 1, softOn)
		}
		return d
	}
	rounds := m.times(10, 2)
	var got resetTally
	for range rounds {
		d := begin()
		for g, gpu := range m.gpus {
			control := func(command string) {
				text := fmt.Sprintf("%s %d %d:0", command, gpu, hit[g].PID)
				if err := os.WriteFile(filepath.Join(softGPUDir, "control"), []byte(text), 0); err != nil {
					t.Fatal(err)
				}
			}
			control("refuse")
			got.add(resetDuring(d, gpu, hit[g], func() { control("release") }))
		}
		d.stop()
		for _, q := range m.lines("queues") {
			if q["suspended"] != "0" || q["running"] != q["active"] {
				t.Errorf("without a daemon a queue is %v", q)
			}
		}
	}
	d := begin()
	for _, w := range jobs {
		m.awaitProgress(w)
	}
	d.stop()
	t.Logf("%+v", got)
	got.misnamed = 0 // the addresses may differ
	if want := (resetTally{injected: rounds * len(m.gpus), noticed: rounds * len(m.gpus)}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	for _, w := range jobs {
		w.kill()
	}
}

// MES does not answer REMOVE_QUEUE, and the driver returns success: in 7.2 the queue still runs, in 7.3 it
// was reset.
func TestQueueThatMESDoesNotRemoveIsNotCalledSuspended(t *testing.T) {
	t.Parallel()
	for _, profile := range []string{"6.12.117", "7.2", "7.3"} {
		t.Run(profile, func(t *testing.T) {
			m := emulate(t, kfdemu.Config{Machine: "rx7900xtx", Profile: profile})
			job := m.work("--duration", "500", "--runtime")
			d := m.start(atOnceRDNA)
			d.offlineTarget(job, 1)
			fault := m.Inject(kfdemu.Fault{
				Step: driver.StepRemove, Op: driver.TrapOp(kfd.TrapSuspendQueues), Target: job.PID, Nth: 1, Errno: syscall.ETIME,
			})
			since := d.revision()
			lease, answer := d.ask(10 * time.Second)
			if answer.Quiesced || fault.Hits() != 1 {
				t.Errorf("MES failed to remove a queue %d times: answer %+v, want not quiet", fault.Hits(), answer)
			}
			d.awaitTarget(job.PID, since, quarantined)
			events, _, _ := d.events.after(since)
			if slices.ContainsFunc(events, func(e *gpreemptv1.Event) bool {
				return e.GetToTarget() == gpreemptv1.TargetState_TARGET_STATE_SUSPENDED
			}) {
				t.Errorf("the job was called suspended: %v", events)
			}
			if !d.breaker(m.GPUs()[0].ID) {
				t.Error("the breaker is closed")
			}
			d.eventually("the job runs", func() bool { return m.allOn(job) })
			d.complete(lease)
			job.stop()
		})
	}
}
