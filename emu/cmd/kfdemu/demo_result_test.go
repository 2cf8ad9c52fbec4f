package main

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// runs returns a result whose figures are easy to check by hand.
func runs() *Result {
	r := &Result{
		Simulated: true, Machine: "mi300x", RequestsPerSecond: 20, RequestMS: 6, OfflineQueues: 10, OfflineKernelMS: 25,
		ModelledSuspendMS: 0.4, Suspends: 4, Resumes: 4, LearnedSuspendMS: 0.4, LearnedResumeMS: 0.3,
		Runs: []Run{
			{Arm: OfflineAlone, OfflineWork: 1, Executed: 100},
			{Arm: OnlineAlone, Repeat: 1, LatencyMS: []float64{7, 5, 6, 8}},
			{Arm: OnlineAlone, Repeat: 2, LatencyMS: []float64{6, 6, 6, 7}},
			{Arm: Shared, LatencyMS: []float64{20, 30}, OfflineWork: 0.9},
			{Arm: Protected, Repeat: 1, LatencyMS: []float64{7, 9}, OfflineWork: 0.86},
			{Arm: Protected, Repeat: 2, LatencyMS: []float64{7, 8}, OfflineWork: 0.84},
		},
	}
	r.summarize()
	return r
}

func TestRepeatsAreFoldedIntoArms(t *testing.T) {
	want := []ArmSummary{
		{Arm: OnlineAlone, Online: Summary{N: 8, P50: 6, P95: 8, P99: 8, Max: 8, P99Spread: 1}},
		{Arm: Shared, Online: Summary{N: 2, P50: 20, P95: 30, P99: 30, Max: 30}, OfflineShare: 0.9},
		{Arm: Protected, Online: Summary{N: 4, P50: 7, P95: 9, P99: 9, Max: 9, P99Spread: 1}, OfflineShare: 0.85},
	}
	if diff := cmp.Diff(want, runs().Arms); diff != "" {
		t.Error(diff)
	}
}

func TestKeptExpectationsAreNotBroken(t *testing.T) {
	if broken := runs().Broken(); broken != nil {
		t.Errorf("broken: %q", broken)
	}
}

func TestEachBrokenExpectationIsNamed(t *testing.T) {
	for name, damage := range map[string]func(*Result){
		"online p50 with gpreempt":           func(r *Result) { r.Runs[4].LatencyMS = []float64{8.9, 8.9}; r.Runs[5].LatencyMS = []float64{8.9, 8.9} },
		"online p99 with gpreempt":           func(r *Result) { r.Runs[4].LatencyMS[0] = 11 },
		"offline throughput with gpreempt":   func(r *Result) { r.Runs[4].OfflineWork = 0.7 },
		"offline packets lost":               func(r *Result) { r.Runs[3].Lost = 1 },
		"offline packets run twice":          func(r *Result) { r.Runs[5].Repeated = 1 },
		"suspends":                           func(r *Result) { r.Suspends = 0 },
		"announcements not answered in time": func(r *Result) { r.Runs[4].Unanswered = 1 },
		"online p99 with gpreempt, ms":       func(r *Result) { r.Runs[5].LatencyMS[1] = 10.5 },
	} {
		t.Run(name, func(t *testing.T) {
			r := runs()
			damage(r)
			r.Arms = nil
			r.summarize()
			if broken := r.Broken(); len(broken) != 1 || !strings.HasPrefix(broken[0], name) {
				t.Errorf("broken: %q, want one that begins with %q", broken, name)
			}
		})
	}
}

func TestTailsAreNotCheckedOnABusyMachine(t *testing.T) {
	for name, disturb := range map[string]func(*Result){
		"requests late without gpreempt": func(r *Result) { r.Runs[1].LatencyMS[1] = 9 },
		"wakings late in a run":          func(r *Result) { r.Runs[4].LateMS = 2.5 },
	} {
		t.Run(name, func(t *testing.T) {
			r := runs()
			disturb(r)
			r.Runs[4].LatencyMS[1], r.Runs[4].OfflineWork = 30, 0.7
			r.Arms = nil
			r.summarize()
			if broken := r.Broken(); broken != nil {
				t.Errorf("checked nevertheless: %q", broken)
			}
			var out bytes.Buffer
			if err := r.Print(&out); err != nil {
				t.Fatal(err)
			}
			for _, want := range []string{"SKIP  online p99", "SKIP  offline throughput", "PASS: every target that can be checked was met. SKIP (2): other load makes this machine"} {
				if !strings.Contains(out.String(), want) {
					t.Errorf("no %q in\n%s", want, out.String())
				}
			}
			r.Runs[3].Lost, r.Arms = 1, nil
			r.summarize()
			if broken := r.Broken(); len(broken) != 1 || !strings.HasPrefix(broken[0], "offline packets lost") {
				t.Errorf("a lost packet counts on any machine; broken: %q", broken)
			}
		})
	}
}

func TestOurOwnLoadIsNoExcuse(t *testing.T) {
	r := runs()
	r.Runs[4].LateMS, r.Runs[4].OwnCPU, r.Runs[4].LatencyMS[1] = 9, 0.6, 30
	r.Arms = nil
	r.summarize()
	if broken := r.Broken(); len(broken) != 1 || !strings.HasPrefix(broken[0], "online p99") {
		t.Errorf("broken: %q, want the p99", broken)
	}
}

func TestTheTableSaysSimulatedAndHowEachExpectationWent(t *testing.T) {
	r := runs()
	r.Expectations[1].Kept = false
	var out bytes.Buffer
	if err := r.Print(&out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"SIMULATED mi300x", "Every figure is simulated", "SIMULATED   n", string(Protected), "85.0 %", "±0.50", "FAIL  online p99", "ok    offline packets lost: 0 (target <= 0)"} {
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
	for _, want := range []string{"EMULATED mi300x", "Every figure is emulated", "EMULATED   n", r.Backend} {
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

// An emulated driver's calls take time of their own, so that a latency there says nothing
// about gpreempt; a lost packet is lost there, too.
func TestOnlyPacketsAndSuspendsAreCheckedOnTheEmulator(t *testing.T) {
	r := emulatedRuns()
	r.Runs[4].LatencyMS, r.Runs[5].LatencyMS, r.Runs[4].OfflineWork = []float64{18, 30}, []float64{18, 30}, 0.5
	r.Arms = nil
	r.summarize()
	if broken := r.Broken(); broken != nil {
		t.Errorf("broken: %q", broken)
	}
	var out bytes.Buffer
	if err := r.Print(&out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"SKIP  online p50", "SKIP  online p99", "SKIP  offline throughput", "SKIP (3): the emulator's own work"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
	r.Runs[3].Lost, r.Arms = 1, nil
	r.summarize()
	if broken := r.Broken(); len(broken) != 1 || !strings.HasPrefix(broken[0], "offline packets lost") {
		t.Errorf("broken: %q, want the lost packet", broken)
	}
}
