package cli

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func targetCommand(a *term.App) *cobra.Command {
	return term.Noun("target", "The processes with GPU queues",
		targetList(a), targetExplain(a), targetClassify(a), targetSuspend(a), targetResume(a))
}

// filter selects the entries of a list.
type filter struct {
	class, gpu, target, container string
	pid                           int32
}

// filterFlags adds the named flags to cmd, with their completion.
func filterFlags(a *term.App, cmd *cobra.Command, f *filter, names ...string) {
	for _, name := range names {
		switch name {
		case "class":
			cmd.Flags().StringVar(&f.class, name, "", "only this class: "+strings.Join(term.EnumNames[gpreemptv1.Class](), ", "))
			term.Complete(cmd, name, term.EnumNames[gpreemptv1.Class]())
		case "gpu":
			cmd.Flags().StringVar(&f.gpu, name, "", "only this GPU: "+term.SelectorHelp)
			term.CompleteBy(cmd, name, a.CompleteGPUs)
		case "target":
			cmd.Flags().StringVar(&f.target, name, "", "only this process: PID, PID@START, or the COMMAND of one")
			term.CompleteBy(cmd, name, a.TargetNames)
		case "container":
			cmd.Flags().StringVar(&f.container, name, "", "only this container: name, prefix of the id, or NAMESPACE/POD")
			term.CompleteBy(cmd, name, a.ContainerNames)
		case "pid":
			cmd.Flags().Int32Var(&f.pid, name, 0, "only the process with this pid, on the host or in its container")
			term.CompleteBy(cmd, name, a.TargetNames)
		}
	}
}

// check returns the class, and an error for what no daemon accepts. target becomes PID or PID@START.
func (f *filter) check(ctx context.Context, cmd *cobra.Command, admin term.AdminClient) (gpreemptv1.Class, error) {
	if f.target != "" {
		ok, err := isTarget(cmd, f.target)
		if err == nil && !ok {
			f.target, err = term.TargetOfCommand(ctx, admin, f.target)
		}
		if err != nil {
			return 0, err
		}
	}
	if cmd.Flags().Changed("pid") && f.pid <= 0 {
		return 0, term.Usage(cmd, "invalid --pid %d; use a number greater than 0", f.pid)
	}
	return parseClass(cmd, f.class)
}

// parseClass parses a class; "" is the unspecified one.
func parseClass(cmd *cobra.Command, s string) (gpreemptv1.Class, error) {
	if s == "" {
		return gpreemptv1.Class_CLASS_UNSPECIFIED, nil
	}
	class, err := term.ParseEnum[gpreemptv1.Class](s)
	if err != nil {
		return class, term.Usage(cmd, "class: %v", err)
	}
	return class, nil
}

func targetList(a *term.App) *cobra.Command {
	var f filter
	cmd := showing(a, &cobra.Command{
		Use:   "list",
		Short: "List the processes with GPU queues, their class and state",
		Args:  term.Operands(),
	}, func(ctx context.Context, cmd *cobra.Command, admin term.AdminClient) (proto.Message, func(*term.Printer), error) {
		class, err := f.check(ctx, cmd, admin)
		if err != nil {
			return nil, nil, err
		}
		gpu, err := term.FindGPU(ctx, admin, f.gpu)
		if err != nil {
			return nil, nil, err
		}
		resp, err := admin.ListTargets(ctx, &gpreemptv1.ListTargetsRequest{Class: class, GpuId: gpu, Container: f.container, Pid: f.pid})
		names := a.NameGPUs(ctx, admin)
		return resp, func(p *term.Printer) { printTargets(p, resp.GetTargets(), names, f != filter{}) }, err
	})
	filterFlags(a, cmd, &f, "class", "gpu", "container", "pid")
	return cmd
}

func printTargets(p *term.Printer, list []*gpreemptv1.Target, names term.GPUNames, filtered bool) {
	if len(list) == 0 {
		if filtered {
			p.Linef("No process with GPU queues matches.")
		} else {
			p.Linef("No process has GPU queues.")
		}
		return
	}
	t := p.Table("", term.Columns{
		">PID", "COMMAND", "CLASS", ">PRIO", "BY", "STATE", ">FOR", "HIP", "GPUS", "+PRODUCT", ">QUEUES", "+MECHANISM", "+>SUSPENDS", "+>SUSPENDED",
		"+>LEARNED", "+JOB", "+>JOB RAN", "+TARGET", "+>UID", "CONTAINER", "+>PID IN IT", "+POD", "+UNIT", "+CGROUP", "NOTE", "+COMMAND LINE",
	})
	for _, g := range list {
		learned := term.Took(g.GetLearnedSuspend()) + "/" + term.Took(g.GetLearnedResume())
		if g.GetLearnedSuspend() == nil && g.GetLearnedResume() == nil {
			learned = "-"
		}
		t.Row(g.GetPid(), g.GetComm(), api.EnumName(g.GetClass()), g.GetPriority(), term.Or(g.GetDecidedBy(), "-"),
			term.State(g.GetState()), term.Took(g.GetInState()), names.HIP(g.GetGpuIds()...), term.GPUs(g.GetGpuIds(), p.Wide), names.Product(g.GetGpuIds()...), g.GetQueueCount(),
			term.Or(g.GetMechanism(), "-"), g.GetSuspends(), term.Took(g.GetSuspendedTotal()), learned,
			term.Or(g.GetJob().GetName(), "-"), jobRan(g.GetJob()), g.GetTargetId(), g.GetUid(), term.ContainerName(g.GetContainer()), term.OwnPID(g), podName(g.GetContainer()),
			term.Or(g.GetUnit(), "-"), term.Or(g.GetCgroup(), "-"), note(g), term.Cut(g.GetCmdline(), 100))
	}
	t.Flush()
}

// jobRan returns the share of time in which all processes of a job ran.
func jobRan(j *gpreemptv1.Job) string {
	if j == nil || j.RunningRatio == nil {
		return "-"
	}
	return fmt.Sprintf("%.1f%%", 100*j.GetRunningRatio())
}

// podName returns NAMESPACE/POD, or the pod's unique id while that is unknown.
func podName(c *gpreemptv1.Container) string {
	if c.GetPod() == "" {
		return term.Or(c.GetPodUid(), "-")
	}
	return c.GetNamespace() + "/" + c.GetPod()
}

// note returns what people should know of a target besides its state.
func note(g *gpreemptv1.Target) term.Cell {
	switch {
	case g.GetAttachError() != "" && g.GetOnResist() != "":
		return term.Cell{Text: "cannot be suspended, on_resist " + g.GetOnResist() + refusals(g) + ": " + g.GetAttachError(), Style: term.StyleBad}
	case g.GetAttachError() != "":
		return term.Cell{Text: "cannot be suspended: " + g.GetAttachError(), Style: term.StyleBad}
	case g.GetMechanism() == "stop":
		return term.Cell{Text: "resists: " + g.GetMechanismWhy(), Style: term.StyleNote}
	case g.GetRunsWithin() != nil:
		return term.Cell{Text: "resumes within " + term.Took(g.GetRunsWithin())}
	}
	return term.Cell{}
}

// refusals returns how often a target has refused to be suspended, in parentheses.
func refusals(g *gpreemptv1.Target) string {
	if g.GetRefusedSuspensions() == 0 {
		return ""
	}
	return fmt.Sprintf(" (%s)", term.Count(g.GetRefusedSuspensions(), "refused suspension"))
}

// isTarget reports whether s is a TARGET, and not the command of a process.
func isTarget(cmd *cobra.Command, s string) (bool, error) {
	_, err := gpreempt.ParseProcessKey(s)
	if err != nil && (strings.ContainsAny(s[:1], "-0123456789") || strings.Contains(s, "@")) {
		return false, term.Usage(cmd, "%v", err)
	}
	return err == nil, nil
}

// targetOperand returns the first operand, a TARGET. It asks the daemon only for the process of a command.
func targetOperand(a *term.App, cmd *cobra.Command, args []string) (target string, err error) {
	if ok, err := isTarget(cmd, args[0]); ok || err != nil {
		return args[0], err
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), a.Timeout)
	defer cancel()
	err = a.Stream(ctx, func(ctx context.Context, admin term.AdminClient) (err error) {
		target, err = term.TargetOfCommand(ctx, admin, args[0])
		return err
	})
	return target, err
}

// ofTarget makes cmd a command with the operand TARGET, which it passes to run.
func ofTarget(a *term.App, cmd *cobra.Command, run func(cmd *cobra.Command, target string) error) *cobra.Command {
	cmd.Args, cmd.ValidArgsFunction = term.Operands("TARGET"), a.Named
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		target, err := targetOperand(a, cmd, args)
		if err != nil {
			return err
		}
		return run(cmd, target)
	}
	return cmd
}

func targetClassify(a *term.App) *cobra.Command {
	var (
		rank      uint32
		ttl       time.Duration
		mechanism string
	)
	cmd := &cobra.Command{
		Use:   "classify TARGET CLASS",
		Short: "Override class, priority and mechanism of one process",
		Args:  term.Operands("TARGET", "CLASS"),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, word string) ([]cobra.Completion, cobra.ShellCompDirective) {
			if len(args) == 1 {
				return append(term.EnumNames[gpreemptv1.Class](), "auto"), cobra.ShellCompDirectiveNoFileComp
			}
			return a.Named(cmd, args, word)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if _, err := term.ParseEnum[gpreemptv1.Class](args[0]); err == nil || args[0] == "auto" {
				next := strings.Join([]string{cmd.CommandPath(), args[1], args[0]}, " ")
				return &term.Failure{Code: term.ExitUsage, Message: "the class " + args[0] + " comes after the target", Next: next}
			}
			target, err := targetOperand(a, cmd, args)
			if err != nil {
				return err
			}
			req := &gpreemptv1.ClassifyTargetRequest{TargetId: target, Mechanism: mechanism}
			if args[1] == "auto" {
				if cmd.Flags().Changed("priority") || cmd.Flags().Changed("ttl") || mechanism != "" {
					return term.Usage(cmd, "--priority, --ttl and --mechanism cannot be used with auto")
				}
			} else if req.Class, err = term.ParseEnum[gpreemptv1.Class](args[1]); err != nil {
				return term.Usage(cmd, "class: %v, auto", err)
			}
			if cmd.Flags().Changed("priority") {
				req.Priority = &rank
			}
			if cmd.Flags().Changed("ttl") {
				req.Ttl = durationpb.New(ttl)
			}
			return term.Ask(cmd, a, term.AdminClient.ClassifyTarget, req, func(p *term.Printer, resp *gpreemptv1.ClassifyTargetResponse) {
				g, until := resp.GetTarget(), ""
				if mechanism != "" {
					until = ", suspended by " + mechanism + " only"
				}
				if ttl > 0 {
					until += ", for " + term.Duration(ttl)
				}
				p.Linef("%s (%d): class %s, priority %d, by %s%s", g.GetComm(), g.GetPid(), api.EnumName(g.GetClass()), g.GetPriority(),
					term.Or(g.GetDecidedBy(), "default"), until)
			})
		},
	}
	cmd.Flags().Uint32Var(&rank, "priority", 0, "priority 0 to 15 (default: the class's)")
	cmd.Flags().DurationVar(&ttl, "ttl", 0, "duration, such as 1h (default: until the process exits)")
	cmd.Flags().StringVar(&mechanism, "mechanism", "", "`NAME` of the only mechanism that may suspend it (default: the daemon's choice)")
	return cmd
}

func targetSuspend(a *term.App) *cobra.Command {
	var ttl time.Duration
	cmd := ofTarget(a, &cobra.Command{
		Use:   "suspend TARGET --ttl DURATION",
		Short: "Suspend one offline process by hand, for a bounded time",
	}, func(cmd *cobra.Command, target string) error {
		if !cmd.Flags().Changed("ttl") {
			return &term.Failure{Code: term.ExitUsage, Message: "missing --ttl: a suspension must be bounded", Next: cmd.CommandPath() + " " + target + " --ttl 2s"}
		}
		req := &gpreemptv1.SuspendTargetRequest{TargetId: target, Ttl: durationpb.New(ttl)}
		shadow := false
		err := a.Call(cmd, func(ctx context.Context, admin term.AdminClient) error {
			resp, err := admin.SuspendTarget(ctx, req)
			if err != nil {
				return err
			}
			shadow = resp.GetReason() == gpreemptv1.QuiesceReason_QUIESCE_REASON_SHADOW
			return a.Show(resp, func(p *term.Printer) {
				switch {
				case shadow:
					return
				case resp.GetQuiesced():
					p.Linef("target %s is suspended after %s, for at most %s", target, term.Took(resp.GetTiming().GetTotal()), term.Duration(ttl))
				default:
					p.Linef("target %s is not suspended: %s", target, term.Quiesce(resp.GetReason()))
				}
				p.Linef("  undo: gpctl target resume %s", target)
			})
		})
		if err == nil && shadow {
			return &term.Failure{Code: term.ExitRefused, Message: "the policy is shadow: nothing is suspended", Next: "gpctl policy set balanced"}
		}
		return err
	})
	cmd.Flags().DurationVar(&ttl, "ttl", 0, "longest duration, such as 2s")
	return cmd
}

func targetResume(a *term.App) *cobra.Command {
	var hold time.Duration
	cmd := ofTarget(a, &cobra.Command{
		Use:   "resume TARGET",
		Short: "End a suspension by hand or a quarantine, and optionally hold the process running",
	}, func(cmd *cobra.Command, target string) error {
		req := &gpreemptv1.ResumeTargetRequest{TargetId: target, Hold: durationpb.New(hold)}
		return term.Ask(cmd, a, term.AdminClient.ResumeTarget, req, func(p *term.Printer, resp *gpreemptv1.ResumeTargetResponse) {
			held := ""
			if hold > 0 {
				held = ", held running for " + term.Duration(hold)
			}
			p.Line(fmt.Sprintf("target %s is ", target), term.State(resp.GetState()), held)
			if resp.GetState() == gpreemptv1.TargetState_TARGET_STATE_SUSPENDED {
				p.Linef("  it is suspended for a lease: use --hold to resume it; gpctl target explain %s shows the lease", target)
			}
		})
	})
	cmd.Flags().DurationVar(&hold, "hold", 0, "hold it running this long despite leases, 0s to 1h")
	return cmd
}
