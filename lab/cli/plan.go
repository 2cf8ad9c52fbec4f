package cli

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/lab/evidence"
	"github.com/gpreempt/gpreempt/lab/report"
	"github.com/gpreempt/gpreempt/lab/sim"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// planFlags are the flags of gplab plan.
type planFlags struct {
	simFlags
	events    string
	presets   []string
	floors    []float64
	cost, slo time.Duration
}

// planned is the output of gplab plan for programs.
type planned struct {
	// Origin is always "simulated".
	Origin evidence.Origin `json:"origin"`
	Name   string          `json:"name"`
	About  string          `json:"about"`
	// Cost of a suspend and of a resume in ms, where a recording does not say it.
	Cost    float64 `json:"cost_ms"`
	Seed    uint64  `json:"seed"`
	Repeats int     `json:"repeats"`
	sim.Plan
	// Limits say what the recording does not.
	Limits []string `json:"limits,omitempty"`

	run evidence.Run
}

func planCommand(a *term.App) *cobra.Command {
	f := &planFlags{}
	cmd := &cobra.Command{
		Use:   "plan [SCENARIO]",
		Short: "Simulate what policies and share floors do to latency and offline work",
		Args: func(cmd *cobra.Command, args []string) error {
			if f.events != "" {
				return term.Operands()(cmd, args)
			}
			return term.Operands("SCENARIO")(cmd, args)
		},
		ValidArgsFunction: completeScenario,
		RunE: func(cmd *cobra.Command, args []string) error {
			o, err := f.planOptions(cmd)
			if err != nil {
				return err
			}
			out := &planned{Origin: evidence.Simulated, Cost: ms(f.cost), Seed: f.seed, Repeats: f.repeats}
			if f.dir != "" {
				o.Keep = func(arm evidence.Arm) error {
					out.run.Arms = append(out.run.Arms, arm)
					return nil
				}
			}
			if f.events == "" {
				err = out.fromScenario(f, args[0], o)
			} else {
				err = out.fromEvents(a, f, o)
			}
			if err == nil && f.dir != "" {
				err = out.write(f.dir)
			}
			if err != nil {
				return err
			}
			return a.Show(out, func(p *term.Printer) { printPlan(p, out, f.dir) })
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&f.events, "events", "", "instead of a scenario: an event `FILE` of gpctl events export, - for standard input")
	flags.StringSliceVar(&f.presets, "policy", []string{"balanced", "strict", "share"}, "presets to compare: "+strings.Join(scheduler.PresetNames(), ", "))
	flags.Float64SliceVar(&f.floors, "floor", []float64{0, 0.1, 0.25, 0.5, 0.75}, "share floors to compare, 0 to 0.95")
	flags.StringArrayVar(&f.knobs, "knob", nil, "NAME=VALUE of all policies, as in the configuration file; may be repeated")
	flags.DurationVar(&f.cost, "cost", sim.DefaultCosts().Suspend, "time of a suspend and of a resume; with --events, of targets whose own is not recorded")
	flags.DurationVar(&f.slo, "slo", 0, "with --events: p99 that the wait of an announcement should keep")
	flags.StringVar(&f.trace, "trace", "", "replay the arrivals of this CSV `FILE` at the services with llm")
	flags.DurationVar(&f.duration, "duration", 0, "how long requests arrive, instead of the scenario's")
	flags.Uint64Var(&f.seed, "seed", 1, "seed of arrivals and kernels; each repeat adds 1")
	flags.IntVar(&f.repeats, "repeats", 3, "repeats of each policy and floor")
	flags.StringVar(&f.dir, "run", "", "write the run to this new `DIR`, for gplab report")
	term.Complete(cmd, "policy", scheduler.PresetNames())
	return cmd
}

// planOptions returns the options of the plan, or what is wrong with the flags.
func (f *planFlags) planOptions(cmd *cobra.Command) (sim.PlanOptions, error) {
	o := sim.PlanOptions{Floors: f.floors}
	given := cmd.Flags().Changed
	switch {
	case f.cost <= 0 || f.cost > time.Minute:
		return o, term.Usage(cmd, "--cost must be greater than 0 and at most 1m")
	case f.repeats < 1 || f.repeats > 1000:
		return o, term.Usage(cmd, "--repeats %d is outside 1 to 1000", f.repeats)
	case f.duration < 0 || f.slo < 0:
		return o, term.Usage(cmd, "--duration and --slo must not be negative")
	case f.events == "" && given("slo"):
		return o, term.Usage(cmd, "--slo needs --events: a scenario has its own")
	case f.events != "" && (given("trace") || given("seed") || given("repeats") || given("duration")):
		return o, term.Usage(cmd, "--trace, --seed, --repeats and --duration do not go with --events: a log is replayed as it is")
	}
	for _, floor := range f.floors {
		if !(floor >= 0 && floor <= 0.95) {
			return o, term.Usage(cmd, "--floor %v is outside 0 to 0.95", floor)
		}
	}
	for _, preset := range f.presets {
		p, err := policyOf(preset, f.knobs)
		switch {
		case err != nil:
			return o, term.Usage(cmd, "%v", err)
		case p.Shadow:
			return o, term.Usage(cmd, "the policy %s suspends nothing: choose others", preset)
		}
		o.Policies = append(o.Policies, sim.NamedPolicy{Name: preset, Policy: p})
	}
	if f.events != "" {
		f.repeats = 1
	}
	o.Options = f.options(f.cost)
	o.Repeats = f.repeats
	return o, nil
}

func (out *planned) fromScenario(f *planFlags, name string, o sim.PlanOptions) error {
	s, err := f.scenario("gplab plan", name)
	if err != nil {
		return err
	}
	text, err := s.YAML()
	if err != nil {
		return err
	}
	out.Name, out.About, out.run.Plan = s.Name, s.About, string(text)
	if out.Plan, err = sim.PlanScenario(s, o); err != nil {
		return &term.Failure{Code: term.ExitFailure, Message: err.Error()}
	}
	return nil
}

func (out *planned) fromEvents(a *term.App, f *planFlags, o sim.PlanOptions) error {
	name, in, err := open(a, f.events)
	if err != nil {
		return err
	}
	defer in.Close()
	rec, err := readRecording(in)
	if err == nil {
		out.Plan, err = sim.PlanRecording(rec.Recording, ms(f.slo), o)
	}
	if err != nil {
		return &term.Failure{Code: term.ExitFailure, Message: fmt.Sprintf("%s: %v", name, err), Next: "gpctl events export --follow --output-file FILE"}
	}
	out.Name, out.Limits = name, rec.limits()
	out.About = fmt.Sprintf("%s in %s: %s, %s; the policy was %s, the daemon's backend %s", term.Count(rec.Events, "event"), term.Duration(rec.Length),
		term.Count(len(rec.Leases), "announcement"), term.Count(len(rec.Targets), "offline target"), cmp.Or(rec.Policy, "not recorded"), cmp.Or(rec.Backend, "not recorded"))
	out.run.Plan = "# A replay of the event log " + name + "\n"
	return nil
}

// write writes the run to a folder.
func (out *planned) write(dir string) error {
	out.run.Format, out.run.Name, out.run.Command = evidence.Format, out.Name, "plan"
	out.run.Origin, out.run.Backend, out.run.Seed = evidence.Simulated, "simulated: a model in virtual time", out.Seed
	out.run.Environment = map[string]string{"gplab": api.VersionString(), "cost_ms": fmt.Sprint(out.Cost)}
	if err := evidence.Write(dir, &out.run); err != nil {
		return &term.Failure{Code: term.ExitFailure, Message: err.Error()}
	}
	return nil
}

func printPlan(p *term.Printer, out *planned, dir string) {
	p.Line(term.Cell{Text: simulatedNote, Style: term.StyleNote})
	title := out.Name
	if out.About != "" {
		title += ": " + out.About
	}
	p.Linef("%s", title)
	p.Linef("")
	recorded, llm, many := out.Alone == nil, false, len(out.Points[0].Services) > 1
	for _, s := range out.Points[0].Services {
		llm = llm || s.TPOTP99 > 0
	}
	only := func(when bool, name string) string {
		if when {
			return name
		}
		return "+" + name
	}
	if !recorded {
		printPlanAnswer(p, out)
	}
	printChoice(p, out)
	p.Linef("")
	t := p.Table("", term.Columns{
		"POLICY", ">FLOOR", ">P50", ">P99", only(llm, ">TPOT P99"), only(recorded, ">NOT QUIET"), only(recorded, ">DISTURBED"), ">OFFLINE", ">GPUS SAVED",
		">PREEMPTIONS", only(many, "SERVICE"), "+>REQUESTS", "SLO", "NOTE",
	})
	values := func(pt *sim.Point) []any {
		s := pt.Decisive()
		notQuiet, disturbed := "-", "-"
		if r := s.Recorded; r != nil {
			notQuiet, disturbed = fmt.Sprint(r.NotQuiet), fmt.Sprintf("%.1f %%", 100*r.Disturbed)
		}
		return []any{
			milli(s.P50), milli(s.P99), simCell(s.TPOTP99 == 0, "%.2f ms", s.TPOTP99), notQuiet, disturbed,
			simCell(pt == out.Alone, "%.1f %%", 100*pt.Offline), simCell(pt.Policy == "", "%.2f", pt.Saved), fmt.Sprintf("%.2f", pt.Preemptions), s.Name, s.Requests,
			verdictCell(pt.Verdict),
		}
	}
	if !recorded {
		t.Row(slices.Concat([]any{"(online alone)", "-"}, values(out.Alone), []any{""})...)
		t.Row(slices.Concat([]any{"(no preemption)", "-"}, values(out.None), []any{""})...)
	}
	lines := planLines(out, values)
	for _, l := range lines {
		t.Row(slices.Concat([]any{evidence.NameSettings(l.policies), evidence.NameSettings(l.floors)}, l.cells, []any{l.note})...)
	}
	t.Flush()
	p.Linef("")
	if len(lines) < len(out.Points) {
		p.Linef(noDifference)
	}
	explainPlan(p, out, llm, many)
	if dir != "" {
		p.Linef("The run is in %s; gplab report shows it.", dir)
	}
}

// planLine is a row of the table of a plan: points whose figures are the same to the digits shown.
type planLine struct {
	policies, floors []string
	note             string
	cells            []any
}

// planLines returns the rows: first the floors of a policy are joined, then the policies with the
// same floors.
func planLines(out *planned, values func(*sim.Point) []any) (lines []planLine) {
	var byPolicy []planLine
	for i := range out.Points {
		pt := &out.Points[i]
		l := planLine{policies: []string{pt.Policy}, floors: []string{fmt.Sprintf("%.2f", pt.ShareFloor)}, cells: values(pt)}
		switch {
		case i == out.Best:
			l.note = "most offline work that keeps the SLO"
		case pt.Dominated:
			l.note = "dominated"
		}
		if at := slices.IndexFunc(byPolicy, func(o planLine) bool { return o.policies[0] == pt.Policy && slices.Equal(o.cells, l.cells) }); at >= 0 {
			byPolicy[at].floors = append(byPolicy[at].floors, l.floors...)
			byPolicy[at].note = cmp.Or(byPolicy[at].note, l.note)
			continue
		}
		byPolicy = append(byPolicy, l)
	}
	for _, l := range byPolicy {
		if at := slices.IndexFunc(lines, func(o planLine) bool { return slices.Equal(o.floors, l.floors) && slices.Equal(o.cells, l.cells) }); at >= 0 {
			lines[at].policies = append(lines[at].policies, l.policies...)
			lines[at].note = cmp.Or(lines[at].note, l.note)
			continue
		}
		lines = append(lines, l)
	}
	return lines
}

// printPlanAnswer prints the three numbers: of the point that keeps the SLO with the most offline
// work, or else of the one with the lowest p99.
func printPlanAnswer(p *term.Printer, out *planned) {
	at := out.Best
	if at < 0 {
		at = 0
		for i := range out.Points {
			if out.Points[i].Decisive().P99 < out.Points[at].Decisive().P99 {
				at = i
			}
		}
	}
	best := &out.Points[at]
	columns := [3]report.Column{{Name: "alone", Kept: 1}, {Name: "shared"}, {Name: "protected"}}
	for i, pt := range []*sim.Point{out.Alone, out.None, best} {
		columns[i].Within = pt.Decisive().P99
		if i > 0 {
			columns[i].Kept = pt.Offline
		}
	}
	row := report.RowP99
	if best.Decisive().TPOTP99 > 0 {
		row = rowTTFT
	}
	printNumbers(p, row, columns)
	p.Linef("")
	p.Linef("Protected is %s with share floor %.2f.", best.Policy, best.ShareFloor)
}

// explainPlan prints what the columns are, and what they do not say.
func explainPlan(p *term.Printer, out *planned, llm, many bool) {
	recorded := out.Alone == nil
	switch {
	case recorded:
		p.Linef("P50 and P99 are times from the announcement to its answer, NOT QUIET the answers before the GPUs were quiet, and DISTURBED the part")
		p.Linef("of the announced work beside offline work that it outranks. The SLO is kept if 99 %% of the announcements have quiet GPUs in time,")
		p.Linef("until their end.")
	case llm:
		p.Linef("P50 and P99 are times to the first token%s.", decisive(many))
	default:
		p.Linef("P50 and P99 are times from arrival to result%s.", decisive(many))
	}
	p.Linef("OFFLINE is relative to offline work alone; GPUS SAVED is against GPUs of their own for as much of both. A dominated point is in")
	p.Linef("nothing better than another one, and worse in something.")
	p.Linef("A suspend and a resume take %s each%s.", term.Duration(time.Duration(math.Round(out.Cost*float64(time.Millisecond)))), assumed(recorded))
	for _, l := range out.Limits {
		p.Linef("%s", l)
	}
}

func decisive(many bool) string {
	if many {
		return ", of the service that is nearest to its SLO or beyond it"
	}
	return ""
}

func assumed(recorded bool) string {
	if recorded {
		return " where the log does not say it"
	}
	return ", which is assumed"
}

// milli formats milliseconds; long times in larger units.
func milli(v float64) string {
	if v >= 10_000 {
		return term.Duration(time.Duration(v * float64(time.Millisecond)))
	}
	return fmt.Sprintf("%.2f ms", v)
}

func verdictCell(v sim.Verdict) term.Cell {
	switch v {
	case sim.Kept:
		return term.Cell{Text: "kept", Style: term.StyleGood}
	case sim.Missed:
		return term.Cell{Text: "MISSED", Style: term.StyleBad}
	default:
		return term.Cell{Text: "-"}
	}
}

// printChoice prints the highest floors and the best point.
func printChoice(p *term.Printer, out *planned) {
	if out.Points[0].Verdict == sim.NoSLO {
		hint := "set slo: of a service"
		if out.Alone == nil {
			hint = "set --slo"
		}
		p.Linef("No SLO says which latency is too high: %s to find the highest share floor that keeps it.", hint)
		return
	}
	if out.Best < 0 {
		p.Linef("No policy keeps the SLO.")
		return
	}
	var floors []string
	for _, f := range out.Floors {
		floors = append(floors, fmt.Sprintf("%s %.2f", f.Policy, f.ShareFloor))
	}
	best := out.Points[out.Best]
	p.Linef("Highest share floor that keeps the SLO: %s.", strings.Join(floors, ", "))
	p.Linef("Most offline work that keeps it: %s with floor %.2f, %.1f %% of offline alone; that saves %.2f GPUs.", best.Policy, best.ShareFloor, 100*best.Offline, best.Saved)
}
