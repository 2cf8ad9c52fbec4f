package server

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// gpuSet is a set of GPUs, ascending, in the domain's type and in the API's.
type gpuSet struct {
	gpus []gpreempt.GPUID
	ids  []uint32
}

// newGPUSet sorts gpus and returns it without duplicates.
func newGPUSet(gpus []gpreempt.GPUID) gpuSet {
	slices.Sort(gpus)
	gpus = slices.Compact(gpus)
	return gpuSet{gpus, gpuIDs(gpus)}
}

// defaultGPUs returns the GPUs of an announcement that names none: those on which
// the process has queues, or all.
func defaultGPUs(inv Inventory, key gpreempt.ProcessKey) gpuSet {
	var gpus []gpreempt.GPUID
	if proc, ok := inv.Process(key); ok {
		gpus = gpusOf(proc)
	}
	if len(gpus) == 0 {
		for _, g := range inv.GPUs() {
			gpus = append(gpus, g.ID)
		}
	}
	return newGPUSet(gpus)
}

func gpusOf(proc discovery.Proc) []gpreempt.GPUID {
	var gpus []gpreempt.GPUID
	for _, q := range proc.Queues {
		if !slices.Contains(gpus, q.GPU) {
			gpus = append(gpus, q.GPU)
		}
	}
	return gpus
}

// selectGPUs returns the GPUs of selectors. The error is UNKNOWN_GPU for the first
// selector without a GPU.
func selectGPUs(all []gpreempt.GPU, selectors []*gpreemptv1.GpuSelector) (gpuSet, error) {
	gpus := make([]gpreempt.GPUID, 0, min(len(selectors), len(all)))
	for i, sel := range selectors {
		at := slices.IndexFunc(all, func(g gpreempt.GPU) bool { return selects(sel, g) })
		if at < 0 {
			return gpuSet{}, scheduler.UnknownGPU(selectorName(i, sel))
		}
		if !slices.Contains(gpus, all[at].ID) {
			gpus = append(gpus, all[at].ID)
		}
	}
	return newGPUSet(gpus), nil
}

func selects(sel *gpreemptv1.GpuSelector, g gpreempt.GPU) bool {
	switch by := sel.GetBy().(type) {
	case *gpreemptv1.GpuSelector_GpuId:
		return by.GpuId != 0 && gpreempt.GPUID(by.GpuId) == g.ID
	case *gpreemptv1.GpuSelector_Node:
		return int64(by.Node) == int64(g.Node)
	case *gpreemptv1.GpuSelector_Bdf:
		want, ok := parseBDF(by.Bdf)
		got, known := parseBDF(g.BDF)
		return ok && known && want == got
	case *gpreemptv1.GpuSelector_RenderMinor:
		return by.RenderMinor != 0 && int64(by.RenderMinor) == int64(g.RenderMinor)
	default:
		return false
	}
}

func selectorName(i int, sel *gpreemptv1.GpuSelector) string {
	switch by := sel.GetBy().(type) {
	case *gpreemptv1.GpuSelector_GpuId:
		return strconv.FormatUint(uint64(by.GpuId), 10)
	case *gpreemptv1.GpuSelector_Node:
		return fmt.Sprintf("node %d", by.Node)
	case *gpreemptv1.GpuSelector_Bdf:
		return fmt.Sprintf("%.32q", by.Bdf)
	case *gpreemptv1.GpuSelector_RenderMinor:
		return fmt.Sprintf("renderD%d", by.RenderMinor)
	default:
		return fmt.Sprintf("of selector %d, which is empty,", i+1)
	}
}

// bdf is a PCI address.
type bdf struct {
	domain                uint32
	bus, device, function uint8
}

// parseBDF parses domain:bus:device.function in hex, or bus:device.function in
// domain 0.
func parseBDF(s string) (bdf, bool) {
	rest, function, ok := cutLast(s, '.')
	if !ok {
		return bdf{}, false
	}
	rest, device, ok := cutLast(rest, ':')
	if !ok {
		return bdf{}, false
	}
	domain, bus, ok := cutLast(rest, ':')
	if !ok {
		domain, bus = "0", rest
	}
	d, ok1 := hex(domain, 8, 1<<32-1)
	b, ok2 := hex(bus, 2, 0xff)
	v, ok3 := hex(device, 2, 0x1f)
	f, ok4 := hex(function, 1, 7)
	return bdf{uint32(d), uint8(b), uint8(v), uint8(f)}, ok1 && ok2 && ok3 && ok4
}

func cutLast(s string, sep byte) (before, after string, found bool) {
	i := strings.LastIndexByte(s, sep)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+1:], true
}

// hex parses 1 to digits hex digits whose value is at most limit.
func hex(s string, digits int, limit uint64) (uint64, bool) {
	if len(s) > digits || strings.Trim(s, "0123456789abcdefABCDEF") != "" {
		return 0, false
	}
	v, err := strconv.ParseUint(s, 16, 64)
	return v, err == nil && v <= limit
}
