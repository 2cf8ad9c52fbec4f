package debugfs

import "fmt"

// SDMALayout is where the words of an SDMA queue are. Register i of a slot is
// dword i of the MQD in each.
type SDMALayout uint8

// The layouts.
const (
	// SDMAUnknown: only what is the same in all of them is decoded.
	SDMAUnknown SDMALayout = iota
	// SDMAGFX9 is that of gfx9 and of gfx10.
	SDMAGFX9
	SDMAGFX11
	SDMAGFX12
)

// String returns the word used in the output.
func (l SDMALayout) String() string {
	switch l {
	case SDMAGFX9:
		return "gfx9/gfx10"
	case SDMAGFX11:
		return "gfx11"
	case SDMAGFX12:
		return "gfx12"
	case SDMAUnknown:
	}
	return "unknown"
}

// sdmaTable says which dword is what (v9_structs.h to v12_structs.h).
type sdmaTable struct {
	readHi, readLo, writeHi, writeLo         int
	doorbell, doorbellOffset, dummy, context int
}

var sdmaTables = [...]sdmaTable{
	SDMAGFX9:  {readHi: 8, readLo: 9, writeHi: 28, writeLo: 29, doorbell: 18, doorbellOffset: 22, dummy: 27, context: 17},
	SDMAGFX11: {readHi: 7, readLo: 8, writeHi: 26, writeLo: 27, doorbell: 17, doorbellOffset: 19, dummy: 25, context: 16},
	// gfx12 has the status in the registers only, behind the end of the other dwords.
	SDMAGFX12: {readHi: 8, readLo: 7, writeHi: 25, writeLo: 24, doorbell: 15, doorbellOffset: 17, dummy: 23, context: 48},
}

// The dwords all layouts share.
const (
	sdmaControl = 0
	sdmaBase    = 1 // and 2
	sdmaRptr    = 3 // and 4
	sdmaWptr    = 5 // and 6
	// sdmaMQDBase, and the one behind it, are among the registers of gfx12.
	sdmaMQDBase = 44
	// sdmaLeast is the number of words all layouts need.
	sdmaLeast = 30
)

// sdmaDummy is what the driver sets the dummy register to (SDMA_RLC_DUMMY_DEFAULT):
// each layout has it elsewhere.
const sdmaDummy = 0xf

// sdmaRegisters tells the layout from the number of registers of a slot: 19+6+7+10
// or 19+6+7+12 on gfx9 and gfx10, 7+11+1+12+12 on gfx11, 49 in a row on gfx12.
func sdmaRegisters(n int) SDMALayout {
	switch n {
	case 42, 44:
		return SDMAGFX9
	case 43:
		return SDMAGFX11
	case 49:
		return SDMAGFX12
	}
	return SDMAUnknown
}

// SDMA is a queue of a DMA engine, of the image in memory (MQD) or of the
// registers of a slot (HQD). Positions of an image are of the time the queue was
// last taken off the hardware.
type SDMA struct {
	// Words is what it was decoded from: shared, not to be changed.
	Words []uint32
	// Image tells that it is an image in memory.
	Image bool
	// Layout is how it was read. Inferred tells that this was not said but seen from
	// the number of words or from the place of a constant. Where it is SDMAUnknown,
	// what follows the positions is not known.
	Layout   SDMALayout
	Inferred bool

	// Enabled is RB_ENABLE. It stays set in a slot whose queue has left.
	Enabled bool
	// VMID is the address space of the process while it is on the GPU.
	VMID int
	// RingBase is the virtual address of the ring in the owner, RingBytes its size.
	RingBase, RingBytes uint64
	// ReadPosition and WritePosition are in bytes, and never wrap, by how the driver
	// loads them; that the hardware keeps to it is not verified.
	ReadPosition, WritePosition uint64

	// ReadPointer and WritePointer are the virtual addresses in the owner of the
	// positions as the program sees them; 0 is not known: the driver does not write
	// the latter on gfx9 and gfx10.
	ReadPointer, WritePointer uint64
	// Doorbell is the doorbell's place in the GPU's doorbells, in dwords.
	// DoorbellEnabled is set in a slot that listens to it.
	Doorbell        uint32
	DoorbellEnabled bool
	// Context is CONTEXT_STATUS, Idle its bit of that name; both are known where
	// ContextKnown.
	Context      uint32
	ContextKnown bool
	Idle         bool
	// MQD is the GPU address of the image: 0 where it is not known, that is,
	// everywhere but in slots of gfx12.
	MQD uint64
	// Engine and Queue are where the driver put the queue, of an image: -1 where they
	// are not known.
	Engine, Queue int
}

// DecodeSDMA tells the meaning of the registers of an SDMA slot or of an SDMA MQD.
// gfx is the gfx_target_version of the GPU, such as 90402, from 90000 on; 0 is
// unknown: then Layout and Inferred say what could be told from the words. The
// words are kept, not copied.
func DecodeSDMA(words []uint32, gfx uint32) (SDMA, error) {
	if len(words) < sdmaLeast {
		return SDMA{}, fmt.Errorf("%d words are neither the registers of an SDMA slot nor an SDMA MQD of %d words", len(words), sdmaWords)
	}
	s := SDMA{Words: words, Image: len(words) >= sdmaWords, Engine: -1, Queue: -1}
	inferred := inferSDMA(words)
	switch {
	case gfx == 0:
		s.Layout, s.Inferred = inferred, true
	case gfx < 90000:
		return SDMA{}, fmt.Errorf("gfx_target_version %d is before gfx9, whose SDMA queues are not known here", gfx)
	case gfx < 110000:
		s.Layout = SDMAGFX9
	case gfx < 120000:
		s.Layout = SDMAGFX11
	case gfx < 130000:
		s.Layout = SDMAGFX12
	}
	if by := sdmaRegisters(len(words)); gfx != 0 && by != SDMAUnknown && s.Layout != SDMAUnknown && by != s.Layout {
		return SDMA{}, fmt.Errorf("%d words are an SDMA queue of %s, not of gfx_target_version %d", len(words), by, gfx)
	}
	control := words[sdmaControl]
	s.Enabled = control&1 != 0
	s.VMID = int(control >> 24 & 0xf)
	s.RingBytes = 4 << (control >> 1 & 0x1f)
	s.RingBase = wide(words, sdmaBase) << 8
	s.ReadPosition, s.WritePosition = wide(words, sdmaRptr), wide(words, sdmaWptr)
	if s.Layout != SDMAUnknown {
		s.rest(sdmaTables[s.Layout])
	}
	// The last two dwords of an image are the driver's own. Of gfx10 alone they are
	// 128 and 129.
	isGFX10 := gfx/10000 == 10
	if n := len(words); n == sdmaWords && !isGFX10 || n == sdmaWordsLarge && (isGFX10 || gfx == 0) {
		s.Engine, s.Queue = int(words[n-2]), int(words[n-1])
	}
	return s, nil
}

// rest tells the meaning of the words that are elsewhere in each layout.
func (s *SDMA) rest(t sdmaTable) {
	w := s.Words
	address := func(hi, lo int) uint64 {
		return uint64(w[hi])<<32 | uint64(w[lo]&^3) // the lower two bits are flags
	}
	s.ReadPointer, s.WritePointer = address(t.readHi, t.readLo), address(t.writeHi, t.writeLo)
	s.DoorbellEnabled = w[t.doorbell]&(1<<28) != 0
	s.Doorbell = w[t.doorbellOffset] & 0x0ffffffc >> 2
	switch {
	case s.Image && s.Layout == SDMAGFX12:
		// The image has no status, and no address of its own that the driver writes.
	case t.context < len(w):
		s.Context, s.ContextKnown = w[t.context], true
		s.Idle = s.Context&(1<<2) != 0
		if s.Layout == SDMAGFX12 {
			s.MQD = wide(w, sdmaMQDBase)
		}
	}
}

// inferSDMA tells the layout from the words themselves.
func inferSDMA(words []uint32) SDMALayout {
	if l := sdmaRegisters(len(words)); l != SDMAUnknown {
		return l
	}
	if len(words) == sdmaWordsLarge {
		return SDMAGFX9
	}
	found := SDMAUnknown
	for l := SDMAGFX9; l <= SDMAGFX12; l++ {
		if words[sdmaTables[l].dummy] != sdmaDummy {
			continue
		}
		if found != SDMAUnknown {
			return SDMAUnknown
		}
		found = l
	}
	return found
}
