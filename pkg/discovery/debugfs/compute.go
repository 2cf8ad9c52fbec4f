package debugfs

import (
	"fmt"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// mqdRegisters is where the registers of a hardware queue are in the MQD: register i is
// dword mqdRegisters+i, on gfx9 to gfx12 (v9_structs.h to v12_structs.h).
const mqdRegisters = 128

// The positions of the registers of a compute queue.
const (
	regMQDBase       = 0 // and 1
	regActive        = 2
	regVMID          = 3
	regPipePriority  = 5
	regQueuePriority = 6
	regPQBase        = 8 // and 9
	regPQRptr        = 10
	regRptrReport    = 11 // and 12
	regWptrPoll      = 13 // and 14
	regDoorbell      = 15
	regPQControl     = 17
	regSaveBase      = 43 // and 44
	regSaveSize      = 49
	regAQLControl    = 53
	regPQWptr        = 54 // and 55
)

// An image begins with the driver's header, and its registers end after mqdWords.
const (
	mqdWords             = mqdRegisters + hqdRegisters
	computeHeader uint32 = 0xC0310800
)

// Compute is a compute queue, decoded from the image in memory (MQD) or from the registers
// of a slot (HQD): what tells queues apart, and their work. Package registers decodes the rest. Its
// JSON lacks the words and the addresses.
//
// Active and the positions of an image are of the time when the queue was last unmapped: exact while
// it is suspended, outdated while it is mapped, and zero, as VMID, until it is unmapped for the first
// time.
type Compute struct {
	// Words are the source: shared, and must not be changed.
	Words []uint32 `json:"-"`
	// Registers are the 56 registers in the order of the hardware, from CP_MQD_BASE_ADDR
	// to CP_HQD_PQ_WPTR_HI: a part of Words.
	Registers []uint32 `json:"-"`
	// Valid reports whether an image begins with the driver's header (0xC0310800);
	// registers are always valid.
	Valid bool `json:"valid"`

	// MQD is the GPU address of the image. Each XCC has its own.
	MQD uint64 `json:"-"`
	// Active reports whether a queue is mapped to the slot, for registers. In an image it
	// has no meaning: the driver does not write it.
	Active bool `json:"active"`
	// VMID is the address space of the process while it is on the GPU. The firmware
	// assigns it each time.
	VMID int `json:"vmid"`
	// PipePriority is 0 low, 1 medium, 2 high. QueuePriority is the priority that the
	// process requested, 0 to 15, up to 6.12, and 0 later. See Priority.
	PipePriority  uint32 `json:"pipe_priority"`
	QueuePriority uint32 `json:"queue_priority"`

	// RingBase is the virtual address of the ring in the owner, RingBytes its size.
	RingBase  uint64 `json:"-"`
	RingBytes uint64 `json:"ring_bytes"`
	// AQL reports that packets are AQL packets of 64 bytes, not PM4.
	AQL bool `json:"aql"`
	// ReadPosition is the read pointer in dwords, to be taken modulo the ring's dwords:
	// for some queues it wraps, for others it does not. WritePosition is the write
	// pointer in dwords, and never wraps.
	ReadPosition  uint32 `json:"read_position_dwords"`
	WritePosition uint64 `json:"write_position_dwords"`
	// ReadPointer and WritePointer are the virtual addresses in the owner of the positions
	// for the program.
	ReadPointer  uint64 `json:"-"`
	WritePointer uint64 `json:"-"`

	// Doorbell is the position in the GPU's doorbells, in dwords.
	Doorbell uint32 `json:"doorbell_dwords"`

	// SaveArea is the virtual address in the owner of the area to which the waves of this
	// XCC are saved when the queue is preempted in the middle of a kernel (CWSR), 0 for
	// none. SaveBytes is its size for one XCC; the areas of the XCCs are contiguous.
	SaveArea  uint64 `json:"-"`
	SaveBytes uint64 `json:"save_area_bytes"`
}

// DecodeCompute decodes the 56 registers of a compute slot or of the HIQ, or an MQD of 2048
// or 4096 bytes, of gfx9 to gfx12. An MQD may be cut after its registers. The words are
// kept, not copied.
func DecodeCompute(words []uint32) (Compute, error) {
	c := Compute{Words: words, Registers: words, Valid: true}
	if len(words) != hqdRegisters {
		if len(words) < mqdWords {
			return Compute{}, fmt.Errorf("%d words are neither the %d registers of a slot nor an MQD of %d words", len(words), hqdRegisters, computeMQDWords)
		}
		c.Valid, c.Registers = words[0] == computeHeader, words[mqdRegisters:mqdWords:mqdWords]
	}
	r := c.Registers
	c.MQD = wide(r, regMQDBase)
	c.Active = r[regActive]&1 != 0
	c.VMID = int(r[regVMID] & 0xf)
	c.PipePriority, c.QueuePriority = r[regPipePriority], r[regQueuePriority]

	c.RingBase = wide(r, regPQBase) << 8
	c.RingBytes = 4 << (r[regPQControl]&0x3f + 1) // 0 above what 64 bits hold
	c.AQL = r[regAQLControl]&1 != 0
	c.ReadPosition, c.WritePosition = r[regPQRptr], wide(r, regPQWptr)
	c.ReadPointer, c.WritePointer = wide(r, regRptrReport), wide(r, regWptrPoll)
	c.Doorbell = r[regDoorbell] & 0x0ffffffc >> 2

	c.SaveArea, c.SaveBytes = wide(r, regSaveBase), uint64(r[regSaveSize])
	return c, nil
}

// wide returns the 64-bit value of two words, the lower first.
func wide(words []uint32, at int) uint64 { return uint64(words[at+1])<<32 | uint64(words[at]) }

// BacklogDwords returns how many dwords of the ring are written and not read, from 0 to the
// ring's size less one. It is valid for a live slot and for the image of a suspended queue.
// It returns 0 for a full ring too.
func (c *Compute) BacklogDwords() uint64 {
	if c.RingBytes == 0 {
		return 0
	}
	return (c.WritePosition - uint64(c.ReadPosition)) & (c.RingBytes/4 - 1)
}

// Priority returns the KFD priority of a queue, and whether it is exactly the requested
// one.
//
// Up to 6.12 the driver writes it to the queue priority and its class to the pipe
// priority: 0 to 6 low, 7 to 10 medium, 11 to 15 high (pipe_priority_map). From 7.x on it
// writes the class only, and the queue priority stays 0; then Priority returns HIP's
// priority for that class, or 0 for an unknown class. So a queue priority that fits the
// class is exact, and 0 in a class that is not low is from a later kernel. 0 in the low
// class may be either, unless writes reports that this kernel writes the queue priority,
// which WritesPriority infers from the other queues of the same dump.
func (c *Compute) Priority(writes bool) (p gpreempt.Priority, exact bool) {
	if q := c.QueuePriority; q <= uint32(gpreempt.MaxPriority) && pipePriority(q) == c.PipePriority && (q > 0 || writes) {
		return gpreempt.Priority(q), true
	}
	switch c.PipePriority {
	case pipeLow:
		return gpreempt.PriorityLow, false
	case pipeMedium:
		return gpreempt.PriorityNormal, false
	case pipeHigh:
		return gpreempt.PriorityHigh, false
	}
	return 0, false
}

// The pipe priorities.
const (
	pipeLow = iota
	pipeMedium
	pipeHigh
)

// pipePriority returns the class of a priority, as the driver's pipe_priority_map.
func pipePriority(priority uint32) uint32 {
	switch {
	case priority < 7:
		return pipeLow
	case priority < 11:
		return pipeMedium
	}
	return pipeHigh
}

// WritesPriority reports whether the queue proves that its kernel writes the queue
// priority. Other kernels leave it 0.
func (c *Compute) WritesPriority() bool {
	return c.QueuePriority > 0 && c.QueuePriority <= uint32(gpreempt.MaxPriority) && pipePriority(c.QueuePriority) == c.PipePriority
}
