// Package criu implements a mechanism that takes a process off its GPUs with the
// driver's support for checkpoints (CRIU_OP), without debugging the GPU.
//
// PROCESS_INFO evicts every queue of a process, in the middle of its kernels, and
// UNPAUSE restores them; queues that the process creates in between start evicted.
// Unlike debugging it works with any firmware, from Linux 5.18 on, and beside a GPU
// debugger. But the kernel never undoes it, not even when the daemon dies. And on most
// kernels a second PROCESS_INFO evicts a second time. One UNPAUSE does not undo both,
// the next finds nothing to do, and no call reports this: the process never runs again.
//
// So every pause is recorded in the journal first, and each context is unpaused right
// before it is paused. Unpausing a context that is not paused has no effect. Each
// context is then paused exactly once, whatever happened to it before.
//
// The calls are made on the process's own descriptors, which are copied for the time of
// the call, by a thread that traces the process for that time. If the mechanism kept
// them, the copies would keep the memory of a dead process, and the trace would keep
// debuggers away. They wait for the lock of the process (kfd_process.mutex), which it can
// hold for as long as it likes, so that the daemon has helper processes make them
// (Config.Calls).
//
// Limits: a process that closes /dev/kfd while it is paused stays paused until it opens
// /dev/kfd again and is then unpaused. In 6.12.117 a PROCESS_INFO that fails because a
// GPU hangs leaves the process evicted, and UNPAUSE does not find it paused; the driver
// then resets the GPU. With several contexts (7.2), one that is created while the
// process is paused runs until the next Suspend, or until the next Resume if its
// descriptor has the number of an earlier one.
package criu

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// Tracer starts a thread that traces a process; see proc.Trace.
type Tracer func(ctx context.Context, pid int32, start uint64) (Thread, error)

// Thread is the part of *proc.Tracer that is used here.
type Thread interface {
	Do(ctx context.Context, f func() error) error
	Detach(ctx context.Context) error
}

// Config is what a Mechanism needs.
type Config struct {
	// Sys makes the calls of the driver, on the threads that Attach starts.
	Sys    kfd.Sys
	Attach Tracer
	// Host is the rest of the operating system; nil is this one.
	Host    Host
	Journal mechanism.Store
	Log     *zap.Logger
	// Calls makes the calls about processes in place of Sys and Attach; nil is the
	// mechanism itself, in this process.
	Calls Calls
}

// Calls makes the calls of the driver about a process. Its methods may be called by several
// goroutines at once. Errors are mechanism.ErrGone when the process has exited.
type Calls interface {
	// Pause pauses the contexts of a process except those of the descriptors in seen, each
	// exactly once, and returns the descriptors that it has. doubtful: some may be paused
	// already. After an error, paused reports whether some may be paused.
	Pause(ctx context.Context, target gpreempt.ProcessKey, seen []int, doubtful bool) (numbers []int, paused bool, err error)
	// Unpause unpauses every context of a process.
	Unpause(ctx context.Context, target gpreempt.ProcessKey) error
	// WaitsForTarget is that of mechanism.Inspector.
	WaitsForTarget(target gpreempt.ProcessKey) bool
}

// TargetLocks are the functions in which CRIU_OP takes the lock of the process
// (kfd_process.mutex), and waits for nothing else: what waits for a GPU does so in
// functions that these call. The last one is for a compiler that inlines the others.
var TargetLocks = []string{"criu_process_info", "criu_unpause", "kfd_ioctl_criu"}

// Mechanism pauses processes as a checkpoint does. It implements mechanism.Mechanism.
type Mechanism struct {
	cfg    Config
	calls  Calls
	pauses mechanism.Pauses

	mu      sync.Mutex // guards version
	version *kfd.Version
}

var (
	_ mechanism.Inspector = (*Mechanism)(nil)
	_ Calls               = (*Mechanism)(nil)
)

// New returns the mechanism.
func New(cfg Config) *Mechanism {
	if cfg.Host == nil {
		cfg.Host = machine{kfd.DevicePath}
	}
	m := &Mechanism{cfg: cfg, calls: cfg.Calls, pauses: mechanism.Pauses{Store: cfg.Journal, Mechanism: mechanism.CRIU, Log: cfg.Log}}
	if m.calls == nil {
		m.calls = m
	}
	return m
}

// Name implements mechanism.Mechanism.
func (*Mechanism) Name() string { return mechanism.CRIU }

// Attach implements mechanism.Mechanism. It unpauses the process. That shows whether
// the mechanism works for it, and ends a pause that an earlier daemon did not end.
func (m *Mechanism) Attach(ctx context.Context, target gpreempt.ProcessKey) (mechanism.Session, error) {
	if err := m.calls.Unpause(ctx, target); err != nil {
		return nil, err
	}
	m.pauses.End(target)
	return &session{m: m, target: target}, nil
}

// Undo ends the pause of an entry of the journal and removes the entry. It returns nil
// for a pause that was not made or has ended, and for a process that has exited. After
// an error the entry remains.
func (m *Mechanism) Undo(ctx context.Context, e mechanism.JournalEntry) error {
	return m.pauses.Undo(e, func() error { return m.calls.Unpause(ctx, e.Target) })
}

// WaitsForTarget implements mechanism.Inspector. Nothing is known of calls in this process.
func (m *Mechanism) WaitsForTarget(target gpreempt.ProcessKey) bool {
	return m.cfg.Calls != nil && m.cfg.Calls.WaitsForTarget(target)
}

// Unpause implements Calls, in this process.
func (m *Mechanism) Unpause(ctx context.Context, target gpreempt.ProcessKey) error {
	return m.visit(ctx, target, func(v *visit) error { return v.unpause(ctx) })
}

// errClosed is returned by the methods of a closed session.
var errClosed = errors.New("the session with the process has been closed")

type session struct {
	m      *Mechanism
	target gpreempt.ProcessKey

	// mu guards what follows. A call holds it until it returns, so that Close finds no
	// partial pause; the driver takes up to 9 seconds a GPU.
	mu sync.Mutex
	// closed: no new pause begins.
	closed bool
	// held: the process may be paused, and the journal has the entry.
	held bool
	// seen are the descriptors whose contexts are paused or belong to another process;
	// none when it is unknown what is paused.
	seen []int
}

// Suspend implements mechanism.Session.
func (s *session) Suspend(ctx context.Context, done func()) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closed:
		return errClosed
	case ctx.Err() != nil:
		return context.Cause(ctx)
	}
	fresh, err := true, error(nil)
	if s.held {
		fresh, err = s.fresh()
	}
	if err == nil && fresh {
		err = s.pause(ctx)
	}
	if errors.Is(err, mechanism.ErrGone) && s.held { // which ends the pause
		s.released()
	}
	if err == nil && done != nil {
		done()
	}
	return err
}

// Events implements mechanism.Session: the driver reports nothing.
func (*session) Events() <-chan struct{} { return nil }

// Handle implements mechanism.Session.
func (*session) Handle(context.Context) (r mechanism.Report, err error) { return r, nil }

// fresh reports whether there may be a context that is not paused.
func (s *session) fresh() (bool, error) {
	p, err := s.m.cfg.Host.Open(s.target)
	if err != nil {
		return false, err
	}
	defer p.Close()
	numbers, err := p.Descriptors()
	return len(s.seen) == 0 || slices.ContainsFunc(numbers, func(n int) bool { return !slices.Contains(s.seen, n) }), err
}

func (s *session) released() {
	s.held, s.seen = false, nil
	s.m.pauses.End(s.target)
}

// pause pauses the contexts that are not paused yet. After an error all are unpaused,
// or held is still set.
func (s *session) pause(ctx context.Context) error {
	doubtful := s.held
	if !s.held {
		if err := s.m.pauses.Begin(mechanism.JournalEntry{Target: s.target}); err != nil {
			return err
		}
		s.held = true
	}
	numbers, paused, err := s.m.calls.Pause(ctx, s.target, s.seen, doubtful)
	switch {
	case err == nil:
		s.seen = numbers
	case paused:
		s.seen = nil // the entry stays, for the next Resume or Undo
	default:
		s.released()
	}
	return err
}

// Pause implements Calls, in this process.
func (m *Mechanism) Pause(ctx context.Context, target gpreempt.ProcessKey, seen []int, doubtful bool) (numbers []int, paused bool, err error) {
	paused = doubtful
	err = m.visit(ctx, target, func(v *visit) error {
		numbers, paused, err = v.pause(ctx, seen, doubtful)
		return err
	})
	return numbers, paused, err
}

// pause is Calls.Pause.
func (v *visit) pause(ctx context.Context, seen []int, doubtful bool) (numbers []int, paused bool, err error) {
	numbers, err = v.process.Descriptors()
	if err != nil {
		return nil, doubtful, err
	}
	fresh := slices.DeleteFunc(slices.Clone(numbers), func(n int) bool { return slices.Contains(seen, n) })
	own := 0
	err = v.call(ctx, fresh, func(fds []int) error {
		for _, fd := range fds {
			ours, err := v.m.pauseOnce(fd, v.target.PID)
			if ours {
				own++
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
	if err == nil && own == 0 && len(seen) == 0 {
		err = errNoContext
	}
	if err != nil && (doubtful || own > 0) {
		if undone := v.unpause(context.WithoutCancel(ctx)); undone != nil {
			return nil, true, errors.Join(err, fmt.Errorf("process %v may still be paused: %w", v.target, undone))
		}
	}
	return numbers, err == nil, err
}

// pauseOnce pauses the context of a descriptor, which is then paused exactly once:
// several descriptors may have one context. It reports whether the context is the
// process's own; it does not pause others.
func (m *Mechanism) pauseOnce(fd int, pid int32) (own bool, err error) {
	err = kfd.CRIUUnpause(m.cfg.Sys, fd, pid)
	switch {
	case errors.Is(err, unix.EBADF):
		return false, nil
	case err != nil && !errors.Is(err, unix.EINVAL):
		return true, hardware(err)
	}
	err = kfd.CRIUPause(m.cfg.Sys, fd, pid)
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

// Close implements mechanism.Session. After an error the process may still be paused.
func (s *session) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	err := s.release(context.Background()) //nolint:forbidigo // no context of a caller may leave the process paused
	if errors.Is(err, mechanism.ErrGone) {
		return nil
	}
	return err
}

// release unpauses what is held. The caller holds mu.
func (s *session) release(ctx context.Context) error {
	if !s.held {
		return nil
	}
	s.seen = nil
	err := s.m.calls.Unpause(ctx, s.target)
	if err == nil || errors.Is(err, mechanism.ErrGone) {
		s.released()
	}
	return err
}

// hardware marks errors of a GPU that fails: execute_queues_cpsch returns EIO for one
// that hangs or is being reset, and ETIME when queues did not leave it. The driver does
// not report which GPU it is.
func hardware(err error) error {
	if errors.Is(err, unix.EIO) || errors.Is(err, unix.ETIME) {
		return &mechanism.HardwareError{Err: err}
	}
	return err
}
