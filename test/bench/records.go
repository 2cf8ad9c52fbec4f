package main

import (
	"context"
	"time"

	"github.com/gpreempt/gpreempt/internal/events"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// pair is what a lease that suspends one target writes into the event log, from its
// announcement until the target runs again.
var pair = []scheduler.Record{
	{Kind: scheduler.RecordLease, Lease: 1, ToLease: scheduler.LeaseWaiting, Cause: scheduler.CauseAnnounced},
	{Kind: scheduler.RecordLease, Lease: 1, FromLease: scheduler.LeaseWaiting, ToLease: scheduler.LeaseQuiescing, Cause: scheduler.CauseStarted},
	{Kind: scheduler.RecordTarget, Target: gpreempt.ProcessKey{PID: 1}, FromTarget: scheduler.TargetRunning, ToTarget: scheduler.TargetSuspending, Cause: scheduler.CauseLease},
	{Kind: scheduler.RecordTarget, Target: gpreempt.ProcessKey{PID: 1}, FromTarget: scheduler.TargetSuspending, ToTarget: scheduler.TargetSuspended, Cause: scheduler.CauseDone, Took: time.Millisecond},
	{Kind: scheduler.RecordLease, Lease: 1, FromLease: scheduler.LeaseQuiescing, ToLease: scheduler.LeaseHeld, Cause: scheduler.CauseQuiet},
	{Kind: scheduler.RecordLease, Lease: 1, FromLease: scheduler.LeaseHeld, ToLease: scheduler.LeaseEnded, End: scheduler.EndCompleted, Took: 5 * time.Millisecond},
	{Kind: scheduler.RecordTarget, Target: gpreempt.ProcessKey{PID: 1}, FromTarget: scheduler.TargetSuspended, ToTarget: scheduler.TargetResuming, Cause: scheduler.CauseLeaseEnded},
	{Kind: scheduler.RecordTarget, Target: gpreempt.ProcessKey{PID: 1}, FromTarget: scheduler.TargetResuming, ToTarget: scheduler.TargetRunning, Cause: scheduler.CauseDone, Took: time.Millisecond},
}

// recordsTurn writes down what the daemon does of an announcement and its Complete: what
// would be saved without event log, statistics and metrics.
func recordsTurn(s *series) turn {
	log := events.NewLog(16384)
	answer := scheduler.Answer{Quiesced: true, Reason: scheduler.QuiesceDone, Suspended: 1, Waited: time.Millisecond}
	return func(context.Context) error {
		return s.time(func() error {
			now := time.Now()
			for _, r := range pair {
				log.Append(now, r, "sim")
			}
			log.Answered(answer, events.Stages{Decide: 20 * time.Microsecond, Reply: 10 * time.Microsecond})
			return nil
		})
	}
}
