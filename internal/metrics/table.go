package metrics

import (
	"github.com/prometheus/client_golang/prometheus"
)

// metric is one row of the table: what /metrics serves and docs/metrics.md prints.
type metric struct {
	name   string
	kind   prometheus.ValueType // Untyped is a histogram
	labels []string
	// help says what it counts, and use what it is good for or what to do.
	help, use string
	desc      *prometheus.Desc
}

// table is every metric, in the order they were defined below.
var table []*metric

func define(kind prometheus.ValueType, name, help, use string, labels ...string) *metric {
	m := &metric{name: name, kind: kind, labels: labels, help: help, use: use, desc: prometheus.NewDesc(name, help, labels, nil)}
	table = append(table, m)
	return m
}

// The metrics. No label has values that clients, jobs or time could multiply: they are
// enums of ours, names of the host's GPUs, and the mechanisms of the config file.
var (
	buildInfo = define(prometheus.GaugeValue, "gpreempt_build_info",
		"Always 1; says which gpreemptd this is, and whether its GPUs are real.",
		`backend is kfd for the host's driver; "simulated" or "emulated" and a machine where no figure says anything about hardware.`,
		"version", "goversion", "backend")
	gpuInfo = define(prometheus.GaugeValue, "gpreempt_gpu_info",
		"Always 1 for each GPU; joins its id with its name and PCI address.",
		"Multiply by it to see names: `... * on(gpu) group_left(name) gpreempt_gpu_info`.",
		"gpu", "name", "bdf")

	announcements = define(prometheus.CounterValue, "gpreempt_announcements_total",
		"Announcements that were answered, by the reason of the answer.",
		"max-wait: the GPUs were not quiet in time, look at the latency of suspends. unsafe, draining, hold: nothing was suspended, and on purpose.",
		"reason")
	stage = define(prometheus.UntypedValue, "gpreempt_announcement_stage_seconds",
		"Time of an answered announcement by stage: decide (the call is read, admitted and its suspends ordered), wait (until the scheduler answers), reply (until the call has the answer).",
		"Which part is slow: decide and reply are the daemon and its share of a CPU, wait is the mechanism and the GPU.",
		"stage")
	quiesce = define(prometheus.UntypedValue, "gpreempt_quiesce_seconds",
		"Wait of the announcements that ended with the GPUs quiet.",
		"What inference pays for sharing its GPUs; the alert GpreemptSlowQuiesce watches it.")

	preemptions = define(prometheus.CounterValue, "gpreempt_preemptions_total",
		"Suspends that were ordered, by cause.",
		"lease is the daily work, by-hand an admin, new-queue a target that made a queue while it was suspended.",
		"cause")
	suspends = define(prometheus.CounterValue, "gpreempt_suspends_total",
		"Suspends that succeeded, by the mechanism that did it.",
		"A mechanism further down the ladder than usual: gpctl doctor says why.",
		"mechanism")
	resumes = define(prometheus.CounterValue, "gpreempt_resumes_total",
		"Resumes that were ordered, by cause.",
		"share-floor and max-suspend were forced on a lease: offline work is kept off for as long as the policy lets it.",
		"cause")
	suspend = define(prometheus.UntypedValue, "gpreempt_suspend_seconds",
		"What the mechanism needed for a suspend that succeeded.",
		"Grows with the state of running kernels, the queues and the runlists of the GPU.")
	resume = define(prometheus.UntypedValue, "gpreempt_resume_seconds",
		"What the mechanism needed for a resume that succeeded.",
		"What an offline job pays beside the time it is off.")
	failures = define(prometheus.CounterValue, "gpreempt_failures_total",
		"What failed, by what the target was at (suspend, resume, run) and the cause; each retry that fails counts.",
		"Each puts the target into quarantine; the log names it. hardware-error and stuck open the GPU's breaker too.",
		"during", "cause")
	quarantines = define(prometheus.CounterValue, "gpreempt_quarantines_total",
		"Targets that failed and were left alone for a while.",
		"gpctl target list shows which; gpctl target explain says why.")
	away = define(prometheus.CounterValue, "gpreempt_offline_suspended_seconds_total",
		"Time that offline targets were away from the GPUs, of all targets together: suspending, suspended or resuming. Other classes are never suspended.",
		"Its rate is how many targets are away on average.")
	shadow = define(prometheus.CounterValue, "gpreempt_shadow_suspends_total",
		"Suspends that the shadow policy would have ordered.",
		"What gpreempt would do here, before it may.")

	targets = define(prometheus.GaugeValue, "gpreempt_targets",
		"Processes with queues, by class, state and what holds them (none: nothing does).",
		"offline with mechanism none cannot be suspended: gpctl target list says why.",
		"class", "state", "mechanism")
	gpuSuspended = define(prometheus.GaugeValue, "gpreempt_gpu_suspended_targets",
		"Targets that are suspended on a GPU.", "Which GPU is shared how much.", "gpu")
	gpuLeases = define(prometheus.GaugeValue, "gpreempt_gpu_leases",
		"Live leases on a GPU.", "Which GPU does online work now.", "gpu")
	breakerOpen = define(prometheus.GaugeValue, "gpreempt_gpu_breaker_open",
		"1 while the GPU is left alone after an error: everything on it runs.",
		"Look at the kernel log (dmesg | grep -i amdgpu); it closes by itself.", "gpu")
	openings = define(prometheus.CounterValue, "gpreempt_gpu_breaker_openings_total",
		"Breakers that opened, by cause: alarm (the kernel log), stuck (a call hung), hardware-error.",
		"Again and again on one GPU: take it out of service (docs/hazards.md).", "gpu", "cause")

	leases = define(prometheus.GaugeValue, "gpreempt_leases",
		"Live leases by state.", "quiescing for long: something does not leave the GPUs.", "state")
	leasesEnded = define(prometheus.CounterValue, "gpreempt_leases_ended_total",
		"Leases that ended, by how.",
		"expired: a server did not complete, so offline work waited for nothing until the ttl.", "end")
	coalesced = define(prometheus.CounterValue, "gpreempt_leases_coalesced_total",
		"Leases that found offline work still suspended from the lease before.",
		"How often lingering paid.")
	lease = define(prometheus.UntypedValue, "gpreempt_lease_seconds",
		"How long leases lived.", "Compare with the ttl that servers ask for.")
	floor = define(prometheus.GaugeValue, "gpreempt_share_floor_ratio",
		"Share of the time that offline work runs whatever leases say, by the policy in force.",
		"0 is no floor.")
	floorUse = define(prometheus.GaugeValue, "gpreempt_share_floor_use_ratio",
		"How much of the time the share floor lets an offline gang be suspended is used up, of the gang with the least left: 0 to 1.",
		"At 1 leases no longer suspend it: online work waits or shares. More GPUs, or a lower policy.share_floor.")
	draining = define(prometheus.GaugeValue, "gpreempt_draining",
		"1 while an admin has the daemon suspend nothing.", "gpctl drain off ends it.")

	sourceUp = define(prometheus.GaugeValue, "gpreempt_discovery_source_available",
		"1 while a source of discovery can be read.", "gpctl status tells what it says; docs/discovery.md what is missing without it.", "source")
	readings = define(prometheus.CounterValue, "gpreempt_discovery_readings_total",
		"Readings of a source.", "How busy discovery is.", "source")
	readingTime = define(prometheus.CounterValue, "gpreempt_discovery_reading_seconds_total",
		"Time spent reading a source.", "Its rate is the share of one CPU at most; longer discovery.interval and mqds_interval lower it.", "source")
	driverCalls = define(prometheus.CounterValue, "gpreempt_driver_calls_total",
		"Calls to the driver that returned: suspends, resumes, snapshots and what they take. 0 in a simulation.",
		"Some for each suspend and resume, few otherwise.")
	driverTime = define(prometheus.CounterValue, "gpreempt_driver_call_seconds_total",
		"Time that calls to the driver took, of all threads together.",
		"Beside gpreempt_suspend_seconds: how much of a suspend is the driver and the GPU, and how much the daemon.")
	processes = define(prometheus.GaugeValue, "gpreempt_processes",
		"Processes the driver knows.", "What discovery reads each time.")
	queues = define(prometheus.GaugeValue, "gpreempt_queues",
		"User queues on a GPU.", "More than the hardware has slots for: the firmware switches between runlists.", "gpu")

	refusals = define(prometheus.CounterValue, "gpreempt_refusals_total",
		"Requests and connections that were refused, by the reason clients are told.",
		"The log has some of them with the client; limits.* of the config file bound the rest.", "reason")
	warnings = define(prometheus.GaugeValue, "gpreempt_warnings",
		"Warnings that hold now, by code; 0 for those that do not.",
		"docs/warnings.md says what each means and what to do; gpctl status has the text.", "code", "severity")
	appended = define(prometheus.CounterValue, "gpreempt_events_total",
		"Entries written to the event log.", "State changes, and verbs of admins.")
	overwritten = define(prometheus.CounterValue, "gpreempt_events_overwritten_total",
		"Entries that the event log no longer keeps.",
		"Who watches events must read each within the time this many pass; a watcher too slow for it is told so.")
)
