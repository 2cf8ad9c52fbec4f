package daemon

import (
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap/zapcore"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// lineTime is what two lines of the same differ by.
var lineTime = regexp.MustCompile(`"time":"[^"]*",`)

// logged returns what the log says of a history, without times. Suspends and resumes take
// 1.5 ms; suspends fail when fail says so.
func logged(t *testing.T, fail bool, history ...scheduler.Event) string {
	t.Helper()
	r := &reader{let: make(chan struct{})}
	close(r.let)
	logs, queue := jsonLog(r)
	d := &daemon{changes: logs(zapcore.DebugLevel), epoch: 0x18f3a7c25e90b401}
	policy := scheduler.DefaultPolicy()
	policy.Linger = scheduler.LingerNone
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
				d.logRecord(a.Record)
			case scheduler.ActSuspend:
				result := scheduler.OutcomeOK
				if fail {
					result = scheduler.OutcomeFailed
				}
				results = append(results, scheduler.Suspended{Target: a.Target, Seq: a.Seq, Result: result, Took: took})
			case scheduler.ActResume:
				results = append(results, scheduler.Resumed{Target: a.Target, Seq: a.Seq, Result: scheduler.OutcomeOK, Took: took})
			}
		}
		history = append(results, history...)
		now += took
	}
	queue.Close()
	return lineTime.ReplaceAllString(r.text.String(), "")
}

var (
	offlineSeen = scheduler.TargetSeen{
		Target: gpreempt.ProcessKey{PID: 4711, Start: 123456}, Class: gpreempt.Offline, GPUs: []gpreempt.GPUID{23256}, Queues: 1, Ready: true,
	}
	announced = scheduler.LeaseRequested{Lease: 1, Client: 1, GPUs: []gpreempt.GPUID{23256}, Priority: 11, TTL: time.Second, MaxWait: 100 * time.Millisecond}
)

// docs/logs.md shows what the log says of one preemption, a line for each state change.
func TestOnePreemptionIsALineForEachChangeAsDocumented(t *testing.T) {
	got := logged(t, false, scheduler.GPUAdded{GPU: 23256}, offlineSeen, announced, scheduler.LeaseFinished{Lease: 1, End: scheduler.EndCompleted})
	doc, err := os.ReadFile("../../docs/logs.md")
	if err != nil {
		t.Fatal(err)
	}
	_, example, _ := strings.Cut(string(doc), "```json\n")
	example, _, _ = strings.Cut(example, "```\n")
	if diff := cmp.Diff(example, got); diff != "" {
		t.Errorf("example of docs/logs.md, and what is logged (-documented +logged):\n%s", diff)
	}
}

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
{"level":"debug","msg":"lease answered","lease":"18f3a7c25e90b401-1","from":"quiescing","to":"quiescing","cause":"unsafe","took":0.0015}
{"level":"warn","msg":"target changed","target":"4711@123456","from":"resuming","to":"quarantined","cause":"quarantine","took":0.0015}
`},
		"a class": {false, []scheduler.Event{online}, `{"level":"info","msg":"target judged anew","target":"4711@123456","class":"online","cause":"class-changed"}
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
