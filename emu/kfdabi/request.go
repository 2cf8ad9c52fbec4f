package kfdabi

import "github.com/gpreempt/gpreempt/pkg/kfd"

// The request numbers of kfd_ioctl.h (AMDKFD_IOC_*) beside those of package kfd, Linux 6.12 and 7.2,
// 64 bits.
const (
	ReqCreateQueue            kfd.Request = 0xC0604B02
	ReqDestroyQueue           kfd.Request = 0xC0084B03
	ReqSetMemoryPolicy        kfd.Request = 0x40204B04
	ReqGetClockCounters       kfd.Request = 0xC0284B05
	ReqGetProcessApertures    kfd.Request = 0x81904B06
	ReqUpdateQueue            kfd.Request = 0x40184B07
	ReqCreateEvent            kfd.Request = 0xC0204B08
	ReqDestroyEvent           kfd.Request = 0x40084B09
	ReqSetEvent               kfd.Request = 0x40084B0A
	ReqResetEvent             kfd.Request = 0x40084B0B
	ReqWaitEvents             kfd.Request = 0xC0184B0C
	ReqSetScratchBackingVA    kfd.Request = 0xC0104B11
	ReqGetTileConfig          kfd.Request = 0xC0284B12
	ReqSetTrapHandler         kfd.Request = 0x40184B13
	ReqGetProcessAperturesNew kfd.Request = 0xC0104B14
	ReqAcquireVM              kfd.Request = 0x40084B15
	ReqAllocMemoryOfGPU       kfd.Request = 0xC0284B16
	ReqFreeMemoryOfGPU        kfd.Request = 0x40084B17
	ReqMapMemoryToGPU         kfd.Request = 0xC0184B18
	ReqUnmapMemoryFromGPU     kfd.Request = 0xC0184B19
	ReqSetCUMask              kfd.Request = 0x40104B1A
	ReqGetQueueWaveState      kfd.Request = 0xC0184B1B
	ReqGetDmabufInfo          kfd.Request = 0xC0204B1C
	ReqImportDmabuf           kfd.Request = 0xC0184B1D
	ReqAllocQueueGWS          kfd.Request = 0xC0104B1E
	// ReqSVM is the smallest form: its size grows with the number of attributes.
	ReqSVM             kfd.Request = 0xC0184B20
	ReqSetXnackMode    kfd.Request = 0xC0044B21
	ReqAvailableMemory kfd.Request = 0xC0104B23
	ReqExportDmabuf    kfd.Request = 0xC0104B24
	ReqRuntimeEnable   kfd.Request = 0xC0104B25
	// ReqCreateProcess and ReqProfiler were added between 6.12 and 7.2.
	ReqCreateProcess kfd.Request = 0x00004B27
	ReqProfiler      kfd.Request = 0xC0104B28
)

// The exception codes beside those of package kfd.
const (
	ECQueueWaveAbort           kfd.ExceptionCode = 1
	ECQueueWaveTrap            kfd.ExceptionCode = 2
	ECQueueWaveMemoryViolation kfd.ExceptionCode = 5
	ECDeviceQueueDelete        kfd.ExceptionCode = 32
	ECDeviceMemoryViolation    kfd.ExceptionCode = 33
	ECDeviceNew                kfd.ExceptionCode = 36
	ECProcessDeviceRemove      kfd.ExceptionCode = 49
)

// The classes of exceptions by their source.
const (
	ExceptionsOfQueue   kfd.ExceptionMask = 0x607f803f
	ExceptionsOfDevice  kfd.ExceptionMask = 0xf80000000
	ExceptionsOfProcess kfd.ExceptionMask = 0x1800000000000
)

// The operations of a DBG_TRAP call beside those of package kfd.
const (
	TrapSetExceptionsEnabled  kfd.TrapOp = 3
	TrapSetWaveLaunchOverride kfd.TrapOp = 4
	TrapSetWaveLaunchMode     kfd.TrapOp = 5
	TrapSetNodeAddressWatch   kfd.TrapOp = 8
	TrapClearNodeAddressWatch kfd.TrapOp = 9
	TrapSetFlags              kfd.TrapOp = 10
)

// GraceDefault is USE_DEFAULT_GRACE_PERIOD: the firmware's own grace period.
const GraceDefault = ^uint32(0)

// The steps of a checkpoint beside those of package kfd.
const (
	CRIUOpCheckpoint kfd.CRIUOp = 1
	CRIUOpRestore    kfd.CRIUOp = 3
	CRIUOpResume     kfd.CRIUOp = 4
)

// The events of a GPU node beside those of package kfd.
const (
	SMIVMFault      kfd.SMIEventID = 1
	SMIGPUPreReset  kfd.SMIEventID = 3
	SMIGPUPostReset kfd.SMIEventID = 4
	// SMIProcessStart and SMIProcessEnd came between 6.12 and 7.2.
	SMIProcessStart kfd.SMIEventID = 12
	SMIProcessEnd   kfd.SMIEventID = 13
)

// The reasons of evictions beside those of package kfd.
const (
	TriggerSVM         kfd.SMITrigger = 0
	TriggerUserptr     kfd.SMITrigger = 1
	TriggerSuspend     kfd.SMITrigger = 3
	TriggerCRIURestore kfd.SMITrigger = 5
)
