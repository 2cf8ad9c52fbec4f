package nvchannels

import (
	"errors"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/emu/nvrmtest"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/nvrm"
)

func TestAProcessThatClosesOneOfItsFilesIsResumedWithTheOther(t *testing.T) {
	w := newWorld(t)
	p := w.machine.Start(target)
	p.OpenFile()
	s := w.attach()
	must(t, s.Suspend(t.Context(), nil))
	if off, all := w.machine.Off(); off != 16 || all != 16 {
		t.Errorf("%d of %d channels are off", off, all)
	}
	p.CloseFile(nvrmtest.FirstFile)
	w.examine(s)
	if off, _ := w.machine.Off(); off != 8 {
		t.Errorf("a file was closed, and %d channels are off", off)
	}
	w.nothingIsOff(s)
}

func TestAProcessThatClosesAllItsFilesIsReplaced(t *testing.T) {
	w := newWorld(t)
	p := w.machine.Start(target)
	s := w.attach()
	must(t, s.Suspend(t.Context(), nil))
	p.CloseFile(nvrmtest.FirstFile)
	w.examine(s)
	if _, err := s.Handle(t.Context()); !errors.Is(err, mechanism.ErrReplaced) {
		t.Errorf("Handle: %v", err)
	}
	w.nothingIsOff(s)
}

func TestTheChannelsOfAForkedProcessAreDisabledOnce(t *testing.T) {
	w := newWorld(t)
	w.m.cfg.Owner = func(nvrm.Handle) gpreempt.ProcessKey { return target }
	p := w.machine.Start(target)
	child := p.Fork(other)
	sessions := []mechanism.Session{w.attachTo(other), w.attach()}
	must(t, errors.Join(w.m.SuspendAll(t.Context(), sessions)...))
	child.Kill()
	w.examine(sessions[0])
	if got := stateOf(p); got != (state{8, 8, 0}) {
		t.Errorf("after the child's end: %v", got)
	}
	must(t, sessions[1].Resume(t.Context()))
	if got := stateOf(p); got != (state{0, 8, 0}) {
		t.Errorf("after Resume: %v", got)
	}
	w.nothingIsOff(sessions...)
}

func TestAChannelOfTwoDescriptorsIsDisabledOnce(t *testing.T) {
	w := newWorld(t)
	p := w.machine.Start(target)
	number := p.Dup()
	s := w.attach()
	must(t, s.Suspend(t.Context(), nil))
	entries := w.journal.list()
	p.CloseFile(number)
	later := New(Config{Sys: w.machine.Sys(), Journal: &w.journal, Log: zap.NewNop()})
	must(t, later.Undo(t.Context(), entries[0]))
	if got := stateOf(p); got.Off != 0 {
		t.Errorf("after one Undo: %v", got)
	}
	w.nothingIsOff(s)
}

func TestUndoFindsAClientAlsoAfterTheHandlesBeganAgain(t *testing.T) {
	w := newWorld(t)
	w.machine.Assign(1<<20 - 1000)
	p := w.machine.Start(target)
	s := w.attach()
	must(t, s.Suspend(t.Context(), nil))
	w.machine.Assign(2000)
	later := New(Config{Sys: w.machine.Sys(), Journal: &w.journal, Log: zap.NewNop()})
	must(t, later.Undo(t.Context(), w.journal.list()[0]))
	if got := stateOf(p); got.Off != 0 {
		t.Errorf("after Undo: %v", got)
	}
	w.nothingIsOff(s)
}

func TestAllClientsOfAProcessAreSuspended(t *testing.T) {
	for name, change := range map[string]func(w *world, p *nvrmtest.Process, s mechanism.Session){
		"two clients of a file, before": func(_ *world, p *nvrmtest.Process, _ mechanism.Session) { p.AddClient(nvrmtest.FirstFile) },
		"a file that gets its client later": func(w *world, p *nvrmtest.Process, s mechanism.Session) {
			number := p.OpenBare()
			w.examine(s)
			p.AddClient(number)
			w.examine(s)
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			p := w.machine.Start(target)
			if name == "two clients of a file, before" {
				change(w, p, nil)
			}
			s := w.attach()
			if name != "two clients of a file, before" {
				change(w, p, s)
			}
			must(t, s.Suspend(t.Context(), nil))
			if off, all := w.machine.Off(); off != 16 || all != 16 {
				t.Errorf("%d of %d channels are off", off, all)
			}
			entries := w.journal.list()
			later := New(Config{Sys: w.machine.Sys(), Journal: &w.journal, Log: zap.NewNop()})
			must(t, later.Undo(t.Context(), entries[0]))
			if off, _ := w.machine.Off(); off != 0 {
				t.Errorf("%d channels are off after Undo", off)
			}
			w.nothingIsOff(s)
		})
	}
}

func TestAProcessThatFreesAClientIsResumedWithTheOther(t *testing.T) {
	w := newWorld(t)
	p := w.machine.Start(target)
	p.AddClient(nvrmtest.FirstFile)
	w.machine.Assign(100_000)
	s := w.attach()
	must(t, s.Suspend(t.Context(), nil))
	p.FreeClient()
	w.examine(s)
	if off, all := w.machine.Off(); off != 8 || all != 8 {
		t.Errorf("%d of %d channels are off", off, all)
	}
	p.FreeClient()
	must(t, s.Resume(t.Context()))
	w.nothingIsOff(s)
}

// Discovery does not know yet whose the file is.
func TestTheChannelsOfAFileOfTwoProcessesAreDisabledOnce(t *testing.T) {
	w := newWorld(t)
	p := w.machine.Start(target)
	child := p.Fork(other)
	sessions := []mechanism.Session{w.attach(), w.attachTo(other)}
	must(t, errors.Join(w.m.SuspendAll(t.Context(), sessions)...))
	child.Kill()
	w.examine(sessions[1])
	must(t, sessions[0].Resume(t.Context()))
	if got := stateOf(p); got != (state{0, 8, 0}) {
		t.Errorf("after Resume: %v", got)
	}
	w.nothingIsOff(sessions...)
}

func TestAChildThatOutlivesItsSuspendedParentIsResumed(t *testing.T) {
	w := newWorld(t)
	p := w.machine.Start(target)
	child := p.Fork(other)
	sessions := []mechanism.Session{w.attach(), w.attachTo(other)}
	must(t, errors.Join(w.m.SuspendAll(t.Context(), sessions[:1])...))
	p.Kill()
	w.examine(sessions[0])
	testutil.Until(t, "the end of the parent resumes it", func() bool { return stateOf(child) == state{0, 8, 0} })
	must(t, sessions[1].Suspend(t.Context(), nil))
	w.nothingIsOff(sessions...)
}

func TestChannelsOfANewClientAreDisabled(t *testing.T) {
	w := newWorld(t)
	p := w.machine.Start(target)
	s := w.attach()
	must(t, s.Suspend(t.Context(), nil))
	p.OpenFile()
	testutil.Until(t, "the channels of both clients are off", func() bool { off, _ := w.machine.Off(); return off == 16 })
	w.nothingIsOff(s)
}

func TestAFileThatIsClosedMeanwhileDoesNotResumeTheProcess(t *testing.T) {
	w := newWorld(t)
	p := w.machine.Start(target)
	number := p.OpenFile()
	s := w.attach()
	must(t, s.Suspend(t.Context(), nil))
	p.CloseFile(number)
	enables := countSets(w.machine, 0, nil)
	free := w.stand()
	s.(*session).full = time.Now()
	s.(*session).examine()
	free()
	w.examine(s)
	must(t, s.Suspend(t.Context(), nil))
	w.machine.Before(nil)
	if r, err := s.Handle(t.Context()); *enables > 0 || r.Running != mechanism.NotRunning || err != nil {
		t.Errorf("%d calls set channels; Handle: %v, %v", *enables, r.Running, err)
	}
	w.nothingIsOff(s)
}

func TestAFileThatCannotBeScannedHidesNoOther(t *testing.T) {
	w := newWorld(t)
	p := w.machine.Start(target)
	s := w.attach()
	must(t, s.Suspend(t.Context(), nil))
	p.OpenFile()
	failed := w.examineWithAFailure(s) // the first question is about the first file
	if off, all := w.machine.Off(); !failed || off != 16 || all != 16 {
		t.Errorf("failed %v; %d of %d channels are off", failed, off, all)
	}
	w.nothingIsOff(s)
}
