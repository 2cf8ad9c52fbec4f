// Package criu hides how a process is taken off its GPUs with the driver's support
// for checkpoints (CRIU_OP), which needs no debugging of the GPU.
//
// PROCESS_INFO evicts every queue of a process, in the middle of its kernels, and
// UNPAUSE restores them; queues born in between are born evicted. Unlike debugging
// it works whatever the firmware, from Linux 5.18 on, and beside a GPU debugger.
// But the kernel never undoes it: not when the daemon dies. And on most kernels a
// second PROCESS_INFO evicts a second time, which one UNPAUSE does not make up for,
// the next finds nothing to do, and no call tells: that process never runs again.
//
// So every pause is journalled first, and each context is unpaused, which is
// harmless when it is not paused, right before it is paused. What is paused is then
// paused once, whoever paused it before and whatever became of them.
//
// The calls are made on the process's own descriptors, which are taken for the
// moment, by a thread that traces the process for the moment. Held any longer, the
// descriptors would keep the memory of a dead process, and the trace would keep
// debuggers away.
//
// Not covered: a process that closes /dev/kfd while it is paused stays paused, for
// what it does should it open it again, until it has a descriptor to unpause it by.
// In 6.12.117 a PROCESS_INFO that fails because a GPU hangs leaves the process evicted,
// and UNPAUSE does not find it paused: the GPU is about to be reset then.
// With several contexts (7.2), one made while the process is paused runs until the
// next Suspend, or until the next Resume if its descriptor has a number that another
// one had.
package criu

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/journal"
	"github.com/gpreempt/gpreempt/internal/logkey"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

const name = "criu"

// Tracer starts a thread that traces a process; see package tracer.
type Tracer func(ctx context.Context, pid int32, start uint64) (Thread, error)

// Thread is the part of tracer.Thread used here.
type Thread interface {
	Do(ctx context.Context, f func() error) error
	Detach(ctx context.Context) error
}

// Journal is the part of journal.Journal used here.
type Journal interface {
	Begin(journal.Entry) error
	End(target gpreempt.ProcessKey, mechanism string) error
}

// Config is what a Mechanism needs.
type Config struct {
	// Sys makes the calls of the driver, on the threads Attach starts.
	Sys    kfd.Sys
	Attach Tracer
	// Host is the rest of the operating system; nil is this one.
	Host    Host
	Journal Journal
	Log     *zap.Logger
}

// Mechanism pauses processes as a checkpoint does. It implements mechanism.Mechanism.
type Mechanism struct {
	cfg Config

	mu      sync.Mutex // guards version
	version *kfd.Version
}

var _ mechanism.Mechanism = (*Mechanism)(nil)

// New returns the mechanism.
func New(cfg Config) *Mechanism {
	if cfg.Host == nil {
		cfg.Host = machine{kfd.DevicePath}
	}
	return &Mechanism{cfg: cfg}
}

// Name implements mechanism.Mechanism.
func (*Mechanism) Name() string { return name }

// Attach implements mechanism.Mechanism. It unpauses the process, which shows whether
// all that is needed can be had and ends a pause that was left behind.
func (m *Mechanism) Attach(ctx context.Context, target gpreempt.ProcessKey) (mechanism.Session, error) {
	if err := m.unpause(ctx, target); err != nil {
		return nil, err
	}
	m.end(target)
	return &session{m: m, target: target}, nil
}

// Undo ends the pause an entry of the journal names and removes the entry. A pause
// that was not made, is over or whose process has exited is no error. After an
// error the entry is still there.
func (m *Mechanism) Undo(ctx context.Context, e journal.Entry) error {
	if e.Mechanism != name {
		return fmt.Errorf("process %v was paused by %s, not by %s", e.Target, e.Mechanism, name)
	}
	if err := m.unpause(ctx, e.Target); err != nil && !errors.Is(err, mechanism.ErrGone) {
		return fmt.Errorf("let process %v run again: %w", e.Target, err)
	}
	return m.cfg.Journal.End(e.Target, name)
}

// unpause unpauses every context of the process.
func (m *Mechanism) unpause(ctx context.Context, target gpreempt.ProcessKey) error {
	return m.visit(ctx, target, func(v *visit) error { return v.unpause(ctx) })
}

// end crosses out a pause that is over. That this fails changes nothing for the
// process: the next Undo unpauses what is not paused.
func (m *Mechanism) end(target gpreempt.ProcessKey) {
	if err := m.cfg.Journal.End(target, name); err != nil {
		m.cfg.Log.Warn("a pause that is over is still in the journal", logkey.Target(target), logkey.Err(err))
	}
}

// errClosed is what a session gives once it has been closed.
var errClosed = errors.New("the session with the process has been closed")

type session struct {
	m      *Mechanism
	target gpreempt.ProcessKey

	// mu guards what follows. A call holds it to its end, so that Close finds no pause
	// half made; the driver takes up to 9 seconds a GPU.
	mu sync.Mutex
	// closed: there is no new pause any more.
	closed bool
	// held: the process may be paused, and the journal says so.
	held bool
	// seen are the descriptors whose contexts are paused, or that are not its own;
	// none when it is in doubt what is paused.
	seen []int
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
	}
	if s.held {
		if fresh, err := s.fresh(); err != nil || !fresh {
			return s.settle(err)
		}
	}
	return s.settle(s.m.visit(ctx, s.target, func(v *visit) error { return s.pause(ctx, v) }))
}

// fresh reports whether there may be a context that is not paused.
func (s *session) fresh() (bool, error) {
	p, err := s.m.cfg.Host.Open(s.target)
	if err != nil {
		return false, err
	}
	defer s.m.close(p, s.target)
	numbers, err := p.Descriptors()
	return len(s.seen) == 0 || slices.ContainsFunc(numbers, func(n int) bool { return !slices.Contains(s.seen, n) }), err
}

// settle crosses out the pause of a process that has exited.
func (s *session) settle(err error) error {
	if errors.Is(err, mechanism.ErrGone) && s.held {
		s.released()
	}
	return err
}

func (s *session) released() {
	s.held, s.seen = false, nil
	s.m.end(s.target)
}

// pause pauses the contexts that are not yet. On an error all have been unpaused, or
// held is still set.
func (s *session) pause(ctx context.Context, v *visit) error {
	numbers, err := v.process.Descriptors()
	if err != nil {
		return err
	}
	doubtful := s.held
	if !s.held {
		if err := s.m.cfg.Journal.Begin(journal.Entry{Mechanism: name, Target: s.target, At: time.Now()}); err != nil {
			return err
		}
		s.held = true
	}
	fresh := slices.DeleteFunc(slices.Clone(numbers), func(n int) bool { return slices.Contains(s.seen, n) })
	own := 0
	err = v.call(ctx, fresh, func(files []file) error {
		for _, f := range files {
			ours, err := v.m.pauseOnce(f.fd, s.target.PID)
			if ours {
				own++
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
	if err == nil && own == 0 && len(s.seen) == 0 {
		err = errNoContext
	}
	if err == nil {
		s.seen = numbers
		return nil
	}
	s.seen = nil
	if doubtful || own > 0 {
		if undone := v.unpause(context.WithoutCancel(ctx)); undone != nil {
			// The entry stays, for the next Resume or Undo.
			return errors.Join(err, fmt.Errorf("process %v may still be paused: %w", s.target, undone))
		}
	}
	s.released()
	return err
}

// pauseOnce pauses the context of a descriptor, which is then paused exactly once. It
// reports whether the context is the process's own: another is left alone. Several
// descriptors may be of one context.
func (m *Mechanism) pauseOnce(fd int, pid int32) (own bool, err error) {
	err = kfd.CRIUUnpause(m.cfg.Sys, fd, pid)
	switch {
	case errors.Is(err, unix.EBADF):
		return false, nil
	case err != nil && !errors.Is(err, unix.EINVAL):
		return true, hardware(err)
	}
	_, err = kfd.CRIUPause(m.cfg.Sys, fd, pid)
	return true, hardware(err)
}

// Resume implements mechanism.Session.
func (s *session) Resume(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed && !s.held {
		return errClosed
	}
	return s.release(ctx)
}

// Close implements mechanism.Session. Its errors say that the pause is still held.
func (s *session) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	err := s.release(context.Background()) //nolint:forbidigo // no caller's end may leave the process paused
	if errors.Is(err, mechanism.ErrGone) {
		return nil
	}
	return err
}

// release unpauses what is held. It needs mu.
func (s *session) release(ctx context.Context) error {
	if !s.held {
		return nil
	}
	s.seen = nil
	err := s.m.unpause(ctx, s.target)
	if err == nil || errors.Is(err, mechanism.ErrGone) {
		s.released()
	}
	return err
}

// hardware marks errors that tell of a GPU that fails: execute_queues_cpsch gives EIO
// for one that hangs or is being reset, and ETIME when queues did not leave it. The
// driver does not say which GPU.
func hardware(err error) error {
	if errors.Is(err, unix.EIO) || errors.Is(err, unix.ETIME) {
		return &mechanism.HardwareError{Err: err}
	}
	return err
}
