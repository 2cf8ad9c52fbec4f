package spans_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/lab/spans"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// lease and target are events of one lease and of one target, at a second.
func lease(at int, from, to gpreemptv1.LeaseState, cause scheduler.Cause) *gpreemptv1.Event {
	e := &gpreemptv1.Event{
		Kind: gpreemptv1.EventKind_EVENT_KIND_LEASE, Clock: clock(at), LeaseId: "k3-7", FromLease: from, ToLease: to, Cause: string(cause),
	}
	if to == ended {
		e.End = gpreemptv1.LeaseEnd_LEASE_END_COMPLETED
	}
	if from == none {
		e.GpuIds = []uint32{5}
	}
	return e
}

func target(at int, from, to gpreemptv1.TargetState, cause scheduler.Cause, by string) *gpreemptv1.Event {
	return &gpreemptv1.Event{
		Kind: gpreemptv1.EventKind_EVENT_KIND_TARGET, Clock: clock(at), TargetId: "1@1", LeaseId: by, FromTarget: from, ToTarget: to, Cause: string(cause),
		Took: durationpb.New(time.Millisecond),
	}
}

func breaker(at int, cause scheduler.Cause) *gpreemptv1.Event {
	return &gpreemptv1.Event{Kind: gpreemptv1.EventKind_EVENT_KIND_BREAKER, Clock: clock(at), GpuId: 5, Cause: string(cause)}
}

func clock(at int) *durationpb.Duration { return durationpb.New(time.Duration(at) * time.Second) }

// text writes a span in a line.
func text(s spans.Span) string {
	line := fmt.Sprintf("%v %v-%v", s.Kind, s.Begin, s.End)
	if s.Lease != "" {
		line += " lease=" + s.Lease
	}
	if s.GPUs != nil && (s.Kind == spans.Lease || s.Kind == spans.Suspending) {
		line += fmt.Sprint(" of ", s.GPUs)
	}
	if s.Answered != 0 {
		line += fmt.Sprint(" answered ", s.Answered)
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
	none, waiting, quiescing    = gpreemptv1.LeaseState_LEASE_STATE_UNSPECIFIED, gpreemptv1.LeaseState_LEASE_STATE_REQUESTED, gpreemptv1.LeaseState_LEASE_STATE_QUIESCING
	held, ended                 = gpreemptv1.LeaseState_LEASE_STATE_HELD, gpreemptv1.LeaseState_LEASE_STATE_ENDED
	unseen, running, suspending = gpreemptv1.TargetState_TARGET_STATE_UNSPECIFIED, gpreemptv1.TargetState_TARGET_STATE_RUNNING, gpreemptv1.TargetState_TARGET_STATE_SUSPENDING
	suspended, resuming         = gpreemptv1.TargetState_TARGET_STATE_SUSPENDED, gpreemptv1.TargetState_TARGET_STATE_RESUMING
	quarantined, left           = gpreemptv1.TargetState_TARGET_STATE_QUARANTINED, gpreemptv1.TargetState_TARGET_STATE_GONE
	announced, started, quiet   = scheduler.CauseAnnounced, scheduler.CauseStarted, scheduler.CauseQuiet
	byLease, done, over         = scheduler.CauseLease, scheduler.CauseDone, scheduler.CauseLeaseEnded
)

func TestSpansOfEvents(t *testing.T) {
	for _, tc := range []struct {
		name   string
		events []*gpreemptv1.Event
		want   []string // what ended, in that order, then what is open at 20 s
	}{
		{
			"a lease that waits for its eta, and for a target that comes late",
			[]*gpreemptv1.Event{
				lease(1, none, waiting, announced), lease(3, waiting, quiescing, started), lease(4, quiescing, held, quiet),
				lease(6, held, quiescing, scheduler.CauseNewTarget), lease(7, quiescing, held, quiet), lease(9, held, ended, ""),
			},
			[]string{
				"requested 1s-3s lease=k3-7 started", "announce 1s-4s lease=k3-7 quiet", "quiescing 3s-4s lease=k3-7 quiet", "online 4s-6s lease=k3-7 new-target",
				"quiescing 6s-7s lease=k3-7 quiet", "online 7s-9s lease=k3-7 completed", "lease 1s-9s lease=k3-7 of [5] answered 4s completed",
			},
		},
		{
			"an answer before the GPUs are quiet",
			[]*gpreemptv1.Event{lease(1, none, waiting, announced), lease(1, waiting, quiescing, started), lease(2, quiescing, quiescing, "max-wait"), lease(5, quiescing, held, quiet)},
			[]string{"requested 1s-1s lease=k3-7 started", "announce 1s-2s lease=k3-7 max-wait", "quiescing 1s-5s lease=k3-7 quiet", "lease 1s-20s lease=k3-7 of [5] answered 2s open", "online 5s-20s lease=k3-7 open"},
		},
		{
			"a lease that ends before it is answered",
			[]*gpreemptv1.Event{lease(1, none, waiting, announced), lease(2, waiting, ended, "")},
			[]string{"announce 1s-2s lease=k3-7 ended", "requested 1s-2s lease=k3-7 completed", "lease 1s-2s lease=k3-7 of [5] answered 2s completed"},
		},
		{
			"a target with a new queue while it is suspended, and a resume that fails at first",
			[]*gpreemptv1.Event{
				target(1, unseen, running, scheduler.CauseSeen, ""), target(2, running, suspending, byLease, "k3-7"), target(3, suspending, suspended, done, ""),
				target(4, suspended, suspending, scheduler.CauseNewQueue, ""), target(5, suspending, suspended, done, ""), target(6, suspended, resuming, over, ""),
				target(7, resuming, resuming, scheduler.CauseFailed, ""), target(8, resuming, resuming, scheduler.CauseRetry, ""), target(9, resuming, quarantined, scheduler.CauseQuarantine, ""),
			},
			[]string{
				"running 1s-2s lease", "suspend 2s-3s lease=k3-7 took=1ms done", "suspended 3s-4s lease=k3-7 new-queue", "suspend 4s-5s lease=k3-7 took=1ms done",
				"suspended 5s-6s lease=k3-7 lease-ended", "resume 6s-9s lease=k3-7 took=1ms quarantine", "quarantined 9s-20s open",
			},
		},
		{
			"a suspend for a lease whose announcement was seen",
			[]*gpreemptv1.Event{lease(1, none, waiting, announced), target(2, running, suspending, byLease, "k3-7"), target(3, suspending, suspended, done, "")},
			[]string{
				"running 1s-2s clipped lease", "suspend 2s-3s lease=k3-7 of [5] took=1ms done", "announce 1s-20s lease=k3-7 open",
				"lease 1s-20s lease=k3-7 of [5] answered 20s open", "requested 1s-20s lease=k3-7 open", "suspended 3s-20s lease=k3-7 open",
			},
		},
		{
			"a process that exits while it is suspended",
			[]*gpreemptv1.Event{target(2, running, suspending, byLease, "k3-7"), target(3, suspending, left, scheduler.CauseGone, "")},
			[]string{"running 2s-2s clipped lease", "suspend 2s-3s lease=k3-7 took=1ms gone"},
		},
		{
			"a ring that begins in the middle, and a clock that goes back",
			[]*gpreemptv1.Event{breaker(4, scheduler.CauseCooledDown), lease(6, held, ended, ""), target(5, resuming, running, done, ""), breaker(7, scheduler.CauseAlarm)},
			[]string{
				"breaker open 4s-4s clipped cooled-down", "online 4s-6s lease=k3-7 clipped completed", "lease 4s-6s lease=k3-7 answered 6s clipped completed", "resume 4s-6s took=1ms clipped done",
				"running 6s-20s open", "breaker open 7s-20s open",
			},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var b spans.Builder
			var all []spans.Span
			for _, e := range tc.events {
				all = b.Add(e, all)
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
