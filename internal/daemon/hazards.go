package daemon

import (
	"io/fs"
	"slices"
	"strings"
	"sync"

	"github.com/gpreempt/gpreempt/internal/doctor"
	"github.com/gpreempt/gpreempt/internal/hazard"
	"github.com/gpreempt/gpreempt/internal/preempt"
	"github.com/gpreempt/gpreempt/internal/preempt/ladder"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// hazards is the table of known hazards, and the GPUs of this host to judge by it.
// Its methods are safe for concurrent use.
type hazards struct {
	mu    sync.Mutex // guards all below
	table *hazard.Table
	host  hazard.Host
	gpus  []hazard.GPU
}

// newHazards reads what the table asks for of the host whose root is fsys; the
// warnings say what is not known.
func newHazards(fsys fs.FS, gpus []gpreempt.GPU, override []hazard.Row) (*hazards, []string) {
	host, facts, warnings := hazard.Read(fsys, gpus)
	return &hazards{table: hazard.Default().With(override), host: host, gpus: facts}, warnings
}

// override takes over other rows of the site.
func (h *hazards) override(rows []hazard.Row) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.table = hazard.Default().With(rows)
}

// judge tells whether a mechanism may be used on a target with queues on these
// GPUs. One without queues may get them on any GPU.
func (h *hazards) judge(mechanism string, gpus []gpreempt.GPU) ladder.Verdict {
	h.mu.Lock()
	defer h.mu.Unlock()
	v := ladder.Verdict{Evidence: preempt.Evidence{Check: "hazard table", Found: "no hazard is known", OK: true}}
	var limits []string
	for _, g := range h.gpus {
		if len(gpus) > 0 && !slices.ContainsFunc(gpus, func(gpu gpreempt.GPU) bool { return gpu.ID == g.ID }) {
			continue
		}
		switch verdict := h.table.Judge(h.host, g, mechanism); verdict.Action {
		case hazard.Deny:
			v.Evidence = preempt.Evidence{Check: "hazard table", Found: verdict.Reason, Remedy: verdict.Row.Remedy}
			return v
		case hazard.Limit:
			v.Limited = append(v.Limited, g.ID)
			if !slices.Contains(limits, verdict.Reason) {
				limits = append(limits, verdict.Reason)
			}
		case hazard.Allow:
		}
	}
	if len(limits) > 0 {
		v.Evidence.Found = "one process a GPU: " + strings.Join(limits, "; ")
	}
	return v
}

// report gives what the table says of each GPU.
func (h *hazards) report([]gpreempt.GPU) []doctor.Hazard {
	h.mu.Lock()
	defer h.mu.Unlock()
	var all []doctor.Hazard
	for _, g := range h.gpus {
		verdict := h.table.Judge(h.host, g, "dbgtrap")
		all = append(all, doctor.Hazard{
			GPU: g.ID, Action: hazardActions[verdict.Action], Reason: verdict.Reason, Mechanisms: verdict.Row.Mechanisms,
		})
	}
	return all
}

var hazardActions = map[hazard.Action]doctor.HazardAction{
	hazard.Allow: doctor.HazardAllow, hazard.Limit: doctor.HazardLimit, hazard.Deny: doctor.HazardDeny,
}
