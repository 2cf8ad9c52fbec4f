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

	"github.com/gpreempt/gpreempt/internal/log"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/proc"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

const name = "kmap"

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

// lane has the processes whose queues were on the same GPUs when they were attached to.
type lane struct {
	cfg    Config
	alive  chan struct{} // the daemon's loop turns
	closed chan struct{}
	ended  chan struct{} // of the goroutine that renews; nil before the handle is open

	// calls holds a value during a call of the driver that changes limits or reads the lapses,
	// so that what ran because of a lapse is known.
	calls chan struct{}

	mu     sync.Mutex // guards what follows, and the state of the sessions; held for no call but open
	handle *kfd.Kmap
	// held are the sessions whose processes the handle may limit; false: it should not, and
	// the lease is not renewed for them.
	held    map[*session]bool
	lapses  uint32
	renewed time.Time // the last SET began then
	failing bool      // the last renewal has failed
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
func (*Mechanism) Name() string { return name }

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

// open returns the handle, and opens it at the first call that succeeds.
func (l *lane) open() (*kfd.Kmap, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.handle != nil {
		return l.handle, nil
	}
	h, err := l.cfg.Open()
	if err != nil {
		return nil, err
	}
	l.handle, l.ended = h, make(chan struct{})
	go l.renew()
	return h, nil
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

func (l *lane) close() error {
	l.mu.Lock()
	h, ended := l.handle, l.ended
	l.mu.Unlock()
	close(l.closed)
	if h == nil {
		return nil
	}
	err := h.Close()
	select { // a call of the driver may hang
	case <-ended:
	case <-time.After(time.Second):
	}
	return err
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
	s := &session{m: m, lane: l, target: target, pidfd: pidfd, room: make([]kfd.KmapQueue, kfd.MaxQueues), events: make(chan struct{}, 1)}
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

// suspend suspends sessions.
func (l *lane) suspend(ctx context.Context, own []*session) []error {
	if ctx.Err() != nil {
		return fill(len(own), context.Cause(ctx))
	}
	errs := l.set(own, 0)
	if ctx.Err() != nil {
		for i, err := range errs {
			if err == nil {
				errs[i] = context.Cause(ctx)
			}
		}
	}
	var failed []*session
	var which []int
	for i, err := range errs {
		if err != nil {
			failed, which = append(failed, own[i]), append(which, i)
		}
	}
	if failed == nil {
		return errs
	}
	for i, err := range l.set(failed, kfd.KmapNoLimit) {
		if err != nil && !errors.Is(err, mechanism.ErrGone) && !errors.Is(err, mechanism.ErrReplaced) {
			errs[which[i]] = errors.Join(errs[which[i]], fmt.Errorf("it may stay suspended until gpreemptd releases it or ends: %w", err))
		}
	}
	return errs
}

func fill(n int, err error) []error { return slices.Repeat([]error{err}, n) }

// set sets the limit of sessions, with as few calls as the driver allows.
func (l *lane) set(all []*session, limit uint32) (errs []error) {
	l.calls <- struct{}{}
	defer func() { <-l.calls }()
	for some := range slices.Chunk(all, kfd.KmapMaxTargets) {
		errs = append(errs, l.setSome(some, limit)...)
	}
	return errs
}

// setSome is one call, and a second for those that the lease has resumed meanwhile. It needs calls.
func (l *lane) setSome(some []*session, limit uint32) []error {
	errs, slow := l.call(some, limit)
	if !slow || limit != 0 {
		return errs
	}
	again, which := l.lapsed(some, errs)
	if again == nil {
		return errs
	}
	repeated, slow := l.call(again, limit)
	for i, err := range repeated {
		if slow && err == nil {
			err = fmt.Errorf("process %d: %w", again[i].target.PID, errSlow)
		}
		errs[which[i]] = err
	}
	return errs
}

// lapsed renews the lease, and returns those of some without an error that are not held any
// more, or that it does not know of, and their indexes. It needs calls.
func (l *lane) lapsed(some []*session, errs []error) (lapsed []*session, which []int) {
	_, unknown := l.renewLease()
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, s := range some {
		if errs[i] == nil && (unknown != nil || !l.held[s]) {
			lapsed, which = append(lapsed, s), append(which, i)
		}
	}
	return lapsed, which
}

// call sets a limit. It reports whether that was slow: the lease, which begins before the GPUs
// are waited for, may have ended. It needs calls.
func (l *lane) call(some []*session, limit uint32) ([]error, bool) {
	handle, err := l.open()
	if err != nil {
		return fill(len(some), err), false
	}
	targets := make([]kfd.KmapTarget, len(some))
	for i, s := range some {
		targets[i] = kfd.KmapTarget{PIDFD: s.pidfd, PID: s.target.PID, Limit: limit, Queues: s.room}
	}
	began := time.Now()
	answer, err := handle.Set(targets, Lease, kfd.GraceMin)
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil { // limits stay as they were
		for _, s := range some {
			if _, limited := l.held[s]; limited && limit != 0 {
				l.held[s] = false
			}
		}
		return fill(len(some), err), false
	}
	l.renewed = began
	l.noteLapses(answer.Lapses, some)
	errs := make([]error, len(some))
	for i, s := range some {
		r := answer.Results[i]
		errs[i] = s.failure(r, limit)
		s.changed = s.changed || r.Err == nil && r.Total != s.total
		s.total, s.ran, s.lost = r.Total, false, nil
		if limit == 0 {
			l.held[s] = errs[i] == nil
		} else {
			delete(l.held, s)
		}
	}
	return errs, time.Since(began) > Lease/2
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

// noteLapses takes in how many leases have ended: then all ran that were held before, and
// those that were not suspended again by this call run. It needs mu.
func (l *lane) noteLapses(lapses uint32, again []*session) {
	if lapses == l.lapses {
		return
	}
	l.lapses = lapses
	l.cfg.Log.Warn("the lease of kfd_kmap has ended because gpreemptd did not renew it in time; what was suspended runs, and is suspended again",
		log.Mechanism(name))
	for s, wanted := range l.held {
		if slices.Contains(again, s) {
			continue
		}
		delete(l.held, s)
		if wanted {
			s.ran = true
			s.notify()
		}
	}
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

// renew renews the lease while the daemon works.
func (l *lane) renew() {
	defer close(l.ended)
	for {
		select {
		case <-l.alive:
			l.beat()
		case <-l.closed:
			return
		}
	}
}

// beat renews the lease unless that was done a moment ago or nothing is held, and looks for
// processes that are not held any more.
func (l *lane) beat() {
	l.calls <- struct{}{}
	defer func() { <-l.calls }()
	l.mu.Lock()
	idle := !slices.Contains(slices.Collect(maps.Values(l.held)), true) || time.Since(l.renewed) < renewAfter
	l.mu.Unlock()
	if idle {
		return
	}
	began := time.Now()
	limited, err := l.renewLease()
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil {
		if !l.failing {
			l.cfg.Log.Error("the lease of kfd_kmap cannot be renewed: what is suspended runs once it has ended", log.Mechanism(name), log.Err(err))
		}
		l.failing = true
		return
	}
	l.renewed, l.failing = began, false
	if limited >= len(l.held) {
		return
	}
	held := slices.Collect(maps.Keys(l.held))
	l.mu.Unlock()
	lost := l.unlimited(held)
	l.mu.Lock()
	for _, s := range lost {
		delete(l.held, s)
		s.lost = s.gone()
		s.notify()
	}
}

// renewLease renews the lease, and returns how many living processes are limited. It needs calls.
func (l *lane) renewLease() (limited int, err error) {
	answer, err := l.handle.Set(nil, Lease, kfd.GraceMin)
	if err != nil {
		return 0, err
	}
	l.mu.Lock()
	l.noteLapses(answer.Lapses, nil)
	l.mu.Unlock()
	info, err := l.handle.Info()
	return info.Limited, err
}

// unlimited returns those of the sessions whose processes the handle does not limit: they have
// exited, or replaced their programs. It asks with a handle of its own, because a release by
// that one is refused for what is limited, and without effect otherwise.
func (l *lane) unlimited(held []*session) (lost []*session) {
	other, err := l.cfg.Open()
	if err != nil {
		return nil
	}
	defer other.Close()
	for some := range slices.Chunk(held, kfd.KmapMaxTargets) {
		targets := make([]kfd.KmapTarget, len(some))
		for i, s := range some {
			targets[i] = kfd.KmapTarget{PIDFD: s.pidfd, PID: s.target.PID, Limit: kfd.KmapNoLimit}
		}
		answer, err := other.Set(targets, Lease, kfd.GraceMin)
		if err != nil {
			return lost
		}
		for i, r := range answer.Results {
			if r.Err == nil || errors.Is(r.Err, unix.ESRCH) {
				lost = append(lost, some[i])
			}
		}
	}
	return lost
}
