package log

import (
	"fmt"
	"io"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap/zapcore"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// leaseID has the form of the server's lease IDs.
func leaseID(id scheduler.LeaseID) string { return fmt.Sprintf("18f3a7c25e90b401-%d", id) }

// lineTime is the time of a line.
var lineTime = regexp.MustCompile(`"time":"[^"]*",`)

// logged returns the log of a history, without times. Suspends and resumes take 1.5 ms;
// suspends fail if fail is set.
func logged(t *testing.T, fail bool, history ...scheduler.Event) string {
	t.Helper()
	r := &reader{open: make(chan struct{})}
	close(r.open)
	logs := openStream(r, jsonEncoder())
	logs.SetLevel("debug")
	records := Records{logs.Changes(), leaseID}
	policy := scheduler.DefaultPolicy()
	policy.Linger, policy.AttachAfter = 0, 0
	core := scheduler.New(policy, scheduler.Limits{LeasesPerClient: 10, LeasesPerUser: 10, LeasesTotal: 10})
	const took = 1500 * time.Microsecond
	now := time.Second
	for len(history) > 0 {
		ev := history[0]
		history = history[1:]
		var results []scheduler.Event
		for _, a := range core.Step(now, ev) {
			switch a.Kind {
			case scheduler.ActRecord:
				records.Write(a.Record)
			case scheduler.ActAttach:
				results = append(results, scheduler.Attached{Target: a.Target})
			case scheduler.ActDetach:
				results = append(results, scheduler.Detached{Target: a.Target, Took: took})
			case scheduler.ActSuspend:
				result := scheduler.Cause("")
				if fail {
					result = scheduler.CauseFailed
				}
				results = append(results, scheduler.Suspended{Target: a.Target, Seq: a.Seq, Result: result, Took: took})
			case scheduler.ActResume:
				results = append(results, scheduler.Resumed{Target: a.Target, Seq: a.Seq, Took: took})
			}
		}
		history = append(results, history...)
		now += took
	}
	logs.Close()
	return lineTime.ReplaceAllString(r.text.String(), "")
}

var (
	offlineSeen = scheduler.TargetSeen{
		Target: gpreempt.ProcessKey{PID: 4711, Start: 123456}, Class: gpreempt.Offline, GPUs: []gpreempt.GPUID{23256}, Queues: 1,
	}
	announced = scheduler.LeaseRequested{Lease: 1, Client: scheduler.ClientID{PID: 1}, GPUs: []gpreempt.GPUID{23256}, Priority: 11, TTL: time.Second, MaxWait: 100 * time.Millisecond}
)

func TestOtherChangesAreALineEach(t *testing.T) {
	online := offlineSeen
	online.Class = gpreempt.Online
	policy := scheduler.DefaultPolicy()
	policy.MaxSuspend *= 2
	for name, tc := range map[string]struct {
		fail    bool
		history []scheduler.Event
		want    string
	}{
		"a suspend that fails": {true, []scheduler.Event{announced}, `{"level":"debug","msg":"lease changed","lease":"18f3a7c25e90b401-1","from":"none","to":"requested","cause":"announced"}
{"level":"debug","msg":"lease changed","lease":"18f3a7c25e90b401-1","from":"requested","to":"quiescing","cause":"started"}
{"level":"debug","msg":"target changed","target":"4711@123456","from":"running","to":"suspending","lease":"18f3a7c25e90b401-1","cause":"lease"}
{"level":"warn","msg":"target changed","target":"4711@123456","from":"suspending","to":"resuming","cause":"failed"}
{"level":"debug","msg":"lease answered","lease":"18f3a7c25e90b401-1","from":"quiescing","to":"quiescing","cause":"cannot-suspend","took":0.0015}
{"level":"warn","msg":"target changed","target":"4711@123456","from":"resuming","to":"quarantined","cause":"quarantine","took":0.0015}
`},
		"a class": {false, []scheduler.Event{online}, `{"level":"info","msg":"target reclassified","target":"4711@123456","class":"online","cause":"class-changed"}
`},
		"an alarm": {false, []scheduler.Event{scheduler.Alarm{GPU: 23256}}, `{"level":"warn","msg":"breaker opened","gpu":"23256","cause":"alarm"}
`},
		"drain": {false, []scheduler.Event{scheduler.Drain{On: true}, scheduler.Drain{}}, `{"level":"info","msg":"drain began"}
{"level":"info","msg":"drain ended"}
`},
		"policy": {false, []scheduler.Event{scheduler.PolicyChanged{Policy: policy}}, `{"level":"info","msg":"policy changed"}
`},
	} {
		t.Run(name, func(t *testing.T) {
			before := []scheduler.Event{scheduler.GPUAdded{GPU: 23256}, offlineSeen}
			got := strings.TrimPrefix(logged(t, tc.fail, append(before, tc.history...)...), logged(t, false, before...))
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("log (-want +got):\n%s", diff)
			}
		})
	}
}

func TestLevelSaysWhetherTheOperatorMustAct(t *testing.T) {
	target := gpreempt.ProcessKey{PID: 100, Start: 1}
	for _, tc := range []struct {
		record scheduler.Record
		want   string
	}{
		{scheduler.Record{Kind: scheduler.RecordTarget, Target: target, ToTarget: scheduler.TargetSuspended, Cause: scheduler.CauseDone}, "debug target changed"},
		{scheduler.Record{Kind: scheduler.RecordLease, Lease: 1, ToLease: scheduler.LeaseHeld}, "debug lease changed"},
		{scheduler.Record{Kind: scheduler.RecordPolicy}, "info policy changed"},
		{scheduler.Record{Kind: scheduler.RecordDrain, On: true}, "info drain began"},
		{scheduler.Record{Kind: scheduler.RecordBreaker, GPU: 1, Cause: scheduler.CauseCooledDown}, "info breaker closed"},
		{scheduler.Record{Kind: scheduler.RecordBreaker, GPU: 1, On: true, Cause: scheduler.CauseHung}, "warn breaker opened"},
		{scheduler.Record{Kind: scheduler.RecordTarget, Target: target, ToTarget: scheduler.TargetQuarantined, Cause: scheduler.CauseQuarantine}, "warn target changed"},
		{scheduler.Record{Kind: scheduler.RecordTarget, Target: target, FromTarget: scheduler.TargetSuspending, ToTarget: scheduler.TargetSuspending, Cause: scheduler.CauseStuck}, "warn target changed"},
		{scheduler.Record{Kind: scheduler.RecordLease, Lease: 1, FromLease: scheduler.LeaseQuiescing, ToLease: scheduler.LeaseQuiescing, Cause: scheduler.CauseStuck}, "debug lease answered"},
		{scheduler.Record{Kind: scheduler.RecordTarget, Target: target, FromTarget: scheduler.TargetSuspending, ToTarget: scheduler.TargetResuming, Cause: scheduler.CauseHardware}, "warn target changed"},
		{scheduler.Record{Kind: scheduler.RecordTarget, Target: target, FromTarget: scheduler.TargetSuspending, ToTarget: scheduler.TargetResuming, Cause: gpreempt.ReasonResisted}, "warn target changed"},
		{scheduler.Record{Kind: scheduler.RecordTarget, Target: target, FromTarget: scheduler.TargetSuspended, ToTarget: scheduler.TargetResuming, Cause: gpreempt.ReasonResisted}, "debug target changed"},
	} {
		r := &reader{open: make(chan struct{})}
		close(r.open)
		logs := openStream(r, jsonEncoder())
		logs.SetLevel("debug")
		Records{logs.Changes(), leaseID}.Write(tc.record)
		logs.Close()
		if diff := cmp.Diff([]string{tc.want + " 0"}, r.lines(t)); diff != "" {
			t.Errorf("%v: %s", tc.record, diff)
		}
	}
}

// BenchmarkChanges measures the cost to the scheduler's loop of the lines of an announcement
// that suspends one target, and its Complete: below the level, and written.
func BenchmarkChanges(b *testing.B) {
	target := gpreempt.ProcessKey{PID: 4711, Start: 123456}
	var changes []scheduler.Record
	for range 4 {
		changes = append(changes,
			scheduler.Record{Kind: scheduler.RecordLease, Lease: 1, FromLease: scheduler.LeaseQuiescing, ToLease: scheduler.LeaseHeld, Cause: scheduler.CauseQuiet, Took: time.Millisecond},
			scheduler.Record{Kind: scheduler.RecordTarget, Target: target, FromTarget: scheduler.TargetSuspending, ToTarget: scheduler.TargetSuspended, Lease: 1, Cause: scheduler.CauseDone, Took: time.Millisecond})
	}
	for _, level := range []zapcore.Level{zapcore.InfoLevel, zapcore.DebugLevel} {
		b.Run(level.String(), func(b *testing.B) {
			logs := openStream(io.Discard, jsonEncoder())
			defer logs.Close()
			logs.SetLevel(level.String())
			records := Records{logs.Changes(), leaseID}
			for b.Loop() {
				for _, r := range changes {
					records.Write(r)
				}
			}
		})
	}
}
