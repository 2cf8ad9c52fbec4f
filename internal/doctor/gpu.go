package doctor

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

func (p *patient) debugFirmware() finding {
	lacking := p.perGPU(func(g GPU) string {
		if g.DebugFirmware {
			return ""
		}
		return "lacks it"
	})
	if lacking == "" {
		return ok("on every GPU")
	}
	return fail("install newer GPU firmware (linux-firmware, or AMD's amdgpu-dkms-firmware) and reboot; criu and the freezer do without",
		"%s; where one GPU lacks it, ROCm's runtime lets no queue of the host be suspended by dbgtrap", lacking).blocking(dbgtrap)
}

// gfx950Debug is the interface version whose driver has per-VMID debugging on
// gfx950; that of 1.17 has not, and what lies between was not looked at.
const gfx950Debug, noGFX950Debug = 23, 17

// sharing describes how many processes the driver lets be debugged on a GPU at once
// (kfd_dbg_is_per_vmid_supported).
func (p *patient) sharing(g gpreempt.GPU) Sharing {
	switch {
	case g.GFX == 90010, g.GFX >= 90400 && g.GFX <= 90402, g.GFX >= 110000:
		return SharingSeveral
	case g.GFX != 90500, p.open.Minor > 0 && p.open.Minor <= noGFX950Debug:
		return SharingOne
	case p.open.Minor >= gfx950Debug:
		return SharingSeveral
	}
	return SharingUnknown
}

func (p *patient) debugSharing() finding {
	said := p.perGPU(func(g GPU) string {
		switch g.Sharing {
		case SharingOne:
			return "one process at a time"
		case SharingSeveral:
			return "several processes at a time"
		case SharingUnknown:
		}
		return "one or several processes at a time, which is not known of this version of the driver"
	})
	if slices.ContainsFunc(p.gpus, func(g GPU) bool { return g.Sharing == SharingOne }) {
		return warn("where more than one offline process shares a GPU, let the config key mechanisms name criu or freezer too", "%s", said)
	}
	return ok("%s", said)
}

func (p *patient) queueSlots() finding {
	if p.seenErr != nil {
		return unread(p.seenErr)
	}
	said := p.perGPU(func(g GPU) string {
		if g.QueueSlots == 0 {
			return plural(g.ComputeQueues, "compute queue") + ", and nobody tells how many fit"
		}
		return fmt.Sprintf("%s for %s", plural(g.ComputeQueues, "compute queue"), plural(g.QueueSlots, "slot"))
	})
	said += p.kernelQueues()
	if slices.ContainsFunc(p.gpus, func(g GPU) bool { return g.QueueSlots > 0 && g.ComputeQueues > g.QueueSlots }) {
		return warn("have fewer: GPU_MAX_HW_QUEUES=2 for each process, fewer processes on a GPU, or amdgpu.num_kcq=2 on the kernel command line for more slots",
			"%s: more queues than fit, so the firmware takes turns, online queues included", said)
	}
	return ok("%s", said)
}

func (p *patient) hazards() finding {
	if p.cfg.Hazards == nil {
		return skip("nobody looked")
	}
	said := p.perGPU(func(g GPU) string {
		switch g.Hazard.Action {
		case HazardAllow:
			return "none known"
		case HazardLimit:
			return "one process at a time: " + g.Hazard.Reason
		case HazardDeny:
			return "not by " + strings.Join(g.Hazard.Mechanisms, ", ") + ": " + g.Hazard.Reason
		case HazardUnknown:
		}
		return "not looked up"
	})
	const remedy = "a newer kernel and GPU firmware, as the issue says; or another mechanism, the freezer leaves the GPU's scheduler alone"
	denied, limited := 0, 0
	var everywhere []string // what is denied on every GPU
	for i, g := range p.gpus {
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
	case slices.Contains(everywhere, dbgtrap):
		return fail(remedy, "%s", said).blocking(everywhere...)
	case denied+limited > 0:
		return warn(remedy, "%s", said)
	}
	return ok("%s", said)
}
