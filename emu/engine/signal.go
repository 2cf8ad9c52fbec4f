package engine

import "encoding/binary"

// SignalBytes is the size and the alignment of a signal.
const SignalBytes = 64

// Offsets in a signal (amd_signal_t of amd_hsa_signal.h). A signal's handle is its
// address.
const (
	SignalKind    = 0
	SignalValue   = 8
	SignalMailbox = 16
	SignalEvent   = 24
	SignalStart   = 32
	SignalEnd     = 40
)

// SignalUser is the kind of a signal that has a value (AMD_SIGNAL_KIND_USER).
const SignalUser = 1

// Signal is a signal (amd_signal_t).
type Signal struct {
	Kind, Value int64
	// Mailbox is the address of a u64 in the event page, which gets the event's ID when
	// the signal is decremented; 0 for a signal without an event.
	Mailbox uint64
	// Event is the ID of that event.
	Event uint32
	// Start and End are the times at which the packet that decremented it last began and
	// ended, in ticks of the GPU's clock.
	Start, End uint64
}

// Put writes a signal.
func (s Signal) Put(b []byte) {
	clear(b[:SignalBytes])
	binary.LittleEndian.PutUint64(b[SignalKind:], uint64(s.Kind))
	binary.LittleEndian.PutUint64(b[SignalValue:], uint64(s.Value))
	binary.LittleEndian.PutUint64(b[SignalMailbox:], s.Mailbox)
	binary.LittleEndian.PutUint32(b[SignalEvent:], s.Event)
	binary.LittleEndian.PutUint64(b[SignalStart:], s.Start)
	binary.LittleEndian.PutUint64(b[SignalEnd:], s.End)
}

// DecodeSignal reads the first SignalBytes of b.
func DecodeSignal(b []byte) Signal {
	return Signal{
		Kind: int64(binary.LittleEndian.Uint64(b[SignalKind:])), Value: int64(binary.LittleEndian.Uint64(b[SignalValue:])),
		Mailbox: binary.LittleEndian.Uint64(b[SignalMailbox:]), Event: binary.LittleEndian.Uint32(b[SignalEvent:]),
		Start: binary.LittleEndian.Uint64(b[SignalStart:]), End: binary.LittleEndian.Uint64(b[SignalEnd:]),
	}
}
