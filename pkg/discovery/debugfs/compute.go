package debugfs

import (
	"fmt"

	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// mqdRegisters is where the registers of a hardware queue are in the MQD: register i is
// dword mqdRegisters+i, on gfx9 to gfx12 (v9_structs.h to v12_structs.h).
const mqdRegisters = 128

// The positions of the registers of a compute queue.
const (
	regMQDBase         = 0 // and 1
	regActive          = 2
	regVMID            = 3
	regPersistentState = 4
	regPipePriority    = 5
	regQueuePriority   = 6
	regQuantum         = 7
	regPQBase          = 8 // and 9
	regPQRptr          = 10
	regRptrReport      = 11 // and 12
	regWptrPoll        = 13 // and 14
	regDoorbell        = 15
	regPQControl       = 17
	regDequeueRequest  = 24
	regEOPBase         = 37 // and 38
	regEOPControl      = 39
	regSaveBase        = 43 // and 44
	regStackOffset     = 46
	regStackSize       = 47
	regWaveOffset      = 48
	regSaveSize        = 49
	regError           = 51
	regAQLControl      = 53
	regPQWptr          = 54 // and 55
)

// The dwords of an MQD before and after its registers.
const (
	mqdHeader                   = 0
	mqdDispatchInitiator        = 1
	mqdDim                      = 2  // to 4
	mqdNumThread                = 8  // to 10
	mqdThreadMgmt01             = 23 // se0 and se1
	mqdThreadMgmt23             = 26 // se2 and se3
	mqdLogicalXCC               = 39
	mqdChunk                    = 41
	mqdStride                   = 226
	mqdWords                    = mqdRegisters + hqdRegisters
	aqlPacketDwords             = 16
	computeHeader        uint32 = 0xC0310800
)

// Compute is a compute queue, decoded from the image in memory (MQD) or from the registers
// of a slot (HQD). Its JSON lacks the words and what has no meaning as a number: addresses
// and masks.
type Compute struct {
	// Words are the source: shared, and must not be changed.
	Words []uint32 `json:"-"`
	// Registers are the 56 registers in the order of the hardware, from CP_MQD_BASE_ADDR
	// to CP_HQD_PQ_WPTR_HI: a part of Words.
	Registers []uint32 `json:"-"`
	// Image reports that it is an image in memory. Active and the positions are then of
	// the time when the queue was last unmapped: exact while it is suspended, outdated
	// while it is mapped, and zero, as VMID, until it is unmapped for the first time.
	Image bool `json:"image"`
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
	PipePriority  uint32            `json:"pipe_priority"`
	QueuePriority uint32            `json:"queue_priority"`
	Quantum       discovery.Quantum `json:"quantum"`

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
	// Empty reports that the hardware has nothing to read in the ring (PQ_EMPTY).
	Empty bool `json:"empty"`
	// NoUpdateReadPointer reports that the hardware does not write its read position to
	// ReadPointer. The driver sets it for AQL queues, except on the first of several XCCs.
	NoUpdateReadPointer bool `json:"no_read_pointer_update"`

	// Doorbell is the position in the GPU's doorbells, in dwords. DoorbellEnabled is set
	// in a slot that reacts to it.
	Doorbell        uint32 `json:"doorbell_dwords"`
	DoorbellEnabled bool   `json:"doorbell_enabled"`

	// SaveArea is the virtual address in the owner of the area to which the waves of this
	// XCC are saved when the queue is preempted in the middle of a kernel (CWSR), 0 for
	// none. SaveBytes is its size for one XCC; the areas of the XCCs are contiguous.
	SaveArea  uint64 `json:"-"`
	SaveBytes uint64 `json:"save_area_bytes"`
	// ControlStackBytes and ControlStackOffset (of the next free byte, growing down)
	// and WaveStateOffset are within the save area, in bytes. Saved waves move the
	// latter two.
	ControlStackBytes  uint32 `json:"control_stack_bytes"`
	ControlStackOffset uint32 `json:"control_stack_offset"`
	WaveStateOffset    uint32 `json:"wave_state_offset"`
	// SaveWaves reports that preempting the queue saves its waves instead of waiting for
	// them (QSWITCH_MODE).
	SaveWaves bool `json:"saves_waves"`

	// EOPBase is the GPU address of the end-of-pipe ring, 0 for none, EOPBytes its size.
	EOPBase  uint64 `json:"-"`
	EOPBytes uint64 `json:"eop_bytes"`
	// DequeueRequest is not 0 while the hardware is requested to unmap the queue.
	DequeueRequest uint32 `json:"dequeue_request"`
	// Error is CP_HQD_ERROR, 0 without an error.
	Error uint32 `json:"error"`

	// The rest is set for an image only.

	// CUMask has a bit for each compute unit that the queue may use, for the first four
	// shader engines; all ones means all. The position of further engines differs between
	// generations.
	CUMask [4]uint32 `json:"-"`
	// DispatchInitiator, Grid and Workgroup are of the last kernel when the queue was last
	// unmapped: Grid in workgroups or work items, as in the packet, Workgroup in work
	// items.
	DispatchInitiator uint32    `json:"dispatch_initiator,omitempty"`
	Grid              [3]uint32 `json:"grid,omitzero"`
	Workgroup         [3]uint32 `json:"workgroup,omitzero"`
	// Stride is the distance in bytes from this MQD to that of the next XCC, 0 with one XCC.
	// LogicalXCC and Chunk, the number of workgroups that an XCC takes at a time, are valid
	// if Stride is not 0.
	Stride     uint64 `json:"stride,omitempty"`
	LogicalXCC uint32 `json:"logical_xcc,omitempty"`
	Chunk      uint32 `json:"chunk,omitempty"`
}

// DecodeCompute decodes the 56 registers of a compute slot or of the HIQ, or an MQD of 2048
// or 4096 bytes, of gfx9 to gfx12. An MQD may be cut after its registers. The words are
// kept, not copied.
func DecodeCompute(words []uint32) (Compute, error) {
	c := Compute{Words: words, Registers: words, Valid: true}
	if len(words) != hqdRegisters {
		if len(words) < mqdWords {
			return Compute{}, fmt.Errorf("%d words are neither the %d registers of a slot nor an MQD of %d words", len(words), hqdRegisters, computeWords)
		}
		c.image()
	}
	r := c.Registers
	c.MQD = wide(r, regMQDBase)
	c.Active = r[regActive]&1 != 0
	c.VMID = int(r[regVMID] & 0xf)
	c.PipePriority, c.QueuePriority = r[regPipePriority], r[regQueuePriority]
	c.Quantum = discovery.DecodeQuantum(r[regQuantum])

	c.RingBase = wide(r, regPQBase) << 8
	control := r[regPQControl]
	c.RingBytes = 4 << (control&0x3f + 1) // 0 above what 64 bits hold
	c.Empty = control&(1<<15) != 0
	c.NoUpdateReadPointer = control&(1<<27) != 0
	c.AQL = r[regAQLControl]&1 != 0
	c.ReadPosition, c.WritePosition = r[regPQRptr], wide(r, regPQWptr)
	c.ReadPointer, c.WritePointer = wide(r, regRptrReport), wide(r, regWptrPoll)
	c.Doorbell = r[regDoorbell] & 0x0ffffffc >> 2
	c.DoorbellEnabled = r[regDoorbell]&(1<<30) != 0

	c.SaveArea, c.SaveBytes = wide(r, regSaveBase), uint64(r[regSaveSize])
	c.ControlStackBytes, c.ControlStackOffset, c.WaveStateOffset = r[regStackSize], r[regStackOffset], r[regWaveOffset]
	c.SaveWaves = r[regPersistentState]&(1<<30) != 0
	if c.EOPBase = wide(r, regEOPBase) << 8; c.EOPBase != 0 {
		c.EOPBytes = 8 << (r[regEOPControl] & 0x3f)
	}
	c.DequeueRequest, c.Error = r[regDequeueRequest], r[regError]
	return c, nil
}

// image decodes the fields of an image apart from the registers.
func (c *Compute) image() {
	w := c.Words
	c.Image, c.Valid = true, w[mqdHeader] == computeHeader
	c.Registers = w[mqdRegisters:mqdWords:mqdWords]
	c.CUMask = [4]uint32{w[mqdThreadMgmt01], w[mqdThreadMgmt01+1], w[mqdThreadMgmt23], w[mqdThreadMgmt23+1]}
	c.DispatchInitiator = w[mqdDispatchInitiator]
	c.Grid, c.Workgroup = [3]uint32(w[mqdDim:]), [3]uint32(w[mqdNumThread:])
	// Only gfx9.4.3 and its relatives have these words. On others the stride is reserved and
	// 0, and the XCC words are masks of compute units or others; in the larger image of
	// gfx12.1 they are unknown.
	if len(w) == computeWords && w[mqdStride] != 0 {
		c.Stride, c.LogicalXCC, c.Chunk = uint64(w[mqdStride]), w[mqdLogicalXCC], w[mqdChunk]
	}
}

// wide returns the 64-bit value of two words, the lower first.
func wide(words []uint32, at int) uint64 { return uint64(words[at+1])<<32 | uint64(words[at]) }

// BacklogDwords returns how many dwords of the ring are written and not read, from 0 to the
// ring's size less one. It is valid for a live slot and for the image of a suspended queue.
// It returns 0 for a full ring too; Empty of a live slot distinguishes the two.
func (c *Compute) BacklogDwords() uint64 {
	if c.RingBytes == 0 {
		return 0
	}
	return (c.WritePosition - uint64(c.ReadPosition)) & (c.RingBytes/4 - 1)
}

// BacklogPackets returns BacklogDwords in AQL packets. ok is false for PM4, whose packets
// have no fixed size.
func (c *Compute) BacklogPackets() (packets uint64, ok bool) {
	return c.BacklogDwords() / aqlPacketDwords, c.AQL
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
