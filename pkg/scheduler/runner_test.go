package scheduler

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/testutil"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func TestRunnerFiresDeadlinesOnTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		m.running(t)
		id, answers := m.announce(t, request())
		time.Sleep(time.Second)
		expect(t, answers, answered{400 * time.Microsecond, id, Answer{Quiesced: true, Reason: CauseDone, Suspended: 1, Waited: 400 * time.Microsecond}})
		want := []string{
			"0s record lease=1 none->requested cause=announced",
			"0s record lease=1 requested->quiescing cause=started",
			"0s record target=100@1 running->suspending cause=lease lease=1",
			"0s suspend 100@1",
			"400µs record target=100@1 suspending->suspended cause=done took=400µs",
			"400µs record lease=1 quiescing->held cause=quiet took=400µs",
			"100ms record lease=1 held->ended end=expired took=100ms",
			"100ms record target=100@1 suspended->resuming cause=lease-ended",
			"100ms resume 100@1",
			"100.35ms record target=100@1 resuming->running cause=done took=350µs",
		}
		if diff := cmp.Diff(want, m.takeLog()); diff != "" {
			t.Errorf("log (-want +got):\n%s", diff)
		}
	})
}

func TestRunnerAnswersByMaxWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		m.suspend = 0
		m.running(t)
		id, answers := m.announce(t, request())
		time.Sleep(19999 * time.Microsecond)
		expect(t, answers)
		time.Sleep(time.Second)
		expect(t, answers, answered{20 * time.Millisecond, id, Answer{Reason: CauseMaxWait, Waited: 20 * time.Millisecond}})
		m.Post(TargetGone{alpha})
	})
}

// The timer is set for a TTL far off; what comes before it must move it.
func TestRunnerMovesTheTimerForwards(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		m.running(t)
		long := request()
		long.TTL = 900 * time.Millisecond
		m.announce(t, long)
		time.Sleep(10 * time.Millisecond)
		m.takeLog()
		short := request()
		short.TTL, short.GPUs = 5*time.Millisecond, nil
		m.announce(t, short)
		time.Sleep(100 * time.Millisecond)
		log := m.takeLog()
		if !slices.Contains(log, "15ms record lease=2 held->ended end=expired took=5ms") {
			t.Errorf("the short lease did not end on time: %q", log)
		}
	})
}

func TestRunnerAnswersEachCallerOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		m.running(t)
		req := request()
		req.RequestID = "a"
		id, first := m.announce(t, req)
		time.Sleep(100 * time.Microsecond)
		again, second := m.announce(t, req) // while it waits
		if again != id {
			t.Errorf("the retry got lease %d, the first %d", again, id)
		}
		expect(t, first)
		expect(t, second)
		time.Sleep(10 * time.Millisecond)
		done := answered{400 * time.Microsecond, id, Answer{Quiesced: true, Reason: CauseDone, Suspended: 1, Waited: 400 * time.Microsecond}}
		expect(t, first, done)
		expect(t, second, done)

		_, third := m.announce(t, req) // when it is answered
		done.At = 10100 * time.Microsecond
		expect(t, third, done)

		if _, _, err := m.Complete(ClientID{PID: 1}, id, EndCompleted); err != nil {
			t.Error(err)
		}
		_, fourth := m.announce(t, req) // when it is over
		expect(t, fourth, answered{10100 * time.Microsecond, id, Answer{Reason: CauseEnded, Waited: 400 * time.Microsecond}})

		req.Priority--
		_, _, err := m.Announce(req, func(LeaseID, Answer) { t.Error("an answer to a refused announcement") })
		reason(t, err, gpreempt.ReasonRequestIDReused)
		time.Sleep(time.Second)
		expect(t, first)
		expect(t, second)
		if n := len(m.replies); n != 0 {
			t.Errorf("%d replies are kept for answers that were given", n)
		}
	})
}

// What there is nothing to wait for is answered before Announce returns.
func TestRunnerAnswersInsideAnnounce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		req := request()
		req.GPUs = nil
		got := 0
		id, _, err := m.Announce(req, func(LeaseID, Answer) { got++ })
		if err != nil || got != 1 {
			t.Errorf("lease %d, %v: %d answers", id, err, got)
		}
	})
}

func TestCompleteReturnsHowALeaseEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		m.running(t)
		id, _ := m.announce(t, request())
		time.Sleep(30 * time.Millisecond)
		type completed struct {
			End    LeaseEnd
			Lived  time.Duration
			Reason gpreempt.Reason
		}
		complete := func(pid int32, id LeaseID) completed {
			end, lived, err := m.Complete(ClientID{PID: pid}, id, EndCompleted)
			return completed{end, lived, gpreempt.ReasonOf(err)}
		}
		expired, _ := m.announce(t, request())
		admins, _ := m.announce(t, request())
		time.Sleep(20 * time.Millisecond)
		got := []completed{
			complete(2, id), complete(1, 99), complete(1, id), complete(1, id), complete(2, id), complete(0, id), complete(0, admins),
		}
		time.Sleep(time.Second)
		got = append(got, complete(1, expired))
		want := []completed{
			{Reason: gpreempt.ReasonForeignLease},
			{Reason: gpreempt.ReasonUnknownLease},
			{EndCompleted, 50 * time.Millisecond, ""},
			{EndCompleted, 50 * time.Millisecond, ""},
			{Reason: gpreempt.ReasonForeignLease},
			{EndCompleted, 50 * time.Millisecond, ""},
			{EndCompleted, 20 * time.Millisecond, ""},
			{EndExpired, 100 * time.Millisecond, ""},
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Error(diff)
		}
	})
}

func refuseRenewal(t *testing.T, m *machine, pid int32, id LeaseID, ttl time.Duration, want gpreempt.Reason) {
	t.Helper()
	_, err := m.Renew(ClientID{PID: pid}, id, ttl)
	reason(t, err, want)
}

func TestRenew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		m.running(t)
		id, _ := m.announce(t, request())
		time.Sleep(90 * time.Millisecond)
		if ttl, err := m.Renew(ClientID{PID: 1}, id, 50*time.Millisecond); ttl != 50*time.Millisecond || err != nil {
			t.Errorf("renewed for %v, %v", ttl, err)
		}
		refuseRenewal(t, m, 2, id, time.Second, gpreempt.ReasonForeignLease)
		refuseRenewal(t, m, 1, 99, time.Second, gpreempt.ReasonUnknownLease)
		refuseRenewal(t, m, 1, id, 0, gpreempt.ReasonTTLRange)
		refuseRenewal(t, m, 1, id, time.Hour, gpreempt.ReasonTTLRange)
		time.Sleep(time.Second)
		if end, lived, err := m.Complete(ClientID{PID: 1}, id, EndCompleted); end != EndExpired || lived != 140*time.Millisecond || err != nil {
			t.Errorf("ended by %v after %v, %v", end, lived, err)
		}
		refuseRenewal(t, m, 1, id, time.Second, gpreempt.ReasonUnknownLease)
	})
}

func TestThePolicySetsWhatAnAnnouncementLeavesOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		req := request()
		req.TTL, req.MaxWait = PolicyDefault, PolicyDefault
		id, ttl, err := m.Announce(req, func(LeaseID, Answer) {})
		if err != nil || ttl != DefaultPolicy().DefaultTTL {
			t.Fatalf("announced for %v, %v; want %v", ttl, err, DefaultPolicy().DefaultTTL)
		}
		var leases []LeaseInfo
		m.View(func(c *Core) { leases = c.Leases() })
		if len(leases) != 1 || leases[0].Expires-leases[0].Created != ttl {
			t.Errorf("leases %+v, want one of %v", leases, ttl)
		}
		time.Sleep(ttl / 2)
		if ttl, err = m.Renew(req.Client, id, PolicyDefault); err != nil || ttl != DefaultPolicy().DefaultTTL {
			t.Errorf("renewed for %v, %v; want %v", ttl, err, DefaultPolicy().DefaultTTL)
		}
	})
}

// The timer may be late: nothing that is overdue is taken for alive.
func TestOverdueLeasesAreOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine() // Run is not called: no deadline fires by itself
		lease, answers := m.announce(t, request())
		time.Sleep(200 * time.Millisecond)
		<-answers
		refuseRenewal(t, m, 1, lease, time.Second, gpreempt.ReasonUnknownLease)
		if end, lived, err := m.Complete(ClientID{PID: 1}, lease, EndCompleted); end != EndExpired || lived != 200*time.Millisecond || err != nil {
			t.Errorf("ended by %v after %v, %v", end, lived, err)
		}

		again := request()
		again.RequestID = "a"
		lease, _ = m.announce(t, again)
		time.Sleep(200 * time.Millisecond)
		_, answers = m.announce(t, again)
		// 350us of resume and 400us of suspend it waited for; now it is over.
		expect(t, answers, answered{400 * time.Millisecond, lease, Answer{Reason: CauseEnded, Waited: 750 * time.Microsecond}})
	})
}

// A daemon that was stopped, or a machine that was asleep, while the clock went on.
func TestNightWithoutATurnEndsInAResumeAtTheNext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine() // Run is not called yet
		m.announce(t, request())
		const night = 8 * time.Hour
		time.Sleep(night)
		m.takeLog()
		m.running(t)
		time.Sleep(time.Millisecond)
		resumed := slices.ContainsFunc(m.takeLog(), func(line string) bool { return line == fmt.Sprintf("%v resume %v", night, alpha) })
		var leases []LeaseInfo
		var away int
		m.View(func(c *Core) { leases, away = c.Leases(), c.Away() })
		if !resumed || len(leases) != 0 || away != 0 {
			t.Errorf("at its first turn it resumed: %v; then there are leases %v, and %d targets away", resumed, leases, away)
		}
	})
}

func TestViewOrdersNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine() // Run is not called
		m.announce(t, request())
		time.Sleep(time.Hour)
		m.takeLog()
		var leases []LeaseInfo
		m.View(func(c *Core) { leases = c.Leases() })
		if log := m.takeLog(); len(log) != 0 || len(leases) != 1 {
			t.Errorf("a look at a lease whose time is over did %q, and saw leases %v", log, leases)
		}
		m.Post(Tick{})
		if log := m.takeLog(); len(log) == 0 {
			t.Error("nothing was due")
		}
	})
}

func TestViewIsAsOfNow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		m.running(t)
		m.announce(t, request())
		time.Sleep(70 * time.Millisecond)
		m.View(func(c *Core) {
			if info, _ := c.Target(alpha); info.SuspendedTotal != 70*time.Millisecond {
				t.Errorf("away for %v after 70ms", info.SuspendedTotal)
			}
			if _, ok := c.Target(beta); ok {
				t.Error("a target nobody saw")
			}
			if _, ok := c.Explain(beta); ok {
				t.Error("an explanation of a target nobody saw")
			}
		})
	})
}

func TestLimits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		for range 4 {
			m.announce(t, request())
		}
		_, _, err := m.Announce(request(), nil)
		reason(t, err, gpreempt.ReasonLeasesPerClient)
		m.SetLimits(Limits{LeasesPerClient: 9, LeasesPerUser: 9, LeasesTotal: 4})
		_, _, err = m.Announce(request(), nil)
		reason(t, err, gpreempt.ReasonLeasesTotal)
		// The admins have a limit of their own, which is the same.
		admin := request()
		admin.Client = ClientID{}
		for range 4 {
			m.announce(t, admin)
		}
		_, _, err = m.Announce(admin, nil)
		reason(t, err, gpreempt.ReasonLeasesTotal)
		m.SetLimits(Limits{LeasesPerClient: 9, LeasesPerUser: 5, LeasesTotal: 5})
		m.announce(t, request())
		time.Sleep(time.Millisecond)
	})
}

func TestStopRefusesAndResumes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		m.running(t)
		m.announce(t, request())
		time.Sleep(time.Millisecond)
		m.takeLog()
		m.Stop()
		m.Stop()
		_, _, err := m.Announce(request(), func(LeaseID, Answer) { t.Error("an answer to a refused announcement") })
		reason(t, err, gpreempt.ReasonShuttingDown)
		time.Sleep(time.Millisecond)
		want := []string{
			"1ms record drain on=true",
			"1ms record target=100@1 suspended->resuming cause=draining",
			"1ms resume 100@1",
			"1.35ms record target=100@1 resuming->running cause=done took=350µs",
		}
		if diff := cmp.Diff(want, m.takeLog()); diff != "" {
			t.Error(diff)
		}
		m.View(func(c *Core) {
			if c.Away() != 0 || !c.Draining() {
				t.Errorf("%d targets away, draining %v", c.Away(), c.Draining())
			}
		})
	})
}

// The watchdog hears from Run however little, and however much, happens; the lock
// is free then, or a scheduler that hangs would not be noticed.
func TestRunBeats(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		ctx, cancel := context.WithCancel(t.Context())
		var beats []Time
		done := make(chan error)
		go func() {
			done <- m.Run(ctx, 100*time.Millisecond, func() {
				m.View(func(*Core) {})
				beats = append(beats, m.Now())
			})
		}()
		time.Sleep(time.Second)
		for range 1000 {
			m.Post(Tick{})
			time.Sleep(time.Millisecond)
		}
		m.announce(t, request())
		time.Sleep(time.Second)
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		last := Time(0)
		for _, at := range append(beats, m.Now()) {
			if at > last+100*time.Millisecond {
				t.Errorf("no beat from %v to %v", last, at)
			}
			last = at
		}
		if len(beats) > 60 {
			t.Errorf("%d beats in 3s: Run spins", len(beats))
		}
	})
}

// brokenTimer fails like a file descriptor that was closed under it.
type brokenTimer struct{}

func (brokenTimer) Set(time.Duration) error { return nil }
func (brokenTimer) Wait() error             { return errors.New("bad file descriptor") }
func (brokenTimer) Close() error            { return nil }

// unsettable is a timer that cannot be set.
type unsettable struct{ Timer }

func (unsettable) Set(time.Duration) error { return errors.New("invalid argument") }

func TestRunEndsWithItsContextAndFailsWithItsTimer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Minute, cancel)
		if err := m.Run(ctx, time.Second, func() {}); err != nil || m.Now() != time.Minute {
			t.Errorf("at %v: %v", m.Now(), err)
		}
		if err := m.timer.Wait(); err == nil {
			t.Error("the timer is not closed")
		}
		if err := m.timer.Close(); err != nil {
			t.Error("closing twice:", err)
		}

		m.timer = brokenTimer{}
		err := m.Run(t.Context(), time.Second, func() {})
		if diff := cmp.Diff("scheduler: the timer failed: bad file descriptor", fmt.Sprint(err)); diff != "" {
			t.Error(diff)
		}
		m.timer = unsettable{testutil.NewTimer()}
		err = m.Run(t.Context(), time.Second, func() {})
		if diff := cmp.Diff("scheduler: the timer failed: timer closed", fmt.Sprint(err)); diff != "" {
			t.Error(diff)
		}
	})
}

// Records stand before the effects they describe, also when many come at once.
func TestRecordsComeBeforeEffects(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		m.see(beta)
		m.takeLog()
		m.running(t)
		_, _, err := m.Announce(request(), func(_ LeaseID, a Answer) { m.note("answer %v", a.Reason) })
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(500 * time.Microsecond)
		m.Post(Alarm{GPU: 1})
		time.Sleep(500 * time.Microsecond)
		want := []string{
			"0s record lease=1 none->requested cause=announced",
			"0s record lease=1 requested->quiescing cause=started",
			"0s record target=100@1 running->suspending cause=lease lease=1",
			"0s suspend 100@1",
			"0s record target=101@1 running->suspending cause=lease lease=1",
			"0s suspend 101@1",
			"400µs record target=100@1 suspending->suspended cause=done took=400µs",
			"400µs record target=101@1 suspending->suspended cause=done took=400µs",
			"400µs record lease=1 quiescing->held cause=quiet took=400µs",
			"400µs answer done",
			"500µs record breaker gpu=1 open=true cause=alarm",
			"500µs record target=100@1 suspended->resuming cause=breaker-open",
			"500µs resume 100@1",
			"500µs record target=101@1 suspended->resuming cause=breaker-open",
			"500µs resume 101@1",
			"850µs record target=100@1 resuming->running cause=done took=350µs",
			"850µs record target=101@1 resuming->running cause=done took=350µs",
		}
		got := m.takeLog()
		// The two results of one instant come in either order.
		slices.Sort(got[6:8])
		slices.Sort(got[15:])
		if diff := cmp.Diff(want, got); diff != "" {
			t.Error(diff)
		}
	})
}
