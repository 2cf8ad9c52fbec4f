package spans_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/lab/spans"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// lease and target are records of one lease and of one target, at a second.
func lease(at int, from, to scheduler.LeaseState, cause scheduler.Cause) scheduler.Record {
	r := scheduler.Record{At: time.Duration(at) * time.Second, Kind: scheduler.RecordLease, Lease: 7, FromLease: from, ToLease: to, Cause: cause}
	if to == scheduler.LeaseEnded {
		r.End = scheduler.EndCompleted
	}
	return r
}

func target(at int, from, to scheduler.TargetState, cause scheduler.Cause, by scheduler.LeaseID) scheduler.Record {
	return scheduler.Record{
		At: time.Duration(at) * time.Second, Kind: scheduler.RecordTarget, Target: gpreempt.ProcessKey{PID: 1, Start: 1},
		FromTarget: from, ToTarget: to, Cause: cause, Lease: by, Took: time.Millisecond,
	}
}

func breaker(at int, on bool) scheduler.Record {
	return scheduler.Record{At: time.Duration(at) * time.Second, Kind: scheduler.RecordBreaker, GPU: 5, On: on, Cause: scheduler.CauseAlarm}
}

// text writes a span in a line.
func text(s spans.Span) string {
	line := fmt.Sprintf("%v %v-%v", s.Kind, s.Begin, s.End)
	if s.Lease != 0 {
		line += fmt.Sprintf(" lease=%d", s.Lease)
	}
	if s.Took != 0 {
		line += " took=" + s.Took.String()
	}
	if s.Clipped {
		line += " clipped"
	}
	if s.Open {
		line += " open"
	}
	if s.Ended != "" {
		line += " " + s.Ended
	}
	return line
}

// The states, for short.
const (
	none, waiting, quiescing, held, ended          = scheduler.LeaseNone, scheduler.LeaseWaiting, scheduler.LeaseQuiescing, scheduler.LeaseHeld, scheduler.LeaseEnded
	unseen, running, suspending, suspended         = scheduler.TargetNone, scheduler.TargetRunning, scheduler.TargetSuspending, scheduler.TargetSuspended
	resuming, quarantined, left                    = scheduler.TargetResuming, scheduler.TargetQuarantined, scheduler.TargetLeft
	announced, started, quiet, byLease, done, over = scheduler.CauseAnnounced, scheduler.CauseStarted, scheduler.CauseQuiet, scheduler.CauseLease, scheduler.CauseDone, scheduler.CauseLeaseEnded
)

func TestSpansOfRecords(t *testing.T) {
	for _, tc := range []struct {
		name    string
		records []scheduler.Record
		want    []string // what ended, in that order, then what is open at 20 s
	}{
		{
			"a lease that waits for its eta, and for a target that comes late",
			[]scheduler.Record{
				lease(1, none, waiting, announced), lease(3, waiting, quiescing, started), lease(4, quiescing, held, quiet),
				lease(6, held, quiescing, scheduler.CauseNewTarget), lease(7, quiescing, held, quiet), lease(9, held, ended, ""),
			},
			[]string{
				"requested 1s-3s lease=7 started", "announce 1s-4s lease=7 quiet", "quiescing 3s-4s lease=7 quiet", "online 4s-6s lease=7 new-target",
				"quiescing 6s-7s lease=7 quiet", "online 7s-9s lease=7 completed", "lease 1s-9s lease=7 completed",
			},
		},
		{
			"an answer before the GPUs are quiet",
			[]scheduler.Record{lease(1, none, waiting, announced), lease(1, waiting, quiescing, started), lease(2, quiescing, quiescing, "max-wait"), lease(5, quiescing, held, quiet)},
			[]string{"requested 1s-1s lease=7 started", "announce 1s-2s lease=7 max-wait", "quiescing 1s-5s lease=7 quiet", "lease 1s-20s lease=7 open", "online 5s-20s lease=7 open"},
		},
		{
			"a lease that ends before it is answered",
			[]scheduler.Record{lease(1, none, waiting, announced), lease(2, waiting, ended, "")},
			[]string{"announce 1s-2s lease=7 ended", "requested 1s-2s lease=7 completed", "lease 1s-2s lease=7 completed"},
		},
		{
			"a target with a new queue while it is suspended, and a resume that fails at first",
			[]scheduler.Record{
				target(1, unseen, running, scheduler.CauseSeen, 0), target(2, running, suspending, byLease, 7), target(3, suspending, suspended, done, 0),
				target(4, suspended, suspending, scheduler.CauseNewQueue, 0), target(5, suspending, suspended, done, 0), target(6, suspended, resuming, over, 0),
				target(7, resuming, resuming, scheduler.CauseFailed, 0), target(8, resuming, resuming, scheduler.CauseRetry, 0), target(9, resuming, quarantined, scheduler.CauseQuarantine, 0),
			},
			[]string{
				"running 1s-2s lease", "suspend 2s-3s lease=7 took=1ms done", "suspended 3s-4s lease=7 new-queue", "suspend 4s-5s lease=7 took=1ms done",
				"suspended 5s-6s lease=7 lease-ended", "resume 6s-9s lease=7 took=1ms quarantine", "quarantined 9s-20s open",
			},
		},
		{
			"a process that exits while it is suspended",
			[]scheduler.Record{target(2, running, suspending, byLease, 7), target(3, suspending, left, scheduler.CauseGone, 0)},
			[]string{"running 2s-2s clipped lease", "suspend 2s-3s lease=7 took=1ms gone"},
		},
		{
			"a ring that begins in the middle, and a clock that goes back",
			[]scheduler.Record{breaker(4, false), lease(6, held, ended, ""), target(5, resuming, running, done, 0), breaker(7, true)},
			[]string{
				"breaker open 4s-4s clipped alarm", "online 4s-6s lease=7 clipped completed", "lease 4s-6s lease=7 clipped completed", "resume 4s-6s took=1ms clipped done",
				"running 6s-20s open", "breaker open 7s-20s open",
			},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var b spans.Builder
			var all []spans.Span
			for _, r := range tc.records {
				all = b.Add(r, all)
			}
			var got []string
			for _, s := range b.Open(20*time.Second, all) {
				got = append(got, text(s))
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}
