package trial

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/lab/evidence"
)

// breakers is a daemon whose GPU has an open breaker for a time.
type breakers struct {
	gpreemptv1.AdminServiceClient
	closes time.Time
}

func (b *breakers) ListGpus(context.Context, *gpreemptv1.ListGpusRequest, ...grpc.CallOption) (*gpreemptv1.ListGpusResponse, error) {
	return &gpreemptv1.ListGpusResponse{Gpus: []*gpreemptv1.Gpu{{}, {BreakerOpen: time.Now().Before(b.closes)}}}, nil
}

// A repeat does not begin while a breaker is open that an earlier one caused, but does in the end.
func TestRepeatWaitsForBreakers(t *testing.T) {
	for open, want := range map[time.Duration]time.Duration{0: 0, 30 * time.Second: 30 * time.Second, time.Hour: breakerTime + pollTime} {
		synctest.Test(t, func(t *testing.T) {
			began := time.Now()
			d := &daemon{admin: &breakers{closes: began.Add(open)}}
			if err := d.awaitBreakers(t.Context()); err != nil {
				t.Fatal(err)
			}
			if got := time.Since(began); got != want {
				t.Errorf("open for %v: it waited for %v, want %v", open, got, want)
			}
		})
	}
}

// What a repeat gets is of its targets and between its times; what has not ended ends with it.
func TestSuspensionsOfARepeatAreThoseOfItsTargetsInItsTime(t *testing.T) {
	const (
		running, suspending  = gpreemptv1.TargetState_TARGET_STATE_RUNNING, gpreemptv1.TargetState_TARGET_STATE_SUSPENDING
		suspended, resuming  = gpreemptv1.TargetState_TARGET_STATE_SUSPENDED, gpreemptv1.TargetState_TARGET_STATE_RESUMING
		quarantined, breaker = gpreemptv1.TargetState_TARGET_STATE_QUARANTINED, gpreemptv1.EventKind_EVENT_KIND_BREAKER
	)
	moved := func(at int, id string, from, to gpreemptv1.TargetState, cause string, took int) *gpreemptv1.Event {
		return &gpreemptv1.Event{
			Kind: gpreemptv1.EventKind_EVENT_KIND_TARGET, Clock: durationpb.New(time.Duration(at) * time.Millisecond), TargetId: id, FromTarget: from, ToTarget: to,
			Cause: cause, Took: durationpb.New(time.Duration(took) * time.Millisecond),
		}
	}
	w := &watcher{ours: map[string]bool{"1@1": true, "2@1": true}, events: []*gpreemptv1.Event{
		// One that is over before the repeat begins is no part of it.
		moved(1, "2@1", running, suspending, "lease", 0), moved(2, "2@1", suspending, suspended, "done", 1),
		moved(6, "2@1", suspended, resuming, "lease-ended", 0), moved(7, "2@1", resuming, running, "done", 1),
		moved(10, "1@1", running, suspending, "lease", 0), moved(15, "1@1", suspending, suspended, "done", 4),
		moved(120, "1@1", suspended, resuming, "lease-ended", 0), moved(125, "1@1", resuming, running, "done", 3),
		moved(130, "3@1", running, suspending, "lease", 0), moved(131, "3@1", suspending, suspended, "done", 1),
		moved(140, "2@1", running, suspending, "lease", 0), moved(142, "2@1", suspending, running, "failed", 2),
		moved(150, "2@1", running, suspending, "lease", 0), moved(155, "2@1", suspending, suspended, "done", 5),
		{Kind: breaker, GpuId: 7, Cause: "alarm", Message: "a hang"},
		moved(160, "1@1", running, quarantined, "quarantine", 0),
		moved(300, "2@1", suspended, resuming, "lease-ended", 0), moved(301, "2@1", resuming, running, "done", 1),
	}}
	got := evidence.Repeat{}
	alarms := w.collect(&got, 100*time.Millisecond, 200*time.Millisecond)
	want := evidence.Repeat{
		Suspends: []evidence.Timed{{At: 50, MS: 5}}, Resumes: []evidence.Timed{{At: 22, MS: 3}},
		Spans: []evidence.Span{{From: 0, To: 20, What: "suspended", Name: "1@1"}, {From: 55, To: 100, What: "suspended", Name: "2@1"}},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	var said []string
	for _, a := range alarms {
		said = append(said, a.From+": "+a.Text)
	}
	if diff := cmp.Diff([]string{"breaker of GPU 7: alarm: a hang", "target 1@1: quarantined, quarantine"}, said); diff != "" {
		t.Errorf("alarms (-want +got):\n%s", diff)
	}
}
