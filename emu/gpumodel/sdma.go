package gpumodel

// sdmaLayout is where things are in an SDMA MQD, in dwords. The dump of a hardware
// slot has its registers in the same order, where it has them.
type sdmaLayout struct {
	// words is the length of the MQD; the last two are the numbers of engine and slot.
	words int
	// rptrHigh and rptrLow are where the read pointer is written back.
	rptrHigh, rptrLow int
	// status is the context status, where the dump of a slot has it.
	status int
	// enable holds the bit that lets the doorbell in, offset where the doorbell is.
	enable, offset int
	dummy          int
	// pollHigh and pollLow are the address of the write pointer; the driver sets it
	// from v11 on.
	pollHigh, pollLow int
	// stretches are the dumped registers of a slot, in dwords from the first.
	stretches []stretch
	// base is the byte address of the first register of an engine's first slot.
	base func(engine int) uint32
}

// sdmaStride is how far it is to that of the next slot.
const sdmaStride = 0x160

// maxSDMAWords is the most words an MQD or a slot of SDMA has.
const maxSDMAWords = 130

// stretch is n registers one after the other.
type stretch struct{ from, n int }

// sdma returns the layout for the GPU's generation (v9_structs.h to v12_structs.h, and
// hqd_sdma_dump of amdgpu_amdkfd_*.c).
func (s *Spec) sdma() *sdmaLayout {
	switch s.major() {
	case 9:
		if s.GFX/100 == 904 || s.GFX/100 == 905 {
			return &sdmaGFX942
		}
		return &sdmaGFX9
	case 10:
		if s.GFX/100 == 1003 {
			return &sdmaGFX103
		}
		return &sdmaGFX10
	case 11:
		return &sdmaGFX11
	}
	return &sdmaGFX12
}

var (
	sdmaGFX9   = sdmaV9(128, 10, sdmaBaseGFX9)
	sdmaGFX942 = sdmaV9(128, 12, sdmaBaseGFX9)
	sdmaGFX10  = sdmaV9(130, 10, sdmaBaseGFX11)
	sdmaGFX103 = sdmaV9(130, 12, sdmaBaseGFX11)
	sdmaGFX11  = sdmaLayout{
		words: 128, rptrHigh: 7, rptrLow: 8, status: 16, enable: 17, offset: 19, dummy: 25, pollHigh: 26, pollLow: 27,
		stretches: []stretch{{0x00, 7}, {0x08, 11}, {0x29, 1}, {0x2b, 12}, {0x40, 12}}, base: sdmaBaseGFX11,
	}
	sdmaGFX12 = sdmaLayout{
		words: 128, rptrHigh: 8, rptrLow: 7, status: 48, enable: 15, offset: 17, dummy: 23, pollHigh: 25, pollLow: 24,
		stretches: []stretch{{0x00, 49}}, base: sdmaBaseGFX11,
	}
)

// sdmaV9 is the layout of v9 and v10; last is how many registers the last stretch has.
func sdmaV9(words, last int, base func(engine int) uint32) sdmaLayout {
	return sdmaLayout{
		words: words, rptrHigh: 8, rptrLow: 9, status: 17, enable: 18, offset: 22, dummy: 27, pollHigh: 28, pollLow: 29,
		stretches: []stretch{{0x00, 19}, {0x28, 6}, {0x2f, 7}, {0x40, last}}, base: base,
	}
}

// sdmaBaseGFX9 is what an MI308X shows for its eight engines; the pattern is assumed to
// go on, and to hold for others of gfx9.
func sdmaBaseGFX9(engine int) uint32 {
	return [...]uint32{0x4e40, 0x6640, 0xe_54c0, 0xe_64c0}[engine%4] + uint32(engine/4*registersPerAID)
}

// sdmaBaseGFX11 is regSDMA0_QUEUE0_RB_CNTL and regSDMA1_QUEUE0_RB_CNTL of gfx11 and
// gfx12 (gc_11_0_0_offset.h), and assumed for gfx10.
func sdmaBaseGFX11(engine int) uint32 { return uint32(0x4b80 + engine*0x1800) }

// Bits of SDMA registers.
const (
	sdmaRBEnable       = 1 << 0
	sdmaWriteBack      = 1<<12 | 6<<16
	sdmaPollByFirmware = 1 << 11
	sdmaVMIDShift      = 24
	sdmaIdle           = 1 << 2
	sdmaSelected       = 1 << 0
	sdmaDoorbellEnable = 1 << 28
	sdmaDummy          = 0xf
	sdmaEmptyCntl      = 4 << 16
	// sdmaWriteBackWhenIdle stands in the lowest bit of the address the read pointer is
	// written to.
	sdmaWriteBackWhenIdle = 1
)

// sdmaWords writes what an SDMA MQD and a slot have in common (update_mqd_sdma).
func (t *dialect) sdmaWords(w []uint32, s *setup, at place) {
	l := t.sdma
	w[0] = log2(s.ring.bytes/4)<<1 | sdmaWriteBack
	put(w, 1, s.ring.base>>8)
	w[l.rptrHigh], w[l.rptrLow] = uint32(s.read>>32), uint32(s.read)
	w[l.offset] = s.doorbell << 2
	w[l.dummy] = sdmaDummy
	if t.major >= 11 {
		w[0] |= sdmaPollByFirmware
		w[l.pollHigh], w[l.pollLow] = uint32(s.write>>32), uint32(s.write)
	}
	if at.known {
		w[0] |= uint32(at.vmid) << sdmaVMIDShift
		// Both count bytes and do not wrap.
		put(w, 3, at.read)
		put(w, 5, at.write)
	}
}

// sdmaMQD writes the MQD of an SDMA queue.
func (t *dialect) sdmaMQD(w []uint32, m *memory) {
	t.sdmaWords(w, m.setup, m.saved)
	w[t.sdma.words-2], w[t.sdma.words-1] = uint32(m.engine), uint32(m.rlc)
}

// sdmaRegisters writes the registers of an SDMA slot. Of a queue that left, the ring stays
// enabled, but there is no doorbell (kgd_gfx_v9_4_3_hqd_sdma_destroy), and an MI308X shows
// no positions.
func (t *dialect) sdmaRegisters(w []uint32, s *slot) {
	l := t.sdma
	w[l.status] = sdmaIdle
	if s.was == nil {
		w[0] = sdmaEmptyCntl
		w[l.dummy] = sdmaDummy
		if t.major == 9 {
			w[7], w[9], w[10], w[30] = 0x40_3000, 1, 0x100, 0x4000
		}
		return
	}
	t.sdmaWords(w, s.was, s.at)
	w[0] |= sdmaRBEnable
	w[l.rptrLow] |= sdmaWriteBackWhenIdle
	if s.q == nil {
		w[l.offset] = 0
		put(w, 3, 0)
		put(w, 5, 0)
		return
	}
	w[l.enable] = sdmaDoorbellEnable
	if s.at.read != s.at.write {
		w[l.status] = sdmaSelected
	}
}
