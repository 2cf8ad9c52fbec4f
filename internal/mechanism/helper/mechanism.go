package helper

import (
	"context"
	"errors"
	"maps"
	"sync"
	"time"

	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/mechanism/dbgtrap"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// Config is what a Mechanism needs.
type Config struct {
	Pool *Pool
	// Local is dbgtrap in this process. It probes, and attaches to nothing.
	Local *dbgtrap.Mechanism
	// Safe returns the GPUs on which SUSPEND_QUEUES does not crash the kernel for a process
	// without a VM there.
	Safe func() []gpreempt.GPUID
}

// Mechanism is dbgtrap with helpers. Its methods may be called by several goroutines at once.
type Mechanism struct {
	*Pool
	cfg      Config
	sessions mechanism.Sessions[*session]

	noting sync.Mutex // guards what follows
	// calls and took are those of the helpers that have ended, or been used again.
	calls int64
	took  time.Duration
	// debugged are the targets that somebody else debugs, with the time when that was found.
	debugged map[gpreempt.ProcessKey]time.Time
}

// foreignTime is after how long the queues of a target that somebody else debugs are resumed.
const foreignTime = 2 * time.Minute

// debuggedFor returns for how long somebody else is known to debug a target.
func (m *Mechanism) debuggedFor(target gpreempt.ProcessKey) time.Duration {
	m.noting.Lock()
	defer m.noting.Unlock()
	if since, ok := m.debugged[target]; ok {
		return time.Since(since)
	}
	return 0
}

// noteDebugged notes whether somebody else debugs a target. What was noted an hour ago may be about a
// process that has ended.
func (m *Mechanism) noteDebugged(target gpreempt.ProcessKey, is bool) {
	m.noting.Lock()
	defer m.noting.Unlock()
	maps.DeleteFunc(m.debugged, func(key gpreempt.ProcessKey, since time.Time) bool {
		return time.Since(since) > time.Hour || key == target && !is
	})
	if _, known := m.debugged[target]; is && !known {
		m.debugged[target] = time.Now()
	}
}

var _ mechanism.Inspector = (*Mechanism)(nil)

// New returns the mechanism, and starts a helper ahead.
func New(cfg Config) *Mechanism {
	cfg.Pool.refill()
	return &Mechanism{Pool: cfg.Pool, cfg: cfg, debugged: map[gpreempt.ProcessKey]time.Time{}}
}

// Name implements mechanism.Mechanism.
func (m *Mechanism) Name() string { return m.cfg.Local.Name() }

// Probe implements mechanism.Mechanism.
func (m *Mechanism) Probe(ctx context.Context, target gpreempt.ProcessKey) mechanism.Capability {
	return m.cfg.Local.Probe(ctx, target)
}

// Attach implements mechanism.Mechanism. Its errors are those of dbgtrap.Mechanism.Attach, and
// of the start of a helper.
func (m *Mechanism) Attach(ctx context.Context, target gpreempt.ProcessKey) (mechanism.Session, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	s := &session{m: m, target: target, Notifier: mechanism.NewNotifier()}
	if err := m.sessions.Add(target, s); err != nil {
		return nil, err
	}
	var err error
	if s.helper, err = m.take(target); err != nil {
		m.sessions.Remove(target, s)
		return nil, err
	}
	s.helper.session.Store(s)
	m.refill()
	held, err := s.call(request{Op: opAttach, Safe: m.cfg.Safe(), Deserted: m.debuggedFor(target) >= foreignTime})
	m.noteDebugged(target, errors.Is(err, mechanism.ErrDebugged))
	if err == nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	switch {
	case err == nil:
		return s, nil
	case !held && s.lost == nil:
		s.leave()
		return nil, err
	}
	if closing := s.Close(); closing != nil {
		return s, errors.Join(err, closing)
	}
	return nil, err
}

// count counts calls of the driver.
func (m *Mechanism) count(calls int64, took time.Duration) {
	m.noting.Lock()
	defer m.noting.Unlock()
	m.calls, m.took = m.calls+calls, m.took+took
}

// Calls returns the number of calls of the driver by all helpers, and their total time.
func (m *Mechanism) Calls() (n int64, took time.Duration) {
	m.noting.Lock()
	defer m.noting.Unlock()
	return m.calls, m.took
}

// Queues is that of dbgtrap.Mechanism.
func (m *Mechanism) Queues(target gpreempt.ProcessKey) ([]kfd.QueueSnapshotEntry, bool) {
	s := m.sessions.Get(target)
	if s == nil {
		return nil, false
	}
	queues := s.queues.Load()
	if queues == nil {
		return nil, false
	}
	return *queues, true
}
