package events

import (
	"maps"
	"runtime"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

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
	Totals     *Totals
	// GPUs are those of the inventory, States their state in the scheduler.
	GPUs    []gpreempt.GPU
	States  []scheduler.GPUInfo
	Leases  []scheduler.LeaseInfo
	Targets []Target
	// Floor is the policy's share floor; FloorUse is Core.FloorUse of the scheduler.
	Floor, FloorUse float64
	Jobs            []scheduler.JobInfo
	Draining        bool
	Sources         []inventory.Source
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
	out.announcements(s.Totals)
	out.preemptions(s.Totals, s.Mechanisms)
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

func (o output) histogram(m *metric, h *dto.Histogram, labels ...string) {
	o <- exposedHistogram{m.desc, h, prometheus.MakeLabelPairs(m.desc, labels)}
}

func (o output) yes(m *metric, is bool, labels ...string) {
	v := 0.0
	if is {
		v = 1
	}
	o.value(m, v, labels...)
}

func (o output) announcements(t *Totals) {
	for reason := scheduler.QuiesceDone; int(reason) < len(t.Announcements); reason++ {
		o.value(announcements, float64(t.Announcements[reason]), reason.String())
	}
	o.histogram(stage, t.Decide, "decide")
	o.histogram(stage, t.Wait, "wait")
	o.histogram(stage, t.Reply, "reply")
	o.histogram(quiesce, t.Quiesce)
}

// Those that are there from the beginning: a rate over what appears with its first
// event misses that event.
var (
	suspendCauses = []scheduler.Cause{scheduler.CauseLease, scheduler.CauseByHand, scheduler.CauseNewQueue, scheduler.CauseResumedByAnother, scheduler.CauseLapsed, scheduler.CauseHQDBudget}
	resumeCauses  = []scheduler.Cause{
		scheduler.CauseLeaseEnded, scheduler.CauseLingerOver, scheduler.CauseShareFloor, scheduler.CauseMaxSuspend, scheduler.CauseBreaker,
		scheduler.CauseHQDBusy, scheduler.CauseHQDRoom, scheduler.CausePinOver, scheduler.CauseReset,
	}
	failureKinds = []Failure{
		{During: DuringSuspend, Cause: scheduler.CauseFailed},
		{During: DuringSuspend, Cause: scheduler.CauseHardware},
		{During: DuringSuspend, Cause: scheduler.CauseStuck},
		{During: DuringSuspend, Cause: scheduler.CauseReset},
		{During: DuringRun, Cause: scheduler.CauseReset},
		{During: DuringResume, Cause: scheduler.CauseFailed},
		{During: DuringResume, Cause: scheduler.CauseHardware},
		{During: DuringResume, Cause: scheduler.CauseStuck},
	}
	openingCauses = []scheduler.Cause{scheduler.CauseAlarm, scheduler.CauseHung, scheduler.CauseHardware, scheduler.CauseReset}
)

// keys returns those of a map and the ones that are always there.
func keys[K comparable](always []K, counted map[K]uint64) map[K]uint64 {
	all := make(map[K]uint64, len(always))
	for _, k := range always {
		all[k] = 0
	}
	maps.Copy(all, counted)
	return all
}

func (o output) preemptions(t *Totals, mechanisms []string) {
	for cause, n := range keys(suspendCauses, t.Ordered) {
		o.value(preemptions, float64(n), string(cause))
	}
	for mechanism, n := range keys(mechanisms, t.By) {
		o.value(suspends, float64(n), named(mechanism))
	}
	for cause, n := range keys(resumeCauses, t.Resuming) {
		o.value(resumes, float64(n), string(cause))
	}
	for failure, n := range keys(failureKinds, t.Failures) {
		o.value(failures, float64(n), failure.During.String(), string(failure.Cause))
	}
	o.histogram(suspend, t.Suspend)
	o.histogram(resume, t.Resume)
	o.value(quarantines, float64(t.Quarantined))
	o.value(away, t.Away.Seconds())
	o.value(shadow, float64(t.ShadowSuspends))
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
	opened := map[Opening]uint64{}
	for _, gpu := range s.States {
		id := gpu.ID.String()
		o.value(gpuSuspended, float64(gpu.Suspended), id)
		o.value(gpuCannotSuspend, float64(gpu.CannotSuspend), id)
		o.value(gpuLeases, float64(gpu.Leases), id)
		o.value(attachCycles, float64(s.Totals.AttachCycles[gpu.ID]), id)
		o.yes(breakerOpen, gpu.BreakerOpen, id)
		for _, cause := range openingCauses {
			opened[Opening{GPU: gpu.ID, Cause: cause}] = 0
		}
	}
	maps.Copy(opened, s.Totals.Openings)
	reset := map[QueueReset]uint64{}
	for _, gpu := range s.GPUs {
		reset[QueueReset{GPU: gpu.ID}] = 0
		for class := gpreempt.Unmanaged; class <= gpreempt.Offline; class++ {
			reset[QueueReset{gpu.ID, class, true}] = 0
		}
	}
	maps.Copy(reset, s.Totals.Resets)
	for r, n := range reset {
		o.value(queueResets, float64(n), r.GPU.String(), r.class())
	}
	for opening, n := range opened {
		o.value(openings, float64(n), opening.GPU.String(), string(opening.Cause))
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
	for end := scheduler.EndCompleted; int(end) < len(s.Totals.Ended); end++ {
		o.value(leasesEnded, float64(s.Totals.Ended[end]), end.String())
	}
	o.histogram(lease, s.Totals.Lease)
	o.value(coalesced, float64(s.Totals.Coalesced))
	o.value(floor, s.Floor)
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
	for reason, n := range s.Totals.Refused {
		o.value(refusals, float64(n), string(reason))
	}
	for _, kind := range gpreempt.WarningKinds() {
		now := 0
		for w := range slices.Values(s.Warnings) {
			if w.Code == kind.Code {
				now++
			}
		}
		o.value(warnings, float64(now), kind.Code, kind.Severity)
	}
	o.value(appended, float64(s.Totals.Appended))
	o.value(overwritten, float64(s.Totals.Overwritten))
}
