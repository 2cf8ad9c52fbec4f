package cli

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/term"
)

func leaseCommand(a *term.App) *cobra.Command {
	return term.Noun("lease", "The leases of online work on GPUs", leaseList(a), leaseCreate(a), leaseRelease(a))
}

func leaseList(a *term.App) *cobra.Command {
	return showing(a, &cobra.Command{
		Use:   "list",
		Short: "List the live leases, oldest first",
		Args:  term.Operands(),
	}, func(ctx context.Context, _ *cobra.Command, admin term.AdminClient) (proto.Message, func(*term.Printer), error) {
		resp, err := admin.ListLeases(ctx, &gpreemptv1.ListLeasesRequest{})
		names := a.NameGPUs(ctx, admin)
		return resp, func(p *term.Printer) {
			if len(resp.GetLeases()) == 0 {
				p.Linef("No live leases.")
				return
			}
			printLeases(a, p, resp.GetLeases(), names)
		}, err
	})
}

func printLeases(a *term.App, p *term.Printer, list []*gpreemptv1.Lease, names term.GPUNames) {
	t := p.Table("", term.Columns{
		"LEASE", "-LABEL", "STATE", "->PRIO", "-HIP", "-GPUS", "+PRODUCT", "OWNER", "+>UID", "->AGE", ">EXPIRES IN",
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
		t.Row(l.GetLeaseId(), term.Or(l.GetLabel(), "-"), where, term.Priority(l.GetPriority()), names.HIP(l.GetGpuIds()...), term.GPUs(l.GetGpuIds(), p.Wide), names.Product(l.GetGpuIds()...),
			leaseOwner(l), uid, a.Age(l.GetCreatedAt()), term.Took(l.GetExpiresIn()))
	}
	t.Flush()
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

func leaseCreate(a *term.App) *cobra.Command {
	var (
		selectors []string
		rank      uint32
		ttl       time.Duration
		label     string
	)
	cmd := &cobra.Command{
		Use:   "create",
		Short: "Create a lease by hand, as an inference server does by announcing work",
		Args:  term.Operands(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			announce := &gpreemptv1.NotifyOnlineRequest{Label: label}
			if cmd.Flags().Changed("priority") {
				announce.Priority = &rank
			}
			if cmd.Flags().Changed("ttl") {
				announce.Ttl = durationpb.New(ttl)
			}
			return a.Call(cmd, func(ctx context.Context, admin term.AdminClient) error {
				// On a host without a GPU there is nothing to lease.
				list, err := admin.ListGpus(ctx, &gpreemptv1.ListGpusRequest{})
				if err != nil {
					return err
				}
				names := term.GPUNames(list.GetGpus())
				if len(names) == 0 {
					return &term.Failure{Code: term.ExitNoGPU, Message: "cannot create a lease: this host has no GPU", Next: "gpctl doctor"}
				}
				if slices.Equal(selectors, []string{"all"}) {
					selectors = nil
				}
				for _, s := range selectors {
					g, err := names.Find(s)
					if err != nil {
						return err
					}
					announce.Gpus = append(announce.Gpus, &gpreemptv1.GpuSelector{By: &gpreemptv1.GpuSelector_GpuId{GpuId: g.GetGpuId()}})
				}
				resp, err := admin.CreateLease(ctx, &gpreemptv1.CreateLeaseRequest{Announce: announce})
				if err != nil {
					return err
				}
				return a.Show(resp, func(p *term.Printer) { printAnnounced(p, resp.GetAnnounced(), names) })
			})
		},
	}
	cmd.Flags().StringArrayVar(&selectors, "gpu", nil, term.SelectorHelp+"; may be repeated (default: all GPUs)")
	term.CompleteBy(cmd, "gpu", a.CompleteGPUs)
	cmd.Flags().Uint32Var(&rank, "priority", 0, "priority 0 to 15 (default: 11)")
	cmd.Flags().DurationVar(&ttl, "ttl", 0, "time to live (default 1s)")
	cmd.Flags().StringVar(&label, "label", "", "name of the work, for display")
	return cmd
}

func printAnnounced(p *term.Printer, l *gpreemptv1.NotifyOnlineResponse, names term.GPUNames) {
	p.Linef("lease %s on GPU %s for %s", l.GetLeaseId(), names.Full(l.GetGpuIds()), term.Took(l.GetTtl()))
	if l.GetQuiesced() {
		p.Linef("  GPUs quiet after %s: %s suspended", term.Took(l.GetTiming().GetTotal()), term.Count(l.GetSuspendedTargets(), "target"))
	} else {
		cannot := ""
		if n := l.GetCannotSuspendTargets(); n > 0 {
			cannot = fmt.Sprintf(" (%s that cannot be suspended)", term.Count(n, "target"))
		}
		p.Line("  ", term.Cell{Text: "GPUs not quiet: ", Style: term.StyleNote}, term.Quiesce(l.GetReason())+cannot)
	}
	p.Linef("  undo: gpctl lease release %s", l.GetLeaseId())
}

func leaseRelease(a *term.App) *cobra.Command {
	return &cobra.Command{
		Use:   "release ID",
		Short: "End a lease, whichever process owns it",
		Args:  term.Operands("ID"),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
			if len(args) > 0 {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			return a.Offer(cmd, func(ctx context.Context, admin term.AdminClient) ([]cobra.Completion, error) {
				resp, err := admin.ListLeases(ctx, &gpreemptv1.ListLeasesRequest{})
				var ids []cobra.Completion
				for _, l := range resp.GetLeases() {
					about := fmt.Sprintf("%s, priority %s, %s", api.EnumName(l.GetState()), term.Priority(l.GetPriority()), leaseOwner(l))
					if l.GetLabel() != "" {
						about = l.GetLabel() + ", " + about
					}
					ids = append(ids, cobra.CompletionWithDesc(l.GetLeaseId(), term.Printable(about)))
				}
				return ids, err
			})
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			req := &gpreemptv1.ReleaseLeaseRequest{LeaseId: args[0]}
			return term.Ask(cmd, a, term.AdminClient.ReleaseLease, req, func(p *term.Printer, resp *gpreemptv1.ReleaseLeaseResponse) {
				p.Linef("lease %s ended: %s", args[0], api.EnumName(resp.GetEnd()))
			})
		},
	}
}
