package sim

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/lab/evidence"
	"github.com/gpreempt/gpreempt/lab/scenario"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// planOptions compares the named presets with some floors.
func planOptions(t *testing.T, floors []float64, presets ...string) PlanOptions {
	t.Helper()
	o := PlanOptions{Floors: floors, Options: Options{Seed: 1, Costs: DefaultCosts()}, Repeats: 1}
	for _, name := range presets {
		p, err := scheduler.PresetByName(name)
		if err != nil {
			t.Fatal(err)
		}
		o.Policies = append(o.Policies, NamedPolicy{name, p})
	}
	return o
}

// busy is a scenario in which online work needs half of a GPU.
func busy() scenario.Scenario {
	s := scenario.Scenario{
		Version: 1, Name: "busy", GPUs: 1, Duration: 20 * time.Second,
		Online: []scenario.Service{{
			Name: "chat", Arrivals: scenario.Arrivals{Kind: scenario.Poisson, Rate: 50}, Request: scenario.Work{Kernels: 10, Mean: time.Millisecond},
			SLO: 100 * time.Millisecond, Priority: 11,
		}},
		Offline: []scenario.Job{{Name: "training", Step: scenario.Work{Kernels: 100, Mean: time.Millisecond}}},
	}
	s.Normalize()
	return s
}

func TestPlanComparesEachPolicyWithEachFloor(t *testing.T) {
	var arms []string
	o := planOptions(t, []float64{0, 0.5}, "strict", "share")
	o.Keep = func(a evidence.Arm) error {
		arms = append(arms, a.Name)
		return nil
	}
	p, err := PlanScenario(busy(), o)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"offline alone", "online alone", "no preemption", "strict, share floor 0.00", "strict, share floor 0.50",
		"share, share floor 0.00", "share, share floor 0.50",
	}
	if diff := cmp.Diff(want, arms); diff != "" {
		t.Errorf("arms (-want +got):\n%s", diff)
	}
	type named struct {
		Policy string
		Floor  float64
	}
	var points []named
	for _, pt := range p.Points {
		points = append(points, named{pt.Policy, pt.ShareFloor})
		if s := pt.Services[0]; pt.Offline <= 0 || pt.Offline > 1 || s.Requests == 0 || s.P50 < 10 || s.P99 < s.P50 {
			t.Errorf("%+v", pt)
		}
	}
	if diff := cmp.Diff([]named{{"strict", 0}, {"strict", 0.5}, {"share", 0}, {"share", 0.5}}, points); diff != "" {
		t.Errorf("points (-want +got):\n%s", diff)
	}
	if p.OnlineGPUs != 1 || p.OfflineGPUs != 1 || p.SharedGPUs != 1 {
		t.Errorf("%d online, %d offline, %d GPUs in all", p.OnlineGPUs, p.OfflineGPUs, p.SharedGPUs)
	}
	if p.Alone.Offline != 0 || p.None.Offline <= 0 {
		t.Errorf("offline work %v with online work alone, %v without preemption", p.Alone.Offline, p.None.Offline)
	}
}

func TestHigherShareFloorGivesMoreOfflineWorkAndMoreLatency(t *testing.T) {
	p, err := PlanScenario(busy(), planOptions(t, []float64{0, 0.8}, "strict"))
	if err != nil {
		t.Fatal(err)
	}
	low, high := p.Points[0], p.Points[1]
	if !(low.Offline < high.Offline && low.Services[0].P99 < high.Services[0].P99) {
		t.Errorf("floor 0: %+v\nfloor 0.8: %+v", low, high)
	}
}

func TestPlanIsTheSameForOneSeed(t *testing.T) {
	o := planOptions(t, []float64{0, 0.25}, "balanced")
	first, err := PlanScenario(busy(), o)
	if err != nil {
		t.Fatal(err)
	}
	second, err := PlanScenario(busy(), o)
	if diff := cmp.Diff(first, second); err != nil || diff != "" {
		t.Errorf("%v (-first +second):\n%s", err, diff)
	}
}

func TestPlanNeedsBothKindsOfWork(t *testing.T) {
	s := busy()
	s.Offline = nil
	if _, err := PlanScenario(s, planOptions(t, []float64{0}, "strict")); err == nil || !strings.Contains(err.Error(), "needs online and offline work") {
		t.Error(err)
	}
	if _, err := PlanScenario(busy(), planOptions(t, []float64{0}, "shadow")); err == nil || !strings.Contains(err.Error(), "shadow suspends nothing") {
		t.Error(err)
	}
}

func TestRecordingIsPlannedWithEachPolicy(t *testing.T) {
	p, err := PlanRecording(recordedWork(), 2, planOptions(t, []float64{0}, "strict"))
	if err != nil {
		t.Fatal(err)
	}
	if p.Alone != nil || p.None != nil || len(p.Points) != 1 {
		t.Fatalf("%+v", p)
	}
	want := []ServicePoint{{Name: "announcements", Requests: 2, P50: 1, P99: 3, SLO: 2, Recorded: &Protection{Within: 0.5}}}
	if diff := cmp.Diff(want, p.Points[0].Services); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if p.Points[0].Verdict != Missed || p.Best != -1 {
		t.Errorf("verdict %v, best %d", p.Points[0].Verdict, p.Best)
	}
	rec := recordedWork()
	rec.Targets = nil
	if _, err := PlanRecording(rec, 0, planOptions(t, []float64{0}, "strict")); err == nil || !strings.Contains(err.Error(), "no offline target") {
		t.Error(err)
	}
}

// point returns a point with one service.
func point(policy string, floor, p99, offline float64, v Verdict) Point {
	return Point{Policy: policy, ShareFloor: floor, Services: []ServicePoint{{P99: p99}}, Offline: offline, Verdict: v}
}

func TestChoiceIsTheMostOfflineWorkThatKeepsTheSLO(t *testing.T) {
	p := Plan{Points: []Point{
		point("a", 0, 10, 0.5, Kept),
		point("a", 0.2, 20, 0.6, Kept),
		point("a", 0.4, 30, 0.7, Missed),
		point("b", 0, 20, 0.55, Kept), // as slow as a with 0.2, and less work
		point("c", 0, 25, 0.5, Missed),
	}}
	p.choose()
	if p.Best != 1 {
		t.Errorf("the best is %d", p.Best)
	}
	if diff := cmp.Diff([]PolicyFloor{{"a", 0.2}, {"b", 0}}, p.Floors); diff != "" {
		t.Errorf("floors (-want +got):\n%s", diff)
	}
	var dominated []bool
	for _, pt := range p.Points {
		dominated = append(dominated, pt.Dominated)
	}
	if diff := cmp.Diff([]bool{false, false, false, true, true}, dominated); diff != "" {
		t.Errorf("dominated (-want +got):\n%s", diff)
	}
}

func TestEqualPointsDoNotDominateEachOther(t *testing.T) {
	p := Plan{Points: []Point{point("a", 0, 10, 0.5, Kept), point("b", 0, 10, 0.5, Kept)}}
	p.choose()
	if p.Points[0].Dominated || p.Points[1].Dominated {
		t.Errorf("%+v", p.Points)
	}
}

func TestVerdictIsThatOfEveryService(t *testing.T) {
	for _, c := range []struct {
		s    ServicePoint
		want Verdict
	}{
		{ServicePoint{Requests: 1, P99: 5}, NoSLO},
		{ServicePoint{Requests: 1, P99: 5, SLO: 5}, Kept},
		{ServicePoint{Requests: 1, P99: 5.1, SLO: 5}, Missed},
		{ServicePoint{Requests: 2, P99: 4, SLO: 5, Failed: 1}, Missed},
		{ServicePoint{P99: 0, SLO: 5}, Missed},
		{ServicePoint{Requests: 1, P99: 4, SLO: 5, TPOTP99: 2, TPOTSLO: 1}, Missed},
		{ServicePoint{Requests: 1, P99: 9, TPOTP99: 1, TPOTSLO: 1}, Kept},
	} {
		if got := c.s.verdict(); got != c.want {
			t.Errorf("%+v: %v, want %v", c.s, got, c.want)
		}
	}
	pt := Point{Services: []ServicePoint{{Name: "a", P99: 9, SLO: 10}, {Name: "b", P99: 4, SLO: 2}, {Name: "c", P99: 100}}}
	if got := pt.Decisive().Name; got != "b" {
		t.Errorf("%s decides", got)
	}
}

func TestSavedGPUsAreThoseThatBothKindsShare(t *testing.T) {
	rec := recordedWork()
	rec.Targets = append(rec.Targets, RecordedTarget{
		Key: gpreempt.ProcessKey{PID: 2, Start: 1}, GPUs: []gpreempt.GPUID{8}, Until: rec.Length, // on a GPU without online work
	})
	rec.GPUs = append(rec.GPUs, 8)
	p, err := PlanRecording(rec, 0, planOptions(t, []float64{0}, "strict"))
	if err != nil {
		t.Fatal(err)
	}
	pt := p.Points[0]
	if want := 1 + 2*pt.Offline - 2; pt.Saved != want || pt.Saved > 1 || pt.Saved < 0.9 {
		t.Errorf("%v GPUs are saved, want %v", pt.Saved, want)
	}
	if !slices.Equal([]int{p.OnlineGPUs, p.OfflineGPUs, p.SharedGPUs}, []int{1, 2, 2}) {
		t.Errorf("%d online, %d offline, %d GPUs in all", p.OnlineGPUs, p.OfflineGPUs, p.SharedGPUs)
	}
}
