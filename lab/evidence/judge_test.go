package evidence_test

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/lab/evidence"
)

// sound returns a run that every criterion of a profile of its own passes.
func sound() *evidence.Run {
	run := &evidence.Run{
		Format: evidence.Format, Command: "trial", Origin: evidence.Emulated, Backend: "emulated mi300x x1", Plan: "version: 1\n", Planned: 2,
		Environment: map[string]string{"kernel": "6.12"},
		Arms: []evidence.Arm{
			{Name: "offline alone", Kind: evidence.OfflineAlone},
			{Name: "online alone", Kind: evidence.OnlineAlone},
			{Name: "shared", Kind: evidence.Shared},
			{Name: "protected", Kind: evidence.Protected},
		},
	}
	for i := range run.Arms {
		arm := &run.Arms[i]
		for n := range run.Planned {
			r := evidence.Repeat{Seconds: 10}
			if arm.Kind != evidence.OnlineAlone {
				r.Work, r.WorkUnit = 1000, "steps"
			}
			if arm.Kind == evidence.Protected {
				r.Work = 980
				r.Samples = []evidence.Sample{{At: 1, Values: map[string]float64{
					evidence.HQDsActive: 3, evidence.HQDsSuspended: 0, evidence.HQDsAfter: 3, evidence.GPUBusy: 90,
				}}}
			}
			if arm.Kind == evidence.Protected {
				for at := range 40 {
					r.Samples = append(r.Samples, evidence.Sample{At: float64(250 * at), Values: map[string]float64{evidence.DaemonCPU: 0.1, evidence.DaemonRSS: 40}})
				}
			}
			if arm.Kind != evidence.OfflineAlone {
				for q := range 100 {
					at := float64(100 * q)
					r.Requests = append(r.Requests, evidence.Request{At: at, Total: 6 + float64(n)/100, Announce: 1, Service: 5})
					if arm.Kind == evidence.Protected {
						r.Suspends = append(r.Suspends, evidence.Timed{At: at, MS: 0.5})
						r.Resumes = append(r.Resumes, evidence.Timed{At: at + 6, MS: 0.25})
					}
				}
			}
			arm.Repeats = append(arm.Repeats, r)
		}
	}
	return run
}

func profile(t *testing.T, name string) evidence.Profile {
	t.Helper()
	p, err := evidence.LoadProfile(name)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestRunWithinAllLimitsPasses(t *testing.T) {
	for _, name := range evidence.ProfileNames() {
		run := sound()
		if name == "online-5ms-hour" || strings.HasPrefix(name, "suspend-") {
			for i := range run.Arms[3].Repeats {
				r := &run.Arms[3].Repeats[i]
				r.Seconds = 1800
				for q := range r.Requests {
					r.Requests[q].Total, r.Suspends[q].MS = 4, 0.25
				}
			}
		}
		v := evidence.Judge(run, profile(t, name))
		if v.Result != evidence.Pass || len(v.Reasons) > 0 || len(v.Criteria) == 0 {
			t.Errorf("%s: %+v", name, v)
		}
	}
}

func TestVerdictHasEachFigureWithItsLimit(t *testing.T) {
	v := evidence.Judge(sound(), profile(t, "loss-5"))
	want := evidence.Verdict{
		Result: evidence.Pass, Profile: "loss-5", Origin: evidence.Emulated,
		Criteria: []evidence.Criterion{
			{Arm: "protected", Name: "offline_loss_percent", Figure: new(2.0), Limit: 5, Unit: "%", Spread: new(0.0), Result: evidence.Pass},
			{Arm: "protected", Name: "online_p99_ms", Figure: new(6.01), Limit: 50, Unit: "ms", Spread: new(0.01), Result: evidence.Pass},
			{Arm: "protected", Name: "resume_p99_ms", Figure: new(0.25), Limit: 5, Unit: "ms", Spread: new(0.0), Result: evidence.Pass},
			{Arm: "protected", Name: "suspend_p99_ms", Figure: new(0.5), Limit: 5, Unit: "ms", Spread: new(0.0), Result: evidence.Pass},
		},
	}
	near := cmp.Comparer(func(a, b float64) bool { return a-b < 1e-9 && b-a < 1e-9 })
	if diff := cmp.Diff(want, v, near); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// Each break of a sound run must be seen.
func TestBrokenRunNeverPasses(t *testing.T) {
	protected := func(r *evidence.Run) *evidence.Repeat { return &r.Arms[3].Repeats[1] }
	for name, tc := range map[string]struct {
		breaks func(r *evidence.Run)
		result evidence.Result
		reason string
	}{
		"an arm is missing": {func(r *evidence.Run) { r.Arms = r.Arms[1:] }, evidence.CannotTell, `no arm "offline alone"`},
		"no protected arm":  {func(r *evidence.Run) { r.Arms = r.Arms[:3] }, evidence.CannotTell, "no arm is protected"},
		"no arm at all":     {func(r *evidence.Run) { r.Arms = nil }, evidence.CannotTell, "no arm"},
		"a repeat did not run": {
			func(r *evidence.Run) { r.Arms[1].Repeats = r.Arms[1].Repeats[:1] }, evidence.CannotTell,
			"online alone: 1 of 2 repeats were run",
		},
		"one repeat is no comparison": {func(r *evidence.Run) {
			r.Planned = 1
			for i := range r.Arms {
				r.Arms[i].Repeats = r.Arms[i].Repeats[:1]
			}
		}, evidence.CannotTell, "at least two repeats"},
		"offline work that stands": {func(r *evidence.Run) { protected(r).Work = 0 }, evidence.Fail, "protected, repeat 2: the offline work made no progress"},
		"baseline that stands":     {func(r *evidence.Run) { r.Arms[0].Repeats[0].Work = 0 }, evidence.CannotTell, "the offline work made no progress"},
		"unknown progress":         {func(r *evidence.Run) { protected(r).WorkUnit = "" }, evidence.CannotTell, "the progress of the offline work is not known"},
		"a request failed": {
			func(r *evidence.Run) { protected(r).Requests[7].Failed = "exit status 1" }, evidence.Fail,
			"1 of 100 online requests failed, the first with: exit status 1",
		},
		"a request of a baseline failed": {func(r *evidence.Run) { r.Arms[1].Repeats[0].Requests[0].Failed = "x" }, evidence.CannotTell, "requests failed"},
		"no request":                     {func(r *evidence.Run) { protected(r).Requests = nil }, evidence.CannotTell, "no online request was made"},
		"a lease was refused":            {func(r *evidence.Run) { protected(r).Unprotected = 2 }, evidence.Fail, "protected, repeat 2: 2 of 100 requests ran without a lease"},
		"the daemon grows": {func(r *evidence.Run) {
			for n := range r.Arms[3].Repeats {
				for i, sample := range r.Arms[3].Repeats[n].Samples[1:] {
					sample.Values[evidence.DaemonRSS] = 40 + float64(i)
				}
			}
		}, evidence.Fail, "daemon_growth_mib: it is 20.0 MiB, and the limit is 16"},
		"lost packets":     {func(r *evidence.Run) { protected(r).Lost = 1 }, evidence.Fail, "1 packets of offline work were lost"},
		"repeated packets": {func(r *evidence.Run) { protected(r).Repeated = 3 }, evidence.Fail, "3 ran twice"},
		"HQDs that do not empty": {
			func(r *evidence.Run) { protected(r).Samples[0].Values[evidence.HQDsSuspended] = 2 }, evidence.Fail,
			"2 hardware slots had queues of suspended processes",
		},
		"too few requests": {func(r *evidence.Run) {
			for i := range r.Arms[3].Repeats {
				r.Arms[3].Repeats[i].Requests = r.Arms[3].Repeats[i].Requests[:40]
			}
		}, evidence.CannotTell, "80 samples, and it needs at least 100"},
		"repeats that differ more than the effect": {func(r *evidence.Run) { protected(r).Work = 900 }, evidence.CannotTell, "it differs by 8.00 % between the repeats"},
		"mixed origins": {func(r *evidence.Run) { r.Origin = evidence.Hardware }, evidence.CannotTell, "figures of two origins cannot be mixed"},
		"hardware called emulated": {
			func(r *evidence.Run) { r.Backend = "kfd" }, evidence.CannotTell,
			"figures of two origins cannot be mixed",
		},
		"nothing suspended": {func(r *evidence.Run) {
			for i := range r.Arms[3].Repeats {
				r.Arms[3].Repeats[i].Suspends = nil
			}
		}, evidence.CannotTell, "nothing was suspended"},
		"a fault": {
			func(r *evidence.Run) { r.Faults = []evidence.Fault{{Arm: "shared", Repeat: 1, What: "the job ended"}} }, evidence.CannotTell,
			"shared, repeat 2: the job ended",
		},
		"a failure": {func(r *evidence.Run) { r.Faults = []evidence.Fault{{What: "the daemon ended", Fails: true}} }, evidence.Fail, "the daemon ended"},
		"an alarm":  {func(r *evidence.Run) { r.Alarms = []evidence.Alarm{{From: "breaker", Text: "opened"}} }, evidence.Fail, "an alarm from breaker: opened"},
		"too slow": {func(r *evidence.Run) {
			for i := range r.Arms[3].Repeats {
				for q := range r.Arms[3].Repeats[i].Requests {
					r.Arms[3].Repeats[i].Requests[q].Total = 60
				}
			}
		}, evidence.Fail, "online_p99_ms: it is 60.0 ms, and the limit is 50.0"},
		"too much lost": {func(r *evidence.Run) {
			for i := range r.Arms[3].Repeats {
				r.Arms[3].Repeats[i].Work = 800
			}
		}, evidence.Fail, "offline_loss_percent: it is 20.0 %, and the limit is 5.00"},
	} {
		t.Run(name, func(t *testing.T) {
			run := sound()
			tc.breaks(run)
			limits := profile(t, "loss-5")
			limits.Limits["daemon_growth_mib"] = 16
			v := evidence.Judge(run, limits)
			if v.Result != tc.result || !strings.Contains(strings.Join(v.Reasons, "\n"), tc.reason) {
				t.Errorf("%s, want %s with %q:\n%s", v.Result, tc.result, tc.reason, strings.Join(v.Reasons, "\n"))
			}
		})
	}
}

func TestSlotsThatWereNotReadAreUnverified(t *testing.T) {
	const empty = "protected: whether the hardware slots of suspended processes are empty, "
	for want, unread := range map[string][]int{
		empty + "in 2 of 2 repeats: the reason": {0, 1}, empty + "in 1 of 2 repeats: the reason": {1},
	} {
		run := sound()
		for _, i := range unread {
			run.Arms[3].Repeats[i].Samples = nil
		}
		run.Arms[3].Repeats[1].SlotsUnread = "the reason"
		v := evidence.Judge(run, profile(t, "loss-5"))
		if diff := cmp.Diff([]string{want}, v.Unverified); v.Result != evidence.Pass || diff != "" {
			t.Errorf("%s: %s", v.Result, diff)
		}
	}
}

// A reason is said once, with all its places, and what made the run fail comes first and is a row of
// the criteria.
func TestReasonIsSaidOnce(t *testing.T) {
	run := sound()
	run.Faults = []evidence.Fault{{Arm: "shared", Repeat: 1, What: "a helper ended"}}
	for i := range run.Arms {
		for n := range run.Arms[i].Repeats {
			r := &run.Arms[i].Repeats[n]
			if r.WorkUnit != "" {
				r.WorkUnit, r.WorkUnknown = "", "no line matches"
			}
		}
	}
	for n, requests := range []int{3, 4} {
		run.Arms[3].Repeats[n].Unprotected, run.Arms[3].Repeats[n].UnprotectedWhy = requests, "no answer in time"
	}
	v := evidence.Judge(run, evidence.Profile{Limits: map[string]float64{"online_p99_ms": 50, "suspend_p99_ms": 5}})
	if diff := cmp.Diff([]string{
		"protected: 7 of 200 requests ran without a lease, the first because: no answer in time",
		"shared, repeat 2: a helper ended",
		"offline alone, shared and protected: the progress of the offline work is not known: no line matches",
	}, v.Reasons); diff != "" {
		t.Errorf("reasons (-want +got):\n%s", diff)
	}
	row := evidence.Criterion{
		Arm: "protected", Name: "requests_without_lease", Always: true, Figure: new(7.0), Result: evidence.Fail,
		Why: "requests ran without a lease, the first because: no answer in time",
	}
	if diff := cmp.Diff(row, v.Criteria[3]); diff != "" {
		t.Errorf("its row (-want +got):\n%s\n%+v", diff, v.Criteria)
	}

	run = sound()
	for n := range run.Arms[3].Repeats {
		run.Arms[3].Repeats[n].Suspends, run.Arms[3].Repeats[n].Resumes = nil, nil
	}
	if diff := cmp.Diff([]string{"protected: nothing was suspended"}, evidence.Judge(run, profile(t, "suspend-1ms")).Reasons); diff != "" {
		t.Errorf("without a suspend (-want +got):\n%s", diff)
	}
}

// What running jobs make impossible is not verified, and the rest has a verdict.
func TestImpossibleArmLeavesAVerdict(t *testing.T) {
	run := sound()
	run.Arms = append(run.Arms[:1:1], run.Arms[2:]...)
	run.LeftOut = map[evidence.ArmKind]string{evidence.OnlineAlone: "the offline jobs run already"}
	v := evidence.Judge(run, profile(t, "default"))
	if diff := cmp.Diff([]string{"protected: online_p99_ratio: there is no arm online alone: the offline jobs run already"}, v.Unverified); diff != "" || v.Result != evidence.Pass || len(v.Criteria) != 3 {
		t.Errorf("%s (-want +got):\n%s\n%+v", v.Result, diff, v)
	}
	if v = evidence.Judge(run, evidence.Profile{Limits: map[string]float64{"online_p99_ratio": 2}}); v.Result != evidence.CannotTell {
		t.Errorf("with no other limit: %+v", v)
	}
}

// Of one repeat no spread is known.
func TestOneRepeatHasNoSpread(t *testing.T) {
	run := sound()
	run.Planned = 1
	for i := range run.Arms {
		run.Arms[i].Repeats = run.Arms[i].Repeats[:1]
	}
	if c := evidence.Judge(run, profile(t, "stability")).Criteria; len(c) != 3 || c[0].Spread != nil || c[0].Figure == nil {
		t.Errorf("%+v", c)
	}
}

// A repeat is short of samples by what a limit needs, and not by what the plan has.
func TestRepeatIsShortOfSamples(t *testing.T) {
	p := evidence.Profile{Limits: map[string]float64{"online_p99_ratio": 2, "suspend_p99_ms": 5, "offline_overhead_percent": 5}}
	requests := func(n, failed, suspends int) *evidence.Repeat {
		r := &evidence.Repeat{Suspends: make([]evidence.Timed, suspends)}
		for i := range n {
			q := evidence.Request{Total: 5}
			if i < failed {
				q.Failed = "lost"
			}
			r.Requests = append(r.Requests, q)
		}
		return r
	}
	for _, tc := range []struct {
		kind    evidence.ArmKind
		r       *evidence.Repeat
		planned int
		want    bool
	}{
		{evidence.Protected, requests(100, 0, 100), 1, false},
		{evidence.Protected, requests(100, 1, 100), 1, true},
		{evidence.Protected, requests(110, 2, 98), 1, true},
		{evidence.Protected, requests(51, 1, 50), 2, false},
		{evidence.OnlineAlone, requests(99, 0, 0), 1, true},
		{evidence.OnlineAlone, requests(100, 0, 0), 1, false},
		{evidence.Shared, requests(1, 0, 0), 1, false},
	} {
		if got := p.Short(tc.kind, tc.r, tc.planned); got != tc.want {
			t.Errorf("%s with %d requests and %d suspends, of %d repeats: short is %v", tc.kind, len(tc.r.Requests), len(tc.r.Suspends), tc.planned, got)
		}
	}
	if got := p.Least(evidence.Protected, 3); got != 34 {
		t.Errorf("each of 3 repeats needs %d requests", got)
	}
}

// An arm that could not be run leaves the verdict open, and nothing else is said of it.
func TestArmThatWasLeftOutCannotTell(t *testing.T) {
	run := sound()
	run.Arms = append(run.Arms, evidence.Arm{Name: "protected::criu", Kind: evidence.Protected, Missing: "the daemon has no mechanism"})
	want := evidence.Judge(sound(), profile(t, "loss-5"))
	want.Result, want.Reasons = evidence.CannotTell, []string{"protected::criu was left out: the daemon has no mechanism"}
	want.Criteria = append([]evidence.Criterion{{
		Arm: "protected::criu", Name: "arm", Always: true, Result: evidence.CannotTell, Why: "the daemon has no mechanism",
	}}, want.Criteria...)
	if diff := cmp.Diff(want, evidence.Judge(run, profile(t, "loss-5"))); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	run.Arms[3].Repeats[0].Lost = 1
	if v := evidence.Judge(run, profile(t, "loss-5")); v.Result != evidence.Fail {
		t.Errorf("with a lost packet: %+v", v)
	}
}

func TestProfilesOfSuspendsHaveTheirLimits(t *testing.T) {
	for name, want := range map[string]map[string]float64{
		"suspend-1ms":   {"online_p99_ms": 15, "suspend_p99_ms": 1, "resume_p99_ms": 1},
		"suspend-500us": {"online_p99_ms": 10, "suspend_p99_ms": 0.5, "resume_p99_ms": 0.5},
		"suspend-300us": {"online_p99_ms": 5, "suspend_p99_ms": 0.3, "resume_p99_ms": 0.3},
	} {
		if diff := cmp.Diff(want, profile(t, name).Limits); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func TestProtectedArmsAreComparedWithTheFirstOfTheirSize(t *testing.T) {
	run := sound()
	protected := run.Arms[3]
	run.Arms = nil
	for _, name := range []string{"protected::a, queues 3, processes 1", "protected::b, queues 3, processes 1", "protected::a, queues 3, processes 8", "protected::b, queues 3, processes 8"} {
		arm := protected
		arm.Name, arm.Repeats = name, nil
		for _, r := range protected.Repeats {
			if strings.Contains(name, "::b") {
				r.Suspends = []evidence.Timed{{At: 1, MS: 0.1}}
			}
			arm.Repeats = append(arm.Repeats, r)
		}
		run.Arms = append(run.Arms, arm)
	}
	run.Arms = append(run.Arms, evidence.Arm{Name: "protected::c, queues 3, processes 8", Kind: evidence.Protected, Missing: "no"})
	type pair struct {
		Arm, Base string
		Ratio     float64
	}
	var got []pair
	for _, r := range evidence.Within(run) {
		if r.Figure == "suspend mean" {
			got = append(got, pair{r.Arm, r.Base, math.Round(100*r.Ratio) / 100})
		}
	}
	if diff := cmp.Diff([]pair{
		{"protected::b, queues 3, processes 1", "protected::a, queues 3, processes 1", 0.2},
		{"protected::b, queues 3, processes 8", "protected::a, queues 3, processes 8", 0.2},
	}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestProfileWithoutLimitsCannotTell(t *testing.T) {
	if v := evidence.Judge(sound(), evidence.Profile{}); v.Result != evidence.CannotTell {
		t.Errorf("%+v", v)
	}
}

func TestProfilesAreParsedStrictly(t *testing.T) {
	for text, want := range map[string]string{
		"":                    "it is empty",
		"version: 1\nname: x": "limits: is missing",
		"version: 2\nname: x\nlimits: {online_p99_ms: 1}":    "version 2 is not known",
		"version: 1\nname: x\nlimits: {online_p98_ms: 1}":    "p.yaml:3:25: limits.online_p98_ms: unknown key: did you mean online_p95_ms?",
		"version: 1\nname: x\nlimits: {online_p99_ms: -1}":   "write a number above 0 in ms",
		"version: 1\nname: x\nlimits: {online_p99_ms: .nan}": "is not a decimal number",
		"version: 1\nname: x\nlimits: {}":                    "write at least one of",
		"version: 1\nlimits: {online_p99_ms: 1}":             "name: is missing",
	} {
		if _, err := evidence.ParseProfile("p.yaml", []byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
	if _, err := evidence.LoadProfile("loss"); err == nil || !strings.Contains(err.Error(), "default, emulated, loss-10") {
		t.Errorf("error %v", err)
	}
}

func FuzzParseProfile(f *testing.F) {
	f.Add("version: 1\nname: x\nabout: y\nlimits: {online_p99_ms: 1}\n")
	f.Fuzz(func(t *testing.T, text string) {
		p, err := evidence.ParseProfile("f", []byte(text))
		if err == nil && (p.Name == "" && !strings.Contains(text, "name") || len(p.Limits) == 0) {
			t.Errorf("accepted %+v", p)
		}
	})
}

func TestEveryCriterionIsDescribed(t *testing.T) {
	for _, c := range evidence.Criteria() {
		if c.Unit == "" || c.Meaning == "" {
			t.Errorf("%+v", c)
		}
		if _, err := evidence.ParseProfile("p", fmt.Appendf(nil, "version: 1\nname: x\nlimits: {%s: 1.5}", c.Name)); err != nil {
			t.Error(err)
		}
	}
}

// On an emulated machine a server alone with a long tail says that other work uses the host's processors: the
// repeats differ because of it. Of hardware it says nothing.
func TestBusyHostIsNamedWhereTheRepeatsDiffer(t *testing.T) {
	const want = "this host is too busy to measure (the server alone needed 6 ms, and 231 ms at its slowest): repeat on a quiet host"
	limits := evidence.Profile{Name: "p", Limits: map[string]float64{"online_p50_ratio": 5}}
	judge := func(origin evidence.Origin, slowest, protected float64) []string {
		run := sound()
		run.Origin = origin
		if origin == evidence.Hardware {
			run.Backend = "kfd"
		}
		for q := range 3 {
			run.Arms[1].Repeats[1].Requests[q].Total = slowest
		}
		for q := range run.Arms[3].Repeats[1].Requests {
			run.Arms[3].Repeats[1].Requests[q].Total = protected
		}
		return evidence.Judge(run, limits).Reasons
	}
	const differs = "protected: online_p50_ratio: it differs by 8.98 times between the repeats, which is more than the distance to the limit 5.00; repeat more often, or longer"
	got := map[string][]string{
		"busy": judge(evidence.Emulated, 231, 60), "quiet": judge(evidence.Emulated, 50, 60), "hardware": judge(evidence.Hardware, 231, 60), "alike": judge(evidence.Emulated, 231, 6),
	}
	if diff := cmp.Diff(map[string][]string{"busy": {"protected: online_p50_ratio: " + want}, "quiet": {differs}, "hardware": {differs}, "alike": nil}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
