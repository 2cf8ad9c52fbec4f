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
	"github.com/gpreempt/gpreempt/internal/mechanism/ladder"
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

// judge reports whether a mechanism may be used on a process of a machine with these
// GPUs. One without queues may get them on any GPU.
func (h *hazards) judge(name string, proc discovery.Proc, all []gpreempt.GPU) ladder.Verdict {
	if outOfReach(name, proc) {
		return ladder.Verdict{Evidence: secondaryContexts}
	}
	gpus := gpusWithQueues(all, proc)
	h.mu.Lock()
	defer h.mu.Unlock()
	v := ladder.Verdict{Evidence: mechanism.Evidence{Check: "hazard table", Found: "no hazard is known", OK: true}}
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

// judge says what stands against a mechanism on a target that the mechanism does not
// see. A simulated GPU has no hazards.
func (d *daemon) judge(name string, target gpreempt.ProcessKey) ladder.Verdict {
	if p := d.backend.pauses; p != nil && p.Orphaned(target) {
		return ladder.Verdict{Evidence: mechanism.Evidence{Check: "journal", Found: "an earlier daemon's pause of it is not undone yet"}}
	}
	h := d.hazards.Load()
	if h == nil {
		simulated := d.backend.simulated != ""
		return ladder.Verdict{Evidence: mechanism.Evidence{Check: "hazard table", Found: "it knows no GPU of this machine", OK: simulated}}
	}
	proc, _ := d.inventory.Process(target)
	return h.judge(name, proc, d.inventory.GPUs())
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

// letGoOutOfReach ends the hold on processes that got queues out of their mechanism's
// reach since: to say that all of them are suspended would be wrong.
func (d *daemon) letGoOutOfReach(changed []discovery.Proc) {
	for _, proc := range changed {
		choice, _ := d.ladder.Choice(proc.Key)
		if outOfReach(choice.Mechanism, proc) {
			d.ladder.Lost(choice.Mechanism, proc.Key, errors.New(secondaryContexts.Found))
		}
	}
}
