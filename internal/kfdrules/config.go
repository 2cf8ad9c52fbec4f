package kfdrules

import (
	"fmt"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Config says what driver and what GPUs there are.
type Config struct {
	// Profile is the name of a profile: see Profiles.
	Profile string
	// Nodes are the GPU nodes, in the driver's order; none is allowed.
	Nodes []Node
	// NoHWS is the module parameter sched_policy=2: the driver schedules without
	// firmware, and cannot debug.
	NoHWS bool
	// Now gives CLOCK_BOOTTIME in nanoseconds, for SMI events. It is called with the
	// driver's lock held. Nil counts microseconds, one for each event.
	Now func() int64
}

// Node is a GPU node: a GPU, or a partition of one.
type Node struct {
	ID gpreempt.GPUID
	// GFX is gfx_target_version: 90402 is gfx942. The firmware schedules queue by
	// queue (MES) from 110000 on, and by runlists (HWS) below.
	GFX uint32
	// XCCs is the number of compute dies, 0 stands for 1.
	XCCs int
	// NoDebugFirmware: the firmware cannot debug, and a runtime does not say
	// RUNTIME_ENABLE; the driver does not look at it.
	NoDebugFirmware bool
	// NoGWSDebug: processes that use GWS cannot be debugged.
	NoGWSDebug bool
}

// mes tells whether the firmware schedules queue by queue.
func (n Node) mes() bool { return n.GFX >= 110000 }

// perVMID tells whether several processes can be debugged at a time
// (kfd_dbg_is_per_vmid_supported).
func (n Node) perVMID(p profile) bool {
	switch n.GFX {
	case 90010, 90402:
		return true
	case 90500:
		return p.gfx950
	}
	return n.GFX >= 110000
}

// cwsrWorkaround tells whether debugging halves the use of compute units
// (kfd_dbg_has_cwsr_workaround): gfx 11.0.0 to 11.0.3.
func (n Node) cwsrWorkaround() bool { return n.GFX >= 110000 && n.GFX <= 110003 }

// maxQueues is how many queues a process may have there (pqm_create_queue).
func (n Node) maxQueues(p profile) int {
	if n.GFX == 90402 || n.GFX == 90500 && p.gfx950 {
		return 255
	}
	return 127
}

// profile is what distinguishes one driver from another.
type profile struct {
	minor uint32
	// processRule: DBG_TRAP asks for ptrace, or for the process that enabled, at
	// every operation. Otherwise it asks for ptrace at all but DISABLE.
	processRule bool
	// deviceInfoSize is sizeof(struct kfd_dbg_device_info_entry).
	deviceInfoSize int
	// contexts: a process may have several contexts (CREATE_PROCESS), and the
	// driver opens only where there is a GPU.
	contexts bool
	// lastIoctl is AMDKFD_COMMAND_END - 1.
	lastIoctl uint8
	// enotty: a number the table does not have is ENOTTY, and not EINVAL.
	enotty bool
	// arrayChecks: suspend and resume refuse a NULL array and too many ids.
	arrayChecks bool
	// enableUnwinds: ENABLE that ends in EFAULT leaves debugging off.
	enableUnwinds bool
	// destroyRecovers: a destroy that a signal interrupted leaves the queue whole,
	// and a second destroy meanwhile is EBUSY.
	destroyRecovers bool
	// pauseOnce: PROCESS_INFO of a paused process evicts nothing.
	pauseOnce bool
	// smiFIFO is the room for events in bytes.
	smiFIFO int
	// smiNeedsBit: the events of other processes come only to who asked for them by
	// bit 63, and not to whoever has CAP_SYS_ADMIN.
	smiNeedsBit bool
	// smiInside: events name a process by the number it has in its own namespace.
	smiInside bool
	// dequeueFirst: a dying target's queues go before debugging is disabled.
	dequeueFirst bool
	// gfx950 is known.
	gfx950 bool
}

// Profiles are the names New knows: those of package kfd, and 6.12.117, a later
// release of the line of 6.12.103 with three more fixes: ENABLE that fails with
// EFAULT undoes itself, an interrupted DESTROY_QUEUE does so too, and CRIU_OP
// PROCESS_INFO pauses once however often it is called.
func Profiles() []string {
	return []string{"6.5", "6.12", "6.12.103", "6.12.117", "amd-dkms", "7.2"}
}

func profileOf(name string) (profile, error) {
	p := profile{minor: 13, deviceInfoSize: 120, lastIoctl: 0x26, smiFIFO: 1024, smiNeedsBit: true}
	if name == "6.5" {
		return p, nil
	}
	p.minor, p.enotty, p.arrayChecks = 17, true, true
	switch name {
	case "6.12":
		return p, nil
	case "amd-dkms":
		p.minor = 18
		return p, nil
	}
	p.processRule = true
	switch name {
	case "6.12.103":
		return p, nil
	case "6.12.117":
		p.enableUnwinds, p.destroyRecovers, p.pauseOnce = true, true, true
		return p, nil
	case "7.2":
		p.minor, p.lastIoctl, p.deviceInfoSize = 23, 0x28, 128
		p.contexts, p.enableUnwinds, p.destroyRecovers = true, true, true
		p.smiFIFO, p.smiNeedsBit, p.smiInside = 8192, false, true
		p.dequeueFirst, p.gfx950 = true, true
		return p, nil
	}
	return p, fmt.Errorf("no profile %q: there are %q", name, Profiles())
}
