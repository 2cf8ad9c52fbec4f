package engine

import "encoding/binary"

// PacketBytes is the size of an AQL packet and of a slot of a ring.
const PacketBytes = 64

// PacketType is the type of an AQL packet (hsa_packet_type_t).
type PacketType uint8

// The types of packets.
const (
	PacketVendor        PacketType = 0
	PacketInvalid       PacketType = 1
	PacketDispatch      PacketType = 2
	PacketBarrierAnd    PacketType = 3
	PacketAgentDispatch PacketType = 4
	PacketBarrierOr     PacketType = 5
)

// VendorFormat is the format of an AMD vendor packet (hsa_amd_packet_type_t, and
// AMD_AQL_FORMAT_PM4_IB of amd_aql_queue.cpp).
type VendorFormat uint8

// The formats of vendor packets. A slot that was never written has VendorNone.
const (
	VendorNone         VendorFormat = 0
	VendorPM4          VendorFormat = 1
	VendorBarrierValue VendorFormat = 2
)

// Header is the first 16 bits of a packet (hsa_packet_header_t).
type Header uint16

// Parts of a header.
const (
	headerBarrier = 1 << 8
	// headerFences makes caches coherent with the system before and after, as HIP asks
	// for. Emulated memory always is.
	headerFences = 2<<9 | 2<<11
)

// MakeHeader returns a header with system-wide fences. With barrier the packet waits for
// all packets before it in its ring.
func MakeHeader(t PacketType, barrier bool) Header {
	h := Header(t) | headerFences
	if barrier {
		h |= headerBarrier
	}
	return h
}

// Type returns the type of the packet.
func (h Header) Type() PacketType { return PacketType(h) }

// Barrier reports whether the packet waits for all packets before it.
func (h Header) Barrier() bool { return h&headerBarrier != 0 }

// HeaderOf returns the header of a packet.
func HeaderOf(packet []byte) Header { return Header(binary.LittleEndian.Uint16(packet)) }

// FormatOf returns the format of a vendor packet.
func FormatOf(packet []byte) VendorFormat { return VendorFormat(packet[2]) }

// Ready reports whether the packet processor takes the packet in a slot: it waits at one
// that is INVALID, or that was never written.
func Ready(packet []byte) bool {
	t := HeaderOf(packet).Type()
	return t != PacketInvalid && (t != PacketVendor || FormatOf(packet) != VendorNone)
}

// Offsets in packets.
const (
	dispatchGrid    = 12
	dispatchPrivate = 24
	dispatchGroup   = 28
	dispatchKernel  = 32
	dispatchKernarg = 40
	barrierDeps     = 8
	valueSignal     = 8
	valueValue      = 16
	valueMask       = 24
	valueCondition  = 32
	// completion is the completion signal in every type of packet.
	completion = 56
)

// CompletionOf returns the address of the signal that a packet decrements at its end; 0
// for none.
func CompletionOf(packet []byte) uint64 { return binary.LittleEndian.Uint64(packet[completion:]) }

// Dispatch is a packet that runs a kernel (hsa_kernel_dispatch_packet_t). The emulated
// GPU reads Kernel, Kernarg and Completion only.
type Dispatch struct {
	Header Header
	// Dimensions are 1 to 3.
	Dimensions     uint16
	Workgroup      [3]uint16
	Grid           [3]uint32
	Private, Group uint32
	// Kernel is the address of the kernel object: see Kernel.
	Kernel, Kernarg, Completion uint64
}

// Put writes the packet to a slot except for the first four bytes, and returns those. The
// producer stores them last, atomically.
func (d Dispatch) Put(slot []byte) (first uint32) {
	clear(slot[4:PacketBytes])
	for i := range d.Workgroup {
		binary.LittleEndian.PutUint16(slot[4+2*i:], d.Workgroup[i])
		binary.LittleEndian.PutUint32(slot[dispatchGrid+4*i:], d.Grid[i])
	}
	binary.LittleEndian.PutUint32(slot[dispatchPrivate:], d.Private)
	binary.LittleEndian.PutUint32(slot[dispatchGroup:], d.Group)
	binary.LittleEndian.PutUint64(slot[dispatchKernel:], d.Kernel)
	binary.LittleEndian.PutUint64(slot[dispatchKernarg:], d.Kernarg)
	binary.LittleEndian.PutUint64(slot[completion:], d.Completion)
	return uint32(d.Header) | uint32(d.Dimensions)<<16
}

// DecodeDispatch reads a packet of type PacketDispatch.
func DecodeDispatch(packet []byte) Dispatch {
	d := Dispatch{
		Header: HeaderOf(packet), Dimensions: binary.LittleEndian.Uint16(packet[2:]),
		Private: binary.LittleEndian.Uint32(packet[dispatchPrivate:]), Group: binary.LittleEndian.Uint32(packet[dispatchGroup:]),
		Kernel: binary.LittleEndian.Uint64(packet[dispatchKernel:]), Kernarg: binary.LittleEndian.Uint64(packet[dispatchKernarg:]),
		Completion: CompletionOf(packet),
	}
	for i := range d.Workgroup {
		d.Workgroup[i] = binary.LittleEndian.Uint16(packet[4+2*i:])
		d.Grid[i] = binary.LittleEndian.Uint32(packet[dispatchGrid+4*i:])
	}
	return d
}

// BarrierDeps is the most signals that a Barrier can wait for.
const BarrierDeps = 5

// Barrier is a packet that waits for signals to become 0, all of them (PacketBarrierAnd)
// or one of them (PacketBarrierOr); no packet behind it starts before
// (hsa_barrier_and_packet_t, hsa_barrier_or_packet_t).
type Barrier struct {
	Header Header
	// Deps are addresses of signals. A 0 counts as satisfied for all of them, and as
	// not satisfied for one of them.
	Deps       [BarrierDeps]uint64
	Completion uint64
}

// Put is Dispatch.Put.
func (b Barrier) Put(slot []byte) (first uint32) {
	clear(slot[4:PacketBytes])
	for i, dep := range b.Deps {
		binary.LittleEndian.PutUint64(slot[barrierDeps+8*i:], dep)
	}
	binary.LittleEndian.PutUint64(slot[completion:], b.Completion)
	return uint32(b.Header)
}

// DecodeBarrier reads a packet of type PacketBarrierAnd or PacketBarrierOr.
func DecodeBarrier(packet []byte) Barrier {
	b := Barrier{Header: HeaderOf(packet), Completion: CompletionOf(packet)}
	for i := range b.Deps {
		b.Deps[i] = binary.LittleEndian.Uint64(packet[barrierDeps+8*i:])
	}
	return b
}

// Condition compares a signal with a value (hsa_signal_condition_t).
type Condition uint32

// The conditions.
const (
	ConditionEQ  Condition = 0
	ConditionNE  Condition = 1
	ConditionLT  Condition = 2
	ConditionGTE Condition = 3
)

// Holds reports whether value meets the condition. An unknown condition is never met.
func (c Condition) Holds(value, reference int64) bool {
	switch c {
	case ConditionEQ:
		return value == reference
	case ConditionNE:
		return value != reference
	case ConditionLT:
		return value < reference
	case ConditionGTE:
		return value >= reference
	}
	return false
}

// BarrierValue is a vendor packet that waits until the bits Mask of a signal meet a
// condition (hsa_amd_barrier_value_packet_t). A Signal of 0 counts as satisfied.
type BarrierValue struct {
	Header      Header
	Signal      uint64
	Value, Mask int64
	Condition   Condition
	Completion  uint64
}

// DecodeBarrierValue reads a vendor packet of format VendorBarrierValue.
func DecodeBarrierValue(packet []byte) BarrierValue {
	return BarrierValue{
		Header: HeaderOf(packet), Signal: binary.LittleEndian.Uint64(packet[valueSignal:]),
		Value: int64(binary.LittleEndian.Uint64(packet[valueValue:])), Mask: int64(binary.LittleEndian.Uint64(packet[valueMask:])),
		Condition: Condition(binary.LittleEndian.Uint32(packet[valueCondition:])), Completion: CompletionOf(packet),
	}
}
