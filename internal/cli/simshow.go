package cli

import (
	"fmt"
	"math"

	"github.com/spf13/cobra"

	"github.com/gpreempt/gpreempt/internal/evidence"
	"github.com/gpreempt/gpreempt/internal/scenario"
	"github.com/gpreempt/gpreempt/internal/sim"
)

func printSimulated(p *printer, s scenario.Scenario, r *simResult, dir string) {
	p.line(cell{simulatedNote, styleNote})
	p.linef("%s: %s", s.Name, s.About)
	p.linef("")
	llm := false
	for _, a := range r.Arms {
		llm = llm || a.TTFT > 0
	}
	cols := columns{"SCHEME", ">REQUESTS", ">MEAN", ">P50", "+>P95", ">P99", "+>MAX", ">MEAN/ALONE", ">P99/ALONE", ">OFFLINE", ">SUSPENDS", ">PREEMPTIONS"}
	if llm {
		cols = columns{"SCHEME", ">REQUESTS", ">TTFT", "+>TTFT P99", ">TPOT", "+>TPOT P99", ">TTFT/ALONE", ">TPOT/ALONE", ">P99/ALONE", ">OFFLINE", ">SUSPENDS", ">PREEMPTIONS"}
	}
	t := p.table("", cols)
	unfinished := 0
	for _, a := range r.Arms {
		unfinished += a.Unfinished
		requests := fmt.Sprint(a.Requests)
		if a.Unfinished > 0 {
			requests = fmt.Sprintf("%d of %d", a.Requests-a.Unfinished, a.Requests)
		}
		none := a.Requests == a.Unfinished
		time := func(v float64) string { return simCell(none, "%.2f ms", v) }
		times := func(v float64) string { return simCell(none, "%.3f", v) }
		values := []any{a.name(), requests}
		if llm {
			values = append(values, time(a.TTFT), time(a.TTFTP99), time(a.TPOT), time(a.TPOTP99), times(a.TTFTRatio), times(a.TPOTRatio))
		} else {
			values = append(values, time(a.Mean), time(a.P50), time(a.P95), time(a.P99), time(a.Max), times(a.MeanRatio))
		}
		t.row(append(values, times(a.P99Ratio), simCell(a.Scheme == sim.OnlineAlone, "%.1f %%", 100*a.OfflineShare), a.Suspends, a.Preemptions)...)
	}
	t.flush()
	p.linef("")
	p.linef("OFFLINE is the offline work relative to offline alone, PREEMPTIONS the most that one request caused.")
	if unfinished > 0 {
		p.linef("Requests without a result are not in the latencies: the GPUs are overloaded.")
	}
	if dir != "" {
		p.linef("The run is in %s; gpctl report shows it.", dir)
	}
}

// simCell formats a value, or "-" for none.
func simCell(none bool, format string, v float64) string {
	if none {
		return "-"
	}
	return fmt.Sprintf(format, v)
}

func (a *app) simFit() *cobra.Command {
	return &cobra.Command{
		Use:   "fit",
		Short: "Fit the model to published figures and show the parameters",
		Args:  operands(),
		RunE: func(*cobra.Command, []string) error {
			parameters, err := sim.Fit()
			if err != nil {
				return err
			}
			return a.show(map[string]any{"parameters": parameters}, func(p *printer) { printParameters(p, parameters) })
		},
	}
}

// simValidation is the output of validate for programs.
type simValidation struct {
	Origin evidence.Origin `json:"origin"`
	sim.Validation
	Ours []sim.Ours `json:"ours"`
}

func (a *app) simValidate() *cobra.Command {
	var (
		trace    string
		markdown bool
	)
	cmd := &cobra.Command{
		Use:   "validate",
		Short: "Compare the simulator with published figures, and simulate gpreempt beside them",
		Args:  operands(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if markdown && a.forPrograms() {
				return usage(cmd, "--markdown is a form of output: it does not go with --output")
			}
			var points []scenario.Arrival
			if trace != "" {
				s, err := (&simFlags{trace: trace}).scenario("llm-serving")
				if err != nil {
					return err
				}
				points = s.Online[0].Arrivals.Points
			}
			v := simValidation{Origin: evidence.Simulated}
			var err error
			if v.Validation, err = sim.Validate(); err != nil {
				return err
			}
			if v.Ours, err = sim.OurRows(v.Parameters, points); err != nil {
				return err
			}
			if markdown {
				return validationDocument(a.Out, v)
			}
			return a.show(v, func(p *printer) { printValidation(p, v) })
		},
	}
	cmd.Flags().StringVar(&trace, "trace", "", "CSV `FILE` with the Azure LLM trace, for the rows of LLM serving")
	cmd.Flags().BoolVar(&markdown, "markdown", false, "print docs/reference/validation.md")
	return cmd
}

func printParameters(p *printer, parameters []sim.Parameter) {
	t := p.table("", columns{"SET", "PARAMETER", ">VALUE", "FITTED TO", "MEANING"})
	for _, q := range parameters {
		t.row(q.Set, q.Name, simValue(q.Value, q.Unit), q.Row, q.Meaning)
	}
	t.flush()
}

// ourPolicy names the policy of a row, and how much earlier than in the scenario it is announced.
func ourPolicy(o sim.Ours) string {
	if o.Ahead == 0 {
		return o.Policy
	}
	return fmt.Sprintf("%s, %g ms ahead", o.Policy, o.Ahead)
}

func printValidation(p *printer, v simValidation) {
	p.line(cell{simulatedNote, styleNote})
	p.linef("")
	printParameters(p, v.Parameters)
	p.linef("")
	t := p.table("", columns{"SET", "SCENARIO", "SCHEME", "FIGURE", ">PUBLISHED", ">SIMULATED", ">ERROR", "USE", "", "+REASON"})
	for _, r := range v.Rows {
		t.row(r.Set, r.Scenario, string(r.Scheme), r.Figure, simValue(r.Published, r.Unit), simValue(r.Simulated, r.Unit), simError(r.Error()), string(r.Use), simVerdict(r.Met()), r.Reason)
	}
	t.flush()
	p.linef("")
	p.linef("gpreempt in the same scenarios, by the time that a suspend and a resume take; relative to online work alone:")
	t = p.table("", columns{"SCENARIO", "POLICY", ">COST", ">MEAN", ">P99", ">TTFT", ">TPOT", ">OFFLINE", ">PREEMPTIONS", "", "+GOAL", "+REASON"})
	for _, o := range v.Ours {
		t.row(o.Scenario, ourPolicy(o), fmt.Sprintf("%g ms", o.Cost), fmt.Sprintf("%.3f", o.Mean), fmt.Sprintf("%.3f", o.P99), simCell(o.TTFT == 0, "%.3f", o.TTFT),
			simCell(o.TTFT == 0, "%.3f", o.TPOT), fmt.Sprintf("%.1f %%", 100*o.Share), o.Preemptions, simVerdict(o.Met), o.Goal, o.Reason)
	}
	t.flush()
}

func simVerdict(met bool) cell {
	if met {
		return cell{"met", styleGood}
	}
	return cell{"MISSED", styleBad}
}

func simValue(v float64, unit string) string {
	text := fmt.Sprintf("%.4g", v)
	if unit == "" || unit == "x" {
		return text + unit
	}
	return text + " " + unit
}

// simError formats a relative error in percent.
func simError(e float64) string {
	if e = math.Round(1000 * e); e == 0 {
		return "0.0 %" // not -0.0
	}
	return fmt.Sprintf("%+.1f %%", e/10)
}
