package scenario

import "time"

// Version is the version of the format that this package reads and writes.
const Version = 1

// Scenario is the work on the GPUs of one host.
type Scenario struct {
	Version int    `yaml:"version"`
	Name    string `yaml:"name"`
	// About says in a sentence what the scenario shows; Source names where its figures are from.
	About  string `yaml:"about,omitempty"`
	Source string `yaml:"source,omitempty"`
	// GPUs is the number of GPUs, 1 to 64. They are numbered from 0.
	GPUs int `yaml:"gpus,omitempty"`
	// Duration is how long requests arrive.
	Duration time.Duration `yaml:"duration,omitempty"`
	Online   []Service     `yaml:"online,omitempty"`
	Offline  []Job         `yaml:"offline,omitempty"`
}

// Service is an online service. It serves one request at a time on each of its GPUs, or, with
// LLM, batches them.
type Service struct {
	Name string `yaml:"name"`
	// GPUs that each request needs, all at once; empty: GPU 0.
	GPUs     []int    `yaml:"gpus,omitempty"`
	Arrivals Arrivals `yaml:"arrivals,omitempty"`
	// Prepare is the time on the CPU between the arrival of a request and its first kernel. A
	// service announces at the arrival, so that a suspend can overlap with it.
	Prepare time.Duration `yaml:"prepare,omitempty"`
	// Request is the GPU work of a request, without LLM.
	Request Work `yaml:"request,omitempty"`
	LLM     *LLM `yaml:"llm,omitempty"`
	// SLO is the latency that a request should keep, 0 for none. With LLM, it is that of the
	// first token.
	SLO time.Duration `yaml:"slo,omitempty"`
	// Priority is that of its leases, 0 to 15.
	Priority int `yaml:"priority"`
}

// ArrivalKind is the process by which requests arrive.
type ArrivalKind string

// The kinds.
const (
	// Constant: one request every 1/rate, from a phase that the seed chooses.
	Constant ArrivalKind = "constant"
	// Poisson: exponential gaps.
	Poisson ArrivalKind = "poisson"
	// Gamma: gaps of a gamma distribution with coefficient of variation CV.
	Gamma ArrivalKind = "gamma"
	// Bursts: Burst requests BurstGap apart, and between bursts gaps of a gamma distribution with
	// coefficient of variation CV; 1 is exponential.
	Bursts ArrivalKind = "bursts"
	// Closed: Clients clients, each of which sends its next request Think after an answer.
	Closed ArrivalKind = "closed"
	// Trace: the times of Trace, divided by Speed.
	Trace ArrivalKind = "trace"
)

// Arrivals says when requests arrive.
type Arrivals struct {
	Kind ArrivalKind `yaml:"kind,omitempty"`
	// Rate is in requests per second.
	Rate     float64       `yaml:"rate,omitempty"`
	CV       float64       `yaml:"cv,omitempty"`
	Burst    int           `yaml:"burst,omitempty"`
	BurstGap time.Duration `yaml:"burst_gap,omitempty"`
	Clients  int           `yaml:"clients,omitempty"`
	Think    time.Duration `yaml:"think,omitempty"`
	// Trace is the path of a CSV file, relative to the scenario's file.
	Trace string  `yaml:"trace,omitempty"`
	Speed float64 `yaml:"speed,omitempty"`
	// Points are the requests of Trace, as Load reads them.
	Points []Arrival `yaml:"-"`
}

// Work is a sequence of kernels on each GPU of its owner, one after another.
type Work struct {
	// Model names a profile that sets what the fields below do not; Models lists them.
	Model string `yaml:"model,omitempty"`
	// Kernels is their number, and Mean their mean duration when alone on the GPU. P50, P90 and
	// Max, if set, are the distribution; else all have the mean.
	Kernels int           `yaml:"kernels,omitempty"`
	Mean    time.Duration `yaml:"mean,omitempty"`
	P50     time.Duration `yaml:"p50,omitempty"`
	P90     time.Duration `yaml:"p90,omitempty"`
	Max     time.Duration `yaml:"max,omitempty"`
	// Total, if set, scales all durations so that the work alone takes as long.
	Total time.Duration `yaml:"total,omitempty"`
	// Occupancy is the part of the GPU that its kernels fill, above 0 to 1, 0 for 1.
	Occupancy float64 `yaml:"occupancy,omitempty"`
}

// LLM is a service that generates tokens with continuous batching: a step is either the prefill
// of a waiting request, or a decode step of all requests in the batch.
type LLM struct {
	// MaxBatch is the most requests that decode together.
	MaxBatch int `yaml:"max_batch,omitempty"`
	// A prefill takes PrefillBase + PrefillToken for each token of the prompt; a decode step
	// DecodeBase + DecodeSequence for each request in the batch.
	PrefillBase    time.Duration `yaml:"prefill_base,omitempty"`
	PrefillToken   time.Duration `yaml:"prefill_token,omitempty"`
	DecodeBase     time.Duration `yaml:"decode_base,omitempty"`
	DecodeSequence time.Duration `yaml:"decode_sequence,omitempty"`
	// PromptTokens and OutputTokens are those of a request when the arrivals have none of
	// their own (a trace has).
	PromptTokens int `yaml:"prompt_tokens,omitempty"`
	OutputTokens int `yaml:"output_tokens,omitempty"`
	// KernelsPerStep is into how many kernels a step is divided.
	KernelsPerStep int `yaml:"kernels_per_step,omitempty"`
	// TPOT is the mean time between tokens that a request should keep, 0 for none.
	TPOT time.Duration `yaml:"tpot,omitempty"`
}

// Job is an offline job. Its processes are one gang.
type Job struct {
	Name string `yaml:"name"`
	GPUs []int  `yaml:"gpus,omitempty"`
	// Processes and Queues for each process, on each of the job's GPUs; 0 for 1.
	Processes int `yaml:"processes,omitempty"`
	Queues    int `yaml:"queues,omitempty"`
	// Step is the work of one step of the job in each queue. Steps follow each other without
	// a pause, or, with arrivals other than the zero value, begin as they arrive.
	Step     Work      `yaml:"step,omitempty"`
	Arrivals *Arrivals `yaml:"arrivals,omitempty"`
	Priority int       `yaml:"priority"`
}
