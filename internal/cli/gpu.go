package cli

import (
	"context"
	"fmt"
	"strconv"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/term"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func gpuCommand(a *term.App) *cobra.Command {
	list := showing(a, &cobra.Command{
		Use:   "list",
		Short: "List the GPU nodes, their load and their breakers",
		Args:  term.Operands(),
	}, func(ctx context.Context, _ *cobra.Command, admin term.AdminClient) (proto.Message, func(*term.Printer), error) {
		resp, err := admin.ListGpus(ctx, &gpreemptv1.ListGpusRequest{})
		return resp, func(p *term.Printer) { printGPUs(p, resp.GetGpus()) }, err
	})
	return term.Noun("gpu", "The GPU nodes of this host", list)
}

func printGPUs(p *term.Printer, list []*gpreemptv1.Gpu) {
	if len(list) == 0 {
		p.Linef("This host has no GPU nodes.")
		return
	}
	t := p.Table("", term.Columns{
		">HIP", ">NODE", ">GPU", "NAME", "GFX", "BDF", "RENDER", "+>XCC", "+>CU", "+SCHEDULER", ">QUEUES", "+>MAPPED", "+>OFFLINE", "+>FREE", ">LEASES", ">SUSPENDED",
		">EVICTIONS", "BREAKER",
	})
	for i, g := range list {
		queues := term.Cell{Text: strconv.FormatUint(uint64(g.GetQueueCount()), 10)}
		if slots := g.GetQueueSlots(); slots > 0 {
			queues.Text += fmt.Sprintf("/%d", slots)
			if g.GetQueueCount() > slots {
				queues.Style = term.StyleNote // the firmware time-slices them
			}
		}
		free := term.Cell{Text: "-"}
		if g.FreeSlotCount != nil {
			free.Text = strconv.FormatUint(uint64(g.GetFreeSlotCount()), 10)
			if g.GetMappedQueueCount() > g.GetQueueSlots() {
				free.Style = term.StyleNote
			}
		}
		breaker := term.Cell{Text: "closed"}
		if g.GetBreakerOpen() {
			breaker = term.Cell{Text: "open for " + term.Took(g.GetBreakerClosesIn()), Style: term.StyleBad}
		}
		evictions := term.Cell{Text: "-"}
		if g.MemoryEvictions != nil {
			evictions.Text = strconv.FormatUint(g.GetMemoryEvictions(), 10)
			if g.GetMemoryEvictions() > 0 {
				evictions.Style = term.StyleNote
			}
		}
		scheduler := "HWS"
		if g.GetMes() {
			scheduler = "MES"
		}
		render := "-"
		if g.GetRenderMinor() > 0 {
			render = fmt.Sprintf("renderD%d", g.GetRenderMinor())
		}
		t.Row(i, g.GetNode(), g.GetGpuId(), g.GetName(), gfx(g.GetGfxTargetVersion()), term.Or(g.GetBdf(), "-"),
			render, g.GetXccCount(), g.GetCuCount(), scheduler, queues, g.GetMappedQueueCount(), g.GetOfflineMappedQueueCount(), free, g.GetLeaseCount(),
			g.GetSuspendedCount(), evictions, breaker)
	}
	t.Flush()
}

// gfx formats a gfx_target_version.
func gfx(v uint32) string {
	if v == 0 {
		return "-"
	}
	return gpreempt.GFXName(v)
}
