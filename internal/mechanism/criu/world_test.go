package criu

import (
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdtest"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

func TestMain(m *testing.M) { os.Exit(testutil.VerifyMain(m)) }

// The GPUs of the faked machine: one scheduled by runlists, one queue by queue.
const (
	hws gpreempt.GPUID = 7
	mes gpreempt.GPUID = 8
)

// tb is a test, of Go or of rapid.
type tb interface {
	Helper()
	Errorf(format string, args ...any)
	Fatal(args ...any)
	Fatalf(format string, args ...any)
}

// book is a journal that outlives the daemon.
type book interface {
	mechanism.Store
	Entries() ([]mechanism.JournalEntry, []error)
}

// memory is a book without a disk.
type memory map[gpreempt.ProcessKey]mechanism.JournalEntry

func (m memory) Begin(e mechanism.JournalEntry) error           { m[e.Target] = e; return nil }
func (m memory) End(target gpreempt.ProcessKey, _ string) error { delete(m, target); return nil }
func (m memory) Entries() (entries []mechanism.JournalEntry, errs []error) {
	return slices.Collect(maps.Values(m)), nil
}

// world is a faked machine with a daemon.
type world struct {
	*kfdtest.Machine
	daemon  *kfdtest.Process
	journal book
	// tracing is the thread that runs a closure; nil for none.
	tracing *kfdtest.Thread
	targets map[int32]*kfdtest.Process
	// beginErr is what Begin of the journal returns.
	beginErr error
}

func newWorld(profile string, journal book) *world {
	w := &world{
		Machine: kfdtest.New(kfdtest.Config{Profile: profile, Nodes: []driver.Node{{ID: hws, GFX: 90402}, {ID: mes, GFX: 110501}}}),
		journal: journal,
		targets: map[int32]*kfdtest.Process{},
	}
	w.daemon = w.Spawn()
	return w
}

// newTestWorld returns a world with a journal on the disk of this machine.
func newTestWorld(t *testing.T, profile string) *world {
	t.Helper()
	j, err := mechanism.OpenJournal(filepath.Join(t.TempDir(), "journal"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := j.Close(); err != nil {
			t.Error(err)
		}
	})
	return newWorld(profile, j)
}

// mechanism returns the mechanism of the daemon that runs now.
func (w *world) mechanism() *Mechanism {
	return New(Config{Sys: worldSys{w}, Attach: w.attach, Host: worldHost{w}, Journal: worldJournal{w}, Log: zap.NewNop()})
}

// spawn starts a process with a queue on each GPU.
func (w *world) spawn(t tb) *kfdtest.Process {
	t.Helper()
	p := w.Spawn()
	w.targets[p.PID()] = p
	fd, err := p.Main().StartRuntime()
	if err != nil {
		t.Fatal(err)
	}
	w.queues(t, p, fd)
	return p
}

func (w *world) queues(t tb, p *kfdtest.Process, fd int) {
	t.Helper()
	for _, gpu := range []gpreempt.GPUID{hws, mes} {
		if _, err := p.Main().CreateQueue(fd, gpu, kfd.QueueTypeComputeAQL); err != nil {
			t.Fatal(err)
		}
	}
}

// restart kills the daemon and starts another one, which cleans up.
func (w *world) restart() error {
	w.daemon.Kill()
	w.daemon = w.Spawn()
	return w.cleanUp()
}

// cleanUp does what gpreemptd --cleanup does.
func (w *world) cleanUp() error {
	m := w.mechanism()
	entries, errs := w.journal.Entries()
	for _, e := range entries {
		errs = append(errs, m.Undo(context.Background(), e))
	}
	return errors.Join(errs...)
}

// worldSys is the driver as the daemon calls it.
type worldSys struct{ w *world }

func (s worldSys) thread() *kfdtest.Thread {
	if s.w.tracing != nil {
		return s.w.tracing
	}
	return s.w.daemon.Main()
}

func (s worldSys) Open(path string, flags int) (int, error) { return s.thread().Open(path, flags) }
func (s worldSys) Read(fd int, p []byte) (int, error)       { return s.thread().Read(fd, p) }
func (s worldSys) Write(fd int, p []byte) (int, error)      { return s.thread().Write(fd, p) }
func (s worldSys) Close(fd int) error                       { return s.thread().Close(fd) }
func (s worldSys) Ioctl(fd int, req kfd.Request, arg kfd.Pointer) (uintptr, error) {
	return s.thread().Ioctl(fd, req, arg)
}

// attach is proc.Trace.
func (w *world) attach(_ context.Context, pid int32, start uint64) (Thread, error) {
	t := w.daemon.NewThread()
	err := t.Seize(pid)
	if p := w.targets[pid]; errors.Is(err, unix.ESRCH) || p.Start() != start {
		err = mechanism.ErrGone
	}
	if err != nil {
		t.Exit()
		return nil, err
	}
	return worldThread{w, t}, nil
}

type worldThread struct {
	w *world
	t *kfdtest.Thread
}

func (t worldThread) Do(ctx context.Context, f func() error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	t.w.tracing = t.t
	defer func() { t.w.tracing = nil }()
	return f()
}

func (t worldThread) Detach(context.Context) error { t.t.Exit(); return nil }

type worldHost struct{ w *world }

func (worldHost) Capabilities() (uint64, error) { return 1 << unix.CAP_SYS_ADMIN, nil }

func (h worldHost) Open(target gpreempt.ProcessKey) (Process, error) {
	p := h.w.targets[target.PID]
	if p == nil || p.Key() != target || p.Dead() {
		return nil, mechanism.ErrGone
	}
	return worldProcess{h.w, p}, nil
}

type worldProcess struct {
	w *world
	p *kfdtest.Process
}

func (p worldProcess) Tracer() (found, remedy string, err error) { return "", "", nil }
func (p worldProcess) Close()                                    {}

func (p worldProcess) Descriptors() ([]int, error) {
	fds := p.p.FDs()
	maps.DeleteFunc(fds, func(_ int, name string) bool { return name != kfd.DevicePath })
	return slices.Sorted(maps.Keys(fds)), nil
}

func (p worldProcess) Take(number int) (int, error) {
	fd, err := p.w.daemon.Main().PidfdGetfd(p.p.PID(), number)
	if errors.Is(err, unix.ESRCH) {
		return -1, mechanism.ErrGone
	}
	return fd, err
}

// worldJournal is the journal; it fails for a daemon that is dead.
type worldJournal struct{ w *world }

func (j worldJournal) Begin(e mechanism.JournalEntry) error {
	switch {
	case j.w.daemon.Dead():
		return unix.EOWNERDEAD
	case j.w.beginErr != nil:
		return j.w.beginErr
	}
	return j.w.journal.Begin(e)
}

func (j worldJournal) End(target gpreempt.ProcessKey, mechanism string) error {
	if j.w.daemon.Dead() {
		return unix.EOWNERDEAD
	}
	return j.w.journal.End(target, mechanism)
}

// contextState is how often a context is evicted on each GPU, by CRIU_OP and others,
// and whether it is paused for the driver.
type contextState struct {
	Paused  bool
	Evicted []int
}

// contexts returns the state of each context of a living process.
func (w *world) contexts(p *kfdtest.Process) []contextState {
	var states []contextState
	if p.Dead() {
		return states
	}
	for _, s := range w.Processes() {
		if s.PID == p.PID() {
			states = append(states, contextState{s.Paused, s.Evicted})
		}
	}
	return states
}

var (
	runs = contextState{Paused: false, Evicted: []int{0, 0}}
	held = contextState{Paused: true, Evicted: []int{1, 1}}
)

func (w *world) mustBe(t tb, p *kfdtest.Process, want ...contextState) {
	t.Helper()
	if diff := cmp.Diff(want, w.contexts(p)); diff != "" {
		t.Fatalf("contexts of process %v (-want +got):\n%s", p.Key(), diff)
	}
	for id, q := range p.Queues() {
		if q.Evicted != want[0].Paused || q.Running == want[0].Paused {
			t.Fatalf("queue %d of process %v is in state %+v, and the process in %+v", id, p.Key(), q, want[0])
		}
	}
}

// mustNote checks which processes the journal has.
func (w *world) mustNote(t tb, want ...gpreempt.ProcessKey) {
	t.Helper()
	entries, errs := w.journal.Entries()
	if len(errs) > 0 {
		t.Fatal(errs)
	}
	var got []gpreempt.ProcessKey
	for _, e := range entries {
		got = append(got, e.Target)
	}
	slices.SortFunc(got, gpreempt.ProcessKey.Compare)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Fatalf("journal (-want +got):\n%s", diff)
	}
}

// pauses counts the PROCESS_INFO calls of the daemon.
func (w *world) pauses() int {
	n := 0
	for _, op := range w.Ops(w.daemon) {
		if op == opPause {
			n++
		}
	}
	return n
}

var (
	opPause   = driver.CRIUOp(kfd.CRIUOpProcessInfo)
	opUnpause = driver.CRIUOp(kfd.CRIUOpUnpause)
)

func attach(t *testing.T, m *Mechanism, target gpreempt.ProcessKey) mechanism.Session {
	t.Helper()
	s, err := m.Attach(t.Context(), target)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func must(t tb, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
