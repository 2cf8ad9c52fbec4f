package bench

import (
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/events"
	"github.com/gpreempt/gpreempt/internal/testutil"
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

// BenchmarkRecords tells which share of an announcement and its Complete, over gRPC and
// with one target, is the event log with all that metrics and statistics read from
// it: what would be saved without. The two take turns. At most 3 % is wanted.
func BenchmarkRecords(b *testing.B) {
	client := serveDaemon(b, testutil.TempSocketDir(b), 1, 1)
	log := events.NewLog(16384)
	answer := scheduler.Answer{Quiesced: true, Reason: scheduler.QuiesceDone, Suspended: 1, Waited: time.Millisecond}
	now := time.Now()
	var calls, records time.Duration
	request := &gpreemptv1.NotifyOnlineRequest{Ttl: durationpb.New(time.Minute), MaxWait: durationpb.New(time.Second)}
	for b.Loop() {
		began := time.Now()
		resp, err := client.NotifyOnline(b.Context(), request)
		if err != nil {
			b.Fatal(err)
		}
		if _, err := client.Complete(b.Context(), &gpreemptv1.CompleteRequest{LeaseId: resp.GetLeaseId()}); err != nil {
			b.Fatal(err)
		}
		between := time.Now()
		for _, r := range pair {
			log.Append(now, r, "sim")
		}
		log.Answered(answer, events.Stages{Decide: 20 * time.Microsecond, Reply: 10 * time.Microsecond})
		calls += between.Sub(began)
		records += time.Since(between)
	}
	b.ReportMetric(float64(calls.Nanoseconds())/float64(b.N), "ns/pair")
	b.ReportMetric(float64(records.Nanoseconds())/float64(b.N), "ns/records")
	b.ReportMetric(100*float64(records)/float64(calls), "%")
}
