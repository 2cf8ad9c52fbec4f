// Package registers decodes the words of a compute queue that package debugfs leaves, because the daemon
// has no use for them: its save area, its last kernel, its XCC.
package registers

import (
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/discovery/debugfs"
)

// The positions of the registers of a compute queue.
const (
	regPersistentState = 4
	regQuantum         = 7
	regDoorbell        = 15
	regPQControl       = 17
	regDequeueRequest  = 24
	regEOPBase         = 37 // and 38
	regEOPControl      = 39
	regStackOffset     = 46
	regStackSize       = 47
	regWaveOffset      = 48
	regError           = 51
)

// The dwords of an MQD before and after its registers.
const (
	mqdDispatchInitiator = 1
	mqdDim               = 2  // to 4
	mqdNumThread         = 8  // to 10
	mqdThreadMgmt01      = 23 // se0 and se1
	mqdThreadMgmt23      = 26 // se2 and se3
	mqdLogicalXCC        = 39
	mqdChunk             = 41
	mqdStride            = 226
	// mqdWords is the size of an MQD, except for the larger one of gfx12.1.
	mqdWords = 512
)

const aqlPacketDwords = 16

// Compute is a compute queue with all that is decoded of it. Its JSON lacks what has no meaning as
// a number: addresses and masks.
type Compute struct {
	debugfs.Compute
	// Image reports that it is an image in memory (MQD), not the registers of a slot.
	Image   bool              `json:"image"`
	Quantum discovery.Quantum `json:"quantum"`
	// Empty reports that the hardware has nothing to read in the ring (PQ_EMPTY). In a live slot it
	// distinguishes an empty ring from a full one, whose backlog is 0 too.
	Empty bool `json:"empty"`
	// NoUpdateReadPointer reports that the hardware does not write its read position to
	// ReadPointer. The driver sets it for AQL queues, except on the first of several XCCs.
	NoUpdateReadPointer bool `json:"no_read_pointer_update"`
	// DoorbellEnabled is set in a slot that reacts to its doorbell.
	DoorbellEnabled bool `json:"doorbell_enabled"`

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

// DecodeCompute is debugfs.DecodeCompute and Of.
func DecodeCompute(words []uint32) (Compute, error) {
	c, err := debugfs.DecodeCompute(words)
	if err != nil {
		return Compute{}, err
	}
	return Of(c), nil
}

// Of decodes the rest of a queue that was decoded.
func Of(queue debugfs.Compute) Compute {
	r, w := queue.Registers, queue.Words
	c := Compute{
		Compute: queue, Image: len(w) > len(r), Quantum: discovery.DecodeQuantum(r[regQuantum]),
		Empty: r[regPQControl]&(1<<15) != 0, NoUpdateReadPointer: r[regPQControl]&(1<<27) != 0, DoorbellEnabled: r[regDoorbell]&(1<<30) != 0,
		ControlStackBytes: r[regStackSize], ControlStackOffset: r[regStackOffset], WaveStateOffset: r[regWaveOffset],
		SaveWaves: r[regPersistentState]&(1<<30) != 0, EOPBase: (uint64(r[regEOPBase+1])<<32 | uint64(r[regEOPBase])) << 8,
		DequeueRequest: r[regDequeueRequest], Error: r[regError],
	}
	if c.EOPBase != 0 {
		c.EOPBytes = 8 << (r[regEOPControl] & 0x3f)
	}
	if !c.Image {
		return c
	}
	c.CUMask = [4]uint32{w[mqdThreadMgmt01], w[mqdThreadMgmt01+1], w[mqdThreadMgmt23], w[mqdThreadMgmt23+1]}
	c.DispatchInitiator = w[mqdDispatchInitiator]
	c.Grid, c.Workgroup = [3]uint32(w[mqdDim:]), [3]uint32(w[mqdNumThread:])
	// Only gfx9.4.3 and its relatives have these words. On others the stride is reserved and
	// 0, and the XCC words are masks of compute units or others; in the larger image of
	// gfx12.1 they are unknown.
	if len(w) == mqdWords && w[mqdStride] != 0 {
		c.Stride, c.LogicalXCC, c.Chunk = uint64(w[mqdStride]), w[mqdLogicalXCC], w[mqdChunk]
	}
	return c
}

// BacklogPackets returns BacklogDwords in AQL packets. ok is false for PM4, whose packets
// have no fixed size.
func (c *Compute) BacklogPackets() (packets uint64, ok bool) {
	return c.BacklogDwords() / aqlPacketDwords, c.AQL
}
