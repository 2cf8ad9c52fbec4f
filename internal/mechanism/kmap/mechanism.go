// Package kmap implements a mechanism that keeps the queues of processes out of the hardware's
// runlist, by an optional extension of the kernel: /dev/kfd_kmap. One call suspends or resumes
// any number of processes, with one runlist for each GPU. It traces and debugs nothing.
//
// Limits belong to a handle, and to a lease that Beat renews. The kernel ends them with
// the handle, however this program ends, and with the lease, when it hangs: then every process
// runs, and there is nothing to undo. No released kernel has the extension, and nothing here
// was run on AMD hardware.
//
// Limits: a process that replaces its program (execve) while it is suspended runs, until the
// next renewal finds that. One that does so right before Suspend is suspended with its new
// program, until discovery classifies that. The kernel makes the calls on one handle one after the
// other, and a call waits for its GPUs. So the processes on the same GPUs share a handle: while one
// of these GPUs hangs, their lease is not renewed, and what is suspended of them may run again for
// that time. Suspensions of that call are made again, or fail. Others are not held up.
package kmap

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/proc"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

const (
	// Lease is how long processes stay suspended after this program has hung.
	Lease = 2 * time.Second
	// BeatEvery is the longest time between two calls of Beat.
	BeatEvery = Lease / 3
	// renewAfter is how long after a call a renewal is of use.
	renewAfter = Lease / 6
)

// errSlow is the error of a suspension that the end of the lease may have undone already.
var errSlow = fmt.Errorf("a GPU takes about as long to answer as the lease of kfd_kmap lasts, %v: see dmesg | grep -i amdgpu", Lease)

// Config is what a Mechanism needs.
type Config struct {
	// Open opens a handle of the extension.
	Open func() (*kfd.Kmap, error)
	// GPUs returns the GPUs a target's queues are on. It must not block. May be nil.
	GPUs func(gpreempt.ProcessKey) []gpreempt.GPU
	// Host is the rest of the operating system; nil is this one.
	Host Host
	// Log may be nil.
	Log *zap.Logger
}

// Host has the pidfds of processes.
type Host interface {
	// Pidfd returns a new pidfd; mechanism.ErrGone when the process has exited.
	Pidfd(target gpreempt.ProcessKey) (int, error)
	// Exited reports whether the process of a pidfd has exited.
	Exited(pidfd int) bool
	// ClosePidfd closes a pidfd.
	ClosePidfd(pidfd int)
}

// thisHost is the calling program's.
type thisHost struct{}

func (thisHost) Pidfd(target gpreempt.ProcessKey) (int, error) {
	p, err := proc.Open("/", target)
	if err != nil {
		return -1, err
	}
	defer p.Close()
	return p.Pidfd()
}

func (thisHost) Exited(pidfd int) bool { return proc.Exited(pidfd) }
func (thisHost) ClosePidfd(pidfd int)  { _ = unix.Close(pidfd) } // nothing is lost

// Mechanism is the extension as a mechanism.Mechanism. It has at most one session for each
// process.
type Mechanism struct {
	cfg      Config
	sessions mechanism.Sessions[*session]

	mu      sync.Mutex // guards what follows
	lanes   map[string]*lane
	closing bool
}

var _ mechanism.Batcher = (*Mechanism)(nil)

// New returns the mechanism. It opens the extension when it is first used.
func New(cfg Config) *Mechanism {
	if cfg.GPUs == nil {
		cfg.GPUs = func(gpreempt.ProcessKey) []gpreempt.GPU { return nil }
	}
	if cfg.Host == nil {
		cfg.Host = thisHost{}
	}
	if cfg.Log == nil {
		cfg.Log = zap.NewNop()
	}
	return &Mechanism{cfg: cfg, lanes: map[string]*lane{}}
}

// Name implements mechanism.Mechanism.
func (*Mechanism) Name() string { return mechanism.Kmap }

// lane returns that of a target.
func (m *Mechanism) lane(target gpreempt.ProcessKey) *lane {
	var gpus []gpreempt.GPUID
	for _, g := range m.cfg.GPUs(target) {
		gpus = append(gpus, g.ID)
	}
	slices.Sort(gpus)
	key := fmt.Sprint(gpus)
	m.mu.Lock()
	defer m.mu.Unlock()
	l := m.lanes[key]
	if l == nil {
		l = &lane{cfg: m.cfg, calls: make(chan struct{}, 1), alive: make(chan struct{}, 1), closed: make(chan struct{}), held: map[*session]bool{}}
		m.lanes[key] = l
		if m.closing {
			close(l.closed)
		}
	}
	return l
}

// all returns the lanes.
func (m *Mechanism) all() []*lane {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Collect(maps.Values(m.lanes))
}

// Close closes the handles: whatever they limit runs.
func (m *Mechanism) Close() error {
	m.mu.Lock()
	m.closing = true
	lanes := slices.Collect(maps.Values(m.lanes))
	m.mu.Unlock()
	errs := make([]error, len(lanes))
	var closing sync.WaitGroup
	for i, l := range lanes {
		closing.Go(func() { errs[i] = l.close() })
	}
	closing.Wait()
	return errors.Join(errs...)
}

// Calls returns the number of calls of the driver, and their total time.
func (m *Mechanism) Calls() (n int64, took time.Duration) {
	for _, l := range m.all() {
		l.mu.Lock()
		handle := l.handle
		l.mu.Unlock()
		if handle != nil {
			more, longer := handle.Calls()
			n, took = n+more, took+longer
		}
	}
	return n, took
}

// Attach implements mechanism.Mechanism. It changes nothing for the process.
func (m *Mechanism) Attach(ctx context.Context, target gpreempt.ProcessKey) (mechanism.Session, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	l := m.lane(target)
	if _, err := l.open(); err != nil {
		return nil, err
	}
	pidfd, err := m.cfg.Host.Pidfd(target)
	if err != nil {
		return nil, err
	}
	s := &session{m: m, lane: l, target: target, pidfd: pidfd, total: -1, room: make([]kfd.KmapQueue, kfd.MaxQueues), Notifier: mechanism.NewNotifier()}
	if err := m.sessions.Add(target, s); err != nil {
		m.cfg.Host.ClosePidfd(pidfd)
		return nil, err
	}
	if err := l.set([]*session{s}, kfd.KmapNoLimit)[0]; err != nil { // another program limits it, say
		m.sessions.Remove(target, s)
		m.cfg.Host.ClosePidfd(pidfd)
		return nil, err
	}
	return s, nil
}

// SuspendEach implements mechanism.Batcher.
func (m *Mechanism) SuspendEach(ctx context.Context, sessions []mechanism.Session, done func(int, error)) {
	each(sessions, func(l *lane, some []*session) []error { return l.suspend(ctx, some) }, done)
}

// ResumeEach implements mechanism.Batcher.
func (m *Mechanism) ResumeEach(_ context.Context, sessions []mechanism.Session, done func(int, error)) {
	each(sessions, func(l *lane, some []*session) []error { return l.set(some, kfd.KmapNoLimit) }, done)
}

// each does something for the sessions of each lane, and for the lanes at the same time.
func each(sessions []mechanism.Session, do func(*lane, []*session) []error, done func(int, error)) {
	type part struct {
		own   []*session
		which []int
	}
	parts := map[*lane]part{}
	for i, one := range sessions {
		s := one.(*session)
		p := parts[s.lane]
		parts[s.lane] = part{append(p.own, s), append(p.which, i)}
	}
	var all sync.WaitGroup
	for l, p := range parts {
		all.Go(func() {
			errs := make([]error, len(p.own))
			broken := mechanism.Guard(func() error { copy(errs, do(l, p.own)); return nil })
			for i, err := range errs {
				done(p.which[i], cmp.Or(broken, err))
			}
		})
	}
	all.Wait()
}

// failure returns the error of a result.
func (s *session) failure(r kfd.KmapResult, limit uint32) error {
	switch {
	case errors.Is(r.Err, unix.ESRCH):
		return s.gone()
	case errors.Is(r.Err, unix.EIO):
		var hung []gpreempt.GPUID
		for _, q := range r.Queues {
			if q.State&kfd.KmapFailed != 0 && !slices.Contains(hung, q.GPU()) {
				hung = append(hung, q.GPU())
			}
		}
		return &mechanism.HardwareError{GPUs: hung, Err: r.Err}
	case r.Err != nil:
		return r.Err
	}
	if limit != 0 {
		return nil
	}
	for _, q := range r.Queues {
		if q.State&kfd.KmapMapped != 0 {
			return fmt.Errorf("process %d: %w: queue %d on GPU %v is %v after a limit of 0", s.target.PID, kfd.ErrInconsistent, q.ID, q.GPU(), q.State)
		}
	}
	if r.Held != r.Total {
		return fmt.Errorf("process %d: %w: %d of %d queues are held after a limit of 0", s.target.PID, kfd.ErrInconsistent, r.Held, r.Total)
	}
	return nil
}

// gone returns why the driver does not know the process.
func (s *session) gone() error {
	err := mechanism.ErrReplaced
	if s.m.cfg.Host.Exited(s.pidfd) {
		err = mechanism.ErrGone
	}
	return fmt.Errorf("process %d: %w", s.target.PID, err)
}

// Beat shows that the daemon works. It is called at least every BeatEvery, and does not block.
func (m *Mechanism) Beat() {
	for _, l := range m.all() {
		select {
		case l.alive <- struct{}{}:
		default:
		}
	}
}
