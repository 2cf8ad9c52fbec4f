package cli

import (
	"fmt"
	"math"
	"slices"

	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/lab/report"
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
	printSimAnswer(p, r)
	t := p.Table("", cols)
	unfinished := 0
	var rows []setting
	for _, a := range r.Arms {
		unfinished += a.Unfinished
		requests := fmt.Sprint(a.Requests)
		if a.Unfinished > 0 {
			requests = fmt.Sprintf("%d of %d", a.Requests-a.Unfinished, a.Requests)
		}
		none := a.Requests == a.Unfinished
		time := func(v float64) string { return simCell(none, "%.2f ms", v) }
		times := func(v float64) string { return simCell(none, "%.3f", v) }
		values := []any{requests}
		if llm {
			values = append(values, time(a.TTFT), time(a.TTFTP99), time(a.TPOT), time(a.TPOTP99), times(a.TTFTRatio), times(a.TPOTRatio))
		} else {
			values = append(values, time(a.Mean), time(a.P50), time(a.P95), time(a.P99), time(a.Max), times(a.MeanRatio))
		}
		rows = append(rows, setting{a.name(), append(values, times(a.P99Ratio), simCell(a.Scheme == sim.OnlineAlone, "%.1f %%", 100*a.OfflineShare), a.Suspends, a.Preemptions)})
	}
	fewer := printJoined(t, rows)
	p.Linef("")
	if fewer {
		p.Linef(noDifference)
	}
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

// printSimAnswer prints the three numbers of the first policy, and why another way to share may have
// better ones.
func printSimAnswer(p *term.Printer, r *simResult) {
	columns := [3]report.Column{{Name: "alone"}, {Name: "shared"}, {Name: "protected"}}
	for i := range columns {
		columns[i].Within, columns[i].Kept = math.NaN(), math.NaN()
	}
	columns[0].Kept = 1
	row, protected := report.RowP99, ""
	for i := range r.Arms {
		a := &r.Arms[i]
		at := slices.Index([]sim.Kind{sim.OnlineAlone, sim.None, sim.GPreempt}, a.Scheme)
		if at < 0 || a.Requests == a.Unfinished || at == 2 && protected != "" {
			continue
		}
		columns[at].Within = a.P99
		if a.TTFT > 0 {
			row, columns[at].Within = rowTTFT, a.TTFTP99
		}
		if at > 0 {
			columns[at].Kept = a.OfflineShare
		}
		if at == 2 {
			protected = a.name()
		}
	}
	if protected == "" {
		return
	}
	printNumbers(p, row, columns)
	p.Linef("")
	p.Linef("Protected is %s.", protected)
	for i := range r.Tradeoffs {
		for _, line := range r.Tradeoffs[i].lines() {
			p.Linef("%s", line)
		}
	}
	p.Linef("")
}
