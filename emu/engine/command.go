package engine

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// Opcodes of SDMA commands, bits 0 to 7 of the first dword; the sub-opcode is in bits 8
// to 15 (sdma_registers.h of ROCr; NOP and WRITE: the kernel's
// vega10_sdma_pkt_open.h).
const (
	sdmaNOP        = 0
	sdmaCopy       = 1
	sdmaWrite      = 2
	sdmaFence      = 5
	sdmaTrap       = 6
	sdmaPoll       = 8
	sdmaAtomic     = 10
	sdmaFill       = 11
	sdmaTimestamp  = 13
	sdmaGCR        = 17
	copyLinear     = 0
	copyRect       = 4
	copyBroadcast  = 1 << 27
	pollMemory     = 1 << 31
	atomicAdd64    = 47
	gcrUser        = 1
	atomicShift    = 25
	pollShift      = 28
	fillShift      = 30
	rectShift      = 29
	pitchShift     = 13
	nopCountMask   = 0x3fff
	writeCountMask = 0xf_ffff
	countMask      = 1<<30 - 1
	trapMask       = 1<<28 - 1
)

// MaxCopyBytes is the most bytes of a Copy of gfx9 (SDMA_PKT_COPY_LINEAR::kMaxSize_). The
// emulated GPU also accepts those of newer GPUs, which move up to 1 GiB.
const MaxCopyBytes = 0x3fffe0

// Command is an SDMA command: NOP, Copy, CopyRect, Write, Fence, Trap, Poll, Atomic,
// Fill, Timestamp, CacheFlush. See DecodePM4 for PM4.
type Command any

// NOP does nothing.
type NOP struct {
	// Skip is the number of dwords behind it that are part of it, at most 16383.
	Skip uint32
}

// Copy moves Bytes from Source to Target (COPY_LINEAR).
type Copy struct {
	Source, Target uint64
	// Bytes is 1 to 1 GiB.
	Bytes uint32
}

// Plane is the source or the target of a CopyRect. All fields except Base count elements.
type Plane struct {
	Base         uint64
	X, Y, Z      uint32
	Pitch, Slice uint32
}

// CopyRect moves a box of elements from one plane to another (COPY_LINEAR_RECT, as it is
// up to gfx11).
type CopyRect struct {
	Source, Target Plane
	// Element is the size of an element, as a power of 2: 0 to 4.
	Element uint32
	// Width, Height and Depth are at least 1.
	Width, Height, Depth uint32
}

// Write stores Data, a positive number of dwords (WRITE_UNTILED).
type Write struct {
	Target uint64
	Data   []byte
}

// Fence stores Value after everything before it.
type Fence struct {
	Address uint64
	Value   uint32
}

// Trap signals an event.
type Trap struct {
	// Event is the event's ID of at most 28 bits; 0 if it is not known, as in ROCr up to
	// 5.0.
	Event uint32
}

// PollFunc compares what a Poll reads with a reference.
type PollFunc uint32

// The comparisons of unsigned numbers.
const (
	PollAlways PollFunc = 0
	PollLT     PollFunc = 1
	PollLE     PollFunc = 2
	PollEQ     PollFunc = 3
	PollNE     PollFunc = 4
	PollGE     PollFunc = 5
	PollGT     PollFunc = 6
)

// Poll waits until the bits Mask of a dword in memory compare with Value
// (POLL_REGMEM). The number of tries is not limited.
type Poll struct {
	// Memory is false for a poll of a register, which never waits: ROCr flushes the HDP
	// by it.
	Memory      bool
	Func        PollFunc
	Address     uint64
	Value, Mask uint32
}

// Holds reports whether the condition holds for a dword of memory.
func (c Poll) Holds(dword uint32) bool {
	got := dword & c.Mask
	switch c.Func {
	case PollAlways:
		return true
	case PollLT:
		return got < c.Value
	case PollLE:
		return got <= c.Value
	case PollEQ:
		return got == c.Value
	case PollNE:
		return got != c.Value
	case PollGE:
		return got >= c.Value
	case PollGT:
		return got > c.Value
	}
	return false
}

// Atomic adds Add to a u64 (ATOMIC with ADD64, the only operation ROCr sends).
type Atomic struct {
	Address uint64
	Add     uint64
}

// Fill repeats the lowest 1<<Size bytes of Value (CONST_FILL).
type Fill struct {
	Target uint64
	Value  uint32
	// Size is 0, 1 or 2.
	Size uint32
	// Bytes is a positive multiple of 1<<Size, up to 1 GiB.
	Bytes uint32
}

// Timestamp stores the GPU's clock, a u64.
type Timestamp struct{ Address uint64 }

// CacheFlush makes caches coherent (GCR).
type CacheFlush struct{}

func dwords(b []byte, all ...uint32) []byte {
	for _, w := range all {
		b = binary.LittleEndian.AppendUint32(b, w)
	}
	return b
}

func low(v uint64) uint32  { return uint32(v) }
func high(v uint64) uint32 { return uint32(v >> 32) }

// Append adds the NOP and what it skips.
func (c NOP) Append(b []byte) []byte {
	b = dwords(b, sdmaNOP|c.Skip<<16)
	return append(b, make([]byte, 4*c.Skip)...)
}

// Append adds the command.
func (c Copy) Append(b []byte) []byte {
	return dwords(b, sdmaCopy, c.Bytes-1, 0, low(c.Source), high(c.Source), low(c.Target), high(c.Target))
}

// Append adds the command.
func (c Fence) Append(b []byte) []byte {
	return dwords(b, sdmaFence, low(c.Address), high(c.Address), c.Value)
}

// Append adds the command.
func (c Trap) Append(b []byte) []byte { return dwords(b, sdmaTrap, c.Event) }

// Errors of DecodeCommand and DecodePM4.
var (
	// ErrShort means that the command is longer than the bytes.
	ErrShort = errors.New("incomplete command")
	// ErrIllegal means that the emulated GPU has no such command.
	ErrIllegal = errors.New("unknown command")
)

// CommandBytes returns the size of the command that b begins with. It needs the first four
// dwords of a Write and one of any other; with less the error is ErrShort.
func CommandBytes(b []byte) (int, error) {
	if len(b) < 4 {
		return 0, ErrShort
	}
	first := binary.LittleEndian.Uint32(b)
	op, sub := first&0xff, first>>8&0xff
	switch {
	case op == sdmaNOP:
		return 4 + 4*int(first>>16&nopCountMask), nil
	case op == sdmaCopy && sub == copyLinear && first&copyBroadcast == 0:
		return 28, nil
	case op == sdmaCopy && sub == copyRect:
		return 52, nil
	case op == sdmaWrite && sub == 0:
		if len(b) < 16 {
			return 0, ErrShort
		}
		return 20 + 4*int(binary.LittleEndian.Uint32(b[12:])&writeCountMask), nil
	case op == sdmaFence && sub == 0:
		return 16, nil
	case op == sdmaTrap && sub == 0:
		return 8, nil
	case op == sdmaPoll && sub == 0:
		return 24, nil
	case op == sdmaAtomic && first>>atomicShift == atomicAdd64:
		return 32, nil
	case op == sdmaFill && sub == 0 && first>>fillShift <= 2:
		return 20, nil
	case op == sdmaTimestamp && (sub == 1 || sub == 2):
		return 12, nil
	case op == sdmaGCR && sub == gcrUser:
		return 20, nil
	}
	return 0, fmt.Errorf("%w: first dword %#x", ErrIllegal, first)
}

// DecodeCommand returns the command that b begins with, and its size in bytes. The command
// shares b's memory. The error is ErrShort or ErrIllegal.
func DecodeCommand(b []byte) (Command, int, error) {
	n, err := CommandBytes(b)
	if err != nil {
		return nil, 0, err
	}
	if len(b) < n {
		return nil, 0, ErrShort
	}
	word := func(i int) uint32 { return binary.LittleEndian.Uint32(b[4*i:]) }
	long := func(i int) uint64 { return binary.LittleEndian.Uint64(b[4*i:]) }
	first := word(0)
	switch first & 0xff {
	case sdmaNOP:
		return NOP{Skip: uint32(n/4 - 1)}, n, nil
	case sdmaCopy:
		if first>>8&0xff == copyRect {
			return decodeRect(word, long), n, nil
		}
		return Copy{Bytes: word(1)&countMask + 1, Source: long(3), Target: long(5)}, n, nil
	case sdmaWrite:
		return Write{Target: long(1), Data: b[16:n]}, n, nil
	case sdmaFence:
		return Fence{Address: long(1), Value: word(3)}, n, nil
	case sdmaTrap:
		return Trap{Event: word(1) & trapMask}, n, nil
	case sdmaPoll:
		return Poll{
			Memory: first&pollMemory != 0, Func: PollFunc(first >> pollShift & 7), Address: long(1), Value: word(3), Mask: word(4),
		}, n, nil
	case sdmaAtomic:
		return Atomic{Address: long(1), Add: long(3)}, n, nil
	case sdmaFill:
		// The kernel's driver sends the number of bytes less one here, ROCr less one
		// element: both mean whole elements.
		size := first >> fillShift
		return Fill{Target: long(1), Value: word(3), Size: size, Bytes: (word(4)&countMask>>size + 1) << size}, n, nil
	case sdmaTimestamp:
		return Timestamp{Address: long(1)}, n, nil
	}
	return CacheFlush{}, n, nil
}

func decodeRect(word func(int) uint32, long func(int) uint64) CopyRect {
	plane := func(i int) Plane {
		return Plane{
			Base: long(i), X: word(i+2) & 0x3fff, Y: word(i+2) >> 16 & 0x3fff, Z: word(i+3) & 0x7ff,
			Pitch: word(i+3)>>pitchShift + 1, Slice: word(i+4)&(1<<28-1) + 1,
		}
	}
	return CopyRect{
		Source: plane(1), Target: plane(6), Element: min(word(0)>>rectShift, 4),
		Width: word(11)&0x3fff + 1, Height: word(11)>>16&0x3fff + 1, Depth: word(12)&0x7ff + 1,
	}
}
