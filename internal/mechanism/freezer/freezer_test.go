package freezer

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestProcessWithoutCgroupOfItsOwnIsStopped(t *testing.T) {
	m := newMachine(t)
	v := startVictim(t, nil)
	s := m.attach(t, v.key)
	for range 3 {
		m.suspend(t, s)
		if got := v.states(t); got != "T" {
			t.Fatalf("suspended, its threads are in state %s, want T", got)
		}
		if diff := cmp.Diff(map[gpreempt.ProcessKey]string{v.key: "freezer"}, m.noted(t)); diff != "" {
			t.Fatalf("journal while it is suspended (-want +got):\n%s", diff)
		}
		m.suspend(t, s) // harmless
		m.resume(t, s)
		v.mustRun(t)
		if diff := cmp.Diff(map[gpreempt.ProcessKey]string{}, m.noted(t)); diff != "" {
			t.Fatalf("journal while it runs (-want +got):\n%s", diff)
		}
		m.resume(t, s) // harmless
	}
}

func TestCgroupOfItsOwnIsFrozenWithTheChildren(t *testing.T) {
	path, dir := newCgroup(t)
	m := newMachine(t)
	v := startVictim(t, dir)
	child, err := strconv.Atoi(v.ask(t, "child"))
	if err != nil {
		t.Fatal(err)
	}
	s := m.attach(t, v.key)
	for range 3 {
		m.suspend(t, s)
		if got := frozen(t, dir); got != "1" {
			t.Fatalf("suspended, frozen is %s", got)
		}
		if got := v.states(t) + statesOf(t, int32(child)); strings.Contains(got, "T") {
			t.Fatalf("states %s: it was stopped by a signal too", got)
		}
		if diff := cmp.Diff(map[gpreempt.ProcessKey]string{v.key: "freezer" + path}, m.noted(t)); diff != "" {
			t.Fatalf("journal while it is suspended (-want +got):\n%s", diff)
		}
		m.suspend(t, s) // harmless
		m.resume(t, s)
		v.mustRun(t)
		if got := control(t, dir, "cgroup.freeze"); got != "0" {
			t.Fatalf("resumed, cgroup.freeze is %s", got)
		}
		if diff := cmp.Diff(map[gpreempt.ProcessKey]string{}, m.noted(t)); diff != "" {
			t.Fatalf("journal while it runs (-want +got):\n%s", diff)
		}
	}
}

func TestCgroupWithOtherProcessesIsNotFrozen(t *testing.T) {
	_, dir := newCgroup(t)
	m := newMachine(t)
	v, other := startVictim(t, dir), startVictim(t, dir)
	m.suspend(t, m.attach(t, v.key))
	if got := v.states(t); got != "T" {
		t.Errorf("suspended, its threads are in state %s, want T", got)
	}
	other.mustRun(t)
}

// busyJournal calls begin when a pause begins.
type busyJournal struct {
	mechanism.Store
	begin func() error
}

func (j busyJournal) Begin(e mechanism.JournalEntry) error {
	if err := j.begin(); err != nil {
		return err
	}
	return j.Store.Begin(e)
}

func TestProcessThatJoinsTheCgroupMeanwhileEndsThePause(t *testing.T) {
	_, dir := newCgroup(t)
	m := newMachine(t)
	v, other := startVictim(t, dir), startVictim(t, nil)
	m.Mechanism = New(Config{Root: "/", Log: zap.NewNop(), Journal: busyJournal{m.journal, func() error {
		setControl(t, dir, "cgroup.procs", strconv.Itoa(int(other.key.PID)))
		return nil
	}}})
	err := m.attach(t, v.key).Suspend(t.Context(), nil)
	if want := fmt.Sprintf("process %d in its cgroup", other.key.PID); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("error %v, want one that says %q", err, want)
	}
	v.mustRun(t)
	other.mustRun(t)
	if diff := cmp.Diff(map[gpreempt.ProcessKey]string{}, m.noted(t)); diff != "" {
		t.Errorf("journal (-want +got):\n%s", diff)
	}
}

func TestPauseIsInTheJournalBeforeTheProcessStops(t *testing.T) {
	m := newMachine(t)
	v := startVictim(t, nil)
	states := ""
	m.Mechanism = New(Config{Root: "/", Log: zap.NewNop(), Journal: busyJournal{m.journal, func() error { states = v.states(t); return nil }}})
	s := m.attach(t, v.key)
	m.suspend(t, s)
	if states == "" || strings.Contains(states, "T") {
		t.Errorf("when the pause was recorded, its threads were in state %q", states)
	}
	m.resume(t, s)
	v.mustRun(t)
}

func TestWithoutAnEntryInTheJournalNothingIsPaused(t *testing.T) {
	m := newMachine(t)
	v := startVictim(t, nil)
	full := errors.New("no space left on device")
	m.Mechanism = New(Config{Root: "/", Log: zap.NewNop(), Journal: busyJournal{m.journal, func() error { return full }}})
	s := m.attach(t, v.key)
	if err := s.Suspend(t.Context(), nil); !errors.Is(err, full) {
		t.Errorf("error %v, want %v", err, full)
	}
	if got := v.states(t); strings.Contains(got, "T") {
		t.Errorf("its threads are in state %s", got)
	}
	v.mustRun(t)
}

func TestProcessStoppedByAnotherProgramIsLeftStopped(t *testing.T) {
	m := newMachine(t)
	v := startVictim(t, nil)
	if err := v.cmd.Process.Signal(unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	var status unix.WaitStatus
	if _, err := unix.Wait4(int(v.key.PID), &status, unix.WUNTRACED, nil); err != nil || !status.Stopped() {
		t.Fatalf("status %v, error %v", status, err)
	}
	s := m.attach(t, v.key)
	m.suspend(t, s)
	if diff := cmp.Diff(map[gpreempt.ProcessKey]string{}, m.noted(t)); diff != "" {
		t.Errorf("journal (-want +got):\n%s", diff)
	}
	m.resume(t, s)
	if got := v.states(t); got != "T" {
		t.Errorf("resumed, its threads are in state %s, want T", got)
	}
	if err := v.cmd.Process.Signal(unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	v.mustRun(t)
}

func TestCgroupFrozenByAnotherProgramIsLeftFrozen(t *testing.T) {
	_, dir := newCgroup(t)
	m := newMachine(t)
	v := startVictim(t, dir)
	setControl(t, dir, "cgroup.freeze", "1")
	s := m.attach(t, v.key)
	m.suspend(t, s)
	if diff := cmp.Diff(map[gpreempt.ProcessKey]string{}, m.noted(t)); diff != "" {
		t.Errorf("journal (-want +got):\n%s", diff)
	}
	m.resume(t, s)
	if got := control(t, dir, "cgroup.freeze"); got != "1" {
		t.Errorf("resumed, cgroup.freeze is %s, want 1", got)
	}
	setControl(t, dir, "cgroup.freeze", "0")
	v.mustRun(t)
}

func TestSuspendAgainStopsAProcessThatAnotherProgramResumed(t *testing.T) {
	m := newMachine(t)
	v := startVictim(t, nil)
	s := m.attach(t, v.key)
	m.suspend(t, s)
	if err := v.cmd.Process.Signal(unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	v.mustRun(t)
	m.suspend(t, s)
	if got := v.states(t); got != "T" {
		t.Errorf("suspended again, its threads are in state %s, want T", got)
	}
}

func TestCloseResumes(t *testing.T) {
	m := newMachine(t)
	v := startVictim(t, nil)
	s := m.attach(t, v.key)
	m.suspend(t, s)
	for range 2 {
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	v.mustRun(t)
	if diff := cmp.Diff(map[gpreempt.ProcessKey]string{}, m.noted(t)); diff != "" {
		t.Errorf("journal (-want +got):\n%s", diff)
	}
	if err := s.Suspend(t.Context(), nil); !errors.Is(err, errClosed) {
		t.Errorf("Suspend after Close: error %v, want %v", err, errClosed)
	}
	if err := s.Resume(t.Context()); !errors.Is(err, errClosed) {
		t.Errorf("Resume after Close: error %v, want %v", err, errClosed)
	}
}

func TestProcessThatExitsIsGone(t *testing.T) {
	_, dir := newCgroup(t)
	for name, dir := range map[string]*os.File{"stopped": nil, "frozen": dir} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t)
			v := startVictim(t, dir)
			s := m.attach(t, v.key)
			m.suspend(t, s)
			v.kill()
			for _, call := range []func(context.Context) error{s.Resume, func(ctx context.Context) error { return s.Suspend(ctx, nil) }, s.Resume} {
				if err := call(t.Context()); !errors.Is(err, mechanism.ErrGone) {
					t.Errorf("error %v, want %v", err, mechanism.ErrGone)
				}
			}
			if diff := cmp.Diff(map[gpreempt.ProcessKey]string{}, m.noted(t)); diff != "" {
				t.Errorf("journal (-want +got):\n%s", diff)
			}
			if _, err := m.Attach(t.Context(), v.key); !errors.Is(err, mechanism.ErrGone) {
				t.Errorf("Attach: error %v, want %v", err, mechanism.ErrGone)
			}
		})
	}
}

func TestChildrenOfAProcessThatDiedFrozenAreThawed(t *testing.T) {
	_, dir := newCgroup(t)
	m := newMachine(t)
	v := startVictim(t, dir)
	v.ask(t, "child")
	s := m.attach(t, v.key)
	m.suspend(t, s)
	v.kill()
	if err := s.Resume(t.Context()); !errors.Is(err, mechanism.ErrGone) {
		t.Errorf("error %v, want %v", err, mechanism.ErrGone)
	}
	if got := control(t, dir, "cgroup.freeze"); got != "0" {
		t.Errorf("cgroup.freeze is %s, want 0", got)
	}
	empty(t, dir) // the child sees the end of its input, and ends
}

// empty waits until a cgroup has no process.
func empty(t *testing.T, dir *os.File) {
	t.Helper()
	f, err := os.Open(dir.Name() + "/cgroup.events")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	fds := []unix.PollFd{{Fd: int32(f.Fd()), Events: unix.POLLPRI}}
	for text := make([]byte, 256); ; {
		n, err := f.ReadAt(text, 0)
		if n == 0 {
			t.Fatal(err)
		}
		if flat(string(text[:n]), "populated") == "0" {
			return
		}
		if n, err := unix.Poll(fds, 20_000); n == 0 || err != nil && !errors.Is(err, unix.EINTR) {
			t.Fatalf("processes %s are still in the cgroup: %v", control(t, dir, "cgroup.procs"), err)
		}
	}
}

func TestUndoResumesOrphansAndIsIdempotent(t *testing.T) {
	_, dir := newCgroup(t)
	for name, dir := range map[string]*os.File{"stopped": nil, "frozen": dir} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t)
			v := startVictim(t, dir)
			m.suspend(t, m.attach(t, v.key))
			entries, errs := m.journal.Entries()
			if len(entries) != 1 || len(errs) > 0 {
				t.Fatalf("entries %v, errors %v, want one entry", entries, errs)
			}
			for range 2 {
				if err := m.Undo(t.Context(), entries[0]); err != nil {
					t.Fatal(err)
				}
				v.mustRun(t)
				if diff := cmp.Diff(map[gpreempt.ProcessKey]string{}, m.noted(t)); diff != "" {
					t.Fatalf("journal (-want +got):\n%s", diff)
				}
			}
			v.kill()
			if err := m.Undo(t.Context(), entries[0]); err != nil {
				t.Errorf("Undo after the exit: %v", err)
			}
		})
	}
}

// The name of a damaged entry is that of the process; how it was paused is unknown.
func TestUndoByNameAloneEndsEitherPause(t *testing.T) {
	m, v, dir := newFake(t)
	byName := mechanism.JournalEntry{Mechanism: mechanism.Freezer, Target: v.key, NameOnly: true}
	s := m.attach(t, v.key)
	m.suspend(t, s)
	freeze := filepath.Join(dir, "cgroup.freeze")
	if got := read(t, freeze); got != "1" {
		t.Fatalf("cgroup.freeze is %s, want 1", got)
	}
	if err := unix.Kill(int(v.key.PID), unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	for v.states(t) != "T" {
		runtime.Gosched()
	}
	for range 2 {
		if err := m.Undo(t.Context(), byName); err != nil {
			t.Error(err)
		}
		v.mustRun(t)
		if got := read(t, freeze); got != "0" {
			t.Errorf("cgroup.freeze is %s, want 0", got)
		}
	}
	other := byName
	other.Target.Start++ // the pid was used again
	write(t, freeze, "1")
	if err := m.Undo(t.Context(), other); err != nil {
		t.Error(err)
	}
	if got := read(t, freeze); got != "1" {
		t.Errorf("the cgroup of another process than that of the entry was thawed")
	}
}

func TestUndoTouchesNoOtherProcessThatHasThePid(t *testing.T) {
	m := newMachine(t)
	v := startVictim(t, nil)
	m.suspend(t, m.attach(t, v.key))
	earlier := mechanism.JournalEntry{Mechanism: mechanism.Freezer, Target: gpreempt.ProcessKey{PID: v.key.PID, Start: v.key.Start - 1}}
	if err := m.journal.Begin(earlier); err != nil {
		t.Fatal(err)
	}
	if err := m.Undo(t.Context(), earlier); err != nil {
		t.Fatal(err)
	}
	if got := v.states(t); got != "T" {
		t.Errorf("its threads are in state %s, want T", got)
	}
	if diff := cmp.Diff(map[gpreempt.ProcessKey]string{v.key: "freezer"}, m.noted(t)); diff != "" {
		t.Errorf("journal (-want +got):\n%s", diff)
	}
}

func TestUndoTouchesNoOtherCgroupThatHasTheName(t *testing.T) {
	path, dir := newCgroup(t)
	m := newMachine(t)
	setControl(t, dir, "cgroup.freeze", "1")
	e := mechanism.JournalEntry{Mechanism: mechanism.Freezer, Target: gpreempt.ProcessKey{PID: 1 << 21, Start: 1}, Cgroup: path, CgroupID: 1}
	if err := m.Undo(t.Context(), e); err != nil {
		t.Fatal(err)
	}
	if got := control(t, dir, "cgroup.freeze"); got != "1" {
		t.Errorf("cgroup.freeze is %s, want 1", got)
	}
}

func TestUndoRefusesEntriesOfOtherMechanisms(t *testing.T) {
	m := newMachine(t)
	if err := m.Undo(t.Context(), mechanism.JournalEntry{Mechanism: "criu", Target: gpreempt.ProcessKey{PID: 2, Start: 1}}); err == nil {
		t.Error("no error")
	}
}

func TestProcessStoppedByItsDebuggerIsRefused(t *testing.T) {
	runtime.LockOSThread() // which is the debugger
	defer runtime.UnlockOSThread()
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
	cmd.Env = append(os.Environ(), roleEnv+"="+roleVictim)
	cmd.SysProcAttr = &unix.SysProcAttr{Ptrace: true} //nolint:forbidigo // the thread is pinned: it is the debugger
	if err := cmd.Start(); err != nil {
		t.Skipf("needs ptrace: %v", err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	var status unix.WaitStatus
	if _, err := unix.Wait4(cmd.Process.Pid, &status, 0, nil); err != nil || !status.Stopped() {
		t.Fatalf("status %v, error %v", status, err)
	}
	m := newMachine(t)
	err := m.attach(t, keyOf(t, cmd.Process.Pid)).Suspend(t.Context(), nil)
	if err == nil || !strings.Contains(err.Error(), "debugger") {
		t.Errorf("error %v, want one about the debugger", err)
	}
}

func TestInitAndThisProgramAreRefused(t *testing.T) {
	m := newMachine(t)
	for _, pid := range []int{1, os.Getpid()} {
		target := gpreempt.ProcessKey{PID: int32(pid), Start: 1}
		if m.Probe(t.Context(), target).Usable() {
			t.Errorf("process %d can be stopped", pid)
		}
		if _, err := m.Attach(t.Context(), target); err == nil {
			t.Errorf("process %d was attached to", pid)
		}
	}
}

func TestProbeReportsHowAProcessWouldBePaused(t *testing.T) {
	m := newMachine(t)
	check := func(target gpreempt.ProcessKey, want ...mechanism.Evidence) {
		t.Helper()
		got := m.Probe(t.Context(), target).Evidence
		for i := range got {
			got[i].Remedy = ""
			got[i].Found, _, _ = strings.Cut(got[i].Found, ", because")
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	}
	descriptor := mechanism.Evidence{Check: "process descriptor", Found: "available", OK: true}
	v := startVictim(t, nil)
	check(v.key, descriptor, mechanism.Evidence{Check: "cgroup", Found: "SIGSTOP of the process without its children", OK: true})
	v.kill()
	check(v.key, mechanism.Evidence{Check: "process", Found: "it has exited"})

	path, dir := newCgroup(t)
	v = startVictim(t, dir)
	check(v.key, descriptor, mechanism.Evidence{Check: "cgroup", Found: path + " is its own and will be frozen", OK: true})
}
