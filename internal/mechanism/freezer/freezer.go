// Package freezer hides how a process is kept from submitting work to its GPUs by
// stopping it on the CPU.
//
// It works on every Linux machine and on every GPU, and it drains instead of
// preempting: what is in the queues already runs to its end, and a kernel that
// never ends is not touched. Neither is memory.
//
// A process with a cgroup of its own (see unfit for which are not) is frozen with
// it: its children are too, those born later included, and nobody sees it. Any
// other process gets a SIGSTOP. That reaches no other process: children that submit
// work of their own go on doing so. And it is visible: the parent is told, a shell
// takes its job for suspended, and a SIGCONT from anyone ends the pause.
//
// What somebody else has frozen or stopped before is left to them, at Resume too;
// if they let it go while it is meant to be suspended, it runs.
//
// The kernel undoes neither when the daemon dies, so each is journalled first.
package freezer

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/internal/journal"
	"github.com/gpreempt/gpreempt/internal/logkey"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

const name = "freezer"

// patience is how long a process may take to stop. It takes microseconds, unless a
// thread is deep in a system call that no signal interrupts.
const patience = time.Second

// Config is what a Mechanism needs.
type Config struct {
	// Root is where the filesystem begins: "/".
	Root    string
	Journal Journal
	Log     *zap.Logger
}

// Journal is the part of journal.Journal used here.
type Journal interface {
	Begin(journal.Entry) error
	End(target gpreempt.ProcessKey, mechanism string) error
}

// Mechanism freezes cgroups and stops processes. It implements mechanism.Mechanism.
type Mechanism struct {
	cfg Config
	// found is where the cgroup hierarchy is, nil until it was found.
	found atomic.Pointer[mount]
}

var _ mechanism.Mechanism = (*Mechanism)(nil)

// New returns the mechanism.
func New(cfg Config) *Mechanism { return &Mechanism{cfg: cfg} }

// Name implements mechanism.Mechanism.
func (*Mechanism) Name() string { return name }

// Probe implements mechanism.Mechanism.
func (m *Mechanism) Probe(_ context.Context, target gpreempt.ProcessKey) mechanism.Capability {
	var c mechanism.Capability
	say := func(check, found string, ok bool, remedy string) {
		c.Evidence = append(c.Evidence, mechanism.Evidence{Check: check, Found: found, OK: ok, Remedy: remedy})
	}
	if err := unstoppable(target.PID); err != nil {
		say("process", err.Error(), false, "")
		return c
	}
	p, err := openProcess(m.cfg.Root, target)
	switch {
	case errors.Is(err, mechanism.ErrGone):
		say("process", "it has exited", false, "")
		return c
	case err != nil:
		say("process descriptor", err.Error(), false, "run as root on Linux 5.3 or newer")
		return c
	}
	defer m.close(p)
	say("process descriptor", "it can be had", true, "")
	g, why, err := m.ownCgroup(target)
	switch {
	case err != nil:
		say("cgroup", err.Error(), false, "")
	case g == nil:
		say("cgroup", "SIGSTOP of the process without its children, because "+why, true,
			"start it in a cgroup of its own, as with systemd-run --scope, and its children are stopped too")
	default:
		say("cgroup", g.path+" is its own and is frozen as a whole", true, "")
		m.closeCgroup(g)
	}
	return c
}

// Attach implements mechanism.Mechanism. The session holds a process descriptor.
func (m *Mechanism) Attach(ctx context.Context, target gpreempt.ProcessKey) (mechanism.Session, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if err := unstoppable(target.PID); err != nil {
		return nil, fmt.Errorf("process %v: %w", target, err)
	}
	p, err := openProcess(m.cfg.Root, target)
	if err != nil {
		return nil, err
	}
	return &session{m: m, target: target, process: p}, nil
}

// Undo ends the pause an entry of the journal names and removes the entry. A pause
// that was not made, is over or whose process has exited is no error, nor is a cgroup
// that was removed; one that cannot be seen from here is. After an error the entry is
// still there.
func (m *Mechanism) Undo(_ context.Context, e journal.Entry) error {
	if e.Mechanism != name {
		return fmt.Errorf("process %v was paused by %s, not by %s", e.Target, e.Mechanism, name)
	}
	if err := m.undo(e); err != nil && !errors.Is(err, mechanism.ErrGone) {
		return fmt.Errorf("let process %v run again: %w", e.Target, err)
	}
	return m.cfg.Journal.End(e.Target, name)
}

func (m *Mechanism) undo(e journal.Entry) error {
	if e.Cgroup != "" {
		g, err := m.openCgroup(e.Cgroup)
		switch {
		case errors.Is(err, errRemoved):
			return nil
		case errors.Is(err, errUnseen):
			return fmt.Errorf("%w; try again where the hierarchy of cgroups v2 is mounted as for the gpreemptd that froze it", err)
		case err != nil:
			return err
		}
		defer m.closeCgroup(g)
		if g.id != e.CgroupID {
			return nil // another one by that name
		}
		return g.thaw()
	}
	p, err := openProcess(m.cfg.Root, e.Target)
	if err != nil {
		return err
	}
	defer m.close(p)
	if e.NameOnly {
		if err := m.thawOwn(e.Target); err != nil {
			return err
		}
	}
	return p.cont()
}

// thawOwn ends the freeze of the cgroup that choose would freeze now: which one was
// frozen is not known, and perhaps somebody else's freeze is ended.
func (m *Mechanism) thawOwn(target gpreempt.ProcessKey) error {
	g, _, err := m.ownCgroup(target)
	if err != nil || g == nil {
		return err
	}
	defer m.closeCgroup(g)
	return g.thaw()
}

// unstoppable reports why a process must not be stopped whatever it does.
func unstoppable(pid int32) error {
	switch pid {
	case int32(os.Getpid()):
		return errors.New("it is this program itself")
	case 1:
		return errors.New("it is the init process")
	}
	return nil
}

// errClosed is what a session gives once it has been closed.
var errClosed = errors.New("the session with the process has been closed")

type session struct {
	m      *Mechanism
	target gpreempt.ProcessKey

	// mu guards what follows. A call holds it to its end, which comes within patience,
	// so that Close finds no pause half made.
	mu sync.Mutex
	// closed: there is no new pause any more.
	closed bool
	// process is nil once nothing is held and closed is set.
	process *process
	// held is the pause to be undone, nil when there is none: one that was begun, or
	// whose beginning failed and could not be taken back.
	held pause
}

// pause is a way to keep a process off the CPU.
type pause interface {
	// begun reports whether somebody else has paused it.
	begun() (bool, error)
	// begin pauses and returns when nothing runs any more.
	begin(ctx context.Context) error
	// undo may be called whether begin was or not.
	undo() error
	// entry says what to journal.
	entry() journal.Entry
	close() error
}

// Suspend implements mechanism.Session.
func (s *session) Suspend(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closed:
		return errClosed
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case s.process.exited():
		return s.takeBack(mechanism.ErrGone)
	case s.held != nil:
		return s.again(ctx)
	}
	p, err := s.choose()
	if err != nil {
		return err
	}
	err = s.pause(ctx, p)
	if s.held == nil {
		s.m.discard(p, s.target)
	}
	return err
}

// again sees to it that what is paused is, whatever others did meanwhile.
func (s *session) again(ctx context.Context) error {
	return s.takeBack(s.orGone(s.held.begin(ctx)))
}

// orGone returns mechanism.ErrGone in place of whatever came of a process that has
// exited.
func (s *session) orGone(err error) error {
	if s.process.exited() {
		return mechanism.ErrGone
	}
	return err
}

// takeBack undoes what is held after an error. If that fails too, it is not for the
// caller that the process has exited: what it has started may still be paused.
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

// choose decides how to pause the process as it stands now.
func (s *session) choose() (pause, error) {
	g, why, err := s.m.ownCgroup(s.target)
	switch {
	case err != nil:
		return nil, fmt.Errorf("suspend process %v: %w", s.target, err)
	case g != nil:
		return &freeze{cgroup: g, m: s.m, session: s}, nil
	}
	s.m.cfg.Log.Debug("stopping the process alone", logkey.Target(s.target), logkey.Why(why))
	return &stop{session: s}, nil
}

// pause pauses by p and makes it what is held, unless somebody else has paused by p
// before. On an error nothing is paused, or p is held.
func (s *session) pause(ctx context.Context, p pause) error {
	theirs, err := p.begun()
	if err != nil {
		return s.orGone(err)
	}
	if theirs {
		return nil
	}
	// What was read of the process by its pid was read of this process, if it still
	// has the pid.
	if s.process.exited() {
		return mechanism.ErrGone
	}
	e := p.entry()
	e.Mechanism, e.Target, e.At = name, s.target, time.Now()
	if err := s.m.cfg.Journal.Begin(e); err != nil {
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
	if err := s.release(); err != nil {
		return err
	}
	if s.process.exited() {
		return mechanism.ErrGone
	}
	return nil
}

// Close implements mechanism.Session. Its errors say that the pause is still held.
func (s *session) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	if s.process == nil {
		return nil
	}
	if err := s.release(); err != nil {
		return err
	}
	s.m.close(s.process)
	s.process = nil
	return nil
}

// release undoes what is held. After an error it is still held, and in the journal.
// It needs mu.
func (s *session) release() error {
	if s.held == nil {
		return nil
	}
	if err := s.held.undo(); err != nil && !errors.Is(err, mechanism.ErrGone) {
		return fmt.Errorf("resume process %v, which may still be stopped: %w", s.target, err)
	}
	s.m.discard(s.held, s.target)
	s.held = nil
	s.m.end(s.target)
	return nil
}

// end crosses out a pause that is over. That this fails changes nothing for the
// process: the next Undo lets run what runs.
func (m *Mechanism) end(target gpreempt.ProcessKey) {
	if err := m.cfg.Journal.End(target, name); err != nil {
		m.cfg.Log.Warn("a pause that is over is still in the journal", logkey.Target(target), logkey.Err(err))
	}
}

func (m *Mechanism) discard(p pause, target gpreempt.ProcessKey) {
	if err := p.close(); err != nil {
		m.cfg.Log.Warn("a descriptor could not be closed", logkey.Target(target), logkey.Err(err))
	}
}

func (m *Mechanism) close(p *process) {
	if err := p.close(); err != nil {
		m.cfg.Log.Warn("a process descriptor could not be closed", logkey.Target(p.key), logkey.Err(err))
	}
}

func (m *Mechanism) closeCgroup(g *cgroup) {
	if err := g.close(); err != nil {
		m.cfg.Log.Warn("the directory of a cgroup could not be closed", logkey.Cgroup(g.path), logkey.Err(err))
	}
}
