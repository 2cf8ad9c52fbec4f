package cli

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/lab/evidence"
	"github.com/gpreempt/gpreempt/lab/scenario"
	"github.com/gpreempt/gpreempt/lab/sim"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// simulatedNote is above every output of the simulator for people.
const simulatedNote = "SIMULATED: a model in virtual time; no hardware is involved"

func simCommand(a *term.App) *cobra.Command {
	return term.Noun("sim", "Simulate how ways of sharing GPUs treat a scenario", simList(a), simRun(a), simCompare(a))
}

func simList(a *term.App) *cobra.Command {
	return &cobra.Command{
		Use:   "list",
		Short: "List the scenarios of the library",
		Args:  term.Operands(),
		RunE: func(*cobra.Command, []string) error {
			type listed struct {
				Name     string `json:"name"`
				About    string `json:"about"`
				Source   string `json:"source"`
				GPUs     int    `json:"gpus"`
				Duration string `json:"duration"`
			}
			var list []listed
			for _, s := range scenario.Library() {
				list = append(list, listed{s.Name, s.About, s.Source, s.GPUs, term.Duration(s.Duration)})
			}
			return a.Show(map[string]any{"scenarios": list}, func(p *term.Printer) {
				t := p.Table("", term.Columns{"NAME", ">GPUS", ">DURATION", "ABOUT", "+SOURCE"})
				for _, s := range list {
					t.Row(s.Name, s.GPUs, s.Duration, s.About, s.Source)
				}
				t.Flush()
			})
		},
	}
}

// simFlags are the flags of the commands that run a scenario.
type simFlags struct {
	seed     uint64
	repeats  int
	duration time.Duration
	trace    string
	dir      string
	costs    []time.Duration
	knobs    []string
	quantum  time.Duration
	inFlight int
	sweep    string
	paced    bool
}

func (f *simFlags) add(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.Uint64Var(&f.seed, "seed", 1, "seed of arrivals and kernels; each repeat adds 1")
	flags.IntVar(&f.repeats, "repeats", 1, "repeats of each arm")
	flags.DurationVar(&f.duration, "duration", 0, "how long requests arrive, instead of the scenario's")
	flags.StringVar(&f.trace, "trace", "", "replay the arrivals of this CSV `FILE` at the services with llm")
	flags.StringVar(&f.dir, "run", "", "write the run to this new `DIR`, for gplab report")
	flags.DurationSliceVar(&f.costs, "cost", nil, "time of a suspend and of a resume, instead of the modelled MI300X")
	flags.StringArrayVar(&f.knobs, "knob", nil, "NAME=VALUE of the policy, as in the configuration file; may be repeated")
	flags.DurationVar(&f.quantum, "quantum", 0, "turn of time-slice (default 10ms)")
	flags.IntVar(&f.inFlight, "in-flight", 0, "kernels of a queue in flight under block-wait and throttle (default 1)")
	flags.BoolVar(&f.paced, "paced", false, "a client sends a request only after the answer to the one before")
	cmd.ValidArgsFunction = completeScenario
}

// completeScenario completes the names of the library, and files.
func completeScenario(_ *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var names []cobra.Completion
	for _, s := range scenario.Library() {
		names = append(names, cobra.CompletionWithDesc(s.Name, s.About))
	}
	return names, cobra.ShellCompDirectiveDefault
}

// scenario reads the scenario that a command names: one of the library, or a file.
func (f *simFlags) scenario(command, name string) (scenario.Scenario, error) {
	s, err := scenario.ByName(name)
	if strings.ContainsAny(name, "./") {
		s, err = scenario.Read(name)
	}
	if err != nil {
		code := term.ExitFailure
		if errors.Is(err, fs.ErrNotExist) || !strings.ContainsAny(name, "./") {
			code = term.ExitNotFound
		}
		failure := &term.Failure{Code: code, Message: err.Error()}
		if unknown, ok := errors.AsType[*scenario.UnknownError](err); ok {
			failure.Next = "gplab sim list"
			if unknown.Near != "" {
				failure.Next = command + " " + unknown.Near
			}
		}
		return s, failure
	}
	if f.trace != "" {
		if err := s.UseTrace(f.trace); err != nil {
			return s, &term.Failure{Code: term.ExitFailure, Message: err.Error()}
		}
	}
	if f.duration > 0 {
		s.Duration = f.duration
	}
	return s, nil
}

// options returns the options of the runs with one cost, or with the default for 0.
func (f *simFlags) options(cost time.Duration) sim.Options {
	o := sim.Options{Seed: f.seed, Costs: sim.DefaultCosts(), Paced: f.paced}
	if cost > 0 {
		o.Costs = sim.CostsOf(cost)
	}
	if f.dir != "" {
		o.SpanLimit = spanLimit
	}
	return o
}

// spanLimit is until when a run folder has spans.
const spanLimit = 2 * time.Second

// arms returns the arms of a comparison: those that every other is compared with, then each
// scheme, gpreempt with each policy, and each with every cost where it has one.
func (f *simFlags) arms(schemes []sim.Kind, policies []string) ([]simArm, error) {
	list := []simArm{{scheme: sim.Scheme{Kind: sim.OfflineAlone}}, {scheme: sim.Scheme{Kind: sim.OnlineAlone}}}
	costs := f.costs
	if len(costs) == 0 {
		costs = []time.Duration{0}
	}
	for _, kind := range schemes {
		scheme := sim.Scheme{Kind: kind, Quantum: f.quantum, InFlight: f.inFlight}
		switch kind {
		case sim.OfflineAlone, sim.OnlineAlone:
		case sim.GPreempt:
			variants, err := f.variants(policies)
			if err != nil {
				return nil, err
			}
			for _, v := range variants {
				scheme.Policy = v.policy
				for _, c := range costs {
					list = append(list, simArm{scheme: scheme, cost: c, variant: v.name})
				}
			}
		case sim.Oracle, sim.TimeSlice:
			for _, c := range costs {
				list = append(list, simArm{scheme: scheme, cost: c})
			}
		default:
			list = append(list, simArm{scheme: scheme})
		}
	}
	for i := range list {
		list[i].Scheme, list[i].Policy, list[i].Cost = list[i].scheme.Kind, list[i].variant, ms(list[i].cost)
	}
	return list, nil
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// variant is a policy and its name.
type variant struct {
	name   string
	policy scheduler.Policy
}

// variants returns the policies: presets with --knob, each with every value of --sweep.
func (f *simFlags) variants(presets []string) ([]variant, error) {
	knob, values, swept := strings.Cut(f.sweep, "=")
	if f.sweep != "" && !swept {
		return nil, fmt.Errorf("invalid --sweep %q; use KNOB=VALUE,VALUE", f.sweep)
	}
	var all []variant
	for _, preset := range presets {
		name := strings.Join(append([]string{preset}, f.knobs...), " ")
		if !swept {
			p, err := policyOf(preset, f.knobs)
			if err != nil {
				return nil, err
			}
			all = append(all, variant{name, p})
			continue
		}
		for value := range strings.SplitSeq(values, ",") {
			change := knob + "=" + value
			p, err := policyOf(preset, append(slices.Clone(f.knobs), change))
			if err != nil {
				return nil, err
			}
			all = append(all, variant{name + " " + change, p})
		}
	}
	return all, nil
}

// simArm is the result of one arm.
type simArm struct {
	scheme  sim.Scheme
	cost    time.Duration
	variant string

	Scheme sim.Kind `json:"scheme"`
	Policy string   `json:"policy,omitempty"`
	// Cost of a suspend and of a resume in ms, 0 for those of the modelled MI300X.
	Cost float64 `json:"cost_ms,omitempty"`
	sim.Figures
	// MeanRatio, P99Ratio, TTFTRatio and TPOTRatio are relative to online alone, OfflineShare
	// to offline alone; 0 without that.
	MeanRatio    float64 `json:"mean_ratio"`
	P99Ratio     float64 `json:"p99_ratio"`
	TTFTRatio    float64 `json:"ttft_ratio,omitempty"`
	TPOTRatio    float64 `json:"tpot_ratio,omitempty"`
	OfflineShare float64 `json:"offline_share"`
}

func (s simArm) name() string {
	name := string(s.Scheme)
	if s.Policy != "" {
		name += " " + s.Policy
	}
	if s.cost > 0 {
		name += " " + s.cost.String()
	}
	return name
}

// simResult is the output of run and compare for programs.
type simResult struct {
	// Origin is always "simulated".
	Origin   evidence.Origin `json:"origin"`
	Scenario string          `json:"scenario"`
	Seed     uint64          `json:"seed"`
	Repeats  int             `json:"repeats"`
	Arms     []simArm        `json:"arms"`
	// Tradeoffs are of other ways of sharing that seem to be better.
	Tradeoffs []tradeoff `json:"tradeoffs,omitempty"`
}

// simulate runs the arms, and writes the run folder if one is wanted.
func (f *simFlags) simulate(s scenario.Scenario, arms []simArm) (*simResult, error) {
	plan, err := s.YAML()
	if err != nil {
		return nil, err
	}
	run := evidence.Run{
		Format: evidence.Format, Name: s.Name, Command: "sim", Origin: evidence.Simulated, Backend: "simulated: a model in virtual time", Planned: f.repeats,
		Seed: f.seed, Plan: string(plan), Environment: map[string]string{"gplab": api.VersionString()},
	}
	var online, offline sim.Figures
	for i := range arms {
		a := &arms[i]
		arm, err := sim.Arm(a.name(), s, a.scheme, f.options(a.cost), f.repeats)
		if err != nil {
			return nil, &term.Failure{Code: term.ExitFailure, Message: err.Error()}
		}
		a.Figures = sim.Measure(arm.Repeats...)
		switch a.Scheme {
		case sim.OfflineAlone:
			offline = a.Figures
		case sim.OnlineAlone:
			online = a.Figures
		default:
		}
		if f.dir != "" {
			run.Arms = append(run.Arms, arm)
		}
	}
	ratio := func(v, base float64) float64 {
		if base == 0 {
			return 0
		}
		return v / base
	}
	for i := range arms {
		a := &arms[i]
		a.MeanRatio, a.P99Ratio = ratio(a.Mean, online.Mean), ratio(a.P99, online.P99)
		a.TTFTRatio, a.TPOTRatio = ratio(a.TTFT, online.TTFT), ratio(a.TPOT, online.TPOT)
		a.OfflineShare = ratio(a.Work, offline.Work)
	}
	if f.dir != "" {
		if err := evidence.Write(f.dir, &run); err != nil {
			return nil, &term.Failure{Code: term.ExitFailure, Message: err.Error()}
		}
	}
	tradeoffs, err := f.findTradeoffs(s, arms)
	if err != nil {
		return nil, err
	}
	return &simResult{evidence.Simulated, s.Name, f.seed, f.repeats, arms, tradeoffs}, nil
}

func simRun(a *term.App) *cobra.Command {
	f := &simFlags{}
	var scheme, policy string
	cmd := &cobra.Command{
		Use:   "run SCENARIO",
		Short: "Simulate one way of sharing, beside each work alone",
		Args:  term.Operands("SCENARIO"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return simulateArms(a, cmd, f, args[0], []string{scheme}, []string{policy})
		},
	}
	cmd.Flags().StringVar(&scheme, "scheme", string(sim.GPreempt), "way of sharing: "+kindNames())
	cmd.Flags().StringVar(&policy, "policy", scheduler.DefaultPolicy().Preset, "preset of gpreempt: "+strings.Join(scheduler.PresetNames(), ", "))
	term.Complete(cmd, "scheme", kinds())
	term.Complete(cmd, "policy", scheduler.PresetNames())
	f.add(cmd)
	return cmd
}

func simCompare(a *term.App) *cobra.Command {
	f := &simFlags{}
	var schemes, policies []string
	cmd := &cobra.Command{
		Use:   "compare SCENARIO",
		Short: "Simulate several ways of sharing, policies or costs",
		Args:  term.Operands("SCENARIO"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return simulateArms(a, cmd, f, args[0], schemes, policies)
		},
	}
	var all []string
	for _, k := range sim.Kinds() {
		if k != sim.OfflineAlone && k != sim.OnlineAlone && k != sim.Oracle {
			all = append(all, string(k))
		}
	}
	cmd.Flags().StringSliceVar(&schemes, "scheme", all, "ways of sharing: "+kindNames())
	cmd.Flags().StringSliceVar(&policies, "policy", []string{"balanced", "strict", "share"}, "presets of gpreempt: "+strings.Join(scheduler.PresetNames(), ", "))
	cmd.Flags().StringVar(&f.sweep, "sweep", "", "`KNOB=VALUE,VALUE`: each policy with each of these values")
	term.Complete(cmd, "scheme", kinds())
	term.Complete(cmd, "policy", scheduler.PresetNames())
	f.add(cmd)
	return cmd
}

func kinds() []string {
	var names []string
	for _, k := range sim.Kinds() {
		names = append(names, string(k))
	}
	return names
}

func kindNames() string { return strings.Join(kinds(), ", ") }

// simulateArms runs the arms of a scenario and shows their figures.
func simulateArms(a *term.App, cmd *cobra.Command, f *simFlags, name string, schemes, policies []string) error {
	var list []sim.Kind
	for _, s := range schemes {
		if !slices.Contains(kinds(), s) {
			return term.Usage(cmd, "unknown --scheme %q; use %s", s, kindNames())
		}
		list = append(list, sim.Kind(s))
	}
	switch {
	case f.repeats < 1 || f.repeats > 1000:
		return term.Usage(cmd, "--repeats %d is outside 1 to 1000", f.repeats)
	case f.duration < 0 || f.quantum < 0 || f.inFlight < 0:
		return term.Usage(cmd, "--duration, --quantum and --in-flight must not be negative")
	case slices.ContainsFunc(f.costs, func(d time.Duration) bool { return d <= 0 }):
		return term.Usage(cmd, "--cost must be greater than 0")
	}
	arms, err := f.arms(list, policies)
	if err != nil {
		return term.Usage(cmd, "%v", err)
	}
	s, err := f.scenario(cmd.CommandPath(), name)
	if err != nil {
		return err
	}
	result, err := f.simulate(s, arms)
	if err != nil {
		return err
	}
	return a.Show(result, func(p *term.Printer) { printSimulated(p, s, result, f.dir) })
}
