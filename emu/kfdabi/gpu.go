package kfdabi

import (
	"structs"

	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// The structures of a process's settings of a GPU and of queries about it.

// SetMemoryPolicyArgs is struct kfd_ioctl_set_memory_policy_args.
type SetMemoryPolicyArgs struct {
	_                     structs.HostLayout
	AlternateApertureBase uint64
	AlternateApertureSize uint64
	GPUID                 uint32
	DefaultPolicy         uint32 // of the CachePolicy constants
	AlternatePolicy       uint32
	MiscProcessFlag       uint32 // padding before 1.18
}

// KFD_IOC_CACHE_POLICY_*.
const (
	CachePolicyCoherent    uint32 = 0
	CachePolicyNonCoherent uint32 = 1
)

// ClockCountersArgs is struct kfd_ioctl_get_clock_counters_args. The driver sets all
// fields except GPUID.
type ClockCountersArgs struct {
	_                  structs.HostLayout
	GPUClockCounter    uint64
	CPUClockCounter    uint64 // ns of CLOCK_MONOTONIC_RAW
	SystemClockCounter uint64 // ns of CLOCK_BOOTTIME
	SystemClockFreq    uint64 // Hz
	GPUID              uint32
	Pad                uint32
}

// ProcessAperturesArgs is struct kfd_ioctl_get_process_apertures_args, which has
// NUM_OF_SUPPORTED_GPUS entries. ProcessAperturesNewArgs replaces it.
type ProcessAperturesArgs struct {
	_                structs.HostLayout
	ProcessApertures [7]ProcessDeviceApertures
	NumOfNodes       uint32
	Pad              uint32
}

// SetScratchBackingVAArgs is struct kfd_ioctl_set_scratch_backing_va_args.
type SetScratchBackingVAArgs struct {
	_      structs.HostLayout
	VAAddr uint64
	GPUID  uint32
	Pad    uint32
}

// TileConfigArgs is struct kfd_ioctl_get_tile_config_args.
type TileConfigArgs struct {
	_                  structs.HostLayout
	TileConfigPtr      kfd.Pointer // uint32s
	MacroTileConfigPtr kfd.Pointer // uint32s
	// The lengths of the arrays, and in the result the number of entries filled in.
	NumTileConfigs      uint32
	NumMacroTileConfigs uint32
	GPUID               uint32
	GBAddrConfig        uint32 // set by the driver
	NumBanks            uint32 // set by the driver
	NumRanks            uint32 // set by the driver
}

// SetTrapHandlerArgs is struct kfd_ioctl_set_trap_handler_args.
type SetTrapHandlerArgs struct {
	_       structs.HostLayout
	TBAAddr uint64
	TMAAddr uint64
	GPUID   uint32
	Pad     uint32
}

// QueueWaveStateArgs is struct kfd_ioctl_get_queue_wave_state_args.
type QueueWaveStateArgs struct {
	_                structs.HostLayout
	CtlStackAddress  kfd.Pointer
	CtlStackUsedSize uint32 // bytes, set by the driver
	SaveAreaUsedSize uint32 // bytes, set by the driver
	QueueID          uint32
	Pad              uint32
}
