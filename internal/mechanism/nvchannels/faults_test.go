package nvchannels

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/nvrmtest"
	"github.com/gpreempt/gpreempt/internal/child"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/nvrm"
)

// examine examines a process now, by a scan.
func (w *world) examine(s mechanism.Session) {
	s.(*session).begin()
	defer s.(*session).end()
	s.(*session).full, s.(*session).looked = time.Time{}, time.Time{}
	s.(*session).examine()
}

// nothingIsOff checks that after the end of the session, the mechanism and the supervisor.
func (w *world) nothingIsOff(sessions ...mechanism.Session) {
	w.t.Helper()
	for _, s := range sessions {
		if err := s.Close(); err != nil {
			w.t.Error(err)
		}
	}
	if err := w.m.Close(); err != nil {
		w.t.Error(err)
	}
	w.supervisors.Wait()
	if off, all := w.machine.Off(); off > 0 || len(w.journal.list()) > 0 {
		w.t.Errorf("at the end %d of %d channels are off, with %d journal entries", off, all, len(w.journal.list()))
	}
}

// examineWithAFailure is examine, whose first question the driver does not answer. It reports whether
// there was one.
func (w *world) examineWithAFailure(s mechanism.Session) (failed bool) {
	w.t.Helper()
	w.machine.Before(func(_ int, cmd nvrm.Command) error {
		if cmd == nvrm.GetHandleInfo && !failed {
			failed = true
			return nvrm.Status(0x51) // NV_ERR_NO_MEMORY
		}
		return nil
	})
	w.examine(s)
	w.machine.Before(nil)
	return failed
}

// The client is an old one, which a short search would not find again.
func TestALookThatFailsForgetsNoClient(t *testing.T) {
	w := newWorld(t)
	w.machine.Start(target)
	s := w.attach()
	w.machine.Assign(100_000)
	must(t, s.Suspend(t.Context(), nil))
	failed := w.examineWithAFailure(s)
	if _, err := s.Handle(t.Context()); !failed || err != nil {
		t.Errorf("failed %v, Handle: %v", failed, err)
	}
	w.nothingIsOff(s)
}

func TestCloseDoesNotWaitForACallThatHangs(t *testing.T) {
	w := newWorld(t)
	w.machine.Start(target)
	s := w.attach()
	release, hangs := make(chan struct{}), make(chan struct{})
	var once atomic.Bool
	w.machine.Before(func(_ int, cmd nvrm.Command) error {
		if cmd == nvrm.DisableChannels && once.CompareAndSwap(false, true) {
			close(hangs)
			<-release
		}
		return nil
	})
	ended := make(chan error, 1)
	go func() { ended <- s.Suspend(t.Context(), nil) }()
	testutil.Receive(t, hangs, "the call")
	closed := make(chan error, 1)
	go func() { closed <- w.m.Close() }()
	must(t, testutil.Receive(t, closed, "the end of Close"))
	close(release)
	testutil.Receive(t, ended, "the end of the call")
	w.nothingIsOff(s)
}

func TestCloseReturnsWhenTheSupervisorHasResumedEverything(t *testing.T) {
	w := newWorld(t)
	p := w.machine.Start(target)
	s := w.attach()
	must(t, s.Suspend(t.Context(), nil))
	w.machine.Before(func(_ int, cmd nvrm.Command) error {
		for range 1000 {
			runtime.Gosched()
		}
		return nil
	})
	began := time.Now()
	must(t, w.m.Close())
	if got := stateOf(p); got.Off > 0 && time.Since(began) < time.Second { // it does not wait longer
		t.Errorf("after Close: %v", got)
	}
	w.machine.Before(nil)
	w.nothingIsOff(s)
}

func TestASupervisorThatHangsIsReplaced(t *testing.T) {
	w := newWorld(t)
	w.m.cfg.Start = func() (*os.File, *exec.Cmd, error) {
		daemon, socket, err := child.Pair()
		if err != nil {
			return nil, nil, err
		}
		hung := child.Serve[order, answer](socket)
		go func() { // it answers once, and reads no more than one packet then
			hung.Answer(<-hung.Requests, answer{})
		}()
		t.Cleanup(func() {
			for range hung.Requests { // those that it has read
			}
			_ = socket.Close()
		})
		return daemon, nil, nil
	}
	p := w.machine.Start(target)
	s := w.attach()
	first := w.m.guard.Load()
	first.heard.Store(-int64(time.Hour))
	for range 5000 {
		w.m.Beat() // until the socket is full
	}
	w.m.cfg.Start = w.start
	must(t, s.Suspend(t.Context(), nil))
	testutil.Receive(t, first.Closed, "the end of the supervisor")
	if got := stateOf(p); got.Off != 8 || w.starts != 1 {
		t.Errorf("%v with %d further supervisors", got, w.starts)
	}
	w.nothingIsOff(s)
}

// The process that cannot be resumed keeps an earlier supervisor busy.
func TestAnEarlierSupervisorLeavesTheNextDaemonAlone(t *testing.T) {
	w := newWorld(t)
	var broken atomic.Bool
	broken.Store(true)
	tried := make(chan struct{}, 1000)
	ended := make(chan struct{})
	w.m.cfg.Start = func() (*os.File, *exec.Cmd, error) {
		if w.dead {
			return nil, nil, errDead
		}
		daemon, socket, err := child.Pair()
		if err != nil {
			return nil, nil, err
		}
		go func() {
			defer close(ended)
			defer socket.Close()
			_ = Supervise(socket, brokenSys{w.machine.Sys(), &broken, tried}, time.Hour)
		}()
		return daemon, nil, nil
	}
	p := w.machine.Start(target)
	w.machine.Start(other)
	must(t, errors.Join(w.m.SuspendAll(t.Context(), []mechanism.Session{w.attach(), w.attachTo(other)})...))
	free := w.stand() // nothing of the first daemon runs any more
	w.die()
	testutil.Receive(t, tried, "a try")
	testutil.Until(t, "the supervisor resumes it", func() bool { return stateOf(p).Off == 0 })
	later := New(Config{Sys: w.machine.Sys(), Journal: &w.journal, Log: zap.NewNop(), Start: w.startNext})
	for _, e := range w.journal.list() {
		must(t, later.Undo(t.Context(), e))
	}
	s, err := later.Attach(t.Context(), target)
	must(t, err)
	for len(tried) > 0 {
		testutil.Receive(t, tried, "a try")
	}
	must(t, s.Suspend(t.Context(), nil))
	for range 20 { // of its tries
		testutil.Receive(t, tried, "a try")
	}
	if got := stateOf(p); got.Off != 8 {
		t.Errorf("what the next daemon has suspended is %v", got)
	}
	broken.Store(false)
	free()
	testutil.Receive(t, ended, "the end of the supervisor")
	must(t, s.Close())
	must(t, later.Close())
}

// brokenSys cannot copy descriptors of a process.
type brokenSys struct {
	nvrm.Sys
	broken *atomic.Bool
	tried  chan struct{}
}

func (b brokenSys) Open(key gpreempt.ProcessKey) (nvrm.Process, error) {
	p, err := b.Sys.Open(key)
	if key == other {
		p = brokenProcess{p, b}
	}
	return p, err
}

type brokenProcess struct {
	nvrm.Process
	brokenSys
}

func (b brokenProcess) Copy(n int) (nvrm.File, error) {
	if b.broken.Load() {
		b.tried <- struct{}{}
		return nil, unix.EMFILE
	}
	return b.Process.Copy(n)
}

// The daemon was silent, and its first action is a Suspend: the supervisor's news is still to come.
func TestSuspendAfterASilenceLearnsFirstWhatTheSupervisorDid(t *testing.T) {
	w := newWorld(t)
	p := w.machine.Start(target)
	s := w.attach()
	must(t, s.Suspend(t.Context(), nil))
	inner := s.(*session)
	must(t, restore(w.machine.Sys(), inner.process, inner.disabled, every)) // as the supervisor does
	guard := w.m.guard.Load()
	guard.heard.Store(-int64(time.Hour))
	guard.lapses.Add(1) // its news comes before the answer
	must(t, s.Suspend(t.Context(), nil))
	if got := stateOf(p); got.Off != 8 {
		t.Errorf("after Suspend: %v", got)
	}
	w.nothingIsOff(s)
}

func TestTheEndOfTheSupervisorDuringAnExaminationResumes(t *testing.T) {
	w := newWorld(t)
	p := w.machine.Start(target)
	s := w.attach()
	must(t, s.Suspend(t.Context(), nil))
	free := w.stand()
	guard := w.m.guard.Load()
	w.kill()
	testutil.Receive(t, guard.Closed, "the end of the supervisor")
	s.(*session).full = time.Now()
	s.(*session).examine()
	off, known := stateOf(p).Off, len(s.(*session).disabled)
	free()
	if r, err := s.Handle(t.Context()); r.Running != mechanism.Lapsed || err != nil || off != 0 || known != 0 {
		t.Errorf("Handle: %v, %v; %d channels are off, %d as the session knows", r.Running, err, off, known)
	}
	w.nothingIsOff(s)
}

func TestALapseCountsAlsoWhenTheSupervisorHasJustAnswered(t *testing.T) {
	w := newWorld(t)
	p := w.machine.Start(target)
	s := w.attach()
	must(t, s.Suspend(t.Context(), nil))
	inner, guard := s.(*session), w.m.guard.Load()
	must(t, inner.restore(inner.disabled)) // as the supervisor does
	guard.lapses.Add(1)
	guard.heard.Store(int64(time.Since(guard.begin)))
	must(t, s.Suspend(t.Context(), nil))
	if got := stateOf(p); got.Off != 8 {
		t.Errorf("after Suspend: %v", got)
	}
	w.nothingIsOff(s)
}

func TestAProcessWithTooManyChannelsDisturbsNoOther(t *testing.T) {
	w := newWorld(t)
	p := w.machine.Start(target)
	s := w.attach()
	must(t, s.Suspend(t.Context(), nil))
	w.machine.Start(other).Bear(5000)
	if _, err := w.m.Attach(t.Context(), other); err == nil {
		t.Error("a process was attached to whose list is too long for the supervisor")
	}
	if got := stateOf(p); got.Off != 8 || w.starts != 1 {
		t.Errorf("%v, %d supervisors", got, w.starts)
	}
	w.nothingIsOff(s)
}

func TestASuspendDuringCloseLeavesNothingSuspended(t *testing.T) {
	w := newWorld(t)
	w.machine.Start(target)
	s := w.attach()
	hangs := make(chan struct{})
	var once atomic.Bool
	w.machine.Before(func(_ int, cmd nvrm.Command) error {
		if cmd == nvrm.DisableChannels && once.CompareAndSwap(false, true) {
			close(hangs)
			for !w.m.closed.Load() {
				runtime.Gosched()
			}
			w.supervisors.Wait() // it has put everything on
		}
		return nil
	})
	ended := make(chan error, 1)
	go func() { ended <- s.Suspend(t.Context(), nil) }()
	testutil.Receive(t, hangs, "the call")
	must(t, w.m.Close())
	if err := testutil.Receive(t, ended, "the end of the call"); !errors.Is(err, errClosed) {
		t.Errorf("Suspend: %v", err)
	}
	if off, _ := w.machine.Off(); off > 0 {
		t.Errorf("%d channels are off", off)
	}
	must(t, s.Close())
}

// A call of the driver for one process does not return, whatever it is: meanwhile the others are
// suspended, resumed and examined, alone and in batches, also in one with the process itself, and
// learn what the supervisor has done.
func TestACallThatHangsHoldsUpItsOwnProcessOnly(t *testing.T) {
	for name, call := range map[string]func(w *world, s *session) error{
		"an examination": func(w *world, s *session) error { w.examine(s); return nil },
		"a suspend":      func(_ *world, s *session) error { return s.Suspend(t.Context(), nil) },
		"a resume":       func(_ *world, s *session) error { return s.Resume(t.Context()) },
		"the end":        func(_ *world, s *session) error { return s.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.m.busyTime = busyTime
			hangs, release := make(chan struct{}, 1000), make(chan struct{})
			var on atomic.Bool
			w.daemon.before = func(p gpreempt.ProcessKey) {
				if p == target && on.Load() {
					hangs <- struct{}{}
					<-release
				}
			}
			var sessions []mechanism.Session
			var processes []*nvrmtest.Process
			for i := range int32(4) {
				key := gpreempt.ProcessKey{PID: target.PID + i, Start: target.Start}
				processes = append(processes, w.machine.Start(key))
				sessions = append(sessions, w.attachTo(key))
			}
			must(t, errors.Join(w.m.SuspendAll(t.Context(), sessions)...))
			on.Store(true)
			ended := make(chan error, 1)
			go func() { ended <- call(w, sessions[0].(*session)) }()
			testutil.Receive(t, hangs, "the call")

			others := sessions[1:]
			each := func(do func(context.Context, []mechanism.Session, func(int, error)), with []mechanism.Session) {
				t.Helper()
				results := make(chan error, len(with))
				go do(t.Context(), with, func(_ int, err error) { results <- err })
				for range others {
					must(t, testutil.Receive(t, results, "the result for another process"))
				}
			}
			want := func(off int) {
				t.Helper()
				for _, p := range processes[1:] {
					if got := stateOf(p); got.Off != off {
						t.Errorf("%v, want %d channels off", got, off)
					}
				}
			}
			began := time.Now()
			each(w.m.ResumeEach, others)
			t.Logf("the others run %v after the order to resume them", time.Since(began))
			want(0)
			each(w.m.SuspendEach, others)
			want(8)
			for _, s := range others {
				must(t, s.Resume(t.Context()))
			}
			want(0)
			if name == "an examination" { // else the owner makes the call that hangs
				began = time.Now()
				each(w.m.SuspendEach, sessions)
				t.Logf("in a batch with it the others are suspended after %v", time.Since(began))
			} else {
				each(w.m.SuspendEach, others)
			}
			w.lapse()
			for _, s := range others {
				testutil.Receive(t, s.Events(), "the news of the lapse")
				if r, err := s.Handle(t.Context()); r.Running != mechanism.Lapsed || err != nil {
					t.Errorf("after a lapse: %v, %v", r.Running, err)
				}
			}
			for _, s := range others {
				must(t, s.Close())
			}
			on.Store(false)
			close(release)
			testutil.Receive(t, ended, "the end of the call")
			w.nothingIsOff(sessions[0])
		})
	}
}
