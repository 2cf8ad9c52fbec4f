package nvchannels

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/nvrmtest"
	"github.com/gpreempt/gpreempt/internal/child"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/nvrm"
)

func TestMain(m *testing.M) { os.Exit(testutil.VerifyMain(m)) }

var (
	target = gpreempt.ProcessKey{PID: 4242, Start: 77}
	other  = gpreempt.ProcessKey{PID: 4243, Start: 78}
)

// world is a fake machine with a mechanism and its supervisors, which are goroutines here.
type world struct {
	t       testing.TB
	machine *nvrmtest.Machine
	journal journal
	m       *Mechanism
	// daemon counts and ends the daemon's calls.
	daemon      *mortal
	supervisors sync.WaitGroup
	silence     time.Duration

	mu     sync.Mutex    // guards what follows
	dead   bool          // the daemon
	starts int           // of supervisors
	ended  chan struct{} // closed when the latest of them has ended
}

// journal is a mechanism.Store in memory.
type journal struct {
	mu      sync.Mutex
	entries map[gpreempt.ProcessKey]mechanism.JournalEntry
	err     error
}

func (j *journal) Begin(e mechanism.JournalEntry) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.err != nil {
		return j.err
	}
	if j.entries == nil {
		j.entries = map[gpreempt.ProcessKey]mechanism.JournalEntry{}
	}
	j.entries[e.Target] = e
	return nil
}

func (j *journal) End(target gpreempt.ProcessKey, _ string) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	delete(j.entries, target)
	return nil
}

func (j *journal) list() (all []mechanism.JournalEntry) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, e := range j.entries {
		all = append(all, e)
	}
	return all
}

var errDead = errors.New("the daemon is dead")

// mortal is a Sys whose control calls fail from a number on, as if their program had been killed:
// the call with the number has its effect if after is set.
type mortal struct {
	nvrm.Sys
	calls, last atomic.Int64
	after       atomic.Bool
	full        atomic.Bool // no descriptors are left
	died        func()
	before      func(gpreempt.ProcessKey) // is called before each, unless it is nil
}

func (d *mortal) Open(key gpreempt.ProcessKey) (nvrm.Process, error) {
	p, err := d.Sys.Open(key)
	return mortalProcess{p, d, key}, err
}

type mortalProcess struct {
	nvrm.Process
	d   *mortal
	key gpreempt.ProcessKey
}

func (p mortalProcess) Copy(n int) (nvrm.File, error) {
	if p.d.full.Load() {
		return nil, unix.EMFILE
	}
	f, err := p.Process.Copy(n)
	return mortalFile{f, p.d, p.key}, err
}

type mortalFile struct {
	nvrm.File
	d   *mortal
	key gpreempt.ProcessKey
}

func (f mortalFile) Control(client, object nvrm.Handle, cmd nvrm.Command, params []byte) error {
	if f.d.before != nil {
		f.d.before(f.key)
	}
	n, last := f.d.calls.Add(1), f.d.last.Load()
	switch {
	case last == 0 || n < last:
		return f.File.Control(client, object, cmd, params)
	case n == last && f.d.after.Load():
		_ = f.File.Control(client, object, cmd, params) // nobody learns the result
		fallthrough
	case n == last:
		f.d.died()
	}
	return errDead
}

func newWorld(t testing.TB) *world {
	t.Helper()
	w := &world{t: t, machine: nvrmtest.New(), silence: time.Hour}
	w.daemon = &mortal{Sys: w.machine.Sys(), died: w.die}
	w.m = New(Config{Sys: w.daemon, Version: "580.159.04", Journal: &w.journal, Log: zaptest.NewLogger(t, zaptest.Level(zap.DPanicLevel)), Start: w.start, Refused: func() (string, string) { return "", "" }})
	w.m.busyTime = testutil.WaitTime
	t.Cleanup(func() {
		_ = w.m.Close()
		w.supervisors.Wait()
		for _, left := range w.m.sessions.All() { // the kernel does so when a daemon dies
			left.process.Close()
		}
		w.machine.Close()
	})
	return w
}

func (w *world) start() (*os.File, *exec.Cmd, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.dead {
		return nil, nil, errDead
	}
	return w.startNext()
}

// startNext is start for another daemon.
func (w *world) startNext() (*os.File, *exec.Cmd, error) {
	daemon, socket, err := child.Pair()
	if err != nil {
		return nil, nil, err
	}
	ended := make(chan struct{})
	w.starts, w.ended = w.starts+1, ended
	w.supervisors.Go(func() {
		defer close(ended)
		defer socket.Close()
		if err := Supervise(socket, w.machine.Sys(), w.silence); err != nil {
			w.t.Error(err)
		}
	})
	return daemon, nil, nil
}

// lapse is the report that the supervisor has resumed everything.
func (w *world) lapse() {
	w.m.guard.Load().lapses.Add(1)
	w.m.lapsed()
}

// kill ends the supervisors.
func (w *world) kill() {
	if g := w.m.guard.Load(); g != nil {
		g.Shutdown(unix.SHUT_RDWR)
	}
}

// die closes what the kernel closes when the daemon dies: its ends of the sockets.
func (w *world) die() {
	w.mu.Lock()
	w.dead = true
	w.mu.Unlock()
	w.kill()
}

// attach returns a session with the target.
func (w *world) attach() mechanism.Session { return w.attachTo(target) }

func (w *world) attachTo(key gpreempt.ProcessKey) mechanism.Session {
	w.t.Helper()
	s, err := w.m.Attach(w.t.Context(), key)
	if err != nil {
		w.t.Fatal(err)
	}
	return s
}

// state are the compute channels that are disabled, of how many, and the others that are disabled.
type state struct{ Off, All, OthersOff int }

func stateOf(p *nvrmtest.Process) state {
	off, all, others, _ := p.State()
	return state{off, all, others}
}

// SuspendAll returns the results of SuspendEach.
func (m *Mechanism) SuspendAll(ctx context.Context, sessions []mechanism.Session) []error {
	errs := make([]error, len(sessions))
	m.SuspendEach(ctx, sessions, func(i int, err error) { errs[i] = err })
	return errs
}

// ResumeAll returns the results of ResumeEach.
func (m *Mechanism) ResumeAll(ctx context.Context, sessions []mechanism.Session) []error {
	errs := make([]error, len(sessions))
	m.ResumeEach(ctx, sessions, func(i int, err error) { errs[i] = err })
	return errs
}

// stand waits until no call is made for the sessions, and has none made until the result is called.
func (w *world) stand() (free func()) {
	all := w.m.sessions.All()
	for _, s := range all {
		s.begin()
	}
	return func() {
		for _, s := range all {
			s.end()
		}
	}
}
