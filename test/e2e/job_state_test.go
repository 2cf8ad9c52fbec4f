package e2e

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/gpumodel"
	"github.com/gpreempt/gpreempt/emu/kfdemu"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// What the driver knows, as tests wait for it and compare it.

// longest is the longest max_wait there is.
const longest = 10 * time.Second

// eventually waits until cond holds: it looks again after each event of the machine,
// and now and then for what leaves none.
func (m *emulated) eventually(what string, cond func() bool) {
	m.t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	late := time.After(timeout)
	for {
		_, _, next := m.log.since(m.now())
		if cond() {
			return
		}
		select {
		case <-next:
		case <-tick.C:
		case <-late:
			m.t.Fatalf("%s: not within %v; the driver has %+v", what, timeout, m.Driver().Processes())
		}
	}
}

// process returns what the driver knows of a process; false if nothing.
func (m *emulated) process(pid int32) (driver.ProcessState, bool) {
	for _, p := range m.Driver().Processes() {
		if p.PID == pid && p.Alive && !p.Secondary {
			return p, true
		}
	}
	return driver.ProcessState{}, false
}

// queueFlags is where a queue stands.
type queueFlags struct{ Suspended, Running, Destroying bool }

var (
	onGPU  = queueFlags{Running: true}
	offGPU = queueFlags{Suspended: true}
)

// flags returns where the queues of a process stand, by their ids.
func (m *emulated) flags(pid int32) map[uint32]queueFlags {
	p, _ := m.process(pid)
	all := map[uint32]queueFlags{}
	for _, q := range p.Queues {
		all[q.ID] = queueFlags{q.Suspended, q.Running, q.Destroying}
	}
	return all
}

// each reports whether a process has n queues, and each stands so.
func (m *emulated) each(pid int32, n int, want queueFlags) bool {
	all := m.flags(pid)
	for _, got := range all {
		if got != want {
			return false
		}
	}
	return len(all) == n
}

// checkEach checks that a worker has n queues, and each stands so.
func (m *emulated) checkEach(w *worker, n int, want queueFlags) {
	m.t.Helper()
	if !m.each(w.PID, n, want) {
		m.t.Errorf("process %d has the queues %+v, want %d, each %+v", w.PID, m.flags(w.PID), n, want)
	}
}

// awaitEach waits until a worker has n queues, and each stands so.
func (m *emulated) awaitEach(w *worker, n int, want queueFlags) {
	m.t.Helper()
	m.eventually("the queues of a worker", func() bool { return m.each(w.PID, n, want) })
}

// elapse advances the GPUs by a time.
func (m *emulated) elapse(d time.Duration) {
	m.t.Helper()
	now := func() (at time.Duration) {
		m.Machine(func(machine *gpumodel.Machine) { at = machine.Now() })
		return at
	}
	began := now()
	m.eventually("the GPUs go on", func() bool { return now() >= began+d })
}

// stands returns how far the GPU got with each queue of a worker: the packets that
// counted themselves or, of a queue that copies, the bytes that were read.
func (w *worker) stands() map[uint32]uint64 {
	w.t.Helper()
	w.tell("report")
	all := map[uint32]uint64{}
	for _, q := range w.await("report").Queues {
		if all[q.ID] = q.Count; q.Kind == "sdma" {
			all[q.ID] = q.Read
		}
	}
	return all
}

// checkStill advances the GPUs and checks that no queue of a worker progressed.
func (m *emulated) checkStill(w *worker) {
	m.t.Helper()
	before := w.stands()
	m.elapse(20 * time.Millisecond)
	if diff := cmp.Diff(before, w.stands()); diff != "" {
		m.t.Errorf("packets of worker %d ran while it was suspended (-before +after):\n%s", w.PID, diff)
	}
}

// awaitProgress waits until each queue of a worker ran more.
func (m *emulated) awaitProgress(w *worker) {
	m.t.Helper()
	before := w.stands()
	m.eventually("each queue of a worker goes on", func() bool {
		after := w.stands()
		for id, count := range after {
			if count <= before[id] {
				return false
			}
		}
		return len(after) > 0
	})
}

// create has a worker make one more queue and returns its id.
func (w *worker) create() uint32 {
	w.t.Helper()
	w.tell("create")
	return w.created()
}

// created waits for a queue to be made and returns its id.
func (w *worker) created() uint32 {
	w.t.Helper()
	queues := w.await("created").Queues
	if len(queues) != 1 {
		w.t.Fatalf("worker %d made %v", w.PID, queues)
	}
	return queues[0].ID
}

// gone waits until the driver and the daemon know nothing of a process, and checks
// that the daemon debugs nobody else than those.
func (m *emulated) gone(d *daemon, pid int32) {
	m.t.Helper()
	m.eventually("the driver has forgotten the process", func() bool {
		return !slices.ContainsFunc(m.Driver().Processes(), func(p driver.ProcessState) bool { return p.PID == pid })
	})
	d.eventually("the daemon has forgotten the process", func() bool { return d.target(pid) == nil })
}

// checkDebugs checks whom the helpers of the daemon debug, as the driver counts: each at most
// one, and the daemon itself none.
func (m *emulated) checkDebugs(d *daemon, want int) {
	m.t.Helper()
	self := int32(d.process.Process.Pid)
	all := m.Driver().Processes()
	helpers := map[int32]bool{}
	var counted, held int
	for _, p := range all {
		switch {
		case p.PID == self && p.Debugged != 0:
			m.t.Errorf("the driver counts %d processes that the daemon itself debugs", p.Debugged)
		case parent(p.PID) == self:
			helpers[p.PID] = true
			counted += p.Debugged
			if p.Debugged > 1 {
				m.t.Errorf("helper %d debugs %d processes", p.PID, p.Debugged)
			}
		}
	}
	for _, p := range all {
		if p.Enabled && helpers[p.Debugger] {
			held++
		}
	}
	if counted != want || held != want {
		m.t.Errorf("the daemon debugs %d processes, and the driver counts %d, want %d", held, counted, want)
	}
}

// parent returns the parent of a process, 0 if it has ended.
func parent(pid int32) int32 {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, "PPid:"); ok {
			n, _ := strconv.Atoi(strings.TrimSpace(rest))
			return int32(n)
		}
	}
	return 0
}

// stays checks that a job the daemon did not lose goes through a lease, and that a
// new one does.
func (m *emulated) stays(d *daemon, others ...*worker) {
	m.t.Helper()
	fresh := m.work("--duration", "500", "--runtime")
	d.offlineTarget(fresh, 1)
	lease := d.announce(m.t.Context())
	for _, w := range append(others, fresh) {
		m.checkFrozen(w)
	}
	if want := uint32(len(others) + 1); lease.GetSuspendedTargets() != want {
		m.t.Errorf("%d targets are suspended, want %d", lease.GetSuspendedTargets(), want)
	}
	d.complete(lease.GetLeaseId())
	for _, w := range append(others, fresh) {
		m.eventually("the queues of a worker run", func() bool {
			p, ok := m.process(w.PID)
			return ok && !slices.ContainsFunc(p.Queues, func(q driver.QueueState) bool { return q.Suspended || !q.Running })
		})
		m.awaitProgress(w)
	}
	fresh.stop()
	m.gone(d, fresh.PID)
}

// halt is a fault that stops a call of the driver before it has an effect, until it is
// released.
type halt struct {
	t       *testing.T
	reached chan struct{}
	free    chan struct{}
	once    sync.Once
}

// halt stops the next call of an operation on a target.
func (m *emulated) halt(op kfd.TrapOp, target int32) *halt {
	m.t.Helper()
	h := &halt{t: m.t, reached: make(chan struct{}), free: make(chan struct{})}
	injection := m.Inject(kfdemu.Fault{Op: driver.TrapOp(op), Target: target, Do: func() {
		close(h.reached)
		<-h.free
	}})
	m.t.Cleanup(func() {
		h.release()
		injection.Remove()
	})
	return h
}

// await waits until the call is there.
func (h *halt) await() {
	h.t.Helper()
	select {
	case <-h.reached:
	case <-time.After(timeout):
		h.t.Fatalf("the daemon did not make the call within %v", timeout)
	}
}

func (h *halt) release() { h.once.Do(func() { close(h.free) }) }

// announcing announces in the background: the answer comes later.
func (d *daemon) announcing() <-chan *gpreemptv1.NotifyOnlineResponse {
	answer := make(chan *gpreemptv1.NotifyOnlineResponse, 1)
	go func() {
		resp, err := d.online.NotifyOnline(d.t.Context(), announcement())
		if err != nil {
			d.t.Error(err)
		}
		answer <- resp
	}()
	return answer
}

// answered waits for an answer and checks that the GPUs are quiet.
func (d *daemon) answered(answer <-chan *gpreemptv1.NotifyOnlineResponse) *gpreemptv1.NotifyOnlineResponse {
	d.t.Helper()
	select {
	case resp := <-answer:
		if !resp.GetQuiesced() {
			d.t.Fatalf("the GPUs are not quiet: %v", resp)
		}
		return resp
	case <-time.After(timeout):
		d.t.Fatalf("the announcement was not answered within %v", timeout)
		return nil
	}
}

// checkNoResume checks that the daemon resumed nothing of a worker from an event of the
// machine on.
func (m *emulated) checkNoResume(w *worker, from int) {
	m.t.Helper()
	all, _, _ := m.log.since(from)
	for _, e := range all {
		if e.Kind == kfdemu.EventCall && e.Op == string(driver.TrapOp(kfd.TrapResumeQueues)) && e.Target == w.PID {
			m.t.Errorf("worker %d was resumed during the lease: %+v", w.PID, e)
		}
	}
}

// A job whose class changes while it is being suspended runs again, and is one like any
// other when it is offline again: nothing about it has failed.
func TestJobThatIsReclassifiedWhileItIsBeingSuspendedIsSuspendedTheNextTime(t *testing.T) {
	t.Parallel()
	m := emulate(t, kfdemu.Config{})
	job := m.work("--queues", "2", "--duration", "500", "--runtime")
	d := m.start(atOnce)
	d.offlineTarget(job, 2)
	suspending := m.halt(kfd.TrapSuspendQueues, job.PID)
	answer := d.announcing()
	suspending.await()
	if _, err := d.admin.ClassifyTarget(t.Context(), &gpreemptv1.ClassifyTargetRequest{
		TargetId: d.target(job.PID).GetTargetId(), Class: gpreemptv1.Class_CLASS_ONLINE, Ttl: durationpb.New(300 * time.Millisecond),
	}); err != nil {
		t.Fatal(err)
	}
	suspending.release()
	d.complete((<-answer).GetLeaseId())
	m.awaitEach(job, 2, onGPU)
	m.awaitProgress(job)

	d.offlineTarget(job, 2)
	lease := d.announce(t.Context())
	m.checkFrozen(job)
	if got := d.target(job.PID); got.GetState() != suspended {
		t.Errorf("the job is %v, want it suspended", got)
	}
	d.complete(lease.GetLeaseId())
	m.awaitEach(job, 2, onGPU)
	job.stop()
}
