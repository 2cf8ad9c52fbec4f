// Package kfdabi declares the structures of those calls of /dev/kfd that gpreempt itself does
// not make: a program makes them about its own queues, memory and events, and a debugger
// about waves and addresses, for one. The emulator answers them, and the acceptance of a GPU makes
// them. The requests, codes and types of the calls that gpreempt makes are those of package kfd.
//
// The structures are those of include/uapi/linux/kfd_ioctl.h, named in each comment. The
// layouts are those of 6.5 to 7.2 except as noted; the layout tests of package kfd compare
// them with the header.
package kfdabi

import (
	"structs"

	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// NoQueue is for what is not about one queue. No queue has this ID: IDs have at most 30 bits.
const NoQueue = ^uint32(0)

// CreateQueueArgs is struct kfd_ioctl_create_queue_args.
type CreateQueueArgs struct {
	_                     structs.HostLayout
	RingBaseAddress       uint64
	WritePointerAddress   uint64
	ReadPointerAddress    uint64
	DoorbellOffset        uint64 // set by the driver
	RingSize              uint32 // bytes, a power of two
	GPUID                 uint32
	QueueType             uint32
	QueuePercentage       uint32 // bits 0-7; bits 8-15 are the target XCC of PM4 queues
	QueuePriority         uint32
	QueueID               uint32 // set by the driver
	EOPBufferAddress      uint64
	EOPBufferSize         uint64
	CtxSaveRestoreAddress uint64
	CtxSaveRestoreSize    uint32
	CtlStackSize          uint32
	SDMAEngineID          uint32
	// MetadataRingSize was padding before 7.2.
	MetadataRingSize uint32
}

// DestroyQueueArgs is struct kfd_ioctl_destroy_queue_args.
type DestroyQueueArgs struct {
	_       structs.HostLayout
	QueueID uint32
	Pad     uint32
}

// UpdateQueueArgs is struct kfd_ioctl_update_queue_args.
type UpdateQueueArgs struct {
	_               structs.HostLayout
	RingBaseAddress uint64
	QueueID         uint32
	RingSize        uint32
	QueuePercentage uint32
	QueuePriority   uint32
}

// SetCUMaskArgs is struct kfd_ioctl_set_cu_mask_args.
type SetCUMaskArgs struct {
	_         structs.HostLayout
	QueueID   uint32
	NumCUMask uint32 // bits, a multiple of 32
	CUMaskPtr kfd.Pointer
}

// AllocQueueGWSArgs is struct kfd_ioctl_alloc_queue_gws_args.
type AllocQueueGWSArgs struct {
	_        structs.HostLayout
	QueueID  uint32
	NumGWS   uint32
	FirstGWS uint32
	Pad      uint32
}

// AcquireVMArgs is struct kfd_ioctl_acquire_vm_args.
type AcquireVMArgs struct {
	_     structs.HostLayout
	DRMFD uint32
	GPUID uint32
}

// ProcessAperturesNewArgs is struct kfd_ioctl_get_process_apertures_new_args.
type ProcessAperturesNewArgs struct {
	_ structs.HostLayout
	// Apertures points to an array of NumOfNodes ProcessDeviceApertures.
	Apertures kfd.Pointer
	// NumOfNodes is the length of the array, and in the result the number of entries
	// filled in; with 0 the result is the number of nodes.
	NumOfNodes uint32
	Pad        uint32
}

// ProcessDeviceApertures is struct kfd_process_device_apertures.
type ProcessDeviceApertures struct {
	_            structs.HostLayout
	LDSBase      uint64
	LDSLimit     uint64
	ScratchBase  uint64
	ScratchLimit uint64
	GPUVMBase    uint64
	GPUVMLimit   uint64
	GPUID        uint32
	Pad          uint32
}

// RuntimeEnableArgs is struct kfd_ioctl_runtime_enable_args.
type RuntimeEnableArgs struct {
	_                structs.HostLayout
	RDebug           uint64
	ModeMask         uint32 // of the RuntimeEnableMode constants
	CapabilitiesMask uint32
}

// The bits of ModeMask: KFD_RUNTIME_ENABLE_MODE_*_MASK. Without the first, the runtime
// ends.
const (
	RuntimeEnableModeEnable   uint32 = 1
	RuntimeEnableModeTTMPSave uint32 = 2
)

// ProfilerArgs is struct kfd_ioctl_profiler_args with the union's arm pmc; the union's
// member version has the offset of GPUID. It was added between 6.12 and 7.2.
type ProfilerArgs struct {
	_               structs.HostLayout
	Op              uint32 // of the Profiler constants
	GPUID           uint32
	Lock            uint32
	PerfcountEnable uint32
}

// The operations of the profiler: enum kfd_profiler_ops.
const (
	ProfilerPMC        uint32 = 0
	ProfilerVersion    uint32 = 2
	ProfilerPTLControl uint32 = 3
)
