package targets

import (
	"io/fs"
	"slices"
	"strings"
	"sync"

	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/safety"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Hazards checks the GPUs of a host by the hazard table. Its methods are safe for
// concurrent use.
type Hazards struct {
	mu    sync.Mutex // guards all below
	table *safety.Table
	host  safety.Host
	gpus  []safety.GPU
}

// NewHazards reads the facts of the host whose root is fsys; rows are those of the site.
// The warnings name the facts that are unknown.
func NewHazards(fsys fs.FS, gpus []gpreempt.GPU, rows []safety.Row) (h *Hazards, warnings []string) {
	host, facts, warnings := safety.Read(fsys, gpus)
	return &Hazards{table: safety.Default().With(rows), host: host, gpus: facts}, warnings
}

// SetRows replaces the rows of the site.
func (h *Hazards) SetRows(rows []safety.Row) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.table = safety.Default().With(rows)
}

// Results returns the result of a mechanism for each GPU.
func (h *Hazards) Results(name string) map[gpreempt.GPUID]safety.Result {
	h.mu.Lock()
	defer h.mu.Unlock()
	results := make(map[gpreempt.GPUID]safety.Result, len(h.gpus))
	for _, g := range h.gpus {
		results[g.ID] = h.table.Check(h.host, g, name)
	}
	return results
}

// CrashesWithoutVM reports whether the table denies SUSPEND_QUEUES to processes that have no
// VM on the GPU and a queue on an earlier one. It does for a GPU that is not known.
func (h *Hazards) CrashesWithoutVM(gpu gpreempt.GPUID) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	i := slices.IndexFunc(h.gpus, func(g safety.GPU) bool { return g.ID == gpu })
	return i < 0 || h.table.CheckProcess(h.host, h.gpus[i], safety.GPUWithoutVM, mechanism.DBGTrap).Action == safety.Deny
}

// Assess returns whether a mechanism may be used on a process of a host with these GPUs.
// A process without queues may get them on any GPU.
func (h *Hazards) Assess(name string, proc discovery.Proc, all []gpreempt.GPU) Assessment {
	gpus := GPUsWithQueues(all, proc)
	h.mu.Lock()
	defer h.mu.Unlock()
	a := Assessment{Evidence: mechanism.Evidence{Check: "hazard table", Found: "no known hazard", OK: true}}
	var limits, notes []string
	for _, g := range h.gpus {
		if len(gpus) > 0 && !slices.ContainsFunc(gpus, func(gpu gpreempt.GPU) bool { return gpu.ID == g.ID }) {
			continue
		}
		result := h.table.Check(h.host, g, name)
		for _, row := range result.Notes {
			if !slices.Contains(notes, row.ID) {
				notes = append(notes, row.ID)
			}
		}
		switch result.Action {
		case safety.Deny:
			a.Evidence = mechanism.Evidence{Check: "hazard table", Found: result.Reason, Remedy: result.Row.Remedy}
			return a
		case safety.Limit:
			a.Limited = append(a.Limited, g.ID)
			if !slices.Contains(limits, result.Reason) {
				limits = append(limits, result.Reason)
			}
		case safety.Allow, safety.Note:
		}
	}
	if len(limits) > 0 {
		a.Evidence.Found = "one process a GPU: " + strings.Join(limits, "; ")
	}
	if len(notes) > 0 {
		a.Evidence.Found += " (noted: " + strings.Join(notes, ", ") + ")"
	}
	return a
}
