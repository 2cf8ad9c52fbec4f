package sim_test

import (
	"bytes"
	"encoding/json"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/lab/evidence"
	"github.com/gpreempt/gpreempt/lab/scenario"
	"github.com/gpreempt/gpreempt/lab/sim"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

const millisecond = time.Millisecond

// beside is one service that needs the GPU for 5 ms twenty times a second, beside one queue with
// kernels of the given length.
func beside(kernel time.Duration) scenario.Scenario {
	return scenario.Scenario{
		Name: "beside", GPUs: 1, Duration: 10 * time.Second,
		Online: []scenario.Service{{
			Name: "chat", Arrivals: scenario.Arrivals{Kind: scenario.Constant, Rate: 20}, Prepare: millisecond,
			Request: scenario.Work{Kernels: 10, Mean: 500 * time.Microsecond}, Priority: 11,
		}},
		Offline: []scenario.Job{{Name: "train", Step: scenario.Work{Kernels: 20, Mean: kernel}}},
	}
}

// costs are round numbers.
var costs = sim.Costs{
	Suspend: millisecond, Resume: millisecond, Disturb: 500 * time.Microsecond, Notify: 100 * time.Microsecond, Reset: 200 * time.Microsecond,
}

func strict() scheduler.Policy {
	p, err := scheduler.PresetByName("strict")
	if err != nil {
		panic(err)
	}
	p.Linger = 0
	return p
}

// run returns the result of a scheme.
func run(t *testing.T, s scenario.Scenario, scheme sim.Scheme) evidence.Repeat {
	t.Helper()
	r, err := sim.Run(s, scheme, sim.Options{Seed: 1, Costs: costs})
	if err != nil {
		t.Fatal(err)
	}
	for _, q := range r.Requests {
		if q.Failed != "" {
			t.Fatalf("the request at %v ms failed: %s", q.At, q.Failed)
		}
	}
	return r
}

// figures are what most tests compare: the extremes of the latency, and the offline work.
type figures struct {
	Requests          int
	Least, Most, Work float64
}

// of returns the figures, rounded to microseconds and to a thousandth of a GPU second.
func of(r evidence.Repeat) figures {
	f := figures{Requests: len(r.Requests), Least: math.Inf(1), Work: math.Round(r.Work*1000) / 1000}
	for _, q := range r.Requests {
		f.Least, f.Most = min(f.Least, q.Total), max(f.Most, q.Total)
	}
	f.Least, f.Most = math.Round(f.Least*1000)/1000, math.Round(f.Most*1000)/1000
	return f
}

func TestAloneNothingIsInTheWay(t *testing.T) {
	s := beside(millisecond)
	got := []figures{of(run(t, s, sim.Scheme{Kind: sim.OnlineAlone})), of(run(t, s, sim.Scheme{Kind: sim.OfflineAlone}))}
	want := []figures{{200, 6, 6, 0}, {0, math.Inf(1), 0, 10}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestWithoutPreemptionKernelsShareTheGPU(t *testing.T) {
	s := beside(millisecond)
	got := []figures{of(run(t, s, sim.Scheme{Kind: sim.None}))}
	s.Offline[0].Step.Occupancy = 0.25
	s.Online[0].Request.Occupancy = 0.75
	got = append(got, of(run(t, s, sim.Scheme{Kind: sim.None})))
	// Each gets half; together they do not fill the GPU, and both run at full speed.
	want := []figures{{200, 11, 11, 9}, {200, 6, 6, 2.5}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestSharingMayGainAndMayFavourOfflineWork(t *testing.T) {
	got := map[string]figures{}
	for name, sharing := range map[string]sim.Sharing{"gain": {Gain: 0.25}, "weight": {Weight: 4}} {
		r, err := sim.Run(beside(millisecond), sim.Scheme{Kind: sim.None}, sim.Options{Seed: 1, Sharing: sharing})
		if err != nil {
			t.Fatal(err)
		}
		got[name] = of(r)
	}
	want := map[string]figures{"gain": {200, 9, 9, 9.4}, "weight": {200, 26, 26, 9}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestBlockWaitWaitsForKernelsInFlight(t *testing.T) {
	got := of(run(t, beside(10*millisecond), sim.Scheme{Kind: sim.BlockWait}))
	if got.Least < 6 || got.Most > 16 || got.Most < 10 || got.Work > 9 {
		t.Errorf("a kernel of 10 ms delays a request of 6 ms: %+v", got)
	}
	deep := of(run(t, beside(10*millisecond), sim.Scheme{Kind: sim.BlockWait, InFlight: 3}))
	if deep.Least < 26 || deep.Most > 36 {
		t.Errorf("three kernels of 10 ms in flight delay a request of 6 ms: %+v", deep)
	}
}

func TestThrottleSharesWithKernelsInFlight(t *testing.T) {
	r := run(t, beside(10*millisecond), sim.Scheme{Kind: sim.Throttle})
	got := of(r)
	// A kernel that ends before half of the request is done costs what is left of it; else
	// the request has half of the GPU.
	if got.Least < 6 || got.Most > 11.001 || got.Most < 10 {
		t.Errorf("a request of 6 ms that shares with one kernel of 10 ms: %+v", got)
	}
	for _, q := range r.Requests {
		if q.Start > 1.0001 {
			t.Errorf("throttling does not wait: %+v", q)
		}
	}
}

func TestResetRepeatsTheKernelsThatItKills(t *testing.T) {
	r := run(t, beside(10*millisecond), sim.Scheme{Kind: sim.Reset})
	got := of(r)
	if got.Least != 6.2 || got.Most != 6.2 || got.Work >= 8.96 || got.Work < 7 || r.Repeated < 100 || r.Repeated > 200 {
		t.Errorf("requests wait for the reset only, and killed work does not count: %+v, %d repeated", got, r.Repeated)
	}
}

func TestSequentialFinishesTheStepFirst(t *testing.T) {
	got := of(run(t, beside(millisecond), sim.Scheme{Kind: sim.Sequential}))
	if got.Most > 26 || got.Most < 20 || got.Work > 9.02 {
		t.Errorf("a step takes 20 ms, a request 6 ms: %+v", got)
	}
}

func TestTimeSliceTakesTurns(t *testing.T) {
	s := beside(millisecond)
	s.Online[0].Request.Kernels = 40 // 20 ms
	got := of(run(t, s, sim.Scheme{Kind: sim.TimeSlice, Quantum: 5 * millisecond}))
	// 1 ms to prepare, 20 ms in four turns, three turns of 5 ms between, and cycles of 0.5 ms.
	if got.Least < 39 || got.Most > 45 {
		t.Errorf("turns of 5 ms: %+v", got)
	}
}

func TestGPreemptHasItsCosts(t *testing.T) {
	s := beside(10 * millisecond)
	s.Online[0].Prepare = 0
	r := run(t, s, sim.Scheme{Kind: sim.GPreempt, Policy: strict()})
	for _, q := range r.Requests {
		// Announcement 0.1, suspend 1, answer 0.1.
		if math.Abs(q.Announce-1.2) > 1e-6 || math.Abs(q.Total-6.2) > 1e-6 || q.Preemptions != 1 {
			t.Fatalf("%+v", q)
		}
	}
	if len(r.Suspends) != 200 || len(r.Resumes) != 200 || r.Suspends[0].MS != 1 || r.Resumes[0].MS != 1 {
		t.Errorf("%d suspends, %d resumes, the first %v and %v", len(r.Suspends), len(r.Resumes), r.Suspends[0], r.Resumes[0])
	}
	// Away: from the end of the suspend, 0.1 + 5 + 0.1 + 1 ms, and 0.5 ms of the first cycle.
	if got, want := r.Work, 10-200*0.0067; math.Abs(got-want) > 0.002 {
		t.Errorf("work %v, want %v", got, want)
	}
}

func TestPrepareHidesTheSuspend(t *testing.T) {
	s := beside(10 * millisecond)
	s.Online[0].Prepare = 2 * millisecond
	got := of(run(t, s, sim.Scheme{Kind: sim.GPreempt, Policy: strict()}))
	// The suspension ends with the eta, and its answer takes 0.1 ms.
	if got.Least != 7 || got.Most > 7.1 {
		t.Errorf("2 ms on the CPU and 5 ms on the GPU: %+v", got)
	}
}

// A server with short requests at a high rate and a lenient SLO announces half of it as its eta: most
// requests need no suspension, and those that do are in time. Without preemption a third is late, and
// with an announcement at once the suspensions cost a third of the offline work. See docs/adr/0061.
func TestALateEtaKeepsALenientSLOForMoreOfflineWork(t *testing.T) {
	const slo = 100 * millisecond
	s := beside(millisecond)
	s.Duration = 20 * time.Second
	s.Online[0].Arrivals, s.Online[0].Prepare = scenario.Arrivals{Kind: scenario.Poisson, Rate: 500}, 0
	s.Online[0].Request = scenario.Work{Kernels: 5, Total: millisecond}
	type result struct{ Kept, Work float64 }
	measure := func(scheme sim.Scheme, eta time.Duration) result {
		r, err := sim.Run(s, scheme, sim.Options{Seed: 1, Costs: sim.DefaultCosts(), ETA: eta})
		if err != nil {
			t.Fatal(err)
		}
		kept := 0.0
		for _, q := range r.Requests {
			if q.Failed == "" && q.Total <= slo.Seconds()*1000 {
				kept++
			}
		}
		return result{kept / float64(len(r.Requests)), r.Work / r.Seconds}
	}
	policy := scheduler.DefaultPolicy()
	none := measure(sim.Scheme{Kind: sim.None}, 0)
	atOnce := measure(sim.Scheme{Kind: sim.GPreempt, Policy: policy}, 0)
	late := measure(sim.Scheme{Kind: sim.GPreempt, Policy: policy}, slo/2)
	if none.Kept > 0.9 || atOnce.Kept < 0.999 || late.Kept < 0.999 || late.Work < 1.05*atOnce.Work {
		t.Errorf("no preemption %+v, announced at once %+v, with an eta %+v: want the SLO kept by both, and 5 %% more work with the eta", none, atOnce, late)
	}
}

// Two services with regular requests: which gap is short is learned, and no plain linger, which is the
// same for all gaps, does as much offline work; the latency is that without one. See docs/adr/0061.
func TestLearnedLingerDoesMoreOfflineWorkThanAnyPlainOne(t *testing.T) {
	for _, name := range []string{"gpreempt-c", "gpreempt-z"} {
		s, err := scenario.ByName(name)
		if err != nil {
			t.Fatal(err)
		}
		s.Duration = 10 * time.Second
		with := func(linger time.Duration) sim.Figures {
			p := scheduler.DefaultPolicy()
			p.Linger = linger
			r, err := sim.Run(s, sim.Scheme{Kind: sim.GPreempt, Policy: p.Normalize()}, sim.Options{Seed: 1, Costs: sim.DefaultCosts()})
			if err != nil {
				t.Fatal(err)
			}
			return sim.Measure(r)
		}
		learned := with(scheduler.LingerLearned)
		for _, plain := range []time.Duration{0, millisecond / 5, millisecond / 2, millisecond, 2 * millisecond, 5 * millisecond, 20 * millisecond} {
			if f := with(plain); learned.Work < 1.05*f.Work || plain == 0 && learned.Mean > 1.03*f.Mean {
				t.Errorf("%s: learned %.2f GPU seconds at %.2f ms, linger=%v %.2f at %.2f ms", name, learned.Work, learned.Mean, plain, f.Work, f.Mean)
			}
		}
	}
}

// A cap bounds the offline work, and nothing else: who announces waits no longer.
func TestShareCapLeavesTheGPUIdle(t *testing.T) {
	s := beside(millisecond)
	s.Duration, s.Online[0].Arrivals.Rate = 40*time.Second, 0.5
	with := func(limit float64) figures {
		p, err := scheduler.PresetByName("share")
		if err != nil {
			t.Fatal(err)
		}
		p.ShareFloor, p.ShareCap, p.MaxSuspend = 0, limit, 10*time.Second
		return of(run(t, s, sim.Scheme{Kind: sim.GPreempt, Policy: p.Normalize()}))
	}
	none, capped := with(1), with(0.25)
	if most := 0.25*40 + 0.75*(0.25*2+0.05); none.Work < 39 || capped.Work > most || capped.Work < 0.9*most {
		t.Errorf("offline work of %v GPU seconds without a cap and %v with it, want at least 39, and %v at most", none.Work, capped.Work, most)
	}
	if capped.Requests != none.Requests || capped.Least > none.Least || capped.Most > none.Most {
		t.Errorf("without a cap %+v, with it %+v", none, capped)
	}
}

func TestShadowPolicySharesTheGPU(t *testing.T) {
	p, err := scheduler.PresetByName("shadow")
	if err != nil {
		t.Fatal(err)
	}
	r := run(t, beside(millisecond), sim.Scheme{Kind: sim.GPreempt, Policy: p})
	if got := of(r); got.Least != 11 || len(r.Suspends) > 0 || r.NotQuiet != 200 {
		t.Errorf("%+v with %d suspends, %d not quiet", got, len(r.Suspends), r.NotQuiet)
	}
}

func TestCyclesOfOneGPUFollowEachOther(t *testing.T) {
	s := beside(10 * millisecond)
	s.Online[0].Prepare = 0
	s.Offline[0].Processes = 4
	r := run(t, s, sim.Scheme{Kind: sim.GPreempt, Policy: strict()})
	// 0.5 ms before the first cycle, then four of 0.5 ms.
	if got := r.Requests[10].Announce; math.Abs(got-2.7) > 1e-6 {
		t.Errorf("quiet after %v ms, want 2.7", got)
	}
	if got := r.Requests[10].Preemptions; got != 1 {
		t.Errorf("%d preemptions for one request, want 1", got)
	}
}

func TestOracleSuspendsInTime(t *testing.T) {
	s := beside(10 * millisecond)
	r := run(t, s, sim.Scheme{Kind: sim.Oracle})
	if got := of(r); got.Least != 6 || got.Most > 6.001 {
		t.Errorf("%+v", got)
	}
	daemon := run(t, s, sim.Scheme{Kind: sim.GPreempt, Policy: strict()})
	if r.Work < daemon.Work {
		t.Errorf("offline work with the oracle %v, with the daemon %v", r.Work, daemon.Work)
	}
}

func TestClosedClientsFollowTheAnswers(t *testing.T) {
	s := beside(millisecond)
	s.Online[0].Arrivals = scenario.Arrivals{Kind: scenario.Closed, Clients: 2, Think: 4 * millisecond}
	r := run(t, s, sim.Scheme{Kind: sim.OnlineAlone})
	// Two clients with 5 ms on one GPU: it is busy all the time.
	if got := len(r.Requests); got < 1995 || got > 2002 {
		t.Errorf("%d requests in 10 s of 5 ms each", got)
	}
	if _, err := sim.Run(s, sim.Scheme{Kind: sim.Oracle}, sim.Options{}); err == nil || !strings.Contains(err.Error(), "closed arrivals") {
		t.Errorf("the oracle cannot know: %v", err)
	}
}

func TestOverloadIsReported(t *testing.T) {
	s := beside(millisecond)
	s.Online[0].Arrivals.Rate = 2000
	r, err := sim.Run(s, sim.Scheme{Kind: sim.None}, sim.Options{})
	if err != nil {
		t.Fatal(err)
	}
	failed := 0
	for _, q := range r.Requests {
		if q.Failed != "" {
			failed++
		}
	}
	if failed == 0 || failed == len(r.Requests) {
		t.Errorf("%d of %d requests failed", failed, len(r.Requests))
	}
}

func TestSpansSayWhoHadTheGPU(t *testing.T) {
	s := beside(10 * millisecond)
	s.Online[0].Prepare = 0
	r, err := sim.Run(s, sim.Scheme{Kind: sim.GPreempt, Policy: strict()}, sim.Options{Seed: 1, Costs: costs, SpanLimit: 60 * millisecond})
	if err != nil {
		t.Fatal(err)
	}
	var words []string
	for _, span := range r.Spans {
		if span.To <= span.From {
			t.Errorf("empty span %+v", span)
		}
		if span.What != "online" {
			words = append(words, span.What)
		}
	}
	want := []string{"offline", "switching", "suspended", "switching", "offline"}
	if diff := cmp.Diff(want, words[:min(5, len(words))]); diff != "" {
		t.Errorf("%s%+v", diff, r.Spans)
	}
}

func TestSameSeedSameBytes(t *testing.T) {
	for _, kind := range sim.Kinds() {
		s := mixed()
		results := make([][]byte, 0, 3)
		for _, seed := range []uint64{7, 7, 8} {
			r, err := sim.Run(s, sim.Scheme{Kind: kind, Policy: scheduler.DefaultPolicy()}, sim.Options{Seed: seed, Costs: costs, SpanLimit: time.Second})
			if err != nil {
				t.Fatalf("%s: %v", kind, err)
			}
			text, err := json.Marshal(r)
			if err != nil {
				t.Fatal(err)
			}
			results = append(results, text)
		}
		if !bytes.Equal(results[0], results[1]) {
			t.Errorf("%s: two runs with one seed differ", kind)
		}
		if bytes.Equal(results[0], results[2]) && kind != sim.OfflineAlone {
			t.Errorf("%s: runs with two seeds are equal", kind)
		}
	}
}

// mixed is a bit of everything.
func mixed() scenario.Scenario {
	return scenario.Scenario{
		Name: "mixed", GPUs: 2, Duration: 3 * time.Second,
		Online: []scenario.Service{
			{Name: "chat", GPUs: []int{0}, Arrivals: scenario.Arrivals{Kind: scenario.Poisson, Rate: 40}, Prepare: millisecond, Request: scenario.Work{Kernels: 10, Mean: 500 * time.Microsecond}, Priority: 11},
			{Name: "both", GPUs: []int{0, 1}, Arrivals: scenario.Arrivals{Kind: scenario.Poisson, Rate: 5}, Request: scenario.Work{Kernels: 4, Mean: millisecond, Occupancy: 0.5}, Priority: 12},
			{Name: "llm", GPUs: []int{1}, Arrivals: scenario.Arrivals{Kind: scenario.Poisson, Rate: 1}, LLM: model(), Priority: 11},
		},
		Offline: []scenario.Job{
			{Name: "train", GPUs: []int{0, 1}, Processes: 2, Queues: 2, Step: scenario.Work{Kernels: 30, Mean: 2 * millisecond, Occupancy: 0.6}},
			{Name: "batch", GPUs: []int{1}, Step: scenario.Work{Kernels: 5, Mean: millisecond}, Arrivals: &scenario.Arrivals{Kind: scenario.Poisson, Rate: 20}},
		},
	}
}

func model() *scenario.LLM {
	return &scenario.LLM{
		MaxBatch: 4, PrefillBase: 5 * millisecond, PrefillToken: 50 * time.Microsecond, DecodeBase: 8 * millisecond, DecodeSequence: 100 * time.Microsecond,
		PromptTokens: 100, OutputTokens: 11,
	}
}

func TestLLMBatchesItsRequests(t *testing.T) {
	s := scenario.Scenario{
		Name: "llm", GPUs: 1, Duration: time.Second,
		Online: []scenario.Service{{Name: "llm", Arrivals: scenario.Arrivals{Kind: scenario.Closed, Clients: 2, Think: time.Hour}, LLM: model(), Priority: 11}},
	}
	r := run(t, s, sim.Scheme{Kind: sim.OnlineAlone})
	// Two prefills of 10 ms, then ten steps of 8.2 ms for both.
	var got [][3]float64
	for _, q := range r.Requests {
		got = append(got, [3]float64{math.Round(q.Total*1e3) / 1e3, q.TTFT, q.TPOT})
	}
	if diff := cmp.Diff([][3]float64{{102, 10, 9.2}, {102, 20, 8.2}}, got); diff != "" {
		t.Error(diff)
	}
}

func TestLLMHoldsOneLeaseForItsBatch(t *testing.T) {
	s := scenario.Scenario{
		Name: "llm", GPUs: 1, Duration: time.Second,
		Online:  []scenario.Service{{Name: "llm", Arrivals: scenario.Arrivals{Kind: scenario.Closed, Clients: 2, Think: 100 * millisecond}, LLM: model(), Priority: 11}},
		Offline: []scenario.Job{{Name: "train", Step: scenario.Work{Kernels: 20, Mean: millisecond}}},
	}
	r := run(t, s, sim.Scheme{Kind: sim.GPreempt, Policy: strict()})
	for i, q := range r.Requests {
		if q.Preemptions > 1 {
			t.Errorf("request %d caused %d preemptions", i, q.Preemptions)
		}
	}
	if len(r.Suspends) == 0 || len(r.Suspends) > len(r.Requests)/2+1 {
		t.Errorf("%d suspends for %d requests that come in pairs", len(r.Suspends), len(r.Requests))
	}
}

func TestImpossibleRunsAreRefused(t *testing.T) {
	ok := beside(millisecond)
	noGPU, noWork := ok, ok
	noGPU.Online = []scenario.Service{{Name: "chat", GPUs: []int{3}, Arrivals: scenario.Arrivals{Kind: scenario.Constant, Rate: 1}, Request: scenario.Work{Kernels: 1, Mean: 1}}}
	noWork.Offline = []scenario.Job{{Name: "train"}}
	var got []string
	for _, c := range []struct {
		s      scenario.Scenario
		scheme sim.Scheme
		o      sim.Options
	}{
		{ok, sim.Scheme{Kind: "hope"}, sim.Options{}},
		{ok, sim.Scheme{Kind: sim.TimeSlice, Quantum: -1}, sim.Options{}},
		{ok, sim.Scheme{Kind: sim.GPreempt}, sim.Options{}},
		{ok, sim.Scheme{Kind: sim.None}, sim.Options{Costs: sim.Costs{Disturb: 1}}},
		{ok, sim.Scheme{Kind: sim.None}, sim.Options{Sharing: sim.Sharing{Gain: -2}}},
		{noGPU, sim.Scheme{Kind: sim.None}, sim.Options{}},
		{noWork, sim.Scheme{Kind: sim.None}, sim.Options{}},
	} {
		_, err := sim.Run(c.s, c.scheme, c.o)
		if err == nil {
			got = append(got, "no error")
			continue
		}
		got = append(got, err.Error())
	}
	want := []string{
		`scenario beside: unknown scheme "hope": use one of [offline-alone online-alone none block-wait sequential time-slice reset throttle gpreempt oracle]`,
		"scenario beside: the quantum and the number of kernels in flight must not be negative",
		"scenario beside: share_window: 0s is outside 100ms to 10m0s",
		"scenario beside: disturb, 1ns, is a part of suspend, 0s, and of resume, 0s: it cannot be longer",
		"scenario beside: sharing gain -2, weight 0: the gain must be above -1 and at most 1, the weight 0 to 1000",
		"scenario beside: service chat: GPU 3 is not one of the 1",
		"scenario beside: job train: its step has no kernel",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}
