package helper

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdtest"
	"github.com/gpreempt/gpreempt/internal/child"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/mechanism/dbgtrap"
	"github.com/gpreempt/gpreempt/internal/proc"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

func TestMain(m *testing.M) { os.Exit(testutil.VerifyMain(m)) }

const gpu gpreempt.GPUID = 1000

// fixture is the mechanism on a fake machine, where each helper is a process of its own.
type fixture struct {
	*Mechanism
	t       *testing.T
	machine *kfdtest.Machine
	root    string
	log     *zap.Logger
	exits   sync.WaitGroup

	mu        sync.Mutex // guards what follows
	jobs      map[gpreempt.ProcessKey]*kfdtest.Process
	processes map[int]*helperProcess // the helpers by pid
	messages  []kind                 // of helpers, apart from the log
	killed    *helper                // the last one of killServing
	dying     <-chan struct{}        // if not nil, helpers end after their memory was released not before it is closed

	ended chan struct{} // of the pool
}

func newFixture(t *testing.T, profile string) *fixture {
	t.Helper()
	f := &fixture{t: t, root: t.TempDir(), jobs: map[gpreempt.ProcessKey]*kfdtest.Process{}}
	f.machine = kfdtest.New(kfdtest.Config{
		Profile: profile, Nodes: []driver.Node{{ID: gpu, GFX: 90402}},
		Oops: func(what string) { t.Errorf("the kernel reports: %s", what) },
	})
	f.log = zaptest.NewLogger(t)
	f.startDaemon()
	return f
}

// next returns the daemon that follows on the machine.
func (f *fixture) next() *fixture {
	f.t.Helper()
	n := &fixture{t: f.t, machine: f.machine, root: f.root, log: f.log, jobs: f.jobs}
	n.startDaemon()
	return n
}

func (f *fixture) startDaemon() {
	f.t.Helper()
	f.processes = map[int]*helperProcess{}
	device, err := kfd.OpenWith(f.machine.Self().Main(), kfd.DevicePath)
	f.must("open the driver", err)
	local := dbgtrap.New(dbgtrap.Config{Device: device, Root: f.root})
	pool := NewPool(f.log, nil, nil)
	f.ended = make(chan struct{}, 100)
	pool.start, pool.ended = f.start, func() { f.ended <- struct{}{} }
	f.Mechanism = New(Config{Pool: pool, Local: local, Safe: func() []gpreempt.GPUID { return []gpreempt.GPUID{gpu} }})
	f.t.Cleanup(func() {
		f.must("close", f.Close())
		f.exits.Wait()
		f.must("close the driver", device.Close())
	})
}

func (f *fixture) must(what string, err error) {
	f.t.Helper()
	if err != nil {
		f.t.Fatalf("%s: %v", what, err)
	}
}

// start starts a helper on the machine.
func (f *fixture) start() (*helper, error) {
	ours, theirs, err := child.Pair()
	if err != nil {
		return nil, err
	}
	p := f.machine.SpawnPart()
	h := &helperProcess{Process: p, over: make(chan struct{})}
	exit := sync.OnceFunc(func() {
		f.exits.Go(func() {
			h.die()
			// It may wait for a lock that no signal ends.
			_ = f.machine.Await(context.Background(), p.Dead)
			theirs.Close()
			f.mu.Lock()
			dying := f.dying
			f.mu.Unlock()
			if dying != nil {
				<-dying
			}
			h.endTraces()
			close(h.over)
		})
	})
	f.exits.Go(func() {
		_ = serve(theirs, f.opener(h), f.caller(h)) // killed
		exit()
	})
	f.mu.Lock()
	f.processes[int(p.PID())] = h
	f.mu.Unlock()
	c := &helper{log: f.log}
	take := func(m *message) {
		f.mu.Lock()
		f.messages = append(f.messages, m.Kind)
		f.mu.Unlock()
		c.take(m)
	}
	c.Process = child.New[request](ours, int(p.PID()), exit, func() { <-h.over }, take, f.log)
	return c, nil
}

// heard returns the messages since the last call.
func (f *fixture) heard() []kind {
	f.mu.Lock()
	defer f.mu.Unlock()
	messages := slices.DeleteFunc(f.messages, func(k kind) bool { return k == kindLog })
	f.messages = nil
	return messages
}

// killServing kills the helper that serves a target, if one does, as SIGKILL does in a call.
func (f *fixture) killServing(target gpreempt.ProcessKey) {
	f.Pool.mu.Lock()
	c := f.serving[target]
	f.Pool.mu.Unlock()
	if c == nil {
		return
	}
	f.mu.Lock()
	h := f.processes[c.PID]
	f.killed = c
	f.mu.Unlock()
	h.die()
	c.Kill()
}

// helperProcess is a helper on the machine.
type helperProcess struct {
	*kfdtest.Process
	mu      sync.Mutex
	killed  bool // it traces nothing any more
	tracers []*tracer
	over    chan struct{} // closed when it has ended
}

// die is SIGKILL.
func (p *helperProcess) die() {
	p.mu.Lock()
	p.killed = true
	p.mu.Unlock()
	p.Kill()
}

// trace starts a thread that traces a process.
func (p *helperProcess) trace(calls *sys, pid int32) (*tracer, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.killed {
		p.mu.Unlock()
		defer p.mu.Lock()
		return nil, calls.returned(unix.EOWNERDEAD)
	}
	t := &tracer{sys: calls, thread: p.NewThread(), pid: pid, done: make(chan struct{})}
	if err := t.thread.Seize(pid); err != nil {
		return nil, &proc.DeniedError{PID: pid, Tracer: 1, Why: "it is traced already", Next: "end that"}
	}
	p.tracers = append(p.tracers, t)
	return t, nil
}

// endTraces is what the end of its threads does.
func (p *helperProcess) endTraces() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, t := range p.tracers {
		t.end()
	}
}

// opener returns what opens the driver for a helper.
func (f *fixture) opener(p *helperProcess) opener {
	return func(cfg dbgtrap.Config) (*dbgtrap.Mechanism, *kfd.Device, error) {
		calls := &sys{Sys: p.Main(), over: p.over}
		device, err := kfd.OpenWith(calls, kfd.DevicePath)
		if err != nil {
			return nil, nil, err
		}
		cfg.Device, cfg.Root, cfg.Crashes = device, f.root, func(gpreempt.GPUID) bool { return false }
		cfg.Attach = func(_ context.Context, pid int32, _ uint64) (dbgtrap.Thread, error) {
			t, err := p.trace(calls, pid)
			if err != nil {
				return nil, err
			}
			return t, nil
		}
		return dbgtrap.New(cfg), device, nil
	}
}

// sys makes the calls of the only goroutine of a helper, as one of the helper's threads.
type sys struct {
	kfd.Sys
	over <-chan struct{}
}

// returned returns the error of a call. A call of a process that was killed returns nothing.
func (s *sys) returned(err error) error {
	if errors.Is(err, unix.EOWNERDEAD) {
		<-s.over
	}
	return err
}

func (s *sys) Ioctl(fd int, req kfd.Request, arg kfd.Pointer) (uintptr, error) {
	r, err := s.Sys.Ioctl(fd, req, arg)
	return r, s.returned(err)
}

// tracer is a thread of a helper that traces a process.
type tracer struct {
	sys    *sys
	thread *kfdtest.Thread
	pid    int32
	once   sync.Once
	done   chan struct{}
}

func (t *tracer) Do(_ context.Context, f func() error) error {
	before := t.sys.Sys
	t.sys.Sys = t.thread
	defer func() { t.sys.Sys = before }()
	return f()
}
func (t *tracer) Done() <-chan struct{} { return t.done }
func (t *tracer) Gone() bool            { return false }
func (t *tracer) Detach(context.Context) error {
	_ = t.thread.Detach(t.pid) // it may be dead
	t.end()
	return nil
}

func (t *tracer) end() { t.once.Do(func() { close(t.done) }) }

// job starts a process with a runtime and a queue.
func (f *fixture) job() *kfdtest.Process {
	f.t.Helper()
	p := f.machine.Spawn()
	fd, err := p.Main().StartRuntime()
	f.must("start the runtime", err)
	_, err = p.Main().CreateQueue(fd, gpu, kfd.QueueTypeComputeAQL)
	f.must("create a queue", err)
	dir := filepath.Join(f.root, "proc", strconv.Itoa(int(p.PID())))
	f.must("mkdir", os.MkdirAll(dir, 0o755))
	stat := fmt.Sprintf("%d (job) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 %d 0 0\n", p.PID(), p.Start())
	f.must("stat", os.WriteFile(filepath.Join(dir, "stat"), []byte(stat), 0o644))
	f.mu.Lock()
	defer f.mu.Unlock()
	f.jobs[p.Key()] = p
	return p
}

// bear has a job create a queue.
func (f *fixture) bear(p *kfdtest.Process) {
	f.t.Helper()
	for fd, name := range p.FDs() {
		if name == kfd.DevicePath {
			_, err := p.Main().CreateQueue(fd, gpu, kfd.QueueTypeComputeAQL)
			f.must("create a queue", err)
			return
		}
	}
}

func (f *fixture) attach(p *kfdtest.Process) *session {
	f.t.Helper()
	s, err := f.Attach(f.t.Context(), p.Key())
	f.must("attach", err)
	return s.(*session)
}

// await waits until cond holds of the machine.
func (f *fixture) await(what string, cond func() bool) {
	f.t.Helper()
	ctx, cancel := context.WithTimeoutCause(f.t.Context(), time.Minute, errors.New("it did not come to pass"))
	defer cancel()
	f.must(what, f.machine.Await(ctx, cond))
}

func (f *fixture) wantSuspended(p *kfdtest.Process, want int) {
	f.t.Helper()
	if got := len(p.Suspended()); got != want {
		f.t.Errorf("%d queues are suspended, want %d", got, want)
	}
}

func diff(t *testing.T, what string, want, got any) {
	t.Helper()
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("%s (-want +got):\n%s", what, d)
	}
}

var _ mechanism.Mechanism = (*Mechanism)(nil)
