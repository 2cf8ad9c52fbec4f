package evidence

import "time"

// Format is the version of the files of a run.
const Format = 1

// Origin is what the figures of a run were measured on. Every output names it.
type Origin string

// The origins.
const (
	// Simulated: a model in virtual time, without processes.
	Simulated Origin = "simulated"
	// Emulated: real processes and daemon on a modelled GPU.
	Emulated Origin = "emulated"
	// Hardware: a daemon that serves the host's driver.
	Hardware Origin = "hardware"
)

// Run is one run of a plan: the content of run.json in its folder.
type Run struct {
	Format int    `json:"format"`
	Name   string `json:"name"`
	// Command is "trial", "compare", "sim" or "plan".
	Command string    `json:"command"`
	Origin  Origin    `json:"origin"`
	Backend string    `json:"backend"` // in the daemon's words
	Began   time.Time `json:"began,omitzero"`
	Seed    uint64    `json:"seed"`
	// Plan is the plan as it was run, in YAML.
	Plan string `json:"plan"`
	// Work are the online and the offline work for people, such as "offline: python3 train.py".
	Work []string `json:"work,omitempty"`
	// ChosenRate is the rate in Plan, in requests per second, if the trial chose it by how long a request takes.
	ChosenRate float64 `json:"chosen_rate,omitempty"`
	// Environment is what may make two runs unlike: versions, driver, GPUs, num_kcq, log level.
	Environment map[string]string `json:"environment"`
	Arms        []Arm             `json:"arms"`
	// Planned is how many repeats each arm should have, 0 if that was not planned.
	Planned int `json:"planned,omitempty"`
	// LeftOut are kinds of arms that the work makes impossible, and why.
	LeftOut map[ArmKind]string `json:"left_out,omitempty"`
	// Faults are reasons why no verdict may be given: work that did not run, lost packets.
	Faults []Fault `json:"faults,omitempty"`
	// Alarms are what the daemon or the kernel log reported during the run.
	Alarms []Alarm `json:"alarms,omitempty"`
	// Missing says why the folder of the run does not have something, such as the KFD trace, by its name.
	Missing map[string]string `json:"missing,omitempty"`
}

// Fault is something that went wrong with a run itself.
type Fault struct {
	Arm    string `json:"arm"`
	Repeat int    `json:"repeat"`
	What   string `json:"what"`
	// Fails: the run failed (lost packets, HQDs that did not empty), rather than has no verdict.
	Fails bool `json:"fails"`
}

// Alarm is a line of the kernel log or an event of the daemon.
type Alarm struct {
	At   time.Time `json:"at"`
	From string    `json:"from"`
	Text string    `json:"text"`
}

// ArmKind says which kinds of work run in an arm.
type ArmKind string

// The kinds.
const (
	OfflineAlone ArmKind = "offline alone"
	OnlineAlone  ArmKind = "online alone"
	Shared       ArmKind = "shared"
	Protected    ArmKind = "protected"
	// StreamPriority: as Shared, with streams of a high priority for requests.
	StreamPriority ArmKind = "stream priority"
	// Baseline is another way to share, which only the simulator has. No limit applies to it.
	Baseline ArmKind = "baseline"
)

// Arm is one way to run the work, with all its repeats.
type Arm struct {
	Name string  `json:"name"`
	Kind ArmKind `json:"kind"`
	// Mechanism and Policy of a protected arm, or the name of a baseline of the simulator.
	Mechanism string `json:"mechanism,omitempty"`
	Policy    string `json:"policy,omitempty"`
	// Missing is why the arm could not be run there, "" if it could.
	Missing string   `json:"missing,omitempty"`
	Repeats []Repeat `json:"repeats"`
}

// Repeat is one repeat of an arm. Times are in milliseconds, and At in milliseconds from its
// beginning.
type Repeat struct {
	Seconds  float64   `json:"seconds"`
	Requests []Request `json:"requests,omitempty"`
	// Suspends and Resumes are the durations of each.
	Suspends []Timed `json:"suspends,omitempty"`
	Resumes  []Timed `json:"resumes,omitempty"`
	// Work is the offline work done, in units of the plan (steps, packets, GPU seconds), and
	// WorkUnit their name; Lost and Repeated packets, where the jobs can tell.
	Work     float64 `json:"work"`
	WorkUnit string  `json:"work_unit,omitempty"`
	Lost     uint64  `json:"lost"`
	Repeated uint64  `json:"repeated"`
	// Steps are the steps that each offline job did, by its name, where they are known.
	Steps map[string]float64 `json:"steps,omitempty"`
	// Unprotected requests ran without a lease although they asked for one; NotQuiet had a
	// lease before the GPUs were quiet.
	Unprotected int `json:"unprotected,omitempty"`
	NotQuiet    int `json:"not_quiet,omitempty"`
	// UnprotectedWhy is why the first of them did, and WorkUnknown why WorkUnit is "".
	UnprotectedWhy string `json:"unprotected_why,omitempty"`
	WorkUnknown    string `json:"work_unknown,omitempty"`
	// SlotsUnread is why the hardware slots were not read while the processes of a protected arm were suspended, "" if
	// they were.
	SlotsUnread string `json:"slots_unread,omitempty"`
	// OnlineMapped is the share of the time in which an online queue had a hardware slot, of the
	// queue with the least, and UnmappedUntil the last time at which one had none, in ms. Only
	// the simulator knows them, with a number of slots.
	OnlineMapped  *float64 `json:"online_mapped,omitempty"`
	UnmappedUntil float64  `json:"unmapped_until,omitempty"`
	// Samples are readings of the machine in time.
	Samples []Sample `json:"samples,omitempty"`
	// Spans are who had a GPU when, for timelines; they may be cut to the first seconds.
	Spans []Span `json:"spans,omitempty"`
}

// Request is one request with the parts of its latency, which sum up to Total but for rounding.
// Parts that were not measured are 0.
type Request struct {
	At float64 `json:"at"`
	// Server is the name of its online service, where there may be several.
	Server string `json:"server,omitempty"`
	// Total is from arrival to result. Announce is the part until the announcement was
	// answered, Start until the first kernel began, Service until the result.
	Total    float64 `json:"total"`
	Announce float64 `json:"announce,omitempty"`
	Start    float64 `json:"start,omitempty"`
	Service  float64 `json:"service,omitempty"`
	// TTFT and TPOT of an LLM's request.
	TTFT float64 `json:"ttft,omitempty"`
	TPOT float64 `json:"tpot,omitempty"`
	// Preemptions is how many suspensions the request caused, and Failed why it has no result.
	Preemptions int    `json:"preemptions,omitempty"`
	Failed      string `json:"failed,omitempty"`
}

// Timed is a duration and when it began.
type Timed struct {
	At float64 `json:"at"`
	MS float64 `json:"ms"`
}

// Names of values of samples. HQDs are live hardware slots with a queue of an offline process.
const (
	HQDsActive    = "hqds_active"
	HQDsSuspended = "hqds_suspended" // of processes that were suspended while the slots were read
	HQDsAfter     = "hqds_after"     // after these were resumed
	Backlog       = "backlog_packets"
	GPUBusy       = "gpu_busy"   // percent, of the busiest GPU
	CPU           = "cpu"        // processors that the offline processes used
	RSS           = "rss_mib"    // of the offline processes
	OnlineCPU     = "online_cpu" // and the same of the online command
	OnlineRSS     = "online_rss_mib"
	DaemonCPU     = "daemon_cpu" // and of gpreemptd with its helpers
	DaemonRSS     = "daemon_rss_mib"
)

// Sample is one reading of the machine. Values that were not read are absent.
type Sample struct {
	At float64 `json:"at"`
	// Values by name: those above, or others.
	Values map[string]float64 `json:"values"`
}

// Span is a stretch in which something held GPUs.
type Span struct {
	From float64 `json:"from"`
	To   float64 `json:"to"`
	GPU  int     `json:"gpu"`
	// What is "online", "offline", "suspended" or "switching".
	What string `json:"what"`
	Name string `json:"name,omitempty"`
}
