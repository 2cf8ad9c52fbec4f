package kfd

import "structs"

// The structures below are those of include/uapi/linux/kfd_ioctl.h, named in each comment.
// The layouts are those of 6.5 to 7.2 except as noted. layout_test.go compares them with
// the header.

// GetVersionArgs is struct kfd_ioctl_get_version_args.
type GetVersionArgs struct {
	_     structs.HostLayout
	Major uint32
	Minor uint32
}

// TrapEnableArgs is struct kfd_ioctl_dbg_trap_args with the union's arm enable,
// struct kfd_ioctl_dbg_trap_enable_args. Like all Trap...Args it has the whole 32 bytes,
// which the driver copies for every operation.
type TrapEnableArgs struct {
	_             structs.HostLayout
	PID           uint32
	Op            TrapOp
	ExceptionMask ExceptionMask
	RinfoPtr      Pointer
	// RinfoSize is the size of the buffer in bytes, and in the result that of the
	// driver's structure.
	RinfoSize uint32
	DbgFD     uint32
}

// TrapDisableArgs is struct kfd_ioctl_dbg_trap_args without an arm.
type TrapDisableArgs struct {
	_   structs.HostLayout
	PID uint32
	Op  TrapOp
	_   [24]byte
}

// TrapSendRuntimeEventArgs is struct kfd_ioctl_dbg_trap_args with the arm
// send_runtime_event, struct kfd_ioctl_dbg_trap_send_runtime_event_args.
type TrapSendRuntimeEventArgs struct {
	_             structs.HostLayout
	PID           uint32
	Op            TrapOp
	ExceptionMask ExceptionMask
	GPUID         uint32
	QueueID       uint32
	_             [8]byte
}

// TrapSuspendQueuesArgs is struct kfd_ioctl_dbg_trap_args with the arm
// suspend_queues, struct kfd_ioctl_dbg_trap_suspend_queues_args.
type TrapSuspendQueuesArgs struct {
	_             structs.HostLayout
	PID           uint32
	Op            TrapOp
	ExceptionMask ExceptionMask
	QueueArrayPtr Pointer
	NumQueues     uint32
	GracePeriod   uint32
}

// TrapResumeQueuesArgs is struct kfd_ioctl_dbg_trap_args with the arm
// resume_queues, struct kfd_ioctl_dbg_trap_resume_queues_args. The array has another
// offset than in TrapSuspendQueuesArgs.
type TrapResumeQueuesArgs struct {
	_             structs.HostLayout
	PID           uint32
	Op            TrapOp
	QueueArrayPtr Pointer
	NumQueues     uint32
	_             [12]byte
}

// TrapQueryDebugEventArgs is struct kfd_ioctl_dbg_trap_args with the arm
// query_debug_event, struct kfd_ioctl_dbg_trap_query_debug_event_args.
type TrapQueryDebugEventArgs struct {
	_   structs.HostLayout
	PID uint32
	Op  TrapOp
	// ExceptionMask is the exceptions to clear, and in the result those that were raised.
	ExceptionMask ExceptionMask
	GPUID         uint32
	QueueID       uint32
	_             [8]byte
}

// TrapQueryExceptionInfoArgs is struct kfd_ioctl_dbg_trap_args with the arm
// query_exception_info, struct kfd_ioctl_dbg_trap_query_exception_info_args.
type TrapQueryExceptionInfoArgs struct {
	_       structs.HostLayout
	PID     uint32
	Op      TrapOp
	InfoPtr Pointer
	// InfoSize is the size of the buffer in bytes, and in the result that of the data.
	InfoSize       uint32
	SourceID       uint32
	ExceptionCode  ExceptionCode
	ClearException uint32
}

// TrapQueueSnapshotArgs is struct kfd_ioctl_dbg_trap_args with the arm
// queue_snapshot, struct kfd_ioctl_dbg_trap_queue_snapshot_args. The arm device_snapshot is
// the same for GPUs.
type TrapQueueSnapshotArgs struct {
	_              structs.HostLayout
	PID            uint32
	Op             TrapOp
	ExceptionMask  ExceptionMask
	SnapshotBufPtr Pointer
	// NumQueues is the number of entries in the buffer, and in the result the number of
	// queues.
	NumQueues uint32
	// EntrySize is the bytes from one entry to the next, and in the result the bytes that
	// the driver filled in each.
	EntrySize uint32
}

// QueueSnapshotEntry is struct kfd_queue_snapshot_entry: one queue of the target.
// Nothing in it says whether the queue is suspended.
type QueueSnapshotEntry struct {
	_ structs.HostLayout
	// ExceptionStatus is the exceptions before the snapshot cleared any.
	ExceptionStatus ExceptionMask
	// The addresses are those of the target in its CREATE_QUEUE.
	RingBaseAddress       uint64
	WritePointerAddress   uint64
	ReadPointerAddress    uint64
	CtxSaveRestoreAddress uint64
	QueueID               uint32
	// GPUID is the gpu_id: that of the topology, unless the target was restored from a
	// checkpoint.
	GPUID uint32
	// RingSize is in bytes.
	RingSize uint32
	// QueueType is one of the QueueType constants.
	QueueType uint32
	// CtxSaveRestoreAreaSize is in bytes.
	CtxSaveRestoreAreaSize uint32
	Reserved               uint32
}

// The values of QueueType: KFD_IOC_QUEUE_TYPE_*. These are the numbers of the ioctls;
// those in sysfs differ.
const (
	QueueTypeCompute    uint32 = 0
	QueueTypeSDMA       uint32 = 1
	QueueTypeComputeAQL uint32 = 2
	QueueTypeSDMAXGMI   uint32 = 3
	// QueueTypeSDMAByEngID is for creation only: a snapshot has one of the others.
	QueueTypeSDMAByEngID uint32 = 4
)

// DeviceInfoEntry is struct kfd_dbg_device_info_entry: one GPU node that the target can
// use. Capability2 and Pad were added between 6.12 and 7.2; older drivers leave them zero.
type DeviceInfoEntry struct {
	_                   structs.HostLayout
	ExceptionStatus     ExceptionMask
	LDSBase             uint64
	LDSLimit            uint64
	ScratchBase         uint64
	ScratchLimit        uint64
	GPUVMBase           uint64
	GPUVMLimit          uint64
	GPUID               uint32
	LocationID          uint32
	VendorID            uint32
	DeviceID            uint32
	RevisionID          uint32
	SubsystemVendorID   uint32
	SubsystemDeviceID   uint32
	FWVersion           uint32
	GFXTargetVersion    uint32
	SIMDCount           uint32
	MaxWavesPerSIMD     uint32
	ArrayCount          uint32
	SIMDArraysPerEngine uint32
	NumXCC              uint32
	Capability          uint32
	DebugProp           uint32
	Capability2         uint32
	Pad                 uint32
}

// RuntimeInfo is struct kfd_runtime_info: the state of the target's ROCm runtime.
type RuntimeInfo struct {
	_ structs.HostLayout
	// RDebug is an address in the target, for debuggers.
	RDebug    uint64
	State     RuntimeState
	TTMPSetup uint32
}

// CRIUArgs is struct kfd_ioctl_criu_args.
type CRIUArgs struct {
	_            structs.HostLayout
	Devices      Pointer
	BOs          Pointer
	PrivData     Pointer
	PrivDataSize uint64
	NumDevices   uint32
	NumBOs       uint32
	NumObjects   uint32
	PID          uint32
	Op           CRIUOp
	_            [4]byte
}

// SMIEventsArgs is struct kfd_ioctl_smi_events_args.
type SMIEventsArgs struct {
	_      structs.HostLayout
	GPUID  uint32
	AnonFD uint32
}
