// Package hiplog parses and analyzes the logs of AMD's HIP runtime for its hardware queues:
// all generations of its lines, also where other writers damaged them.
//
// The log is written by ROCclr (rocclr/utils/debug.cpp, device/rocm/rocdevice.cpp
// and rocvirtual.cpp) when AMD_LOG_LEVEL is set: queues at level 3, packets at
// level 4, in the newest ROCm both at level 5. AMD_LOG_MASK 0x8 selects packets, 0x10
// queues and 0x80 the names of kernels.
package hiplog

import "strconv"

// Hint describes how to make a log with everything that this package parses.
const Hint = "run the program with AMD_LOG_LEVEL=4 (5 on the newest ROCm), AMD_LOG_MASK=0x98 to omit the rest and " +
	"AMD_LOG_LEVEL_FILE=/tmp/hip.log, which writes a file /tmp/hip.log_PID for each process; it slows the program down"

// Address is a virtual address in the process that wrote the log: "0x7f3660c00000"
// in text and JSON. It has no meaning in another process.
type Address uint64

// String returns the address in hex, as in the log.
func (a Address) String() string { return "0x" + strconv.FormatUint(uint64(a), 16) }

// MarshalText returns String.
func (a Address) MarshalText() ([]byte, error) { return []byte(a.String()), nil }

// UnmarshalText parses the output of MarshalText.
func (a *Address) UnmarshalText(text []byte) error {
	v, err := strconv.ParseUint(string(text), 0, 64)
	*a = Address(v)
	return err
}

// Kind is the kind of a record.
type Kind uint8

// The kinds of records.
const (
	// Other records are not about queues.
	Other Kind = iota
	// Created: a hardware queue was created. Since ROCm 6.2 SWq and HWq are set,
	// before only SWq.
	Created
	// Selected, Acquired and Released change the number of streams on the queue
	// at Queue to RefCount.
	Selected
	Acquired
	Released
	// Deleted: the queue at Queue is destroyed.
	Deleted
	// CUMask: the queue at Queue is limited to the compute units in Mask.
	CUMask
	// Allocated: the number of queues by priority, at most PerPriority each.
	Allocated
	// Kernel: this thread dispatches Name next.
	Kernel
	// Enqueued: this thread put a command on the HIP stream Stream.
	Enqueued
	// Dispatch: a kernel dispatch packet was written to a queue.
	Dispatch
	// Barrier: a barrier packet was written to a queue.
	Barrier
)

// Record is one record of the log. Its slices are valid until the callback returns.
type Record struct {
	// Line counts lines from 1. A line can contain several records.
	Line uint64
	// Level is of AMD_LOG_LEVEL, -1 in the lines of ROCr, which have none.
	Level int
	// Source and SourceLine are the position in the runtime's source, "" and 0 without
	// 0x10000 in AMD_LOG_MASK.
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
	// Duration is the duration of an API call in microseconds, where Timed.
	Duration uint64
	Timed    bool

	Kind Kind
	// SWq is the hsa_queue_t, HWq the address of its ring; 0 when not in the line.
	// Despite the names each HWq has one SWq: it is not the HIP stream.
	SWq, HWq Address
	// Queue is either: the ring since ROCm 6.2, the hsa_queue_t before.
	Queue Address
	// Old reports a line of ROCm 6.1 or older, New one of 6.2 or newer. Neither is set for
	// lines with the same form in both.
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
	// ReadIndex and WriteIndex count AQL packets, if Indexed: the read index of the queue
	// and the position of this packet. Most versions cut them to 32 bits.
	ReadIndex, WriteIndex uint64
	Indexed               bool
	// ROCr reports that ROCr wrote the line, about its own utility queue.
	ROCr bool
	// Torn reports that the record is incomplete, so that fields are missing.
	Torn bool
	// Unknown reports that the record, or the thread before it, has a form that is not known, so that
	// fields are missing: it is of another version of the runtime.
	Unknown bool
}
