package evidence_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/lab/evidence"
)

func TestSummaryPoolsTheRepeats(t *testing.T) {
	run := &evidence.Run{Arms: []evidence.Arm{
		{Name: "alone", Kind: evidence.OfflineAlone, Repeats: []evidence.Repeat{{Seconds: 10, Work: 100, WorkUnit: "steps"}}},
		{Name: "protected", Kind: evidence.Protected, Repeats: []evidence.Repeat{
			{
				Seconds: 10, Work: 90, WorkUnit: "steps", Requests: []evidence.Request{{At: 0, Total: 1, Announce: 0.5}, {At: 1, Total: 3}, {At: 9, Total: 99, Failed: "x"}},
				Samples: []evidence.Sample{{Values: map[string]float64{"cpu": 1}}},
			},
			{
				Seconds: 10, Work: 70, WorkUnit: "steps", Requests: []evidence.Request{{Total: 5}, {Total: 7, Preemptions: 1}}, Lost: 1, NotQuiet: 2,
				Samples: []evidence.Sample{{Values: map[string]float64{"cpu": 2}}},
			},
		}},
	}}
	want := evidence.Summary{
		Arm: "protected", Kind: evidence.Protected, Repeats: 2, Seconds: 20,
		Latency:  evidence.Distribution{N: 4, Mean: 4, Std: 2.581988897471611, P50: 3, P95: 7, P99: 7, Max: 7, SpreadP50: 4, SpreadP99: 4},
		Announce: evidence.Distribution{N: 2, Mean: 0.25, Std: 0.3535533905932738, P50: 0, P95: 0.5, P99: 0.5, Max: 0.5},
		Failed:   1, Preemptions: 1, NotQuiet: 2, WorkUnit: "steps", WorkRate: 8, WorkSpread: 2, WorkRelative: 0.8, Lost: 1,
		Readings: map[string]float64{"cpu": 1.5},
	}
	if diff := cmp.Diff(want, evidence.Summarize(run)[1]); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestCompareRefusesUnlikeRuns(t *testing.T) {
	a, b := sound(), sound()
	b.Origin, b.Backend, b.Plan, b.Command = evidence.Hardware, "kfd", "version: 1\nname: other\n", "compare"
	b.Environment = map[string]string{"kernel": "6.13", "gpus": "mi300x"}
	_, err := evidence.Compare(a, b)
	unlike, ok := errors.AsType[*evidence.UnlikeError](err)
	want := []string{
		"command: trial and compare", "origin: emulated and hardware", "backend: emulated mi300x x1 and kfd", `plan: line 2 is "" and "name: other"`,
		"gpus: none and mi300x", "kernel: 6.12 and 6.13",
	}
	if !ok || cmp.Diff(want, unlike.Differences) != "" {
		t.Errorf("%v, want %q", err, want)
	}
	c := sound()
	c.Environment["kernel"] = "6.13"
	if _, err := evidence.Compare(a, c); err == nil || !strings.Contains(err.Error(), "kernel: 6.12 and 6.13") {
		t.Errorf("error %v", err)
	}
	if _, err := evidence.Compare(a, c, "kernel"); err != nil {
		t.Error(err)
	}
}

// The rate that a trial chose is a figure of its host. One that was asked for belongs to the plan.
func TestRatesThatTheTrialsChoseDoNotMakeThemUnlike(t *testing.T) {
	plan := func(run *evidence.Run, rate string, chosen float64) *evidence.Run {
		run.Plan, run.ChosenRate = "version: 1\narrivals:\n    kind: constant\n    rate: "+rate+"\ncount: 40\n", chosen
		return run
	}
	a, b := plan(sound(), "10", 10), plan(sound(), "0.25", 0.25)
	if _, err := evidence.Compare(a, b); err != nil {
		t.Error(err)
	}
	if want, got := "The trials chose the rate by how long a request took: 10 and 0.25 requests per second.", evidence.ChosenRates(a, b); got != want {
		t.Errorf("%q, want %q", got, want)
	}
	asked := plan(sound(), "9", 0)
	if _, err := evidence.Compare(a, asked); err == nil || !strings.Contains(err.Error(), `"rate: 10" and "rate: 9"`) {
		t.Errorf("a rate that was asked for: %v", err)
	}
	if got := evidence.ChosenRates(a, a) + evidence.ChosenRates(a, asked); got != "" {
		t.Errorf("nothing to say: %q", got)
	}
}

func TestCompareReturnsRatiosWithIntervals(t *testing.T) {
	a, b := sound(), sound()
	for i := range b.Arms[3].Repeats {
		for q := range b.Arms[3].Repeats[i].Requests {
			b.Arms[3].Repeats[i].Requests[q].Total *= 1 + float64(q%3)/2
		}
	}
	ratios, err := evidence.Compare(a, b)
	if err != nil {
		t.Fatal(err)
	}
	again, err := evidence.Compare(a, b)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(ratios, again); diff != "" {
		t.Errorf("a second comparison differs:\n%s", diff)
	}
	found := map[string]evidence.Ratio{}
	for _, r := range ratios {
		if r.Low > r.Ratio || r.High < r.Ratio {
			t.Errorf("the ratio is outside its interval: %+v", r)
		}
		found[r.Arm+" "+r.Figure] = r
	}
	if r := found["protected online mean"]; r.Low <= 1.3 || r.High >= 1.7 || r.NA != 200 || r.NB != 200 {
		t.Errorf("protected: %+v", r)
	}
	if r := found["shared online mean"]; r.Low > 1 || r.High < 1 {
		t.Errorf("shared, which is the same in both: %+v", r)
	}
	if r := found["offline alone offline work"]; r.Ratio != 1 || r.Low != 1 || r.High != 1 {
		t.Errorf("offline alone: %+v", r)
	}
	if _, ok := found["offline alone online mean"]; ok {
		t.Error("a figure without samples was compared")
	}
}
