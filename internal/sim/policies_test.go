package sim_test

import (
	"bytes"
	"flag"
	"fmt"
	"math"
	"os"
	"testing"
	"text/template"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/internal/scenario"
	"github.com/gpreempt/gpreempt/internal/sim"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

var update = flag.Bool("update", false, "write docs/policies.md")

// outcome is one line of a table of docs/policies.md.
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
	s               scenario.Scenario
	o               sim.Options
	online, offline sim.Figures
	oracle          outcome
}

func newBench(t *testing.T, name string, o sim.Options) *bench {
	s, err := scenario.ByName(name)
	if err != nil {
		t.Fatal(err)
	}
	s.Duration = min(s.Duration, 2*time.Minute)
	b := &bench{t: t, s: s, o: o}
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

func (b *bench) policy(name string, change func(*scheduler.Policy)) outcome {
	p := scheduler.DefaultPolicy()
	change(&p)
	return b.outcome(name, sim.Scheme{Kind: sim.GPreempt, Policy: p.Normalize()})
}

// regretScenarios are those of the table of regret.
var regretScenarios = []string{"gpreempt-a", "disb-real", "mi308x-t4", "xsched-fig7-mi50", "docs-bert-resnet18", "llm-serving"}

// TestPolicyDocumentIsFresh compares docs/policies.md with what the simulator says now.
func TestPolicyDocumentIsFresh(t *testing.T) {
	if testing.Short() {
		t.Skip("simulates for many seconds")
	}
	o := sim.Options{Seed: 1, Costs: sim.DefaultCosts()}
	type table struct {
		Name string
		Rows []outcome
	}
	var regret []table
	for _, name := range regretScenarios {
		b := newBench(t, name, o)
		rows := []outcome{b.oracle}
		for _, p := range scheduler.Presets() {
			if !p.Shadow {
				rows = append(rows, b.outcome(p.Preset, sim.Scheme{Kind: sim.GPreempt, Policy: p}))
			}
		}
		regret = append(regret, table{name, rows})
	}
	b := newBench(t, "disb-real", o)
	llm := newBench(t, "llm-serving", o)
	slo := newBench(t, "disb-real", o)
	for i := range slo.s.Online {
		slo.s.Online[i].SLO = 3 * slo.s.Online[i].Request.Alone()
	}
	var knobs []table
	add := func(name string, b *bench, values []string, change func(p *scheduler.Policy, i int)) {
		var rows []outcome
		for i, v := range values {
			rows = append(rows, b.policy(v, func(p *scheduler.Policy) { change(p, i) }))
		}
		knobs = append(knobs, table{name, rows})
	}
	floors := []float64{0, 0.05, 0.1, 0.2, 0.3, 0.5}
	var names []string
	for _, f := range floors {
		names = append(names, fmt.Sprint(f))
	}
	floor := func(p *scheduler.Policy, i int) { p.ShareFloor = floors[i] }
	add("share_floor, disb-real", b, names, floor)
	add("share_floor, llm-serving", llm, names, floor)
	lingers := []time.Duration{0, 1 * millisecond, 5 * millisecond, 20 * millisecond, 100 * millisecond}
	names = nil
	for _, l := range lingers {
		names = append(names, l.String())
	}
	add("linger_max with linger fixed, disb-real", b, names, func(p *scheduler.Policy, i int) { p.Linger, p.LingerMax = scheduler.LingerFixed, lingers[i] })
	add("linger_max with linger adaptive, disb-real", b, names, func(p *scheduler.Policy, i int) { p.LingerMax = lingers[i] })
	most := []time.Duration{100 * millisecond, 500 * millisecond, 2 * time.Second, 10 * time.Second, time.Minute}
	names = nil
	for _, m := range most {
		names = append(names, m.String())
	}
	add("max_suspend, llm-serving", llm, names, func(p *scheduler.Policy, i int) { p.MaxSuspend = most[i] })
	when := []scheduler.SuspendWhen{scheduler.SuspendAtOnce, scheduler.SuspendETA, scheduler.SuspendSlack}
	add("suspend_when, disb-real with an SLO of three times the work", slo, []string{"at-once", "eta", "slack"}, func(p *scheduler.Policy, i int) { p.SuspendWhen = when[i] })

	text, err := os.ReadFile("testdata/policies.md")
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	tmpl := template.Must(template.New("policies").Funcs(template.FuncMap{
		"f": func(v float64) string { return fmt.Sprintf("%.3f", math.Round(1000*v)/1000+0) },
		"p": func(v float64) string { return fmt.Sprintf("%.1f %%", math.Round(1000*v)/10+0) },
		"n": func(v float64) string { return fmt.Sprintf("%.1f", v) },
	}).Parse(string(text)))
	if err := tmpl.Execute(&out, map[string]any{"Regret": regret, "Knobs": knobs}); err != nil {
		t.Fatal(err)
	}
	const name = "../../docs/policies.md"
	if *update {
		if err := os.WriteFile(name, out.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	file, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(file), out.String()); diff != "" {
		t.Errorf("docs/policies.md is stale; run this test with -update:\n%s", diff)
	}
}
