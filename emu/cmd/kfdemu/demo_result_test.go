package main

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// runs returns a result whose figures are easy to check by hand.
func runs() *Result {
	r := &Result{
		Simulated: true, Machine: "mi300x", RequestsPerSecond: 20, RequestMS: 6, OfflineQueues: 10, OfflineKernelMS: 25,
		ModelledSuspendMS: 0.4, Suspends: 4, Resumes: 4, LearnedSuspendMS: 0.4, LearnedResumeMS: 0.3,
		Runs: []Run{
			{Arm: OfflineAlone, OfflineWork: 1, Executed: 100},
			{Arm: OnlineAlone, Repeat: 1, LatencyMS: many(7, 5, 6, 8)},
			{Arm: OnlineAlone, Repeat: 2, LatencyMS: many(6, 6, 6, 7)},
			{Arm: Shared, LatencyMS: many(20, 30), OfflineWork: 0.9},
			{Arm: Protected, Repeat: 1, LatencyMS: many(7, 9), OfflineWork: 0.86, Serving: 0.16},
			{Arm: Protected, Repeat: 2, LatencyMS: many(7, 8), OfflineWork: 0.84, Serving: 0.14},
		},
	}
	r.summarize()
	return r
}

// many returns the latencies of fifty times as many requests.
func many(ms ...float64) []float64 { return slices.Repeat(ms, 50) }

func TestRepeatsAreSummarizedByArm(t *testing.T) {
	want := []ArmSummary{
		{Arm: OnlineAlone, Online: Summary{N: 400, P50: 6, P95: 8, P99: 8, Max: 8, P99Spread: 1}},
		{Arm: Shared, Online: Summary{N: 100, P50: 20, P95: 30, P99: 30, Max: 30}, OfflineShare: 0.9},
		{Arm: Protected, Online: Summary{N: 200, P50: 7, P95: 9, P99: 9, Max: 9, P99Spread: 1}, OfflineShare: 0.85},
	}
	if diff := cmp.Diff(want, runs().Arms); diff != "" {
		t.Error(diff)
	}
}

func TestChecksThatAreMetDoNotFail(t *testing.T) {
	if failed := runs().Failed(); failed != nil {
		t.Errorf("failed: %q", failed)
	}
}

func TestEachFailedCheckIsNamed(t *testing.T) {
	for name, damage := range map[string]func(*Result){
		"offline packets lost: 1 (target <= 0)":      func(r *Result) { r.Runs[3].Lost = 1 },
		"offline packets run twice: 1 (target <= 0)": func(r *Result) { r.Runs[5].Repeated = 1 },
		"suspends: 0 (target >= 1)":                  func(r *Result) { r.Suspends = 0 },
	} {
		for _, r := range []*Result{runs(), emulatedRuns()} {
			damage(r)
			r.Arms = nil
			r.summarize()
			if diff := cmp.Diff([]string{name}, r.Failed()); diff != "" {
				t.Errorf("%s: %s", r.kind(), diff)
			}
		}
	}
}

// slow makes the latencies and the throughput with gpreempt worse than their limits.
func slow(r *Result) {
	r.Runs[4].LatencyMS, r.Runs[5].LatencyMS, r.Runs[4].OfflineWork = many(18, 30), many(18, 30), 0.5
}

func TestMedianAndThroughputAreJudgedUnlessTheyMeanNothing(t *testing.T) {
	p50 := Target{What: "online p50 with gpreempt, ms", Got: 18, Limit: 8.4}
	p99 := Target{What: "online p99 with gpreempt, ms", Got: 30, Limit: 10.4}
	work := Target{What: "offline throughput with gpreempt", Got: 0.67, Limit: 0.8, AtLeast: true}
	busy := p99
	busy.Limit, busy.Met = 402.4, true
	for name, test := range map[string]struct {
		change          func(*Result)
		figures, judged []Target
		says            string
	}{
		"enough requests on a quiet host": {
			change: func(*Result) {}, figures: []Target{p99}, judged: []Target{p50, work},
			says: "not judged: other programs on this host can delay a few requests.",
		},
		"few requests": {
			change:  func(r *Result) { r.Runs[4].LatencyMS, r.Runs[5].LatencyMS = []float64{18, 30}, []float64{18, 30} },
			figures: []Target{p50, p99, work}, says: "not judged: 4 requests are fewer than 100.",
		},
		"a busy host": {
			change:  func(r *Result) { r.Runs[1].LatencyMS = many(6, 6, 6, 400) },
			figures: []Target{p50, busy, work},
			says:    "not judged: this host is too busy to measure (without other work on the GPU the p95 is 400 ms, and the p50 6 ms).",
		},
		"a host that stood still": {
			change:  func(r *Result) { r.Runs[4].Late, r.Runs[5].Late = 11, 0 },
			figures: []Target{p50, p99, work},
			says:    "not judged: this host is too busy to measure (with gpreempt, 11 of 200 requests began more than 3ms late).",
		},
		"a host that stood still for a moment": {
			change: func(r *Result) { r.Runs[4].Late, r.Runs[5].Late = 5, 5 }, figures: []Target{p99}, judged: []Target{p50, work},
			says: "not judged: other programs on this host can delay a few requests.",
		},
		"a slow host": {
			change:  func(r *Result) { r.LearnedSuspendMS = 1.5 },
			figures: []Target{p50, p99, work},
			says:    "not judged: this host is too busy to measure (a suspend took 1.5ms, and 400µs of that on the modelled GPU).",
		},
	} {
		r := runs()
		slow(r)
		test.change(r)
		r.Arms = nil
		r.summarize()
		equal := cmpopts.EquateApprox(0, 1e-9)
		if diff := cmp.Diff(test.figures, r.Figures, equal); diff != "" {
			t.Errorf("%s: figures: %s", name, diff)
		}
		if diff := cmp.Diff(test.judged, r.Checks[3:], equal, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("%s: checks: %s", name, diff)
		}
		if failed := len(r.Failed()); failed != len(test.judged) {
			t.Errorf("%s: %d checks failed, want %d", name, failed, len(test.judged))
		}
		var out bytes.Buffer
		if err := r.Print(&out); err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(out.String(), test.says+"\n") {
			t.Errorf("%s: no %q in\n%s", name, test.says, out.String())
		}
	}
}

func TestTheTableSaysSimulatedAndTheResultOfEachCheck(t *testing.T) {
	r := runs()
	r.Checks[1].Met = false
	var out bytes.Buffer
	if err := r.Print(&out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"SIMULATED mi300x", "Every figure is simulated", "SIMULATED     n", string(Protected), "85.0 %", "±0.50",
		"ok    online p50 with gpreempt, ms: 7 (target <= 8.4)", "ok    offline throughput with gpreempt: 0.85 (target >= 0.8)", "ok    offline packets lost: 0 (target <= 0)", "FAIL  offline packets run twice", "skip  online p99 with gpreempt, ms: 9 (target <= 10.4)", "FAIL: 1 of 6 checks failed; 1 not judged: other programs",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
}

// emulatedRuns is runs of an emulated machine.
func emulatedRuns() *Result {
	r := runs()
	r.Simulated, r.Emulated, r.Backend = false, true, "emulated mi300x x1 with the rules of 6.12 (kfdemu)"
	r.Arms = nil
	r.summarize()
	return r
}

func TestTheTableSaysEmulated(t *testing.T) {
	r := emulatedRuns()
	var out bytes.Buffer
	if err := r.Print(&out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"EMULATED mi300x", "Every figure is emulated", "EMULATED     n", r.Backend} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
	if strings.Contains(strings.ToLower(out.String()), "simulated") {
		t.Errorf("called simulated:\n%s", out.String())
	}
}

func TestTheJSONSaysWhatTheFiguresAre(t *testing.T) {
	for name, r := range map[string]*Result{`"simulated":true,"emulated":false`: runs(), `"simulated":false,"emulated":true,"backend":"emulated mi300x x1`: emulatedRuns()} {
		text, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(text), name) {
			t.Errorf("no %s in %s", name, text)
		}
	}
}
