package workload

import "encoding/binary"

// Offsets in amd_queue_t (amd_hsa_queue.h) of what the packet processor needs for scratch.
const (
	offMaxCU         = 72
	offMaxWave       = 76
	offTmpring       = 140
	offScratchBuffer = 144
	offScratchBase   = 160
	offScratchBytes  = 168
	offScratchLane   = 176
)

// scratchAlign is the alignment of scratch memory (SCRATCH_ALIGN of libhsakmt), and
// scratchUnit that of one wave's part of it, in bytes.
const (
	scratchAlign = 0x10000
	scratchUnit  = 1024
)

// newScratch allocates scratch memory for every wave that the GPU can run at once, with some
// bytes for each lane, and describes it in an amd_queue_t.
//
// The queue's descriptor is the place for gfx90a and for gfx942 and later alike. The packet
// processor loads what waves begin with from it: the buffer descriptor or FLAT_SCRATCH_INIT in
// scalar registers, from which the prologue of a gfx90a kernel computes its own
// (LLVM's AMDGPUUsage, "Initial Kernel Execution State"), and FLAT_SCRATCH itself of gfx942, which a
// kernel cannot write ("architected flat scratch"). The fields are those of
// AqlQueue::InitScratchSRD of ROCm's runtime. No call of the driver is needed: of
// SET_SCRATCH_BACKING_VA gfx9 uses nothing (kgd_gfx_v9 has no set_scratch_backing_va).
func (d *device) newScratch(queue []byte, private uint32) error {
	s := d.scratchOf(private)
	at, err := d.allocateVRAM(d.gpu, []uint32{d.gpu}, int(s.bytes*d.xccs()+scratchAlign))
	if err != nil {
		return err
	}
	s.put(queue, (at+scratchAlign-1)&^(scratchAlign-1))
	binary.LittleEndian.PutUint32(queue[offMaxCU:], uint32(d.cus()-1))
	binary.LittleEndian.PutUint32(queue[offMaxWave:], uint32(d.node["max_waves_per_simd"]*d.node["simd_per_cu"]-1))
	return nil
}

// scratch is the scratch memory of each XCC.
type scratch struct {
	lane  uint32 // bytes of a lane
	wave  uint64 // units of a wave
	waves uint64
	bytes uint64
}

// scratchOf returns how much scratch a queue needs whose kernels have some bytes for each lane.
func (d *device) scratchOf(private uint32) scratch {
	const lanesOfWave = 64
	wave := (uint64(private)*lanesOfWave + scratchUnit - 1) / scratchUnit
	waves := d.cus() / d.xccs() * d.node["max_slots_scratch_cu"]
	return scratch{uint32(wave * scratchUnit / lanesOfWave), wave, waves, waves * wave * scratchUnit}
}

// put describes scratch memory at an address.
func (s scratch) put(queue []byte, at uint64) {
	const (
		swizzle = 1 << 31
		// word3 is DST_SEL_X to W, BUF_NUM_FORMAT_UINT, BUF_DATA_FORMAT_32, elements of 4 bytes,
		// 64 lanes, ADD_TID_ENABLE (SQ_BUF_RSRC_WORD3).
		word3 = 4 | 5<<3 | 6<<6 | 7<<9 | 4<<12 | 4<<15 | 1<<19 | 3<<21 | 1<<23
	)
	le := binary.LittleEndian
	le.PutUint32(queue[offTmpring:], uint32(s.waves|s.wave<<12)) // COMPUTE_TMPRING_SIZE
	for i, word := range []uint32{uint32(at), uint32(at>>32) | swizzle, uint32(s.bytes), word3} {
		le.PutUint32(queue[offScratchBuffer+4*i:], word)
	}
	le.PutUint64(queue[offScratchBase:], at)
	le.PutUint64(queue[offScratchBytes:], s.bytes)
	le.PutUint32(queue[offScratchLane:], s.lane)
}
