package nvchannels

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/gpreempt/gpreempt/emu/nvrmtest"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/nvrm"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestSuspendDisablesComputeChannelsAndResumeEnablesThem(t *testing.T) {
	w := newWorld(t)
	p := w.machine.Start(target)
	s := w.attach()
	got := []state{stateOf(p)}
	for range 2 { // suspending what is suspended is harmless
		must(t, s.Suspend(t.Context(), nil))
		got = append(got, stateOf(p))
	}
	entries := len(w.journal.list()) // before anything is off, until Close
	must(t, s.Resume(t.Context()))
	must(t, s.Resume(t.Context()))
	got = append(got, stateOf(p))
	must(t, s.Suspend(t.Context(), nil))
	must(t, s.Close())
	got = append(got, stateOf(p))
	want := []state{{0, 8, 0}, {8, 8, 0}, {8, 8, 0}, {0, 8, 0}, {0, 8, 0}} // no copy engine is disabled
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if n := len(w.journal.list()); entries != 1 || n != 0 {
		t.Errorf("%d journal entries with a session, %d after; want 1 and 0", entries, n)
	}
}

func TestChannelsCreatedWhileSuspendedAreDisabled(t *testing.T) {
	w := newWorld(t)
	p := w.machine.Start(target)
	s := w.attach()
	must(t, s.Suspend(t.Context(), nil))
	p.Bear(3)
	testutil.Until(t, "the new channels are off", func() bool { return stateOf(p) == state{11, 11, 0} })
	p.FreeChannel()
	must(t, s.Resume(t.Context()))
	if got := stateOf(p); got != (state{0, 10, 0}) {
		t.Errorf("after Resume: %v", got)
	}
	must(t, s.Close())
}

func TestAChannelFreedBetweenScanAndSuspendIsNoFailure(t *testing.T) {
	w := newWorld(t)
	p := w.machine.Start(target)
	s := w.attach()
	p.FreeChannel()
	must(t, s.Suspend(t.Context(), nil))
	if got := stateOf(p); got != (state{7, 7, 0}) {
		t.Errorf("after Suspend: %v", got)
	}
	must(t, s.Close())
}

func TestAProcessKilledWhileSuspendedIsGoneAndLeavesNothing(t *testing.T) {
	w := newWorld(t)
	p := w.machine.Start(target)
	s := w.attach()
	must(t, s.Suspend(t.Context(), nil))
	p.Kill()
	var err error
	for err == nil { // an examination that was under way has noticed only that it failed
		testutil.Receive(t, s.Events(), "an event")
		_, err = s.Handle(t.Context())
	}
	if !errors.Is(err, mechanism.ErrGone) {
		t.Errorf("Handle: %v, want that it is gone", err)
	}
	must(t, s.Close())
	if n, entries := w.machine.Clients(), len(w.journal.list()); n != 0 || entries != 0 {
		t.Errorf("%d RM clients and %d journal entries are left; their memory would be, too", n, entries)
	}
}

// The daemon dies before and after each of its calls; all that again until it died GPREEMPT_CRASHES
// times.
func TestDeathAtEveryCallLeavesEveryChannelEnabled(t *testing.T) {
	during := func(w *world, s mechanism.Session) {
		for range 2 {
			if s.Suspend(context.Background(), nil) != nil || s.Resume(context.Background()) != nil {
				return
			}
		}
		if s.Suspend(context.Background(), nil) == nil {
			w.die()
		}
	}
	counted := newWorld(t)
	counted.machine.Start(target)
	s := counted.attach()
	first := counted.daemon.calls.Load()
	during(counted, s)
	calls := counted.daemon.calls.Load() - first
	if calls < 10 {
		t.Fatalf("only %d calls", calls)
	}
	deaths := 0
	for wanted := int64(testutil.Number(t, "GPREEMPT_CRASHES", 1)); int64(deaths) < wanted && !t.Failed(); {
		before := deaths
		for n := range 2 * calls {
			n, after := 1+n/2, n%2 == 1
			t.Run(fmt.Sprint(n, after), func(t *testing.T) {
				w := newWorld(t)
				p := w.machine.Start(target)
				s := w.attach()
				w.daemon.after.Store(after)
				w.daemon.last.Store(w.daemon.calls.Load() + n)
				during(w, s)
				w.supervisors.Wait() // they end when they have put everything on
				if got := stateOf(p); got.Off != 0 {
					t.Errorf("after the supervisor: %v", got)
				}
				if off := len(w.journal.list()); after && off > 1 {
					t.Errorf("%d entries", off)
				}
				if w.dead {
					deaths++
				}
			})
		}
		if deaths == before {
			t.Fatal("no daemon died")
		}
	}
	t.Logf("%d deaths; every channel is enabled", deaths)
}

// TestUndoResumesWhatTheJournalNames is the death of both, daemon and supervisor.
func TestUndoResumesWhatTheJournalNames(t *testing.T) {
	w := newWorld(t)
	p := w.machine.Start(target)
	s := w.attach()
	must(t, s.Suspend(t.Context(), nil))
	entries := w.journal.list()
	if len(entries) != 1 || entries[0].Target != target || entries[0].Mechanism != mechanism.NVChannels {
		t.Fatalf("journal: %+v", entries)
	}
	later := New(Config{Sys: w.machine.Sys(), Journal: &w.journal, Log: zap.NewNop()})
	must(t, later.Undo(t.Context(), entries[0]))
	if got := stateOf(p); got != (state{0, 8, 0}) {
		t.Errorf("after Undo: %v", got)
	}
	if n := len(w.journal.list()); n != 0 {
		t.Errorf("%d entries are left", n)
	}
	must(t, later.Undo(t.Context(), mechanism.JournalEntry{Mechanism: mechanism.NVChannels, Target: gpreempt.ProcessKey{PID: 1, Start: 1}}))
	must(t, s.Close())
}

func TestASilentDaemonIsResumedAndLearnsThat(t *testing.T) {
	w := newWorld(t)
	w.silence = 1 // nothing it does is fast enough
	p := w.machine.Start(target)
	s := w.attach()
	must(t, s.Suspend(t.Context(), nil))
	testutil.Until(t, "the supervisor resumes it", func() bool { return stateOf(p).Off == 0 })
	w.m.Beat()
	testutil.Receive(t, s.Events(), "an event")
	if r, err := s.Handle(t.Context()); r.Running != mechanism.Lapsed || err != nil {
		t.Errorf("Handle = %v, %v; want that it runs", r.Running, err)
	}
	must(t, s.Close())
}

func TestTheEndOfTheSupervisorResumesAndTheNextSuspendHasAnother(t *testing.T) {
	w := newWorld(t)
	p := w.machine.Start(target)
	s := w.attach()
	first := w.ended
	must(t, s.Suspend(t.Context(), nil))
	w.kill()
	testutil.Receive(t, first, "the end of the supervisor") // it resumes everything, too
	testutil.Receive(t, s.Events(), "an event")
	if r, err := s.Handle(t.Context()); r.Running != mechanism.Lapsed || err != nil {
		t.Errorf("Handle = %v, %v; want that it runs", r.Running, err)
	}
	if got := stateOf(p); got.Off != 0 {
		t.Errorf("without a supervisor: %v", got)
	}
	must(t, s.Suspend(t.Context(), nil))
	if got := stateOf(p); got.Off != 8 || w.starts != 2 {
		t.Errorf("after the next Suspend: %v with %d supervisors", got, w.starts)
	}
	must(t, s.Close())
}

// countSets counts the calls that set channels, and has the n-th fail.
func countSets(m *nvrmtest.Machine, n int, with error) *int {
	count := 0
	m.Before(func(_ int, cmd nvrm.Command) error {
		if cmd != nvrm.DisableChannels {
			return nil
		}
		if count++; count == n {
			return with
		}
		return nil
	})
	return &count
}

func TestSeveralProcessesAreSuspendedByOneCall(t *testing.T) {
	for _, test := range []struct {
		name string
		fail error // of the first call
		want []int // calls for Suspend, Resume, and both again
	}{
		{"together", nil, []int{1, 1, 1, 1}},
		{"a channel was freed meanwhile", nvrm.InvalidChannel, []int{1 + 4, 1, 1, 1}},
		{"a process has opened its file again", nvrm.InvalidClient, []int{1 + 4, 1, 1, 1}},
		{"the driver refuses that", nvrm.NotPermitted, []int{1 + 4, 2, 2, 2}},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := newWorld(t)
			processes := []*nvrmtest.Process{w.machine.Start(target), w.machine.Start(other)}
			sessions := []mechanism.Session{w.attachTo(target), w.attachTo(other)}
			var calls []int
			fail := test.fail
			for range 2 {
				for i, do := range []func(context.Context, []mechanism.Session) []error{w.m.SuspendAll, w.m.ResumeAll} {
					count := countSets(w.machine, 1, fail)
					must(t, errors.Join(do(t.Context(), sessions)...))
					w.machine.Before(nil)
					calls, fail = append(calls, *count), nil
					for _, p := range processes {
						if got, want := stateOf(p), (state{8 * (1 - i), 8, 0}); got != want {
							t.Errorf("%v, want %v", got, want)
						}
					}
				}
			}
			if diff := cmp.Diff(test.want, calls); diff != "" {
				t.Errorf("calls (-want +got):\n%s", diff)
			}
			for _, s := range sessions {
				must(t, s.Close())
			}
		})
	}
}

// TestASuspendedProcessIsResumedAlsoWithoutFreeDescriptors: a look that fails must not forget what is off.
func TestASuspendedProcessIsResumedAlsoWithoutFreeDescriptors(t *testing.T) {
	w := newWorld(t)
	p := w.machine.Start(target)
	s := w.attach()
	must(t, s.Suspend(t.Context(), nil))
	w.daemon.full.Store(true)
	inner := s.(*session)
	free := w.stand()
	inner.full = time.Time{}
	inner.examine()
	free()
	if err := s.Resume(t.Context()); !errors.Is(err, unix.EMFILE) {
		t.Errorf("Resume without descriptors: %v", err)
	}
	w.daemon.full.Store(false)
	must(t, s.Resume(t.Context()))
	if got := stateOf(p); got != (state{0, 8, 0}) {
		t.Errorf("after Resume: %v", got)
	}
	must(t, s.Close())
}

func TestDoneIsCalledOnlyForASuspension(t *testing.T) {
	w := newWorld(t)
	w.machine.Start(target)
	s := w.attach()
	called := 0
	w.machine.Before(func(_ int, cmd nvrm.Command) error {
		if cmd == nvrm.DisableChannels {
			return nvrm.NotPermitted
		}
		return nil
	})
	if err := s.Suspend(t.Context(), func() { called++ }); !errors.Is(err, nvrm.NotPermitted) || called != 0 {
		t.Errorf("refused: %v, done called %d times", err, called)
	}
	w.machine.Before(nil)
	if err := s.Suspend(t.Context(), func() { called++ }); err != nil || called != 1 {
		t.Errorf("%v, done called %d times", err, called)
	}
	must(t, s.Close())
}

func TestAGPUThatFailsIsNamed(t *testing.T) {
	w := newWorld(t)
	w.machine.Start(target)
	s := w.attach()
	w.machine.Before(func(_ int, cmd nvrm.Command) error {
		if cmd == nvrm.DisableChannels {
			return nvrm.GPUIsLost
		}
		return nil
	})
	err := s.Suspend(t.Context(), nil)
	if hw, ok := errors.AsType[*mechanism.HardwareError](err); !ok || len(hw.GPUs) != 1 || !errors.Is(err, nvrm.GPUIsLost) {
		t.Errorf("Suspend: %v", err)
	}
	w.machine.Before(nil)
	must(t, s.Close())
}

func TestWithoutASupervisorOrAJournalNothingIsSuspended(t *testing.T) {
	none := errors.New("no processes left")
	for _, breakIt := range []func(*world){
		func(w *world) { w.m.cfg.Start = func() (*os.File, *exec.Cmd, error) { return nil, nil, none } },
		func(w *world) { w.journal.err = none },
	} {
		w := newWorld(t)
		p := w.machine.Start(target)
		breakIt(w)
		if _, err := w.m.Attach(t.Context(), target); !errors.Is(err, none) {
			t.Errorf("Attach: %v", err)
		}
		w.m.cfg.Start, w.journal.err = w.start, nil
		s := w.attach()
		w.m.cfg.Start = func() (*os.File, *exec.Cmd, error) { return nil, nil, none }
		w.kill()
		testutil.Receive(t, w.m.guard.Load().Closed, "the end of the supervisor")
		if err := s.Suspend(t.Context(), nil); !errors.Is(err, none) {
			t.Errorf("Suspend: %v", err)
		}
		if got := stateOf(p); got.Off != 0 {
			t.Errorf("after that: %v", got)
		}
		must(t, s.Close())
		if n := len(w.journal.list()); n != 0 {
			t.Errorf("%d entries are left", n)
		}
	}
}

// TestAnyHistory compares the mechanism with what was asked for, with two processes and faults of
// any call.
func TestAnyHistory(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		w := newWorld(t)
		processes := []*nvrmtest.Process{w.machine.Start(target), w.machine.Start(other)}
		sessions := []mechanism.Session{w.attachTo(target), w.attachTo(other)}
		// The look for newborn channels may be what a fault strikes. It then has the owner suspend
		// the process again.
		check := func(errs []error, which []int, off bool) {
			defer w.stand()()
			for n, i := range which {
				s := sessions[i].(*session)
				s.examine() // as it follows a Suspend at once
				got := stateOf(processes[i])
				switch {
				case errs[n] == nil && off && s.ran == mechanism.NotRunning && got.Off != got.All, errs[n] == nil && !off && got.Off != 0:
					rt.Fatalf("process %d: suspended %v without an error: %v; session %+v", i, off, got, struct {
						off, armed                int
						suspended, unsure, closed bool
						lost                      error
					}{len(s.disabled), len(s.armed), s.suspended, s.unsure, s.closed, s.lost})
				case errs[n] != nil && got.Off > 0 && !s.unsure && len(s.disabled) == 0:
					rt.Fatalf("process %d: %v is not known after %v", i, got, errs[n])
				}
			}
			if n := len(w.journal.list()); n != 2 {
				rt.Fatalf("%d journal entries for two sessions", n)
			}
		}
		some := func(rt *rapid.T) (which []int, chosen []mechanism.Session) {
			which = rapid.SampledFrom([][]int{{0}, {1}, {0, 1}}).Draw(rt, "processes")
			for _, i := range which {
				chosen = append(chosen, sessions[i])
			}
			return which, chosen
		}
		suspend := func(rt *rapid.T) {
			which, chosen := some(rt)
			check(w.m.SuspendAll(t.Context(), chosen), which, true)
		}
		resume := func(rt *rapid.T) {
			which, chosen := some(rt)
			check(w.m.ResumeAll(t.Context(), chosen), which, false)
		}
		rt.Repeat(map[string]func(*rapid.T){
			"suspend": suspend,
			"resume":  resume,
			"bear": func(rt *rapid.T) {
				processes[rapid.IntRange(0, 1).Draw(rt, "process")].Bear(rapid.IntRange(1, 3).Draw(rt, "channels"))
			},
			"free":  func(rt *rapid.T) { processes[rapid.IntRange(0, 1).Draw(rt, "process")].FreeChannel() },
			"lapse": func(*rapid.T) { w.lapse() },
			"fault": func(rt *rapid.T) {
				at, status := rapid.IntRange(1, 60).Draw(rt, "call"), rapid.SampledFrom([]nvrm.Status{nvrm.GPUIsLost, nvrm.InvalidChannel, nvrm.NotPermitted, nvrm.InvalidClient}).Draw(rt, "status")
				w.machine.Before(func(n int, cmd nvrm.Command) error {
					if n == at && cmd == nvrm.DisableChannels {
						return status
					}
					return nil
				})
				defer w.machine.Before(nil)
				rapid.SampledFrom([]func(*rapid.T){suspend, resume}).Draw(rt, "during")(rt)
			},
		})
		for i, s := range sessions {
			must(t, s.Close())
			if got := stateOf(processes[i]); got.Off != 0 {
				rt.Fatalf("process %d after Close: %v", i, got)
			}
		}
		if n := len(w.journal.list()); n != 0 {
			rt.Fatalf("%d entries after Close", n)
		}
		must(t, w.m.Close())
		w.supervisors.Wait()
	})
}

// TestASuspensionThatIsRepeatedIsUndoneByOneResume: the driver counts, and the supervisor's news
// may come when the channels are off again.
func TestASuspensionThatIsRepeatedIsUndoneByOneResume(t *testing.T) {
	w := newWorld(t)
	p := w.machine.Start(target)
	s := w.attach()
	must(t, s.Suspend(t.Context(), nil))
	w.lapse()
	must(t, s.Suspend(t.Context(), nil))
	if got := stateOf(p); got.Off != 8 {
		t.Errorf("suspended again: %v", got)
	}
	must(t, s.Resume(t.Context()))
	if got := stateOf(p); got.Off != 0 {
		t.Errorf("after one Resume: %v", got)
	}
	must(t, s.Close())
}
