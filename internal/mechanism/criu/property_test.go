package criu

import (
	"context"
	"testing"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/emu/kfdtest"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// For any order of actions of the daemon, the target and the memory management of the
// driver, any failures, and wherever the daemon is killed:
//
//   - no context is ever evicted by us more than once;
//   - a process that is evicted by us is in the journal;
//   - after a Suspend without an error every context is paused;
//   - after a Resume or Close without an error, and after the clean-up of a dead
//     daemon's journal, none is, and every queue runs.
func TestNoScheduleLeavesATargetEvicted(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		profile := rapid.SampledFrom(driver.Profiles()).Draw(t, "profile")
		w := newWorld(profile, memory{})
		s := &schedule{w: w, target: w.spawn(t), contexts: profile == "7.2" || profile == "7.3"}
		s.first = s.open()[0]
		t.Repeat(map[string]func(*rapid.T){
			"":                s.check,
			"suspend":         s.suspend,
			"resume":          s.resume,
			"attach":          s.attach,
			"close":           s.close,
			"crash":           s.crash,
			"target opens":    s.targetOpens,
			"target closes":   s.targetCloses,
			"memory eviction": s.evict,
			"fault":           s.fault,
		})
		s.recover(t)
	})
}

// schedule is one run of the property.
type schedule struct {
	w       *world
	target  *kfdtest.Process
	session mechanism.Session
	// contexts: the driver has secondary ones.
	contexts bool
	// first is a descriptor the target keeps: without one a pause of it cannot be
	// undone.
	first int
	// evictions counts those of the memory management that are in effect.
	evictions int
	// paused: the last call said that the target is suspended, and it has made no
	// context since.
	paused bool
	// closed: the target has closed a descriptor since it was suspended, and its
	// number may come back.
	closed bool
}

func (s *schedule) open() []int {
	fds, err := worldProcess{s.w, s.target}.Descriptors()
	if err != nil {
		panic(err)
	}
	return fds
}

// own returns the pauses in effect of each context, on each GPU.
func (s *schedule) own() (evicted [][]int, paused int) {
	primary := true
	for _, c := range s.w.contexts(s.target) {
		counts := append([]int(nil), c.Evicted...)
		for i := range counts {
			if primary { // what the memory management evicts in this test
				counts[i] -= s.evictions
			}
		}
		primary = false
		evicted = append(evicted, counts)
		if c.Paused {
			paused++
		}
	}
	return evicted, paused
}

func (s *schedule) check(t *rapid.T) {
	evicted, paused := s.own()
	ours := false
	for _, counts := range evicted {
		for _, n := range counts {
			if n < 0 || n > 1 {
				t.Fatalf("contexts are evicted %v times", evicted)
			}
			ours = ours || n > 0
		}
	}
	entries, errs := s.w.journal.Entries()
	if len(errs) > 0 {
		t.Fatal(errs)
	}
	if ours && len(entries) == 0 {
		t.Fatalf("contexts are evicted %v times and the journal is empty", evicted)
	}
	if s.paused && paused != len(evicted) {
		t.Fatalf("suspended, %d of %d contexts are paused", paused, len(evicted))
	}
}

func (s *schedule) mustRun(t *rapid.T) {
	evicted, paused := s.own()
	for _, counts := range evicted {
		for _, n := range counts {
			if n != 0 || paused != 0 {
				t.Fatalf("resumed, contexts are evicted %v times and %d are paused", evicted, paused)
			}
		}
	}
	if s.evictions > 0 {
		return
	}
	for id, q := range s.target.Queues() {
		if !q.Running {
			t.Fatalf("resumed, queue %d is in state %+v", id, q)
		}
	}
}

func (s *schedule) suspend(t *rapid.T) {
	if s.session == nil {
		t.Skip("no session")
	}
	if err := s.session.Suspend(context.Background(), nil); err == nil {
		s.paused, s.closed = true, s.closed && s.paused
	} else {
		s.paused = false
	}
}

func (s *schedule) resume(t *rapid.T) {
	if s.session == nil {
		t.Skip("no session")
	}
	s.paused = false
	if s.session.Resume(context.Background()) == nil {
		s.closed = false
		s.mustRun(t)
	}
}

func (s *schedule) attach(t *rapid.T) {
	if s.session != nil {
		t.Skip("there is one")
	}
	session, err := s.w.mechanism().Attach(context.Background(), s.target.Key())
	if err == nil {
		s.session = session
		s.mustRun(t)
	}
}

func (s *schedule) close(t *rapid.T) {
	if s.session == nil {
		t.Skip("no session")
	}
	s.paused = false
	if s.session.Close() == nil {
		s.session, s.closed = nil, false
		s.mustRun(t)
	}
}

// crash kills the daemon at one of the next calls it makes, in the middle of a
// suspend or resume, or here. Another daemon cleans up.
func (s *schedule) crash(t *rapid.T) {
	injection := s.w.Inject(kfdtest.Fault{
		Caller: s.w.daemon, Do: s.w.daemon.Kill,
		Nth:   rapid.IntRange(1, 12).Draw(t, "call"),
		Stage: rapid.SampledFrom([]kfdtest.Stage{kfdtest.Before, kfdtest.After}).Draw(t, "stage"),
	})
	// Either the daemon is dead by now and the errors do not matter, or it survived.
	if s.session != nil {
		for range 2 {
			if rapid.Bool().Draw(t, "suspend") {
				_ = s.session.Suspend(context.Background(), nil)
			} else {
				_ = s.session.Resume(context.Background())
			}
		}
	}
	s.session, s.paused, s.closed = nil, false, false
	injection.Remove()
	s.check(t)
	s.restart(t)
}

// restart starts a new daemon that cleans up, until the remaining faults have passed.
func (s *schedule) restart(t *rapid.T) {
	err := s.w.restart()
	for range 64 { // no run has as many faults
		if err == nil {
			break
		}
		err = s.w.cleanUp()
	}
	must(t, err)
	s.w.mustNote(t)
	s.mustRun(t)
}

// targetOpens opens the driver again, and on a driver that can makes a context of it.
func (s *schedule) targetOpens(t *rapid.T) {
	if len(s.open()) > 4 {
		t.Skip("enough")
	}
	// A context with a number that another descriptor had runs until it is resumed: see
	// the package comment.
	if s.contexts && !s.closed && rapid.Bool().Draw(t, "context") {
		s.w.queues(t, s.target, newContext(t, s.target))
		s.paused = false
		return
	}
	fd, err := s.target.Main().OpenKFD()
	must(t, err)
	if len(s.target.Queues()) < 12 {
		_, err := s.target.Main().CreateQueue(fd, rapid.SampledFrom([]gpreempt.GPUID{hws, mes}).Draw(t, "GPU"), kfd.QueueTypeComputeAQL)
		must(t, err)
	}
}

func (s *schedule) targetCloses(t *rapid.T) {
	fd := rapid.SampledFrom(s.open()).Draw(t, "descriptor")
	if fd == s.first {
		t.Skip("it keeps that")
	}
	must(t, s.target.Main().Close(fd))
	s.closed = true
}

// evict makes the memory management evict the process, or restore it.
func (s *schedule) evict(t *rapid.T) {
	if s.evictions > 0 && rapid.Bool().Draw(t, "restore") {
		must(t, s.w.Restore(s.target.MM()))
		s.evictions--
		return
	}
	must(t, s.w.Evict(s.target.MM(), 0))
	s.evictions++
}

// fault makes one of the next calls fail: without an effect, or with its result lost.
// TestFailedPauseIsUndone covers GPUs that fail.
func (s *schedule) fault(t *rapid.T) {
	f := kfdtest.Fault{
		Op:    rapid.SampledFrom([]driver.Op{opPause, opUnpause, kfdtest.OpPidfdGetfd}).Draw(t, "op"),
		Nth:   rapid.IntRange(1, 3).Draw(t, "call"),
		Errno: rapid.SampledFrom([]unix.Errno{unix.EIO, unix.EFAULT, unix.EACCES, unix.ENOMEM}).Draw(t, "errno"),
	}
	// No kernel returns a descriptor and an error.
	if f.Op != kfdtest.OpPidfdGetfd && rapid.Bool().Draw(t, "answer lost") {
		f.Stage = kfdtest.After
	}
	s.w.Inject(f)
}

// recover ends the run: the clean-up leaves nothing paused.
func (s *schedule) recover(t *rapid.T) {
	s.restart(t)
	for ; s.evictions > 0; s.evictions-- {
		must(t, s.w.Restore(s.target.MM()))
	}
	s.mustRun(t)
}
