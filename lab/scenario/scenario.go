package scenario

import "time"

// Version is the version of the format that this package reads and writes.
const Version = 1

// Scenario is the work on the GPUs of one host. A key that is unknown, out of range, or does not
// apply to its kind is an error with line and column.
type Scenario struct {
	// Version of the format: 1.
	Version int `yaml:"version"`
	// Name in reports, 1 to 64 characters.
	Name string `yaml:"name"`
	// About says in a sentence what the scenario shows.
	About string `yaml:"about,omitempty"`
	// Source of the figures.
	Source string `yaml:"source,omitempty"`
	// GPUs is their number, 1 to 64, 1 by default. They are numbered from 0.
	GPUs int `yaml:"gpus,omitempty"`
	// Duration is how long requests arrive, 1ms to 168h.
	Duration time.Duration `yaml:"duration,omitempty"`
	// Online are the services, at most 1000.
	Online []Service `yaml:"online,omitempty"`
	// Offline are the jobs, at most 1000. One service or one job is required.
	Offline []Job `yaml:"offline,omitempty"`
}

// Service is an online service. It serves one request at a time on each of its GPUs, or, with
// LLM, batches them.
type Service struct {
	// Name, which no other service or job has.
	Name string `yaml:"name"`
	// GPUs that each request needs, all at once; by default [0].
	GPUs []int `yaml:"gpus,omitempty"`
	// Arrivals say when requests arrive.
	Arrivals Arrivals `yaml:"arrivals,omitempty"`
	// Prepare is the time on the CPU between the arrival of a request and its first kernel, to 1h. A
	// service announces at the arrival, so that a suspend can overlap with it.
	Prepare time.Duration `yaml:"prepare,omitempty"`
	// Request is the GPU work of a request on each of its GPUs, without LLM.
	Request Work `yaml:"request,omitempty"`
	// LLM: the service generates tokens.
	LLM *LLM `yaml:"llm,omitempty"`
	// SLO is the latency that a request should keep, to 1h; by default none. With LLM, it is that of the
	// first token.
	SLO time.Duration `yaml:"slo,omitempty"`
	// Priority of its leases, 0 to 15, 11 by default. They suspend jobs of lower priority.
	Priority int `yaml:"priority" default:"11"`
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
	// Kind is constant, poisson, gamma (gaps of a gamma distribution), bursts, closed (clients that
	// wait for the answer) or trace.
	Kind ArrivalKind `yaml:"kind,omitempty" words:"constant,poisson,gamma,bursts,closed,trace"`
	// Rate is in requests per second, 0.000001 to 1000000, those of bursts included; in all at most
	// 10000000 requests.
	Rate float64 `yaml:"rate,omitempty"`
	// CV is standard deviation / mean of the gaps (gamma) or of the pauses between bursts, 0.01 to 100; bursts: 1 by default,
	// which is exponential.
	CV float64 `yaml:"cv,omitempty"`
	// Burst is the number of requests of a burst, 1 to 10000.
	Burst int `yaml:"burst,omitempty"`
	// BurstGap is the time between requests of a burst, to 1m.
	BurstGap time.Duration `yaml:"burst_gap,omitempty"`
	// Clients of closed, 1 to 10000, 1 by default.
	Clients int `yaml:"clients,omitempty"`
	// Think is the time from an answer to the client's next request, to 1h.
	Think time.Duration `yaml:"think,omitempty"`
	// Trace is the path of a CSV file, relative to the scenario's file, sorted by time. Its first line names the
	// columns: ms or at_ms, and prompt and output (tokens); or, as in Azure's traces of inference,
	// TIMESTAMP,ContextTokens,GeneratedTokens.
	Trace string `yaml:"trace,omitempty"`
	// Speed divides the times of a trace, 0.000001 to 1000000, 1 by default.
	Speed float64 `yaml:"speed,omitempty"`
	// Points are the requests of Trace, as Load reads them.
	Points []Arrival `yaml:"-"`
}

// Work is a sequence of kernels on each GPU of its owner, one after another. Durations are those
// alone on the GPU. One of Mean, Total and Model is required.
type Work struct {
	// Model names a profile that sets what the other keys do not.
	Model string `yaml:"model,omitempty"`
	// Kernels is their number, 1 to 1000000, 1 by default.
	Kernels int `yaml:"kernels,omitempty"`
	// Mean duration of a kernel, to 1h.
	Mean time.Duration `yaml:"mean,omitempty"`
	// P50, with P90 and Max, is the distribution of the durations; without them all have the mean.
	P50 time.Duration `yaml:"p50,omitempty"`
	// P90 is at least P50.
	P90 time.Duration `yaml:"p90,omitempty"`
	// Max is at least P90.
	Max time.Duration `yaml:"max,omitempty"`
	// Total scales all durations so that the work alone takes as long, to 1h.
	Total time.Duration `yaml:"total,omitempty"`
	// Occupancy is the part of the GPU that its kernels fill, 0.001 to 1, 1 by default.
	Occupancy float64 `yaml:"occupancy,omitempty"`
}

// LLM is a service that generates tokens with continuous batching: a step is either the prefill
// of a waiting request, or a decode step of all requests in the batch.
type LLM struct {
	// MaxBatch is the most requests that decode together, 1 to 10000.
	MaxBatch int `yaml:"max_batch,omitempty"`
	// PrefillBase is the time of a prefill, to 1h, besides that of its tokens.
	PrefillBase time.Duration `yaml:"prefill_base,omitempty"`
	// PrefillToken is the time for each token of the prompt, to 1s. This or PrefillBase is required.
	PrefillToken time.Duration `yaml:"prefill_token,omitempty"`
	// DecodeBase is the time of a decode step, to 1h, besides that of its requests.
	DecodeBase time.Duration `yaml:"decode_base,omitempty"`
	// DecodeSequence is the time for each request of the batch, to 1s. This or DecodeBase is required.
	DecodeSequence time.Duration `yaml:"decode_sequence,omitempty"`
	// PromptTokens of each request, to 2097151; required unless the trace has them.
	PromptTokens int `yaml:"prompt_tokens,omitempty"`
	// OutputTokens of each request, to 2097151; required unless the trace has them.
	OutputTokens int `yaml:"output_tokens,omitempty"`
	// KernelsPerStep is into how many kernels a step is divided, 1 to 100000, 1 by default.
	KernelsPerStep int `yaml:"kernels_per_step,omitempty"`
	// TPOT is the mean time between tokens that a request should keep, to 1h; by default none.
	TPOT time.Duration `yaml:"tpot,omitempty"`
}

// Job is an offline job. Its processes are suspended together.
type Job struct {
	// Name, which no other service or job has.
	Name string `yaml:"name"`
	// GPUs of the job; by default [0].
	GPUs []int `yaml:"gpus,omitempty"`
	// Processes of the job, 1 to 1024, 1 by default.
	Processes int `yaml:"processes,omitempty"`
	// Queues of each process on each GPU of the job, 1 to 1024, 1 by default.
	Queues int `yaml:"queues,omitempty"`
	// Step is the work of one step of the job in each queue.
	Step Work `yaml:"step,omitempty"`
	// Arrivals are when steps begin, of any kind but closed; by default they follow each other without a pause.
	Arrivals *Arrivals `yaml:"arrivals,omitempty"`
	// Priority of its processes, 0 to 15, 0 by default.
	Priority int `yaml:"priority"`
}
