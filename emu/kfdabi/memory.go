package kfdabi

import (
	"structs"

	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// The structures of a process's calls about its GPU memory.

// AllocMemoryArgs is struct kfd_ioctl_alloc_memory_of_gpu_args.
type AllocMemoryArgs struct {
	_      structs.HostLayout
	VAAddr uint64
	Size   uint64 // bytes
	Handle uint64 // set by the driver
	// MmapOffset is set by the driver: the offset for mmap of the render node, or for
	// AllocMMIORemap of /dev/kfd. For AllocUserptr it is an argument, the address in the
	// process.
	MmapOffset uint64
	GPUID      uint32
	Flags      uint32 // of the Alloc constants
}

// The bits of Flags: KFD_IOC_ALLOC_MEM_FLAGS_*. The first five are kinds of memory, the
// others attributes.
const (
	AllocVRAM         uint32 = 1 << 0
	AllocGTT          uint32 = 1 << 1
	AllocUserptr      uint32 = 1 << 2
	AllocDoorbell     uint32 = 1 << 3
	AllocMMIORemap    uint32 = 1 << 4
	AllocContiguous   uint32 = 1 << 23
	AllocExtCoherent  uint32 = 1 << 24
	AllocUncached     uint32 = 1 << 25
	AllocCoherent     uint32 = 1 << 26
	AllocAQLQueueMem  uint32 = 1 << 27
	AllocNoSubstitute uint32 = 1 << 28
	AllocPublic       uint32 = 1 << 29
	AllocExecutable   uint32 = 1 << 30
	AllocWritable     uint32 = 1 << 31
)

// FreeMemoryArgs is struct kfd_ioctl_free_memory_of_gpu_args.
type FreeMemoryArgs struct {
	_      structs.HostLayout
	Handle uint64
}

// MapMemoryArgs is struct kfd_ioctl_map_memory_to_gpu_args.
type MapMemoryArgs struct {
	_                 structs.HostLayout
	Handle            uint64
	DeviceIDsArrayPtr kfd.Pointer
	NumDevices        uint32
	// NumSuccess is the number of devices done before, and in the result the number done.
	NumSuccess uint32
}

// UnmapMemoryArgs is struct kfd_ioctl_unmap_memory_from_gpu_args.
type UnmapMemoryArgs struct {
	_                 structs.HostLayout
	Handle            uint64
	DeviceIDsArrayPtr kfd.Pointer
	NumDevices        uint32
	NumSuccess        uint32 // see MapMemoryArgs
}

// AvailableMemoryArgs is struct kfd_ioctl_get_available_memory_args.
type AvailableMemoryArgs struct {
	_         structs.HostLayout
	Available uint64 // bytes, set by the driver
	GPUID     uint32
	Pad       uint32
}

// DmabufInfoArgs is struct kfd_ioctl_get_dmabuf_info_args.
type DmabufInfoArgs struct {
	_            structs.HostLayout
	Size         uint64 // bytes, set by the driver
	MetadataPtr  kfd.Pointer
	MetadataSize uint32
	GPUID        uint32 // set by the driver
	Flags        uint32 // of the Alloc constants, set by the driver
	DmabufFD     uint32
}

// ImportDmabufArgs is struct kfd_ioctl_import_dmabuf_args.
type ImportDmabufArgs struct {
	_        structs.HostLayout
	VAAddr   uint64
	Handle   uint64 // set by the driver
	GPUID    uint32
	DmabufFD uint32
}

// ExportDmabufArgs is struct kfd_ioctl_export_dmabuf_args.
type ExportDmabufArgs struct {
	_        structs.HostLayout
	Handle   uint64
	Flags    uint32 // of open(2)
	DmabufFD uint32 // set by the driver
}

// SVMArgs is struct kfd_ioctl_svm_args. NumAttrs SVMAttributes follow it, which the size
// in the request includes.
type SVMArgs struct {
	_         structs.HostLayout
	StartAddr uint64
	Size      uint64 // bytes
	Op        uint32 // of the SVMOp constants
	NumAttrs  uint32
}

// SVMAttribute is struct kfd_ioctl_svm_attribute.
type SVMAttribute struct {
	_     structs.HostLayout
	Type  uint32 // of the SVMAttr constants
	Value uint32
}

// The values of SVMArgs.Op: enum kfd_ioctl_svm_op.
const (
	SVMOpSetAttr uint32 = 0
	SVMOpGetAttr uint32 = 1
)

// The values of SVMAttribute.Type: enum kfd_ioctl_svm_attr_type.
const (
	SVMAttrPreferredLoc  uint32 = 0
	SVMAttrPrefetchLoc   uint32 = 1
	SVMAttrAccess        uint32 = 2
	SVMAttrAccessInPlace uint32 = 3
	SVMAttrNoAccess      uint32 = 4
	SVMAttrSetFlags      uint32 = 5
	SVMAttrClrFlags      uint32 = 6
	SVMAttrGranularity   uint32 = 7 // pages, as a power of two
)

// The locations other than a GPU: enum kfd_ioctl_svm_location.
const (
	SVMLocationSysmem    uint32 = 0
	SVMLocationUndefined uint32 = 0xffffffff
)

// The flags of a new range: KFD_IOCTL_SVM_FLAG_*.
const (
	SVMFlagHostAccess uint32 = 1
	SVMFlagCoherent   uint32 = 2
	// SVMFlagGPUAlwaysMapped keeps the addresses mapped on the GPUs.
	SVMFlagGPUAlwaysMapped uint32 = 0x40
)

// SetXnackModeArgs is struct kfd_ioctl_set_xnack_mode_args.
type SetXnackModeArgs struct {
	_ structs.HostLayout
	// XnackEnabled is 0 or 1, or negative as a signed number for a query, whose result is
	// the mode.
	XnackEnabled uint32
}
