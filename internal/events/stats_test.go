package events_test

import (
	"math"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/gpreempt/gpreempt/internal/events"
	"github.com/gpreempt/gpreempt/internal/stat"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// target returns a record of a target that changed state.
func target(from, to scheduler.TargetState, cause scheduler.Cause, took time.Duration) scheduler.Record {
	return scheduler.Record{Kind: scheduler.RecordTarget, FromTarget: from, ToTarget: to, Cause: cause, Took: took}
}

// one returns the latency of a single duration.
func one(d time.Duration) events.Latency {
	return events.Latency{Count: 1, Mean: d, P50: d, P95: d, P99: d, Max: d}
}

func TestStatsCountWhatRecordsSay(t *testing.T) {
	const (
		running     = scheduler.TargetRunning
		suspending  = scheduler.TargetSuspending
		suspended   = scheduler.TargetSuspended
		resuming    = scheduler.TargetResuming
		quarantined = scheduler.TargetQuarantined
	)
	tests := []struct {
		name    string
		records []scheduler.Record
		want    events.Stats
	}{
		{
			"a suspend",
			[]scheduler.Record{
				target(running, suspending, scheduler.CauseLease, 0),
				target(suspending, suspended, scheduler.CauseDone, 3*time.Millisecond),
			},
			events.Stats{Suspends: 1, Suspend: one(3 * time.Millisecond)},
		},
		{
			"a resume",
			[]scheduler.Record{
				target(suspended, resuming, scheduler.CauseLeaseEnded, 0),
				target(resuming, running, scheduler.CauseDone, 2*time.Millisecond),
			},
			events.Stats{Resumes: 1, Resume: one(2 * time.Millisecond)},
		},
		{
			"forced resumes",
			[]scheduler.Record{
				target(suspended, resuming, scheduler.CauseShareFloor, 0),
				target(suspended, resuming, scheduler.CauseMaxSuspend, 0),
				target(suspended, resuming, scheduler.CauseDrain, 0),
			},
			events.Stats{ForcedResumes: 2},
		},
		{
			"a suspend that fails, and the resume that undoes it",
			[]scheduler.Record{
				target(suspending, resuming, scheduler.CauseFailed, 0),
				target(resuming, quarantined, scheduler.CauseQuarantine, 2*time.Millisecond),
				target(quarantined, running, scheduler.CauseQuarantineOver, 0),
			},
			events.Stats{Failures: 1, Resumes: 1, Resume: one(2 * time.Millisecond)},
		},
		{
			"a resume that fails twice",
			[]scheduler.Record{
				target(suspended, resuming, scheduler.CauseLeaseEnded, 0),
				target(resuming, resuming, scheduler.CauseHardware, time.Second),
				target(resuming, resuming, scheduler.CauseRetry, 0),
				target(resuming, resuming, scheduler.CauseFailed, time.Second),
				target(resuming, resuming, scheduler.CauseRetry, 0),
				target(resuming, quarantined, scheduler.CauseQuarantine, time.Millisecond),
			},
			events.Stats{Failures: 2, Resumes: 1, Resume: one(time.Millisecond)},
		},
		{
			"a suspend that is stuck, is resumed as soon as it returns, and is not retried",
			[]scheduler.Record{
				target(suspending, suspending, scheduler.CauseStuck, 2*time.Second),
				target(suspending, suspended, scheduler.CauseDone, 3*time.Second),
				target(suspended, resuming, scheduler.CauseStuck, 0),
				target(resuming, quarantined, scheduler.CauseStuck, time.Millisecond),
			},
			events.Stats{Suspends: 1, Suspend: one(3 * time.Second), Failures: 1, Resumes: 1, Resume: one(time.Millisecond)},
		},
		{
			"quarantine for another reason",
			[]scheduler.Record{
				target(running, quarantined, scheduler.CauseAlarm, 0),
				target(quarantined, quarantined, scheduler.CauseAlarm, 0),
			},
			events.Stats{Failures: 1},
		},
		{
			"a second suspend for a queue born meanwhile",
			[]scheduler.Record{
				target(suspended, suspending, scheduler.CauseNewQueue, 0),
				target(suspending, suspended, scheduler.CauseDone, time.Millisecond),
			},
			events.Stats{Suspends: 1, Suspend: one(time.Millisecond)},
		},
		{
			"leases",
			[]scheduler.Record{
				{Kind: scheduler.RecordLease, ToLease: scheduler.LeaseWaiting, Cause: scheduler.CauseAnnounced},
				{Kind: scheduler.RecordLease, FromLease: scheduler.LeaseQuiescing, ToLease: scheduler.LeaseHeld, Cause: scheduler.CauseCoalesced},
				{Kind: scheduler.RecordLease, FromLease: scheduler.LeaseHeld, ToLease: scheduler.LeaseEnded, Took: time.Minute},
			},
			events.Stats{Coalesced: 1, Lease: one(time.Minute)},
		},
		{
			"shadow",
			[]scheduler.Record{
				{Kind: scheduler.RecordShadow, FromTarget: running, ToTarget: suspended, Shadow: &scheduler.Shadowed{}},
				{Kind: scheduler.RecordShadow, FromTarget: suspended, ToTarget: running, Shadow: &scheduler.Shadowed{}},
			},
			events.Stats{ShadowSuspends: 1},
		},
		{
			"records of neither a target nor a lease",
			[]scheduler.Record{
				{Kind: scheduler.RecordBreaker, GPU: 7, On: true, Cause: scheduler.CauseHardware},
				{Kind: scheduler.RecordDrain, On: true},
				{Kind: scheduler.RecordPolicy},
			},
			events.Stats{},
		},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			l := events.NewLog(1) // counts do not depend on what is kept
			for _, r := range test.records {
				l.Append(time.Time{}, r, "")
			}
			if diff := cmp.Diff(test.want, l.Stats()); diff != "" {
				t.Errorf("statistics (-want +got):\n%s", diff)
			}
		})
	}
}

func TestStatsCountAnswers(t *testing.T) {
	l := events.NewLog(1)
	l.Answered(scheduler.Answer{Quiesced: true, Reason: scheduler.CauseDone, Waited: 4 * time.Millisecond}, events.Stages{})
	l.Answered(scheduler.Answer{Reason: scheduler.CauseMaxWait, Waited: 20 * time.Millisecond}, events.Stages{})
	l.Answered(scheduler.Answer{Reason: scheduler.CauseShareFloor}, events.Stages{})
	want := events.Stats{Announcements: 3, Quiesced: 1, MaxWaitPassed: 1, Quiesce: one(4 * time.Millisecond)}
	if diff := cmp.Diff(want, l.Stats()); diff != "" {
		t.Errorf("statistics (-want +got):\n%s", diff)
	}
}

func TestAdminVerbsCountInNoStatistic(t *testing.T) {
	l := events.NewLog(1)
	l.AppendAdmin(time.Time{}, "suspend by uid 0", target(scheduler.TargetSuspending, scheduler.TargetSuspended, scheduler.CauseDone, 1))
	if diff := cmp.Diff(events.Stats{}, l.Stats()); diff != "" {
		t.Errorf("statistics (-want +got):\n%s", diff)
	}
}

func TestMeansOfSumsOver64BitsAreExact(t *testing.T) {
	l := events.NewLog(1)
	for range 4 {
		l.Append(time.Time{}, scheduler.Record{Kind: scheduler.RecordLease, ToLease: scheduler.LeaseEnded, Took: math.MaxInt64}, "")
	}
	want := one(math.MaxInt64)
	want.Count = 4
	if diff := cmp.Diff(want, l.Stats().Lease); diff != "" {
		t.Errorf("latency (-want +got):\n%s", diff)
	}
}

func TestPercentilesAreThoseOfTheSamplesRoundedUpByOneBucket(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		samples := rapid.SliceOfN(rapid.Int64Range(0, int64(time.Hour)), 1, 60).Draw(t, "samples")
		l := events.NewLog(1)
		for i := range samples {
			samples[i] >>= rapid.IntRange(0, 40).Draw(t, "shift")
			l.Append(time.Time{}, target(scheduler.TargetResuming, scheduler.TargetRunning, scheduler.CauseDone, time.Duration(samples[i])), "")
		}
		got := l.Stats().Resume
		mean := time.Duration(math.Round(stat.Mean(samples)))
		if got.Count != uint64(len(samples)) || got.Max != time.Duration(slices.Max(samples)) || (got.Mean-mean).Abs() > 1 {
			t.Fatalf("%+v of %v, want the mean %v", got, samples, mean)
		}
		slices.Sort(samples)
		for q, got := range map[float64]time.Duration{0.5: got.P50, 0.95: got.P95, 0.99: got.P99} {
			exact := time.Duration(stat.Quantile(samples, q))
			// What is below a microsecond counts as 0, and a bucket ends 9.06 % above where it begins.
			low, high := exact-1, exact*11/10
			if exact <= time.Microsecond {
				low, high = 0, time.Microsecond
			}
			if got < low || got > high {
				t.Fatalf("the quantile %v of %v is %v, want %v to %v", q, samples, got, low, high)
			}
		}
	})
}

func TestReadingTheStatisticsChangesNothing(t *testing.T) {
	l := events.NewLog(1)
	for n := range 100 {
		l.Append(time.Time{}, target(scheduler.TargetSuspending, scheduler.TargetSuspended, scheduler.CauseDone, time.Duration(n)*time.Millisecond), "")
	}
	first := l.Stats()
	l.Stats()
	if diff := cmp.Diff(first, l.Stats()); diff != "" {
		t.Errorf("statistics, read again (-first +second):\n%s", diff)
	}
}

func BenchmarkStats(b *testing.B) {
	l := events.NewLog(1)
	for n := range 10_000 {
		took := time.Duration(n * 7919 % 104729)
		l.Append(time.Time{}, target(scheduler.TargetSuspending, scheduler.TargetSuspended, scheduler.CauseDone, took), "")
		l.Append(time.Time{}, target(scheduler.TargetResuming, scheduler.TargetRunning, scheduler.CauseDone, took), "")
	}
	b.ReportAllocs()
	for b.Loop() {
		l.Stats()
	}
}

func TestRefusalsAreCountedByReason(t *testing.T) {
	l := events.NewLog(1)
	if got := l.Stats().Refused; got != nil {
		t.Errorf("refused before anything was: %v", got)
	}
	l.Refused(gpreempt.ReasonRateLimited)
	first := l.Stats().Refused
	l.Refused(gpreempt.ReasonRateLimited)
	l.Refused(gpreempt.ReasonLeasesPerUser)
	got := []map[gpreempt.Reason]uint64{first, l.Stats().Refused}
	want := []map[gpreempt.Reason]uint64{
		{gpreempt.ReasonRateLimited: 1},
		{gpreempt.ReasonRateLimited: 2, gpreempt.ReasonLeasesPerUser: 1},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("refusals, and after two more (-want +got):\n%s", diff)
	}
}
