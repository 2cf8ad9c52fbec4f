package cli

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func (a *app) gpuCommand() *cobra.Command {
	list := a.watchable(&cobra.Command{
		Use:   "list",
		Short: "List the GPU nodes, their load and their breakers",
		Args:  operands(),
	}, onEvents, func(ctx context.Context, _ *cobra.Command, admin adminClient) (proto.Message, func(*printer), error) {
		resp, err := admin.ListGpus(ctx, &gpreemptv1.ListGpusRequest{})
		return resp, func(p *printer) { printGPUs(p, resp.GetGpus()) }, err
	})
	return noun("gpu", "The GPU nodes of this host", list)
}

// completeGPUs completes GPUs by their HIP indices.
func (a *app) completeGPUs(cmd *cobra.Command, _ []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	return a.offer(cmd, func(ctx context.Context, admin adminClient) ([]cobra.Completion, error) {
		resp, err := admin.ListGpus(ctx, &gpreemptv1.ListGpusRequest{})
		var all []cobra.Completion
		for i, g := range resp.GetGpus() {
			about := fmt.Sprintf("%s, GPU %d, node %d, %s", printable(g.GetName()), g.GetGpuId(), g.GetNode(), printable(g.GetBdf()))
			all = append(all, cobra.CompletionWithDesc(strconv.Itoa(i), about))
		}
		return all, err
	})
}

// gpuNames are the GPUs of the daemon's host, by topology node. HIP numbers them in this order
// in a process whose environment hides none.
type gpuNames []*gpreemptv1.Gpu

// nameGPUs returns the names for people; none for programs, and when the daemon does not list
// them: names are an addition.
func (a *app) nameGPUs(ctx context.Context, admin adminClient) gpuNames {
	if a.forPrograms() {
		return nil
	}
	resp, err := admin.ListGpus(ctx, &gpreemptv1.ListGpusRequest{})
	if err != nil {
		return nil
	}
	return resp.GetGpus()
}

// index returns the HIP index of a GPU, -1 when it is unknown.
func (n gpuNames) index(id uint32) int {
	return slices.IndexFunc(n, func(g *gpreemptv1.Gpu) bool { return g.GetGpuId() == id })
}

// hip formats the HIP indices of GPUs.
func (n gpuNames) hip(ids ...uint32) string {
	var indices []int
	for _, id := range ids {
		if i := n.index(id); i >= 0 {
			indices = append(indices, i)
		}
	}
	slices.Sort(indices)
	return numbers(indices)
}

// product formats the names of GPUs.
func (n gpuNames) product(ids ...uint32) string {
	var products []string
	for _, id := range ids {
		if i := n.index(id); i >= 0 && !slices.Contains(products, n[i].GetName()) {
			products = append(products, n[i].GetName())
		}
	}
	return or(strings.Join(products, ","), "-")
}

// full formats GPUs with their indices and names.
func (n gpuNames) full(ids []uint32) string {
	text := gpus(ids, true)
	if hip := n.hip(ids...); hip != "-" {
		text += fmt.Sprintf(" (HIP %s, %s)", hip, n.product(ids...))
	}
	return text
}

func printGPUs(p *printer, list []*gpreemptv1.Gpu) {
	if len(list) == 0 {
		p.linef("This host has no GPU nodes.")
		return
	}
	t := p.table("", columns{
		">HIP", ">NODE", ">GPU", "NAME", "GFX", "BDF", "RENDER", "+>XCC", "+>CU", "+SCHEDULER", ">QUEUES", "+>MAPPED", "+>OFFLINE", "+>FREE", ">LEASES", ">SUSPENDED",
		">EVICTIONS", "BREAKER",
	})
	for i, g := range list {
		queues := cell{text: strconv.FormatUint(uint64(g.GetQueueCount()), 10)}
		if slots := g.GetQueueSlots(); slots > 0 {
			queues.text += fmt.Sprintf("/%d", slots)
			if g.GetQueueCount() > slots {
				queues.style = styleNote // the firmware time-slices them
			}
		}
		free := cell{text: "-"}
		if g.FreeSlotCount != nil {
			free.text = strconv.FormatUint(uint64(g.GetFreeSlotCount()), 10)
			if g.GetMappedQueueCount() > g.GetQueueSlots() {
				free.style = styleNote
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
		t.row(i, g.GetNode(), g.GetGpuId(), g.GetName(), gfx(g.GetGfxTargetVersion()), or(g.GetBdf(), "-"),
			render, g.GetXccCount(), g.GetCuCount(), scheduler, queues, g.GetMappedQueueCount(), g.GetOfflineMappedQueueCount(), free, g.GetLeaseCount(),
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

const selectorHelp = "a HIP index, gpu_id, product name, PCI address, node:N or renderDN, as gpctl gpu list shows them"

// matches reports whether s is a name of a GPU with a HIP index.
func (n gpuNames) matches(i int, s string) bool {
	g := n[i]
	number := func(text string, of uint32) bool {
		v, err := strconv.ParseUint(text, 10, 32)
		return err == nil && uint32(v) == of
	}
	address := strings.ToLower(s)
	if strings.Count(s, ":") == 1 {
		address = "0000:" + address
	}
	index, isIndex := strings.CutPrefix(s, "hip:")
	node, isNode := strings.CutPrefix(s, "node:")
	minor, isMinor := strings.CutPrefix(strings.TrimPrefix(s, "/dev/dri/"), "renderD")
	switch {
	case isIndex:
		return number(index, uint32(i))
	case isNode:
		return number(node, g.GetNode())
	case isMinor:
		return number(minor, g.GetRenderMinor()) && g.GetRenderMinor() > 0
	case bdf.MatchString(s):
		return address == g.GetBdf()
	case strings.Trim(s, "0123456789") == "":
		return number(s, uint32(i)) || number(s, g.GetGpuId())
	}
	return strings.EqualFold(s, g.GetName())
}

// find returns the only GPU that s names.
func (n gpuNames) find(s string) (*gpreemptv1.Gpu, error) {
	var found []int
	for i := range n {
		if n.matches(i, s) {
			found = append(found, i)
		}
	}
	describe := func(list []int) string {
		var all []string
		for _, i := range list {
			all = append(all, fmt.Sprintf("hip:%d (GPU %d, %s, %s)", i, n[i].GetGpuId(), n[i].GetName(), or(n[i].GetBdf(), "-")))
		}
		return strings.Join(all, ", ")
	}
	switch len(found) {
	case 1:
		return n[found[0]], nil
	case 0:
		return nil, &failure{code: ExitNotFound, message: fmt.Sprintf("GPU %q not found on this host", s), next: "gpctl gpu list; a GPU is " + selectorHelp}
	}
	return nil, &failure{code: ExitRefused, message: fmt.Sprintf("%q names %d GPUs: %s", s, len(found), describe(found)), next: "use hip:N"}
}

// findGPU returns the gpu_id of the GPU that s names, 0 for "".
func findGPU(ctx context.Context, admin adminClient, s string) (uint32, error) {
	if s == "" {
		return 0, nil
	}
	resp, err := admin.ListGpus(ctx, &gpreemptv1.ListGpusRequest{})
	if err != nil {
		return 0, err
	}
	g, err := gpuNames(resp.GetGpus()).find(s)
	return g.GetGpuId(), err
}
