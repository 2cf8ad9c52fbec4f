package sim

import (
	"fmt"
	"math"

	"github.com/gpreempt/gpreempt/lab/scenario"
)

// errorLimit is the error up to which a simulated figure counts as that of the publication.
const errorLimit = 0.15

// rowUse is what a published row is for.
type rowUse string

// The uses.
const (
	// fitted: a parameter was set so that the row is met.
	fitted rowUse = "fitted"
	// assumed: a time of the scenario, which is not published, was assumed from it.
	assumed rowUse = "assumed"
	// heldOut: nothing was set by it.
	heldOut rowUse = "held out"
)

// comparedRow is a published figure beside the simulated one.
type comparedRow struct {
	Set      string
	Scenario string
	Scheme   Kind
	// Figure says what was measured, in Unit.
	Figure    string
	Unit      string
	Published float64
	Simulated float64
	Use       rowUse
	// Reason is why a row is missed, if that is known.
	Reason string
}

// Error returns how far the simulated figure is from the published one, relative to that.
func (r comparedRow) Error() float64 { return r.Simulated/r.Published - 1 }

// Met reports whether the error is within errorLimit.
func (r comparedRow) Met() bool { return math.Abs(r.Error()) <= errorLimit }

// fittedParameter is a value that was fitted to one row.
type fittedParameter struct {
	Set     string
	Name    string
	Meaning string
	Value   float64
	Unit    string
	// Row is the figure of the row that it was fitted to.
	Row string
}

// validation is the comparison with all publications.
type validation struct {
	Parameters []fittedParameter
	Rows       []comparedRow
}

// set is the rows of one publication on one machine.
type set struct {
	name, source string
	parameters   []parameter
	rows         []published
	// figure simulates the figure of a row.
	figure func(values map[string]float64, row published) (float64, error)
}

// parameter is fitted by bisection: the figure of the row grows with it, or falls.
type parameter struct {
	name, meaning, unit string
	least, most         float64
	row                 string // id
	falls               bool
}

// published is a row as it was published.
type published struct {
	id       string
	scenario string // for readers
	scheme   Scheme
	figure   string
	unit     string
	value    float64
	use      rowUse
	reason   string // why the model cannot meet it, for when it does not
}

// fitRounds is how often all parameters of a set are fitted one after another, and fitSteps the
// bisections of each.
const (
	fitRounds = 3
	fitSteps  = 14
)

// validate fits the parameters and simulates every published row.
func validate() (v validation, err error) {
	all, err := sets()
	if err != nil {
		return v, err
	}
	for _, s := range all {
		values, err := s.fit()
		if err != nil {
			return v, fmt.Errorf("%s: %w", s.name, err)
		}
		for _, p := range s.parameters {
			v.Parameters = append(v.Parameters, fittedParameter{s.name, p.name, p.meaning, values[p.name], p.unit, s.row(p.row).figure + ", " + string(s.row(p.row).scheme.Kind)})
		}
		for _, r := range s.rows {
			got, err := s.figure(values, r)
			if err != nil {
				return v, fmt.Errorf("%s: %s: %w", s.name, r.id, err)
			}
			row := comparedRow{s.name, r.scenario, r.scheme.Kind, r.figure, r.unit, r.value, got, r.use, ""}
			if !row.Met() {
				row.Reason = r.reason
			}
			v.Rows = append(v.Rows, row)
		}
	}
	return v, nil
}

func (s *set) row(id string) published {
	for _, r := range s.rows {
		if r.id == id {
			return r
		}
	}
	panic("sim: no row " + id)
}

// fit returns the values of the parameters by name.
func (s *set) fit() (map[string]float64, error) {
	values := map[string]float64{}
	for _, p := range s.parameters {
		values[p.name] = (p.least + p.most) / 2
	}
	for range fitRounds {
		for _, p := range s.parameters {
			row := s.row(p.row)
			least, most := p.least, p.most
			for range fitSteps {
				values[p.name] = (least + most) / 2
				got, err := s.figure(values, row)
				if err != nil {
					return nil, err
				}
				if (got < row.value) != p.falls {
					least = values[p.name]
				} else {
					most = values[p.name]
				}
			}
		}
	}
	return values, nil
}

// scaled returns the scenario with all GPU work taking factor times as long and, if occupancy is
// above 0, filling that part of the GPU.
func scaled(s scenario.Scenario, factor, occupancy float64) scenario.Scenario {
	s.Online = append([]scenario.Service(nil), s.Online...)
	s.Offline = append([]scenario.Job(nil), s.Offline...)
	change := func(w *scenario.Work) {
		w.Total = scaleTime(w.Alone(), factor)
		if occupancy > 0 {
			w.Occupancy = occupancy
		}
	}
	for i := range s.Online {
		change(&s.Online[i].Request)
	}
	for i := range s.Offline {
		change(&s.Offline[i].Step)
	}
	return s
}
