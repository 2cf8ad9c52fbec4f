package freezer

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// resumes has another program resume a suspended process, and returns what the session
// notices.
func resumes(t *testing.T, s *session, resume func()) (mechanism.Running, error) {
	t.Helper()
	resume()
	testutil.Receive(t, s.Events(), "an event")
	r, err := s.Handle(t.Context())
	return r.Running, err
}

func TestProcessThatAnotherProgramResumesIsStoppedAgainAFewTimes(t *testing.T) {
	m := newMachine(t)
	m.checkTime = time.Millisecond
	v := startVictim(t, nil)
	s := m.attach(t, v.key).(*session)
	goOn := func() {
		if err := unix.Kill(int(v.key.PID), unix.SIGCONT); err != nil {
			t.Fatal(err)
		}
		v.mustRun(t)
	}
	m.suspend(t, s)
	testutil.Receive(t, s.Events(), "an event")
	if r, err := s.Handle(t.Context()); r.Running != mechanism.NotRunning || err != nil {
		t.Errorf("a process that is stopped runs: %v, error %v", r.Running, err)
	}
	for range maxResumed {
		if running, err := resumes(t, s, goOn); running != mechanism.ResumedByAnother || err != nil {
			t.Fatalf("it runs: %v, error %v", running, err)
		}
		m.suspend(t, s)
		if got := v.states(t); got != "T" {
			t.Fatalf("suspended again, its threads are in state %s, want T", got)
		}
	}
	running, err := resumes(t, s, goOn)
	if running != mechanism.NotRunning || err == nil || !strings.Contains(err.Error(), "resumed it 4 times") {
		t.Errorf("it runs: %v, error %v", running, err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	v.mustRun(t)
	if diff := cmp.Diff(map[gpreempt.ProcessKey]string{}, m.noted(t)); diff != "" {
		t.Errorf("journal (-want +got):\n%s", diff)
	}
}

func TestCgroupThatAnotherProgramThawsIsFrozenAgain(t *testing.T) {
	_, dir := newCgroup(t)
	m := newMachine(t)
	m.checkTime = time.Millisecond
	v := startVictim(t, dir)
	s := m.attach(t, v.key).(*session)
	m.suspend(t, s)
	running, err := resumes(t, s, func() { setControl(t, dir, "cgroup.freeze", "0") })
	if running != mechanism.ResumedByAnother || err != nil {
		t.Errorf("it runs: %v, error %v", running, err)
	}
	m.suspend(t, s)
	if got := frozen(t, dir); got != "1" {
		t.Errorf("suspended again, frozen is %s", got)
	}
	m.resume(t, s)
	v.mustRun(t)
}

// A pause of another program is left to it, and noticed when it ends.
func TestProcessThatItsOtherStopperResumesIsStopped(t *testing.T) {
	m := newMachine(t)
	m.checkTime = time.Millisecond
	v := startVictim(t, nil)
	s := m.attach(t, v.key).(*session)
	if err := unix.Kill(int(v.key.PID), unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	for v.states(t) != "T" {
		runtime.Gosched()
	}
	m.suspend(t, s)
	running, err := resumes(t, s, func() {
		if err := unix.Kill(int(v.key.PID), unix.SIGCONT); err != nil {
			t.Fatal(err)
		}
		v.mustRun(t)
	})
	if running != mechanism.ResumedByAnother || err != nil {
		t.Errorf("it runs: %v, error %v", running, err)
	}
	m.suspend(t, s)
	if got := v.states(t); got != "T" {
		t.Errorf("suspended again, its threads are in state %s, want T", got)
	}
	m.resume(t, s)
	v.mustRun(t)
}

// fakePause is a pause of a process that another program may resume.
type fakePause struct{ paused bool }

func (p *fakePause) begun() (bool, error)        { return false, nil }
func (p *fakePause) begin(context.Context) error { p.paused = true; return nil }
func (p *fakePause) runs() (bool, error)         { return !p.paused, nil }
func (p *fakePause) undo() error                 { p.paused = false; return nil }
func (*fakePause) entry() mechanism.JournalEntry { return mechanism.JournalEntry{} }
func (*fakePause) close()                        {}

// Suspensions that are shorter than the time between two looks are looked at when they end. One
// that lasts forgets the earlier ones. The looks are a second apart.
func TestProcessThatIsResumedInShortSuspensionsIsNoticed(t *testing.T) {
	m := newMachine(t)
	v := startVictim(t, nil)
	p := &fakePause{}
	suspend := func(s *session, resumed bool) error {
		s.held = p // that of this process would be a real SIGSTOP
		if err := s.Suspend(t.Context(), nil); err != nil {
			return err
		}
		p.paused = !resumed
		return s.Resume(t.Context())
	}
	s := m.attach(t, v.key).(*session)
	for _, resumed := range []bool{true, true, true, false, true, true, true, true} {
		if err := suspend(s, resumed); err != nil {
			t.Fatal(err)
		}
	}
	if err := suspend(s, true); err == nil || errors.Is(err, mechanism.ErrGone) {
		t.Errorf("error %v, want one that says who resumes it", err)
	}
	if err := suspend(s, false); err != nil { // after its quarantine it is tried again
		t.Error(err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	synctest.Test(t, func(t *testing.T) {
		s := m.attach(t, v.key).(*session)
		s.held = p
		if err := s.Suspend(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		for n := range 3 {
			testutil.Receive(t, s.Events(), "an event")
			if got := time.Since(began); got != time.Duration(n+1)*time.Second {
				t.Errorf("look %d is after %v", n+1, got)
			}
			if r, err := s.Handle(t.Context()); r.Running != mechanism.NotRunning || err != nil {
				t.Errorf("it runs: %v, error %v", r.Running, err)
			}
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
}
