package evidence_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/lab/evidence"
)

func TestSettingsGetOneName(t *testing.T) {
	for _, tc := range []struct {
		names []string
		want  string
	}{
		{nil, ""},
		{[]string{"strict"}, "strict"},
		{[]string{"strict", "share"}, "strict, share"},
		{[]string{"a, share floor 0.00", "a, share floor 0.10", "b, share floor 0.00", "b, share floor 0.10"}, "a, b; share floor 0.00, 0.10"},
		{[]string{"a, share floor 0.00", "b, share floor 0.10"}, "a, share floor 0.00, b, share floor 0.10"},
		{[]string{"gpreempt balanced 1ms", "gpreempt strict 1ms"}, "gpreempt balanced, strict 1ms"},
		{[]string{"x 1", "x 2", "x 3", "x 4", "x 5", "x 6", "x 7"}, "x 1, 2, 3, 4, ... 7 (7)"},
		{[]string{"x", "x"}, "x, x"},
		{[]string{"a, b; floor 1, 2", "c"}, "a, b; floor 1, 2 and c"},
	} {
		if got := evidence.NameSettings(tc.names); got != tc.want {
			t.Errorf("%q: %q, want %q", tc.names, got, tc.want)
		}
	}
}

func TestReasonThatDecidedComesFirst(t *testing.T) {
	run := sound()
	run.Faults = []evidence.Fault{{Arm: "shared", What: "job 1 ended early"}}
	run.Alarms = []evidence.Alarm{{From: "kernel", Text: "x"}}
	v := evidence.Judge(run, evidence.Profile{Name: "p", Limits: map[string]float64{"online_p99_ms": 1e-6}})
	if diff := cmp.Diff([]string{
		"an alarm from kernel: x", "protected: online_p99_ms: it is 6.01 ms, and the limit is 0.00", "shared, repeat 1: job 1 ended early",
	}, v.Reasons); diff != "" || v.Result != evidence.Fail {
		t.Errorf("%s (-want +got):\n%s", v.Result, diff)
	}
}

// A model has no hardware that could be looked at, and no limit is for other ways to share.
func TestSimulationsAreJudgedByWhatTheyHave(t *testing.T) {
	run := sound()
	run.Origin, run.Backend = evidence.Simulated, "simulated"
	for i := range run.Arms {
		for j := range run.Arms[i].Repeats {
			run.Arms[i].Repeats[j].Samples = nil
		}
	}
	run.Arms = append(run.Arms, evidence.Arm{Name: "reset", Kind: evidence.Baseline, Repeats: []evidence.Repeat{{Repeated: 3}, {Requests: []evidence.Request{{Failed: "x"}}}}})
	v := evidence.Judge(run, evidence.Profile{Name: "p", Limits: map[string]float64{"online_p99_ms": 1e6}})
	if v.Result != evidence.Pass || len(v.Unverified) > 0 || len(v.Criteria) != 1 {
		t.Errorf("%+v", v)
	}
}
