package helper

import (
	"context"
	"maps"
	"slices"
	"testing"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/kfdtest"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/mechanism/criu"
	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// caller returns what makes the calls of criu in a helper on the machine.
func (f *fixture) caller(p *helperProcess) caller {
	return func(logger *zap.Logger) criu.Calls {
		calls := &sys{Sys: p.Main(), over: p.over}
		attach := func(_ context.Context, pid int32, _ uint64) (criu.Thread, error) {
			t, err := p.trace(calls, pid)
			if err != nil {
				return nil, err
			}
			return t, nil
		}
		return criu.New(criu.Config{Sys: calls, Attach: attach, Host: host{f, p.Process}, Log: logger})
	}
}

// host is the machine as a helper of criu sees it, the daemon for nil.
type host struct {
	f    *fixture
	self *kfdtest.Process
}

func (host) Capabilities() (uint64, error) { return 1 << unix.CAP_SYS_ADMIN, nil }

func (h host) Open(target gpreempt.ProcessKey) (criu.Process, error) {
	h.f.mu.Lock()
	p := h.f.jobs[target]
	h.f.mu.Unlock()
	if p == nil || p.Dead() {
		return nil, mechanism.ErrGone
	}
	return process{h, p}, nil
}

type process struct {
	host
	p *kfdtest.Process
}

func (process) Tracer() (found, remedy string, err error) { return "", "", nil }
func (process) Close()                                    {}

func (p process) Descriptors() ([]int, error) {
	fds := p.p.FDs()
	maps.DeleteFunc(fds, func(_ int, name string) bool { return name != kfd.DevicePath })
	return slices.Sorted(maps.Keys(fds)), nil
}

func (p process) Take(number int) (int, error) {
	return p.self.Main().PidfdGetfd(p.p.PID(), number)
}

// journal is the journal of pauses, which outlives the daemon.
type journal map[gpreempt.ProcessKey]mechanism.JournalEntry

func (j journal) Begin(e mechanism.JournalEntry) error           { j[e.Target] = e; return nil }
func (j journal) End(target gpreempt.ProcessKey, _ string) error { delete(j, target); return nil }

// criu returns criu in the daemon.
func (f *fixture) criu(j journal) *criu.Mechanism {
	return criu.New(criu.Config{Host: host{f, nil}, Calls: f.Pool, Journal: j, Log: f.log})
}

// wantEvicted checks whether the queues of a process are off the GPU.
func (f *fixture) wantEvicted(p *kfdtest.Process, want bool) {
	f.t.Helper()
	for id, q := range p.Queues() {
		if q.Evicted != want || q.Running == want {
			f.t.Errorf("queue %d of process %d is in state %+v, want evicted %v", id, p.PID(), q, want)
		}
	}
}

func TestTargetIsPausedAndUnpausedByAHelper(t *testing.T) {
	onEach(t, func(t *testing.T, f *fixture) {
		j, job := journal{}, f.job()
		s, err := f.criu(j).Attach(t.Context(), job.Key())
		f.must("attach", err)
		for range 3 {
			f.must("suspend", s.Suspend(t.Context(), nil))
			f.wantEvicted(job, true)
			if len(j) != 1 || f.Pool.serving[job.Key()] != nil {
				t.Errorf("journal %v, serving %v", j, f.Pool.serving)
			}
			f.must("resume", s.Resume(t.Context()))
			f.wantEvicted(job, false)
		}
		f.must("close", s.Close())
		if len(j) != 0 {
			t.Errorf("journal %v", j)
		}
		f.mu.Lock()
		n := len(f.processes)
		f.mu.Unlock()
		if n > 2 { // the one that is started ahead may come before
			t.Errorf("%d helpers for calls one after another", n)
		}
	})
}

// The end of a process of the driver costs each GPU with a runlist a cycle.
func TestHelperIsAProcessOfTheDriverOnceItHasAttached(t *testing.T) {
	f := newFixture(t, "7.2")
	job := f.job()
	inDriver := func() (n int) {
		f.mu.Lock()
		defer f.mu.Unlock()
		for _, h := range f.processes {
			if _, opened := h.KFD(); opened {
				n++
			}
		}
		return n
	}
	endAll := func() {
		f.Pool.mu.Lock()
		all := maps.Clone(f.all)
		f.Pool.mu.Unlock()
		for c := range all {
			c.Kill()
			<-c.Ended
		}
	}

	s, err := f.criu(journal{}).Attach(t.Context(), job.Key())
	f.must("attach criu", err)
	f.must("suspend", s.Suspend(t.Context(), nil))
	f.must("resume", s.Resume(t.Context()))
	f.must("close", s.Close())
	if n := inDriver(); n != 0 {
		t.Errorf("%d helpers that made calls of criu only are processes of the driver", n)
	}
	endAll()
	f.must("close dbgtrap", f.attach(job).Close())
	if n := inDriver(); n != 1 {
		t.Errorf("after an attach %d helpers are processes of the driver, want 1", n)
	}
	endAll()
	testutil.Receive(t, f.ended, "the end of the helper")
	if n := len(f.ended); n != 0 {
		t.Errorf("%d more helpers count as processes of the driver", n)
	}
}

// A target that holds its own lock keeps its helper, and neither the daemon nor its
// successor. The pause that the dead helper makes at the end of its call is undone.
func TestTargetThatHoldsItsLockKeepsItsHelperOfCRIUOnly(t *testing.T) {
	onEach(t, func(t *testing.T, f *fixture) {
		j, job, other := journal{}, f.job(), f.job()
		m := f.criu(j)
		s, err := m.Attach(t.Context(), job.Key())
		f.must("attach", err)
		o, err := m.Attach(t.Context(), other.Key())
		f.must("attach the other", err)
		f.must("suspend the other", o.Suspend(t.Context(), nil))
		release := job.HoldMutex()
		f.callTime = 3 * time.Second // the helper must reach the lock, also on a busy machine
		err = s.Suspend(t.Context(), nil)
		f.callTime = callTime
		if err == nil {
			t.Fatal("a target that holds its lock is suspended")
		}
		if len(j) != 2 {
			t.Errorf("journal %v", j)
		}

		// The daemon dies at once, and so do its helpers but the one that waits.
		f.Pool.mu.Lock()
		stuck, all := f.abandoned[job.Key()], maps.Clone(f.all)
		f.Pool.mu.Unlock()
		f.must("close", f.Close())
		for c := range all {
			if c != stuck {
				<-c.Ended
			}
		}
		next := f.next()
		m = next.criu(j)
		if err := m.Undo(t.Context(), j[other.Key()]); err != nil {
			t.Errorf("resume the other: %v", err)
		}
		f.wantEvicted(other, false)
		if err := m.Undo(t.Context(), j[job.Key()]); err == nil {
			t.Error("a target is resumed while a helper of the dead daemon waits in a call for it")
		}
		release()
		<-stuck.Ended
		f.must("resume the target", m.Undo(t.Context(), j[job.Key()]))
		f.wantEvicted(job, false)
		if len(j) != 0 {
			t.Errorf("journal %v", j)
		}
	})
}

// A helper may die before and after each call that is made. The kernel does
// not undo what it did for criu: another one does.
func TestDeathOfAHelperOfCRIUAtEveryCallIsUndone(t *testing.T) {
	deaths, failed := 0, 0
	for _, stage := range []kfdtest.Stage{kfdtest.Before, kfdtest.After} {
		for nth, died := 1, true; died; nth++ {
			f := newFixture(t, "7.2")
			j, job := journal{}, f.job()
			m := f.criu(j)
			death := f.machine.Inject(kfdtest.Fault{Stage: stage, Nth: nth, Do: func() { f.killServing(job.Key()) }})
			s, err := m.Attach(t.Context(), job.Key())
			for err != nil { // also by a helper that has died and waits: the daemon tries again
				failed++
				s, err = m.Attach(t.Context(), job.Key())
			}
			for range 2 {
				for err := s.Suspend(t.Context(), nil); err != nil; err = s.Suspend(t.Context(), nil) {
					failed++
					if len(j) == 0 {
						f.wantEvicted(job, false)
					}
				}
				f.wantEvicted(job, true)
				for err := s.Resume(t.Context()); err != nil; err = s.Resume(t.Context()) {
					failed++
					if len(j) != 1 {
						t.Errorf("journal %v after %v", j, err)
					}
				}
				f.wantEvicted(job, false)
			}
			f.must("close", s.Close())
			if len(j) != 0 {
				t.Errorf("journal %v", j)
			}
			if died = death.Hits() > 0; died {
				deaths++
			}
			death.Remove()
		}
	}
	t.Logf("%d times at a call, %d of the daemon's calls failed; every queue runs", deaths, failed)
	if failed < 10 {
		t.Error("too few calls failed: nothing was tested")
	}
}

// The same for dbgtrap, where the kernel undoes it: the target runs, the daemon notices, and
// another helper suspends the target again.
func TestDeathOfAHelperAtEveryCallReleasesItsTarget(t *testing.T) {
	deaths, failed, handling := 0, 0, 0
	for _, profile := range []string{"6.12", "7.2", "7.3"} {
		for _, stage := range []kfdtest.Stage{kfdtest.Before, kfdtest.After} {
			for nth, died := 1, true; died; nth++ {
				f := newFixture(t, profile)
				job := f.job()
				queues := 1
				death := f.machine.Inject(kfdtest.Fault{Stage: stage, Nth: nth, Do: func() { f.killServing(job.Key()) }})
				held, err := f.Attach(t.Context(), job.Key())
				for _, call := range []func(mechanism.Session) error{
					func(s mechanism.Session) error { return s.Suspend(t.Context(), nil) },
					func(s mechanism.Session) error { return s.Resume(t.Context()) },
					func(s mechanism.Session) error { return s.Suspend(t.Context(), nil) },
					func(s mechanism.Session) error {
						before := death.Hits()
						queues++
						f.bear(job)
						for {
							testutil.Receive(t, s.Events(), "an event")
							r, err := s.Handle(t.Context())
							if err != nil && death.Hits() > before {
								handling++
							}
							if err != nil || r.Born == 1 {
								return err
							}
						}
					},
					func(s mechanism.Session) error { return s.Close() },
				} {
					if err == nil {
						err = call(held)
					}
				}
				if died = death.Hits() > 0; died {
					deaths++
				}
				death.Remove()
				if err != nil { // the daemon notices
					failed++
				}
				if held != nil {
					for err := held.Close(); err != nil; err = held.Close() { // until its helper has ended
						t.Log(err)
					}
				}
				f.await("the target runs", func() bool { s, _ := job.KFD(); return !s.Enabled && len(job.Suspended()) == 0 })
				if f.killed != nil {
					<-f.killed.Ended
				}
				again, err := f.Attach(t.Context(), job.Key())
				for tries := 1; err != nil && tries < 5; tries++ { // by a helper that has died and waits
					again, err = f.Attach(t.Context(), job.Key())
				}
				f.must("attach again", err)
				f.must("suspend again", again.Suspend(t.Context(), nil))
				f.wantSuspended(job, queues)
				f.must("close", again.Close())
				f.wantSuspended(job, 0)
			}
		}
	}
	t.Logf("%d times at a call, %d sessions were lost; every queue runs", deaths, failed)
	if failed < 10 || handling == 0 {
		t.Error("too few sessions were lost: nothing was tested")
	}
}
