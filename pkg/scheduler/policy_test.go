package scheduler

import (
	"errors"
	"math"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestPresetsAreValidAndKnowTheirNames(t *testing.T) {
	var names []string
	for _, p := range Presets() {
		names = append(names, p.Preset)
		if err := p.Validate(); err != nil {
			t.Errorf("%s: %v", p.Preset, err)
		}
		byName, err := PresetByName(p.Preset)
		if err != nil || byName != p {
			t.Errorf("PresetByName(%q) = %+v, %v", p.Preset, byName, err)
		}
		anonymous := p
		anonymous.Preset = "whatever"
		if got := anonymous.Normalize(); got != p {
			t.Errorf("the knobs of %s normalize to %s", p.Preset, got.Preset)
		}
	}
	if diff := cmp.Diff([]string{"balanced", "strict", "share", "shadow"}, names); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(names, PresetNames()); diff != "" {
		t.Error(diff)
	}
	if got := DefaultPolicy().Preset; got != "balanced" {
		t.Errorf("the default is %q", got)
	}
	_, err := PresetByName("best")
	if diff := cmp.Diff(`unknown policy preset "best"; use one of balanced, strict, share, shadow`, err.Error()); diff != "" {
		t.Error(diff)
	}
}

func TestEachKnobMakesAPolicyCustom(t *testing.T) {
	for knob, turn := range map[string]func(*Policy){
		"linger":       func(p *Policy) { p.Linger++ },
		"share_floor":  func(p *Policy) { p.ShareFloor += 0.01 },
		"share_cap":    func(p *Policy) { p.ShareCap -= 0.01 },
		"share_window": func(p *Policy) { p.ShareWindow++ },
		"max_suspend":  func(p *Policy) { p.MaxSuspend++ },
		"min_run":      func(p *Policy) { p.MinRun++ },
		"max_wait":     func(p *Policy) { p.MaxWait++ },
		"default_ttl":  func(p *Policy) { p.DefaultTTL++ },
		"max_ttl":      func(p *Policy) { p.MaxTTL++ },
	} {
		p := DefaultPolicy()
		turn(&p)
		want := p
		want.Preset = PresetCustom
		if got := p.Normalize(); got != want {
			t.Errorf("%s turned: %+v", knob, got)
		}
	}
}

func TestValidateNamesTheKnobOutOfRange(t *testing.T) {
	type limits struct {
		knob     string
		set      func(*Policy, time.Duration)
		min, max time.Duration
	}
	for _, l := range []limits{
		{"linger", func(p *Policy, d time.Duration) { p.Linger = d }, LingerLearned, time.Second},
		{"share_window", func(p *Policy, d time.Duration) { p.ShareWindow = d }, 100 * time.Millisecond, 10 * time.Minute},
		{"max_suspend", func(p *Policy, d time.Duration) { p.MaxSuspend = d }, 10 * time.Millisecond, 10 * time.Minute},
		{"min_run", func(p *Policy, d time.Duration) { p.MinRun = d }, time.Millisecond, time.Minute},
		{"max_wait", func(p *Policy, d time.Duration) { p.MaxWait = d }, 0, 10 * time.Second},
		{"default_ttl", func(p *Policy, d time.Duration) { p.DefaultTTL = d }, time.Millisecond, time.Minute},
		{"max_ttl", func(p *Policy, d time.Duration) { p.MaxTTL, p.DefaultTTL = d, min(d, p.DefaultTTL) }, time.Millisecond, 10 * time.Minute},
	} {
		for _, c := range []struct {
			value time.Duration
			ok    bool
		}{{l.min, true}, {l.max, true}, {l.min - 1, false}, {l.max + 1, false}, {-time.Hour, false}, {math.MaxInt64, false}} {
			p := DefaultPolicy()
			l.set(&p, c.value)
			checkKnob(t, p, l.knob, c.ok)
		}
	}
	for share, ok := range map[float64]bool{0: true, 0.95: true, 1e-9: true, 0.951: false, -0.001: false, 1: false, math.Inf(1): false, math.NaN(): false} {
		p := DefaultPolicy()
		p.ShareFloor = share
		checkKnob(t, p, "share_floor", ok)
	}
	for share, ok := range map[float64]bool{0.05: true, 0.5: true, 1: true, 0.049: false, 1.001: false, 0: false, -1: false, math.Inf(1): false, math.NaN(): false} {
		p := DefaultPolicy()
		p.ShareFloor, p.ShareCap = 0, share
		checkKnob(t, p, "share_cap", ok)
	}
}

func TestTheShareCapContradictsWhatLetsAJobRunForLonger(t *testing.T) {
	for want, turn := range map[string]func(*Policy){
		"": func(p *Policy) { p.ShareFloor, p.ShareCap = 0.5, 0.5 },
		"share_cap: 0.4 is less than share_floor, 0.5":                                                                 func(p *Policy) { p.ShareFloor, p.ShareCap = 0.5, 0.4 },
		"share_cap: 0.3 is less than 0.33: max_suspend ends each suspension after 100ms, and a job runs for 50ms then": func(p *Policy) { p.MaxSuspend, p.ShareCap = 100*time.Millisecond, 0.3 },
		"share_cap: 0.2 is less than 0.25: max_suspend ends each suspension after 150ms, and a job runs for 50ms then": func(p *Policy) { p.ShareWindow, p.ShareCap = 200*time.Millisecond, 0.2 },
	} {
		p := DefaultPolicy()
		turn(&p)
		got := ""
		if err := p.Validate(); err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("%+v: %q, want %q", p, got, want)
		}
	}
}

func checkKnob(t *testing.T, p Policy, knob string, ok bool) {
	t.Helper()
	err := p.Validate()
	wrong, isKnob := errors.AsType[*KnobError](err)
	switch {
	case ok && err != nil:
		t.Errorf("%+v: %v", p, err)
	case !ok && err == nil:
		t.Errorf("%s of %+v is accepted", knob, p)
	case !ok && (!isKnob || wrong.Knob != knob || wrong.Problem == ""):
		t.Errorf("%s of %+v: %v", knob, p, err)
	}
}

func TestEnumsHaveTheNamesOfTheAPI(t *testing.T) {
	got := map[string][]string{}
	for v := range uint8(16) {
		got["target"] = append(got["target"], TargetState(v).String())
		got["lease"] = append(got["lease"], LeaseState(v).String())
		got["end"] = append(got["end"], LeaseEnd(v).String())
	}
	want := map[string][]string{
		"target": {"none", "running", "suspending", "suspended", "resuming", "quarantined", "gone", "state(7)", "state(8)", "state(9)", "state(10)", "state(11)", "state(12)", "state(13)", "state(14)", "state(15)"},
		"lease":  {"none", "requested", "quiescing", "held", "ended", "state(5)", "state(6)", "state(7)", "state(8)", "state(9)", "state(10)", "state(11)", "state(12)", "state(13)", "state(14)", "state(15)"},
		"end":    {"none", "completed", "expired", "disconnected", "client-died", "idle", "released", "end(7)", "end(8)", "end(9)", "end(10)", "end(11)", "end(12)", "end(13)", "end(14)", "end(15)"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}
