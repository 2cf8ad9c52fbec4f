package events_test

import (
	"math"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/gpreempt/gpreempt/internal/events"
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
				{Kind: scheduler.RecordShadow, FromTarget: running, ToTarget: suspended},
				{Kind: scheduler.RecordShadow, FromTarget: suspended, ToTarget: running},
			},
			events.Stats{ShadowSuspends: 1},
		},
		{
			"what is no target's and no lease's",
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
	l.Answered(scheduler.Answer{Quiesced: true, Reason: scheduler.QuiesceDone, Waited: 4 * time.Millisecond}, events.Stages{})
	l.Answered(scheduler.Answer{Reason: scheduler.QuiesceMaxWait, Waited: 20 * time.Millisecond}, events.Stages{})
	l.Answered(scheduler.Answer{Reason: scheduler.QuiesceShareFloor}, events.Stages{})
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

func TestPercentilesAreOverTheLastSamplesAndTheMeanOverAll(t *testing.T) {
	l := events.NewLog(1)
	const extra = 1000
	for n := range events.LatencySamples + extra {
		l.Append(time.Time{}, target(scheduler.TargetSuspending, scheduler.TargetSuspended, scheduler.CauseDone, time.Duration(n)), "")
	}
	// Kept are extra .. extra+4095; the p-th percentile is the ceil(p*4096/100)-th.
	want := events.Latency{
		Count: events.LatencySamples + extra,
		Mean:  (events.LatencySamples + extra - 1) / 2,
		P50:   extra + 2048 - 1,
		P95:   extra + 3892 - 1,
		P99:   extra + 4056 - 1,
		Max:   extra + 4096 - 1,
	}
	if diff := cmp.Diff(want, l.Stats().Suspend); diff != "" {
		t.Errorf("latency (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(l.Stats(), l.Stats()); diff != "" {
		t.Errorf("Stats changed what it read:\n%s", diff)
	}
}

func TestMeanSurvivesSumsOver64Bits(t *testing.T) {
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

// A nearest-rank percentile is the smallest sample that at least so many percent
// of the samples do not exceed.
func TestPercentilesHoldTheirDefinition(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		samples := rapid.SliceOfN(rapid.Int64Range(0, 50), 1, 300).Draw(t, "samples")
		l := events.NewLog(1)
		for _, s := range samples {
			l.Append(time.Time{}, target(scheduler.TargetResuming, scheduler.TargetRunning, scheduler.CauseDone, time.Duration(s)), "")
		}
		percentile := func(percent int) time.Duration {
			for candidate := int64(0); ; candidate++ {
				within := 0
				for _, s := range samples {
					if s <= candidate {
						within++
					}
				}
				if within*100 >= percent*len(samples) {
					return time.Duration(candidate)
				}
			}
		}
		sum := int64(0)
		for _, s := range samples {
			sum += s
		}
		want := events.Latency{
			Count: uint64(len(samples)),
			Mean:  time.Duration(sum / int64(len(samples))),
			P50:   percentile(50), P95: percentile(95), P99: percentile(99), Max: percentile(100),
		}
		if diff := cmp.Diff(want, l.Stats().Resume); diff != "" {
			t.Fatalf("latency (-want +got):\n%s", diff)
		}
	})
}

func BenchmarkStats(b *testing.B) {
	l := events.NewLog(1)
	for n := range 2 * events.LatencySamples {
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
