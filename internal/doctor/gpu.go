package doctor

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func (h *host) debugFirmware() finding {
	lacking := h.perGPU(func(g GPU) string {
		if g.DebugFirmware {
			return ""
		}
		return "lacks it"
	})
	if lacking == "" {
		return ok("on every GPU")
	}
	return fail("install newer GPU firmware (linux-firmware, or AMD's amdgpu-dkms-firmware) and reboot; criu and freezer do not need it",
		"%s; if one GPU lacks it, ROCm's runtime prevents dbgtrap on the whole host", lacking).blocking(byDbgtrap)
}

// gfx950Debug is a minor interface version whose driver has per-VMID debugging on gfx950.
// That of 1.17 does not; the versions between are unknown.
const gfx950Debug, noGFX950Debug = 23, 17

// sharing returns how many processes can be debugged on a GPU at once
// (kfd_dbg_is_per_vmid_supported).
func (h *host) sharing(g gpreempt.GPU) Sharing {
	switch {
	case g.GFX == 90010, g.GFX >= 90400 && g.GFX <= 90402, g.GFX >= 110000:
		return SharingSeveral
	case g.GFX != 90500, h.open.Minor > 0 && h.open.Minor <= noGFX950Debug:
		return SharingOne
	case h.open.Minor >= gfx950Debug:
		return SharingSeveral
	}
	return SharingUnknown
}

func (h *host) debugSharing() finding {
	said := h.perGPU(func(g GPU) string {
		switch g.Sharing {
		case SharingOne:
			return "one process at a time"
		case SharingSeveral:
			return "several processes at a time"
		case SharingUnknown:
		}
		return "one or several processes at a time: unknown for this driver version"
	})
	if slices.ContainsFunc(h.gpus, func(g GPU) bool { return g.Sharing == SharingOne }) {
		return warn("if more than one offline process shares a GPU, add criu or freezer to the config key mechanisms", "%s", said)
	}
	return ok("%s", said)
}

func (h *host) queueSlots() finding {
	if h.seenErr != nil {
		return unread(h.seenErr)
	}
	said := h.perGPU(func(g GPU) string {
		if g.QueueSlots == 0 {
			return plural(g.ComputeQueues, "compute queue") + ", number of slots unknown"
		}
		return fmt.Sprintf("%s for %s", plural(g.ComputeQueues, "compute queue"), plural(g.QueueSlots, "slot"))
	})
	said += h.kernelQueues()
	if slices.ContainsFunc(h.gpus, func(g GPU) bool { return g.QueueSlots > 0 && g.ComputeQueues > g.QueueSlots }) {
		return warn("use fewer queues: GPU_MAX_HW_QUEUES=2 for each process, or fewer processes on a GPU; or more slots: amdgpu.num_kcq=2 on the kernel command line",
			"%s: more queues than slots, so queues take turns, online ones too", said)
	}
	return ok("%s", said)
}

func (h *host) hazards() finding {
	if h.cfg.Hazards == nil {
		return skip("the hazard table was not read")
	}
	said := h.perGPU(func(g GPU) string {
		switch g.Hazard.Action {
		case HazardAllow:
			return "none known"
		case HazardLimit:
			return "one process at a time: " + g.Hazard.Reason
		case HazardDeny:
			return "not by " + strings.Join(g.Hazard.Mechanisms, ", ") + ": " + g.Hazard.Reason
		case HazardUnknown:
		}
		return "not in the table"
	})
	const remedy = "use a newer kernel and GPU firmware, as the issue says, or another mechanism: freezer does not use the GPU's scheduler"
	denied, limited := 0, 0
	var everywhere []string // the mechanisms that are denied on every GPU
	for i, g := range h.gpus {
		switch g.Hazard.Action {
		case HazardDeny:
			denied++
		case HazardLimit:
			limited++
		case HazardAllow, HazardUnknown:
		}
		var here []string
		if g.Hazard.Action == HazardDeny {
			here = g.Hazard.Mechanisms
		}
		if i == 0 {
			everywhere = slices.Clone(here)
		}
		everywhere = slices.DeleteFunc(everywhere, func(m string) bool { return !slices.Contains(here, m) })
	}
	switch {
	case slices.Contains(everywhere, byDbgtrap):
		return fail(remedy, "%s", said).blocking(everywhere...)
	case denied+limited > 0:
		return warn(remedy, "%s", said)
	}
	return ok("%s", said)
}
