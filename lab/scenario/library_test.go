package scenario

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestScenariosOfTheLibrarySayWhatTheyShowAndWhereTheirFiguresAreFrom(t *testing.T) {
	all := Library()
	if len(all) < 30 {
		t.Errorf("%d scenarios", len(all))
	}
	for i, s := range all {
		if s.Name != names()[i] {
			t.Errorf("library/%s.yaml has the name %q", names()[i], s.Name)
		}
		if s.About == "" || s.Source == "" || strings.HasSuffix(s.About, ".") {
			t.Errorf("%s: about %q, source %q", s.Name, s.About, s.Source)
		}
	}
}

func TestLibraryHasTheRatesOfItsSources(t *testing.T) {
	for _, c := range []struct {
		name     string
		service  int
		requests float64 // of the source, in the scenario's duration
	}{
		{"disb-real", 0, 375},
		{"disb-real", 1, 202},
		{"disb-real", 3, 374},
		{"disb-real", 4, 173},
		{"gpreempt-b", 0, 220 * 60},
		{"xsched-fig7-mi50", 0, 7 * 40},
		{"mi308x-matmul", 0, 1200},
		{"epochs", 0, 20},
		{"every-100ms", 0, 6000},
	} {
		s, err := ByName(c.name)
		if err != nil {
			t.Fatal(err)
		}
		got := 0.0
		for seed := range uint64(10) {
			got += float64(len(s.Online[c.service].Arrivals.Times(seed, s.Duration))) / 10
		}
		if !near(got, c.requests, 0.05) {
			t.Errorf("%s: %s has %.1f requests, the source %.0f", c.name, s.Online[c.service].Name, got, c.requests)
		}
	}
}

func TestByNameSuggestsASimilarName(t *testing.T) {
	for name, near := range map[string]string{"disb-f": "disb-a", "": "", "../library": ""} {
		s, err := ByName(name)
		unknown, ok := errors.AsType[*UnknownError](err)
		if !ok || *unknown != (UnknownError{name, near}) || !cmp.Equal(s, Scenario{}) {
			t.Errorf("%q: %+v; want one near to %q", name, err, near)
		}
	}
}

func TestScenariosFromTheLibraryAreIndependent(t *testing.T) {
	a, err := ByName("disb-a")
	if err != nil {
		t.Fatal(err)
	}
	a.Online[0].Arrivals.Rate = 1
	a.Duration = time.Hour
	b, err := ByName("disb-a")
	if err != nil {
		t.Fatal(err)
	}
	if b.Online[0].Arrivals.Rate != 100 || b.Duration != time.Minute {
		t.Errorf("%+v", b)
	}
}
