package events_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/gpreempt/gpreempt/internal/events"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

var ignoreOpen = cmpopts.IgnoreUnexported(events.ShadowRow{})

// rowText is a row with what tests look at.
func rowText(r events.ShadowRow) string {
	return fmt.Sprintf("%d %s %s for %s: %d, %v, %v", r.Target.PID, r.Comm, r.By, r.Label, r.Suspends, r.Total, r.Longest)
}

// The report has how often, for how long and for whom each process would have been suspended, also one that has left
// and one that would be suspended now.
func TestShadowReportCountsByProcessAndOwner(t *testing.T) {
	l := events.NewLog(1)
	at := scheduler.Time(0)
	record := func(after time.Duration, r scheduler.Record) {
		at += after
		r.At = at
		l.Append(time.Time{}, r, "")
	}
	would := func(after time.Duration, pid int32, to scheduler.TargetState, label string) {
		record(after, scheduler.Record{
			Kind: scheduler.RecordShadow, Target: gpreempt.ProcessKey{PID: pid, Start: 1}, ToTarget: to,
			Shadow: &scheduler.Shadowed{Comm: "python", By: "rule train", GPUs: 8, Label: label},
		})
	}
	check := func(name string, lasted time.Duration, want ...string) {
		t.Helper()
		rows, took := l.Shadow(at)
		var got []string
		for _, r := range rows {
			got = append(got, rowText(r))
		}
		if diff := cmp.Diff(want, got); diff != "" || took != lasted {
			t.Errorf("%s: lasted %v, want %v (-want +got):\n%s", name, took, lasted, diff)
		}
	}
	policy := func(after time.Duration, shadow bool) { record(after, scheduler.Record{Kind: scheduler.RecordPolicy, On: shadow}) }

	left := func(after time.Duration, pid int32) {
		record(after, scheduler.Record{Kind: scheduler.RecordTarget, Target: gpreempt.ProcessKey{PID: pid, Start: 1}, FromTarget: scheduler.TargetRunning, ToTarget: scheduler.TargetLeft})
	}

	check("at the start", 0)
	would(time.Second, 7, scheduler.TargetSuspended, "chat")
	would(2*time.Second, 7, scheduler.TargetRunning, "")
	would(time.Second, 7, scheduler.TargetSuspended, "chat")
	would(0, 8, scheduler.TargetSuspended, "chat")
	would(time.Second, 7, scheduler.TargetRunning, "")
	would(time.Second, 7, scheduler.TargetSuspended, "embed")
	left(time.Second, 7)
	at += time.Second
	rows := []string{"7 python rule train for chat: 2, 3s, 2s", "8 python rule train for chat: 1, 4s, 4s", "7 python rule train for embed: 1, 1s, 1s"}
	check("while one lasts", 8*time.Second, rows...)
	policy(0, false)
	left(time.Minute, 8)
	check("after the policy", 8*time.Second, rows...)
	policy(0, true)
	at += time.Second
	check("a policy that begins anew", time.Second)
	would(0, 8, scheduler.TargetSuspended, "chat")
	policy(time.Second, true)
	check("another shadow policy", 0)
}

// However many processes come, the report is bounded, and counts the rest together.
func TestShadowReportIsBounded(t *testing.T) {
	l := events.NewLog(1)
	const processes = 1000
	for pid := range int32(processes) {
		for _, to := range []scheduler.TargetState{scheduler.TargetSuspended, scheduler.TargetRunning} {
			l.Append(time.Time{}, scheduler.Record{
				Kind: scheduler.RecordShadow, Target: gpreempt.ProcessKey{PID: 1 + pid, Start: 1}, ToTarget: to, Shadow: &scheduler.Shadowed{Comm: "x"},
			}, "")
		}
	}
	rows, _ := l.Shadow(0)
	var all uint64
	for _, r := range rows {
		all += r.Suspends
	}
	last := rows[len(rows)-1]
	if diff := cmp.Diff(events.ShadowRow{Suspends: processes - 256}, last, ignoreOpen); diff != "" || len(rows) != 257 || all != processes {
		t.Errorf("%d rows with %d suspensions, want 257 and %d; the last (-want +got):\n%s", len(rows), all, processes, diff)
	}
}
