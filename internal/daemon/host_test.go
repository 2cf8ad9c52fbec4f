package daemon

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap/zaptest"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdtest"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/mechanism/dbgtrap"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/client"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// fakeHost is a host with fake files, a fake driver and fake threads.
type fakeHost struct {
	t      testing.TB
	driver *kfdtest.Machine
	root   string
	opts   Options
	ready  <-chan struct{} // a value for each READY=1
}

const gpu gpreempt.GPUID = 63420

func newFakeHost(t testing.TB, profile, config string) *fakeHost {
	t.Helper()
	dir := testutil.TempSocketDir(t)
	h := &fakeHost{
		t: t, root: t.TempDir(),
		driver: kfdtest.New(kfdtest.Config{Profile: profile, Nodes: []driver.Node{{ID: gpu, GFX: 90402, XCCs: 8}}}),
	}
	h.opts = Options{
		ConfigPath: filepath.Join(dir, "d.yaml"), ConfigGiven: true, Socket: filepath.Join(dir, "d.sock"), Log: zaptest.NewLogger(t),
		Host: Host{
			Dir:    h.root,
			Open:   func() (*kfd.Device, error) { return kfd.OpenWith(h.driver.Self().Main(), kfd.DevicePath) },
			Attach: h.trace,
			RunDir: filepath.Join(dir, "run"),
		},
	}
	write(t, h.opts.ConfigPath, config)
	h.put("proc/sys/kernel/osrelease", "6.12.107\n")
	h.put("sys/class/kfd/kfd/proc/.keep", "")
	h.addGPU(1, gpu)
	return h
}

// addGPU writes the topology files of a GPU.
func (h *fakeHost) addGPU(node int, id gpreempt.GPUID) {
	h.t.Helper()
	dir := fmt.Sprintf("sys/class/kfd/kfd/topology/nodes/%d/", node)
	h.put(dir+"name", "ip discovery\n")
	h.put(dir+"properties", "simd_count 1216\nsimd_per_cu 4\ngfx_target_version 90402\nnum_cp_queues 24\nnum_xcc 8\ncapability 2893521536\n")
	h.put(dir+"gpu_id", id.String()+"\n")
	h.put("sys/class/kfd/kfd/topology/generation_id", fmt.Sprintf("%d\n", node))
}

func (h *fakeHost) put(path, text string) {
	h.t.Helper()
	path = filepath.Join(h.root, path)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		h.t.Fatal(err)
	}
	write(h.t, path, text)
}

// fakeJob is a process that uses the GPU.
type fakeJob struct {
	*kfdtest.Process
	h  *fakeHost
	fd int
}

func (h *fakeHost) start(comm string) *fakeJob {
	h.t.Helper()
	p := h.driver.Spawn()
	fd, err := p.Main().StartRuntime()
	if err != nil {
		h.t.Fatal(err)
	}
	proc := fmt.Sprintf("proc/%d/", p.PID())
	h.put(proc+"stat", fmt.Sprintf("%d (%s) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 %d 0 0\n", p.PID(), comm, p.Start()))
	h.put(proc+"status", "Name:\t"+comm+"\nUid:\t1000\t1000\t1000\t1000\nGid:\t100\t100\t100\t100\nTracerPid:\t0\n")
	h.put(proc+"comm", comm+"\n")
	h.put(proc+"cmdline", comm+"\x00")
	h.put(proc+"cgroup", "0::/batch\n")
	j := &fakeJob{p, h, fd}
	j.create(kfd.QueueTypeComputeAQL)
	j.create(kfd.QueueTypeSDMA)
	return j
}

// create creates a queue. The type in sysfs is the kernel's own enumeration.
func (j *fakeJob) create(kind uint32) {
	j.h.t.Helper()
	id, err := j.Main().CreateQueue(j.fd, gpu, kind)
	if err != nil {
		j.h.t.Fatal(err)
	}
	internal := "0"
	if kind == kfd.QueueTypeSDMA {
		internal = "1"
	}
	dir := fmt.Sprintf("sys/class/kfd/kfd/proc/%d/queues/%d/", j.PID(), id)
	j.h.put(dir+"gpuid", gpu.String())
	j.h.put(dir+"size", "4096")
	j.h.put(dir+"type", internal)
}

// trace starts a thread that traces a fake process.
func (h *fakeHost) trace(_ context.Context, pid int32, _ uint64) (dbgtrap.Thread, error) {
	t := &fakeThread{calls: make(chan func()), quit: make(chan struct{}), done: make(chan struct{})}
	seized := make(chan error)
	go func() {
		runtime.LockOSThread() // and it ends with the goroutine
		defer close(t.done)
		self := h.driver.Self()
		err := self.Main().Seize(pid)
		seized <- err
		if err != nil {
			return
		}
		for {
			select {
			case f := <-t.calls:
				f()
			case <-t.quit:
				_ = self.Main().Detach(pid) // it may be dead
				return
			}
		}
	}()
	if err := <-seized; err != nil {
		return nil, err
	}
	return t, nil
}

type fakeThread struct {
	calls chan func()
	quit  chan struct{}
	done  chan struct{}
}

func (t *fakeThread) Do(_ context.Context, f func() error) error {
	answer := make(chan error, 1)
	select {
	case t.calls <- func() { answer <- f() }:
		return <-answer
	case <-t.done:
		return errors.New("the thread has ended")
	}
}

func (t *fakeThread) Detach(context.Context) error {
	select {
	case t.quit <- struct{}{}:
	case <-t.done:
	}
	<-t.done
	return nil
}

func (t *fakeThread) Done() <-chan struct{} { return t.done }
func (t *fakeThread) Gone() bool            { return false }

// serve runs the daemon until the test ends, and returns a client; stop ends it earlier.
func (h *fakeHost) serve() (c *client.Client, stop func()) {
	h.t.Helper()
	ctx, cancel := context.WithCancel(h.t.Context())
	h.ready = notifySocket(h.t)
	ended := make(chan error, 1)
	go func() { ended <- Run(ctx, h.opts) }()
	select {
	case <-h.ready:
	case err := <-ended:
		h.t.Fatalf("the daemon does not start: %v", err)
	}
	c, err := client.Dial(h.opts.Socket, client.FailClosed())
	if err != nil {
		h.t.Fatal(err)
	}
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		if err := c.Close(); err != nil {
			h.t.Error(err)
		}
		cancel()
		if err := <-ended; err != nil && !h.driver.Self().Dead() {
			h.t.Errorf("the daemon ends with %v", err)
		}
	}
	h.t.Cleanup(stop)
	return c, stop
}

// await waits until cond is true for the machine.
func (h *fakeHost) await(what string, cond func() bool) {
	h.t.Helper()
	ctx, cancel := context.WithTimeout(h.t.Context(), time.Minute)
	defer cancel()
	if err := h.driver.Await(ctx, cond); err != nil {
		h.t.Fatalf("%s: %v", what, err)
	}
}

// target waits until cond is true for a target.
func (h *fakeHost) target(c *client.Client, j *fakeJob, what string, cond func(*gpreemptv1.Target) bool) {
	h.t.Helper()
	testutil.Until(h.t, what, func() bool {
		list, err := c.Admin().ListTargets(h.t.Context(), &gpreemptv1.ListTargetsRequest{})
		if err != nil {
			h.t.Fatalf("%s: %v", what, err)
		}
		return slices.ContainsFunc(list.GetTargets(), func(t *gpreemptv1.Target) bool { return t.GetPid() == j.PID() && cond(t) })
	})
}

func held(t *gpreemptv1.Target) bool { return t.GetMechanism() == "dbgtrap" }

const trainersAreOffline = "rules:\n  - name: training\n    match:\n      comm: \"train*\"\n    class: offline\n" +
	"limits:\n  requests_per_user: 1000000\n" + // the tests look all the time
	"policy:\n  preset: strict\n  linger: 0s\n  attach_after: 0s\n"

func TestLeaseSuspendsTheQueuesOfTheFakeDriver(t *testing.T) {
	for _, profile := range []string{"6.5", "6.12", "6.12.103", "7.2"} {
		t.Run(profile, func(t *testing.T) {
			h := newFakeHost(t, profile, trainersAreOffline)
			job, bystander := h.start("trainer"), h.start("viewer")
			c, stop := h.serve()
			h.target(c, job, "a mechanism is attached", held)

			lease, err := c.Acquire(t.Context(), client.Request{GPUs: client.OwnGPUs(), Label: "chat", TTL: time.Minute, MaxWait: 10 * time.Second})
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff([]uint32{0, 1}, job.Suspended()); diff != "" || !lease.Quiet() {
				t.Errorf("quiesced %v, suspended queues (-want +got):\n%s", lease.Quiet(), diff)
			}
			if got := bystander.Suspended(); len(got) > 0 {
				t.Errorf("queues %v of a process that no rule names are suspended", got)
			}
			job.create(kfd.QueueTypeComputeAQL)
			h.await("a queue born meanwhile is suspended", func() bool { return len(job.Suspended()) == 3 })

			if err := release(t.Context(), lease); err != nil {
				t.Fatal(err)
			}
			h.await("all run again", func() bool { return len(job.Suspended()) == 0 })

			if _, err := c.Acquire(t.Context(), client.Request{GPUs: client.OwnGPUs(), TTL: time.Minute, MaxWait: 10 * time.Second}); err != nil {
				t.Fatal(err)
			}
			stop()
			if state, _ := job.KFD(); state.Enabled || len(job.Suspended()) > 0 {
				t.Errorf("after the daemon: %+v, queues %v suspended", state, job.Suspended())
			}
		})
	}
}

func TestDaemonThatDiesLeavesNothingSuspendedOnTheFakeDriver(t *testing.T) {
	h := newFakeHost(t, "6.12", trainersAreOffline)
	job := h.start("trainer")
	c, _ := h.serve()
	h.target(c, job, "a mechanism is attached", held)
	if _, err := c.Acquire(t.Context(), client.Request{GPUs: client.OwnGPUs(), TTL: time.Minute, MaxWait: 10 * time.Second}); err != nil {
		t.Fatal(err)
	}
	if len(job.Suspended()) == 0 {
		t.Fatal("nothing is suspended")
	}
	h.driver.Self().Kill() // as the driver sees it
	if got := job.Suspended(); len(got) > 0 {
		t.Errorf("queues %v are suspended still", got)
	}
}

func TestGPUThatTheHazardTableDeniesIsNotUsed(t *testing.T) {
	h := newFakeHost(t, "6.12", trainersAreOffline+
		"safety:\n  hazards:\n    - id: ours\n      gfx: [gfx942]\n      action: deny\n      why: Ours hangs.\n")
	job := h.start("trainer")
	c, _ := h.serve()
	const want = "dbgtrap: hazard table: gfx942 on kernel 6.12.107, hazard ours: Ours hangs."
	h.target(c, job, "the result of the table", func(target *gpreemptv1.Target) bool { return target.GetAttachError() == want })
	if state, _ := job.KFD(); state.Enabled {
		t.Error("the job is debugged")
	}
	report, err := c.Admin().Diagnose(t.Context(), &gpreemptv1.DiagnoseRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if got := report.GetGpus(); len(got) != 1 || got[0].GetHazard() != gpreemptv1.HazardAction_HAZARD_ACTION_DENY {
		t.Errorf("the doctor's GPUs: %v", got)
	}
}

func TestJobThatEndsWhileSuspendedIsForgotten(t *testing.T) {
	h := newFakeHost(t, "7.2", trainersAreOffline)
	job := h.start("trainer")
	c, _ := h.serve()
	h.target(c, job, "a mechanism is attached", held)
	if _, err := c.Acquire(t.Context(), client.Request{GPUs: client.OwnGPUs(), TTL: time.Minute, MaxWait: 10 * time.Second}); err != nil {
		t.Fatal(err)
	}
	job.Kill()
	for _, dir := range []string{"proc", "sys/class/kfd/kfd/proc"} {
		if err := os.RemoveAll(filepath.Join(h.root, dir, strconv.Itoa(int(job.PID())))); err != nil {
			t.Fatal(err)
		}
	}
	for {
		list, err := c.Admin().ListTargets(t.Context(), &gpreemptv1.ListTargetsRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if len(list.GetTargets()) == 0 {
			return
		}
		runtime.Gosched()
	}
}

func TestProcessWithQueuesOutOfReachIsDetached(t *testing.T) {
	h := newFakeHost(t, "7.2", trainersAreOffline)
	job := h.start("trainer")
	c, _ := h.serve()
	h.target(c, job, "a mechanism is attached", held)
	secondary := fmt.Sprintf("sys/class/kfd/kfd/proc/%d/context_0/queues/0/", job.PID())
	h.put(secondary+"gpuid", gpu.String())
	h.put(secondary+"size", "4096")
	h.put(secondary+"type", "0")
	h.target(c, job, "it is rejected", func(target *gpreemptv1.Target) bool {
		return strings.Contains(target.GetAttachError(), "KFD contexts")
	})
	h.await("it is detached", func() bool { state, _ := job.KFD(); return !state.Enabled })
}

func TestGPUsThatAreAddedLaterAreFound(t *testing.T) {
	h := newFakeHost(t, "6.12", trainersAreOffline)
	node := filepath.Join(h.root, "sys/class/kfd/kfd/topology/nodes/1")
	away := filepath.Join(h.root, "away")
	if err := os.Rename(node, away); err != nil {
		t.Fatal(err)
	}
	job := h.start("trainer")
	c, _ := h.serve()
	h.target(c, job, "it is rejected until the hazard table has the GPU", func(target *gpreemptv1.Target) bool {
		return strings.Contains(target.GetAttachError(), "the GPUs of this host are not known yet")
	})
	if err := os.Rename(away, node); err != nil {
		t.Fatal(err)
	}
	h.target(c, job, "a mechanism is attached", held)
	h.addGPU(2, gpu+1) // the driver adds one after the other
	testutil.Until(t, "the second GPU is found", func() bool {
		status, err := c.Admin().GetStatus(t.Context(), &gpreemptv1.GetStatusRequest{})
		if err != nil {
			t.Fatalf("the second GPU: %v", err)
		}
		return status.GetGpuCount() == 2
	})
}

func TestProcessPausedByAnEarlierDaemonIsNotUsed(t *testing.T) {
	host := Host{RunDir: t.TempDir()}
	j, err := mechanism.OpenJournal(journalDir(host.RunDir))
	if err != nil {
		t.Fatal(err)
	}
	key := gpreempt.ProcessKey{PID: 7, Start: 7}
	// A mechanism of another version: this one cannot resume it.
	if err := j.Begin(mechanism.JournalEntry{Mechanism: "other", Target: key, At: time.Now()}); err != nil {
		t.Fatal(err)
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	d := newDaemon(t, "# defaults\n")
	d.backend.openJournal(t.Context(), host, d.log)
	if resumed, failures := d.backend.pauses.Resume(t.Context()); resumed != 0 || len(failures) != 1 {
		t.Errorf("resumed %d, failures %v", resumed, failures)
	}
	if v := d.assess("freezer", key); v.Evidence.OK {
		t.Errorf("a process that is still paused is allowed: %+v", v)
	}
	if v := d.assess("freezer", gpreempt.ProcessKey{PID: 8, Start: 8}); !v.Evidence.OK {
		t.Errorf("another process is denied: %+v", v)
	}
}

func TestQueuesOfAnAttachedTargetHaveTheirRings(t *testing.T) {
	h := newFakeHost(t, "6.12", trainersAreOffline)
	job := h.start("trainer")
	c, _ := h.serve()
	h.target(c, job, "a mechanism is attached", held)
	for {
		list, err := c.Admin().ListQueues(t.Context(), &gpreemptv1.ListQueuesRequest{TargetId: strconv.Itoa(int(job.PID()))})
		if err != nil {
			t.Fatal(err)
		}
		rings := map[uint64]bool{}
		for _, q := range list.GetQueues() {
			if q.GetSource() == "snapshot" && q.GetRingAddress() != 0 {
				rings[q.GetRingAddress()] = true
			}
		}
		if len(rings) == 2 {
			return
		}
		runtime.Gosched()
	}
}

// warns reports whether the daemon has a warning.
func (h *fakeHost) warns(c *client.Client, code string) bool {
	h.t.Helper()
	got, err := c.Admin().GetStatus(h.t.Context(), &gpreemptv1.GetStatusRequest{})
	if err != nil {
		h.t.Fatal(err)
	}
	return slices.ContainsFunc(got.GetWarnings(), func(w *gpreemptv1.Warning) bool { return w.GetCode() == code })
}

func TestEvictionsByTheDriverAreShown(t *testing.T) {
	for _, profile := range []string{"6.12", "7.2"} {
		t.Run(profile, func(t *testing.T) {
			h := newFakeHost(t, profile, trainersAreOffline)
			job := h.start("viewer")
			c, _ := h.serve()
			evictions := func() *uint64 {
				list, err := c.Admin().ListGpus(t.Context(), &gpreemptv1.ListGpusRequest{})
				if err != nil {
					t.Fatal(err)
				}
				return list.GetGpus()[0].MemoryEvictions
			}
			for evictions() == nil {
				runtime.Gosched()
			}
			if err := job.h.driver.Evict(job.MM(), kfd.TriggerTTM); err != nil {
				t.Fatal(err)
			}
			for *evictions() == 0 || !h.warns(c, "GPU_MEMORY_SHORT") {
				runtime.Gosched()
			}
		})
	}
}

func TestMissingDebugfsIsAWarningAndSuspendingWorks(t *testing.T) {
	h := newFakeHost(t, "6.12", trainersAreOffline)
	job := h.start("trainer")
	c, _ := h.serve()
	h.target(c, job, "a mechanism is attached", held)
	for {
		if h.warns(c, "DEBUGFS_MISSING") {
			break
		}
		runtime.Gosched()
	}
	if _, err := c.Admin().ListHqds(t.Context(), &gpreemptv1.ListHqdsRequest{}); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("the hardware slots: %v", err)
	}
	lease, err := c.Acquire(t.Context(), client.Request{GPUs: client.OwnGPUs(), TTL: time.Minute, MaxWait: 10 * time.Second})
	if err != nil || !lease.Quiet() {
		t.Errorf("an announcement: %v, %v", lease, err)
	}
}
