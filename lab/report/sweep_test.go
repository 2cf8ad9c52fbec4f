package report

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpreempt/gpreempt/lab/evidence"
	"github.com/gpreempt/gpreempt/lab/scenario"
	"github.com/gpreempt/gpreempt/lab/sim"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// sweep simulates share floors of the preset balanced, and other ways to share a GPU, on a scenario
// of the library.
func sweep(t *testing.T, name string) evidence.Run {
	t.Helper()
	s, err := scenario.ByName(name)
	if err != nil {
		t.Fatal(err)
	}
	run := evidence.Run{Format: evidence.Format, Name: name, Command: "plan", Origin: evidence.Simulated, Backend: "simulated", Seed: 1, Planned: 1}
	balanced, err := scheduler.PresetByName("balanced")
	if err != nil {
		t.Fatal(err)
	}
	o := sim.PlanOptions{
		Policies: []sim.NamedPolicy{{Name: "balanced", Policy: balanced}}, Floors: []float64{0.1, 0.7, 0.8, 0.9},
		Options: sim.Options{Seed: run.Seed, Costs: sim.DefaultCosts()}, Repeats: 1,
		Keep: func(a evidence.Arm) error {
			run.Arms = append(run.Arms, a)
			return nil
		},
	}
	if _, err := sim.PlanScenario(s, o); err != nil {
		t.Fatal(err)
	}
	for _, kind := range []sim.Kind{sim.BlockWait, sim.Sequential, sim.TimeSlice, sim.Throttle, sim.Oracle} {
		a, err := sim.Arm(string(kind), s, sim.Scheme{Kind: kind}, o.Options, o.Repeats)
		if err != nil {
			t.Fatal(err)
		}
		run.Arms = append(run.Arms, a)
	}
	return run
}

// TestFrontierPictureOfTheDocument keeps the frontier in docs/trial.md, which is simulated:
//
//	go test ./internal/report -run OfTheDocument -update
func TestFrontierPictureOfTheDocument(t *testing.T) {
	r, err := New([]evidence.Run{sweep(t, "disb-real")}, profile(t))
	if err != nil {
		t.Fatal(err)
	}
	var got bytes.Buffer
	if err := r.Frontier(&got); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join("..", "..", "docs", "images", "frontier.svg")
	if *update {
		if err := os.WriteFile(path, got.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got.String()); diff != "" {
		t.Errorf("run go test -update (-want +got):\n%s", diff)
	}
}
