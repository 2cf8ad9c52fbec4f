//go:build !race

// The race detector makes this several times as slow and finds nothing: check-gen runs TestPolicyDocumentIsFresh.

package report

import (
	"bytes"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"text/template"
	"time"

	"github.com/google/go-cmp/cmp"
	"gonum.org/v1/plot/plotter"

	"github.com/gpreempt/gpreempt/lab/scenario"
	"github.com/gpreempt/gpreempt/lab/sim"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// outcome is one line of a table of docs/reference/policies.md.
type outcome struct {
	Name                      string
	Mean, P99, Offline        float64
	Suspends                  float64 // a second
	Preemptions               int
	LatencyRegret, WorkRegret float64
	TTFT, TPOT                float64
}

// bench runs policies on a scenario, relative to each work alone and to the oracle.
type bench struct {
	t               *testing.T
	name            string
	s               scenario.Scenario
	o               sim.Options
	online, offline sim.Figures
	oracle          outcome
}

// twice is the scenario llm-serving with twice as many requests: its batch is seldom empty.
const twice = "llm-serving, twice the load"

// newBench returns a bench for a scenario of the library, or twice, of at most the length. change,
// if it is not nil, is made to the scenario.
func newBench(t *testing.T, name string, length time.Duration, change func(*scenario.Scenario)) *bench {
	t.Helper()
	library, _, double := strings.Cut(name, ", twice")
	s, err := scenario.ByName(library)
	if err != nil {
		t.Fatal(err)
	}
	if double {
		s.Online[0].Arrivals.Rate *= 2
	}
	if change != nil {
		change(&s)
	}
	s.Duration = min(s.Duration, length)
	b := &bench{t: t, name: name, s: s, o: sim.Options{Seed: 1, Costs: sim.DefaultCosts()}}
	b.online, b.offline = b.run(sim.Scheme{Kind: sim.OnlineAlone}), b.run(sim.Scheme{Kind: sim.OfflineAlone})
	b.oracle = b.outcome("oracle", sim.Scheme{Kind: sim.Oracle})
	b.oracle.LatencyRegret, b.oracle.WorkRegret = 0, 0
	return b
}

func (b *bench) run(scheme sim.Scheme) sim.Figures {
	b.t.Helper()
	r, err := sim.Run(b.s, scheme, b.o)
	if err != nil {
		b.t.Fatal(err)
	}
	return sim.Measure(r)
}

func (b *bench) outcome(name string, scheme sim.Scheme) outcome {
	f := b.run(scheme)
	o := outcome{
		Name: name, Mean: f.Mean / b.online.Mean, P99: f.P99 / b.online.P99, Offline: f.Work / b.offline.Work,
		Suspends: float64(f.Suspends) / b.s.Duration.Seconds(), Preemptions: f.Preemptions,
	}
	if b.online.TTFT > 0 {
		o.TTFT, o.TPOT = f.TTFT/b.online.TTFT, f.TPOT/b.online.TPOT
	}
	o.LatencyRegret, o.WorkRegret = o.Mean-b.oracle.Mean, b.oracle.Offline-o.Offline
	return o
}

func (b *bench) policy(name string, p scheduler.Policy) outcome {
	return b.outcome(name, sim.Scheme{Kind: sim.GPreempt, Policy: p.Normalize()})
}

// setting is a value of a knob.
type setting struct {
	name string
	set  func(*scheduler.Policy)
}

// settings returns those of a knob whose values are named as they are printed.
func settings[T any](set func(*scheduler.Policy, T), values ...T) []setting {
	var all []setting
	for _, v := range values {
		all = append(all, setting{strings.TrimSuffix(fmt.Sprint(v), "m0s") + minutes(v), func(p *scheduler.Policy) { set(p, v) }})
	}
	return all
}

// minutes returns the unit that settings cuts from whole minutes.
func minutes(v any) string {
	if d, ok := v.(time.Duration); ok && d >= time.Minute && d%time.Minute == 0 {
		return "m"
	}
	return ""
}

// knob is a knob of the policy, with values to compare.
type knob struct {
	name, file string
	// about says what the picture shows, and axis, if set, what its values are.
	about, axis string
	settings    []setting
	// base is made to the preset balanced first.
	base    func(*scheduler.Policy)
	benches []*bench
	// promised: clients rely on the knob, so its value is not a question of regret.
	promised bool
}

// knobTable are the outcomes of a knob on a scenario.
type knobTable struct {
	Name string
	Rows []outcome
}

// knobPage is the section of a knob.
type knobPage struct {
	Name, File, Alt string
	Tables          []knobTable
}

// tables simulates the values of the knob.
func (k *knob) tables() []knobTable {
	var all []knobTable
	for _, b := range k.benches {
		t := knobTable{Name: b.name}
		for _, s := range k.settings {
			p := scheduler.DefaultPolicy()
			if k.base != nil {
				k.base(&p)
			}
			s.set(&p)
			t.Rows = append(t.Rows, b.policy(s.name, p))
		}
		all = append(all, t)
	}
	return all
}

// draw draws what both kinds of work lose with each value.
func (k *knob) draw(tables []knobTable) chart {
	label := k.axis
	if label == "" {
		label = k.name
	}
	f := &figure{
		title: "SIMULATED: what " + k.name + " buys", alt: k.about,
		x: axis{label: label}, y: axis{label: "% of alone", low: 0, high: 5},
	}
	for _, s := range k.settings {
		f.x.lanes = append(f.x.lanes, s.name)
	}
	for i, t := range tables {
		latency, work := make(plotter.XYs, len(t.Rows)), make(plotter.XYs, len(t.Rows))
		for x, o := range t.Rows {
			latency[x] = plotter.XY{X: float64(x) + 0.5, Y: 100 * (o.Mean - 1)}
			work[x] = plotter.XY{X: float64(x) + 0.5, Y: 100 * o.WorkRegret}
		}
		for j, line := range []series{{name: "added latency, " + t.Name, points: latency}, {name: "lost offline work, " + t.Name, points: work}} {
			line.number = 2*i + j
			marks := line
			marks.name, marks.marks = "", true
			f.series = append(f.series, line, marks)
		}
	}
	return f.draw()
}

func knobs(t *testing.T) []knob {
	const short, full = 2 * time.Minute, 10 * time.Minute
	disb, llm, busy := newBench(t, "disb-real", short, nil), newBench(t, "llm-serving", full, nil), newBench(t, twice, full, nil)
	ms := time.Millisecond
	return []knob{
		{
			name: "max_suspend", file: "max-suspend", about: "max_suspend: from 5 s on requests of a language model lose nothing",
			settings: settings(func(p *scheduler.Policy, d time.Duration) { p.MaxSuspend = d }, 100*ms, 500*ms, 2*time.Second, 5*time.Second, 10*time.Second, time.Minute),
			benches:  []*bench{llm, busy},
		},
		{
			name: "share_floor", file: "share-floor", about: "share_floor: costs nothing until online work wants more than the rest",
			settings: settings(func(p *scheduler.Policy, f float64) { p.ShareFloor = f }, 0, 0.1, 0.2, 0.3, 0.4, 0.5),
			benches:  []*bench{llm, busy},
		},
		{
			name: "share_window", file: "share-window", about: "share_window: a longer one breaks up fewer leases",
			settings: settings(func(p *scheduler.Policy, d time.Duration) { p.ShareWindow = d }, 2*time.Second, 5*time.Second, 10*time.Second, 20*time.Second, 30*time.Second, time.Minute),
			benches:  []*bench{llm, busy},
		},
		{
			name: "min_run, share_floor=0.3", file: "min-run", about: "min_run: longer stretches of offline work, which a busy language model waits for",
			settings: settings(func(p *scheduler.Policy, d time.Duration) { p.MinRun = d }, ms, 10*ms, 50*ms, 200*ms, time.Second),
			base:     func(p *scheduler.Policy) { p.ShareFloor = 0.3 },
			benches:  []*bench{busy},
		},
		{
			name: "linger", file: "linger", about: "linger: a plain one buys some latency for much offline work; the learned one does not linger here",
			settings: append([]setting{
				{"learned", func(p *scheduler.Policy) { p.Linger = scheduler.LingerLearned }},
			}, settings(func(p *scheduler.Policy, d time.Duration) { p.Linger = d }, 0, ms, 2*ms, 5*ms, 10*ms, 20*ms)...),
			benches: []*bench{disb},
		},
		{
			name: "max_wait", file: "max-wait", about: "max_wait: a short one begins beside offline work that is not suspended yet", promised: true,
			settings: settings(func(p *scheduler.Policy, d time.Duration) { p.MaxWait = d }, 0, 500*time.Microsecond, ms, 2*ms, 5*ms, 20*ms),
			benches:  []*bench{disb},
		},
	}
}

// presetScenarios are those for which the presets are tuned.
var presetScenarios = []string{"gpreempt-a", "disb-real", "mi308x-t4", "xsched-fig7-mi50", "bert-resnet18", "llm-serving", twice}

// tried is a line of the table of policies that were tried.
type tried struct {
	Name                      string
	LatencyRegret, WorkRegret float64 // means over all scenarios
	Preemptions               int
}

// try returns the outcome of a policy over all scenarios.
func try(benches []*bench, name string, p scheduler.Policy) tried {
	out := tried{Name: name}
	for _, b := range benches {
		o := b.policy(name, p)
		out.LatencyRegret += o.LatencyRegret / float64(len(benches))
		out.WorkRegret += o.WorkRegret / float64(len(benches))
		out.Preemptions = max(out.Preemptions, o.Preemptions)
	}
	return out
}

// notable is a difference of regrets that would be worth another preset.
const notable = 0.005

// tune compares the preset balanced with others, each with one other knob, and reports those that
// would be better.
func tune(t *testing.T, benches []*bench, all []knob) []tried {
	t.Helper()
	balanced := scheduler.DefaultPolicy()
	best := try(benches, "balanced", balanced)
	list := []tried{best}
	if best.Preemptions > 1 {
		t.Errorf("balanced preempts a request %d times", best.Preemptions)
	}
	for _, k := range all {
		for _, s := range k.settings {
			p := balanced
			if k.base != nil {
				k.base(&p)
			}
			s.set(&p)
			if p.Normalize() == balanced {
				continue
			}
			name, more, _ := strings.Cut(k.name, ", ")
			name += "=" + s.name
			if more != "" {
				name += ", " + more
			}
			other := try(benches, name, p)
			list = append(list, other)
			if !k.promised && other.Preemptions <= 1 && other.LatencyRegret+other.WorkRegret < best.LatencyRegret+best.WorkRegret-notable {
				t.Errorf("balanced with %s is better than balanced: %+v, not %+v", name, other, best)
			}
		}
	}
	return list
}

// TestPolicyDocumentIsFresh compares docs/reference/policies.md and its pictures with what the simulator says
// now, and the preset balanced with policies that differ in one knob.
func TestPolicyDocumentIsFresh(t *testing.T) {
	if testing.Short() {
		t.Skip("simulates for many seconds")
	}
	docs := filepath.Join("..", "..", "docs")
	var benches []*bench
	var regret []knobTable
	for _, name := range presetScenarios {
		length := 2 * time.Minute
		if strings.HasPrefix(name, "llm-serving") {
			length = 10 * time.Minute
		}
		b := newBench(t, name, length, nil)
		benches = append(benches, b)
		rows := []outcome{b.oracle}
		for _, p := range scheduler.Presets() {
			if !p.Shadow {
				rows = append(rows, b.policy(p.Preset, p))
			}
		}
		regret = append(regret, knobTable{name, rows})
	}
	all := knobs(t)
	var pages []knobPage
	for _, k := range all {
		page := knobPage{Name: k.name, File: k.file, Alt: "SIMULATED: " + k.about, Tables: k.tables()}
		pages = append(pages, page)
		c := k.draw(page.Tables)
		same(t, filepath.Join(docs, "images", "knob-"+k.file+".svg"), picture(&c))
	}
	text, err := os.ReadFile(filepath.Join("testdata", "policies.md"))
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	tmpl := template.Must(template.New("policies").Funcs(template.FuncMap{
		"f": func(v float64) string { return fmt.Sprintf("%.3f", math.Round(1000*v)/1000+0) },
		"p": func(v float64) string { return fmt.Sprintf("%.1f %%", math.Round(1000*v)/10+0) },
		"n": func(v float64) string { return fmt.Sprintf("%.1f", v) },
	}).Parse(string(text)))
	if err := tmpl.Execute(&out, map[string]any{"Regret": regret, "Knobs": pages, "Tried": tune(t, benches, all)}); err != nil {
		t.Fatal(err)
	}
	same(t, filepath.Join(docs, "reference", "policies.md"), out.String())
}

// same compares a file with what it should be, or writes it with -update.
func same(t *testing.T, path, want string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(got), want); diff != "" {
		t.Errorf("%s is stale; run this test with -update:\n%s", path, diff)
	}
}
