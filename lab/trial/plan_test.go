package trial

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/lab/evidence"
	"github.com/gpreempt/gpreempt/lab/scenario"
)

// full is a plan with a value of everything.
func full() Plan {
	return Plan{
		Name: "all: of \"it\"", About: "a line\nand another\t\\ ",
		Online:   Online{Command: "serve --port 1", Request: RequestByLine, Ready: "ready", Answer: `^a\d`, AnnouncedByCommand: true, MaxWait: 20 * time.Millisecond},
		Offline:  Offline{Commands: []string{"train # 1", "train 2"}, Progress: `count (\d+)`, Unit: "batches"},
		Arrivals: scenario.Arrivals{Kind: scenario.Bursts, Rate: 2.5, CV: 1, Burst: 3, BurstGap: time.Millisecond},
		Count:    100, Duration: 90 * time.Second,
		Arms: []Arm{
			{Kind: evidence.OfflineAlone},
			{Kind: evidence.Protected, Policy: "strict", Mechanism: "dbgtrap"},
			{Kind: evidence.Protected, Mechanism: "freezer"},
			{Kind: evidence.Protected, Policy: "share", Queues: 10, Processes: 8},
		},
		Repeats: 4, WarmUp: 3 * time.Second, Profile: "./mine.yaml", GPUs: []uint32{34535, 7}, Seed: 9, NoKFDTrace: true, HIPLog: 4,
	}
}

func TestPlanIsReadAsItWasWritten(t *testing.T) {
	gaps := full()
	gaps.Arrivals, gaps.Gaps = scenario.Arrivals{}, [2]time.Duration{time.Second, 10 * time.Second}
	running := full()
	running.Offline = Offline{PIDs: []int32{4, 5}, Containers: []string{"a", "b"}}
	for _, want := range []Plan{full(), gaps, running, {Name: "x", Online: Online{Hold: time.Millisecond}}} {
		got, err := Parse("plan.yaml", []byte(want.YAML()))
		if err != nil {
			t.Fatalf("%v in\n%s", err, want.YAML())
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("(-want +got):\n%s\n%s", diff, want.YAML())
		}
	}
}

func TestShippedPlansAreComplete(t *testing.T) {
	for _, name := range PlanNames() {
		file, text, err := ReadPlan(name)
		if err != nil {
			t.Fatal(err)
		}
		p, err := Parse(file, text)
		if err != nil {
			t.Fatal(err)
		}
		if p.Name != name || p.About == "" {
			t.Errorf("%s: name %q, about %q", name, p.Name, p.About)
		}
		if p.Online.Command == "" {
			p.Online.Request, p.Offline.Commands = "http://127.0.0.1:8000/", []string{"train"} // which the user gives
		}
		if err := p.Check(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := evidence.LoadProfile(p.Profile); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if n := len(p.times(0)); p.Count > 0 && n != p.Count || n == 0 {
			t.Errorf("%s: %d requests of %d", name, n, p.Count)
		}
	}
}

func TestPlanErrorsNameThePlace(t *testing.T) {
	for text, want := range map[string]string{
		"":                                    "it is empty",
		"name: x":                             "version: is missing",
		"version: 7":                          "version 7 is not known",
		"version: 1\ncuont: 3":                "p.yaml:2:1: cuont: unknown key: did you mean count?",
		"version: 1\narms: [both]":            `arms[0]: "both" is not an arm`,
		"version: 1\ngaps: [1s]":              "gaps: has 1 items",
		"version: 1\nduration: 5":             "duration: 5 has no unit",
		"version: 1\noffline: {pids: [0]}":    "offline.pids[0]: 0 is outside 1 to 2147483647",
		"version: 1\narrivals: {kind: cosed}": `arrivals.kind: "cosed" is not known here`,
	} {
		if _, err := Parse("p.yaml", []byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

func TestIncompletePlansAreRefused(t *testing.T) {
	for want, change := range map[string]func(p *Plan){
		"online: there is no online work": func(p *Plan) { p.Online = Online{} },
		"online.command: is missing":      func(p *Plan) { p.Online.Command = "" },
		"offline alone":                   func(p *Plan) { p.Arms = append(p.Arms, p.Arms[0]) },
		"there is no offline work":        func(p *Plan) { p.Offline.Commands = nil },
		"online alone cannot be run":      func(p *Plan) { p.Offline.PIDs = []int32{1}; p.Arms = new(Plan).DefaultArms() },
		"stream priority cannot be run": func(p *Plan) {
			p.Offline.PIDs, p.Arms = []int32{1}, []Arm{{Kind: evidence.StreamPriority}}
		},
		"offline.progress: has no group":         func(p *Plan) { p.Offline.Progress = "step" },
		"offline.progress: error parsing regexp": func(p *Plan) { p.Offline.Progress = "(" },
		"count: nothing says when a repeat ends": func(p *Plan) { p.Online, p.Count, p.Duration = Online{Command: "serve"}, 0, 0 },
		"arrivals.rate: 0 is out of range":       func(p *Plan) { p.Arrivals.Rate = 0 },
		"bursts overlap":                         func(p *Plan) { p.Arrivals.BurstGap = time.Hour },
		"gaps: contradicts arrivals":             func(p *Plan) { p.Gaps = [2]time.Duration{1, 2} },
		`online.request: "http://" is not a URL`: func(p *Plan) { p.Online.Request = "http://" },
		"online.hold: replaces command":          func(p *Plan) { p.Online.Hold = 1 },
		"repeats: 1001 is out of range":          func(p *Plan) { p.Repeats = 1001 },
		"offline work alone is measured": func(p *Plan) {
			p.Online.Request, p.Online.Ready, p.Online.Answer, p.Duration, p.Arrivals = "", "", "", 0, scenario.Arrivals{}
		},
		"too many processes or queues": func(p *Plan) { p.Arms[0].Processes = 65 },
	} {
		p := full()
		change(&p)
		if err := p.Check(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
	p := full()
	if err := p.Check(); err != nil {
		t.Error(err)
	}
}

// A plan of two commands and a way to ask is complete: the rest has defaults, some by what the work is.
func TestShortestPlanIsComplete(t *testing.T) {
	p := Plan{Online: Online{Command: "serve", Request: RequestByLine}, Offline: Offline{Commands: []string{"train"}}}
	if err := p.Check(); err != nil {
		t.Fatal(err)
	}
	if p.Count*p.Repeats < 100 || !p.chosenRate() || p.Profile != "" || p.Estimate() > 2*time.Minute {
		t.Errorf("%+v takes %v", p, p.Estimate())
	}
	hardware := p
	p.suit(evidence.Emulated)
	hardware.suit(evidence.Hardware)
	if p.Profile != "emulated" || p.Online.MaxWait != emulatedWait || hardware.Profile != evidence.DefaultProfile || hardware.Online.MaxWait != 0 {
		t.Errorf("emulated %+v, hardware %+v", p, hardware)
	}
	running := Plan{Online: p.Online, Offline: Offline{Containers: []string{"train"}}}
	if err := running.Check(); err != nil || running.wants(evidence.OnlineAlone) || len(running.Arms) != 3 {
		t.Errorf("with jobs that run already: %v, %+v", err, running.Arms)
	}
}

func TestRateIsChosenByARequest(t *testing.T) {
	for took, want := range map[time.Duration]float64{
		0: 10, 5 * time.Millisecond: 10, 40 * time.Millisecond: 6, 300 * time.Millisecond: 0.83, 2 * time.Second: 0.12, time.Minute: 0.01,
	} {
		if got := rateFor(took); got != want {
			t.Errorf("%v: %v per second, want %v", took, got, want)
		}
	}
}

func TestArmsHaveTheNameThatIsParsed(t *testing.T) {
	for _, arm := range append(append(full().Arms, new(Plan).DefaultArms()...), Arm{Kind: evidence.StreamPriority}) {
		got, err := ParseArm(arm.Name())
		if err != nil || got != arm {
			t.Errorf("%q is parsed as %+v, %v", arm.Name(), got, err)
		}
	}
	for _, s := range []string{"", "protected:", "protected:a:b:c", "shared:strict", "protected, queues 3", "protected::"} {
		if arm, err := ParseArm(s); err == nil {
			t.Errorf("%q is parsed as %+v", s, arm)
		}
	}
}

func TestGapsAreWithinTheirRangeAndRepeatable(t *testing.T) {
	p := Plan{Gaps: [2]time.Duration{time.Second, 10 * time.Second}, Duration: time.Hour, Seed: 1}
	times := p.times(0)
	last := time.Duration(0)
	for _, at := range times {
		if gap := at - last; gap < time.Second || gap > 10*time.Second {
			t.Fatalf("a gap of %v", gap)
		}
		last = at
	}
	if n := len(times); n < 500 || n > 800 {
		t.Errorf("%d requests in an hour", n)
	}
	if !slices.Equal(times, p.times(0)) || slices.Equal(times, p.times(1)) {
		t.Error("the times of a repeat change, or those of two are the same")
	}
}

func FuzzParse(f *testing.F) {
	p := full()
	f.Add(p.YAML())
	for _, name := range PlanNames() {
		_, text, err := ReadPlan(name)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(string(text))
	}
	f.Fuzz(func(t *testing.T, text string) {
		p, err := Parse("f", []byte(text))
		if err != nil {
			return
		}
		again, err := Parse("f", []byte(p.YAML()))
		if err != nil {
			t.Fatalf("%v in\n%s", err, p.YAML())
		}
		if diff := cmp.Diff(p.YAML(), again.YAML()); diff != "" {
			t.Errorf("(-first +second):\n%s", diff)
		}
		_ = p.Check() // it must not panic
	})
}
