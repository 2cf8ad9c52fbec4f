package sim

import (
	"math"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// TestEachParameterIsFittedToItsRow: one figure grows with its parameter and with the other one,
// one falls, and what is held out does not count.
func TestEachParameterIsFittedToItsRow(t *testing.T) {
	s := &set{
		name: "made up",
		parameters: []parameter{
			{"grows", "", "", 0, 10, "sum", false},
			{"falls", "", "", 0, 10, "inverse", true},
		},
		rows: []published{
			{id: "sum", value: 7, use: fitted},
			{id: "inverse", value: 0.25, use: fitted},
			{id: "other", value: 1000, use: heldOut},
		},
		figure: func(values map[string]float64, row published) (float64, error) {
			switch row.id {
			case "sum":
				return 2*values["grows"] + values["falls"], nil
			case "inverse":
				return 1 / (1 + values["falls"]), nil
			default:
				return 0, nil
			}
		},
	}
	got, err := s.fit()
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]float64{"grows": 2, "falls": 3}
	if diff := cmp.Diff(want, got, cmpopts.EquateApprox(0, 0.01)); diff != "" {
		t.Error(diff)
	}
}

func TestRowIsMetWithinTheLimit(t *testing.T) {
	for simulated, want := range map[float64]bool{100: true, 114.9: true, 85.1: true, 115.1: false, 84.9: false} {
		if got := (comparedRow{Published: 100, Simulated: simulated}).Met(); got != want {
			t.Errorf("%v for 100: met %v, want %v", simulated, got, want)
		}
	}
}

// TestDrainEndsWithAKernel: kernels of 1, 2 and 3 in a sequence that repeats.
func TestDrainEndsWithAKernel(t *testing.T) {
	k := newKernels([]time.Duration{1, 2, 3})
	for _, c := range []struct {
		pos  float64
		n    int
		want float64
	}{
		{0, 1, 0}, {0, 2, 1}, {0.5, 1, 1}, {0.5, 2, 3}, {0.5, 4, 7}, {3.5, 1, 6}, {6, 1, 6}, {6, 3, 9}, {13.5, 3, 19},
	} {
		if got := k.drain(c.pos, c.n); math.Abs(got-c.want) > 1e-9 {
			t.Errorf("%d kernels from %v on end at %v, want %v", c.n, c.pos, got, c.want)
		}
	}
}
