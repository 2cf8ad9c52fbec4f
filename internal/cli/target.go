package cli

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func (a *app) targetCommand() *cobra.Command {
	return noun("target", "The processes with GPU queues",
		a.targetList(), a.targetExplain(), a.targetClassify(), a.targetSuspend(), a.targetResume())
}

// filter selects the entries of a list.
type filter struct {
	class, gpu, target, container string
	pid                           int32
}

// filterFlags adds the named flags to cmd, with their completion.
func (a *app) filterFlags(cmd *cobra.Command, f *filter, names ...string) {
	for _, name := range names {
		switch name {
		case "class":
			cmd.Flags().StringVar(&f.class, name, "", "only this class: "+strings.Join(api.EnumNames[gpreemptv1.Class](), ", "))
			complete(cmd, name, api.EnumNames[gpreemptv1.Class]())
		case "gpu":
			cmd.Flags().StringVar(&f.gpu, name, "", "only this GPU: "+selectorHelp)
			completeBy(cmd, name, a.completeGPUs)
		case "target":
			cmd.Flags().StringVar(&f.target, name, "", "only this process: PID or PID@START")
			completeBy(cmd, name, a.targetNames)
		case "container":
			cmd.Flags().StringVar(&f.container, name, "", "only this container: name, prefix of the id, or NAMESPACE/POD")
			completeBy(cmd, name, a.containerNames)
		case "pid":
			cmd.Flags().Int32Var(&f.pid, name, 0, "only the process with this pid, on the host or in its container")
			completeBy(cmd, name, a.targetNames)
		}
	}
}

// check returns the class, and an error for what no daemon accepts.
func (f *filter) check(cmd *cobra.Command) (gpreemptv1.Class, error) {
	if f.target != "" {
		if _, err := targetOperand(cmd, []string{f.target}); err != nil {
			return 0, err
		}
	}
	if cmd.Flags().Changed("pid") && f.pid <= 0 {
		return 0, usage(cmd, "invalid --pid %d; use a number greater than 0", f.pid)
	}
	return parseClass(cmd, f.class)
}

// parseClass parses a class; "" is the unspecified one.
func parseClass(cmd *cobra.Command, s string) (gpreemptv1.Class, error) {
	if s == "" {
		return gpreemptv1.Class_CLASS_UNSPECIFIED, nil
	}
	class, err := api.ParseEnum[gpreemptv1.Class](s)
	if err != nil {
		return class, usage(cmd, "class: %v", err)
	}
	return class, nil
}

func (a *app) targetList() *cobra.Command {
	var f filter
	cmd := a.watchable(&cobra.Command{
		Use:   "list",
		Short: "List the processes with GPU queues, their class and state",
		Args:  operands(),
	}, onEvents, func(ctx context.Context, cmd *cobra.Command, admin adminClient) (proto.Message, func(*printer), error) {
		class, err := f.check(cmd)
		if err != nil {
			return nil, nil, err
		}
		gpu, err := findGPU(ctx, admin, f.gpu)
		if err != nil {
			return nil, nil, err
		}
		resp, err := admin.ListTargets(ctx, &gpreemptv1.ListTargetsRequest{Class: class, GpuId: gpu, Container: f.container, Pid: f.pid})
		names := a.nameGPUs(ctx, admin)
		return resp, func(p *printer) { printTargets(p, resp.GetTargets(), names, f != filter{}) }, err
	})
	a.filterFlags(cmd, &f, "class", "gpu", "container", "pid")
	return cmd
}

func printTargets(p *printer, list []*gpreemptv1.Target, names gpuNames, filtered bool) {
	if len(list) == 0 {
		if filtered {
			p.linef("No process with GPU queues matches.")
		} else {
			p.linef("No process has GPU queues.")
		}
		return
	}
	t := p.table("", columns{
		">PID", "COMMAND", "CLASS", ">PRIO", "BY", "STATE", ">FOR", "HIP", "GPUS", "+PRODUCT", ">QUEUES", "+MECHANISM", "+>SUSPENDS", "+>SUSPENDED",
		"+>LEARNED", "+JOB", "+>JOB RAN", "+TARGET", "+>UID", "CONTAINER", "+>PID IN IT", "+POD", "+UNIT", "+CGROUP", "NOTE", "+COMMAND LINE",
	})
	for _, g := range list {
		learned := took(g.GetLearnedSuspend()) + "/" + took(g.GetLearnedResume())
		if g.GetLearnedSuspend() == nil && g.GetLearnedResume() == nil {
			learned = "-"
		}
		t.row(g.GetPid(), g.GetComm(), api.EnumName(g.GetClass()), g.GetPriority(), or(g.GetDecidedBy(), "-"),
			state(g.GetState()), took(g.GetInState()), names.hip(g.GetGpuIds()...), gpus(g.GetGpuIds(), p.wide), names.product(g.GetGpuIds()...), g.GetQueueCount(),
			or(g.GetMechanism(), "-"), g.GetSuspends(), took(g.GetSuspendedTotal()), learned,
			or(g.GetJob().GetName(), "-"), jobRan(g.GetJob()), g.GetTargetId(), g.GetUid(), containerName(g.GetContainer()), ownPID(g), podName(g.GetContainer()),
			or(g.GetUnit(), "-"), or(g.GetCgroup(), "-"), note(g), cut(g.GetCmdline(), 100))
	}
	t.flush()
}

// jobRan returns the share of time in which all processes of a job ran.
func jobRan(j *gpreemptv1.Job) string {
	if j == nil || j.RunningRatio == nil {
		return "-"
	}
	return fmt.Sprintf("%.1f%%", 100*j.GetRunningRatio())
}

// containerName returns a container's name, or the beginning of its id.
func containerName(c *gpreemptv1.Container) string {
	id := c.GetContainerId()
	return or(c.GetName(), or(id[:min(12, len(id))], "-"))
}

// podName returns NAMESPACE/POD, or the pod's unique id while that is unknown.
func podName(c *gpreemptv1.Container) string {
	if c.GetPod() == "" {
		return or(c.GetPodUid(), "-")
	}
	return c.GetNamespace() + "/" + c.GetPod()
}

// ownPID returns the pid of a process in its own pid namespace.
func ownPID(g *gpreemptv1.Target) string {
	own := g.GetNamespacePids()
	if len(own) == 0 {
		return "-"
	}
	return strconv.Itoa(int(own[len(own)-1]))
}

// note returns what people should know of a target besides its state.
func note(g *gpreemptv1.Target) cell {
	switch {
	case g.GetAttachError() != "" && g.GetOnResist() != "":
		return cell{"cannot be suspended, on_resist " + g.GetOnResist() + refusals(g) + ": " + g.GetAttachError(), styleBad}
	case g.GetAttachError() != "":
		return cell{"cannot be suspended: " + g.GetAttachError(), styleBad}
	case g.GetMechanism() == "stop":
		return cell{"resists: " + g.GetMechanismWhy(), styleNote}
	case g.GetRunsWithin() != nil:
		return cell{text: "resumes within " + took(g.GetRunsWithin())}
	}
	return cell{}
}

// refusals returns how often a target has refused to be suspended, in parentheses.
func refusals(g *gpreemptv1.Target) string {
	if g.GetRefusedSuspensions() == 0 {
		return ""
	}
	return fmt.Sprintf(" (%s)", count(g.GetRefusedSuspensions(), "refused suspension"))
}

// named completes TARGET operands by the pids that the daemon knows.
func (a *app) named(cmd *cobra.Command, args []string, word string) ([]cobra.Completion, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return a.targetNames(cmd, args, word)
}

func (a *app) targetNames(cmd *cobra.Command, _ []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	return a.offer(cmd, func(ctx context.Context, admin adminClient) ([]cobra.Completion, error) {
		resp, err := admin.ListTargets(ctx, &gpreemptv1.ListTargetsRequest{})
		var pids []cobra.Completion
		for _, g := range resp.GetTargets() {
			about := printable(g.GetComm()) + ", " + api.EnumName(g.GetClass()) + ", " + api.EnumName(g.GetState())
			pids = append(pids, cobra.CompletionWithDesc(strconv.Itoa(int(g.GetPid())), about))
		}
		return pids, err
	})
}

func (a *app) containerNames(cmd *cobra.Command, _ []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	return a.offer(cmd, func(ctx context.Context, admin adminClient) ([]cobra.Completion, error) {
		resp, err := admin.ListTargets(ctx, &gpreemptv1.ListTargetsRequest{})
		var names []cobra.Completion
		for _, g := range resp.GetTargets() {
			if c := g.GetContainer(); c != nil {
				names = append(names, cobra.CompletionWithDesc(printable(containerName(c)), printable(or(c.GetImage(), c.GetRuntime()))))
			}
		}
		slices.Sort(names)
		return slices.Compact(names), err
	})
}

// targetOperand returns the first operand, a TARGET.
func targetOperand(cmd *cobra.Command, args []string) (string, error) {
	if _, err := gpreempt.ParseProcessKey(args[0]); err != nil {
		return "", usage(cmd, "%v", err)
	}
	return args[0], nil
}

// ofTarget makes cmd a command with the operand TARGET, which it passes to run.
func (a *app) ofTarget(cmd *cobra.Command, run func(cmd *cobra.Command, target string) error) *cobra.Command {
	cmd.Args, cmd.ValidArgsFunction = operands("TARGET"), a.named
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		target, err := targetOperand(cmd, args)
		if err != nil {
			return err
		}
		return run(cmd, target)
	}
	return cmd
}

func (a *app) targetClassify() *cobra.Command {
	var (
		rank      uint32
		ttl       time.Duration
		mechanism string
	)
	cmd := &cobra.Command{
		Use:   "classify TARGET CLASS",
		Short: "Override class, priority and mechanism of one process",
		Args:  operands("TARGET", "CLASS"),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, word string) ([]cobra.Completion, cobra.ShellCompDirective) {
			if len(args) == 1 {
				return append(api.EnumNames[gpreemptv1.Class](), "auto"), cobra.ShellCompDirectiveNoFileComp
			}
			return a.named(cmd, args, word)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			target, err := targetOperand(cmd, args)
			if err != nil {
				return err
			}
			req := &gpreemptv1.ClassifyTargetRequest{TargetId: target, Mechanism: mechanism}
			if args[1] == "auto" {
				if cmd.Flags().Changed("priority") || cmd.Flags().Changed("ttl") || mechanism != "" {
					return usage(cmd, "--priority, --ttl and --mechanism cannot be used with auto")
				}
			} else if req.Class, err = api.ParseEnum[gpreemptv1.Class](args[1]); err != nil {
				return usage(cmd, "class: %v, auto", err)
			}
			if cmd.Flags().Changed("priority") {
				req.Priority = &rank
			}
			if cmd.Flags().Changed("ttl") {
				req.Ttl = durationpb.New(ttl)
			}
			return ask(cmd, a, adminClient.ClassifyTarget, req, func(p *printer, resp *gpreemptv1.ClassifyTargetResponse) {
				g, until := resp.GetTarget(), ""
				if mechanism != "" {
					until = ", suspended by " + mechanism + " only"
				}
				if ttl > 0 {
					until += ", for " + duration(ttl)
				}
				p.linef("%s (%d): class %s, priority %d, by %s%s", g.GetComm(), g.GetPid(), api.EnumName(g.GetClass()), g.GetPriority(),
					or(g.GetDecidedBy(), "default"), until)
			})
		},
	}
	cmd.Flags().Uint32Var(&rank, "priority", 0, "priority 0 to 15 (default: the class's)")
	cmd.Flags().DurationVar(&ttl, "ttl", 0, "duration, such as 1h (default: until the process exits)")
	cmd.Flags().StringVar(&mechanism, "mechanism", "", "`NAME` of the only mechanism that may suspend it (default: the daemon's choice)")
	return cmd
}

func (a *app) targetSuspend() *cobra.Command {
	var ttl time.Duration
	cmd := a.ofTarget(&cobra.Command{
		Use:   "suspend TARGET --ttl DURATION",
		Short: "Suspend one offline process by hand, for a bounded time",
	}, func(cmd *cobra.Command, target string) error {
		if !cmd.Flags().Changed("ttl") {
			return usage(cmd, "missing --ttl: a suspension must be bounded")
		}
		req := &gpreemptv1.SuspendTargetRequest{TargetId: target, Ttl: durationpb.New(ttl)}
		return ask(cmd, a, adminClient.SuspendTarget, req, func(p *printer, resp *gpreemptv1.SuspendTargetResponse) {
			if resp.GetQuiesced() {
				p.linef("target %s is suspended after %s, for at most %s (lease %s)", target,
					took(resp.GetTiming().GetTotal()), duration(ttl), resp.GetLeaseId())
			} else {
				p.linef("target %s is not suspended: %s (lease %s)", target, quiesce(resp.GetReason()), resp.GetLeaseId())
			}
			p.linef("  undo: gpctl target resume %s", target)
		})
	})
	cmd.Flags().DurationVar(&ttl, "ttl", 0, "longest duration, such as 2s")
	return cmd
}

func (a *app) targetResume() *cobra.Command {
	var hold time.Duration
	cmd := a.ofTarget(&cobra.Command{
		Use:   "resume TARGET",
		Short: "End a suspension by hand or a quarantine, and optionally hold the process running",
	}, func(cmd *cobra.Command, target string) error {
		req := &gpreemptv1.ResumeTargetRequest{TargetId: target, Hold: durationpb.New(hold)}
		return ask(cmd, a, adminClient.ResumeTarget, req, func(p *printer, resp *gpreemptv1.ResumeTargetResponse) {
			held := ""
			if hold > 0 {
				held = ", held running for " + duration(hold)
			}
			p.line(fmt.Sprintf("target %s is ", target), state(resp.GetState()), held)
			if resp.GetState() == gpreemptv1.TargetState_TARGET_STATE_SUSPENDED {
				p.linef("  it is suspended for a lease: use --hold to resume it; gpctl target explain %s shows the lease", target)
			}
		})
	})
	cmd.Flags().DurationVar(&hold, "hold", 0, "hold it running this long despite leases, 0s to 1h")
	return cmd
}
