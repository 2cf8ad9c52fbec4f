package events

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

func TestCountersAreByCauseMechanismAndEnd(t *testing.T) {
	const (
		running    = scheduler.TargetRunning
		suspending = scheduler.TargetSuspending
		suspended  = scheduler.TargetSuspended
		resuming   = scheduler.TargetResuming
	)
	l := NewLog(4)
	moves := func(at scheduler.Time, from, to scheduler.TargetState, cause scheduler.Cause, mechanism string) {
		l.Append(time.Time{}, scheduler.Record{
			Kind: scheduler.RecordTarget, At: at, FromTarget: from, ToTarget: to, Cause: cause, Took: time.Millisecond,
		}, mechanism)
	}
	moves(10*time.Second, running, suspending, scheduler.CauseLease, "")
	moves(11*time.Second, running, suspending, scheduler.CauseLease, "") // another: two are away from here on
	moves(12*time.Second, suspending, suspended, scheduler.CauseDone, "dbgtrap")
	moves(12*time.Second, suspending, suspended, scheduler.CauseDone, "")
	moves(13*time.Second, suspended, suspended, scheduler.CauseClass, "") // no move
	moves(14*time.Second, suspended, resuming, scheduler.CauseShareFloor, "")
	moves(15*time.Second, resuming, resuming, scheduler.CauseFailed, "")
	moves(15*time.Second, resuming, resuming, scheduler.CauseRetry, "")
	moves(16*time.Second, resuming, scheduler.TargetQuarantined, scheduler.CauseQuarantine, "")
	l.Append(time.Time{}, scheduler.Record{Kind: scheduler.RecordLease, ToLease: scheduler.LeaseEnded, End: scheduler.EndExpired, Took: time.Second}, "")
	l.Append(time.Time{}, scheduler.Record{Kind: scheduler.RecordBreaker, GPU: 7, On: true, Cause: scheduler.CauseAlarm}, "")
	l.Append(time.Time{}, scheduler.Record{Kind: scheduler.RecordBreaker, GPU: 7, Cause: scheduler.CauseCooledDown}, "")
	l.Append(time.Time{}, scheduler.Record{Kind: scheduler.RecordReset, GPU: 7, Class: gpreempt.Offline}, "") // of a process that is not known
	l.Refused(gpreempt.ReasonRateLimited)
	l.Disturbed(7, 3)

	var got []string
	for line := range strings.Lines(scrape(t, MetricsSnapshot{Log: l, Now: 20 * time.Second})) {
		line = strings.TrimSuffix(line, "\n")
		counted := strings.Contains(line, "_total") || strings.Contains(line, "_count") || strings.HasPrefix(line, "gpreempt_lease_seconds_bucket")
		if counted && !strings.HasPrefix(line, "#") && !strings.HasSuffix(line, " 0") {
			got = append(got, strings.TrimPrefix(line, "gpreempt_"))
		}
	}
	slices.Sort(got)
	want := []string{
		`events_overwritten_total 9`,
		`events_total 13`,
		`failures_total{cause="failed",during="resume"} 1`,
		`gpu_attach_cycles_total{gpu="7"} 3`,
		`gpu_breaker_openings_total{cause="alarm",gpu="7"} 1`,
		`gpu_queue_resets_total{class="unknown",gpu="7"} 1`,
		`lease_seconds_bucket{le="+Inf"} 1`,
		`lease_seconds_bucket{le="1"} 1`,
		`lease_seconds_bucket{le="10"} 1`,
		`lease_seconds_bucket{le="3600"} 1`,
		`lease_seconds_bucket{le="5"} 1`,
		`lease_seconds_bucket{le="60"} 1`,
		`lease_seconds_bucket{le="600"} 1`,
		`lease_seconds_count 1`,
		`leases_ended_total{end="expired"} 1`,
		// One from 10 to 11, two until 16, and the one that is left until 20.
		`offline_suspended_seconds_total 15`,
		`preemptions_total{cause="lease"} 2`,
		`quarantines_total 1`,
		`refusals_total{reason="RATE_LIMITED"} 1`,
		`resume_seconds_count 1`,
		`resumes_total{cause="share-floor"} 1`,
		`suspend_seconds_count 2`,
		`suspends_total{mechanism="dbgtrap"} 1`,
		`suspends_total{mechanism="none"} 1`,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("counters (-want +got):\n%s", diff)
	}
}
