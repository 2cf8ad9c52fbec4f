package debugfs

import (
	"fmt"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// SDMALayout is the layout of the words of an SDMA queue. In each of them register i of a
// slot is dword i of the MQD.
type SDMALayout uint8

// The layouts.
const (
	// SDMAUnknown is for queues of which only the common words are decoded.
	SDMAUnknown SDMALayout = iota
	// SDMAGFX9 is the layout of gfx9 and gfx10.
	SDMAGFX9
	SDMAGFX11
	SDMAGFX12
)

// String returns the name in the output.
func (l SDMALayout) String() string {
	return gpreempt.Word(l, "layout", "unknown", "gfx9/gfx10", "gfx11", "gfx12")
}

// MarshalText returns String.
func (l SDMALayout) MarshalText() ([]byte, error) { return []byte(l.String()), nil }

// sdmaTable contains the dwords of a layout (v9_structs.h to v12_structs.h).
type sdmaTable struct {
	readHi, readLo, writeHi, writeLo         int
	doorbell, doorbellOffset, dummy, context int
}

var sdmaTables = [...]sdmaTable{
	SDMAGFX9:  {readHi: 8, readLo: 9, writeHi: 28, writeLo: 29, doorbell: 18, doorbellOffset: 22, dummy: 27, context: 17},
	SDMAGFX11: {readHi: 7, readLo: 8, writeHi: 26, writeLo: 27, doorbell: 17, doorbellOffset: 19, dummy: 25, context: 16},
	// gfx12 has the status in the registers only, after the other dwords.
	SDMAGFX12: {readHi: 8, readLo: 7, writeHi: 25, writeLo: 24, doorbell: 15, doorbellOffset: 17, dummy: 23, context: 48},
}

// The dwords that all layouts have in common.
const (
	sdmaControl = 0
	sdmaBase    = 1 // and 2
	sdmaRptr    = 3 // and 4
	sdmaWptr    = 5 // and 6
	// sdmaMQDBase and the next are registers of gfx12.
	sdmaMQDBase = 44
	// sdmaLeast is the number of words that all layouts need.
	sdmaLeast = 30
)

// sdmaDummy is the driver's value of the dummy register (SDMA_RLC_DUMMY_DEFAULT), whose
// position differs between the layouts.
const sdmaDummy = 0xf

// sdmaRegisters returns the layout for the number of registers of a slot: 19+6+7+10
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

// SDMA is a queue of a DMA engine, decoded from the image in memory (MQD) or from the
// registers of a slot (HQD). Positions of an image are of the time when the queue was last
// unmapped.
type SDMA struct {
	// Words are the source: shared, and must not be changed.
	Words []uint32 `json:"-"`
	// Image reports that it is an image in memory.
	Image bool `json:"image"`
	// Layout is the layout for decoding. Inferred reports that it was not specified but
	// inferred from the number of words or from the position of a constant. With
	// SDMAUnknown, the fields after the positions are not set.
	Layout   SDMALayout `json:"layout"`
	Inferred bool       `json:"layout_inferred"`

	// Enabled is RB_ENABLE. It stays set in a slot whose queue was unmapped.
	Enabled bool `json:"enabled"`
	// VMID is the address space of the process while it is on the GPU.
	VMID int `json:"vmid"`
	// RingBase is the virtual address of the ring in the owner, RingBytes its size.
	RingBase  uint64 `json:"-"`
	RingBytes uint64 `json:"ring_bytes"`
	// ReadPosition and WritePosition are in bytes and never wrap, judging by the driver's
	// code; this is not verified on hardware.
	ReadPosition  uint64 `json:"read_position_bytes"`
	WritePosition uint64 `json:"write_position_bytes"`

	// ReadPointer and WritePointer are the virtual addresses in the owner of the positions
	// for the program; 0 is unknown: the driver does not write the latter on gfx9 and
	// gfx10.
	ReadPointer  uint64 `json:"-"`
	WritePointer uint64 `json:"-"`
	// Doorbell is the position in the GPU's doorbells, in dwords. DoorbellEnabled is set
	// in a slot that reacts to it.
	Doorbell        uint32 `json:"doorbell_dwords"`
	DoorbellEnabled bool   `json:"doorbell_enabled"`
	// Context is CONTEXT_STATUS, Idle its bit of that name; both are valid if
	// ContextKnown.
	Context      uint32 `json:"-"`
	ContextKnown bool   `json:"-"`
	Idle         bool   `json:"-"`
	// MQD is the GPU address of the image, known only in slots of gfx12; else 0.
	MQD uint64 `json:"-"`
	// Engine and Queue are the driver's choice for the queue, in an image: -1 when unknown.
	Engine int `json:"-"`
	Queue  int `json:"-"`
}

// DecodeSDMA decodes the registers of an SDMA slot or an SDMA MQD. gfx is the
// gfx_target_version of the GPU, such as 90402, from 90000 on; with 0 the layout is
// inferred from the words. The words are kept, not copied.
func DecodeSDMA(words []uint32, gfx uint32) (SDMA, error) {
	if len(words) < sdmaLeast {
		return SDMA{}, fmt.Errorf("%d words are neither the registers of an SDMA slot nor an SDMA MQD of %d words", len(words), sdmaMQDWords)
	}
	s := SDMA{Words: words, Image: len(words) >= sdmaMQDWords, Engine: -1, Queue: -1}
	inferred := inferSDMA(words)
	switch {
	case gfx == 0:
		s.Layout, s.Inferred = inferred, true
	case gfx < 90000:
		return SDMA{}, fmt.Errorf("gfx_target_version %d is before gfx9: its SDMA queues are not supported", gfx)
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
	// The last two dwords of an image are private to the driver: 128 and 129 on gfx10,
	// 126 and 127 on others.
	isGFX10 := gfx/10000 == 10
	if n := len(words); n == sdmaMQDWords && !isGFX10 || n == sdmaMQDWordsLarge && (isGFX10 || gfx == 0) {
		s.Engine, s.Queue = int(words[n-2]), int(words[n-1])
	}
	return s, nil
}

// rest decodes the words whose position differs between the layouts.
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

// inferSDMA infers the layout from the words.
func inferSDMA(words []uint32) SDMALayout {
	if l := sdmaRegisters(len(words)); l != SDMAUnknown {
		return l
	}
	if len(words) == sdmaMQDWordsLarge {
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
