package daemon

import (
	"errors"
	"io/fs"
	"slices"
	"strings"
	"sync"

	"github.com/gpreempt/gpreempt/internal/doctor"
	"github.com/gpreempt/gpreempt/internal/hazard"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/targets"
	"github.com/gpreempt/gpreempt/pkg/discovery"
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

// assess returns whether a mechanism may be used on a process of a machine with these
// GPUs. One without queues may get them on any GPU.
func (h *hazards) assess(name string, proc discovery.Proc, all []gpreempt.GPU) targets.Assessment {
	if outOfReach(name, proc) {
		return targets.Assessment{Evidence: secondaryContexts}
	}
	gpus := targets.GPUsWithQueues(all, proc)
	h.mu.Lock()
	defer h.mu.Unlock()
	v := targets.Assessment{Evidence: mechanism.Evidence{Check: "hazard table", Found: "no hazard is known", OK: true}}
	var limits []string
	for _, g := range h.gpus {
		if len(gpus) > 0 && !slices.ContainsFunc(gpus, func(gpu gpreempt.GPU) bool { return gpu.ID == g.ID }) {
			continue
		}
		switch verdict := h.table.Check(h.host, g, name); verdict.Action {
		case hazard.Deny:
			v.Evidence = mechanism.Evidence{Check: "hazard table", Found: verdict.Reason, Remedy: verdict.Row.Remedy}
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

// report returns what the table says of each GPU.
func (h *hazards) report([]gpreempt.GPU) []doctor.Hazard {
	h.mu.Lock()
	defer h.mu.Unlock()
	var all []doctor.Hazard
	for _, g := range h.gpus {
		verdict := h.table.Check(h.host, g, "dbgtrap")
		all = append(all, doctor.Hazard{
			GPU: g.ID, Action: hazardActions[verdict.Action], Reason: verdict.Reason, Mechanisms: verdict.Row.Mechanisms,
		})
	}
	return all
}

var hazardActions = map[hazard.Action]doctor.HazardAction{
	hazard.Allow: doctor.HazardAllow, hazard.Limit: doctor.HazardLimit, hazard.Deny: doctor.HazardDeny,
}

// assess returns what is known of using a mechanism on a target beyond what the mechanism
// sees. A simulated GPU has no hazards.
func (d *daemon) assess(name string, target gpreempt.ProcessKey) targets.Assessment {
	if p := d.backend.pauses; p != nil && p.Orphaned(target) {
		return targets.Assessment{Evidence: mechanism.Evidence{Check: "journal", Found: "an earlier daemon's pause of it is not undone yet"}}
	}
	h := d.hazards.Load()
	if h == nil {
		simulated := d.backend.simulated != ""
		return targets.Assessment{Evidence: mechanism.Evidence{Check: "hazard table", Found: "it knows no GPU of this machine", OK: simulated}}
	}
	proc, _ := d.inventory.Process(target)
	return h.assess(name, proc, d.inventory.GPUs())
}

// secondaryContexts stands against dbgtrap, which reaches the first KFD context of a
// process only (kfd_ioctl_set_debug_trap, Linux 7.2).
var secondaryContexts = mechanism.Evidence{
	Check: "KFD contexts", Found: "it has queues in a secondary one, which DBG_TRAP cannot suspend",
	Remedy: "let criu or freezer hold the process: the config key mechanisms names them",
}

func outOfReach(name string, proc discovery.Proc) bool {
	return name == "dbgtrap" && slices.ContainsFunc(proc.Queues, func(q gpreempt.Queue) bool { return q.ID >= discovery.ContextQueueID(0, 0) })
}

// invalidateOutOfReach ends the use of mechanisms on processes that have got queues which
// the mechanism cannot suspend.
func (d *daemon) invalidateOutOfReach(changed []discovery.Proc) {
	for _, proc := range changed {
		state, _ := d.sessions.State(proc.Key)
		if name := state.Choice.Mechanism; outOfReach(name, proc) {
			d.sessions.Invalidate(name, proc.Key, errors.New(secondaryContexts.Found))
		}
	}
}
