package events

import (
	"github.com/prometheus/client_golang/prometheus"
)

// metric is one row of the table for /metrics and docs/reference/metrics.md.
type metric struct {
	name   string
	kind   prometheus.ValueType // Untyped is a histogram
	labels []string
	// help describes the value. docs/reference/metrics.md also says how to use it (uses_test.go).
	help string
	desc *prometheus.Desc
}

// table is every metric, in the order they were defined below.
var table []*metric

func define(kind prometheus.ValueType, name, help string, labels ...string) *metric {
	m := &metric{name: name, kind: kind, labels: labels, help: help, desc: prometheus.NewDesc(name, help, labels, nil)}
	table = append(table, m)
	return m
}

// The metrics. Clients, jobs and time cannot multiply label values: these are enums, names
// of the host's GPUs, and the mechanisms of the config file.
var (
	buildInfo = define(prometheus.GaugeValue, "gpreempt_build_info",
		"Always 1; the version of gpreemptd, and whether its GPUs are real.", "version", "goversion", "backend")
	gpuInfo = define(prometheus.GaugeValue, "gpreempt_gpu_info",
		"Always 1 for each GPU; joins its id with its name and PCI address.", "gpu", "name", "bdf")

	announcements = define(prometheus.CounterValue, "gpreempt_announcements_total",
		"Announcements that were answered, by the reason of the answer.", "reason")
	stage = define(prometheus.UntypedValue, "gpreempt_announcement_stage_seconds",
		"Time of an answered announcement by stage: decide (reading and admitting the call, ordering its suspends), wait (until the scheduler answers), reply (until the call has the answer).", "stage")
	quiesce = define(prometheus.UntypedValue, "gpreempt_quiesce_seconds",
		"Wait of the announcements that were answered with the GPUs quiet.")

	preemptions = define(prometheus.CounterValue, "gpreempt_preemptions_total",
		"Suspends that were ordered, by cause.", "cause")
	suspends = define(prometheus.CounterValue, "gpreempt_suspends_total",
		"Suspends that succeeded, by mechanism.", "mechanism")
	resumes = define(prometheus.CounterValue, "gpreempt_resumes_total",
		"Resumes that were ordered, by cause.", "cause")
	suspend = define(prometheus.UntypedValue, "gpreempt_suspend_seconds",
		"Time of the mechanism for a suspend that succeeded.")
	resume = define(prometheus.UntypedValue, "gpreempt_resume_seconds",
		"Time of the mechanism for a resume that succeeded.")
	failures = define(prometheus.CounterValue, "gpreempt_failures_total",
		"Failures, by what the target did (suspend, resume, run) and the cause; each retry that fails counts.", "during", "cause")
	quarantines = define(prometheus.CounterValue, "gpreempt_quarantines_total",
		"Targets that were put into quarantine after a failure.")
	away = define(prometheus.CounterValue, "gpreempt_offline_suspended_seconds_total",
		"Time that offline targets were suspending, suspended or resuming, the sum of all targets. Other classes are never suspended.")
	shadow = define(prometheus.CounterValue, "gpreempt_shadow_suspends_total",
		"Suspends that the shadow policy would have ordered.")

	targets = define(prometheus.GaugeValue, "gpreempt_targets",
		"Processes with queues, by class, state and attached mechanism (or none).", "class", "state", "mechanism")
	gpuSuspended = define(prometheus.GaugeValue, "gpreempt_gpu_suspended_targets",
		"Targets that are suspended on a GPU.", "gpu")
	gpuCannotSuspend = define(prometheus.GaugeValue, "gpreempt_gpu_cannot_suspend_targets",
		"Targets of class offline on a GPU that cannot be suspended, by the last attempt: gpctl target list has the reasons.", "gpu")
	gpuLeases = define(prometheus.GaugeValue, "gpreempt_gpu_leases",
		"Live leases on a GPU.", "gpu")
	breakerOpen = define(prometheus.GaugeValue, "gpreempt_gpu_breaker_open",
		"1 while the breaker of the GPU is open after an error: everything on it runs.", "gpu")
	attachCycles = define(prometheus.CounterValue, "gpreempt_gpu_attach_cycles_total",
		"Runlist cycles that attaching to targets, releasing them and ends of helper processes caused on a GPU that they have no queue on, by the driver's rules.", "gpu")
	openings = define(prometheus.CounterValue, "gpreempt_gpu_breaker_openings_total",
		"Breakers that opened, by cause: alarm (the kernel log), hung (a call did not return), hardware-error, queue-reset.", "gpu", "cause")
	queueResets = define(prometheus.CounterValue, "gpreempt_gpu_queue_resets_total",
		"Queues that the driver reset because it could not take them off a GPU, by the class of the process that it names; unknown for one that is not known.", "gpu", "class")

	leases = define(prometheus.GaugeValue, "gpreempt_leases",
		"Live leases by state.", "state")
	leasesEnded = define(prometheus.CounterValue, "gpreempt_leases_ended_total",
		"Leases that ended, by end.", "end")
	coalesced = define(prometheus.CounterValue, "gpreempt_leases_coalesced_total",
		"Leases that began while offline work was still suspended from the lease before.")
	lease = define(prometheus.UntypedValue, "gpreempt_lease_seconds",
		"How long leases lived.")
	floor = define(prometheus.GaugeValue, "gpreempt_share_floor_ratio",
		"Minimum share of the time that offline work runs, by the policy in force.")
	capRatio = define(prometheus.GaugeValue, "gpreempt_share_cap_ratio",
		"Largest share of the time that an offline job runs, by the policy in force; 1 without a cap.")
	jobRunning = define(prometheus.GaugeValue, "gpreempt_job_running_ratio",
		"Share of the last minute in which all offline processes of a job ran, of the job with the least; absent without a job.")
	floorUse = define(prometheus.GaugeValue, "gpreempt_share_floor_use_ratio",
		"Used share of the time for which the share floor permits a job to be suspended, of the job with the least left: 0 to 1.")
	draining = define(prometheus.GaugeValue, "gpreempt_draining",
		"1 while draining: the daemon suspends nothing.")

	sourceUp = define(prometheus.GaugeValue, "gpreempt_discovery_source_available",
		"1 while a source of discovery can be read.", "source")
	readings = define(prometheus.CounterValue, "gpreempt_discovery_readings_total",
		"Readings of a source.", "source")
	readingTime = define(prometheus.CounterValue, "gpreempt_discovery_reading_seconds_total",
		"Time spent reading a source.", "source")
	driverCalls = define(prometheus.CounterValue, "gpreempt_driver_calls_total",
		"Calls to the driver that returned: suspends, resumes, snapshots and their preparation.")
	driverTime = define(prometheus.CounterValue, "gpreempt_driver_call_seconds_total",
		"Time of calls to the driver, the sum of all threads.")
	processes = define(prometheus.GaugeValue, "gpreempt_processes",
		"Processes known to the driver.")
	queues = define(prometheus.GaugeValue, "gpreempt_queues",
		"User queues on a GPU.", "gpu")
	slots = define(prometheus.GaugeValue, "gpreempt_queue_slots",
		"Compute queues that fit a GPU at once; absent if that is not known.", "gpu")
	mapped = define(prometheus.GaugeValue, "gpreempt_mapped_queues",
		"Compute queues that are not suspended, of offline and of all other processes; absent without gpreempt_queue_slots.", "gpu", "of")

	refusals = define(prometheus.CounterValue, "gpreempt_refusals_total",
		"Requests and connections that were rejected, by the reason in the error.", "reason")
	warnings = define(prometheus.GaugeValue, "gpreempt_warnings",
		"Warnings raised now, by code; 0 for all others.", "code", "severity")
	appended = define(prometheus.CounterValue, "gpreempt_events_total",
		"Entries written to the event log.")
	overwritten = define(prometheus.CounterValue, "gpreempt_events_overwritten_total",
		"Entries that were overwritten in the event log.")
)
