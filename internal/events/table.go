package events

import (
	"github.com/prometheus/client_golang/prometheus"
)

// metric is one row of the table for /metrics and docs/metrics.md.
type metric struct {
	name   string
	kind   prometheus.ValueType // Untyped is a histogram
	labels []string
	// help describes the value, and use how to use it or what to do.
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

// The metrics. Clients, jobs and time cannot multiply label values: these are enums, names
// of the host's GPUs, and the mechanisms of the config file.
var (
	buildInfo = define(prometheus.GaugeValue, "gpreempt_build_info",
		"Always 1; the version of gpreemptd, and whether its GPUs are real.",
		`backend is kfd for the host's driver; "simulated" or "emulated" and a machine where the figures say nothing about hardware.`,
		"version", "goversion", "backend")
	gpuInfo = define(prometheus.GaugeValue, "gpreempt_gpu_info",
		"Always 1 for each GPU; joins its id with its name and PCI address.",
		"Multiply by it to see names: `... * on(gpu) group_left(name) gpreempt_gpu_info`.",
		"gpu", "name", "bdf")

	announcements = define(prometheus.CounterValue, "gpreempt_announcements_total",
		"Announcements that were answered, by the reason of the answer.",
		"max-wait: the GPUs were not quiet in time, look at the latency of suspends. unsafe, draining, hold: nothing was suspended, as configured.",
		"reason")
	stage = define(prometheus.UntypedValue, "gpreempt_announcement_stage_seconds",
		"Time of an answered announcement by stage: decide (reading and admitting the call, ordering its suspends), wait (until the scheduler answers), reply (until the call has the answer).",
		"Which part is slow: decide and reply are the daemon and its share of a CPU, wait is the mechanism and the GPU.",
		"stage")
	quiesce = define(prometheus.UntypedValue, "gpreempt_quiesce_seconds",
		"Wait of the announcements that were answered with the GPUs quiet.",
		"The cost of sharing GPUs for inference; the alert GpreemptSlowQuiesce watches it.")

	preemptions = define(prometheus.CounterValue, "gpreempt_preemptions_total",
		"Suspends that were ordered, by cause.",
		"lease is normal operation, by-hand an admin, new-queue a target that created a queue while it was suspended.",
		"cause")
	suspends = define(prometheus.CounterValue, "gpreempt_suspends_total",
		"Suspends that succeeded, by mechanism.",
		"A mechanism further down the ladder than usual: gpctl doctor shows why.",
		"mechanism")
	resumes = define(prometheus.CounterValue, "gpreempt_resumes_total",
		"Resumes that were ordered, by cause.",
		"share-floor and max-suspend ended a suspension before its lease: offline work is suspended for as long as the policy permits.",
		"cause")
	suspend = define(prometheus.UntypedValue, "gpreempt_suspend_seconds",
		"Time of the mechanism for a suspend that succeeded.",
		"Grows with the state of running kernels, the queues and the runlists of the GPU.")
	resume = define(prometheus.UntypedValue, "gpreempt_resume_seconds",
		"Time of the mechanism for a resume that succeeded.",
		"The cost for an offline job beside the time it is suspended.")
	failures = define(prometheus.CounterValue, "gpreempt_failures_total",
		"Failures, by what the target did (suspend, resume, run) and the cause; each retry that fails counts.",
		"Each puts the target into quarantine; the log names it. hardware-error and stuck open the GPU's breaker too.",
		"during", "cause")
	quarantines = define(prometheus.CounterValue, "gpreempt_quarantines_total",
		"Targets that were put into quarantine after a failure.",
		"gpctl target list shows which; gpctl target explain shows why.")
	away = define(prometheus.CounterValue, "gpreempt_offline_suspended_seconds_total",
		"Time that offline targets were suspending, suspended or resuming, the sum of all targets. Other classes are never suspended.",
		"Its rate is the average number of suspended targets.")
	shadow = define(prometheus.CounterValue, "gpreempt_shadow_suspends_total",
		"Suspends that the shadow policy would have ordered.",
		"What gpreempt would do here under another policy.")

	targets = define(prometheus.GaugeValue, "gpreempt_targets",
		"Processes with queues, by class, state and attached mechanism (or none).",
		"offline with mechanism none cannot be suspended: gpctl target list shows why.",
		"class", "state", "mechanism")
	gpuSuspended = define(prometheus.GaugeValue, "gpreempt_gpu_suspended_targets",
		"Targets that are suspended on a GPU.", "How much each GPU is shared.", "gpu")
	gpuLeases = define(prometheus.GaugeValue, "gpreempt_gpu_leases",
		"Live leases on a GPU.", "Which GPUs do online work now.", "gpu")
	breakerOpen = define(prometheus.GaugeValue, "gpreempt_gpu_breaker_open",
		"1 while the breaker of the GPU is open after an error: everything on it runs.",
		"Read the kernel log (dmesg | grep -i amdgpu); the breaker closes by itself.", "gpu")
	openings = define(prometheus.CounterValue, "gpreempt_gpu_breaker_openings_total",
		"Breakers that opened, by cause: alarm (the kernel log), stuck (a call hung), hardware-error.",
		"Repeatedly on one GPU: take it out of service (docs/hazards.md).", "gpu", "cause")

	leases = define(prometheus.GaugeValue, "gpreempt_leases",
		"Live leases by state.", "quiescing for long: a target is not suspended.", "state")
	leasesEnded = define(prometheus.CounterValue, "gpreempt_leases_ended_total",
		"Leases that ended, by end.",
		"expired: a server did not complete, so offline work stayed suspended until the ttl.", "end")
	coalesced = define(prometheus.CounterValue, "gpreempt_leases_coalesced_total",
		"Leases that began while offline work was still suspended from the lease before.",
		"How often the linger avoided a suspend.")
	lease = define(prometheus.UntypedValue, "gpreempt_lease_seconds",
		"How long leases lived.", "Compare with the ttl that servers ask for.")
	floor = define(prometheus.GaugeValue, "gpreempt_share_floor_ratio",
		"Minimum share of the time that offline work runs, by the policy in force.",
		"0: no floor.")
	floorUse = define(prometheus.GaugeValue, "gpreempt_share_floor_use_ratio",
		"Used share of the time for which the share floor permits a gang to be suspended, of the gang with the least left: 0 to 1.",
		"At 1 leases no longer suspend it: online work waits or shares. More GPUs, or a lower policy.share_floor.")
	draining = define(prometheus.GaugeValue, "gpreempt_draining",
		"1 while draining: the daemon suspends nothing.", "gpctl drain off ends it.")

	sourceUp = define(prometheus.GaugeValue, "gpreempt_discovery_source_available",
		"1 while a source of discovery can be read.", "gpctl status shows the error; docs/discovery.md what is missing without it.", "source")
	readings = define(prometheus.CounterValue, "gpreempt_discovery_readings_total",
		"Readings of a source.", "How busy discovery is.", "source")
	readingTime = define(prometheus.CounterValue, "gpreempt_discovery_reading_seconds_total",
		"Time spent reading a source.", "Its rate is the share of one CPU at most; longer discovery.interval and mqds_interval lower it.", "source")
	driverCalls = define(prometheus.CounterValue, "gpreempt_driver_calls_total",
		"Calls to the driver that returned: suspends, resumes, snapshots and their preparation.",
		"Some for each suspend and resume, few otherwise.")
	driverTime = define(prometheus.CounterValue, "gpreempt_driver_call_seconds_total",
		"Time of calls to the driver, the sum of all threads.",
		"With gpreempt_suspend_seconds: how much of a suspend is the driver and the GPU, and how much the daemon.")
	processes = define(prometheus.GaugeValue, "gpreempt_processes",
		"Processes known to the driver.", "The amount of work of discovery.")
	queues = define(prometheus.GaugeValue, "gpreempt_queues",
		"User queues on a GPU.", "More than the hardware slots: the firmware switches between runlists.", "gpu")

	refusals = define(prometheus.CounterValue, "gpreempt_refusals_total",
		"Requests and connections that were rejected, by the reason in the error.",
		"The log has a sample of them with the client; limits.* of the config file set the limits.", "reason")
	warnings = define(prometheus.GaugeValue, "gpreempt_warnings",
		"Warnings raised now, by code; 0 for all others.",
		"docs/warnings.md has meanings and remedies; gpctl status the text.", "code", "severity")
	appended = define(prometheus.CounterValue, "gpreempt_events_total",
		"Entries written to the event log.", "State changes, and actions of admins.")
	overwritten = define(prometheus.CounterValue, "gpreempt_events_overwritten_total",
		"Entries that were overwritten in the event log.",
		"A watcher that is slower than this receives the error SLOW_READER or REVISION_COMPACTED.")
)
