package driver

import (
	"fmt"
	"time"

	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Config selects the driver and its GPUs.
type Config struct {
	// Profile is the name of a profile: KmapProfile, or one of Profiles.
	Profile string
	// Nodes are the GPU nodes, in the driver's order. There may be no node.
	Nodes []Node
	// CPUNodes is the number of CPU nodes in the topology, 0 means 1.
	CPUNodes int
	// NoHWS is the module parameter sched_policy=2: the driver schedules without
	// firmware, and cannot debug.
	NoHWS bool
	// Queue, if not nil, is called before the hardware first sees a queue, with created
	// set, and after it saw the queue for the last time (init_mqd, free_mqd). The driver's
	// lock is held: it must not call the driver.
	Queue func(q MappedQueue, created bool)
	// Waits, if not nil, is called each time a call of a task begins to wait. The driver's
	// lock is held: it must not call the driver.
	Waits func(Task)
	// Worker, if not nil, is called when there may be work for Driver.Work, with the
	// driver's lock held: it must not call the driver. With nil, each method does that work
	// before it returns, for whatever process.
	Worker func()
	// Mapped reports whether a task has mapped the addresses from start to last, and no
	// device's memory is among them. The driver's lock is held: it must not call the
	// driver. With nil, all addresses that a process can map are.
	Mapped func(t Task, start, last uint64) bool
	// Clock reads the clocks of GET_CLOCK_COUNTERS. Raw also determines the rest of a wait
	// for events, Boot the time of an SMI event. It is called with the driver's lock held.
	// With nil, clocks count from New on, by package time, and the time of SMI events
	// advances by a microsecond with each.
	Clock func() Clocks
	// After arranges a call of wake when d has passed, unless stop is called before. Both
	// After and stop are called with the driver's lock held, which wake takes: After must
	// not call wake, and stop must not wait for it. Nil means time.AfterFunc.
	After func(d time.Duration, wake func()) (stop func())
	// Offsets, if not nil, are mmap offsets that replace the driver's own.
	Offsets *Offsets
	// OwnVMs: CREATE_QUEUE acquires no VM but that of its GPU.
	OwnVMs bool
	// Log, if not nil, is called with each line that the driver prints about a GPU of which a
	// queue did not leave it, without the prefix that names the device. The driver's lock is
	// held: it must not call the driver.
	Log func(gpu gpreempt.GPUID, text string)
	// PASID returns the PASID of a process, for the lines of drivers that print it. With nil
	// it is 0x8000.
	PASID func(MM) uint32
	// Oops is called where the driver would crash the kernel, or write to memory that it has
	// freed, with what it did. The driver's lock is held: Oops must not call the driver. What
	// such a kernel does next is not modelled. With nil, the program ends.
	Oops func(what string)
}

// Clocks are clocks read at one time.
type Clocks struct {
	// Raw and Boot are CLOCK_MONOTONIC_RAW and CLOCK_BOOTTIME, in nanoseconds.
	Raw, Boot int64
	// GPU is the counter of the GPUs, 100 MHz.
	GPU uint64
}

// clocksSince returns the default of Config.Clock.
func clocksSince(start time.Time) func() Clocks {
	return func() Clocks {
		ns := time.Since(start).Nanoseconds()
		return Clocks{Raw: ns, Boot: ns, GPU: uint64(ns / 10)}
	}
}

// afterFunc is the default of Config.After.
func afterFunc(d time.Duration, wake func()) (stop func()) {
	timer := time.AfterFunc(d, wake)
	return func() { timer.Stop() }
}

// Offsets are the mmap offsets of what is not memory. The driver's own have bit 63 set, or
// are too large for a file that is not a device. The functions are called with the
// driver's lock held: they must not wait and must not call the driver.
type Offsets struct {
	// Doorbells returns the offset of a process's doorbells on a GPU, DoorbellBytes in
	// size. Its lowest 13 bits are 0.
	Doorbells func(gpreempt.GPUID) uint64
	// Events is the offset of the page of a process's signal events, 8 bytes for each of 4096.
	Events uint64
	// MMIO returns the offset of the page with the registers remapped for processes.
	MMIO func(gpreempt.GPUID) uint64
}

// DoorbellBytes is the size of a process's doorbells on a GPU (kfd_doorbell_process_slice).
const DoorbellBytes = 8192

// The driver's own offsets (KFD_MMAP_TYPE_*, KFD_MMAP_GPU_ID); KFD_MMAP_TYPE_MMIO is 0.
const (
	mmapDoorbells = 3 << 62
	mmapEvents    = 2 << 62
)

func mmapGPU(id gpreempt.GPUID) uint64 { return uint64(id&0xffff) << 46 }

var driverOffsets = Offsets{
	Doorbells: func(id gpreempt.GPUID) uint64 { return mmapDoorbells | mmapGPU(id) },
	Events:    mmapEvents,
	MMIO:      mmapGPU,
}

// Node is a GPU node: a GPU, or a partition of one.
type Node struct {
	ID gpreempt.GPUID
	// GFX is gfx_target_version: 90402 is gfx942. The firmware schedules queue by
	// queue (MES) from 110000 on, and by runlists (HWS) below.
	GFX uint32
	// XCCs is the number of compute dies, 0 means 1.
	XCCs int
	// NoGWSDebug: processes that use GWS cannot be debugged.
	NoGWSDebug bool
	// SDMAQueues and XGMIQueues are the most SDMA queues over PCIe and over XGMI; 0 means
	// no limit.
	SDMAQueues, XGMIQueues int
	// MECFirmware is the version of the compute firmware, 0 means a recent one.
	MECFirmware uint32
	// VRAM is the memory in bytes, 0 means 192 GiB.
	VRAM uint64
	// SaveArea is what the save areas of queues must have room for; nothing is checked
	// for the zero value.
	SaveArea SaveArea
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

// graceOfZero reports whether the firmware takes a grace period of 0
// (pm_grace_period_0_supported, for the GPUs with HWS that have the debug interface).
func (n Node) graceOfZero() bool {
	least := uint32(0)
	switch n.GFX {
	case 90010:
		least = 63
	case 90402:
		least = 96
	case 90500:
	default:
		return false
	}
	return n.MECFirmware == 0 || n.MECFirmware >= least
}

// maxQueues returns the most queues of a process there (pqm_create_queue).
func (n Node) maxQueues(p profile) int {
	if n.GFX == 90402 || n.GFX == 90500 && p.gfx950 {
		return 255
	}
	return 127
}

// profile has the differences between versions of the driver.
type profile struct {
	minor uint32
	// processRule: every operation of DBG_TRAP requires that the caller traces the target,
	// or that its process enabled debugging. Otherwise all but DISABLE require tracing.
	processRule bool
	// deviceInfoSize is sizeof(struct kfd_dbg_device_info_entry).
	deviceInfoSize int
	// contexts: a process may have several contexts (CREATE_PROCESS), and the
	// driver opens only where there is a GPU.
	contexts bool
	// lastIoctl is AMDKFD_COMMAND_END - 1.
	lastIoctl uint8
	// enotty: an unknown number is ENOTTY, and not EINVAL.
	enotty bool
	// arrayChecks: suspend and resume reject a NULL array and too many ids.
	arrayChecks bool
	// suspendFlushes: SUSPEND_QUEUES flushes the TLB of GPUs after the first with a
	// suspended queue, and crashes on one without a VM.
	suspendFlushes bool
	// enableUnwinds: ENABLE that fails with EFAULT leaves debugging disabled.
	enableUnwinds bool
	// destroyRecovers: a destroy that a signal interrupted leaves the queue unchanged,
	// and a second destroy meanwhile is EBUSY.
	destroyRecovers bool
	// pauseOnce: PROCESS_INFO of a paused process evicts nothing.
	pauseOnce bool
	// smiFIFO is the size of the buffer for events in bytes.
	smiFIFO int
	// smiNeedsBit: events of other processes require bit 63 of the mask in addition to
	// CAP_SYS_ADMIN.
	smiNeedsBit bool
	// smiInside: events name a process by its pid in its own namespace. smiGlobal: whose event it
	// is, is found by the pid of the initial one, also for memory faults and processes.
	smiInside, smiGlobal bool
	// dequeueFirst: the queues of an exiting target are removed before debugging is
	// disabled.
	dequeueFirst bool
	// eventAge: a wait for events may pass the age that each had at the last check.
	eventAge bool
	// waitLimit is the most events of a wait.
	waitLimit uint32
	// gfx950 is known.
	gfx950 bool
	// resets: the driver resets a queue that does not leave the GPU, and not the GPU.
	resets bool
	// resetsSDMA: also one of SDMA; and what it prints has a pid where it had a PASID.
	resetsSDMA bool
	// removes is what it does when MES does not answer REMOVE_QUEUE.
	removes removeRule
	// checksBuffers: the memory of a queue must be mapped with the sizes of the call.
	checksBuffers bool
	// svmOverflow: a range of addresses that ends behind the last one is EOVERFLOW, and not
	// EFAULT.
	svmOverflow bool
	// ownEventPage: a process must provide the memory for signal events.
	ownEventPage bool
	// freeWaits: FREE_MEMORY_OF_GPU waits for the resets of all GPUs of the process.
	freeWaits bool
	// graceOfZero: a grace period of 0 is passed to firmware that takes it, and is not 1.
	graceOfZero bool
	// kmap: it has the extension at kfdabi.KmapPath.
	kmap bool
}

// Profiles returns the names that New knows except KmapProfile: those of package kfd, and two
// that callers of that package cannot tell from another. 6.12.117 is a later
// release of the line of 6.12.103 with four more fixes, and one crash: ENABLE that fails
// with EFAULT undoes itself, so does an interrupted DESTROY_QUEUE, repeated CRIU_OP
// PROCESS_INFO pauses once, memory faults are reported to those who may see the process, and
// SUSPEND_QUEUES may find no VM where it flushes a TLB.
// 7.3 has the interface version of 7.2.
func Profiles() []string {
	return []string{"6.5", "6.12", "6.12.103", "6.12.117", "amd-dkms", "7.2", "7.3"}
}

func profileOf(name string) (profile, error) {
	p := profile{minor: 13, deviceInfoSize: 120, lastIoctl: 0x26, smiFIFO: 1024, smiNeedsBit: true, waitLimit: maxWaiters}
	if name == "6.5" {
		return p, nil
	}
	p.minor, p.enotty, p.arrayChecks, p.eventAge, p.checksBuffers, p.resets = 17, true, true, true, true, true
	switch name {
	case "6.12":
		return p, nil
	case KmapProfile:
		p.kmap = true
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
		p.enableUnwinds, p.destroyRecovers, p.pauseOnce, p.suspendFlushes, p.svmOverflow = true, true, true, true, true
		p.smiGlobal = true
		return p, nil
	case "7.2", "7.3":
		p.minor, p.lastIoctl, p.deviceInfoSize = 23, 0x28, 128
		p.contexts, p.enableUnwinds, p.destroyRecovers, p.suspendFlushes = true, true, true, true
		p.smiFIFO, p.smiNeedsBit, p.smiInside = 8192, false, true
		p.dequeueFirst, p.gfx950, p.waitLimit = true, true, kfdabi.SignalEventLimit
		p.resetsSDMA, p.removes = true, removeForgets
		if name == "7.3" {
			p.pauseOnce, p.svmOverflow, p.smiGlobal = true, true, true
			p.ownEventPage, p.freeWaits, p.graceOfZero = true, true, true
			p.removes = removeResets
		}
		return p, nil
	}
	return p, fmt.Errorf("unknown driver profile %q; use one of %q", name, append(Profiles(), KmapProfile))
}
