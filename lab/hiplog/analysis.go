package hiplog

// Analysis describes the queues in a log. Its JSON is stable: fields are added, not
// changed. Times are microseconds since boot, of the host's clock CLOCK_MONOTONIC.
type Analysis struct {
	Totals
	// Truncated reports that the compressed data end early; the other fields describe the data before.
	Truncated bool `json:"truncated"`
	// PIDs are the known ones in Processes.
	PIDs []int32 `json:"pids"`
	// PIDsInText are process ids that the program itself printed, as "Process ID: 4242":
	// a hint for logs without pids. At most 16.
	PIDsInText []int32   `json:"pids_in_text"`
	Processes  []Process `json:"processes"`
	// Queues are in the order of their first record.
	Queues []Queue `json:"queues"`
	// Untracked counts records of queues and processes beyond 512.
	Untracked uint64    `json:"untracked_records"`
	Warnings  []Warning `json:"warnings"`
}

// Event is the position and the time of a record.
type Event struct {
	Line   uint64 `json:"line"`
	Micros uint64 `json:"us"`
}

// Process is a process that wrote to the log.
type Process struct {
	// PID is in the pid namespace of the process, 0 when unknown.
	PID       int32  `json:"pid"`
	Records   uint64 `json:"records"`
	MinMicros uint64 `json:"min_us"`
	MaxMicros uint64 `json:"max_us"`
	// TIDs are the thread ids of the log: pthread_t, or 20 bits of its hash. At most 256 of
	// Threads, which counts up to 4096 of all processes.
	TIDs    []Address `json:"tids"`
	Threads int       `json:"threads"`
	Queues  int       `json:"queues"`
	// QueuesPerPriority is the limit in the log, GPU_MAX_HW_QUEUES; 0 = unknown.
	QueuesPerPriority uint64 `json:"max_queues_per_priority"`
	Dispatches        uint64 `json:"dispatches"`
	Barriers          uint64 `json:"barriers"`
	// Intervals are between dispatches to any queue.
	Intervals Intervals `json:"intervals"`
	// Launches are the named kernels, with or without dispatches in the log:
	// AMD_LOG_LEVEL=3 contains the names only.
	Launches Mix `json:"launches"`
}

// HSA's priorities, which differ from HIP's (1, 0, -1) and KFD's (0, 7, 11).
const (
	PriorityLow    = "low"
	PriorityNormal = "normal"
	PriorityHigh   = "high"
)

// Queue is a hardware queue of a process: all queues with their ring at one address.
type Queue struct {
	// PID is in the pid namespace of the process, 0 when unknown.
	PID int32 `json:"pid"`
	// HWq is the address of the ring: KFD's ring_base_address. 0, and absent in JSON, where
	// ROCm 6.1 or older prints only the hsa_queue_t; its records of the ring are then in
	// another entry.
	HWq Address `json:"hwq,omitempty"`
	// SWqs are the addresses of its hsa_queue_t; several when HWq was reused.
	SWqs []Address `json:"swqs"`
	// IDs are HSA's, a counter of ROCr in each process. They are not KFD queue ids.
	IDs []uint32 `json:"hsa_ids"`
	// Streams are the HIP streams with commands on the queue, which needs AMD_LOG_MASK 0x2.
	// At most 256, like SWqs and IDs.
	Streams []Address `json:"streams"`
	// SizePackets is in AQL packets of 64 bytes, 0 = unknown.
	SizePackets uint64 `json:"size_packets"`
	// Priority is HSA's: low, normal or high, another number, or "" = unknown.
	Priority string `json:"hsa_priority"`
	// Cooperative is nil when unknown.
	Cooperative *bool `json:"cooperative"`
	// CUMask is the latest, in hex, "" = not set.
	CUMask string `json:"cu_mask"`
	// Created is the first creation, Deleted the last deletion; nil = not in the log.
	Created   *Event `json:"created"`
	Deleted   *Event `json:"deleted"`
	Creations uint64 `json:"creations"`
	Deletions uint64 `json:"deletions"`
	// Acquired, Selected and Released count changes of the number of streams on the queue;
	// RefCount is the latest number and MaxRefCount the largest.
	Acquired    uint64 `json:"acquired"`
	Selected    uint64 `json:"selected"`
	Released    uint64 `json:"released"`
	RefCount    uint64 `json:"refcount"`
	MaxRefCount uint64 `json:"max_refcount"`

	Dispatches uint64 `json:"dispatches"`
	Barriers   uint64 `json:"barriers"`
	// ROCrPackets, included in both, are of ROCr itself.
	ROCrPackets   uint64 `json:"rocr_packets"`
	FirstDispatch *Event `json:"first_dispatch"`
	LastDispatch  *Event `json:"last_dispatch"`
	// Intervals are between dispatches.
	Intervals Intervals `json:"intervals"`
	Kernels   Mix       `json:"kernels"`
	// ReadIndex and WriteIndex are the smallest and the largest printed ones, in packets.
	// Wrapped 32-bit values are extended.
	ReadIndex  *Range `json:"rptr"`
	WriteIndex *Range `json:"wptr"`
	// MaxBacklog is the largest number of pending packets when one was written.
	MaxBacklog *Backlog `json:"max_backlog"`
	// OddIndices are packets without a valid backlog, because their indices differ by more
	// than the ring's size: packets of graphs print a slot of the ring instead.
	OddIndices uint64 `json:"odd_indices"`
}

// Range is the smallest and the largest value.
type Range struct {
	Min uint64 `json:"min"`
	Max uint64 `json:"max"`
}

// Backlog is how many packets were pending when one was written: wptr - rptr.
type Backlog struct {
	Packets uint64 `json:"packets"`
	Event
}

// Warning describes missing or damaged parts of the log.
type Warning struct {
	// Code is stable.
	Code string `json:"code"`
	Text string `json:"text"`
	// Next is the advice, or "".
	Next string `json:"next"`
}
