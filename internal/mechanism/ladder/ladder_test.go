package ladder

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestMain(m *testing.M) { testutil.VerifyMain(m) }

var (
	job   = gpreempt.ProcessKey{PID: 100, Start: 1}
	other = gpreempt.ProcessKey{PID: 200, Start: 2}
)

// machine is a mechanism whose answers a test sets, and the targets it holds.
type machine struct {
	name string

	mu        sync.Mutex
	blocked   string        // what stands in the way, as its probe says
	gate      chan struct{} // a probe waits for it to be closed
	attachErr error
	actionErr error
	closeErr  error
	open      int
	suspended bool
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
	e := mechanism.Evidence{Check: "weather", Found: "good", OK: true}
	if m.blocked != "" {
		e = mechanism.Evidence{Check: "weather", Found: m.blocked, Remedy: "wait"}
	}
	return mechanism.Capability{Evidence: []mechanism.Evidence{e}}
}

func (m *machine) Attach(context.Context, gpreempt.ProcessKey) (mechanism.Session, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.attachErr != nil {
		return nil, m.attachErr
	}
	m.open++
	return &hold{m: m}, nil
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

type hold struct{ m *machine }

func (h *hold) Suspend(context.Context) error { return h.act(true) }
func (h *hold) Resume(context.Context) error  { return h.act(false) }

func (h *hold) act(suspend bool) error {
	h.m.mu.Lock()
	defer h.m.mu.Unlock()
	if h.m.actionErr == nil {
		h.m.suspended = suspend
	}
	return h.m.actionErr
}

func (h *hold) Close() error {
	h.m.mu.Lock()
	defer h.m.mu.Unlock()
	if h.m.closeErr != nil {
		return h.m.closeErr
	}
	h.m.open--
	h.m.suspended = false
	return nil
}

// fixture is a ladder of three rungs.
type fixture struct {
	*Ladder
	best, middle, last *machine
	lost               chan error
}

func newFixture(judge func(string, gpreempt.ProcessKey) Verdict) *fixture {
	f := &fixture{
		best: &machine{name: "best"}, middle: &machine{name: "middle"}, last: &machine{name: "last"},
		lost: make(chan error, 16),
	}
	f.Ladder = New(Config{
		Rungs: []mechanism.Mechanism{f.best, f.middle, f.last},
		Judge: judge,
		Lost:  func(_ gpreempt.ProcessKey, err error) { f.lost <- err },
		Now:   time.Now,
		Log:   zap.NewNop(),
	})
	return f
}

func (f *fixture) attach(t *testing.T, target gpreempt.ProcessKey) mechanism.Session {
	t.Helper()
	s, err := f.Attach(t.Context(), target)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func (f *fixture) wantChoice(t *testing.T, want Choice) {
	t.Helper()
	got, _ := f.Choice(job)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("choice (-want +got):\n%s", diff)
	}
}

func TestBestUsableMechanismIsChosenAndTheOthersAreExplained(t *testing.T) {
	f := newFixture(func(name string, _ gpreempt.ProcessKey) Verdict {
		return Verdict{Evidence: mechanism.Evidence{
			Check: "hazard table", Found: "row 7", OK: name != "best", Remedy: "update the firmware",
		}}
	})
	f.middle.blocked = "fog"
	f.attach(t, job)
	want := Choice{
		Mechanism: "last", Why: "weather: good",
		Rejected: []Rejection{
			{Mechanism: "best", Why: "hazard table: row 7", Remedy: "update the firmware"},
			{Mechanism: "middle", Why: "weather: fog", Remedy: "wait"},
		},
	}
	f.wantChoice(t, want)
	const line = "weather: good; not best: hazard table: row 7 (update the firmware); middle: weather: fog (wait)"
	if got := want.String(); got != line {
		t.Errorf("in one line: %s\nwant %s", got, line)
	}
	if diff := cmp.Diff(want, f.Survey(t.Context(), job)); diff != "" {
		t.Errorf("survey (-want +got):\n%s", diff)
	}
}

func TestAttachThatFailsGoesToTheNextRung(t *testing.T) {
	f := newFixture(nil)
	f.best.attachErr = errors.New("a debugger is there")
	f.attach(t, job)
	f.wantChoice(t, Choice{
		Mechanism: "middle", Why: "weather: good",
		Rejected: []Rejection{{Mechanism: "best", Why: "a debugger is there"}},
	})
	// Another attempt would disturb the debugger again.
	if got := f.Survey(t.Context(), job).Mechanism; got != "middle" {
		t.Errorf("right after: %s, want middle", got)
	}
}

func TestNoUsableMechanismIsAnErrorThatNamesEveryReason(t *testing.T) {
	f := newFixture(nil)
	for _, m := range []*machine{f.best, f.middle, f.last} {
		m.blocked = "storm"
	}
	_, err := f.Attach(t.Context(), job)
	const want = "best: weather: storm (wait); middle: weather: storm (wait); last: weather: storm (wait)"
	if err == nil || err.Error() != want {
		t.Errorf("error %v, want %s", err, want)
	}
	if _, err := New(Config{Now: time.Now}).Attach(t.Context(), job); err == nil {
		t.Error("a ladder without rungs holds a target")
	}
}

func TestTargetThatLeftIsNoReasonToTryTheNextRung(t *testing.T) {
	f := newFixture(nil)
	f.best.attachErr = mechanism.ErrGone
	if _, err := f.Attach(t.Context(), job); !errors.Is(err, mechanism.ErrGone) {
		t.Errorf("error %v, want ErrGone", err)
	}
	if open, _ := f.middle.state(); open != 0 {
		t.Error("the next rung was tried")
	}
}

func TestFailureLeavesTheMechanismAloneForATimeThatDoubles(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(nil)
		f.best.actionErr = errors.New("it did not stop")
		for _, wait := range []time.Duration{10 * time.Second, 20 * time.Second, 40 * time.Second} {
			s := f.attach(t, job)
			if err := s.Suspend(t.Context()); !errors.Is(err, f.best.actionErr) {
				t.Fatalf("suspend gives %v", err)
			}
			if err := <-f.lost; !errors.Is(err, f.best.actionErr) {
				t.Fatalf("lost hears %v", err)
			}
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			time.Sleep(wait - time.Nanosecond)
			if got := f.Survey(t.Context(), job).Mechanism; got != "middle" {
				t.Errorf("just before %v are over: %s, want middle", wait, got)
			}
			if got := f.Survey(t.Context(), other).Mechanism; got != "best" {
				t.Errorf("another target: %s, want best", got)
			}
			time.Sleep(time.Nanosecond)
			if got := f.Survey(t.Context(), job).Mechanism; got != "best" {
				t.Errorf("after %v: %s, want best", wait, got)
			}
		}
		f.Forget(job)
		f.attach(t, job)
		if _, ok := f.Choice(job); !ok {
			t.Error("no choice after a new attach")
		}
	})
}

func TestBackOffEndsAtAnHour(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(nil)
		for range 80 {
			f.Lost("best", job, errors.New("again"))
			<-f.lost
		}
		time.Sleep(lastBackOff - time.Nanosecond)
		if got := f.Survey(t.Context(), job).Mechanism; got != "middle" {
			t.Errorf("just before the hour: %s, want middle", got)
		}
		time.Sleep(time.Nanosecond)
		if got := f.Survey(t.Context(), job).Mechanism; got != "best" {
			t.Errorf("after the hour: %s, want best", got)
		}
		f.Lost("best", job, errors.New("once"))
		<-f.lost
		time.Sleep(2*lastBackOff + time.Nanosecond)
		f.Lost("best", job, errors.New("long after that"))
		<-f.lost
		time.Sleep(firstBackOff)
		if got := f.Survey(t.Context(), job).Mechanism; got != "best" {
			t.Errorf("after one failure in hours: %s, want best", got)
		}
	})
}

func TestBackOffDoesNotGrowWhileADebuggerIsInTheWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(nil)
		for range 80 {
			f.Lost("best", job, fmt.Errorf("process 100: %w", mechanism.ErrDebugged))
			<-f.lost
			time.Sleep(firstBackOff - time.Nanosecond)
			if got := f.Survey(t.Context(), job).Mechanism; got != "middle" {
				t.Fatalf("just before %v are over: %s, want middle", firstBackOff, got)
			}
			time.Sleep(time.Nanosecond)
			if got := f.Survey(t.Context(), job).Mechanism; got != "best" {
				t.Fatalf("after %v: %s, want best", firstBackOff, got)
			}
		}
	})
}

// A resume is tried again until it works.
func TestActionThatFailsAgainAndAgainIsOneFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(nil)
		s := f.attach(t, job)
		act := func(what string, do func(context.Context) error, want error) {
			t.Helper()
			if err := do(t.Context()); !errors.Is(err, want) {
				t.Fatalf("%s gives %v, want %v", what, err, want)
			}
		}
		broken := errors.New("it does not go on")
		act("suspend", s.Suspend, nil)
		f.best.set(func(m *machine) { m.actionErr = broken })
		for range 5 {
			act("resume", s.Resume, broken)
		}
		f.best.set(func(m *machine) { m.actionErr = nil })
		act("resume", s.Resume, nil)
		f.best.set(func(m *machine) { m.actionErr = broken })
		act("suspend", s.Suspend, broken)
		if got := len(f.lost); got != 2 {
			t.Errorf("lost was told %d times, want once for each time it began to fail", got)
		}
		time.Sleep(2 * firstBackOff)
		if got := f.Survey(t.Context(), job).Mechanism; got != "best" {
			t.Errorf("after the time of two failures: %s, want best", got)
		}
	})
}

func TestGoneAndAbandonedActionsAreNoFailures(t *testing.T) {
	f := newFixture(nil)
	s := f.attach(t, job)
	f.best.set(func(m *machine) { m.actionErr = mechanism.ErrGone })
	if err := s.Suspend(t.Context()); !errors.Is(err, mechanism.ErrGone) {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	f.best.set(func(m *machine) { m.actionErr = context.Canceled })
	if err := s.Resume(ctx); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	select {
	case err := <-f.lost:
		t.Errorf("lost hears %v", err)
	default:
	}
}

func TestLimitedMechanismHoldsOneTargetPerGPU(t *testing.T) {
	f := newFixture(func(name string, _ gpreempt.ProcessKey) Verdict {
		v := Verdict{Evidence: mechanism.Evidence{OK: true}}
		if name == "best" {
			v.Limited = []gpreempt.GPUID{1, 2}
		}
		return v
	})
	first := f.attach(t, other)
	second := f.attach(t, job)
	f.wantChoice(t, Choice{
		Mechanism: "middle", Why: "weather: good",
		Rejected: []Rejection{{
			Mechanism: "best", Why: "GPU 1 can have one process held by it at a time, and process 200 is",
			Remedy: "another mechanism in the config key mechanisms can hold it: criu, freezer",
		}},
	})
	for _, s := range []mechanism.Session{first, second} {
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	f.attach(t, job)
	f.wantChoice(t, Choice{Mechanism: "best", Why: "weather: good"})
}

func TestTargetOnALowerRungClimbsWhileItRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(nil)
		f.best.blocked = "fog"
		s := f.attach(t, job)
		cycle := func() {
			t.Helper()
			if err := errors.Join(s.Suspend(t.Context()), s.Resume(t.Context())); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		f.best.set(func(m *machine) { m.blocked = "" })
		cycle()
		if open, _ := f.best.state(); open != 0 {
			t.Error("it climbs before its time")
		}
		time.Sleep(climbEvery)
		cycle()
		f.wantChoice(t, Choice{
			Mechanism: "middle", Why: "weather: good",
			Rejected: []Rejection{{Mechanism: "best", Why: "weather: fog", Remedy: "wait"}},
		})
		if err := s.Suspend(t.Context()); err != nil {
			t.Fatal(err)
		}
		f.wantChoice(t, Choice{Mechanism: "best", Why: "weather: good"})
		if open, _ := f.middle.state(); open != 0 {
			t.Error("the lower rung still holds the target")
		}
		if _, suspended := f.best.state(); !suspended {
			t.Error("the better rung did not suspend")
		}
	})
}

func TestSuspendedTargetIsNotHandedOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(nil)
		f.best.blocked = "fog"
		s := f.attach(t, job)
		time.Sleep(climbEvery)
		gate := make(chan struct{})
		f.best.set(func(m *machine) { m.blocked, m.gate = "", gate })
		if err := errors.Join(s.Resume(t.Context()), s.Suspend(t.Context())); err != nil {
			t.Fatal(err)
		}
		close(gate)
		synctest.Wait()
		if open, _ := f.best.state(); open != 1 {
			t.Fatal("the better mechanism was not attached")
		}
		if err := s.Suspend(t.Context()); err != nil { // for a new queue, say
			t.Fatal(err)
		}
		if open, suspended := f.middle.state(); open != 1 || !suspended {
			t.Error("the target ran for a moment: it was handed over while suspended")
		}
	})
}

func TestCloseThatFailsIsForTheCallerToRepeat(t *testing.T) {
	f := newFixture(nil)
	s := f.attach(t, job)
	broken := errors.New("a debugger is in the way")
	f.best.set(func(m *machine) { m.closeErr = broken })
	for range 2 {
		if err := s.Close(); !errors.Is(err, broken) {
			t.Errorf("close gives %v", err)
		}
	}
	f.best.set(func(m *machine) { m.closeErr = nil })
	for range 2 {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
	if open, _ := f.best.state(); open != 0 {
		t.Errorf("%d sessions are open", open)
	}
}

func TestCloseReleasesWhatWasFoundMeanwhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(nil)
		f.best.blocked = "fog"
		s := f.attach(t, job)
		time.Sleep(climbEvery)
		f.best.set(func(m *machine) { m.blocked = "" })
		if err := s.Resume(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		for _, m := range []*machine{f.best, f.middle} {
			if open, _ := m.state(); open != 0 {
				t.Errorf("%s still holds the target", m.name)
			}
		}
		if err := s.Suspend(t.Context()); !errors.Is(err, errClosed) {
			t.Errorf("suspend after close gives %v", err)
		}
		if err := s.Resume(t.Context()); !errors.Is(err, errClosed) {
			t.Errorf("resume after close gives %v", err)
		}
	})
}
