package kmap

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/log"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

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
	for i, s := range own {
		if errs[i] != nil {
			failed, which = append(failed, s), append(which, i)
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
		if r.Err == nil && r.Total != s.total && s.total >= 0 {
			s.changed = true
			s.Notify()
		}
		s.total, s.ran, s.lost = r.Total, false, nil
		if limit == 0 {
			l.held[s] = errs[i] == nil
		} else {
			delete(l.held, s)
		}
	}
	return errs, time.Since(began) > Lease/2
}

// noteLapses takes in how many leases have ended: then all ran that were held before, and
// those that were not suspended again by this call run. It needs mu.
func (l *lane) noteLapses(lapses uint32, again []*session) {
	if lapses == l.lapses {
		return
	}
	l.lapses = lapses
	l.cfg.Log.Warn("the lease of kfd_kmap has ended because gpreemptd did not renew it in time; what was suspended runs, and is suspended again",
		log.Mechanism(mechanism.Kmap))
	for s, wanted := range l.held {
		if slices.Contains(again, s) {
			continue
		}
		delete(l.held, s)
		if wanted {
			s.ran = true
			s.Notify()
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
			l.cfg.Log.Error("the lease of kfd_kmap cannot be renewed: what is suspended runs once it has ended", log.Mechanism(mechanism.Kmap), log.Err(err))
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
		s.Notify()
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
