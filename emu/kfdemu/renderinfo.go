package kfdemu

import (
	"encoding/binary"
	"structs"
	"syscall"
)

// Queries of AMDGPU_INFO (include/uapi/drm/amdgpu_drm.h).
const (
	infoAccelWorking  = 0x00
	infoBytesMoved    = 0x0f
	infoVRAMUsage     = 0x10
	infoGTTUsage      = 0x11
	infoVRAMGTT       = 0x14
	infoReadMMRReg    = 0x15
	infoDevInfo       = 0x16
	infoVisVRAMUsage  = 0x17
	infoEvictions     = 0x18
	infoMemory        = 0x19
	infoCPUPageFaults = 0x1e
	infoVRAMLost      = 0x1f
)

// maxRegisters is the most registers of a query (amdgpu_info_ioctl).
const maxRegisters = 128

// info is AMDGPU_INFO (amdgpu_info_ioctl). struct drm_amdgpu_info has the address and the
// size of the answer, the query, and its parameters.
func info(args []byte, memory Memory, n RenderNode) syscall.Errno {
	le := binary.LittleEndian
	address, size, query := le.Uint64(args), le.Uint32(args[8:]), le.Uint32(args[12:])
	if address == 0 || size == 0 {
		return syscall.EINVAL
	}
	var answer any
	switch query {
	case infoAccelWorking:
		answer = uint32(1)
	case infoReadMMRReg:
		count := le.Uint32(args[20:])
		if count > maxRegisters {
			return syscall.EINVAL
		}
		// There are no registers here.
		answer = make([]uint32, count)
	case infoDevInfo:
		answer = n.info()
	case infoVRAMGTT:
		answer = [3]uint64{n.VRAM, n.VRAM, n.GTT}
	case infoMemory:
		answer = [3]heap{n.heap(n.VRAM), n.heap(n.VRAM), n.heap(n.GTT)}
	case infoVRAMUsage, infoVisVRAMUsage, infoGTTUsage, infoBytesMoved, infoEvictions, infoCPUPageFaults:
		answer = uint64(0)
	case infoVRAMLost:
		answer = uint32(0)
	default:
		return syscall.EINVAL
	}
	b, err := binary.Append(nil, le, answer)
	if err != nil {
		panic("kfdemu: " + err.Error()) // a size that is not fixed
	}
	if err := memory.WriteAt(b[:min(len(b), int(size))], address); err != nil {
		return syscall.EFAULT
	}
	return 0
}

// heap is struct drm_amdgpu_heap_info.
type heap struct {
	_                       structs.HostLayout
	Total, Usable, Used, Up uint64
}

// heap returns unused memory.
func (RenderNode) heap(size uint64) heap {
	return heap{Total: size, Usable: size, Up: size / 4 * 3}
}

// deviceInfo is struct drm_amdgpu_info_device of Linux 6.12.
type deviceInfo struct {
	_                         structs.HostLayout
	DeviceID, ChipRev         uint32
	ExternalRev, PCIRev       uint32
	Family                    uint32
	Engines, ArraysPerEngine  uint32
	CounterKHz                uint32
	EngineKHz, MemoryKHz      uint64
	ActiveCUs, AlwaysOnMask   uint32
	CUBitmap                  [4][4]uint32
	RBMask, RBs               uint32
	HWContexts, PCIeGen       uint32
	Flags                     uint64
	VAStart, VAEnd            uint64
	VAAlignment, Fragment     uint32
	GARTPage, CERAM           uint32
	VRAMType, VRAMWidth       uint32
	VCEHarvest, OffchipLDS    uint32
	PrimitiveBuffers          [4]uint64
	PrimitiveBufferSizes      [4]uint32
	WaveSize, VGPRs           uint32
	CUsPerArray, TCCs         uint32
	GSDepths                  [2]uint32
	GSWaves, PCIeLanes        uint32
	AlwaysOnBitmap            [4][4]uint32
	HighVAStart, HighVAEnd    uint64
	TileSteering, _           uint32
	TCCDisabled               uint64
	MinEngineKHz, MinMemoryHz uint64
	CacheSizes                [6]uint32
	MALL                      uint64
	RBMaskHigh                uint32
	ShadowSizes               [4]uint32
	_                         uint32
}

// Values of the driver for all kinds of GPUs here.
const (
	vramHBM, vramGDDR6 = 6, 9
	// The first 2 MiB belong to the driver (AMDGPU_VA_RESERVED_BOTTOM). The gap of 48 bit
	// addresses is between the low ones and the high ones (AMDGPU_GMC_HOLE_START).
	vaReserved   = 2 << 20
	vaHole       = 1 << 47
	highVAStart  = 0xffff_8000_0000_0000
	highVAEnd    = 0xffff_ffff_ffe0_0000
	gpuPage      = 4096
	fragmentSize = 2 << 20
	counterKHz   = 100_000
)

// family returns the number of the GPU's family for libdrm (AMDGPU_FAMILY_*).
func (n RenderNode) family() uint32 {
	switch major := n.GFX / 10000; {
	case major >= 12:
		return 152 // GC_12_0_0
	case major == 11:
		return 145 // GC_11_0_0
	case major == 10:
		return 143 // NV
	}
	return 141 // AI
}

func (n RenderNode) info() deviceInfo {
	i := deviceInfo{
		DeviceID: n.PCIID, ChipRev: 1, ExternalRev: 0x47, Family: n.family(),
		Engines: n.Arrays / max(n.ArraysPerEngine, 1), ArraysPerEngine: n.ArraysPerEngine, CounterKHz: counterKHz,
		EngineKHz: n.EngineMHz * 1000, MemoryKHz: n.MemoryMHz * 1000, ActiveCUs: n.SIMDs / max(n.SIMDsPerCU, 1),
		HWContexts: 8, PCIeGen: 5, VAStart: vaReserved, VAEnd: vaHole, VAAlignment: gpuPage, Fragment: fragmentSize, GARTPage: gpuPage,
		VRAMType: vramHBM, VRAMWidth: uint32(n.MemoryWidth), WaveSize: n.WaveSize, VGPRs: 256, CUsPerArray: n.CUsPerArray, TCCs: 16,
		PCIeLanes: 16, HighVAStart: highVAStart, HighVAEnd: highVAEnd,
	}
	if n.GFX >= 100000 {
		i.VRAMType = vramGDDR6
	}
	return i
}
