package engine

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// Opcodes of PM4 packets of type 3 (soc15d.h and nvd.h of the kernel). The fields are those
// of the compute micro engine (pm4_pkt_struct_*.h of AMD's kfdtest).
const (
	pm4NOP            = 0x10
	pm4DispatchDirect = 0x15
	pm4WriteData      = 0x37
	pm4WaitRegMem     = 0x3c
	pm4IndirectBuffer = 0x3f
	pm4EventWrite     = 0x46
	pm4ReleaseMem     = 0x49
	pm4AcquireMem     = 0x58
	pm4SetShReg       = 0x76
)

// Fields of PM4 packets.
const (
	pm4TypeShift    = 30
	pm4Type2        = 2
	pm4Type3        = 3
	pm4CountShift   = 16
	pm4CountMask    = 0x3fff
	pm4OpShift      = 8
	pm4DstShift     = 8 // of WRITE_DATA
	pm4OneAddress   = 1 << 16
	pm4SpaceShift   = 4 // of WAIT_REG_MEM
	pm4WaitOpShift  = 6
	pm4JumpMask     = 1<<20 - 1 // of INDIRECT_BUFFER
	pm4Chain        = 1 << 20
	pm4ReleaseDst   = 16
	pm4ReleaseInt   = 24
	pm4ReleaseData  = 29
	pm4JumpBytes    = 16
	pm4MaxReleaseMC = 1 // dst_sel: memory, by the memory controller or the L2 cache
)

// ReleaseData is what a Release stores (data_sel of RELEASE_MEM).
type ReleaseData uint32

// The kinds of data.
const (
	ReleaseNothing ReleaseData = 0
	ReleaseLow     ReleaseData = 1 // the low 32 bits of the value
	ReleaseValue   ReleaseData = 2 // all 64 bits
	ReleaseClock   ReleaseData = 3 // the GPU's clock, a u64
)

// releaseInterrupt is the kind of a Release's notification (int_sel).
type releaseInterrupt uint32

const (
	interruptNone      releaseInterrupt = 0
	interruptOnly      releaseInterrupt = 1
	interruptConfirmed releaseInterrupt = 2
	interruptNoneSent  releaseInterrupt = 3 // the data is confirmed, nothing is raised
	interruptAlways    releaseInterrupt = 4
)

// Release stores data and raises an interrupt, after everything before it (RELEASE_MEM).
type Release struct {
	Address uint64
	Data    ReleaseData
	Value   uint64
	// Interrupt: it signals Event, unless that is 0. The driver ignores an interrupt without
	// an ID (event_interrupt_isr_v9).
	Interrupt bool
	Event     uint32
}

// Launch runs a kernel (DISPATCH_DIRECT). What it runs is in registers, which are not
// emulated: it is a real kernel.
type Launch struct{}

// Jump runs the packets of an indirect buffer, and then those behind it (INDIRECT_BUFFER).
type Jump struct {
	Address uint64
	// Dwords is the size of the buffer, less than 1<<20.
	Dwords uint32
	// Chain, in a buffer: what is behind it in that buffer is not run.
	Chain bool
}

// PM4Bytes returns the size of the PM4 packet that b begins with, of which it needs the
// first dword. The error is ErrShort or ErrIllegal.
func PM4Bytes(b []byte) (int, error) {
	if len(b) < 4 {
		return 0, ErrShort
	}
	first := binary.LittleEndian.Uint32(b)
	count := int(first >> pm4CountShift & pm4CountMask)
	switch first >> pm4TypeShift {
	case pm4Type2: // a filler
		return 4, nil
	case pm4Type3:
		if first>>pm4OpShift&0xff == pm4NOP && count == pm4CountMask {
			return 4, nil // the filler of type 3
		}
		return 4 * (count + 2), nil
	}
	return 0, fmt.Errorf("%w: a PM4 header %#x", ErrIllegal, first)
}

// DecodePM4 returns the PM4 packet that b begins with, as a NOP, Write, Poll, Release,
// Launch or Jump, and its size in bytes. Packets that only set registers or make caches
// coherent are a NOP. The command shares b's memory. The error is ErrShort, or ErrIllegal
// for a packet that the emulated GPU does not have.
func DecodePM4(b []byte) (Command, int, error) {
	n, err := PM4Bytes(b)
	if err != nil {
		return nil, 0, err
	}
	if len(b) < n {
		return nil, 0, ErrShort
	}
	if c := decodePM4(b[:n]); c != nil {
		return c, n, nil
	}
	return nil, 0, fmt.Errorf("%w: a PM4 header %#x of %d dwords", ErrIllegal, binary.LittleEndian.Uint32(b), n/4)
}

// decodePM4 returns a packet, nil for one that the emulated GPU does not have.
func decodePM4(b []byte) Command {
	word := func(i int) uint32 { return binary.LittleEndian.Uint32(b[4*i:]) }
	long := func(i int) uint64 { return binary.LittleEndian.Uint64(b[4*i:]) }
	n := len(b) / 4
	nop := NOP{Skip: uint32(n - 1)}
	if word(0)>>pm4TypeShift == pm4Type2 {
		return nop
	}
	switch op := word(0) >> pm4OpShift & 0xff; {
	case op == pm4NOP, op == pm4EventWrite, op == pm4AcquireMem, op == pm4SetShReg:
		return nop
	case op == pm4DispatchDirect && n == 5:
		return Launch{}
	case op == pm4WriteData && n >= 5:
		return decodeWriteData(word(1), long(2), b[16:])
	case op == pm4WaitRegMem && n == 7:
		return decodeWaitRegMem(word(1), long(2), word(4), word(5))
	case op == pm4IndirectBuffer && n == 4:
		return Jump{Address: long(1) &^ 3 & (1<<48 - 1), Dwords: word(3) & pm4JumpMask, Chain: word(3)&pm4Chain != 0}
	case op == pm4ReleaseMem && n == 7:
		return decodeRelease(word(2), long(3), long(5), 0)
	case op == pm4ReleaseMem && n == 8:
		return decodeRelease(word(2), long(3), long(5), word(7))
	}
	return nil
}

func decodeWriteData(control uint32, target uint64, data []byte) Command {
	if control&pm4OneAddress != 0 {
		data = data[len(data)-4:] // each dword replaces the one before
	}
	switch control >> pm4DstShift & 0xf {
	case 1, 2, 5: // memory: through registers, the L2 cache, or directly
		return Write{Target: target &^ 3, Data: data}
	}
	return nil
}

func decodeWaitRegMem(control uint32, at uint64, value, mask uint32) Command {
	const memory, writeRegisters = 1, 1
	return Poll{
		Memory: control>>pm4SpaceShift&3 == memory && control>>pm4WaitOpShift&3 != writeRegisters,
		Func:   PollFunc(control & 7), Address: at &^ 3, Value: value, Mask: mask,
	}
}

func decodeRelease(control uint32, at, value uint64, event uint32) Command {
	c := Release{Address: at &^ 3, Data: ReleaseData(control >> pm4ReleaseData), Value: value, Event: event}
	switch releaseInterrupt(control >> pm4ReleaseInt & 7) {
	case interruptNone, interruptNoneSent:
	case interruptOnly, interruptConfirmed, interruptAlways:
		c.Interrupt = true
	default:
		return nil
	}
	if c.Data > ReleaseClock || c.Data != ReleaseNothing && control>>pm4ReleaseDst&3 > pm4MaxReleaseMC {
		return nil
	}
	return c
}

// fetchPM4 reads packets up to the write pointer, until one cannot start yet. Both pointers
// count dwords, and the ring is empty when they are equal, as positions in the ring.
func (q *queue) fetchPM4(write uint64) {
	if q.buffer != nil {
		q.fetchBuffer()
		return
	}
	at := 4 * q.fetched.Load()
	left := (4*write - at) & uint64(q.RingBytes-1)
	if left == 0 {
		return
	}
	b, ok := q.wholePacket(left, func(n uint64) ([]byte, bool) { return q.readRing(at, n) })
	if !ok {
		return
	}
	took, why := q.takePackets(b, func(took int) uint64 { return q.Ring + (at+uint64(took))&uint64(q.RingBytes-1) })
	// The doorbell is rung when the rest of a packet is written.
	q.look = q.look || why == usedUp && uint64(took) < left || why == partOnly && took > 0
	q.waiting = why == cannotStart
}

// fetchBuffer is fetchPM4 in an indirect buffer. It is read when all before it has ended, a
// part at a time, so that an endless chain of buffers fills no memory.
func (q *queue) fetchBuffer() {
	if q.waiting = !q.idle(); q.waiting {
		return
	}
	buffer := q.buffer
	left := 4 * uint64(buffer.Dwords)
	if left == 0 {
		q.buffer = nil
		q.take(&packet{bytes: pm4JumpBytes, command: NOP{}, time: packetTime, share: 1.0 / WholeGPU}, pm4JumpBytes/4)
		q.look = true
		return
	}
	b, ok := q.wholePacket(left, func(n uint64) ([]byte, bool) {
		b := make([]byte, n)
		return b, q.readAt(b, buffer.Address)
	})
	if !ok {
		return
	}
	at := buffer.Address
	took, why := q.takePackets(b, func(took int) uint64 { return at + uint64(took) })
	if why == partOnly && took == 0 {
		q.faultInTurn(at) // the packet goes beyond the end of the buffer
		return
	}
	buffer.Address += uint64(took)
	buffer.Dwords -= uint32(took / 4)
	q.look, q.waiting = why != cannotStart, why == cannotStart
}

// wholePacket reads a window of what is left to read, and more if the first packet needs
// that.
func (q *queue) wholePacket(left uint64, read func(n uint64) ([]byte, bool)) ([]byte, bool) {
	b, ok := read(min(left, window))
	if !ok {
		return nil, false
	}
	if n, err := PM4Bytes(b); err == nil && n > len(b) && uint64(n) <= left {
		return read(uint64(n))
	}
	return b, true
}

// unfinished is why takePackets returned.
type unfinished int

const (
	usedUp      unfinished = iota // all bytes were taken, or the next packet is in a buffer
	partOnly                      // the bytes have only a part of the next packet
	cannotStart                   // the next packet cannot start yet, or the queue stopped
)

// takePackets takes the packets in b, and returns how many bytes they have. addr is the
// address of a byte.
func (q *queue) takePackets(b []byte, addr func(took int) uint64) (took int, why unfinished) {
	for took < len(b) {
		c, n, err := DecodePM4(b[took:])
		jump, jumps := c.(Jump)
		switch {
		case errors.Is(err, ErrShort):
			return took, partOnly
		case err != nil, jumps && q.buffer != nil && !jump.Chain:
			q.faultInTurn(addr(took))
			return took, cannotStart
		case jumps && !q.idle():
			return took, cannotStart
		case jumps && q.buffer != nil:
			*q.buffer = jump
			q.takePM4(NOP{}, n) // a chain takes time
			return 0, usedUp
		case jumps:
			q.buffer, q.look = &jump, true
			return took, usedUp
		case !q.takePM4(c, n):
			return took, cannotStart
		}
		took += n
	}
	return took, usedUp
}

// takePM4 takes a packet; false when it cannot start yet, or the queue stopped. Those in a
// buffer take up nothing on the ring.
func (q *queue) takePM4(c Command, n int) bool {
	if q.buffer != nil {
		n = 0
	}
	p := &packet{bytes: uint32(n), command: c, time: packetTime, share: 1.0 / WholeGPU}
	switch c := c.(type) {
	case NOP:
		if q.joinNOP(uint32(n), uint64(n/4)) {
			return true
		}
	case Poll:
		if !q.polled(c) {
			return false
		}
	case Launch:
		p.time, p.share = q.e.cfg.KernelTime, 1
	}
	q.take(p, uint64(n/4))
	return true
}

// release applies the effect of a Release.
func (q *queue) release(c Release, p *packet) bool {
	stored := true
	switch c.Data {
	case ReleaseLow:
		stored = q.writeAt(binary.LittleEndian.AppendUint32(nil, low(c.Value)), c.Address)
	case ReleaseValue:
		stored = q.write64(c.Address, c.Value)
	case ReleaseClock:
		stored = q.write64(c.Address, q.e.cfg.Ticks(p.ended))
	case ReleaseNothing:
	}
	if !stored || !q.advance(p.step) {
		return false
	}
	if c.Interrupt && c.Event != 0 {
		q.interrupt(c.Event)
	}
	return true
}
