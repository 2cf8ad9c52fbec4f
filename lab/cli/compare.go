package cli

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/lab/evidence"
	"github.com/gpreempt/gpreempt/lab/scenario"
	"github.com/gpreempt/gpreempt/lab/trial"
)

func compareCommand(a *term.App) *cobra.Command {
	var (
		f                 trialFlags
		queues, processes []int
		iterations        int
		hold, gap         time.Duration
	)
	cmd := &cobra.Command{
		Use:   "compare --offline COMMAND",
		Short: "Compare policies and mechanisms by repeated leases, over numbers of queues and processes",
		Args:  term.Operands(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case len(f.own.Offline.Commands)+len(f.own.Offline.PIDs)+len(f.own.Offline.Containers) == 0:
				return term.Usage(cmd, "missing --offline: a command line, with {queues} for the number of queues")
			case iterations < 1 || hold <= 0 || gap < 0:
				return term.Usage(cmd, "--iterations and --hold must be greater than 0, and --gap not negative")
			case slices.ContainsFunc(slices.Concat(queues, processes), func(n int) bool { return n < 1 }):
				return term.Usage(cmd, "--queues and --processes must be greater than 0")
			}
			sized := slices.ContainsFunc(f.own.Offline.Commands, func(c string) bool { return strings.Contains(c, "{queues}") })
			if !sized && len(queues) > 1 {
				if cmd.Flags().Changed("queues") {
					return term.Usage(cmd, "--queues needs {queues} in a command of --offline, which it replaces")
				}
				queues = queues[:1]
			}
			p := f.own
			p.NoKFDTrace = !f.kfdTrace
			p.Name, p.Online, p.Count = "compare", trial.Online{Hold: hold, MaxWait: longestWait}, iterations
			p.Arrivals = scenario.Arrivals{Kind: scenario.Constant, Rate: 1 / (hold + gap).Seconds()}
			p.Profile = term.Or(f.profile, evidence.NoProfile)
			if p.Repeats == 0 {
				p.Repeats = 1
			}
			for _, policy := range orEmpty(f.policies) {
				for _, mechanism := range orEmpty(f.mechanisms) {
					for _, q := range queues {
						for _, n := range processes {
							p.Arms = append(p.Arms, trial.Arm{Kind: evidence.Protected, Policy: policy, Mechanism: mechanism, Queues: q, Processes: n})
						}
					}
				}
			}
			if len(p.Offline.Commands) == 0 { // running jobs have the queues and processes that they have
				for i := range p.Arms {
					p.Arms[i].Queues, p.Arms[i].Processes = 0, 0
				}
				p.Arms = slices.CompactFunc(p.Arms, func(a, b trial.Arm) bool { return a == b })
			}
			if err := f.findGPUs(a, cmd, &p); err != nil {
				return err
			}
			if err := checkPlan(&p, false); err != nil {
				return err
			}
			if err := checkProfile(p.Profile); err != nil {
				return err
			}
			if f.dryRun {
				return showPlan(a, &p)
			}
			return trialRun(a, cmd, &p, "compare", f.out, false)
		},
	}
	flags := cmd.Flags()
	f.addWork(flags)
	flags.IntSliceVar(&queues, "queues", []int{1, 3, 10}, "numbers of queues, for {queues} in --offline")
	flags.IntSliceVar(&processes, "processes", []int{1, 8}, "how often each --offline is started")
	flags.IntVar(&iterations, "iterations", 100, "leases in each repeat")
	flags.DurationVar(&hold, "hold", 10*time.Millisecond, "how long each lease is held")
	flags.DurationVar(&gap, "gap", 100*time.Millisecond, "time between the end of a lease and the next")
	flags.BoolVar(&f.dryRun, "dry-run", false, "show the arms without running them")
	term.Complete(cmd, "profile", evidence.ProfileNames())
	return cmd
}

// longestWait is how long an announcement waits for quiet GPUs: the comparison is of how long that
// takes.
const longestWait = 10 * time.Second

// showPlan shows what a plan would run.
func showPlan(a *term.App, p *trial.Plan) error {
	each := term.Duration(p.Duration)
	switch {
	case p.Count > 0 && p.Duration > 0:
		each = fmt.Sprintf("%s or %s", term.Count(p.Count, "request"), each)
	case p.Count > 0:
		each = term.Count(p.Count, "request")
	}
	return a.Show(struct {
		Name    string   `json:"name"`
		Arms    []string `json:"arms"`
		Repeats int      `json:"repeats"`
		// Seconds is about how long it takes.
		Seconds float64 `json:"seconds"`
		Plan    string  `json:"plan"`
	}{p.Name, armNames(p.Arms), p.Repeats, p.Estimate().Seconds(), p.YAML()}, func(out *term.Printer) {
		out.Linef("%s: %s, %s of each with %s, about %s:", p.Name, term.Count(len(p.Arms), "arm"), term.Count(p.Repeats, "repeat"), each, term.Duration(p.Estimate()))
		for _, name := range armNames(p.Arms) {
			out.Linef("  %s", name)
		}
	})
}

func armNames(arms []trial.Arm) (names []string) {
	for _, arm := range arms {
		names = append(names, arm.Name())
	}
	return names
}
