package daemon

import (
	"context"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// idleHost is a scheduler with an idle watch, in a synctest bubble.
type idleHost struct {
	announcer
	watch *idleWatch
	ends  []scheduler.LeaseEnd // guarded by the scheduler's lock
	// busy and known are the result for every client.
	busy, known atomic.Bool
	checks      atomic.Int64
}

// noTargets is an executor without targets.
type noTargets struct{}

func (noTargets) Attach(gpreempt.ProcessKey)          {}
func (noTargets) Detach(gpreempt.ProcessKey)          {}
func (noTargets) Suspend(gpreempt.ProcessKey, uint64) {}
func (noTargets) Resume(gpreempt.ProcessKey, uint64)  {}
func (noTargets) Kill(gpreempt.ProcessKey)            {}
func (noTargets) Inspect(gpreempt.ProcessKey, uint64) {}
func (noTargets) Flush()                              {}

func newIdleHost(t *testing.T) *idleHost {
	t.Helper()
	d := &idleHost{}
	d.known.Store(true)
	core := scheduler.New(scheduler.DefaultPolicy(), scheduler.Limits{LeasesPerClient: 10, LeasesPerUser: 10, LeasesTotal: 10})
	runner := scheduler.NewRunner(core, clock{time.Now()}, testutil.NewTimer(), noTargets{}, func(r scheduler.Record) {
		if r.ToLease == scheduler.LeaseEnded {
			d.ends = append(d.ends, r.End)
		}
	})
	runner.Post(scheduler.GPUAdded{GPU: 1})
	d.watch = &idleWatch{
		runner: runner,
		busy: func(context.Context, gpreempt.ProcessKey) (bool, bool) {
			d.checks.Add(1)
			return d.busy.Load(), d.known.Load()
		},
		wake: make(chan struct{}, 1),
	}
	d.announcer = announcer{runner, d.watch}
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	go d.watch.run(ctx)
	go func() { _ = runner.Run(ctx, time.Hour, func() {}) }()
	synctest.Wait()
	return d
}

// announce creates a lease of ten seconds.
func (d *idleHost) announce(t *testing.T, pid int32, onIdle bool) {
	t.Helper()
	_, _, err := d.Announce(scheduler.LeaseRequested{
		Client: scheduler.ClientID{PID: pid}, GPUs: []gpreempt.GPUID{1}, Priority: gpreempt.PriorityHigh, TTL: 10 * time.Second, OnIdle: onIdle,
	}, func(scheduler.LeaseID, scheduler.Answer) {})
	if err != nil {
		t.Fatal(err)
	}
}

// pass advances the time of the bubble.
func pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

func (d *idleHost) ended(t *testing.T, want ...scheduler.LeaseEnd) {
	t.Helper()
	var got []scheduler.LeaseEnd
	d.View(func(*scheduler.Core) { got = slices.Clone(d.ends) })
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("ends of leases (-want +got):\n%s", diff)
	}
}

func TestLeaseEndsOnceItsOwnerHadWorkAndHasNone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newIdleHost(t)
		d.announce(t, 7, true)
		pass(time.Second)
		d.ended(t) // no work yet
		d.busy.Store(true)
		pass(time.Second)
		d.ended(t)
		d.busy.Store(false)
		pass(idleInterval) // a gap between two kernels is shorter than the grace
		d.ended(t)
		pass(scheduler.IdleGrace + idleInterval)
		d.ended(t, scheduler.EndIdle)
	})
}

func TestIdleWatchSleepsWithoutALeaseThatEndsByIdleness(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newIdleHost(t)
		d.announce(t, 7, false)
		pass(time.Second)
		if n := d.checks.Load(); n != 0 {
			t.Errorf("%d checks for an ordinary lease", n)
		}
		d.announce(t, 8, true)
		pass(time.Second)
		if n := d.checks.Load(); n < 900 || n > 1100 {
			t.Errorf("%d checks in a second, want one each millisecond", n)
		}
		pass(time.Minute) // both have expired
		n := d.checks.Load()
		pass(time.Hour)
		if got := d.checks.Load(); got != n {
			t.Errorf("%d checks without a lease", got-n)
		}
		// A new lease wakes it.
		d.announce(t, 8, true)
		pass(10 * idleInterval)
		if d.checks.Load() == n {
			t.Error("no check after a new lease")
		}
	})
}

func TestUnknownBacklogNeverEndsALease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newIdleHost(t)
		d.busy.Store(true)
		d.announce(t, 7, true)
		pass(time.Second)
		d.known.Store(false)
		d.busy.Store(false)
		pass(8 * time.Second)
		d.ended(t)
		pass(2 * time.Second)
		d.ended(t, scheduler.EndExpired)
	})
}
