package engine

import (
	"encoding/binary"

	"github.com/gpreempt/gpreempt/emu/gpumodel"
)

// Counters describes the progress of a queue.
type Counters struct {
	Serial uint64
	Ref    gpumodel.QueueRef
	// Fetched and Read are positions as the process counts them: up to which the ring
	// has been read, and up to which everything has ended.
	Fetched, Read uint64
	// Completed is how many packets or commands took effect.
	Completed uint64
	// Stopped: it makes no progress any more, because its GPU faulted or its memory is
	// gone.
	Stopped bool
}

// Counters returns those of all queues, by serial.
func (e *Engine) Counters() []Counters {
	e.mu.Lock()
	defer e.mu.Unlock()
	all := make([]Counters, len(e.queues))
	for i, q := range e.queues {
		all[i] = Counters{
			Serial: q.Serial, Ref: q.Ref, Fetched: q.fetched.Load(), Read: q.read.Load(),
			Completed: q.completed.Load(), Stopped: q.stopped.Load(),
		}
	}
	return all
}

// Put is Dispatch.Put.
func (b BarrierValue) Put(slot []byte) (first uint32) {
	clear(slot[4:PacketBytes])
	binary.LittleEndian.PutUint64(slot[valueSignal:], b.Signal)
	binary.LittleEndian.PutUint64(slot[valueValue:], uint64(b.Value))
	binary.LittleEndian.PutUint64(slot[valueMask:], uint64(b.Mask))
	binary.LittleEndian.PutUint32(slot[valueCondition:], uint32(b.Condition))
	binary.LittleEndian.PutUint64(slot[completion:], b.Completion)
	return uint32(b.Header) | uint32(VendorBarrierValue)<<16
}

// PM4 is a vendor packet that makes the GPU run PM4 commands from a buffer
// (AqlQueue::ExecutePM4 of ROCr, which flushes caches by it). The emulated GPU uses only
// its completion signal.
type PM4 struct {
	Header     Header
	Buffer     uint64
	Dwords     uint32
	Completion uint64
}

// Offsets in a PM4; pm4JumpHeader is INDIRECT_BUFFER of four dwords, pm4Left the number of the packet's
// other dwords.
const (
	pm4Jump       = 4
	pm4Remain     = 20
	pm4JumpHeader = 3<<30 | 2<<16 | 0x3f<<8
	pm4JumpValid  = 1 << 23
	pm4Left       = 10
)

// Put is Dispatch.Put.
func (p PM4) Put(slot []byte) (first uint32) {
	clear(slot[4:PacketBytes])
	binary.LittleEndian.PutUint32(slot[pm4Jump:], pm4JumpHeader)
	binary.LittleEndian.PutUint64(slot[pm4Jump+4:], p.Buffer)
	binary.LittleEndian.PutUint32(slot[pm4Jump+12:], p.Dwords|pm4JumpValid)
	binary.LittleEndian.PutUint32(slot[pm4Remain:], pm4Left)
	binary.LittleEndian.PutUint64(slot[completion:], p.Completion)
	return uint32(p.Header) | uint32(VendorPM4)<<16
}

// appendCommand adds a command to a ring's contents.
func appendCommand(b []byte, c Command) []byte {
	return c.(interface{ Append(b []byte) []byte }).Append(b)
}

// Append adds the command.
func (c CopyRect) Append(b []byte) []byte {
	b = dwords(b, sdmaCopy|copyRect<<8|c.Element<<rectShift)
	for _, p := range []Plane{c.Source, c.Target} {
		b = dwords(b, low(p.Base), high(p.Base), p.X|p.Y<<16, p.Z|(p.Pitch-1)<<pitchShift, p.Slice-1)
	}
	return dwords(b, c.Width-1|(c.Height-1)<<16, c.Depth-1)
}

// Append adds the command.
func (c Write) Append(b []byte) []byte {
	b = dwords(b, sdmaWrite, low(c.Target), high(c.Target), uint32(len(c.Data)/4-1))
	return append(b, c.Data...)
}

// Append adds the command.
func (c Poll) Append(b []byte) []byte {
	first := uint32(sdmaPoll) | uint32(c.Func)<<pollShift
	if c.Memory {
		first |= pollMemory
	}
	const forever = 0xfff<<16 | 4
	return dwords(b, first, low(c.Address), high(c.Address), c.Value, c.Mask, forever)
}

// Append adds the command.
func (c Atomic) Append(b []byte) []byte {
	return dwords(b, sdmaAtomic|atomicAdd64<<atomicShift, low(c.Address), high(c.Address), low(c.Add), high(c.Add), 0, 0, 0)
}

// Append adds the command.
func (c Fill) Append(b []byte) []byte {
	return dwords(b, sdmaFill|c.Size<<fillShift, low(c.Target), high(c.Target), c.Value, c.Bytes-1<<c.Size)
}

// Append adds the command.
func (c Timestamp) Append(b []byte) []byte {
	const global = 2
	return dwords(b, sdmaTimestamp|global<<8, low(c.Address), high(c.Address))
}

// Append adds the command.
func (c CacheFlush) Append(b []byte) []byte { return dwords(b, sdmaGCR|gcrUser<<8, 0, 0, 0, 0) }
