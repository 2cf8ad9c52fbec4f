package cli

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func (a *app) targetCommand() *cobra.Command {
	return noun("target", "The processes that own GPU queues",
		a.targetList(), a.targetExplain(), a.targetClassify(), a.targetSuspend(), a.targetResume())
}

// filter is what lists can be narrowed by.
type filter struct {
	class, gpu, target, container string
	pid                           int32
}

// filterFlags returns cmd the flags named, with their completion.
func (a *app) filterFlags(cmd *cobra.Command, f *filter, names ...string) {
	for _, name := range names {
		switch name {
		case "class":
			cmd.Flags().StringVar(&f.class, name, "", "only this class: "+strings.Join(api.EnumNames[gpreemptv1.Class](), ", "))
			complete(cmd, name, api.EnumNames[gpreemptv1.Class]())
		case "gpu":
			cmd.Flags().StringVar(&f.gpu, name, "", "only this GPU: "+selectorHelp)
			completeBy(cmd, name, a.gpuNames)
		case "target":
			cmd.Flags().StringVar(&f.target, name, "", "only this process: PID or PID@START")
			completeBy(cmd, name, a.targetNames)
		case "container":
			cmd.Flags().StringVar(&f.container, name, "", "only this container: its name, the beginning of its id, or NAMESPACE/POD")
			completeBy(cmd, name, a.containerNames)
		case "pid":
			cmd.Flags().Int32Var(&f.pid, name, 0, "only the process with this pid, on the host or in its container")
			completeBy(cmd, name, a.targetNames)
		}
	}
}

// check reads the class, and finds what no daemon could.
func (f *filter) check(cmd *cobra.Command) (gpreemptv1.Class, error) {
	if f.target != "" {
		if _, err := targetOperand(cmd, []string{f.target}); err != nil {
			return 0, err
		}
	}
	if cmd.Flags().Changed("pid") && f.pid <= 0 {
		return 0, usage(cmd, "--pid %d: a pid is more than 0", f.pid)
	}
	return parseClass(cmd, f.class)
}

// parseClass reads a class, "" as no class.
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
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the processes that own GPU queues, and where they stand",
		Args:  operands(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			class, err := f.check(cmd)
			if err != nil {
				return err
			}
			return a.call(cmd, func(ctx context.Context, admin gpreemptv1.AdminServiceClient) error {
				gpu, err := findGPU(ctx, cmd, admin, f.gpu)
				if err != nil {
					return err
				}
				resp, err := admin.ListTargets(ctx, &gpreemptv1.ListTargetsRequest{Class: class, GpuId: gpu, Container: f.container, Pid: f.pid})
				if err != nil {
					return err
				}
				return a.show(resp, func(p *printer) { printTargets(p, resp.GetTargets(), f != filter{}) })
			})
		},
	}
	a.filterFlags(cmd, &f, "class", "gpu", "container", "pid")
	return cmd
}

func printTargets(p *printer, list []*gpreemptv1.Target, filtered bool) {
	if len(list) == 0 {
		if filtered {
			p.linef("No process with GPU queues matches.")
		} else {
			p.linef("No process has GPU queues.")
		}
		return
	}
	t := p.table("", columns{
		">PID", "COMMAND", "CLASS", ">PRIO", "BY", "STATE", ">FOR", "GPUS", ">QUEUES", "+MECHANISM", "+>SUSPENDS", "+>SUSPENDED",
		"+>LEARNED", "+TARGET", "+>UID", "CONTAINER", "+>PID IN IT", "+POD", "+UNIT", "+CGROUP", "NOTE", "+COMMAND LINE",
	})
	for _, g := range list {
		learned := took(g.GetLearnedSuspend()) + "/" + took(g.GetLearnedResume())
		if g.GetLearnedSuspend() == nil && g.GetLearnedResume() == nil {
			learned = "-"
		}
		t.row(text(g.GetPid()), text(g.GetComm()), text(api.EnumName(g.GetClass())), text(g.GetPriority()), text(or(g.GetDecidedBy(), "-")),
			state(g.GetState()), text(took(g.GetInState())), text(gpus(g.GetGpuIds(), p.wide)), text(g.GetQueueCount()),
			text(or(g.GetMechanism(), "-")), text(g.GetSuspends()), text(took(g.GetSuspendedTotal())), text(learned),
			text(g.GetTargetId()), text(g.GetUid()), text(containerName(g.GetContainer())), text(ownPID(g)), text(podName(g.GetContainer())),
			text(or(g.GetUnit(), "-")), text(or(g.GetCgroup(), "-")), note(g), text(cut(g.GetCmdline(), 100)))
	}
	t.flush()
}

// containerName names a container as people do: by its name, else by the beginning
// of its id.
func containerName(c *gpreemptv1.Container) string {
	id := c.GetContainerId()
	return or(c.GetName(), or(id[:min(12, len(id))], "-"))
}

// podName is NAMESPACE/POD, or the pod's unique id while that is not known.
func podName(c *gpreemptv1.Container) string {
	if c.GetPod() == "" {
		return or(c.GetPodUid(), "-")
	}
	return c.GetNamespace() + "/" + c.GetPod()
}

// ownPID is what a process in a pid namespace of its own calls itself.
func ownPID(g *gpreemptv1.Target) string {
	own := g.GetNamespacePids()
	if len(own) == 0 {
		return "-"
	}
	return strconv.Itoa(int(own[len(own)-1]))
}

// note is what a person should know of a target besides its state.
func note(g *gpreemptv1.Target) cell {
	switch {
	case g.GetAttachError() != "":
		return cell{"cannot be suspended: " + g.GetAttachError(), styleBad}
	case g.GetRunsWithin() != nil:
		return cell{text: "runs again within " + took(g.GetRunsWithin())}
	}
	return cell{}
}

// named completes TARGET operands: the pids that the daemon knows.
func (a *app) named(cmd *cobra.Command, args []string, word string) ([]cobra.Completion, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return a.targetNames(cmd, args, word)
}

func (a *app) targetNames(cmd *cobra.Command, _ []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	return a.offer(cmd, func(ctx context.Context, admin gpreemptv1.AdminServiceClient) ([]cobra.Completion, error) {
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
	return a.offer(cmd, func(ctx context.Context, admin gpreemptv1.AdminServiceClient) ([]cobra.Completion, error) {
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

// targetOperand checks the first operand, a TARGET.
func targetOperand(cmd *cobra.Command, args []string) (string, error) {
	if _, err := gpreempt.ParseProcessKey(args[0]); err != nil {
		return "", usage(cmd, "%v", err)
	}
	return args[0], nil
}

// onTarget is what a command about one TARGET runs: it checks the operand and asks
// the daemon.
func (a *app) onTarget(ask func(ctx context.Context, admin gpreemptv1.AdminServiceClient, target string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		target, err := targetOperand(cmd, args)
		if err != nil {
			return err
		}
		return a.call(cmd, func(ctx context.Context, admin gpreemptv1.AdminServiceClient) error { return ask(ctx, admin, target) })
	}
}

func (a *app) targetClassify() *cobra.Command {
	var (
		rank uint32
		ttl  time.Duration
	)
	cmd := &cobra.Command{
		Use:   "classify TARGET CLASS",
		Short: "Override class and priority of one process",
		Long: `Overrides class and priority of one process until it exits, or for --ttl.
CLASS is online, offline or unmanaged; auto removes the override, so that the
rules decide again.`,
		Example: "  gpctl target classify 4242 offline --priority 3 --ttl 1h\n  gpctl target classify 4242 auto",
		Args:    operands("TARGET", "CLASS"),
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
			req := &gpreemptv1.ClassifyTargetRequest{TargetId: target}
			if args[1] == "auto" {
				if cmd.Flags().Changed("priority") || cmd.Flags().Changed("ttl") {
					return usage(cmd, "auto takes neither --priority nor --ttl: the rules decide")
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
			return a.call(cmd, func(ctx context.Context, admin gpreemptv1.AdminServiceClient) error {
				resp, err := admin.ClassifyTarget(ctx, req)
				if err != nil {
					return err
				}
				return a.show(resp, func(p *printer) {
					g := resp.GetTarget()
					until := ""
					if ttl > 0 {
						until = ", for " + duration(ttl)
					}
					p.linef("%s (%d) is %s, priority %d, by %s%s", g.GetComm(), g.GetPid(), api.EnumName(g.GetClass()), g.GetPriority(),
						or(g.GetDecidedBy(), "default"), until)
				})
			})
		},
	}
	cmd.Flags().Uint32Var(&rank, "priority", 0, "priority 0 to 15 (default: the class's)")
	cmd.Flags().DurationVar(&ttl, "ttl", 0, "how long, such as 1h (default: until the process exits)")
	return cmd
}

func (a *app) targetSuspend() *cobra.Command {
	var ttl time.Duration
	cmd := &cobra.Command{
		Use:   "suspend TARGET --ttl DURATION",
		Short: "Suspend one offline process by hand, for a bounded time",
		Long: `Takes all queues of one offline process off its GPUs, for --ttl at most; the
policy's max_suspend bounds it too. A second call replaces the time.`,
		Example:           "  gpctl target suspend 4242 --ttl 2s",
		Args:              operands("TARGET"),
		ValidArgsFunction: a.named,
		RunE: func(cmd *cobra.Command, args []string) error {
			target, err := targetOperand(cmd, args)
			if err != nil {
				return err
			}
			if !cmd.Flags().Changed("ttl") {
				return usage(cmd, "--ttl is missing: nothing is suspended without a bound")
			}
			return a.call(cmd, func(ctx context.Context, admin gpreemptv1.AdminServiceClient) error {
				resp, err := admin.SuspendTarget(ctx, &gpreemptv1.SuspendTargetRequest{TargetId: target, Ttl: durationpb.New(ttl)})
				if err != nil {
					return err
				}
				return a.show(resp, func(p *printer) {
					if resp.GetQuiesced() {
						p.linef("target %s is suspended, after %s and for %s at most (lease %s)", target,
							took(resp.GetTiming().GetTotal()), duration(ttl), resp.GetLeaseId())
					} else {
						p.linef("target %s is not suspended: %s (lease %s)", target, quiesce(resp.GetReason()), resp.GetLeaseId())
					}
					p.linef("  undo: gpctl target resume %s", target)
				})
			})
		},
	}
	cmd.Flags().DurationVar(&ttl, "ttl", 0, "how long at most, such as 2s")
	return cmd
}

func (a *app) targetResume() *cobra.Command {
	var hold time.Duration
	cmd := &cobra.Command{
		Use:   "resume TARGET",
		Short: "End a suspension by hand or a quarantine, and keep the process running",
		Long: `Ends a suspension by hand, and a quarantine. With --hold the process then runs
for that time whatever leases say.`,
		Example:           "  gpctl target resume 4242 --hold 10m",
		Args:              operands("TARGET"),
		ValidArgsFunction: a.named,
		RunE: a.onTarget(func(ctx context.Context, admin gpreemptv1.AdminServiceClient, target string) error {
			resp, err := admin.ResumeTarget(ctx, &gpreemptv1.ResumeTargetRequest{TargetId: target, Hold: durationpb.New(hold)})
			if err != nil {
				return err
			}
			return a.show(resp, func(p *printer) {
				kept := ""
				if hold > 0 {
					kept = fmt.Sprintf(", and runs for %s whatever leases say", duration(hold))
				}
				p.line(text(fmt.Sprintf("target %s is ", target)), state(resp.GetState()), text(kept))
				if resp.GetState() == gpreemptv1.TargetState_TARGET_STATE_SUSPENDED {
					p.linef("  a lease has it: --hold lets it run all the same, and gpctl target explain %s names the lease", target)
				}
			})
		}),
	}
	cmd.Flags().DurationVar(&hold, "hold", 0, "keep it running this long whatever leases say, 0s to 1h")
	return cmd
}
