package sim

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/gpreempt/gpreempt/lab/evidence"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// immediate is a policy that suspends at once and resumes at once, without a share floor.
func immediate() scheduler.Policy {
	p := scheduler.DefaultPolicy()
	p.Linger, p.ShareFloor, p.MaxSuspend = 0, 0, time.Minute
	return p
}

// recordedWork is a GPU with a target and two leases of 10 ms.
func recordedWork() Recording {
	return Recording{
		Length: time.Second, GPUs: []gpreempt.GPUID{7},
		Targets: []RecordedTarget{{
			Key: gpreempt.ProcessKey{PID: 1, Start: 1}, GPUs: []gpreempt.GPUID{7}, Until: time.Second,
			Suspends: []time.Duration{time.Millisecond, 3 * time.Millisecond}, Resumes: []time.Duration{2 * time.Millisecond},
		}},
		Leases: []RecordedLease{
			{GPUs: []gpreempt.GPUID{7}, Priority: 11, At: 100 * time.Millisecond, Work: 10 * time.Millisecond},
			{GPUs: []gpreempt.GPUID{7}, Priority: 11, At: 500 * time.Millisecond, Work: 10 * time.Millisecond},
		},
	}
}

func TestReplayTakesTheRecordedTimesOfSuspendsAndOfWork(t *testing.T) {
	got, err := Replay(recordedWork(), immediate(), Costs{})
	if err != nil {
		t.Fatal(err)
	}
	want := evidence.Repeat{
		Seconds: 1,
		Requests: []evidence.Request{
			{At: 100, Total: 11, Announce: 1, Service: 10, Preemptions: 1},
			{At: 500, Total: 13, Announce: 3, Service: 10, Preemptions: 1},
		},
		Suspends: []evidence.Timed{{At: 100, MS: 1}, {At: 500, MS: 3}},
		Resumes:  []evidence.Timed{{At: 111, MS: 2}, {At: 513, MS: 2}},
		Work:     1 - 2*0.012, WorkUnit: WorkUnit,
	}
	got.Work = float64(int(got.Work*1e6+0.5)) / 1e6
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestReplayWithoutRecordedSuspendsTakesTheCosts(t *testing.T) {
	rec := recordedWork()
	rec.Targets[0].Suspends, rec.Targets[0].Resumes = nil, nil
	got, err := Replay(rec, immediate(), Costs{Suspend: 5 * time.Millisecond, Resume: 4 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]evidence.Timed{{At: 100, MS: 5}, {At: 500, MS: 5}}, got.Suspends); diff != "" {
		t.Errorf("suspends (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]evidence.Timed{{At: 115, MS: 4}, {At: 515, MS: 4}}, got.Resumes); diff != "" {
		t.Errorf("resumes (-want +got):\n%s", diff)
	}
}

func TestReplayCountsAnswersBeforeTheGPUsAreQuiet(t *testing.T) {
	rec := recordedWork()
	rec.Targets[0].Suspends = []time.Duration{time.Second}
	got, err := Replay(rec, immediate(), Costs{})
	if err != nil {
		t.Fatal(err)
	}
	if got.NotQuiet != 2 || got.Requests[0].Announce != ms(immediate().MaxWait) {
		t.Errorf("%d not quiet, the first after %v ms", got.NotQuiet, got.Requests[0].Announce)
	}
}

func TestOfflineWorkDisturbsALeaseWhileItRunsOnItsGPUs(t *testing.T) {
	rec := recordedWork()
	rec.Targets = append(rec.Targets,
		RecordedTarget{Key: gpreempt.ProcessKey{PID: 2, Start: 1}, GPUs: []gpreempt.GPUID{8}, Until: rec.Length},               // elsewhere
		RecordedTarget{Key: gpreempt.ProcessKey{PID: 3, Start: 1}, GPUs: []gpreempt.GPUID{7}, Priority: 11, Until: rec.Length}, // as important
	)
	rec.GPUs = append(rec.GPUs, 8)
	rec.Leases = rec.Leases[:1]
	rec.Leases[0].Work = 200 * time.Millisecond
	p := immediate()
	p.MaxSuspend, p.MinRun = 50*time.Millisecond, 30*time.Millisecond
	r, err := replay(rec, p, Costs{})
	if err != nil {
		t.Fatal(err)
	}
	// Suspended for 50 ms from 101 ms on, then 2 ms of resume and 30 ms that it runs; it is
	// suspended again from 182 ms on, which takes 3 ms.
	first := 30*time.Millisecond + 3*time.Millisecond
	got := r.protection[0]
	if !got.quiet || got.disturbed < first || got.disturbed > 3*first {
		t.Errorf("%+v, want at least %v of the first resume", got, first)
	}
	rec.Targets = rec.Targets[1:]
	if r, err = replay(rec, p, Costs{}); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(protection{quiet: true}, r.protection[0], cmp.AllowUnexported(protection{})); diff != "" {
		t.Errorf("without work that it outranks (-want +got):\n%s", diff)
	}
}

func TestTargetsCountFromTheirBeginningToTheirEnd(t *testing.T) {
	rec := recordedWork()
	rec.Leases = nil
	rec.Targets[0].From, rec.Targets[0].Until = 200*time.Millisecond, 700*time.Millisecond
	rec.Targets = append(rec.Targets, RecordedTarget{ // on the same GPU, which is counted once
		Key: gpreempt.ProcessKey{PID: 2, Start: 1}, GPUs: []gpreempt.GPUID{7}, From: 600 * time.Millisecond, Until: 800 * time.Millisecond,
	})
	got, err := Replay(rec, immediate(), Costs{})
	if err != nil {
		t.Fatal(err)
	}
	if got.Work < 0.6-1e-9 || got.Work > 0.6+1e-9 {
		t.Errorf("%v GPU seconds, want 0.6", got.Work)
	}
}

func TestReplayRefusesRecordingsThatCannotBe(t *testing.T) {
	for want, change := range map[string]func(*Recording){
		"the recording has no length": func(r *Recording) { r.Length = 0 },
		"sort leases by time":         func(r *Recording) { r.Leases[0].At = time.Hour },
		"lives from":                  func(r *Recording) { r.Targets[0].Until = -1 },
	} {
		rec := recordedWork()
		change(&rec)
		if _, err := Replay(rec, immediate(), Costs{}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

// anyRecording draws a recording.
func anyRecording(t *rapid.T) Recording {
	span := func(name string, most time.Duration) time.Duration {
		return time.Duration(rapid.Int64Range(0, int64(most)).Draw(t, name))
	}
	gpus := func(name string) []gpreempt.GPUID {
		return [][]gpreempt.GPUID{{1}, {2}, {1, 2}}[rapid.IntRange(0, 2).Draw(t, name)]
	}
	rec := Recording{Length: 10 * time.Second, GPUs: []gpreempt.GPUID{1, 2}}
	for i := range rapid.IntRange(1, 4).Draw(t, "targets") {
		from := span("from", time.Second)
		rec.Targets = append(rec.Targets, RecordedTarget{
			Key: gpreempt.ProcessKey{PID: int32(i + 1), Start: 1}, Job: []string{"", "a"}[rapid.IntRange(0, 1).Draw(t, "job")], GPUs: gpus("target's GPUs"),
			From: from, Until: min(from+span("life", 15*time.Second), rec.Length),
			Suspends: []time.Duration{span("suspend", 5*time.Millisecond)}, Resumes: []time.Duration{span("resume", 5*time.Millisecond)},
		})
	}
	at := time.Duration(0)
	for range rapid.IntRange(1, 100).Draw(t, "leases") {
		at += span("gap", 200*time.Millisecond)
		rec.Leases = append(rec.Leases, RecordedLease{GPUs: gpus("lease's GPUs"), Priority: 11, At: at, Work: span("work", 200*time.Millisecond)})
	}
	return rec
}

func TestReplayKeepsThePromisesOfTheCore(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rec := anyRecording(t)
		presets := scheduler.Presets()
		p := presets[rapid.IntRange(0, len(presets)-1).Draw(t, "policy")]
		p.ShareFloor = []float64{0, 0.1, 0.5, 0.9}[rapid.IntRange(0, 3).Draw(t, "floor")]
		got, err := Replay(rec, p.Normalize(), DefaultCosts())
		if err != nil {
			t.Fatal(err)
		}
		if len(got.Requests) != len(rec.Leases) {
			t.Fatalf("%d requests of %d leases", len(got.Requests), len(rec.Leases))
		}
		for i, q := range got.Requests {
			if q.Announce < 0 || q.Announce > ms(p.MaxWait) || q.Service != ms(rec.Leases[i].Work) {
				t.Fatalf("request %d: %+v, lease %+v", i, q, rec.Leases[i])
			}
		}
		if alone := rec.offlineAlone(); got.Work < 0 || got.Work > alone+1e-9 {
			t.Fatalf("%v GPU seconds of %v", got.Work, alone)
		}
		again, err := Replay(rec, p.Normalize(), DefaultCosts())
		if diff := cmp.Diff(got, again); err != nil || diff != "" {
			t.Fatalf("%v, a second replay (-first +second):\n%s", err, diff)
		}
	})
}
