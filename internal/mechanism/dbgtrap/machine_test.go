package dbgtrap

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap/zaptest"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdtest"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/proc"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// The GPUs of a fake machine.
const (
	gpuA gpreempt.GPUID = 1000
	gpuB gpreempt.GPUID = 2000
)

// The kinds of scheduling firmware: by runlist with a VMID for each debugged process,
// by runlist with one for all, and queue by queue.
var schedulers = map[string]uint32{"HWS": 90402, "single-VMID": 90008, "MES": 120001}

// fixture is the mechanism on a fake machine: a fake driver, fake processes with
// faked /proc entries, and this process as the daemon.
type fixture struct {
	*Mechanism
	t       testing.TB
	machine *kfdtest.Machine
	device  *kfd.Device
	root    string
	births  chan gpreempt.ProcessKey
	lost    chan error

	mu      sync.Mutex
	reports []string // of the kernel
	jobs    map[int32]*job
	threads map[int32]*fakeThread // the latest for each pid
}

func newFixture(tb testing.TB, profile string, gfx uint32) *fixture {
	tb.Helper()
	return newFixtureOf(tb, kfdtest.Config{Profile: profile, Nodes: []driver.Node{{ID: gpuA, GFX: gfx}, {ID: gpuB, GFX: gfx}}})
}

func newFixtureOf(tb testing.TB, cfg kfdtest.Config) *fixture {
	tb.Helper()
	f := &fixture{
		t: tb, root: tb.TempDir(),
		births:  make(chan gpreempt.ProcessKey, 1),
		lost:    make(chan error, 16),
		jobs:    map[int32]*job{},
		threads: map[int32]*fakeThread{},
	}
	if cfg.Oops == nil {
		cfg.Oops = f.report
		tb.Cleanup(func() { diff(tb, "reports of the kernel", []string(nil), f.reported()) })
	}
	f.machine = kfdtest.New(cfg)
	f.openDevice()
	return f
}

func (f *fixture) openDevice() {
	f.t.Helper()
	device, err := kfd.OpenWith(f.machine.Self().Main(), kfd.DevicePath)
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { _ = device.Close() }) // the daemon may have died
	f.device = device
	f.Mechanism = New(Config{
		Device:  device,
		Attach:  f.trace,
		Root:    f.root,
		GPUs:    func(gpreempt.ProcessKey) []gpreempt.GPU { return nil },
		WaitsIn: f.machine.WaitsIn,
		Log:     zaptest.NewLogger(f.t),
	})
	f.runtimeEndTime = time.Millisecond
	f.t.Cleanup(func() {
		if !f.t.Failed() { // else that may never be, and each wait for it is a minute
			f.await("every target is released", func() bool { return f.held() == 0 })
		}
	})
}

// onEach runs a test on fake machines with each driver and each kind of firmware.
func onEach(t *testing.T, test func(t *testing.T, f *fixture)) {
	t.Helper()
	for _, profile := range []string{"6.5", "6.12", "6.12.103", "7.2", "7.3"} {
		for name, gfx := range schedulers {
			t.Run(profile+" "+name, func(t *testing.T) {
				t.Parallel()
				test(t, newFixture(t, profile, gfx))
			})
		}
	}
}

// onEachDriver is for what the GPU has no part in.
func onEachDriver(t *testing.T, test func(t *testing.T, f *fixture)) {
	t.Helper()
	for _, profile := range []string{"6.5", "6.12", "6.12.103", "7.2", "7.3"} {
		t.Run(profile, func(t *testing.T) {
			t.Parallel()
			test(t, newFixture(t, profile, schedulers["HWS"]))
		})
	}
}

// onNewRule is for drivers that assign the right to debug to a process.
func onNewRule(t *testing.T, test func(t *testing.T, f *fixture)) {
	t.Helper()
	for _, profile := range []string{"6.12.103", "7.2", "7.3"} {
		t.Run(profile, func(t *testing.T) {
			t.Parallel()
			test(t, newFixture(t, profile, schedulers["HWS"]))
		})
	}
}

// guarded ends a wait that has gone wrong.
func (f *fixture) guarded() (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(context.WithoutCancel(f.t.Context()), time.Minute, errors.New("it did not come to pass"))
}

// await waits for something to be so. The machine asks again when it changes; what is
// the session's alone is asked for now and then.
func (f *fixture) await(what string, cond func() bool) {
	f.t.Helper()
	ctx, cancel := f.guarded()
	defer cancel()
	defer f.poll()()
	if err := f.machine.Await(ctx, cond); err != nil {
		f.t.Fatalf("%s: %v", what, err)
	}
}

// poll wakes the goroutines that wait for the machine now and then, until stop.
func (f *fixture) poll() (stop func()) {
	stopped := make(chan struct{})
	go func() {
		again := time.NewTicker(5 * time.Millisecond)
		defer again.Stop()
		for {
			select {
			case <-again.C:
				f.machine.Inject(kfdtest.Fault{Op: "none"}).Remove()
			case <-stopped:
				return
			}
		}
	}()
	return func() { close(stopped) }
}

// receive takes a value that is to come.
func receive[T any](f *fixture, what string, c <-chan T) T {
	f.t.Helper()
	ctx, cancel := f.guarded()
	defer cancel()
	select {
	case v := <-c:
		return v
	case <-ctx.Done():
		f.t.Fatalf("%s: %v", what, context.Cause(ctx))
		panic("unreachable")
	}
}

// job is a fake process that uses the GPUs.
type job struct {
	*kfdtest.Process
	f  *fixture
	fd int
	// vms are the GPUs on which it acquires a VM.
	vms []gpreempt.GPUID
}

func (j *job) key() gpreempt.ProcessKey { return gpreempt.ProcessKey{PID: j.PID(), Start: j.Start()} }

// start starts a process with its runtime enabled and queues of both kinds on both
// GPUs.
func (f *fixture) start() *job {
	f.t.Helper()
	j := f.spawn()
	j.enable()
	for _, gpu := range []gpreempt.GPUID{gpuA, gpuB} {
		j.create(gpu, kfd.QueueTypeComputeAQL)
		j.create(gpu, kfd.QueueTypeSDMA)
	}
	return j
}

func (j *job) must(what string, err error) {
	j.f.t.Helper()
	if err != nil {
		j.f.t.Fatalf("the job: %s: %v", what, err)
	}
}

func (j *job) open() {
	j.f.t.Helper()
	fd, err := j.Main().OpenKFD()
	j.must("open", err)
	j.fd = fd
	j.showVMs()
}

func (j *job) enable() {
	j.f.t.Helper()
	j.must("enable the runtime", j.Main().RuntimeEnable(j.fd))
}

func (j *job) disable() {
	j.f.t.Helper()
	j.must("disable the runtime", j.Main().RuntimeDisable(j.fd))
}

func (j *job) create(gpu gpreempt.GPUID, kind uint32) uint32 {
	j.f.t.Helper()
	id, err := j.Main().CreateQueue(j.fd, gpu, kind)
	j.must("create a queue", err)
	return id
}

func (j *job) destroy(id uint32) {
	j.f.t.Helper()
	j.must("destroy a queue", j.Main().DestroyQueue(j.fd, id))
}

// exitCleanly is what a ROCm program does at its end.
func (j *job) exitCleanly() {
	j.f.t.Helper()
	for id := range j.Queues() {
		j.destroy(id)
	}
	j.disable()
	j.die(j.Kill)
}

// die ends the process, and its entry in proc.
func (j *job) die(end func()) {
	j.writeStat('R', 4) // PF_EXITING
	end()
	if err := os.RemoveAll(j.dir()); err != nil {
		j.f.t.Error(err)
	}
}

func (j *job) kill() { j.die(j.Kill) }

// exec replaces the program.
func (j *job) exec() {
	defer j.f.poll()()
	j.Exec()
}

func (j *job) dir() string { return filepath.Join(j.f.root, "proc", strconv.Itoa(int(j.PID()))) }

// writeStat puts the process's stat in proc.
func (j *job) writeStat(state byte, flags int) {
	threads := 1
	if state == 'Z' {
		threads = 2
	}
	j.writeStatOf(j.dir(), j.PID(), state, flags, threads)
}

// writeStatOf puts a stat in place at once, and not bit by bit.
func (j *job) writeStatOf(dir string, tid int32, state byte, flags, threads int) {
	text := fmt.Sprintf("%d (fake job) %c 1 1 1 0 -1 %d 0 0 0 0 0 0 0 0 20 0 %d 0 %d 0 0\n", tid, state, flags, threads, j.Start())
	if err := os.MkdirAll(dir, 0o755); err != nil {
		j.f.t.Error(err)
	}
	fresh := filepath.Join(dir, "stat.new")
	if err := os.WriteFile(fresh, []byte(text), 0o644); err != nil {
		j.f.t.Error(err)
	}
	if err := os.Rename(fresh, filepath.Join(dir, "stat")); err != nil {
		j.f.t.Error(err)
	}
}

// running returns the queues that are not suspended.
func (j *job) running() []uint32 {
	var ids []uint32
	for id, q := range j.Queues() {
		if !q.Suspended {
			ids = append(ids, id)
		}
	}
	return ids
}

// allSuspended and allRun look at the driver's own flags.
func (j *job) allSuspended() bool { return len(j.running()) == 0 }
func (j *job) allRun() bool       { return len(j.Suspended()) == 0 }

func (j *job) wantSuspended() {
	j.f.t.Helper()
	if ids := j.running(); len(ids) > 0 {
		j.f.t.Errorf("queues %v run", ids)
	}
}

func (j *job) wantRunning() {
	j.f.t.Helper()
	if ids := j.Suspended(); len(ids) > 0 {
		j.f.t.Errorf("queues %v are suspended", ids)
	}
}

func (j *job) wantFree() {
	j.f.t.Helper()
	if s, ok := j.KFD(); ok && s.Enabled {
		j.f.t.Errorf("the process is still debugged: %+v", s)
	}
	j.wantRunning()
}

// Attach is the mechanism's, with what the daemon does about a session.
func (f *fixture) Attach(ctx context.Context, target gpreempt.ProcessKey) (*driven, error) {
	return drive(ctx, f.Mechanism, target, f.births, f.lost)
}

// attach attaches to a job for the rest of the test.
func (f *fixture) attach(j *job) *driven {
	f.t.Helper()
	s, err := f.Attach(f.t.Context(), j.key())
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() {
		if err := s.Close(); err != nil {
			f.t.Errorf("close: %v", err)
		}
	})
	return s
}

func (f *fixture) must(what string, err error) {
	f.t.Helper()
	if err != nil {
		f.t.Fatalf("%s: %v", what, err)
	}
}

// oldRule reports whether the driver asks for the tracing thread.
func (f *fixture) oldRule() bool { return f.PermissionRule() == kfd.PermissionThread }

// fakeThread is a Thread of the fake machine: an OS thread of this process.
type fakeThread struct {
	pid    int32
	calls  chan func()
	detach chan struct{}
	lose   chan struct{}
	done   chan struct{}
	gone   atomic.Bool
	once   sync.Once
}

var _ Thread = (*fakeThread)(nil)

// trace is a Tracer.
func (f *fixture) trace(ctx context.Context, pid int32, start uint64) (Thread, error) {
	f.mu.Lock()
	j := f.jobs[pid]
	f.mu.Unlock()
	if j == nil || j.Start() != start || j.Dead() {
		return nil, fmt.Errorf("process %d: %w", pid, proc.ErrGone)
	}
	t := &fakeThread{
		pid: pid, calls: make(chan func()), detach: make(chan struct{}), lose: make(chan struct{}), done: make(chan struct{}),
	}
	attached := make(chan error)
	go t.run(f.machine.Self(), attached)
	if err := <-attached; err != nil {
		return nil, &proc.DeniedError{PID: pid, Tracer: 1, Why: "it is traced already", Next: "end that"}
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	go func() {
		// A real tracer is notified when its target ends.
		if f.machine.Await(ctx, j.Dead) == nil {
			t.gone.Store(true)
			t.end(t.lose)
		}
	}()
	go func() { <-t.done; cancel() }()
	f.mu.Lock()
	f.threads[pid] = t
	f.mu.Unlock()
	return t, nil
}

// run ends with its OS thread locked, so that it exits.
func (t *fakeThread) run(self *kfdtest.Process, attached chan<- error) {
	runtime.LockOSThread()
	defer close(t.done)
	err := self.Main().Seize(t.pid)
	attached <- err
	if err != nil {
		return
	}
	defer func() { _ = self.Main().Detach(t.pid) }() // it may be dead
	for {
		select {
		case f := <-t.calls:
			f()
		case <-t.detach:
			return
		case <-t.lose:
			return
		}
	}
}

func (t *fakeThread) end(why chan struct{}) { t.once.Do(func() { close(why) }) }

// losesTarget ends the trace without anybody having asked for it.
func (t *fakeThread) losesTarget() { t.end(t.lose); <-t.done }

func (t *fakeThread) Do(ctx context.Context, f func() error) error {
	answer := make(chan error, 1)
	select {
	case t.calls <- func() { answer <- mechanism.Guard(f) }:
		return <-answer
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-t.done:
		if t.gone.Load() {
			return fmt.Errorf("process %d: %w", t.pid, proc.ErrGone)
		}
		return fmt.Errorf("process %d: %w", t.pid, proc.ErrDetached)
	}
}

func (t *fakeThread) Detach(context.Context) error {
	t.end(t.detach)
	<-t.done
	return nil
}

func (t *fakeThread) Done() <-chan struct{} { return t.done }
func (t *fakeThread) Gone() bool            { return t.gone.Load() }

// suspendCalls returns what SUSPEND_QUEUES was called with.
func (f *fixture) suspendCalls() [][]uint32 {
	var calls [][]uint32
	for _, c := range f.machine.Calls() {
		if c.Op == driver.TrapOp(kfd.TrapSuspendQueues) {
			calls = append(calls, c.Queues)
		}
	}
	return calls
}

func wantErr(t testing.TB, what string, got, want error) {
	t.Helper()
	if !errors.Is(got, want) {
		t.Errorf("%s returns %v, want %v", what, got, want)
	}
}

func diff(t testing.TB, what string, want, got any) {
	t.Helper()
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("%s (-want +got):\n%s", what, d)
	}
}

// endMain ends the main thread of a process that has another, which goes on.
func (j *job) endMain(other *kfdtest.Thread) {
	task := func(tid int32) string { return filepath.Join(j.dir(), "task", strconv.Itoa(int(tid))) }
	j.writeStatOf(task(other.TID()), other.TID(), 'S', 0, 2)
	j.writeStatOf(task(j.PID()), j.PID(), 'Z', 4, 2)
	j.writeStat('Z', 4)
	j.Main().Exit()
}

// held counts the targets that have a session.
func (m *Mechanism) held() int { return len(m.sessions.All()) }
