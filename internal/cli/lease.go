package cli

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
)

func (a *app) leaseCommand() *cobra.Command {
	return noun("lease", "The claims of online work on GPUs", a.leaseList(), a.leaseCreate(), a.leaseRelease())
}

func (a *app) leaseList() *cobra.Command {
	return &cobra.Command{
		Use:   "list",
		Short: "List the live leases, oldest first",
		Args:  operands(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.call(cmd, func(ctx context.Context, admin gpreemptv1.AdminServiceClient) error {
				resp, err := admin.ListLeases(ctx, &gpreemptv1.ListLeasesRequest{})
				if err != nil {
					return err
				}
				return a.show(resp, func(p *printer) {
					if len(resp.GetLeases()) == 0 {
						p.linef("There are no live leases.")
						return
					}
					a.printLeases(p, resp.GetLeases())
				})
			})
		},
	}
}

func (a *app) printLeases(p *printer, list []*gpreemptv1.Lease) {
	t := p.table("", columns{
		"LEASE", "LABEL", "STATE", ">PRIO", "GPUS", "HOLDER", "+>UID", ">AGE", ">EXPIRES IN", "+TARGETS",
	})
	for _, l := range list {
		holder, uid := "admin", fmt.Sprint(l.GetClientUid())
		switch {
		case l.GetClientCertificate() != "":
			holder, uid = l.GetClientCertificate(), "-"
		case l.GetClientPid() > 0:
			holder = fmt.Sprintf("pid %d", l.GetClientPid())
		}
		where := api.EnumName(l.GetState())
		if end := api.EnumName(l.GetEnd()); end != "" {
			where += ": " + end
		}
		t.row(text(l.GetLeaseId()), text(or(l.GetLabel(), "-")), text(where), text(priority(l.GetPriority())), text(gpus(l.GetGpuIds(), p.wide)),
			text(holder), text(uid), text(a.age(l.GetCreatedAt())), text(took(l.GetExpiresIn())),
			text(or(strings.Join(l.GetTargetIds(), ","), "-")))
	}
	t.flush()
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
		Short: "Claim GPUs by hand, as an inference server does by announcing work",
		Long: `Makes a lease that lives until --ttl or ` + "`gpctl lease release`" + `; offline work of
lower priority on its GPUs is suspended meanwhile.`,
		Example: "  gpctl lease create --gpu node:2 --gpu 34535 --ttl 30s --label maintenance",
		Args:    operands(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			announce := &gpreemptv1.NotifyOnlineRequest{Label: label}
			for _, s := range selectors {
				sel, err := parseGPU(s)
				if err != nil {
					return usage(cmd, "%v", err)
				}
				announce.Gpus = append(announce.Gpus, sel)
			}
			if cmd.Flags().Changed("priority") {
				announce.Priority = &rank
			}
			if cmd.Flags().Changed("ttl") {
				announce.Ttl = durationpb.New(ttl)
			}
			return a.call(cmd, func(ctx context.Context, admin gpreemptv1.AdminServiceClient) error {
				resp, err := admin.CreateLease(ctx, &gpreemptv1.CreateLeaseRequest{Announce: announce})
				if err != nil {
					return err
				}
				return a.show(resp, func(p *printer) { printAnnounced(p, resp.GetAnnounced()) })
			})
		},
	}
	cmd.Flags().StringArrayVar(&selectors, "gpu", nil, selectorHelp+"; may be repeated (default: all GPUs)")
	cmd.Flags().Uint32Var(&rank, "priority", 0, "priority 0 to 15 (default: 11)")
	cmd.Flags().DurationVar(&ttl, "ttl", 0, "time to live (default: the policy's default_ttl)")
	cmd.Flags().StringVar(&label, "label", "", "name of the work, for people")
	return cmd
}

func printAnnounced(p *printer, l *gpreemptv1.NotifyOnlineResponse) {
	p.linef("lease %s holds GPU %s for %s", l.GetLeaseId(), gpus(l.GetGpuIds(), true), took(l.GetTtl()))
	if l.GetQuiesced() {
		p.linef("  quiet after %s: %s suspended", took(l.GetTiming().GetTotal()), count(l.GetSuspendedTargets(), "target"))
	} else {
		p.line(text("  "), cell{"not quiet: ", styleNote}, text(quiesce(l.GetReason())))
	}
	p.linef("  undo: gpctl lease release %s", l.GetLeaseId())
}

func (a *app) leaseRelease() *cobra.Command {
	return &cobra.Command{
		Use:   "release ID",
		Short: "End a lease, whoever holds it",
		Args:  operands("ID"),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
			if len(args) > 0 {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			return a.offer(cmd, func(ctx context.Context, admin gpreemptv1.AdminServiceClient) ([]cobra.Completion, error) {
				resp, err := admin.ListLeases(ctx, &gpreemptv1.ListLeasesRequest{})
				var ids []cobra.Completion
				for _, l := range resp.GetLeases() {
					ids = append(ids, cobra.CompletionWithDesc(l.GetLeaseId(), printable(l.GetLabel())))
				}
				return ids, err
			})
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.call(cmd, func(ctx context.Context, admin gpreemptv1.AdminServiceClient) error {
				resp, err := admin.ReleaseLease(ctx, &gpreemptv1.ReleaseLeaseRequest{LeaseId: args[0]})
				if err != nil {
					return err
				}
				return a.show(resp, func(p *printer) { p.linef("lease %s has ended: %s", args[0], api.EnumName(resp.GetEnd())) })
			})
		},
	}
}
