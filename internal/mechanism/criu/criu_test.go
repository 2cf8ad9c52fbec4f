package criu

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/emu/kfdtest"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

func TestSuspendTakesAllQueuesOffAndResumeRestoresThem(t *testing.T) {
	for _, profile := range driver.Profiles() {
		t.Run(profile, func(t *testing.T) {
			w := newTestWorld(t, profile)
			p := w.spawn(t)
			s := attach(t, w.mechanism(), p.Key())
			for n := range 3 {
				must(t, s.Suspend(t.Context(), nil))
				w.mustBe(t, p, held)
				w.mustNote(t, p.Key())
				must(t, s.Suspend(t.Context(), nil)) // harmless
				w.mustBe(t, p, held)
				if got := w.pauses(); got != n+1 {
					t.Fatalf("%d PROCESS_INFO calls in %d cycles", got, n+1)
				}
				must(t, s.Resume(t.Context()))
				w.mustBe(t, p, runs)
				w.mustNote(t)
				must(t, s.Resume(t.Context())) // harmless
			}
			must(t, s.Suspend(t.Context(), nil))
			must(t, s.Close())
			must(t, s.Close())
			w.mustBe(t, p, runs)
			w.mustNote(t)
			for _, call := range []func(context.Context) error{func(ctx context.Context) error { return s.Suspend(ctx, nil) }, s.Resume} {
				if err := call(t.Context()); !errors.Is(err, errClosed) {
					t.Errorf("after Close: error %v, want %v", err, errClosed)
				}
			}
		})
	}
}

func TestNothingOfTheTargetIsHeldBetweenCalls(t *testing.T) {
	w := newTestWorld(t, "6.12")
	p := w.spawn(t)
	s := attach(t, w.mechanism(), p.Key())
	must(t, s.Suspend(t.Context(), nil))
	if got := w.daemon.FDs(); len(got) != 0 {
		t.Errorf("the daemon has descriptors %v", got)
	}
	debugger := w.Spawn().Main()
	if err := debugger.Seize(p.PID()); err != nil {
		t.Errorf("a debugger cannot attach: %v", err)
	}
}

func TestQueuesBornWhilePausedArePaused(t *testing.T) {
	w := newTestWorld(t, "6.12")
	p := w.spawn(t)
	s := attach(t, w.mechanism(), p.Key())
	must(t, s.Suspend(t.Context(), nil))
	fd, err := p.Main().OpenKFD() // the same context once more
	must(t, err)
	w.queues(t, p, fd)
	must(t, s.Suspend(t.Context(), nil))
	w.mustBe(t, p, held)
	must(t, s.Resume(t.Context()))
	w.mustBe(t, p, runs)
}

func TestSeveralDescriptorsOfOneContextPauseItOnce(t *testing.T) {
	w := newTestWorld(t, "7.2")
	p := w.spawn(t)
	for range 2 {
		_, err := p.Main().OpenKFD()
		must(t, err)
	}
	s := attach(t, w.mechanism(), p.Key())
	must(t, s.Suspend(t.Context(), nil))
	w.mustBe(t, p, held)
	must(t, s.Resume(t.Context()))
	w.mustBe(t, p, runs)
}

// newContext makes a secondary context.
func newContext(t tb, p *kfdtest.Process) int {
	t.Helper()
	fd, err := p.Main().OpenKFD()
	must(t, err)
	var none [0]byte
	_, err = p.Main().Ioctl(fd, kfdabi.ReqCreateProcess, kfd.PointerTo(&none))
	must(t, err)
	return fd
}

func TestEveryContextIsPaused(t *testing.T) {
	w := newTestWorld(t, "7.2")
	p := w.spawn(t)
	w.queues(t, p, newContext(t, p))
	s := attach(t, w.mechanism(), p.Key())
	must(t, s.Suspend(t.Context(), nil))
	w.mustBe(t, p, held, held)
	w.queues(t, p, newContext(t, p))
	w.mustBe(t, p, held, held, runs)
	must(t, s.Suspend(t.Context(), nil)) // the new one too
	w.mustBe(t, p, held, held, held)
	must(t, s.Resume(t.Context()))
	w.mustBe(t, p, runs, runs, runs)
}

func TestContextsOfOtherProcessesAreLeftAlone(t *testing.T) {
	w := newTestWorld(t, "6.12")
	parent := w.spawn(t)
	child := parent.Fork() // with the descriptor of the parent
	w.targets[child.PID()] = child
	m := w.mechanism()
	if _, err := m.Attach(t.Context(), child.Key()); !errors.Is(err, errNoContext) {
		t.Errorf("error %v, want %v", err, errNoContext)
	}
	fd, err := child.Main().StartRuntime()
	must(t, err)
	w.queues(t, child, fd)
	s := attach(t, m, child.Key())
	must(t, s.Suspend(t.Context(), nil))
	w.mustBe(t, child, held)
	w.mustBe(t, parent, runs)
	must(t, s.Resume(t.Context()))
	w.mustBe(t, child, runs)
}

func TestFailedPauseIsUndone(t *testing.T) {
	hardware := new(*mechanism.HardwareError)
	for name, c := range map[string]struct {
		fault    kfdtest.Fault
		want     error
		hardware bool
	}{
		"GPU hangs":        {kfdtest.Fault{Op: opPause, Stage: kfdtest.Hardware, GPU: mes, Errno: unix.EIO}, unix.EIO, true},
		"queues stay":      {kfdtest.Fault{Op: opPause, Stage: kfdtest.Hardware, GPU: hws, Errno: unix.ETIME}, unix.ETIME, true},
		"refused":          {kfdtest.Fault{Op: opPause, Errno: unix.EACCES}, unix.EACCES, false},
		"answer is lost":   {kfdtest.Fault{Op: opPause, Stage: kfdtest.After, Errno: unix.EFAULT}, unix.EFAULT, false},
		"before it":        {kfdtest.Fault{Op: opUnpause, Errno: unix.EACCES}, unix.EACCES, false},
		"no descriptor":    {kfdtest.Fault{Op: kfdtest.OpPidfdGetfd, Errno: unix.EPERM}, unix.EPERM, false},
		"closed meanwhile": {kfdtest.Fault{Op: kfdtest.OpPidfdGetfd, Errno: unix.EBADF}, errNoContext, false},
	} {
		t.Run(name, func(t *testing.T) {
			w := newTestWorld(t, "7.2")
			p := w.spawn(t)
			w.queues(t, p, newContext(t, p))
			s := attach(t, w.mechanism(), p.Key())
			c.fault.Always = errors.Is(c.want, errNoContext)
			injection := w.Inject(c.fault)
			err := s.Suspend(t.Context(), nil)
			if !errors.Is(err, c.want) || errors.As(err, hardware) != c.hardware {
				t.Errorf("error %v, want %v, of the hardware %v", err, c.want, c.hardware)
			}
			injection.Remove()
			w.mustBe(t, p, runs, runs)
			w.mustNote(t)
			must(t, s.Suspend(t.Context(), nil))
			w.mustBe(t, p, held, held)
			must(t, s.Close())
			w.mustBe(t, p, runs, runs)
		})
	}
}

func TestFailedPauseThatCannotBeUndoneStaysInTheJournal(t *testing.T) {
	w := newTestWorld(t, "6.12")
	p := w.spawn(t)
	s := attach(t, w.mechanism(), p.Key())
	w.Inject(kfdtest.Fault{Op: opPause, Stage: kfdtest.After, Errno: unix.EFAULT})
	fault := w.Inject(kfdtest.Fault{Op: opUnpause, Nth: 2, Always: true, Errno: unix.EIO}) // the first is before the pause
	err := s.Suspend(t.Context(), nil)
	if !errors.Is(err, unix.EFAULT) || !errors.Is(err, unix.EIO) {
		t.Errorf("error %v, want %v and %v", err, unix.EFAULT, unix.EIO)
	}
	w.mustBe(t, p, held)
	w.mustNote(t, p.Key())
	fault.Remove()
	must(t, s.Close())
	w.mustBe(t, p, runs)
	w.mustNote(t)
}

func TestFailedUndoStaysInTheJournal(t *testing.T) {
	w := newTestWorld(t, "6.12")
	p := w.spawn(t)
	s := attach(t, w.mechanism(), p.Key())
	must(t, s.Suspend(t.Context(), nil))
	fault := w.Fail(opUnpause, nil, unix.EIO, true)
	for name, call := range map[string]func() error{
		"Resume": func() error { return s.Resume(t.Context()) },
		"Undo": func() error {
			return w.mechanism().Undo(t.Context(), mechanism.JournalEntry{Mechanism: mechanism.CRIU, Target: p.Key()})
		},
	} {
		if err := call(); !errors.Is(err, unix.EIO) {
			t.Errorf("%s: error %v, want %v", name, err, unix.EIO)
		}
		w.mustNote(t, p.Key())
	}
	fault.Remove()
	must(t, s.Resume(t.Context()))
	w.mustBe(t, p, runs)
	w.mustNote(t)
}

func TestCloseIsRepeatedUntilNothingIsHeld(t *testing.T) {
	w := newTestWorld(t, "6.12")
	p := w.spawn(t)
	s := attach(t, w.mechanism(), p.Key())
	must(t, s.Suspend(t.Context(), nil))
	fault := w.Fail(opUnpause, nil, unix.EIO, true)
	for range 2 {
		if err := s.Close(); !errors.Is(err, unix.EIO) {
			t.Errorf("Close: error %v, want %v", err, unix.EIO)
		}
		w.mustBe(t, p, held)
		w.mustNote(t, p.Key())
	}
	if err := s.Suspend(t.Context(), nil); !errors.Is(err, errClosed) {
		t.Errorf("Suspend: error %v, want %v", err, errClosed)
	}
	if err := s.Resume(t.Context()); !errors.Is(err, unix.EIO) {
		t.Errorf("Resume: error %v, want %v", err, unix.EIO)
	}
	fault.Remove()
	for range 2 {
		must(t, s.Close())
		w.mustBe(t, p, runs)
		w.mustNote(t)
	}
}

func TestSuspendAfterAResumeInDoubtPausesAgain(t *testing.T) {
	w := newTestWorld(t, "6.12")
	p := w.spawn(t)
	s := attach(t, w.mechanism(), p.Key())
	must(t, s.Suspend(t.Context(), nil))
	w.Inject(kfdtest.Fault{Op: opUnpause, Stage: kfdtest.After, Errno: unix.EFAULT}) // it did resume
	if err := s.Resume(t.Context()); !errors.Is(err, unix.EFAULT) {
		t.Errorf("error %v, want %v", err, unix.EFAULT)
	}
	must(t, s.Suspend(t.Context(), nil))
	w.mustBe(t, p, held)
}

func TestWithoutAnEntryInTheJournalNothingIsPaused(t *testing.T) {
	w := newTestWorld(t, "6.12")
	p := w.spawn(t)
	s := attach(t, w.mechanism(), p.Key())
	w.beginErr = unix.ENOSPC
	if err := s.Suspend(t.Context(), nil); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("error %v, want %v", err, unix.ENOSPC)
	}
	if n := w.pauses(); n != 0 {
		t.Errorf("%d PROCESS_INFO calls", n)
	}
	w.mustBe(t, p, runs)
}

func TestOrphansAreResumedAfterACrash(t *testing.T) {
	w := newTestWorld(t, "6.12")
	p := w.spawn(t)
	must(t, attach(t, w.mechanism(), p.Key()).Suspend(t.Context(), nil))
	w.daemon.Kill()
	w.mustBe(t, p, held) // the kernel does not resume it
	must(t, w.restart())
	w.mustBe(t, p, runs)
	w.mustNote(t)
	for range 2 { // of what runs
		must(t, w.mechanism().Undo(t.Context(), mechanism.JournalEntry{Mechanism: mechanism.CRIU, Target: p.Key()}))
		w.mustBe(t, p, runs)
	}
	if err := w.mechanism().Undo(t.Context(), mechanism.JournalEntry{Mechanism: "freezer", Target: p.Key()}); err == nil {
		t.Error("Undo of another mechanism's entry: no error")
	}
}

func TestAttachEndsAPauseOfAnEarlierDaemon(t *testing.T) {
	w := newTestWorld(t, "6.12")
	p := w.spawn(t)
	must(t, attach(t, w.mechanism(), p.Key()).Suspend(t.Context(), nil))
	w.daemon.Kill()
	w.daemon = w.Spawn() // which does not clean up
	s := attach(t, w.mechanism(), p.Key())
	w.mustBe(t, p, runs)
	w.mustNote(t)
	must(t, s.Suspend(t.Context(), nil))
	w.mustBe(t, p, held)
}

func TestTargetThatClosesTheDriverIsUndoneWhenItOpensItAgain(t *testing.T) {
	w := newTestWorld(t, "6.12")
	p := w.spawn(t)
	s := attach(t, w.mechanism(), p.Key())
	must(t, s.Suspend(t.Context(), nil))
	for fd := range p.FDs() {
		must(t, p.Main().Close(fd))
	}
	if err := s.Resume(t.Context()); !errors.Is(err, errNoContext) {
		t.Errorf("error %v, want %v", err, errNoContext)
	}
	w.mustNote(t, p.Key())
	_, err := p.Main().OpenKFD()
	must(t, err)
	must(t, s.Resume(t.Context()))
	w.mustBe(t, p, runs)
	w.mustNote(t)
}

func TestTracedTargetIsRefused(t *testing.T) {
	w := newTestWorld(t, "6.12")
	p := w.spawn(t)
	s := attach(t, w.mechanism(), p.Key())
	debugger := w.Spawn().Main()
	must(t, debugger.Seize(p.PID()))
	if _, err := w.mechanism().Attach(t.Context(), p.Key()); !errors.Is(err, unix.EPERM) {
		t.Errorf("Attach: error %v, want %v", err, unix.EPERM)
	}
	if err := s.Suspend(t.Context(), nil); !errors.Is(err, unix.EPERM) {
		t.Errorf("Suspend: error %v, want %v", err, unix.EPERM)
	}
	w.mustBe(t, p, runs)
	w.mustNote(t)
}

func TestTargetThatExitsIsGone(t *testing.T) {
	w := newTestWorld(t, "6.12")
	p := w.spawn(t)
	m := w.mechanism()
	s := attach(t, m, p.Key())
	must(t, s.Suspend(t.Context(), nil))
	p.Kill()
	if err := s.Resume(t.Context()); !errors.Is(err, mechanism.ErrGone) {
		t.Errorf("Resume: error %v, want %v", err, mechanism.ErrGone)
	}
	w.mustNote(t)
	if err := s.Suspend(t.Context(), nil); !errors.Is(err, mechanism.ErrGone) {
		t.Errorf("Suspend: error %v, want %v", err, mechanism.ErrGone)
	}
	must(t, s.Close())
	if _, err := m.Attach(t.Context(), p.Key()); !errors.Is(err, mechanism.ErrGone) {
		t.Errorf("Attach: error %v, want %v", err, mechanism.ErrGone)
	}
	must(t, m.Undo(t.Context(), mechanism.JournalEntry{Mechanism: mechanism.CRIU, Target: p.Key()}))
	w.mustNote(t)
}

func TestTargetThatExitsDuringSuspendIsGone(t *testing.T) {
	w := newTestWorld(t, "6.12")
	p := w.spawn(t)
	s := attach(t, w.mechanism(), p.Key())
	w.Inject(kfdtest.Fault{Op: kfdtest.OpPidfdGetfd, Do: p.Kill})
	if err := s.Suspend(t.Context(), nil); !errors.Is(err, mechanism.ErrGone) {
		t.Errorf("error %v, want %v", err, mechanism.ErrGone)
	}
	w.mustNote(t)
}

func TestUndoTouchesNoOtherProcessThatHasThePid(t *testing.T) {
	w := newTestWorld(t, "6.12")
	p := w.spawn(t)
	must(t, attach(t, w.mechanism(), p.Key()).Suspend(t.Context(), nil))
	earlier := p.Key()
	earlier.Start--
	must(t, w.mechanism().Undo(t.Context(), mechanism.JournalEntry{Mechanism: mechanism.CRIU, Target: earlier}))
	w.mustBe(t, p, held)
	w.mustNote(t, p.Key())
}

func TestCloseWaitsForARunningSuspendAndUndoesIt(t *testing.T) {
	w := newTestWorld(t, "6.12")
	p := w.spawn(t)
	s := attach(t, w.mechanism(), p.Key())
	hang := w.Hang(opPause)
	suspended, closed := make(chan error, 1), make(chan error, 1)
	go func() { suspended <- s.Suspend(context.Background(), nil) }()
	testutil.Receive(t, hang.Reached(), "the call")
	go func() { closed <- s.Close() }()
	hang.Release()
	must(t, testutil.Receive(t, suspended, "the end of Suspend"))
	must(t, testutil.Receive(t, closed, "the end of Close"))
	w.mustBe(t, p, runs)
	w.mustNote(t)
}

func TestEndedContextSuspendsNothing(t *testing.T) {
	w := newTestWorld(t, "6.12")
	p := w.spawn(t)
	s := attach(t, w.mechanism(), p.Key())
	ctx, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("shutdown")
	cancel(cause)
	if err := s.Suspend(ctx, nil); !errors.Is(err, cause) {
		t.Errorf("error %v, want %v", err, cause)
	}
	w.mustBe(t, p, runs)
	w.mustNote(t)
}

func TestProbeReportsEachRequirement(t *testing.T) {
	w := newTestWorld(t, "6.12")
	p := w.spawn(t)
	m := w.mechanism()
	without := w.Spawn()
	w.targets[without.PID()] = without
	dead := w.spawn(t)
	dead.Kill()
	ok := func(check, found string) mechanism.Evidence {
		return mechanism.Evidence{Check: check, Found: found, OK: true}
	}
	host := []mechanism.Evidence{ok("capabilities", "CAP_CHECKPOINT_RESTORE or CAP_SYS_ADMIN"), ok("KFD version", "1.17")}
	for _, c := range []struct {
		target gpreempt.ProcessKey
		want   []mechanism.Evidence
	}{
		{p.Key(), []mechanism.Evidence{ok("tracer", "none"), ok("/dev/kfd", "1 descriptors")}},
		{without.Key(), []mechanism.Evidence{
			ok("tracer", "none"),
			{Check: "/dev/kfd", Found: "0 descriptors", Remedy: "it does not use the GPU, or has closed it"},
		}},
		{dead.Key(), []mechanism.Evidence{{Check: "process", Found: "it has exited"}}},
	} {
		if diff := cmp.Diff(append(host[:2:2], c.want...), m.Probe(t.Context(), c.target).Evidence); diff != "" {
			t.Errorf("process %v (-want +got):\n%s", c.target, diff)
		}
	}
	if got := w.daemon.FDs(); len(got) != 0 {
		t.Errorf("the daemon has descriptors %v", got)
	}
	if n := w.pauses(); n != 0 {
		t.Errorf("the probe made %d PROCESS_INFO calls", n)
	}
}

func TestProbeWithoutTheDriverOrTheRights(t *testing.T) {
	w := newTestWorld(t, "7.2")
	p := w.spawn(t)
	w.Fail(driver.OpOpen, w.daemon, unix.ENOENT, true)
	m := w.mechanism()
	m.cfg.Host = powerless{worldHost{w}}
	c := m.Probe(t.Context(), p.Key())
	if c.Usable() {
		t.Error("it is usable")
	}
	for _, want := range []string{"capabilities: neither", "KFD version: open /dev/kfd"} {
		if got := c.Why(); !strings.Contains(got, want) {
			t.Errorf("why: %q, want it to say %q", got, want)
		}
	}
}

type powerless struct{ worldHost }

func (powerless) Capabilities() (uint64, error) { return 0, nil }

func TestErrorsNameTheCauseAndTheRemedy(t *testing.T) {
	w := newTestWorld(t, "6.12")
	idle := w.Spawn()
	w.targets[idle.PID()] = idle
	err := w.mechanism().Undo(t.Context(), mechanism.JournalEntry{Mechanism: mechanism.CRIU, Target: idle.Key()})
	want := fmt.Sprintf("resume process %v: it has no descriptor of /dev/kfd that it opened itself: "+
		"it does not use the GPU, or has closed it; retry when it opens /dev/kfd again", idle.Key())
	if err == nil || err.Error() != want {
		t.Errorf("error %q, want %q", err, want)
	}
}
