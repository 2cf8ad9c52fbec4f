package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/schollz/progressbar/v3"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/config/yamlfile"
	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/lab/evidence"
	"github.com/gpreempt/gpreempt/lab/scenario"
	"github.com/gpreempt/gpreempt/lab/trial"
	"github.com/gpreempt/gpreempt/pkg/client"
)

// trialFlags are the flags that make or change a plan.
type trialFlags struct {
	plan, out, resume, profile       string
	arms, policies, mechanisms, gpus []string
	announce, trace                  string
	rate                             float64
	kfdTrace, dryRun                 bool
	own                              trial.Plan // what the other flags set
}

func trialCommand(a *term.App) *cobra.Command {
	var f trialFlags
	cmd := &cobra.Command{
		Use:   "trial",
		Short: "Measure what gpreempt does to your own jobs, and reach a verdict",
		Args:  cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return term.Unknown(cmd, args...)
			}
			if f.resume == "" && cmd.Flags().NFlag() == 0 {
				return term.Usage(cmd, "missing work: --online and --offline, or --plan")
			}
			return runTrial(a, cmd, &f)
		},
	}
	f.add(cmd)
	cmd.AddCommand(trialCompare(a), trialJudge(a), trialPlans(a), trialProfiles(a))
	return cmd
}

func (f *trialFlags) add(cmd *cobra.Command) {
	flags := cmd.Flags()
	f.addWork(flags)
	flags.StringVar(&f.plan, "plan", "", "`NAME` of a plan, or the path of a YAML file; other flags change it")
	flags.StringVar(&f.resume, "resume", "", "continue the interrupted run in `DIR`")
	flags.StringVar(&f.own.Online.Command, "online", "", "command line of the server, or of what makes the requests")
	flags.StringVar(&f.own.Online.Request, "request", "", "a request: stdin, a URL, or a command line (default: --online makes them)")
	flags.StringVar(&f.own.Online.Ready, "ready", "", "`REGEXP` of the line after which the server can be used")
	flags.StringVar(&f.own.Online.Answer, "answer", "", "with --request stdin: `REGEXP` of the lines that are answers (default: all)")
	flags.StringVar(&f.announce, "announce", "", "what announces requests: trial (the default), or command with an SDK")
	flags.Float64Var(&f.rate, "rate", 0, "requests per second, evenly spaced (default: by how long one takes, at most 10)")
	flags.StringVar(&f.trace, "trace", "", "CSV `FILE` with the times of requests")
	flags.BoolVar(&f.dryRun, "dry-run", false, "show what would be run, without running it")
	flags.IntVar(&f.own.Count, "count", 0, "requests in each repeat (default: 40, without --duration)")
	flags.DurationVar(&f.own.Duration, "duration", 0, "duration of each repeat")
	flags.StringArrayVar(&f.arms, "arm", nil, "arm to run; may be repeated (default: all four that the work allows)")
	term.Complete(cmd, "announce", []string{"trial", "command"})
	term.Complete(cmd, "request", []string{trial.RequestByLine})
	term.Complete(cmd, "plan", trial.PlanNames())
	term.Complete(cmd, "profile", evidence.ProfileNames())
}

// addWork adds the flags that trials and comparisons have.
func (f *trialFlags) addWork(flags *pflag.FlagSet) {
	flags.StringArrayVar(&f.own.Offline.Commands, "offline", nil, "command line of an offline job; may be repeated")
	flags.Int32SliceVar(&f.own.Offline.PIDs, "pid", nil, "pid of an offline job that runs already; may be repeated")
	flags.StringArrayVar(&f.own.Offline.Containers, "container", nil, "container with offline jobs that run already; may be repeated")
	flags.StringVar(&f.own.Offline.Progress, "progress", "", "`REGEXP` of the lines with a job's progress, with a group for the number (default: \"step N\")")
	flags.StringVar(&f.own.Offline.Unit, "unit", "", "name of what --progress counts (default: steps)")
	flags.StringArrayVar(&f.policies, "policy", nil, "preset for a protected arm; may be repeated (default: the daemon's policy)")
	flags.StringArrayVar(&f.mechanisms, "mechanism", nil, "mechanism that suspends in a protected arm; may be repeated (default: the daemon's choice)")
	flags.StringArrayVar(&f.gpus, "gpu", nil, "GPU that requests are announced for: "+term.SelectorHelp+"; may be repeated (default: those of the offline jobs)")
	flags.IntVar(&f.own.Repeats, "repeats", 0, "repeats of each arm")
	flags.DurationVar(&f.own.WarmUp, "warm-up", 0, "how long jobs run before a repeat is measured")
	flags.Uint64Var(&f.own.Seed, "seed", 0, "seed of random arrivals")
	flags.StringVar(&f.profile, "profile", "", "`NAME` of the profile for the verdict, or the path of a YAML file (default: default, or emulated)")
	flags.BoolVar(&f.kfdTrace, "kfd-trace", true, "record what the driver does, where the kernel's tracing allows it")
	flags.IntVar(&f.own.HIPLog, "hip-log", 0, "AMD_LOG_LEVEL of the commands, `1-5`; 3 and more slow them down (default: 2, errors and warnings)")
	flags.StringVar(&f.out, "output-dir", "", "new `DIR` for the run (default: named by plan and time)")
}

// merge returns the plan of the flags: that of --plan, with the values that other flags set.
func (f *trialFlags) merge(cmd *cobra.Command) (trial.Plan, error) {
	var p trial.Plan
	if f.plan != "" {
		file, text, err := trial.ReadPlan(f.plan)
		if err != nil {
			return p, &term.Failure{Code: term.ExitUsage, Message: err.Error(), Next: "gplab trial plans"}
		}
		if p, err = trial.Parse(file, text); err != nil {
			return p, &term.Failure{Code: term.ExitUsage, Message: err.Error()}
		}
		if t := &p.Arrivals; t.Trace != "" && !filepath.IsAbs(t.Trace) {
			t.Trace = filepath.Join(filepath.Dir(f.plan), t.Trace)
		}
	}
	own := &f.own
	set := map[string]func(){
		"online": func() { p.Online.Command = own.Online.Command }, "request": func() { p.Online.Request = own.Online.Request },
		"ready": func() { p.Online.Ready = own.Online.Ready }, "answer": func() { p.Online.Answer = own.Online.Answer },
		"announce": func() { p.Online.AnnouncedByCommand = f.announce == "command" },
		"offline":  func() { p.Offline.Commands = own.Offline.Commands }, "pid": func() { p.Offline.PIDs = own.Offline.PIDs },
		"container": func() { p.Offline.Containers = own.Offline.Containers }, "progress": func() { p.Offline.Progress = own.Offline.Progress },
		"unit": func() { p.Offline.Unit = own.Offline.Unit }, "count": func() { p.Count = own.Count }, "duration": func() { p.Duration = own.Duration },
		"repeats": func() { p.Repeats = own.Repeats }, "warm-up": func() { p.WarmUp = own.WarmUp }, "seed": func() { p.Seed = own.Seed },
		"profile": func() { p.Profile = f.profile }, "kfd-trace": func() { p.NoKFDTrace = !f.kfdTrace }, "hip-log": func() { p.HIPLog = own.HIPLog },
		"rate": func() {
			p.Arrivals, p.Gaps = scenario.Arrivals{Kind: scenario.Constant, Rate: f.rate}, [2]time.Duration{}
		},
		"trace": func() {
			p.Arrivals, p.Gaps = scenario.Arrivals{Kind: scenario.Trace, Trace: f.trace}, [2]time.Duration{}
		},
	}
	for name, apply := range set {
		if cmd.Flags().Changed(name) {
			apply()
		}
	}
	switch {
	case f.announce != "" && f.announce != "trial" && f.announce != "command":
		return p, term.Usage(cmd, "invalid --announce %q; use trial or command", f.announce)
	case f.rate != 0 && f.trace != "":
		return p, term.Usage(cmd, "--rate and --trace cannot be used together")
	}
	if err := f.setArms(cmd, &p); err != nil {
		return p, err
	}
	if p.Arrivals.Trace != "" {
		path, err := filepath.Abs(p.Arrivals.Trace)
		if err != nil {
			return p, err
		}
		p.Arrivals.Trace = path
	}
	return p, nil
}

// setArms sets the arms by --arm, and the protected ones by --policy and --mechanism.
func (f *trialFlags) setArms(cmd *cobra.Command, p *trial.Plan) error {
	if len(f.arms) > 0 {
		p.Arms = nil
	}
	for _, name := range f.arms {
		arm, err := trial.ParseArm(name)
		if err != nil {
			return term.Usage(cmd, "--arm: %v", err)
		}
		p.Arms = append(p.Arms, arm)
	}
	if len(f.policies)+len(f.mechanisms) == 0 {
		return nil
	}
	if len(p.Arms) == 0 {
		p.Arms = p.DefaultArms()
	}
	var arms []trial.Arm
	for _, arm := range p.Arms {
		if arm.Kind != evidence.Protected {
			arms = append(arms, arm)
			continue
		}
		for _, policy := range orEmpty(f.policies) {
			for _, mechanism := range orEmpty(f.mechanisms) {
				arm.Policy, arm.Mechanism = policy, mechanism
				arms = append(arms, arm)
			}
		}
	}
	p.Arms = arms
	return nil
}

// orEmpty returns the list, or one empty text instead of an empty list.
func orEmpty(list []string) []string {
	if len(list) == 0 {
		return []string{""}
	}
	return list
}

func runTrial(a *term.App, cmd *cobra.Command, f *trialFlags) error {
	if f.resume != "" {
		cmd.Flags().Visit(func(flag *pflag.Flag) {
			if flag.Name != "resume" && cmd.LocalNonPersistentFlags().Lookup(flag.Name) != nil {
				f.resume = ""
			}
		})
		if f.resume == "" {
			return term.Usage(cmd, "--resume takes the plan of the run: other flags do not apply")
		}
		return trialRun(a, cmd, nil, "trial", f.resume, false)
	}
	p, err := f.merge(cmd)
	if err != nil {
		return err
	}
	if err := f.findGPUs(a, cmd, &p); err != nil {
		return err
	}
	if err := checkPlan(&p, f.plan != ""); err != nil {
		return err
	}
	if err := checkProfile(p.Profile); err != nil {
		return err
	}
	if f.dryRun {
		return showPlan(a, &p)
	}
	return trialRun(a, cmd, &p, "trial", f.out, len(f.arms)+len(f.mechanisms) == 0)
}

// checkPlan returns the errors of a plan.
func checkPlan(p *trial.Plan, ofFile bool) error {
	err := p.Check()
	if err == nil {
		return nil
	}
	if !ofFile {
		err = asFlags(err)
	}
	return &term.Failure{Code: term.ExitUsage, Message: "the plan is not complete: " + strings.ReplaceAll(err.Error(), "\n", "; "), Next: "gplab trial --help"}
}

// asFlags names the flags in the place of the keys of a plan, for a plan without a file.
func asFlags(err error) error {
	list, ok := errors.AsType[yamlfile.Errors](err)
	if !ok {
		return err
	}
	flags := map[string]string{
		"online": "--online", "online.command": "--online", "online.request": "--request", "online.ready": "--ready", "online.answer": "--answer",
		"offline.progress": "--progress", "arrivals.rate": "--rate", "arrivals.trace": "--trace", "hip_log": "--hip-log", "count": "--count",
		"duration": "--duration", "repeats": "--repeats",
	}
	remedies := strings.NewReplacer("write a count or a duration, or online.request for", "give --count or --duration, or --request for")
	var named yamlfile.Errors
	for _, e := range list {
		one := *e
		one.Key, one.Remedy = term.Or(flags[e.Key], e.Key), remedies.Replace(e.Remedy)
		named = append(named, &one)
	}
	return named
}

// checkProfile returns an error for a profile that does not exist.
func checkProfile(name string) error {
	if name == "" || name == evidence.NoProfile {
		return nil
	}
	if _, err := evidence.LoadProfile(name); err != nil {
		return &term.Failure{Code: term.ExitUsage, Message: err.Error(), Next: "gplab trial profiles"}
	}
	return nil
}

// findGPUs sets the GPUs by --gpu.
func (f *trialFlags) findGPUs(a *term.App, cmd *cobra.Command, p *trial.Plan) error {
	if len(f.gpus) == 0 {
		return nil
	}
	p.GPUs = nil
	return a.Call(cmd, func(ctx context.Context, admin term.AdminClient) error {
		for _, s := range f.gpus {
			id, err := term.FindGPU(ctx, admin, s)
			if err != nil {
				return err
			}
			p.GPUs = append(p.GPUs, id)
		}
		return nil
	})
}

// dialHere connects to the daemon of this host, and returns its socket.
func dialHere(a *term.App, cmd *cobra.Command) (c *client.Client, socket string, err error) {
	if a.Address != "" {
		return nil, "", term.Usage(cmd, "--address does not apply: the jobs must run on the host of the daemon")
	}
	if socket, err = filepath.Abs(a.Socket); err != nil {
		return nil, "", err
	}
	// Requests without a lease are counted, and need no lines in the log.
	c, err = client.Dial(socket, client.OnUnprotected(func(error) {}))
	return c, socket, err
}

// trialRun runs a plan into a folder, or continues the run in the folder if p is nil, and shows
// what it measured. With skip, arms with a mechanism that the daemon does not have are left out.
func trialRun(a *term.App, cmd *cobra.Command, p *trial.Plan, command, dir string, skip bool) error {
	c, socket, err := dialHere(a, cmd)
	if err != nil {
		return err
	}
	defer c.Close()
	if dir == "" {
		dir = fmt.Sprintf("%s-%s", folderName(p.Name), a.Now().Format("20060102-150405"))
	}
	progress, finish := trialProgress(a)
	cfg := trial.Config{
		Dir: dir, Client: c, Socket: socket, Version: api.VersionString(), Command: command, SkipMissing: skip,
		Progress: progress, TraceKFD: recordBeside(thisHost()),
	}
	ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	var run *evidence.Run
	if p == nil {
		run, err = trial.Resume(ctx, cfg)
	} else {
		run, err = trial.Run(ctx, *p, cfg)
	}
	finish()
	if err != nil {
		failed := trialFailed(ctx, a, err, run != nil)
		if run != nil {
			look := term.Or(failed.Next, "see "+dir+"/"+evidence.LogsDir) + "; "
			if ctx.Err() != nil {
				look = ""
			}
			failed.Next = fmt.Sprintf("%sgplab trial --resume %s continues it; its figures are in %s", look, dir, dir)
			if page, err := reportIn(dir, run); err == nil {
				failed.Next += "; a report of what was run is " + page
			} else {
				failed.Next += "; its report failed: " + err.Error()
			}
		}
		return failed
	}
	page, err := reportIn(dir, run)
	shown := showRun(a, dir, run, "", page)
	if err != nil {
		return err
	}
	return shown
}

// trialFailed returns the failure for the error of a trial, which may have measured something before.
func trialFailed(ctx context.Context, a *term.App, err error, measured bool) *term.Failure {
	if ctx.Err() != nil {
		return &term.Failure{Code: term.ExitFailure, Message: err.Error() + "; nothing of it is left running"}
	}
	if preflight, ok := errors.AsType[*trial.PreflightError](err); ok && !measured {
		return &term.Failure{Code: term.ExitFailure, Message: "nothing was measured: " + preflight.Problem, Next: preflight.Remedy}
	}
	if missing, ok := errors.AsType[*trial.MissingError](err); ok {
		return &term.Failure{Code: term.ExitRefused, Message: missing.Error(), Next: "choose another --mechanism, or enable it in the daemon's config file and restart the daemon"}
	}
	err = a.FromDaemon(ctx, err)
	if f, ok := errors.AsType[*term.Failure](err); ok {
		return f
	}
	return &term.Failure{Code: term.ExitFailure, Message: err.Error()}
}

// folderName returns a name with the characters of a file's name.
func folderName(name string) string {
	return strings.Map(func(c rune) rune {
		if c == '-' || c == '.' || c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' {
			return c
		}
		return '-'
	}, name)
}

// trialProgress returns what shows the progress of a trial on standard error: a bar on a terminal,
// else a line for each step. finish ends it.
func trialProgress(a *term.App) (show func(trial.Progress), finish func()) {
	if !a.ErrTerminal || a.Getenv("TERM") == "dumb" {
		last := ""
		return func(p trial.Progress) {
			if line := fmt.Sprintf("%d of %d repeats done; %s", p.Done, p.Total, p.Text); p.Text != "" && line != last {
				last = line
				fmt.Fprintf(a.Err, "%s; about %s left\n", line, term.Duration(p.Left.Round(time.Second)))
			}
		}, func() {}
	}
	const parts = 1000 // of a step
	var bar *progressbar.ProgressBar
	return func(p trial.Progress) {
			if bar == nil {
				bar = progressbar.NewOptions(p.Total*parts, progressbar.OptionSetWriter(a.Err), progressbar.OptionSetWidth(20),
					progressbar.OptionSetPredictTime(false), progressbar.OptionThrottle(100*time.Millisecond))
			}
			within := 0
			if p.Expected > 0 {
				within = min(parts-1, p.Requests*parts/p.Expected)
			}
			bar.Describe(fmt.Sprintf("%s, about %s left", p.Text, term.Duration(p.Left.Round(time.Second))))
			_ = bar.Set(min(p.Total*parts, p.Done*parts+within)) // it fails when the terminal is closed
		}, func() {
			if bar != nil {
				_, _ = bar.Clear(), bar.Exit()
			}
		}
}
