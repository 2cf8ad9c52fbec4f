package hiplog

// Analysis is what a log tells of queues. Its JSON is stable: fields are added,
// not changed. Times are microseconds since boot, by the clock of the host
// (CLOCK_MONOTONIC).
type Analysis struct {
	Totals
	// Truncated: the compressed data end early; the rest is of what was there.
	Truncated bool `json:"truncated"`
	// PIDs are those of the processes in Processes that are known.
	PIDs []int32 `json:"pids"`
	// PIDsInText are process ids the program itself printed, as "Process ID: 4242":
	// a hint where the log has none. At most 16.
	PIDsInText []int32   `json:"pids_in_text"`
	Processes  []Process `json:"processes"`
	// Queues are in the order they first occur.
	Queues []Queue `json:"queues"`
	// Untracked counts records of queues and processes beyond 512.
	Untracked uint64    `json:"untracked_records"`
	Warnings  []Warning `json:"warnings"`
}

// Event is a record: where, and when.
type Event struct {
	Line   uint64 `json:"line"`
	Micros uint64 `json:"us"`
}

// Process is a process that wrote to the log.
type Process struct {
	// PID is in the pid namespace of the process, 0 when the log has none.
	PID       int32  `json:"pid"`
	Records   uint64 `json:"records"`
	MinMicros uint64 `json:"min_us"`
	MaxMicros uint64 `json:"max_us"`
	// TIDs are what the log calls threads: pthread_t, or 20 bits of its hash. At most
	// 256 of Threads, which counts up to 4096 of all processes.
	TIDs    []Address `json:"tids"`
	Threads int       `json:"threads"`
	Queues  int       `json:"queues"`
	// QueuesPerPriority is the limit the log names, GPU_MAX_HW_QUEUES; 0 = it does not.
	QueuesPerPriority uint64 `json:"max_queues_per_priority"`
	Dispatches        uint64 `json:"dispatches"`
	Barriers          uint64 `json:"barriers"`
	// Intervals are between dispatches to any queue.
	Intervals Intervals `json:"intervals"`
	// Launches are the kernels named, whether or not the log has their dispatches:
	// AMD_LOG_LEVEL=3 names them already.
	Launches Mix `json:"launches"`
}

// HSA's priorities, which are neither HIP's (1, 0, -1) nor KFD's (0, 7, 11).
const (
	PriorityLow    = "low"
	PriorityNormal = "normal"
	PriorityHigh   = "high"
)

// Queue is a hardware queue of a process: all that had its ring at one address.
type Queue struct {
	// PID is in the pid namespace of the process, 0 when the log has none.
	PID int32 `json:"pid"`
	// HWq is the address of the ring: KFD's ring_base_address. 0, and absent in
	// JSON, where ROCm 6.1 or older names the hsa_queue_t alone; what it says of the
	// ring is then in an entry of its own.
	HWq Address `json:"hwq,omitempty"`
	// SWqs are the addresses of its hsa_queue_t; more than one when queues followed
	// each other at HWq.
	SWqs []Address `json:"swqs"`
	// IDs are HSA's, a counter of ROCr for each process. They are not KFD queue ids.
	IDs []uint32 `json:"hsa_ids"`
	// Streams are the HIP streams whose commands this log shows going to the queue,
	// which takes AMD_LOG_MASK 0x2. At most 256, as of SWqs and IDs.
	Streams []Address `json:"streams"`
	// SizePackets is in AQL packets of 64 bytes, 0 = unknown.
	SizePackets uint64 `json:"size_packets"`
	// Priority is HSA's: low, normal or high, a number HSA does not name, or "" =
	// unknown.
	Priority string `json:"hsa_priority"`
	// Cooperative is nil when unknown.
	Cooperative *bool `json:"cooperative"`
	// CUMask is the latest, in hex, "" = none set.
	CUMask string `json:"cu_mask"`
	// Created is the first creation, Deleted the last deletion; nil = not in the log.
	Created   *Event `json:"created"`
	Deleted   *Event `json:"deleted"`
	Creations uint64 `json:"creations"`
	Deletions uint64 `json:"deletions"`
	// Acquired, Selected and Released count changes of the number of streams on the
	// queue, RefCount is the latest and MaxRefCount the greatest.
	Acquired    uint64 `json:"acquired"`
	Selected    uint64 `json:"selected"`
	Released    uint64 `json:"released"`
	RefCount    uint64 `json:"refcount"`
	MaxRefCount uint64 `json:"max_refcount"`

	Dispatches uint64 `json:"dispatches"`
	Barriers   uint64 `json:"barriers"`
	// ROCrPackets, within both, are of ROCr itself.
	ROCrPackets   uint64 `json:"rocr_packets"`
	FirstDispatch *Event `json:"first_dispatch"`
	LastDispatch  *Event `json:"last_dispatch"`
	// Intervals are between dispatches.
	Intervals Intervals `json:"intervals"`
	Kernels   Mix       `json:"kernels"`
	// ReadIndex and WriteIndex are the least and the greatest the packets printed, in
	// packets. Where they are cut to 32 bits and wrapped, they go on counting.
	ReadIndex  *Range `json:"rptr"`
	WriteIndex *Range `json:"wptr"`
	// MaxBacklog is the most packets a packet found waiting.
	MaxBacklog *Backlog `json:"max_backlog"`
	// OddIndices are packets whose indices are further apart than the ring is long
	// and were left out: those of graphs print a slot of the ring instead.
	OddIndices uint64 `json:"odd_indices"`
}

// Range holds the least and the greatest.
type Range struct {
	Min uint64 `json:"min"`
	Max uint64 `json:"max"`
}

// Backlog is how many packets waited when one was written: wptr - rptr.
type Backlog struct {
	Packets uint64 `json:"packets"`
	Event
}

// Warning reports what the log does not hold, or holds in a bad state.
type Warning struct {
	// Code is stable.
	Code string `json:"code"`
	Text string `json:"text"`
	// Next is what to do, "" when nothing can be done.
	Next string `json:"next"`
}
