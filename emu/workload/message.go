package workload

// Message is one line of a client's output: a JSON object. Fields without a value are left
// out.
type Message struct {
	// Event is the kind of message:
	//
	//	ready      the queues exist, and work begins: PID, Queues
	//	created    Queues has the new one
	//	destroyed  Queues has the destroyed one with the proof of its work
	//	report     the state: Queues, Tally
	//	answer     the requested packets have completed
	//	rtenabled, rtdisabled
	//	fork       PID is the child's pid, Errno the driver's error for it
	//	crash      SIGSEGV follows
	//	done       all work is done and proved: Queues, Tally
	//	error      What has failed, with Errno if the kernel returned one
	Event  string  `json:"event"`
	PID    int     `json:"pid,omitzero"`
	Queues []Queue `json:"queues,omitempty"`
	*Tally
	Errno int    `json:"errno,omitzero"`
	What  string `json:"what,omitzero"`
}

// Queue is a queue, or with churn all successive queues of one worker.
type Queue struct {
	ID   uint32 `json:"id"`
	GPU  uint32 `json:"gpu"`
	Kind string `json:"kind"` // compute or sdma
	// Packets counts submitted packets, and Count those that ran, counted by the GPU.
	// Abandoned packets were in a queue when it was destroyed and never ran.
	Packets   uint64 `json:"packets"`
	Count     uint64 `json:"count"`
	Abandoned uint64 `json:"abandoned,omitzero"`
	// Hash is the hash computed by the GPU, Want the expected one.
	Hash string `json:"hash,omitzero"`
	Want string `json:"want,omitzero"`
	// Read and Write are the indexes of the ring: packets of the last queue, including the
	// barrier at the end, or bytes for an SDMA queue.
	Read  uint64 `json:"read"`
	Write uint64 `json:"write"`
	// Progress is the completed part of the oldest kernel, in millionths, when the queue
	// was last unmapped in the middle of it.
	Progress uint64 `json:"progress,omitzero"`
}

// Tally is the work of all queues of a client.
type Tally struct {
	Packets   uint64 `json:"packets"`
	Count     uint64 `json:"count"`
	Abandoned uint64 `json:"abandoned,omitzero"`
	Hash      string `json:"hash"`
	// OK reports whether nothing contradicts the proof so far.
	OK bool `json:"ok"`
	// P50US and P99US are quantiles of the latency of packets in microseconds, from the
	// time they were submitted or due until they were found complete.
	P50US float64 `json:"p50_us"`
	P99US float64 `json:"p99_us"`
	// Made counts created queues, Interrupted the calls repeated after a signal.
	Made        uint64 `json:"made"`
	Interrupted uint64 `json:"interrupted"`
}
