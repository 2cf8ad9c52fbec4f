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
)

func (a *app) leaseCommand() *cobra.Command {
	return noun("lease", "The leases of online work on GPUs", a.leaseList(), a.leaseCreate(), a.leaseRelease())
}

func (a *app) leaseList() *cobra.Command {
	return a.watchable(&cobra.Command{
		Use:   "list",
		Short: "List the live leases, oldest first",
		Args:  operands(),
	}, onEvents, func(ctx context.Context, _ *cobra.Command, admin adminClient) (proto.Message, func(*printer), error) {
		resp, err := admin.ListLeases(ctx, &gpreemptv1.ListLeasesRequest{})
		names := a.nameGPUs(ctx, admin)
		return resp, func(p *printer) {
			if len(resp.GetLeases()) == 0 {
				p.linef("No live leases.")
				return
			}
			a.printLeases(p, resp.GetLeases(), names)
		}, err
	})
}

func (a *app) printLeases(p *printer, list []*gpreemptv1.Lease, names gpuNames) {
	t := p.table("", columns{
		"LEASE", "LABEL", "STATE", ">PRIO", "HIP", "GPUS", "+PRODUCT", "OWNER", "+>UID", ">AGE", ">EXPIRES IN", "+TARGETS",
	})
	for _, l := range list {
		uid := fmt.Sprint(l.GetClientUid())
		if l.GetClientCertificate() != "" {
			uid = "-"
		}
		where := api.EnumName(l.GetState())
		if end := api.EnumName(l.GetEnd()); end != "" {
			where += ": " + end
		}
		t.row(l.GetLeaseId(), or(l.GetLabel(), "-"), where, priority(l.GetPriority()), names.hip(l.GetGpuIds()...), gpus(l.GetGpuIds(), p.wide), names.product(l.GetGpuIds()...),
			leaseOwner(l), uid, a.age(l.GetCreatedAt()), took(l.GetExpiresIn()),
			or(strings.Join(l.GetTargetIds(), ","), "-"))
	}
	t.flush()
}

// leaseOwner names the owner of a lease: a certificate, a process, or an admin.
func leaseOwner(l *gpreemptv1.Lease) string {
	switch {
	case l.GetClientCertificate() != "":
		return l.GetClientCertificate()
	case l.GetClientPid() > 0:
		return fmt.Sprintf("pid %d", l.GetClientPid())
	}
	return "admin"
}

func (a *app) leaseCreate() *cobra.Command {
	var (
		selectors []string
		rank      uint32
		ttl       time.Duration
		label     string
	)
	cmd := &cobra.Command{
		Use:   "create",
		Short: "Create a lease by hand, as an inference server does by announcing work",
		Args:  operands(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			announce := &gpreemptv1.NotifyOnlineRequest{Label: label}
			if cmd.Flags().Changed("priority") {
				announce.Priority = &rank
			}
			if cmd.Flags().Changed("ttl") {
				announce.Ttl = durationpb.New(ttl)
			}
			return a.call(cmd, func(ctx context.Context, admin adminClient) error {
				// On a host without a GPU there is nothing to lease.
				list, err := admin.ListGpus(ctx, &gpreemptv1.ListGpusRequest{})
				if err != nil {
					return err
				}
				names := gpuNames(list.GetGpus())
				if len(names) == 0 {
					return &failure{code: ExitNoGPU, message: "cannot create a lease: this host has no GPU", next: "gpctl doctor"}
				}
				for _, s := range selectors {
					g, err := names.find(s)
					if err != nil {
						return err
					}
					announce.Gpus = append(announce.Gpus, &gpreemptv1.GpuSelector{By: &gpreemptv1.GpuSelector_GpuId{GpuId: g.GetGpuId()}})
				}
				resp, err := admin.CreateLease(ctx, &gpreemptv1.CreateLeaseRequest{Announce: announce})
				if err != nil {
					return err
				}
				return a.show(resp, func(p *printer) { printAnnounced(p, resp.GetAnnounced(), names) })
			})
		},
	}
	cmd.Flags().StringArrayVar(&selectors, "gpu", nil, selectorHelp+"; may be repeated (default: all GPUs)")
	completeBy(cmd, "gpu", a.completeGPUs)
	cmd.Flags().Uint32Var(&rank, "priority", 0, "priority 0 to 15 (default: 11)")
	cmd.Flags().DurationVar(&ttl, "ttl", 0, "time to live (default 1s)")
	cmd.Flags().StringVar(&label, "label", "", "name of the work, for display")
	return cmd
}

func printAnnounced(p *printer, l *gpreemptv1.NotifyOnlineResponse, names gpuNames) {
	p.linef("lease %s on GPU %s for %s", l.GetLeaseId(), names.full(l.GetGpuIds()), took(l.GetTtl()))
	if l.GetQuiesced() {
		p.linef("  GPUs quiet after %s: %s suspended", took(l.GetTiming().GetTotal()), count(l.GetSuspendedTargets(), "target"))
	} else {
		cannot := ""
		if n := l.GetCannotSuspendTargets(); n > 0 {
			cannot = fmt.Sprintf(" (%s that cannot be suspended)", count(n, "target"))
		}
		p.line("  ", cell{"GPUs not quiet: ", styleNote}, quiesce(l.GetReason())+cannot)
	}
	p.linef("  undo: gpctl lease release %s", l.GetLeaseId())
}

func (a *app) leaseRelease() *cobra.Command {
	return &cobra.Command{
		Use:   "release ID",
		Short: "End a lease, whichever process owns it",
		Args:  operands("ID"),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
			if len(args) > 0 {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			return a.offer(cmd, func(ctx context.Context, admin adminClient) ([]cobra.Completion, error) {
				resp, err := admin.ListLeases(ctx, &gpreemptv1.ListLeasesRequest{})
				var ids []cobra.Completion
				for _, l := range resp.GetLeases() {
					about := fmt.Sprintf("%s, priority %s, %s", api.EnumName(l.GetState()), priority(l.GetPriority()), leaseOwner(l))
					if l.GetLabel() != "" {
						about = l.GetLabel() + ", " + about
					}
					ids = append(ids, cobra.CompletionWithDesc(l.GetLeaseId(), printable(about)))
				}
				return ids, err
			})
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			req := &gpreemptv1.ReleaseLeaseRequest{LeaseId: args[0]}
			return ask(cmd, a, adminClient.ReleaseLease, req, func(p *printer, resp *gpreemptv1.ReleaseLeaseResponse) {
				p.linef("lease %s ended: %s", args[0], api.EnumName(resp.GetEnd()))
			})
		},
	}
}
