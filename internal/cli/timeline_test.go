package cli

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/testutil/clitest"
)

func leaseChange(clock time.Duration, id string, from, to gpreemptv1.LeaseState, gpus ...uint32) *gpreemptv1.Event {
	return &gpreemptv1.Event{Kind: gpreemptv1.EventKind_EVENT_KIND_LEASE, LeaseId: id, FromLease: from, ToLease: to, GpuIds: gpus, Clock: clitest.Dur(clock)}
}

func targetChange(clock time.Duration, id string, to gpreemptv1.TargetState) *gpreemptv1.Event {
	return &gpreemptv1.Event{Kind: gpreemptv1.EventKind_EVENT_KIND_TARGET, TargetId: id, ToTarget: to, Clock: clitest.Dur(clock)}
}

// The daemon has been up for 100 s when the timeline begins, with a training that is suspended and
// a lease on the first GPU.
func TestTimelineHasTheShareOfEachState(t *testing.T) {
	const (
		none, requested  = gpreemptv1.LeaseState_LEASE_STATE_UNSPECIFIED, gpreemptv1.LeaseState_LEASE_STATE_REQUESTED
		quiescing, held  = gpreemptv1.LeaseState_LEASE_STATE_QUIESCING, gpreemptv1.LeaseState_LEASE_STATE_HELD
		ended, resuming  = gpreemptv1.LeaseState_LEASE_STATE_ENDED, gpreemptv1.TargetState_TARGET_STATE_RESUMING
		running          = gpreemptv1.TargetState_TARGET_STATE_RUNNING
		quarantined      = gpreemptv1.TargetState_TARGET_STATE_QUARANTINED
		ms               = time.Millisecond
		first, second    = uint32(63420), uint32(61531)
		trainer, another = "5001@1", "5002@1"
	)
	l := newTimeline()
	l.begin(0, topReading(100*time.Second))
	at := func(ms int) time.Duration { return 100*time.Second + time.Duration(ms)*time.Millisecond }
	for _, e := range []*gpreemptv1.Event{
		leaseChange(at(50), "9f-3", held, ended),
		targetChange(at(50), trainer, resuming),
		targetChange(at(60), trainer, running),
		leaseChange(at(110), "9f-4", none, requested, first, second),
		leaseChange(at(110), "9f-4", requested, quiescing),
		leaseChange(at(130), "9f-4", quiescing, held),
		leaseChange(at(140), "9f-5", none, quiescing, second), // does not hide the other lease
		leaseChange(at(150), "9f-5", quiescing, ended),
		leaseChange(at(150), "9f-4", held, ended),
		leaseChange(at(160), "old", held, ended), // began before
		targetChange(at(190), another, quarantined),
	} {
		l.event(e)
	}
	if got := l.advance(400 * ms); got != 2 {
		t.Errorf("the newest complete column is %d, want 2", got)
	}
	type rows struct{ First, Second, FirstBegun, SecondBegun, Trainer, Another, Server []int }
	got := rows{
		l.gpus[first].figures(0, 2, 2), l.gpus[second].figures(0, 2, 2), l.gpus[first].begun(0, 2), l.gpus[second].begun(0, 2),
		l.targets[trainer].figures(0, 2, 3), l.targets[another].figures(0, 2, 3), l.targets["7000@1"].figures(0, 2, 3),
	}
	want := rows{
		First: []int{0, 50, 20, 20, 0, 0}, Second: []int{0, 0, 20, 20, 0, 0}, FirstBegun: []int{0, 1, 0}, SecondBegun: []int{0, 2, 0},
		Trainer: []int{10, 50, 0, 0, 0, 0, 0, 0, 0}, Another: []int{0, 0, 0, 0, 0, 10, 0, 0, 100},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("rows (-want +got):\n%s", diff)
	}

	// The daemon is away for 200 ms; another begins with the same processes.
	l.end(400 * ms)
	l.begin(600*ms, topReading(time.Second))
	l.event(targetChange(1100*ms, trainer, running))
	l.advance(900 * ms)
	away := map[string][]int{
		"away": l.away.figures(3, 7, 1), "trainer": l.targets[trainer].figures(3, 7, 3), "another": l.targets[another].figures(3, 7, 3),
		"first": l.gpus[first].figures(3, 7, 2),
	}
	wantAway := map[string][]int{
		"away": {0, 100, 100, 0, 0}, "trainer": {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 100, 0, 0, 0, 0}, "another": {0, 0, 100, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
		"first": {0, 0, 0, 0, 0, 0, 0, 100, 0, 100},
	}
	if diff := cmp.Diff(wantAway, away); diff != "" {
		t.Errorf("rows after a restart of the daemon (-want +got):\n%s", diff)
	}
}

// A stream of events that ends without a failure begins again with a reading: what it has not, has
// ended meanwhile.
func TestTimelineBeginsAgainWithWhatAReadingHas(t *testing.T) {
	l := newTimeline()
	l.begin(0, topReading(100*time.Second))
	next := topReading(101 * time.Second)
	next.leases, next.targets = nil, next.targets[1:]
	l.begin(time.Second, next)
	newest := l.advance(1500 * time.Millisecond)
	got := [][]int{l.gpus[63420].figures(9, newest, 2), l.targets["5001@1"].figures(9, newest, 3), l.away.figures(0, newest, 1)}
	want := [][]int{{0, 100, 0, 0, 0, 0, 0, 0, 0, 0}, {0, 100, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, nil}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("rows (-want +got):\n%s", diff)
	}
}

func TestTimelineKeepsAMinuteOfABoundedNumberOfTargets(t *testing.T) {
	l := newTimeline()
	l.begin(0, topReading(0))
	for i := range 10 * keptTargets {
		id := string(rune('A'+i%26)) + string(rune('0'+i/26))
		l.event(targetChange(time.Second, id, gpreemptv1.TargetState_TARGET_STATE_SUSPENDED))
		l.event(targetChange(2*time.Second, id, gpreemptv1.TargetState_TARGET_STATE_GONE))
	}
	if len(l.targets) != keptTargets {
		t.Errorf("%d targets have tracks, want %d", len(l.targets), keptTargets)
	}
	// Later they are forgotten, and what was suspended an hour ago is not in the columns.
	newest := l.advance(time.Hour)
	if len(l.targets) != 3 {
		t.Errorf("%d targets have tracks an hour later, want those of the reading", len(l.targets))
	}
	whole := l.targets["5001@1"].figures(newest-columnCount+columnMargin+1, newest, 3)
	if len(whole) != 3*(columnCount-columnMargin) || whole[1] != 100 || whole[len(whole)-2] != 100 {
		t.Errorf("%d figures, the first column %v", len(whole), whole[:3])
	}
}
