// Package dbgtrap hides how a process is preempted through the driver's debug
// interface, AMDKFD_IOC_DBG_TRAP: the trace it takes, the answers it owes the
// target's ROCm runtime, and who else may get in between.
//
// The kernel undoes everything by itself when this program dies: the queues of a
// target are suspended for as long as its debugger lives. Facts about the driver
// come from kfd_debug.c, kfd_chardev.c and kfd_device_queue_manager.c of Linux
// 6.12.107 and 7.2; nothing here was run on AMD hardware.
package dbgtrap

import (
	"context"
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/internal/logkey"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// Thread is an OS thread that traces a process: what tracer.Thread is. Its errors
// match tracer.ErrGone and tracer.ErrDetached.
type Thread interface {
	Do(ctx context.Context, f func() error) error
	Detach(ctx context.Context) error
	Done() <-chan struct{}
	Gone() bool
}

// Tracer attaches to a process by pid and start time: what tracer.Attach does.
type Tracer func(ctx context.Context, pid int32, start uint64) (Thread, error)

// Config is what a Mechanism needs. Its functions may be called by several
// goroutines at once.
type Config struct {
	Device *kfd.Device
	Attach Tracer
	// Root is the directory that has proc and sys in it; "" is "/".
	Root string
	// Births hears that a queue was born in a target, that its runtime came or
	// went, or that it left: look at it again. It must not block. May be nil.
	Births func(gpreempt.ProcessKey)
	// Lost hears that a session has ended by itself, and why: another debugger took
	// the target, its runtime or a GPU failed, it replaced its program. The target
	// runs. It is called at most once for a session, on a goroutine of its own, and
	// not when the caller of Suspend was told, or when the target left. May be nil.
	Lost func(gpreempt.ProcessKey, error)
	// GPUs returns the GPUs a target's queues are on. It must not block. May be nil.
	GPUs func(gpreempt.ProcessKey) []gpreempt.GPU
	// Log may be nil.
	Log *zap.Logger
}

// Mechanism is the debug interface as a mechanism.Mechanism. It has at most one
// session for each process.
type Mechanism struct {
	cfg Config
	// retry is how long to wait before letting a target run is tried again, and for the
	// end of one that has shut its runtime down.
	retry time.Duration

	mu sync.Mutex // guards what follows; not held across a call of anything
	// rule is the kernel's; PermissionUnknown until the first target has told.
	rule     kfd.PermissionRule
	sessions map[gpreempt.ProcessKey]*session
}

var _ mechanism.Mechanism = (*Mechanism)(nil)

// New returns the mechanism. It has no effect before Attach.
func New(cfg Config) *Mechanism {
	if cfg.Root == "" {
		cfg.Root = "/"
	}
	if cfg.Births == nil {
		cfg.Births = func(gpreempt.ProcessKey) {}
	}
	if cfg.Lost == nil {
		cfg.Lost = func(gpreempt.ProcessKey, error) {}
	}
	if cfg.GPUs == nil {
		cfg.GPUs = func(gpreempt.ProcessKey) []gpreempt.GPU { return nil }
	}
	if cfg.Log == nil {
		cfg.Log = zap.NewNop()
	}
	return &Mechanism{cfg: cfg, retry: time.Second, sessions: map[gpreempt.ProcessKey]*session{}}
}

// Name implements mechanism.Mechanism.
func (*Mechanism) Name() string { return "dbgtrap" }

// Attach implements mechanism.Mechanism. It interrupts every process on every GPU
// the target can see, for a moment, and may take seconds for each of them. Errors
// beyond mechanism.ErrGone: *RuntimeError, mechanism.ErrDebugged, what the tracer says, a
// *kfd.Error, or the cause of ctx; the target is let go then.
func (m *Mechanism) Attach(ctx context.Context, target gpreempt.ProcessKey) (mechanism.Session, error) {
	s, err := m.reserve(ctx, target)
	if err != nil {
		return nil, err
	}
	up := make(chan error)
	go s.run(ctx, up)
	select {
	case err := <-up:
		if err != nil {
			return nil, err
		}
		return s, nil
	case <-ctx.Done(): // the session goes on until it has let go
		s.close()
		return nil, context.Cause(ctx)
	}
}

// reserve makes the one session of a target, after the one before it has let go.
func (m *Mechanism) reserve(ctx context.Context, target gpreempt.ProcessKey) (*session, error) {
	for {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		m.mu.Lock()
		before := m.sessions[target]
		if before == nil {
			s := newSession(m, target)
			m.sessions[target] = s
			m.mu.Unlock()
			return s, nil
		}
		m.mu.Unlock()
		if !before.isClosing() {
			return nil, fmt.Errorf("process %d is held already", target.PID)
		}
		select {
		case <-before.settled:
			if err := before.awaitSettled(); err != nil {
				return nil, fmt.Errorf("process %d has not been let go yet: %w", target.PID, err)
			}
		case <-ctx.Done():
		}
	}
}

func (m *Mechanism) forget(s *session) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.sessions, s.target)
}

// Queues returns the queues of a target as the driver last told them: new since its
// last event at the latest, while those that left since may still be among them.
// False when the target is not held. It makes no call to the driver, and what it
// gives is shared and must not be changed.
func (m *Mechanism) Queues(target gpreempt.ProcessKey) ([]kfd.QueueSnapshotEntry, bool) {
	m.mu.Lock()
	s := m.sessions[target]
	m.mu.Unlock()
	if s == nil {
		return nil, false
	}
	snapshot := s.hold.seen.Load()
	if snapshot == nil {
		return nil, false
	}
	return *snapshot, true
}

// PermissionRule returns the driver's permission rule, kfd.PermissionUnknown until the
// first target has told.
func (m *Mechanism) PermissionRule() kfd.PermissionRule {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.rule
}

// permission returns the kernel's rule, asking for it once. The calling thread must
// not trace the target, while another thread of this program does: then nobody else
// can enable debugging, and the right to it is where this program's ENABLE put it.
func (m *Mechanism) permission(pid int32) kfd.PermissionRule {
	if rule := m.PermissionRule(); rule != kfd.PermissionUnknown {
		return rule
	}
	rule, err := m.cfg.Device.ProbePermissionRule(pid)
	if err != nil {
		m.cfg.Log.Debug("the driver's permission rule could not be told", logkey.PID(pid), logkey.Err(err))
		return rule
	}
	m.cfg.Log.Info("the driver's permission rule is known", logkey.Permission(rule),
		logkey.Profile(m.cfg.Device.Profile().WithPermission(rule).Name))
	m.mu.Lock()
	defer m.mu.Unlock()
	m.rule = rule
	return rule
}
