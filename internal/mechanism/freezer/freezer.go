// Package freezer implements a mechanism that keeps a process from submitting work to
// its GPUs by stopping it on the CPU.
//
// It works on every Linux machine and on every GPU. It drains instead of preempting:
// what is in the queues already runs to its end, and a kernel that never ends is not
// stopped. GPU memory stays in use.
//
// A process with a cgroup of its own (see unfit for the others) is frozen with it:
// its children are too, also later ones, and no program notices. Any other process gets
// a SIGSTOP. That reaches no other process: children that submit work of their own
// continue. And it is visible: the kernel notifies the parent, a shell takes its job for
// suspended, and a SIGCONT from any program ends the pause.
//
// A process that another program froze or stopped earlier is left to that program, also
// by Resume.
//
// The mechanism stop pauses in a third way, whatever cgroup the process has: see cage.
//
// A pause that another program ends is noticed within a second, and begun again. A process
// that is resumed again and again can no longer be suspended.
//
// The kernel undoes neither when the daemon dies, so each pause is recorded in the
// journal first.
package freezer

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/internal/log"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/proc"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// stopTimeout is how long a process may take to stop. It takes microseconds, unless a
// thread is deep in a system call that no signal interrupts.
const stopTimeout = time.Second

const (
	// checkTime is the time between two looks whether a process that is to be suspended runs.
	checkTime = time.Second
	// maxResumed is how often other programs may resume a process, in one suspension or in
	// several without one between that lasted.
	maxResumed = 3
)

// Config is what a Mechanism needs.
type Config struct {
	// Root is the root directory of the host: "/".
	Root    string
	Journal mechanism.Store
	Log     *zap.Logger
}

// Mechanism freezes cgroups and stops processes. It implements mechanism.Mechanism.
type Mechanism struct {
	cfg Config
	// moves: a process is paused by moving it to a cgroup that is frozen.
	moves  bool
	pauses mechanism.Pauses
	// found is where the cgroup hierarchy is mounted, nil until it was found.
	found     atomic.Pointer[mount]
	checkTime time.Duration
}

var _ mechanism.Mechanism = (*Mechanism)(nil)

// New returns the mechanism.
func New(cfg Config) *Mechanism {
	return &Mechanism{cfg: cfg, checkTime: checkTime, pauses: mechanism.Pauses{Store: cfg.Journal, Mechanism: mechanism.Freezer, Log: cfg.Log}}
}

// NewStop returns the mechanism for processes that resist, which is called stop: it moves a process
// to a frozen cgroup of this program's, from where no tracer and no user can resume it.
func NewStop(cfg Config) *Mechanism {
	m := New(cfg)
	m.moves, m.pauses.Mechanism = true, mechanism.Stop
	return m
}

// Name implements mechanism.Mechanism.
func (m *Mechanism) Name() string { return m.pauses.Mechanism }

// Probe implements mechanism.Mechanism.
func (m *Mechanism) Probe(_ context.Context, target gpreempt.ProcessKey) mechanism.Capability {
	var c mechanism.Capability
	add := func(check, found string, ok bool, remedy string) {
		c.Evidence = append(c.Evidence, mechanism.Evidence{Check: check, Found: found, OK: ok, Remedy: remedy})
	}
	if err := unstoppable(target.PID); err != nil {
		add("process", err.Error(), false, "")
		return c
	}
	p, err := proc.OpenWithPidfd(m.cfg.Root, target)
	switch {
	case errors.Is(err, mechanism.ErrGone):
		add("process", "it has exited", false, "")
		return c
	case err != nil:
		add("process descriptor", err.Error(), false, "run as root on Linux 5.3 or newer")
		return c
	}
	defer p.Close()
	add("process descriptor", "available", true, "")
	if m.moves {
		place, _, err := m.place(p)
		if err != nil {
			add("cgroup", err.Error(), false, "run gpreemptd where the cgroup v2 hierarchy of the host is mounted and can be written")
			return c
		}
		add("cgroup", "it is moved to a frozen one below "+place.path, true, "")
		place.close()
		return c
	}
	g, why, err := m.ownCgroup(p)
	switch {
	case err != nil:
		add("cgroup", err.Error(), false, "")
	case g == nil:
		add("cgroup", "SIGSTOP of the process without its children, because "+why, true,
			"start it in a cgroup of its own, as with systemd-run --scope, to stop its children too")
	default:
		add("cgroup", g.path+" is its own and will be frozen", true, "")
		g.close()
	}
	return c
}

// Attach implements mechanism.Mechanism. The session holds two descriptors.
func (m *Mechanism) Attach(ctx context.Context, target gpreempt.ProcessKey) (mechanism.Session, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if err := unstoppable(target.PID); err != nil {
		return nil, fmt.Errorf("process %v: %w", target, err)
	}
	p, err := proc.OpenWithPidfd(m.cfg.Root, target)
	if err != nil {
		return nil, err
	}
	s := &session{m: m, target: target, process: p, Notifier: mechanism.NewNotifier()}
	s.check = time.AfterFunc(time.Hour, s.Notify)
	s.check.Stop()
	return s, nil
}

// Undo ends the pause of an entry of the journal and removes the entry. It returns nil
// for a pause that was not made or has ended, a process that has exited and a cgroup
// that was removed; an error for a cgroup that this program cannot see. After an error
// the entry remains.
func (m *Mechanism) Undo(_ context.Context, e mechanism.JournalEntry) error {
	return m.pauses.Undo(e, func() error { return m.undo(e) })
}

func (m *Mechanism) undo(e mechanism.JournalEntry) error {
	if e.Cgroup != "" {
		g, err := m.openCgroup(e.Cgroup)
		switch {
		case errors.Is(err, errRemoved):
			return nil
		case errors.Is(err, errUnseen):
			return fmt.Errorf("%w; retry where the cgroup v2 hierarchy is mounted as for the gpreemptd that froze it", err)
		case err != nil:
			return err
		}
		defer g.close()
		if g.id != e.CgroupID {
			return nil // another one with that name
		}
		if m.moves {
			return m.runCaged(g, e.Home)
		}
		return g.thaw()
	}
	p, err := proc.OpenWithPidfd(m.cfg.Root, e.Target)
	if err != nil {
		return err
	}
	defer p.Close()
	if m.moves {
		return m.emptyUnknown(p)
	}
	if e.NameOnly {
		if err := m.thawOwn(p); err != nil {
			return err
		}
	}
	return stop{p}.undo()
}

// errClosed is returned by the methods of a closed session.
var errClosed = errors.New("the session with the process has been closed")

type session struct {
	m      *Mechanism
	target gpreempt.ProcessKey
	mechanism.Notifier
	// check fires when Handle is to look whether the process runs.
	check *time.Timer

	// mu guards what follows. A call holds it until it returns, within stopTimeout, so
	// that Close finds no partial pause.
	mu sync.Mutex
	// closed: no new pause begins.
	closed bool
	// process is nil once nothing is held and closed is set.
	process *proc.Process
	// held is the pause to be undone, nil for none: one that was begun, or that failed
	// to begin and could not be undone.
	held pause
	// suspended: it is to be paused, by this program or by another one.
	suspended bool
	// resumed is how often it ran while it was held, since a suspension that lasted;
	// again: it did in this one.
	resumed int
	again   bool
}

var _ mechanism.Session = (*session)(nil)

// pause is a way to stop a process on the CPU.
type pause interface {
	// begun reports whether it is paused, by another program.
	begun() (bool, error)
	// begin pauses it and returns when nothing of it runs.
	begin(ctx context.Context) error
	// runs reports whether it runs again after begin.
	runs() (bool, error)
	// undo has no effect without begin.
	undo() error
	// entry returns the cgroup for the journal.
	entry() mechanism.JournalEntry
	close()
}

// Suspend implements mechanism.Session.
func (s *session) Suspend(ctx context.Context, done func()) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	err := s.suspend(ctx)
	if s.suspended = err == nil; s.suspended {
		s.check.Reset(s.m.checkTime)
		if done != nil {
			done()
		}
	}
	return err
}

// Handle implements mechanism.Session: it looks whether the process runs.
func (s *session) Handle(context.Context) (r mechanism.Report, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.suspended {
		return r, nil
	}
	s.check.Reset(s.m.checkTime)
	running, err := s.runs()
	if err != nil || !running {
		return r, s.orGone(err)
	}
	if s.held != nil {
		s.resumed++
		s.again = true
		if err := s.unkept(); err != nil {
			return r, err
		}
		s.m.cfg.Log.Warn("another program has resumed a suspended process", log.Target(s.target))
	}
	r.Running = mechanism.ResumedByAnother
	return r, nil
}

// runs reports whether the process runs, which is suspended.
func (s *session) runs() (bool, error) {
	if s.held != nil {
		return s.held.runs()
	}
	if s.m.moves {
		return true, nil
	}
	p, err := s.choose()
	if err != nil {
		return false, err
	}
	defer p.close()
	theirs, err := p.begun()
	return !theirs, err
}

// unkept returns an error, once, when other programs have resumed the process too often.
func (s *session) unkept() error {
	if s.resumed <= maxResumed {
		return nil
	}
	err := fmt.Errorf("process %v cannot be kept suspended: %w %d times, by SIGCONT or by thawing its cgroup: end that program, or start the job in a cgroup of its own that its user cannot thaw", s.target, mechanism.ErrResumed, s.resumed)
	s.resumed = 0
	return err
}

func (s *session) suspend(ctx context.Context) error {
	switch {
	case s.closed:
		return errClosed
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case s.process.Exited():
		return s.takeBack(mechanism.ErrGone)
	}
	if err := s.unkept(); err != nil {
		return s.takeBack(err)
	}
	if s.held != nil { // repair what another program may have resumed
		return s.takeBack(s.orGone(s.held.begin(ctx)))
	}
	p, err := s.choose()
	if err != nil {
		return err
	}
	err = s.pause(ctx, p)
	if s.held == nil {
		p.close()
	}
	return err
}

// orGone returns mechanism.ErrGone in place of an error if the process has exited.
func (s *session) orGone(err error) error {
	if err != nil && s.process.Exited() {
		return mechanism.ErrGone
	}
	return err
}

// takeBack undoes what is held after an error. If that fails too, the error is not
// mechanism.ErrGone: the children of a process that has exited may still be paused.
func (s *session) takeBack(err error) error {
	if err == nil {
		return nil
	}
	undone := s.release()
	switch {
	case undone == nil:
		return err
	case errors.Is(err, mechanism.ErrGone):
		return undone
	}
	return errors.Join(err, undone)
}

// choose returns how to pause the process now.
func (s *session) choose() (pause, error) {
	if s.m.moves {
		c, err := s.m.prepareCage(s.process)
		if err != nil {
			return nil, fmt.Errorf("suspend process %v: %w", s.target, err)
		}
		return c, nil
	}
	g, why, err := s.m.ownCgroup(s.process)
	switch {
	case err != nil:
		return nil, fmt.Errorf("suspend process %v: %w", s.target, err)
	case g != nil:
		return &freeze{cgroup: g, m: s.m, target: s.target}, nil
	}
	s.m.cfg.Log.Debug("stopping the process without its children", log.Target(s.target), log.Why(why))
	return stop{s.process}, nil
}

// pause begins p and holds it, unless another program has paused the process that way.
// After an error nothing is paused, or p is held.
func (s *session) pause(ctx context.Context, p pause) error {
	theirs, err := p.begun()
	if err != nil {
		return s.orGone(err)
	}
	if theirs {
		return nil
	}
	// The members of its cgroup were identified by pid: that was right if the process
	// still has its own.
	if s.process.Exited() {
		return mechanism.ErrGone
	}
	e := p.entry()
	e.Target = s.target
	if err := s.m.pauses.Begin(e); err != nil {
		return err
	}
	s.held = p
	return s.takeBack(s.orGone(p.begin(ctx)))
}

// Resume implements mechanism.Session.
func (s *session) Resume(context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.process == nil {
		return errClosed
	}
	s.lasted()
	if err := s.release(); err != nil {
		return err
	}
	if s.process.Exited() {
		return mechanism.ErrGone
	}
	return nil
}

// lasted looks whether the process was suspended until now. The next Suspend returns the
// error when that was not so too often.
func (s *session) lasted() {
	s.check.Stop()
	if !s.suspended {
		return
	}
	s.suspended = false
	running, err := s.runs()
	switch {
	case err != nil: // it has exited
	case running && s.held != nil && !s.again:
		s.resumed++
	case !running && !s.again:
		s.resumed = 0
	}
	s.again = false
}

// Close implements mechanism.Session. After an error the process may still be paused.
func (s *session) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed, s.suspended = true, false
	s.check.Stop()
	if s.process == nil {
		return nil
	}
	if err := s.release(); err != nil {
		return err
	}
	s.process.Close()
	s.process = nil
	return nil
}

// release undoes what is held. After an error it is still held, and in the journal. The
// caller holds mu.
func (s *session) release() error {
	if s.held == nil {
		return nil
	}
	if err := s.held.undo(); err != nil && !errors.Is(err, mechanism.ErrGone) {
		return fmt.Errorf("resume process %v, which may still be stopped: %w", s.target, err)
	}
	s.held.close()
	s.held = nil
	s.m.pauses.End(s.target)
	return nil
}
