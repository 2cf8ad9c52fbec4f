package targets

import (
	"context"
	"errors"
	"os"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

func TestMain(m *testing.M) { os.Exit(testutil.VerifyMain(m)) }

var (
	job   = gpreempt.ProcessKey{PID: 100, Start: 1}
	other = gpreempt.ProcessKey{PID: 200, Start: 2}
)

// machine is a mechanism whose answers a test sets, and the targets it is attached to.
type machine struct {
	name string
	cost time.Duration // of a suspend and of a resume; virtual
	// watched: its sessions have events.
	watched bool

	mu        sync.Mutex
	blocked   string        // what prevents its use, as its probe says
	gate      chan struct{} // a probe waits for it to be closed
	attachErr error
	stuckErr  error // Attach returns it with a session that can only be closed
	actionErr error
	panics    bool
	closeErrs int // how often Close fails; negative is always
	open      int
	suspended bool
	calls     []string
	events    chan struct{}
	handled   func() (mechanism.Report, error)
}

func (m *machine) Name() string { return m.name }

func (m *machine) Probe(context.Context, gpreempt.ProcessKey) mechanism.Capability {
	m.mu.Lock()
	defer m.mu.Unlock()
	if gate := m.gate; gate != nil {
		m.mu.Unlock()
		<-gate
		m.mu.Lock()
	}
	e := mechanism.Evidence{Check: "weather", Found: "fair", OK: true}
	if m.blocked != "" {
		e = mechanism.Evidence{Check: "weather", Found: m.blocked, Remedy: "wait"}
	}
	return mechanism.Capability{Evidence: []mechanism.Evidence{e}, ReportsBirths: m.watched}
}

func (m *machine) Attach(context.Context, gpreempt.ProcessKey) (mechanism.Session, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.calls = append(m.calls, "attach")
	if m.attachErr != nil {
		return nil, m.attachErr
	}
	m.open++
	if m.watched {
		m.events = make(chan struct{}, 1)
		return &watched{session{m}}, m.stuckErr
	}
	return &session{m}, m.stuckErr
}

func (m *machine) set(f func(*machine)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f(m)
}

func (m *machine) state() (open int, suspended bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.open, m.suspended
}

func (m *machine) wantCalls(t *testing.T, want ...string) {
	t.Helper()
	m.mu.Lock()
	defer m.mu.Unlock()
	if diff := cmp.Diff(want, m.calls); diff != "" {
		t.Errorf("calls of %s (-want +got):\n%s", m.name, diff)
	}
	m.calls = nil
}

type session struct{ m *machine }

func (s *session) act(name string, suspended bool) error {
	time.Sleep(s.m.cost) // virtual: a test with a cost runs in a bubble
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	s.m.calls = append(s.m.calls, name)
	if s.m.panics {
		panic("broken mechanism")
	}
	if s.m.actionErr == nil {
		s.m.suspended = suspended
	}
	return s.m.actionErr
}

func (s *session) Suspend(ctx context.Context, done func()) error {
	err := s.act("suspend", true)
	if err == nil && ctx.Err() != nil {
		s.m.set(func(m *machine) { m.suspended = false })
		err = context.Cause(ctx)
	}
	if err == nil && done != nil {
		done()
	}
	return err
}

func (*session) Events() <-chan struct{} { return nil }

func (*session) Handle(context.Context) (r mechanism.Report, err error) { return r, nil }

func (s *session) Resume(context.Context) error { return s.act("resume", false) }

func (s *session) Close() error {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	s.m.calls = append(s.m.calls, "close")
	if s.m.closeErrs != 0 {
		s.m.closeErrs--
		return errors.New("a debugger has the process")
	}
	s.m.open--
	s.m.suspended = false
	return nil
}

// watched is a session with events.
type watched struct{ session }

func (w *watched) Events() <-chan struct{} { return w.m.events }

func (w *watched) Handle(context.Context) (mechanism.Report, error) {
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	return w.m.handled()
}

// rig is sessions of some mechanisms, and what they posted.
type rig struct {
	*Sessions
	t      *testing.T
	mu     sync.Mutex
	posted []scheduler.Event
	looked []gpreempt.ProcessKey
}

func permitAll(string, gpreempt.ProcessKey) Assessment {
	return Assessment{Evidence: mechanism.Evidence{OK: true}}
}

func newRig(t *testing.T, assess func(string, gpreempt.ProcessKey) Assessment, machines ...*machine) *rig {
	t.Helper()
	r := &rig{t: t}
	start := time.Now()
	if assess == nil {
		assess = permitAll
	}
	cfg := Config{
		Assess:     assess,
		Bystanders: func(gpreempt.ProcessKey) ([]gpreempt.GPUID, bool) { return nil, false },
		Permitted:  func(gpreempt.ProcessKey) bool { return false },
		Post: func(ev scheduler.Event) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.posted = append(r.posted, ev)
		},
		Look: func(key gpreempt.ProcessKey) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.looked = append(r.looked, key)
		},
		Now: func() time.Duration { return time.Since(start) },
		Log: zap.NewNop(),
	}
	for _, m := range machines {
		cfg.Mechanisms = append(cfg.Mechanisms, m)
	}
	r.Sessions = NewSessions(cfg)
	return r
}

// want waits until nothing moves any more and compares what was posted since.
func (r *rig) want(want ...scheduler.Event) {
	r.t.Helper()
	synctest.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	if diff := cmp.Diff(want, r.posted); diff != "" {
		r.t.Errorf("posted (-want +got):\n%s", diff)
	}
	r.posted = nil
}

// attach attaches to a target; what was posted is not kept.
func (r *rig) attach(target gpreempt.ProcessKey) {
	r.t.Helper()
	r.Attach(target)
	r.forgetPosted()
}

func (r *rig) forgetPosted() {
	r.t.Helper()
	synctest.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.posted = nil
}

// detachAll ends the test: every target is detached.
func (r *rig) detachAll(targets ...gpreempt.ProcessKey) {
	r.t.Helper()
	for _, target := range targets {
		r.Detach(target)
	}
	if err := r.Close(r.t.Context()); err != nil {
		r.t.Error(err)
	}
}

func (r *rig) wantState(target gpreempt.ProcessKey, want State) {
	r.t.Helper()
	synctest.Wait()
	got, _ := r.State(target)
	if diff := cmp.Diff(want.Choice, got.Choice); diff != "" {
		r.t.Errorf("choice (-want +got):\n%s", diff)
	}
	if !errors.Is(got.Err, want.Err) {
		r.t.Errorf("error %v, want %v", got.Err, want.Err)
	}
}
