package scenario

import "time"

// Version is the version of the format that this package reads and writes.
const Version = 1

// Scenario is the work on the GPUs of one host.
type Scenario struct {
	Version int    `yaml:"version"`
	Name    string `yaml:"name"`
	// About says in a sentence what the scenario shows; Source names where its figures are from.
	About  string `yaml:"about"`
	Source string `yaml:"source"`
	// GPUs is the number of GPUs, 1 to 64. They are numbered from 0.
	GPUs int `yaml:"gpus"`
	// Duration is how long requests arrive.
	Duration time.Duration `yaml:"duration"`
	Online   []Service     `yaml:"online"`
	Offline  []Job         `yaml:"offline"`
}

// Service is an online service. It serves one request at a time on each of its GPUs, or, with
// LLM, batches them.
type Service struct {
	Name string `yaml:"name"`
	// GPUs that each request needs, all at once; empty: GPU 0.
	GPUs     []int    `yaml:"gpus"`
	Arrivals Arrivals `yaml:"arrivals"`
	// Prepare is the time on the CPU between the arrival of a request and its first kernel. A
	// service announces at the arrival, so that a suspend can overlap with it.
	Prepare time.Duration `yaml:"prepare"`
	// Request is the GPU work of a request, without LLM.
	Request Work `yaml:"request"`
	LLM     *LLM `yaml:"llm"`
	// SLO is the latency that a request should keep, 0 for none.
	SLO time.Duration `yaml:"slo"`
	// Priority is that of its leases, 0 to 15.
	Priority int `yaml:"priority"`
}

// ArrivalKind is the process by which requests arrive.
type ArrivalKind string

// The kinds.
const (
	// Constant: one request every 1/rate.
	Constant ArrivalKind = "constant"
	// Poisson: exponential gaps.
	Poisson ArrivalKind = "poisson"
	// Gamma: gaps of a gamma distribution with coefficient of variation CV.
	Gamma ArrivalKind = "gamma"
	// Bursts: Burst requests BurstGap apart, and bursts at rate/Burst with exponential gaps.
	Bursts ArrivalKind = "bursts"
	// Closed: Clients clients, each of which sends its next request Think after an answer.
	Closed ArrivalKind = "closed"
	// Trace: the times of Trace, divided by Speed.
	Trace ArrivalKind = "trace"
)

// Arrivals says when requests arrive.
type Arrivals struct {
	Kind ArrivalKind `yaml:"kind"`
	// Rate is in requests per second.
	Rate     float64       `yaml:"rate"`
	CV       float64       `yaml:"cv"`
	Burst    int           `yaml:"burst"`
	BurstGap time.Duration `yaml:"burst_gap"`
	Clients  int           `yaml:"clients"`
	Think    time.Duration `yaml:"think"`
	// Trace is the path of a CSV file, relative to the scenario's file.
	Trace string  `yaml:"trace"`
	Speed float64 `yaml:"speed"`
}

// Work is a sequence of kernels on each GPU of its owner, one after another.
type Work struct {
	// Kernels is their number, and Mean their mean duration when alone on the GPU. P50, P90 and
	// Max, if set, are the distribution; else all have the mean.
	Kernels int           `yaml:"kernels"`
	Mean    time.Duration `yaml:"mean"`
	P50     time.Duration `yaml:"p50"`
	P90     time.Duration `yaml:"p90"`
	Max     time.Duration `yaml:"max"`
	// Total, if set, scales all durations so that the work alone takes as long.
	Total time.Duration `yaml:"total"`
	// Occupancy is the part of the GPU that its kernels fill, above 0 to 1, 0 for 1.
	Occupancy float64 `yaml:"occupancy"`
}

// LLM is a service that generates tokens with continuous batching: a step is either the prefill
// of a waiting request, or a decode step of all requests in the batch.
type LLM struct {
	// MaxBatch is the most requests that decode together.
	MaxBatch int `yaml:"max_batch"`
	// A prefill takes PrefillBase + PrefillToken for each token of the prompt; a decode step
	// DecodeBase + DecodeSequence for each request in the batch.
	PrefillBase    time.Duration `yaml:"prefill_base"`
	PrefillToken   time.Duration `yaml:"prefill_token"`
	DecodeBase     time.Duration `yaml:"decode_base"`
	DecodeSequence time.Duration `yaml:"decode_sequence"`
	// PromptTokens and OutputTokens are those of a request when the arrivals have none of
	// their own (a trace has).
	PromptTokens int `yaml:"prompt_tokens"`
	OutputTokens int `yaml:"output_tokens"`
	// KernelsPerStep is into how many kernels a step is divided.
	KernelsPerStep int `yaml:"kernels_per_step"`
}

// Job is an offline job. Its processes are one gang.
type Job struct {
	Name string `yaml:"name"`
	GPUs []int  `yaml:"gpus"`
	// Processes and Queues for each process, on each of the job's GPUs; 0 for 1.
	Processes int `yaml:"processes"`
	Queues    int `yaml:"queues"`
	// Step is the work of one step of the job in each queue. Steps follow each other without
	// a pause, or, with arrivals other than the zero value, begin as they arrive.
	Step     Work      `yaml:"step"`
	Arrivals *Arrivals `yaml:"arrivals"`
	Priority int       `yaml:"priority"`
}
