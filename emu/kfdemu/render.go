package kfdemu

import (
	"encoding/binary"
	"syscall"
)

// Numbers of the device files: DRM's is fixed (drm_drv.c), KFD's is one that a host may
// assign (kfd_chardev_init).
const (
	DRMMajor = 226
	KFDMajor = 236
)

// RenderNode is a render node: the amdgpu driver's other device file of a GPU. It answers
// what ROCm's libraries ask: who the driver is, which GPU it is, how much memory there is.
// It has no buffers and no command submission: ROCm uses KFD's. The driver's description
// of itself says that the GPU is emulated.
type RenderNode struct {
	// PCIID is its PCI device id, GFX its gfx_target_version.
	PCIID, GFX uint32
	// From the topology: SIMDs in total and per CU, shader arrays in total and per engine,
	// CUs per array, and lanes of a wave.
	SIMDs, SIMDsPerCU, Arrays, ArraysPerEngine, CUsPerArray, WaveSize uint32
	// Clocks in MHz and the width of the memory in bits.
	EngineMHz, MemoryMHz, MemoryWidth uint64
	// VRAM is its memory, GTT the host memory that it may use, in bytes.
	VRAM, GTT uint64
}

// Memory is the memory of the calling process.
type Memory interface {
	// ReadAt and WriteAt move all of p, or fail.
	ReadAt(p []byte, addr uint64) error
	WriteAt(p []byte, addr uint64) error
}

// Parts of an ioctl request (include/uapi/asm-generic/ioctl.h).
const (
	dirWrite, dirRead = 1 << 30, 1 << 31
	maxArgs           = 1<<14 - 1
	ioctlType         = 'd'
)

// Numbers of ioctls (include/uapi/drm/drm.h, amdgpu_drm.h).
const (
	nrVersion    = 0x00
	nrGetClient  = 0x05
	nrGetCap     = 0x0c
	nrAMDGPUInfo = 0x45
)

// command is an ioctl that the node answers: its argument's size and direction in the
// driver, and its implementation.
type command struct {
	size      int
	direction uint32
	do        func(args []byte, memory Memory, n RenderNode) syscall.Errno
}

var commands = map[uint32]command{
	nrVersion: {64, dirRead | dirWrite, version},
	// drm_ioctl_permit: a render node has no legacy calls.
	nrGetClient:  {40, dirRead | dirWrite, func([]byte, Memory, RenderNode) syscall.Errno { return syscall.EACCES }},
	nrGetCap:     {16, dirRead | dirWrite, capability},
	nrAMDGPUInfo: {32, dirWrite, info},
}

// Ioctl answers an ioctl whose argument is at arg and returns 0 or the errno for the
// caller. What is not emulated is EINVAL, as is an unknown number in the driver
// (drm_ioctl).
func (n RenderNode) Ioctl(req uint32, arg uint64, memory Memory) syscall.Errno {
	if req>>8&0xff != ioctlType {
		return syscall.ENOTTY
	}
	c, ok := commands[req&0xff]
	if !ok {
		return syscall.EINVAL
	}
	// The caller's struct may be older or newer than the driver's: fields that the caller
	// does not have are 0, and fields that the driver does not have are ignored.
	size := int(req >> 16 & maxArgs)
	args := make([]byte, max(size, c.size))
	direction := req & c.direction
	if direction&dirWrite != 0 {
		if err := memory.ReadAt(args[:size], arg); err != nil {
			return syscall.EFAULT
		}
	}
	errno := c.do(args, memory, n)
	if direction&dirRead != 0 {
		// Also after an error.
		if err := memory.WriteAt(args[:size], arg); err != nil {
			return syscall.EFAULT
		}
	}
	return errno
}

// version is DRM_IOCTL_VERSION (drm_version). struct drm_version has the version in three
// ints, then length and address of three texts.
func version(args []byte, memory Memory, _ RenderNode) syscall.Errno {
	le := binary.LittleEndian
	// Those of Linux 6.12.
	const major, minor = 3, 59
	le.PutUint32(args[0:], major)
	le.PutUint32(args[4:], minor)
	le.PutUint32(args[8:], 0)
	for i, text := range []string{"amdgpu", "20150101", "AMD GPU (EMULATED)"} {
		length, address := args[16+16*i:], args[24+16*i:]
		room := le.Uint64(length)
		le.PutUint64(length, uint64(len(text)))
		// drm_copy_field
		if n := min(room, uint64(len(text))); n > 0 && le.Uint64(address) != 0 {
			if err := memory.WriteAt([]byte(text[:n]), le.Uint64(address)); err != nil {
				return syscall.EFAULT
			}
		}
	}
	return 0
}

// Capabilities (include/uapi/drm/drm.h).
const (
	capPrime              = 0x5
	capTimestampMonotonic = 0x6
	capSyncobj            = 0x13
	capSyncobjTimeline    = 0x14

	primeImportExport = 1 | 2
)

// capability is DRM_IOCTL_GET_CAP (drm_getcap): those of a driver without modesetting.
func capability(args []byte, _ Memory, _ RenderNode) syscall.Errno {
	var value uint64
	switch binary.LittleEndian.Uint64(args) {
	case capTimestampMonotonic, capSyncobj, capSyncobjTimeline:
		value = 1
	case capPrime:
		value = primeImportExport
	default:
		return syscall.EOPNOTSUPP
	}
	binary.LittleEndian.PutUint64(args[8:], value)
	return 0
}
