package events_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	dto "github.com/prometheus/client_model/go"

	"github.com/gpreempt/gpreempt/internal/events"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// withoutHistograms returns the rest of the totals.
func withoutHistograms(t *events.Totals) events.Totals {
	rest := *t
	for _, h := range []**dto.Histogram{&rest.Decide, &rest.Wait, &rest.Reply, &rest.Quiesce, &rest.Suspend, &rest.Resume, &rest.Lease} {
		*h = nil
	}
	return rest
}

func TestTotalsAreByCauseMechanismAndEnd(t *testing.T) {
	const (
		running    = scheduler.TargetRunning
		suspending = scheduler.TargetSuspending
		suspended  = scheduler.TargetSuspended
		resuming   = scheduler.TargetResuming
	)
	l := events.NewLog(4)
	moves := func(at scheduler.Time, from, to scheduler.TargetState, cause scheduler.Cause, mechanism string) {
		r := target(from, to, cause, time.Millisecond)
		r.At = at
		l.Append(time.Time{}, r, mechanism)
	}
	moves(10*time.Second, running, suspending, scheduler.CauseLease, "")
	moves(11*time.Second, running, suspending, scheduler.CauseLease, "") // another: two are away from here on
	moves(12*time.Second, suspending, suspended, scheduler.CauseDone, "dbgtrap")
	moves(12*time.Second, suspending, suspended, scheduler.CauseDone, "criu")
	moves(13*time.Second, suspended, suspended, scheduler.CauseClass, "") // no move
	moves(14*time.Second, suspended, resuming, scheduler.CauseShareFloor, "")
	moves(15*time.Second, resuming, resuming, scheduler.CauseFailed, "")
	moves(15*time.Second, resuming, resuming, scheduler.CauseRetry, "")
	moves(16*time.Second, resuming, scheduler.TargetQuarantined, scheduler.CauseQuarantine, "")
	l.Append(time.Time{}, scheduler.Record{Kind: scheduler.RecordLease, ToLease: scheduler.LeaseEnded, End: scheduler.EndExpired, Took: time.Second}, "")
	l.Append(time.Time{}, scheduler.Record{Kind: scheduler.RecordBreaker, GPU: 7, On: true, Cause: scheduler.CauseAlarm}, "")
	l.Append(time.Time{}, scheduler.Record{Kind: scheduler.RecordBreaker, GPU: 7, Cause: scheduler.CauseCooledDown}, "")
	l.Refused(gpreempt.ReasonRateLimited)

	want := events.Totals{
		Ordered:  map[scheduler.Cause]uint64{scheduler.CauseLease: 2},
		Resuming: map[scheduler.Cause]uint64{scheduler.CauseShareFloor: 1},
		By:       map[string]uint64{"dbgtrap": 1, "criu": 1},
		Failures: map[events.Failure]uint64{{During: events.DuringResume, Cause: scheduler.CauseFailed}: 1}, Quarantined: 1,
		Openings: map[events.Opening]uint64{{GPU: 7, Cause: scheduler.CauseAlarm}: 1},
		Refused:  map[gpreempt.Reason]uint64{gpreempt.ReasonRateLimited: 1},
		// One from 10 to 11, two until 16, and the one that is left until 20.
		Away:     (1 + 2*5 + 4) * time.Second,
		Appended: 12, Overwritten: 8,
	}
	want.Ended[scheduler.EndExpired] = 1
	got := l.Totals(20 * time.Second)
	if diff := cmp.Diff(want, withoutHistograms(got)); diff != "" {
		t.Errorf("totals (-want +got):\n%s", diff)
	}
	if got.Suspend.GetSampleCount() != 2 || got.Suspend.GetSampleSum() != 0.002 {
		t.Errorf("suspends: %v, want 2 of 2 ms together", got.Suspend)
	}
	for _, bucket := range got.Lease.Bucket { // one lease of a second
		if want := uint64(min(1, int(bucket.GetUpperBound()))); bucket.GetCumulativeCount() != want {
			t.Errorf("%d leases of at most %v s, want %d", bucket.GetCumulativeCount(), bucket.GetUpperBound(), want)
		}
	}
	l.Refused(gpreempt.ReasonRateLimited)
	if got.Refused[gpreempt.ReasonRateLimited] != 1 {
		t.Error("totals that were given change")
	}
}
