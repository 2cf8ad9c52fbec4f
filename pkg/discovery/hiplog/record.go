// Package hiplog hides how AMD's HIP runtime writes of its queues in its log: the
// generations of its lines and what other writers did to them.
//
// The log is written by ROCclr (rocclr/utils/debug.cpp, device/rocm/rocdevice.cpp
// and rocvirtual.cpp) when AMD_LOG_LEVEL is set: queues at level 3, packets at
// level 4, in the newest ROCm both at level 5. AMD_LOG_MASK 0x8 lets packets
// through, 0x10 queues and 0x80 the names of kernels.
package hiplog

import "strconv"

// Hint describes how to make a log that holds all this package looks for.
const Hint = "run the program with AMD_LOG_LEVEL=4 (5 on the newest ROCm), AMD_LOG_MASK=0x98 to leave out the rest and " +
	"AMD_LOG_LEVEL_FILE=/tmp/hip.log, which makes a file /tmp/hip.log_PID for each process; it slows the program down"

// Address is a virtual address in the process that wrote the log: "0x7f3660c00000"
// in text and JSON. It says nothing in another process.
type Address uint64

// String returns the address in hex, as the log does.
func (a Address) String() string { return "0x" + strconv.FormatUint(uint64(a), 16) }

// MarshalText is String.
func (a Address) MarshalText() ([]byte, error) { return []byte(a.String()), nil }

// UnmarshalText reads what MarshalText writes.
func (a *Address) UnmarshalText(text []byte) error {
	v, err := strconv.ParseUint(string(text), 0, 64)
	*a = Address(v)
	return err
}

// Kind is what a record tells.
type Kind uint8

// The kinds of records.
const (
	// Other tells nothing of queues.
	Other Kind = iota
	// Created: a hardware queue was made. Since ROCm 6.2 SWq and HWq are set,
	// before only SWq.
	Created
	// Selected, Acquired and Released change the number of streams on the queue
	// at Queue to RefCount.
	Selected
	Acquired
	Released
	// Deleted: the queue at Queue is destroyed.
	Deleted
	// CUMask: the queue at Queue got the compute units of Mask.
	CUMask
	// Allocated: so many queues exist, by priority, of at most PerPriority each.
	Allocated
	// Kernel: Name is about to be dispatched by this thread.
	Kernel
	// Enqueued: this thread put a command on the HIP stream Stream.
	Enqueued
	// Dispatch: a kernel dispatch packet was written to a queue.
	Dispatch
	// Barrier: a barrier packet was written to a queue.
	Barrier
)

// Record is one record of the log. Its slices are valid until the callback that
// got it returns.
type Record struct {
	// Line counts lines from 1. A line can hold more than one record.
	Line uint64
	// Level is AMD_LOG_LEVEL's, -1 in the lines of ROCr, which have none.
	Level int
	// Source and SourceLine are the place in the runtime's source, "" and 0 when
	// AMD_LOG_MASK lacks 0x10000.
	Source     []byte
	SourceLine uint64
	// Micros is CLOCK_MONOTONIC: microseconds since boot.
	Micros uint64
	// PID is in the writer's pid namespace, 0 when the line has none; TID is a
	// pthread_t, in the newest ROCm 20 bits of its hash.
	PID int32
	TID uint64
	// Message is the text without colours, prefix and duration.
	Message []byte
	// Duration is that of an API call in microseconds, where Timed.
	Duration uint64
	Timed    bool

	Kind Kind
	// SWq is the hsa_queue_t, HWq the address of its ring; 0 when not in the line.
	// Despite their names there is one SWq for each HWq: it is not the HIP stream.
	SWq, HWq Address
	// Queue is either: the ring since ROCm 6.2, the hsa_queue_t before.
	Queue Address
	// Old tells a line of ROCm 6.1 or older, New one of 6.2 or newer. Neither is
	// set where they are written alike.
	Old, New bool
	// ID is HSA's id of the queue, a counter of ROCr and not KFD's; -1 when absent.
	ID int64
	// RefCount is of Selected, Acquired and Released.
	RefCount uint64
	// Size is in AQL packets of 64 bytes, Priority HSA's 0 low, 1 normal, 2 high.
	Size, Priority uint64
	Cooperative    bool
	// Mask is the text of a CU mask, without 0x.
	Mask []byte
	// Low, Normal and High are of Allocated.
	Low, Normal, High, PerPriority uint64
	// Name is of Kernel.
	Name []byte
	// Stream is the address of a hip::Stream.
	Stream Address
	// KernelObject is of Dispatch, 0 when absent.
	KernelObject Address
	// ReadIndex and WriteIndex count AQL packets, where Indexed: what the queue had
	// read and where this packet was put. Most versions cut them to 32 bits.
	ReadIndex, WriteIndex uint64
	Indexed               bool
	// ROCr tells that ROCr wrote the line, of its own utility queue.
	ROCr bool
	// Torn tells that the record breaks off, so that fields are missing.
	Torn bool
}
