package targets

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/gpreempt/gpreempt/internal/classify"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// onlyNamed prevents stop, which is used only where an admin or a rule chooses it. It is not
// reported.
var onlyNamed = mechanism.Evidence{Check: "mechanism", Found: "it is used only where an admin chooses it"}

// Obstacle returns what prevents the use of a mechanism on a process, by what it was
// classified as and by its queues; nil if nothing does.
func Obstacle(name string, proc discovery.Proc, d classify.Decision) *mechanism.Evidence {
	k, _ := mechanism.KindOf(name)
	switch {
	case name == mechanism.Stop && !d.OnResist.Stop && d.Mechanism != name, name == mechanism.Freezer && d.OnResist.Stop && d.Mechanism == "":
		return &onlyNamed // stop is for these what freezer is for others
	case k.Driver != "" && k.Driver != cmp.Or(proc.Driver, "kfd"):
		return otherDriver(name, proc.Driver)
	case d.Mechanism != "" && d.Mechanism != name:
		return &mechanism.Evidence{Check: "mechanism", Found: "an admin chose " + d.Mechanism, Remedy: "gpctl target classify without --mechanism leaves the choice to the daemon"}
	case k.Driver == "kfd" && len(proc.DRM) > 0:
		return drmQueues(name, proc)
	case d.NeverDebug && k.Debugs:
		return &mechanism.Evidence{
			Check: "never_debug", Found: d.By + " forbids debuggers, which " + name + " is", Reason: gpreempt.ReasonNeverDebug,
			Remedy: "add freezer to the config key mechanisms, or remove never_debug from the rule",
		}
	case k.LeavesContexts && slices.ContainsFunc(proc.Queues, func(q gpreempt.Queue) bool { return q.ID >= discovery.ContextQueueID(0, 0) }):
		// DBG_TRAP finds the first KFD context of a process (kfd_ioctl_set_debug_trap, Linux 7.2).
		return &mechanism.Evidence{
			Check: "KFD contexts", Found: "the process has queues in a secondary one, which " + name + " cannot suspend",
			Remedy: "enable criu or freezer for the process, in the config key mechanisms",
		}
	}
	return nil
}

// otherDriver prevents mechanisms on GPUs of another driver than theirs.
func otherDriver(name, driver string) *mechanism.Evidence {
	if driver == "" {
		driver = "KFD"
	}
	return &mechanism.Evidence{Check: "driver", Found: "the GPUs of the process are those of " + driver + ", which " + name + " does not use"}
}

// drmQueues prevents mechanisms that suspend the queues of KFD and leave others running.
func drmQueues(name string, proc discovery.Proc) *mechanism.Evidence {
	e := &mechanism.Evidence{
		Check: "DRM queues", Reason: gpreempt.ReasonDRMQueues,
		Found:  fmt.Sprintf("it has user queues of DRM on GPU %v, which KFD does not know and %s cannot suspend", proc.DRM, name),
		Remedy: "start it without HSA_ENABLE_DRM_DEBUG, or load amdgpu with user_queue=0, or add freezer to the config key mechanisms",
	}
	if proc.DRMAssumed {
		e.Found = "HSA_ENABLE_DRM_DEBUG is in its environment, and the kernel does not show whether it has user queues of DRM, which " + name + " cannot suspend"
	}
	return e
}
