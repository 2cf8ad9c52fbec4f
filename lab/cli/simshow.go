package cli

import (
	"fmt"

	"github.com/gpreempt/gpreempt/internal/term"
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
