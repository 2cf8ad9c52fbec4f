package report

import (
	"fmt"
	"strings"

	"github.com/gpreempt/gpreempt/lab/evidence"
)

// criteriaSection is what a profile makes of each run, with its figures.
func criteriaSection(runs []evidence.Run, verdicts []evidence.Verdict, profile evidence.Profile) section {
	s := section{ID: "criteria", Title: "Verdict and criteria"}
	results := table{Head: []string{"run", "verdict", "profile", "measured on"}}
	reasons := table{Title: "Reasons", Head: []string{"run", "reason"}}
	unverified := table{Title: "Not verified", Head: []string{"run", "arm", "what"}}
	limits := table{
		Title: "Figures, limits, and the spread of the figures between the repeats",
		Head:  []string{"run", "arm", "criterion", ">figure", ">limit", "unit", ">spread", "result", "why"},
	}
	for i, v := range verdicts {
		name := clean(runs[i].Name)
		results.Rows = append(results.Rows, []string{name, string(v.Result), clean(v.Profile), clean(string(v.Origin))})
		for _, reason := range v.Reasons {
			reasons.Rows = append(reasons.Rows, []string{name, clean(reason)})
		}
		for _, what := range v.Unverified {
			arm, what, _ := strings.Cut(what, ": ")
			unverified.Rows = append(unverified.Rows, []string{name, clean(arm), clean(what)})
		}
		for _, c := range v.Criteria {
			figure, spread, sign := "-", "-", "<"
			if c.Figure != nil {
				figure = number(*c.Figure)
				if c.Name == overhead && *c.Figure < 0 {
					figure = "none"
				}
			}
			if c.Spread != nil {
				spread = number(*c.Spread)
			}
			switch {
			case c.AtLeast:
				sign = ">="
			case c.Always && c.Figure == nil:
				sign = "="
			case c.Always:
				figure, sign = fmt.Sprint(*c.Figure), "="
			}
			limits.Rows = append(limits.Rows, []string{
				name, clean(c.Arm), c.Name, figure, fmt.Sprintf("%s %g", sign, c.Limit), c.Unit, spread, string(c.Result), or(clean(c.Why)),
			})
		}
	}
	if profile.About != "" {
		s.text("Profile %s: %s", clean(profile.Name), clean(profile.About))
	}
	s.add(results, reasons, limits, unverified)
	return s
}

// comparisonSection has the figures of the other runs in proportion to those of the first one.
func comparisonSection(runs []evidence.Run) (section, error) {
	s := section{ID: "comparison", Title: "Comparison"}
	s.text("Figures of a run divided by those of %s, with the interval that contains 95 %% of the ratios of resampled runs. An interval that contains 1 shows no difference.", clean(runs[0].Name))
	t := table{Head: []string{"run", "arm", "figure", "unit", ">first", ">this", ">ratio", ">from", ">to"}}
	for i := range runs[1:] {
		ratios, err := evidence.Compare(&runs[0], &runs[i+1])
		if err != nil {
			return section{}, fmt.Errorf("%s and %s cannot be shown side by side: %w", clean(runs[0].Name), clean(runs[i+1].Name), err)
		}
		if rates := evidence.ChosenRates(&runs[0], &runs[i+1]); rates != "" {
			s.text("%s", rates)
		}
		for _, r := range ratios {
			t.Rows = append(t.Rows, []string{
				clean(runs[i+1].Name), clean(r.Arm), r.Figure, r.Unit, number(r.A), number(r.B), number(r.Ratio), number(r.Low), number(r.High),
			})
		}
	}
	if len(t.Rows) > 0 {
		s.Tables = append(s.Tables, t)
	} else {
		s.text("The runs have no figure in common.")
	}
	return s, nil
}
