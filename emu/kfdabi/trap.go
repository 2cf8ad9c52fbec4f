package kfdabi

import (
	"structs"

	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// The structures of a debugger's calls about exceptions, GPUs, waves, addresses and flags.

// TrapSetExceptionsEnabledArgs is struct kfd_ioctl_dbg_trap_args with the arm
// set_exceptions_enabled, struct kfd_ioctl_dbg_trap_set_exceptions_enabled_args.
type TrapSetExceptionsEnabledArgs struct {
	_             structs.HostLayout
	PID           uint32
	Op            kfd.TrapOp
	ExceptionMask kfd.ExceptionMask
	_             [16]byte
}

// TrapDeviceSnapshotArgs is struct kfd_ioctl_dbg_trap_args with the arm
// device_snapshot, struct kfd_ioctl_dbg_trap_device_snapshot_args.
type TrapDeviceSnapshotArgs struct {
	_              structs.HostLayout
	PID            uint32
	Op             kfd.TrapOp
	ExceptionMask  kfd.ExceptionMask
	SnapshotBufPtr kfd.Pointer
	NumDevices     uint32
	EntrySize      uint32
}

// TrapSetWaveLaunchOverrideArgs is struct kfd_ioctl_dbg_trap_args with the arm
// launch_override, struct kfd_ioctl_dbg_trap_set_wave_launch_override_args.
type TrapSetWaveLaunchOverrideArgs struct {
	_            structs.HostLayout
	PID          uint32
	Op           kfd.TrapOp
	OverrideMode uint32
	// EnableMask is the traps to enable, and in the result those enabled before.
	EnableMask uint32
	// SupportRequestMask is the traps to change, and in the result those that all GPUs
	// support.
	SupportRequestMask uint32
	Pad                uint32
	_                  [8]byte
}

// TrapSetWaveLaunchModeArgs is struct kfd_ioctl_dbg_trap_args with the arm
// launch_mode, struct kfd_ioctl_dbg_trap_set_wave_launch_mode_args.
type TrapSetWaveLaunchModeArgs struct {
	_          structs.HostLayout
	PID        uint32
	Op         kfd.TrapOp
	LaunchMode uint32
	Pad        uint32
	_          [16]byte
}

// TrapSetNodeAddressWatchArgs is struct kfd_ioctl_dbg_trap_args with the arm
// set_node_address_watch, struct kfd_ioctl_dbg_trap_set_node_address_watch_args.
type TrapSetNodeAddressWatchArgs struct {
	_       structs.HostLayout
	PID     uint32
	Op      kfd.TrapOp
	Address uint64
	Mode    uint32
	Mask    uint32
	GPUID   uint32
	// ID is the watch point, set by the driver.
	ID uint32
}

// TrapClearNodeAddressWatchArgs is struct kfd_ioctl_dbg_trap_args with the arm
// clear_node_address_watch, struct kfd_ioctl_dbg_trap_clear_node_address_watch_args.
type TrapClearNodeAddressWatchArgs struct {
	_     structs.HostLayout
	PID   uint32
	Op    kfd.TrapOp
	GPUID uint32
	ID    uint32
	_     [16]byte
}

// TrapSetFlagsArgs is struct kfd_ioctl_dbg_trap_args with the arm set_flags, struct
// kfd_ioctl_dbg_trap_set_flags_args.
type TrapSetFlagsArgs struct {
	_   structs.HostLayout
	PID uint32
	Op  kfd.TrapOp
	// Flags is the new flags, and in the result the old ones.
	Flags uint32
	Pad   uint32
	_     [16]byte
}
