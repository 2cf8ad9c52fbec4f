package driver

import (
	"fmt"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// Config says what driver and what GPUs there are.
type Config struct {
	// Profile is the name of a profile: see Profiles.
	Profile string
	// Nodes are the GPU nodes, in the driver's order; none is allowed.
	Nodes []Node
	// CPUNodes is how many nodes of the topology are CPUs, 0 stands for 1.
	CPUNodes int
	// NoHWS is the module parameter sched_policy=2: the driver schedules without
	// firmware, and cannot debug.
	NoHWS bool
	// Queue, if not nil, is told of each queue before the hardware first learns of it, and
	// when it never will again (init_mqd, free_mqd), with the driver's lock held: it must
	// not call the driver.
	Queue func(q MappedQueue, born bool)
	// Clock reads the clocks of GET_CLOCK_COUNTERS; Raw of it says what is left of a wait
	// for events, and Boot when an SMI event was. It is called with the driver's lock held.
	// Nil counts from New on, by package time, and SMI events by microseconds, one each.
	Clock func() Clocks
	// After has wake called when d has passed, unless stop is called before, which may be
	// at any time. Both are called with the driver's lock held, which wake takes: After
	// must not call it, and stop must not wait for it. Nil is time.AfterFunc.
	After func(d time.Duration, wake func()) (stop func())
	// Offsets, if not nil, are the mmap offsets handed out instead of the driver's own.
	Offsets *Offsets
}

// Clocks are what clocks say at one moment.
type Clocks struct {
	// Raw and Boot are CLOCK_MONOTONIC_RAW and CLOCK_BOOTTIME, in nanoseconds.
	Raw, Boot int64
	// GPU is the counter of the GPUs, 100 MHz.
	GPU uint64
}

// clocksSince is Config.Clock for who gives none.
func clocksSince(start time.Time) func() Clocks {
	return func() Clocks {
		ns := time.Since(start).Nanoseconds()
		return Clocks{Raw: ns, Boot: ns, GPU: uint64(ns / 10)}
	}
}

// afterFunc is Config.After for who gives none.
func afterFunc(d time.Duration, wake func()) (stop func()) {
	timer := time.AfterFunc(d, wake)
	return func() { timer.Stop() }
}

// Offsets are the mmap offsets of what is not memory. The driver's own have bit 63
// set, or as much as no file but a device can be mapped at. They are called with the
// driver's lock held: they must not wait and must not call the driver.
type Offsets struct {
	// Doorbells returns the offset of a process's doorbells on a GPU, which are
	// DoorbellBytes long. Its lowest 13 bits are 0.
	Doorbells func(gpreempt.GPUID) uint64
	// Events is that of the page of a process's signal events, which is EventBytes long.
	Events uint64
	// MMIO returns that of the page with the registers remapped for processes.
	MMIO func(gpreempt.GPUID) uint64
}

// DoorbellBytes is the length of a process's doorbells on a GPU
// (kfd_doorbell_process_slice), EventBytes that of the page of its signal events
// (KFD_SIGNAL_EVENT_LIMIT times 8).
const (
	DoorbellBytes = 8192
	EventBytes    = 8 * 4096
)

// The driver's own (KFD_MMAP_TYPE_*, KFD_MMAP_GPU_ID); KFD_MMAP_TYPE_MMIO is 0.
const (
	mmapDoorbells = 3 << 62
	mmapEvents    = 2 << 62
)

func mmapGPU(id gpreempt.GPUID) uint64 { return uint64(id&0xffff) << 46 }

func (cfg *Config) eventPage() uint64 {
	if cfg.Offsets != nil {
		return cfg.Offsets.Events
	}
	return mmapEvents
}

func (cfg *Config) mmio(id gpreempt.GPUID) uint64 {
	if cfg.Offsets != nil {
		return cfg.Offsets.MMIO(id)
	}
	return mmapGPU(id)
}

func (cfg *Config) doorbells(id gpreempt.GPUID) uint64 {
	if cfg.Offsets != nil {
		return cfg.Offsets.Doorbells(id)
	}
	return mmapDoorbells | mmapGPU(id)
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
	// SDMAQueues and XGMIQueues are how many queues for copies there can be, over PCIe and
	// over XGMI; 0 is no limit.
	SDMAQueues, XGMIQueues int
	// VRAM is the memory in bytes, 0 stands for 192 GiB.
	VRAM uint64
}

// mes reports whether the firmware schedules queue by queue.
func (n Node) mes() bool { return n.GFX >= 110000 }

// perVMID reports whether several processes can be debugged at a time
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

// cwsrWorkaround reports whether debugging halves the use of compute units
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
	// eventAge: who waits for events can say how old they were when it looked last.
	eventAge bool
	// waitLimit is how many events a wait may name.
	waitLimit uint32
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
	p := profile{minor: 13, deviceInfoSize: 120, lastIoctl: 0x26, smiFIFO: 1024, smiNeedsBit: true, waitLimit: maxWaiters}
	if name == "6.5" {
		return p, nil
	}
	p.minor, p.enotty, p.arrayChecks, p.eventAge = 17, true, true, true
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
		p.dequeueFirst, p.gfx950, p.waitLimit = true, true, kfd.SignalEventLimit
		return p, nil
	}
	return p, fmt.Errorf("no profile %q: there are %q", name, Profiles())
}
