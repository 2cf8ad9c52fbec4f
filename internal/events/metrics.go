package events

import (
	"runtime"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpreempt/gpreempt/internal/inventory"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// MetricsSnapshot is the content of one scrape.
type MetricsSnapshot struct {
	Version string
	// Backend is "kfd", "simulated MACHINE" or "emulated MACHINE".
	Backend string
	// Mechanisms are the names of the enabled ones.
	Mechanisms []string
	// Log is the log, and Now the scheduler's time.
	Log *Log
	Now scheduler.Time
	// GPUs are those of the inventory, States their state in the scheduler.
	GPUs    []gpreempt.GPU
	States  []scheduler.GPUInfo
	Leases  []scheduler.LeaseInfo
	Targets []Target
	// Floor and Cap are the policy's share floor and cap; FloorUse is Core.FloorUse of the scheduler.
	Floor, Cap, FloorUse float64
	Jobs                 []scheduler.JobInfo
	Draining             bool
	Sources              []inventory.Source
	// DriverCalls is the number of calls that returned, DriverTime their time together.
	DriverCalls int64
	DriverTime  time.Duration
	Processes   int
	// Queues are counted by GPU.
	Queues map[gpreempt.GPUID]int
	// Used is the use of the slots for compute queues.
	Used     map[gpreempt.GPUID]inventory.Occupancy
	Warnings []gpreempt.Warning
}

// Target is a target in a snapshot. Mechanism is "" for none.
type Target struct {
	Class     gpreempt.Class
	State     scheduler.TargetState
	Mechanism string
}

// NewCollector returns a collector that calls snapshot at each scrape, concurrently.
func NewCollector(snapshot func() MetricsSnapshot) prometheus.Collector { return collector(snapshot) }

type collector func() MetricsSnapshot

// Describe implements prometheus.Collector.
func (collector) Describe(ch chan<- *prometheus.Desc) {
	for _, m := range table {
		ch <- m.desc
	}
}

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	s := c()
	out := output(ch)
	out.value(buildInfo, 1, s.Version, runtime.Version(), s.Backend)
	out.log(s)
	out.targets(s.Targets)
	out.gpus(s)
	out.leases(s)
	out.discovery(s)
	out.health(s)
}

// output is where metrics go.
type output chan<- prometheus.Metric

func (o output) value(m *metric, v float64, labels ...string) {
	o <- prometheus.MustNewConstMetric(m.desc, m.kind, v, labels...)
}

func (o output) yes(m *metric, is bool, labels ...string) {
	v := 0.0
	if is {
		v = 1
	}
	o.value(m, v, labels...)
}

// log sends what the log has counted.
func (o output) log(s MetricsSnapshot) {
	l, c := s.Log, &s.Log.counters
	l.mu.Lock()
	c.ofGPUs(s.States, s.Mechanisms)
	o.value(away, c.awayUntil(s.Now).Seconds())
	o.value(appended, float64(l.entries.Last()))
	o.value(overwritten, float64(max(l.entries.Oldest(), 1)-1))
	l.mu.Unlock()
	for _, counted := range []prometheus.Collector{
		c.announcements, c.preemptions, c.suspends, c.resumes, c.failures, c.quarantines, c.coalesced, c.ended, c.shadow, c.openings, c.resets, c.cycles, c.refused,
		c.decide, c.wait, c.reply, c.quiesce, c.suspend, c.resume, c.lease,
	} {
		counted.Collect(o)
	}
}

// named returns the name of a mechanism, and a word for none.
func named(mechanism string) string {
	if mechanism == "" {
		return "none"
	}
	return mechanism
}

func (o output) targets(list []Target) {
	count := map[Target]int{{Class: gpreempt.Offline, State: scheduler.TargetRunning}: 0}
	for _, t := range list {
		count[t]++
	}
	for t, n := range count {
		o.value(targets, float64(n), t.Class.String(), t.State.String(), named(t.Mechanism))
	}
}

func (o output) gpus(s MetricsSnapshot) {
	for _, gpu := range s.GPUs {
		o.value(gpuInfo, 1, gpu.ID.String(), gpu.Name, gpu.BDF)
		o.value(queues, float64(s.Queues[gpu.ID]), gpu.ID.String())
		if used := s.Used[gpu.ID]; used.Slots > 0 {
			o.value(slots, float64(used.Slots), gpu.ID.String())
			o.value(mapped, float64(used.Mapped-used.Offline), gpu.ID.String(), "other")
			o.value(mapped, float64(used.Offline), gpu.ID.String(), "offline")
		}
	}
	for _, gpu := range s.States {
		id := gpu.ID.String()
		o.value(gpuSuspended, float64(gpu.Suspended), id)
		o.value(gpuCannotSuspend, float64(gpu.CannotSuspend), id)
		o.value(gpuLeases, float64(gpu.Leases), id)
		o.yes(breakerOpen, gpu.BreakerOpen, id)
	}
}

func (o output) leases(s MetricsSnapshot) {
	var states [scheduler.LeaseEnded]int
	for _, l := range s.Leases {
		states[l.State]++
	}
	for state := scheduler.LeaseWaiting; state < scheduler.LeaseEnded; state++ {
		o.value(leases, float64(states[state]), state.String())
	}
	o.value(floor, s.Floor)
	o.value(capRatio, s.Cap)
	o.value(floorUse, s.FloorUse)
	least, known := 1.0, false
	for _, j := range s.Jobs {
		if j.Over > 0 {
			least, known = min(least, j.Ran), true
		}
	}
	if known {
		o.value(jobRunning, least)
	}
	o.yes(draining, s.Draining)
}

func (o output) discovery(s MetricsSnapshot) {
	for _, source := range s.Sources {
		o.yes(sourceUp, source.Available, source.Name)
		o.value(readings, float64(source.Readings), source.Name)
		o.value(readingTime, source.Spent.Seconds(), source.Name)
	}
	o.value(driverCalls, float64(s.DriverCalls))
	o.value(driverTime, s.DriverTime.Seconds())
	o.value(processes, float64(s.Processes))
}

func (o output) health(s MetricsSnapshot) {
	for _, kind := range gpreempt.WarningKinds() {
		now := 0
		for w := range slices.Values(s.Warnings) {
			if w.Code == kind.Code {
				now++
			}
		}
		o.value(warnings, float64(now), kind.Code, kind.Severity)
	}
}
