package workload

// Message is one line a client writes: JSON, one object to a line. What a message does
// not have is left out.
type Message struct {
	// Event says what happened:
	//
	//	ready      the queues are made, and work begins: PID, Queues
	//	created    Queues has the new one
	//	destroyed  Queues has the one that was; with it the proof of what it did
	//	report     how it stands: Queues, Tally
	//	answer     the packets that were asked for are over
	//	rtenabled, rtdisabled
	//	fork       PID is a child's, Errno what the driver told it
	//	crash      what comes next is SIGSEGV
	//	done       all is over and proved: Queues, Tally
	//	error      What went wrong, with Errno if the kernel said so
	Event  string  `json:"event"`
	PID    int     `json:"pid,omitzero"`
	Queues []Queue `json:"queues,omitempty"`
	*Tally
	Errno int    `json:"errno,omitzero"`
	What  string `json:"what,omitzero"`
}

// Queue is a queue, or with churn all queues one worker had one after the other.
type Queue struct {
	ID   uint32 `json:"id"`
	GPU  uint32 `json:"gpu"`
	Kind string `json:"kind"` // compute or sdma
	// Packets counts those submitted, and Count those that ran, as the GPU counted
	// them. Abandoned were in the queue when it was destroyed and never ran.
	Packets   uint64 `json:"packets"`
	Count     uint64 `json:"count"`
	Abandoned uint64 `json:"abandoned,omitzero"`
	// Hash is what the GPU made of the packets, Want what it should be.
	Hash string `json:"hash,omitzero"`
	Want string `json:"want,omitzero"`
	// Read and Write are the indexes of the ring: packets of the last queue, the
	// barrier at the end included, or bytes for a queue that copies.
	Read  uint64 `json:"read"`
	Write uint64 `json:"write"`
	// Progress is how much of the oldest kernel was done when the queue was last taken
	// off the GPU in the middle of it, in millionths.
	Progress uint64 `json:"progress,omitzero"`
}

// Tally is what all queues of a client did.
type Tally struct {
	Packets   uint64 `json:"packets"`
	Count     uint64 `json:"count"`
	Abandoned uint64 `json:"abandoned,omitzero"`
	Hash      string `json:"hash"`
	// OK says that nothing contradicts the proof, so far or for good.
	OK bool `json:"ok"`
	// P50US and P99US are how long packets took, from when they were submitted or due
	// until they were seen to be over, in microseconds.
	P50US float64 `json:"p50_us"`
	P99US float64 `json:"p99_us"`
	// Queues made, and calls interrupted by a signal and made again.
	Made        uint64 `json:"made"`
	Interrupted uint64 `json:"interrupted"`
}
