package cli

import (
	"fmt"
	"math"

	"github.com/spf13/cobra"

	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/lab/evidence"
	"github.com/gpreempt/gpreempt/lab/scenario"
	"github.com/gpreempt/gpreempt/lab/sim"
)

func printSimulated(p *term.Printer, s scenario.Scenario, r *simResult, dir string) {
	p.Line(term.Cell{Text: simulatedNote, Style: term.StyleNote})
	p.Linef("%s: %s", s.Name, s.About)
	p.Linef("")
	llm := false
	for _, a := range r.Arms {
		llm = llm || a.TTFT > 0
	}
	cols := term.Columns{"SCHEME", ">REQUESTS", ">MEAN", ">P50", "+>P95", ">P99", "+>MAX", ">MEAN/ALONE", ">P99/ALONE", ">OFFLINE", ">SUSPENDS", ">PREEMPTIONS"}
	if llm {
		cols = term.Columns{"SCHEME", ">REQUESTS", ">TTFT", "+>TTFT P99", ">TPOT", "+>TPOT P99", ">TTFT/ALONE", ">TPOT/ALONE", ">P99/ALONE", ">OFFLINE", ">SUSPENDS", ">PREEMPTIONS"}
	}
	t := p.Table("", cols)
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
		t.Row(append(values, times(a.P99Ratio), simCell(a.Scheme == sim.OnlineAlone, "%.1f %%", 100*a.OfflineShare), a.Suspends, a.Preemptions)...)
	}
	t.Flush()
	p.Linef("")
	p.Linef("OFFLINE is the offline work relative to offline alone, PREEMPTIONS the most that one request caused.")
	if unfinished > 0 {
		p.Linef("Requests without a result are not in the latencies: the GPUs are overloaded.")
	}
	if dir != "" {
		p.Linef("The run is in %s; gplab report shows it.", dir)
	}
}

// simCell formats a value, or "-" for none.
func simCell(none bool, format string, v float64) string {
	if none {
		return "-"
	}
	return fmt.Sprintf(format, v)
}

func simFit(a *term.App) *cobra.Command {
	return &cobra.Command{
		Use:   "fit",
		Short: "Fit the model to published figures and show the parameters",
		Args:  term.Operands(),
		RunE: func(*cobra.Command, []string) error {
			parameters, err := sim.Fit()
			if err != nil {
				return err
			}
			return a.Show(map[string]any{"parameters": parameters}, func(p *term.Printer) { printParameters(p, parameters) })
		},
	}
}

// simValidation is the output of validate for programs.
type simValidation struct {
	Origin evidence.Origin `json:"origin"`
	sim.Validation
	Ours []sim.Ours `json:"ours"`
}

func simValidate(a *term.App) *cobra.Command {
	var (
		trace    string
		markdown bool
	)
	cmd := &cobra.Command{
		Use:   "validate",
		Short: "Compare the simulator with published figures, and simulate gpreempt beside them",
		Args:  term.Operands(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if markdown && a.ForPrograms() {
				return term.Usage(cmd, "--markdown is a form of output: it does not go with --output")
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
			return a.Show(v, func(p *term.Printer) { printValidation(p, v) })
		},
	}
	cmd.Flags().StringVar(&trace, "trace", "", "CSV `FILE` with the Azure LLM trace, for the rows of LLM serving")
	cmd.Flags().BoolVar(&markdown, "markdown", false, "print docs/reference/validation.md")
	return cmd
}

func printParameters(p *term.Printer, parameters []sim.Parameter) {
	t := p.Table("", term.Columns{"SET", "PARAMETER", ">VALUE", "FITTED TO", "MEANING"})
	for _, q := range parameters {
		t.Row(q.Set, q.Name, simValue(q.Value, q.Unit), q.Row, q.Meaning)
	}
	t.Flush()
}

// ourPolicy names the policy of a row, and how much earlier than in the scenario it is announced.
func ourPolicy(o sim.Ours) string {
	if o.Ahead == 0 {
		return o.Policy
	}
	return fmt.Sprintf("%s, %g ms ahead", o.Policy, o.Ahead)
}

func printValidation(p *term.Printer, v simValidation) {
	p.Line(term.Cell{Text: simulatedNote, Style: term.StyleNote})
	p.Linef("")
	printParameters(p, v.Parameters)
	p.Linef("")
	t := p.Table("", term.Columns{"SET", "SCENARIO", "SCHEME", "FIGURE", ">PUBLISHED", ">SIMULATED", ">ERROR", "USE", "", "+REASON"})
	for _, r := range v.Rows {
		t.Row(r.Set, r.Scenario, string(r.Scheme), r.Figure, simValue(r.Published, r.Unit), simValue(r.Simulated, r.Unit), simError(r.Error()), string(r.Use), simVerdict(r.Met()), r.Reason)
	}
	t.Flush()
	p.Linef("")
	p.Linef("gpreempt in the same scenarios, by the time that a suspend and a resume take; relative to online work alone:")
	t = p.Table("", term.Columns{"SCENARIO", "POLICY", ">COST", ">MEAN", ">P99", ">TTFT", ">TPOT", ">OFFLINE", ">PREEMPTIONS", "", "+GOAL", "+REASON"})
	for _, o := range v.Ours {
		t.Row(o.Scenario, ourPolicy(o), fmt.Sprintf("%g ms", o.Cost), fmt.Sprintf("%.3f", o.Mean), fmt.Sprintf("%.3f", o.P99), simCell(o.TTFT == 0, "%.3f", o.TTFT),
			simCell(o.TTFT == 0, "%.3f", o.TPOT), fmt.Sprintf("%.1f %%", 100*o.Share), o.Preemptions, simVerdict(o.Met), o.Goal, o.Reason)
	}
	t.Flush()
}

func simVerdict(met bool) term.Cell {
	if met {
		return term.Cell{Text: "met", Style: term.StyleGood}
	}
	return term.Cell{Text: "MISSED", Style: term.StyleBad}
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
