package cli

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/lab/evidence"
	"github.com/gpreempt/gpreempt/lab/report"
	"github.com/gpreempt/gpreempt/lab/trial"
)

// trialResult is the result of a trial for programs.
type trialResult struct {
	Dir     string             `json:"dir"`
	Name    string             `json:"name"`
	Command string             `json:"command"`
	Origin  evidence.Origin    `json:"origin"`
	Backend string             `json:"backend"`
	Verdict *evidence.Verdict  `json:"verdict,omitempty"`
	Arms    []evidence.Summary `json:"arms"`
	// Ratios are of the protected arms against the first of their size.
	Ratios []evidence.Ratio `json:"ratios,omitempty"`
	Faults []evidence.Fault `json:"faults"`
	Alarms []evidence.Alarm `json:"alarms"`
	// LeftOut are arms that the work makes impossible, and why.
	LeftOut map[evidence.ArmKind]string `json:"left_out,omitempty"`
	// Missing says why the folder does not have something, by its name.
	Missing map[string]string `json:"missing,omitempty"`
	// Report is the path of the report, if one was written.
	Report string `json:"report,omitempty"`

	answer report.Answer
}

// showRun shows the figures of a run and the verdict by a profile, "" for that of its plan. The exit
// code is that of the verdict. page is the path of the report, "" without one.
func showRun(a *term.App, dir string, run *evidence.Run, profile, page string) error {
	if profile == "" {
		profile = planProfile(run)
	}
	result := trialResult{
		Dir: dir, Name: run.Name, Command: run.Command, Origin: run.Origin, Backend: run.Backend, Arms: evidence.Summarize(run), Faults: run.Faults,
		Alarms: run.Alarms, LeftOut: run.LeftOut, Missing: run.Missing, Report: page, Ratios: evidence.Within(run),
	}
	verdict := evidence.Judge(run, evidence.Profile{})
	if profile != "" && profile != evidence.NoProfile {
		limits, err := evidence.LoadProfile(profile)
		if err != nil {
			return &term.Failure{Code: term.ExitUsage, Message: err.Error(), Next: "gplab trial profiles"}
		}
		verdict = evidence.Judge(run, limits)
		result.Verdict = &verdict
	}
	result.answer = report.AnswerOf(run, &verdict)
	if err := a.Show(result, func(p *term.Printer) { printRun(p, &result) }); err != nil {
		return err
	}
	switch {
	case result.Verdict == nil && len(run.Faults) > 0:
		return &term.Failure{Code: term.ExitFailure}
	case result.Verdict == nil || result.Verdict.Result == evidence.Pass:
		return nil
	case result.Verdict.Result == evidence.Fail:
		return &term.Failure{Code: term.ExitFailure}
	}
	return &term.Failure{Code: term.ExitCannotTell}
}

// planProfile is the profile of a run's plan, "" if the plan has none.
func planProfile(run *evidence.Run) string {
	p, err := trial.Parse(evidence.PlanFile, []byte(run.Plan))
	if err != nil {
		return ""
	}
	return p.Profile
}

// printHead prints the answer: the verdict with its reason, three numbers, and what would change it.
func printHead(p *term.Printer, r *trialResult) {
	a := &r.answer
	if v := r.Verdict; v != nil {
		p.Line(resultCell(v.Result), fmt.Sprintf(" (%s, profile %s): %s", strings.ToUpper(string(v.Origin)), v.Profile, a.Why))
	}
	p.Linef("%s on %s: %s", r.Name, r.Backend, strings.ToUpper(string(r.Origin)))
	for _, kind := range slices.Sorted(maps.Keys(r.LeftOut)) {
		p.Linef("no arm %s: %s", kind, r.LeftOut[kind])
	}
	p.Linef("")
	printNumbers(p, a.Row, a.Columns)
	p.Linef("")
	if text := a.ProtectedIs(); text != "" {
		p.Linef("%s", text)
	}
	if r.Verdict != nil {
		p.Linef("%s", a.Change)
	}
	p.Linef("")
}

func printRun(p *term.Printer, r *trialResult) {
	printHead(p, r)
	t := p.Table("", term.Columns{
		"ARM", ">REPEATS", ">REQUESTS", ">FAILED", ">MEAN", "+>STD", ">P50", "+>P95", ">P99", ">MAX", "+>SPREAD", ">ANNOUNCE", "+>START", "+>SERVICE", ">OFFLINE WORK", ">OF ALONE",
	})
	var rows, moves []setting
	for i := range r.Arms {
		s := &r.Arms[i]
		rows = append(rows, setting{s.Arm, []any{
			s.Repeats, s.Latency.N + s.Failed, s.Failed, inMS(s.Latency.N, s.Latency.Mean), inMS(s.Latency.N, s.Latency.Std), inMS(s.Latency.N, s.Latency.P50),
			inMS(s.Latency.N, s.Latency.P95), inMS(s.Latency.N, s.Latency.P99), inMS(s.Latency.N, s.Latency.Max), inMS(min(s.Latency.N, s.Repeats-1), s.Latency.SpreadP99),
			inMS(s.Announce.N, s.Announce.P50), inMS(s.Start.N, s.Start.P50), inMS(s.Service.N, s.Service.P50), workText(s), relative(s),
		}})
	}
	if printJoined(t, rows) {
		p.Linef(noDifference)
	}
	durations := p.Table("", term.Columns{"ARM", "", ">N", ">MEAN", ">STD", ">P50", ">P95", ">P99", ">MAX"})
	for i := range r.Arms {
		s := &r.Arms[i]
		for _, d := range []struct {
			name string
			evidence.Distribution
		}{{"suspend", s.Suspends}, {"resume", s.Resumes}} {
			if d.N > 0 {
				moves = append(moves, setting{s.Arm, []any{d.name, d.N, inMS(d.N, d.Mean), inMS(d.N, d.Std), inMS(d.N, d.P50), inMS(d.N, d.P95), inMS(d.N, d.P99), inMS(d.N, d.Max)}})
			}
		}
	}
	if len(moves) > 0 {
		p.Linef("")
		printJoined(durations, moves)
	}
	printReadings(p, r.Arms)
	printRatios(p, r.Ratios)
	printVerdict(p, r)
	p.Linef("")
	for _, what := range slices.Sorted(maps.Keys(r.Missing)) {
		p.Linef("no %s: %s", what, r.Missing[what])
	}
	p.Linef("samples: %s", r.Dir)
	if r.Report != "" {
		p.Linef("report: %s", r.Report)
	}
}

// printReadings prints the means of what was read of the machine.
func printReadings(p *term.Printer, arms []evidence.Summary) {
	names := map[string]bool{}
	for i := range arms {
		for name := range arms[i].Readings {
			names[name] = true
		}
	}
	if len(names) == 0 {
		return
	}
	sorted := slices.Sorted(maps.Keys(names))
	cols := term.Columns{"ARM"}
	for _, name := range sorted {
		cols = append(cols, ">"+strings.ToUpper(strings.ReplaceAll(name, "_", " ")))
	}
	p.Linef("")
	t := p.Table("", cols)
	var rows []setting
	for i := range arms {
		row := setting{name: arms[i].Arm}
		for _, name := range sorted {
			if v, ok := arms[i].Readings[name]; ok {
				row.cells = append(row.cells, figure(v))
			} else {
				row.cells = append(row.cells, "-")
			}
		}
		rows = append(rows, row)
	}
	printJoined(t, rows)
}

// printRatios prints how much faster arms are than the first of their size: the means, or with -o
// wide all figures.
func printRatios(p *term.Printer, ratios []evidence.Ratio) {
	if !p.Wide {
		ratios = slices.DeleteFunc(slices.Clone(ratios), func(r evidence.Ratio) bool { return !strings.HasSuffix(r.Figure, " mean") })
	}
	// Arms with the same samples are one row above.
	ratios = slices.DeleteFunc(slices.Clone(ratios), func(r evidence.Ratio) bool { return r.Low == 1 && r.High == 1 })
	if len(ratios) == 0 {
		return
	}
	p.Linef("")
	t := p.Table("", term.Columns{"ARM", "AGAINST", "FIGURE", ">AGAINST IT", ">ARM", "UNIT", ">SPEED-UP", ">FROM", ">TO", ">REDUCTION"})
	for _, r := range ratios {
		speedUp, from, to := 1/r.Ratio, 1/r.High, 1/r.Low
		if r.Unit == "1/s" { // more is better
			speedUp, from, to = r.Ratio, r.Low, r.High
		}
		t.Row(r.Arm, r.Base, r.Figure, figure(r.A), figure(r.B), r.Unit, figure(speedUp), figure(from), figure(to), fmt.Sprintf("%.0f%%", 100*(1-r.Ratio)))
	}
	t.Flush()
}

func printVerdict(p *term.Printer, r *trialResult) {
	p.Linef("")
	v := r.Verdict
	if v == nil {
		for _, f := range r.Faults {
			p.Line(term.Cell{Text: "fault: ", Style: term.StyleBad}, fmt.Sprintf("%s, repeat %d: %s", f.Arm, f.Repeat+1, f.What))
		}
		for _, alarm := range r.Alarms {
			p.Line(term.Cell{Text: "alarm: ", Style: term.StyleBad}, alarm.From+": "+alarm.Text)
		}
		p.Linef("no verdict: --profile chooses the limits for one")
		return
	}
	if len(v.Criteria) > 0 {
		t := p.Table("", term.Columns{"CRITERION", "ARM", ">FIGURE", ">LIMIT", "UNIT", ">SPREAD", "RESULT"})
		var rows []setting
		for _, c := range v.Criteria {
			got, limit, spread := "-", "< "+figure(c.Limit), "-"
			if c.Figure != nil {
				got = figure(*c.Figure)
				if c.Name == "offline_overhead_percent" && *c.Figure < 0 {
					got = "none"
				}
			}
			if c.Spread != nil {
				spread = figure(*c.Spread)
			}
			switch {
			case c.Always && c.Figure == nil:
				limit = "-"
			case c.Always:
				got, limit = strconv.Itoa(int(*c.Figure)), "0"
			case c.AtLeast:
				limit = ">= " + figure(c.Limit)
			}
			rows = append(rows, setting{term.Or(c.Arm, "-"), []any{c.Name, got, limit, term.Or(c.Unit, "-"), spread, resultCell(c.Result)}})
		}
		for _, l := range joined(rows) {
			t.Row(slices.Insert(l.cells, 1, any(l.name))...)
		}
		t.Flush()
	}
	if len(v.Reasons) > 1 || len(v.Unverified) > 0 {
		p.Linef("")
	}
	const most = 20
	for i, reason := range v.Reasons {
		switch {
		case i == most:
			p.Linef("%d more: -o json has all", len(v.Reasons)-most)
		case i > 0 && i < most: // the first is in the first line
			p.Linef("also: %s", reason)
		}
	}
	for _, what := range v.Unverified {
		p.Linef("not verified: %s", what)
	}
}

func resultCell(r evidence.Result) term.Cell {
	return term.Cell{Text: string(r), Style: map[evidence.Result]term.Style{evidence.Pass: term.StyleGood, evidence.Fail: term.StyleBad, evidence.CannotTell: term.StyleNote}[r]}
}

// inMS formats a duration in milliseconds of n samples.
func inMS(n int, v float64) string {
	if n == 0 {
		return "-"
	}
	return figure(v) + "ms"
}

// figure formats a number with three digits that matter.
func figure(v float64) string {
	switch abs := max(v, -v); {
	case abs >= 100:
		return fmt.Sprintf("%.0f", v)
	case abs >= 10:
		return fmt.Sprintf("%.1f", v)
	case abs >= 1:
		return fmt.Sprintf("%.2f", v)
	}
	return fmt.Sprintf("%.3f", v)
}

func workText(s *evidence.Summary) string {
	if s.WorkUnit == "" {
		return "-"
	}
	return figure(s.WorkRate) + " " + s.WorkUnit + "/s"
}

func relative(s *evidence.Summary) string {
	if s.WorkRelative == 0 {
		return "-"
	}
	return fmt.Sprintf("%.1f%%", 100*s.WorkRelative)
}

// readRun reads a run for a command.
func readRun(dir string) (*evidence.Run, error) {
	run, err := evidence.Read(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, &term.Failure{Code: term.ExitNotFound, Message: fmt.Sprintf("%s has no run: %s does not exist", dir, evidence.RunFile), Next: "gplab trial --output-dir " + dir}
	}
	if err != nil {
		return nil, &term.Failure{Code: term.ExitFailure, Message: err.Error()}
	}
	return run, nil
}

func trialJudge(a *term.App) *cobra.Command {
	var profile string
	cmd := &cobra.Command{
		Use:   "judge DIR",
		Short: "Show a run, with the verdict by another profile",
		Args:  term.Operands("DIR"),
		RunE: func(_ *cobra.Command, args []string) error {
			run, err := readRun(args[0])
			if err != nil {
				return err
			}
			return showRun(a, args[0], run, profile, "")
		},
	}
	cmd.Flags().StringVar(&profile, "profile", "", "`NAME` of the profile, or the path of a YAML file (default: that of the plan)")
	term.Complete(cmd, "profile", evidence.ProfileNames())
	return cmd
}

// runComparison is the comparison of two runs for programs.
type runComparison struct {
	A      string          `json:"a"`
	B      string          `json:"b"`
	Origin evidence.Origin `json:"origin"`
	// Rates are those that the trials chose, in a sentence, if they differ.
	Rates  string           `json:"rates,omitempty"`
	Ratios []evidence.Ratio `json:"ratios"`
}

func trialCompare(a *term.App) *cobra.Command {
	var except []string
	cmd := &cobra.Command{
		Use:   "compare A B",
		Short: "Show the figures of run B as ratios to those of run A",
		Args:  term.Operands("A", "B"),
		RunE: func(cmd *cobra.Command, args []string) error {
			first, err := readRun(args[0])
			if err != nil {
				return err
			}
			second, err := readRun(args[1])
			if err != nil {
				return err
			}
			keys := evidence.Keys(first, second)
			for _, key := range except {
				if !slices.Contains(keys, key) {
					return term.Usage(cmd, "--except %q names nothing in the environment of these runs; use %s", key, strings.Join(keys, ", "))
				}
			}
			ratios, err := evidence.Compare(first, second, except...)
			if err != nil {
				next := fmt.Sprintf("run the second with the plan of the first (gplab trial --plan %s)", filepath.Join(args[0], evidence.PlanFile))
				if len(keys) > 0 {
					next += fmt.Sprintf("; what differs on purpose in the environment (%s): --except KEY", strings.Join(keys, ", "))
				}
				return &term.Failure{Code: term.ExitRefused, Message: err.Error(), Next: next}
			}
			result := runComparison{A: args[0], B: args[1], Origin: first.Origin, Rates: evidence.ChosenRates(first, second), Ratios: ratios}
			return a.Show(result, func(p *term.Printer) {
				p.Linef("%s, B divided by A, with 95 %% intervals", strings.ToUpper(string(first.Origin)))
				if result.Rates != "" {
					p.Linef("%s", result.Rates)
				}
				p.Linef("")
				t := p.Table("", term.Columns{"ARM", "FIGURE", ">A", ">B", "UNIT", ">RATIO", ">FROM", ">TO", "", "+>N OF A", "+>N OF B"})
				for _, r := range ratios {
					differs := ""
					if r.Low > 1 || r.High < 1 {
						differs = "differs"
					}
					t.Row(r.Arm, r.Figure, figure(r.A), figure(r.B), r.Unit, figure(r.Ratio), figure(r.Low), figure(r.High), differs, r.NA, r.NB)
				}
				t.Flush()
			})
		},
	}
	cmd.Flags().StringArrayVar(&except, "except", nil, "`KEY` of the environment that may differ; may be repeated")
	return cmd
}

// planSummary is a plan for programs.
type planSummary struct {
	Name    string `json:"name"`
	About   string `json:"about"`
	Profile string `json:"profile"`
	Takes   string `json:"takes"`
	Plan    string `json:"plan"`
}

func trialPlans(a *term.App) *cobra.Command {
	return &cobra.Command{
		Use:   "plans",
		Short: "List the plans that gplab brings; -o yaml has their text",
		Args:  term.Operands(),
		RunE: func(*cobra.Command, []string) error {
			var list []planSummary
			for _, name := range trial.PlanNames() {
				file, text, err := trial.ReadPlan(name)
				if err != nil {
					return err
				}
				p, err := trial.Parse(file, text)
				if err != nil {
					return err
				}
				p.Normalize()
				list = append(list, planSummary{Name: name, About: p.About, Profile: p.Profile, Takes: term.Duration(p.Estimate()), Plan: string(text)})
			}
			return a.Show(struct {
				Plans []planSummary `json:"plans"`
			}{list}, func(p *term.Printer) {
				t := p.Table("", term.Columns{"PLAN", ">TAKES", "PROFILE", "ABOUT"})
				for _, plan := range list {
					t.Row(plan.Name, plan.Takes, plan.Profile, plan.About)
				}
				t.Flush()
			})
		},
	}
}

// profileSummary is a profile for programs.
type profileSummary struct {
	Name   string             `json:"name"`
	About  string             `json:"about"`
	Limits map[string]float64 `json:"limits"`
}

func trialProfiles(a *term.App) *cobra.Command {
	return &cobra.Command{
		Use:   "profiles",
		Short: "List the profiles that gplab brings, and what a profile may limit",
		Args:  term.Operands(),
		RunE: func(*cobra.Command, []string) error {
			var list []profileSummary
			for _, name := range evidence.ProfileNames() {
				p, err := evidence.LoadProfile(name)
				if err != nil {
					return err
				}
				list = append(list, profileSummary{p.Name, p.About, p.Limits})
			}
			return a.Show(struct {
				Profiles []profileSummary `json:"profiles"`
			}{list}, func(p *term.Printer) {
				t := p.Table("", term.Columns{"PROFILE", "CRITERION", ">LIMIT"})
				for _, profile := range list {
					for _, name := range slices.SortedFunc(maps.Keys(profile.Limits), cmp.Compare[string]) {
						t.Row(profile.Name, name, figure(profile.Limits[name]))
					}
				}
				t.Flush()
				p.Linef("")
				t = p.Table("", term.Columns{"CRITERION", "LIMIT IS", "UNIT", "MEANING"})
				for _, c := range evidence.Criteria() {
					t.Row(c.Name, map[bool]string{true: "least", false: "below"}[c.AtLeast], c.Unit, c.Meaning)
				}
				t.Flush()
			})
		},
	}
}
