package safety

import (
	"fmt"
	"slices"
	"strings"

	gpreemptv1 "github.com/gpreempt/gpreempt/api/gen/gpreempt/v1"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func (h *host) debugFirmware() finding {
	lacking := h.perGPU(func(g gpu) string {
		if g.DebugFirmware {
			return ""
		}
		return "lacks it"
	})
	if lacking == "" {
		return ok("on every GPU")
	}
	return fail("install newer GPU firmware (linux-firmware, or AMD's amdgpu-dkms-firmware) and reboot; criu and freezer do not need it",
		"%s; if one GPU lacks it, ROCm's runtime prevents dbgtrap on the whole host", lacking)
}

// gfx950Debug is a minor interface version whose driver has per-VMID debugging on gfx950.
// That of 1.17 does not; the versions between are unknown.
const gfx950Debug, noGFX950Debug = 23, 17

// sharing returns how many processes can be debugged on a GPU at once
// (kfd_dbg_is_per_vmid_supported).
func (h *host) sharing(g gpreempt.GPU) gpreemptv1.DebugSharing {
	switch {
	case g.GFX == 90010, g.GFX >= 90400 && g.GFX <= 90402, g.GFX >= 110000:
		return gpreemptv1.DebugSharing_DEBUG_SHARING_SEVERAL
	case g.GFX != 90500, h.open.Minor > 0 && h.open.Minor <= noGFX950Debug:
		return gpreemptv1.DebugSharing_DEBUG_SHARING_ONE
	case h.open.Minor >= gfx950Debug:
		return gpreemptv1.DebugSharing_DEBUG_SHARING_SEVERAL
	}
	return gpreemptv1.DebugSharing_DEBUG_SHARING_UNSPECIFIED
}

func (h *host) debugSharing() finding {
	said := h.perGPU(func(g gpu) string {
		switch g.sharing {
		case gpreemptv1.DebugSharing_DEBUG_SHARING_ONE:
			return "one process at a time"
		case gpreemptv1.DebugSharing_DEBUG_SHARING_SEVERAL:
			return "several processes at a time"
		default:
			return "one or several processes at a time: unknown for this driver version"
		}
	})
	if slices.ContainsFunc(h.gpus, func(g gpu) bool { return g.sharing == gpreemptv1.DebugSharing_DEBUG_SHARING_ONE }) {
		return warn("if more than one offline process shares a GPU, add criu or freezer to the config key mechanisms", "%s", said)
	}
	return ok("%s", said)
}

func (h *host) queueSlots() finding {
	if h.seenErr != nil {
		return unread(h.seenErr)
	}
	said := h.perGPU(func(g gpu) string {
		if g.QueueSlots == 0 {
			return plural(g.computeQueues, "compute queue") + ", number of slots unknown"
		}
		return fmt.Sprintf("%s for %s", plural(g.computeQueues, "compute queue"), plural(g.QueueSlots, "slot"))
	})
	if slices.ContainsFunc(h.gpus, func(g gpu) bool { return g.QueueSlots > 0 && g.computeQueues > g.QueueSlots }) {
		return warn("use fewer queues: GPU_MAX_HW_QUEUES=2 for each process, or fewer processes on a GPU; or more slots: amdgpu.num_kcq=2 on the kernel command line",
			"%s: more queues than slots, so queues take turns, online ones too", said)
	}
	return ok("%s", said)
}

func (h *host) hazards() finding {
	if h.cfg.Hazards == nil {
		return skip("the hazard table was not read")
	}
	said := h.perGPU(func(g gpu) string {
		result, known := h.cfg.Hazards[g.ID]
		switch {
		case !known:
			return "not in the table"
		case result.Action == Allow && len(result.Notes) == 0:
			return "none known"
		case result.Action == Allow:
			return "none that prevents preemption; " + result.Noted()
		case result.Action == Limit:
			return strings.TrimSpace("one process at a time: " + result.Reason + " " + result.Noted())
		}
		return "not by " + strings.Join(result.Row.Mechanisms, ", ") + ": " + result.Reason
	})
	const remedy = "use a newer kernel and GPU firmware, as the issue says, or another mechanism: freezer does not use the GPU's scheduler"
	hazardous, denied := false, 0
	for _, g := range h.gpus {
		result, known := h.cfg.Hazards[g.ID]
		hazardous = hazardous || known && result.Action != Allow
		if known && result.Action == Deny {
			denied++
		}
	}
	switch {
	case denied == len(h.gpus):
		return fail(remedy, "%s", said)
	case hazardous:
		return warn(remedy, "%s", said)
	}
	return ok("%s", said)
}
