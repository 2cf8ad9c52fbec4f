package cli

import (
	"context"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func (a *app) gpuCommand() *cobra.Command {
	list := &cobra.Command{
		Use:   "list",
		Short: "List the GPU nodes, their load and their breakers",
		Args:  operands(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return ask(cmd, a, adminClient.ListGpus, &gpreemptv1.ListGpusRequest{}, func(p *printer, r *gpreemptv1.ListGpusResponse) { printGPUs(p, r.GetGpus()) })
		},
	}
	return noun("gpu", "The GPU nodes of this host", list)
}

// gpuNames completes gpu_ids.
func (a *app) gpuNames(cmd *cobra.Command, _ []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	return a.offer(cmd, func(ctx context.Context, admin adminClient) ([]cobra.Completion, error) {
		resp, err := admin.ListGpus(ctx, &gpreemptv1.ListGpusRequest{})
		var ids []cobra.Completion
		for _, g := range resp.GetGpus() {
			about := fmt.Sprintf("%s, node %d, %s", printable(g.GetName()), g.GetNode(), printable(g.GetBdf()))
			ids = append(ids, cobra.CompletionWithDesc(strconv.FormatUint(uint64(g.GetGpuId()), 10), about))
		}
		return ids, err
	})
}

func printGPUs(p *printer, list []*gpreemptv1.Gpu) {
	if len(list) == 0 {
		p.linef("This host has no GPU nodes.")
		return
	}
	t := p.table("", columns{
		">NODE", ">GPU", "NAME", "GFX", "BDF", "RENDER", "+>XCC", "+>CU", "+SCHEDULER", ">QUEUES", ">LEASES", ">SUSPENDED",
		">EVICTIONS", "BREAKER",
	})
	for _, g := range list {
		queues := cell{text: strconv.FormatUint(uint64(g.GetQueueCount()), 10)}
		if slots := g.GetQueueSlots(); slots > 0 {
			queues.text += fmt.Sprintf("/%d", slots)
			if g.GetQueueCount() > slots {
				queues.style = styleNote // the firmware time-slices them
			}
		}
		breaker := cell{text: "closed"}
		if g.GetBreakerOpen() {
			breaker = cell{"open for " + took(g.GetBreakerClosesIn()), styleBad}
		}
		evictions := cell{text: "-"}
		if g.MemoryEvictions != nil {
			evictions.text = strconv.FormatUint(g.GetMemoryEvictions(), 10)
			if g.GetMemoryEvictions() > 0 {
				evictions.style = styleNote
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
		t.row(g.GetNode(), g.GetGpuId(), g.GetName(), gfx(g.GetGfxTargetVersion()), or(g.GetBdf(), "-"),
			render, g.GetXccCount(), g.GetCuCount(), scheduler, queues, g.GetLeaseCount(),
			g.GetSuspendedCount(), evictions, breaker)
	}
	t.flush()
}

// gfx formats a gfx_target_version.
func gfx(v uint32) string {
	if v == 0 {
		return "-"
	}
	return gpreempt.GFXName(v)
}

var bdf = regexp.MustCompile(`^([0-9a-fA-F]{1,8}:)?[0-9a-fA-F]{1,2}:[0-9a-fA-F]{1,2}\.[0-7]$`)

const selectorHelp = "a gpu_id, node:N, a PCI address or renderDN, as gpctl gpu list shows them"

// parseGPU parses a GPU selector.
func parseGPU(s string) (*gpreemptv1.GpuSelector, error) {
	number := func(text string) (uint32, bool) {
		n, err := strconv.ParseUint(text, 10, 32)
		return uint32(n), err == nil
	}
	if n, ok := number(s); ok && n > 0 {
		return &gpreemptv1.GpuSelector{By: &gpreemptv1.GpuSelector_GpuId{GpuId: n}}, nil
	}
	if rest, found := strings.CutPrefix(s, "node:"); found {
		if n, ok := number(rest); ok {
			return &gpreemptv1.GpuSelector{By: &gpreemptv1.GpuSelector_Node{Node: n}}, nil
		}
	}
	if rest, found := strings.CutPrefix(strings.TrimPrefix(s, "/dev/dri/"), "renderD"); found {
		if n, ok := number(rest); ok {
			return &gpreemptv1.GpuSelector{By: &gpreemptv1.GpuSelector_RenderMinor{RenderMinor: n}}, nil
		}
	}
	if bdf.MatchString(s) {
		return &gpreemptv1.GpuSelector{By: &gpreemptv1.GpuSelector_Bdf{Bdf: strings.ToLower(s)}}, nil
	}
	return nil, fmt.Errorf("invalid GPU %q; use %s", s, selectorHelp)
}

// findGPU returns the gpu_id of the GPU that s selects, 0 for "".
func findGPU(ctx context.Context, cmd *cobra.Command, admin adminClient, s string) (uint32, error) {
	if s == "" {
		return 0, nil
	}
	sel, err := parseGPU(s)
	if err != nil {
		return 0, usage(cmd, "%v", err)
	}
	resp, err := admin.ListGpus(ctx, &gpreemptv1.ListGpusRequest{})
	if err != nil {
		return 0, err
	}
	for _, g := range resp.GetGpus() {
		if api.Selects(sel, g.GetGpuId(), g.GetNode(), g.GetRenderMinor(), g.GetBdf()) {
			return g.GetGpuId(), nil
		}
	}
	return 0, &failure{code: ExitNotFound, message: fmt.Sprintf("GPU %s not found on this host", s), next: "gpctl gpu list"}
}
