package server

import (
	"fmt"
	"slices"
	"strconv"
	"time"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/internal/api"
	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// defaultGPUs returns the GPUs of an announcement that names none: those on which
// the process has queues, or all. own reports whether they are the former.
func defaultGPUs(inv *inventory.Inventory, key gpreempt.ProcessKey) (gpus []gpreempt.GPUID, own bool) {
	proc, _ := inv.Process(key)
	if gpus = proc.GPUs(); len(gpus) > 0 {
		return gpus, true
	}
	for _, g := range inv.GPUs() {
		gpus = append(gpus, g.ID)
	}
	slices.Sort(gpus)
	return gpus, false
}

// allTakenFor is how long the warning about an announcement stays.
const allTakenFor = time.Minute

// allTaken is a process without queues whose announcement named no GPUs, so that its lease covers
// all: an API server that has its queues in other processes does that by accident.
type allTaken struct {
	pid  int32
	gpus int
	at   scheduler.Time
}

// Warnings returns the warnings about announcements.
func (s *Server) Warnings() []gpreempt.Warning {
	return s.allTaken.Load().warnings(s.cfg.Scheduler.Now())
}

// warnings returns the warning about t, nothing if t is nil.
func (t *allTaken) warnings(now scheduler.Time) []gpreempt.Warning {
	if t == nil || now-t.at >= allTakenFor {
		return nil
	}
	return []gpreempt.Warning{gpreempt.WarnAllGPUsTaken.Warn(fmt.Sprintf(
		"process %d has no GPU queues and named no GPUs in an announcement, so its lease covers all %d", t.pid, t.gpus))}
}

// selectGPUs returns the GPUs of selectors. The error is UNKNOWN_GPU for the first
// selector without a GPU.
func selectGPUs(all []gpreempt.GPU, selectors []*gpreemptv1.GpuSelector) ([]gpreempt.GPUID, error) {
	gpus := make([]gpreempt.GPUID, 0, min(len(selectors), len(all)))
	for i, sel := range selectors {
		found := false
		for _, g := range all {
			if !api.Selects(sel, uint32(g.ID), uint32(g.Node), uint32(g.RenderMinor), g.BDF) {
				continue
			}
			found = true
			if !slices.Contains(gpus, g.ID) { // a request has any number of selectors
				gpus = append(gpus, g.ID)
			}
		}
		if !found {
			return nil, unknownGPU(selectorName(i, sel))
		}
	}
	slices.Sort(gpus)
	return gpus, nil
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
	case *gpreemptv1.GpuSelector_All:
		return "of any name"
	default:
		return fmt.Sprintf("of selector %d, which is empty,", i+1)
	}
}
