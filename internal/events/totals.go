package events

import (
	"maps"
	"time"

	dto "github.com/prometheus/client_model/go"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// Stages are the durations of the parts of one announcement. The wait is in its answer.
type Stages struct {
	// Decide is from the arrival of the call until the scheduler has admitted it and
	// ordered its suspends.
	Decide time.Duration
	// Reply is from the scheduler's answer until the call has received it.
	Reply time.Duration
}

// During is what a target did when something failed.
type During uint8

// What a target can do.
const (
	DuringRun During = iota
	DuringSuspend
	DuringResume
)

// String returns the name in metrics.
func (d During) String() string { return [...]string{"run", "suspend", "resume"}[d] }

// Failure is a kind of failure.
type Failure struct {
	During During
	Cause  scheduler.Cause
}

// Opening is the opening of a GPU's breaker, by cause.
type Opening struct {
	GPU   gpreempt.GPUID
	Cause scheduler.Cause
}

// QueueReset is the reset of a queue by the driver: the GPU, and the class of the process that
// the driver names; Known is false for a process that is not known.
type QueueReset struct {
	GPU   gpreempt.GPUID
	Class gpreempt.Class
	Known bool
}

// class returns the class, and "unknown" for that of a process that is not known.
func (r QueueReset) class() string {
	if !r.Known {
		return "unknown"
	}
	return r.Class.String()
}

// Totals is everything counted since the log was made. Each map is nil while it
// has no entry.
type Totals struct {
	// Announcements were answered, by the reason of the answer.
	Announcements [scheduler.QuiesceCannotSuspend + 1]uint64
	// Decide, Wait and Reply are the stages of all of them; Quiesce is the wait of those
	// whose answer was that all targets are suspended.
	Decide, Wait, Reply, Quiesce *dto.Histogram
	// Ordered are suspends that began, by cause; Resuming are resumes.
	Ordered, Resuming map[scheduler.Cause]uint64
	// Suspend and Resume are the times of the mechanism for those that succeeded.
	Suspend, Resume *dto.Histogram
	// By counts suspends that succeeded, by mechanism.
	By map[string]uint64
	// Failures counts suspends and resumes that failed, with each failed retry, and
	// targets put into quarantine for another reason.
	Failures map[Failure]uint64
	// Quarantined counts targets put into quarantine.
	Quarantined uint64
	// Coalesced leases began while targets were still suspended from the lease before.
	Coalesced uint64
	// Ended are leases by how they ended, Lease is how long they lived.
	Ended [scheduler.EndReleased + 1]uint64
	Lease *dto.Histogram
	// ShadowSuspends are what the shadow policy would have suspended.
	ShadowSuspends uint64
	// Openings are breakers that opened.
	Openings map[Opening]uint64
	// Resets are queues that the driver has reset.
	Resets map[QueueReset]uint64
	// AttachCycles are runlist cycles that attaching to targets and releasing them caused
	// on GPUs that they have no queue on.
	AttachCycles map[gpreempt.GPUID]uint64
	// Refused counts rejected requests and connections, by reason.
	Refused map[gpreempt.Reason]uint64
	// Away is the total time of all targets in the states suspending, suspended and resuming.
	Away time.Duration
	// Appended and Overwritten count the entries of the log.
	Appended, Overwritten uint64
}

// Totals returns everything counted until now, a time of the scheduler's clock.
func (l *Log) Totals(now scheduler.Time) *Totals {
	l.mu.Lock()
	c := &l.counters
	t := c.totals.clone()
	t.Away += time.Duration(c.away) * max(0, now-c.awayAt)
	t.Appended, t.Overwritten = l.entries.Last(), max(l.entries.Oldest(), 1)-1
	l.mu.Unlock()
	t.Decide, t.Wait, t.Reply, t.Quiesce = c.decide.snapshot(), c.wait.snapshot(), c.reply.snapshot(), c.quiesce.snapshot()
	t.Suspend, t.Resume, t.Lease = c.suspend.snapshot(), c.resume.snapshot(), c.lease.snapshot()
	return &t
}

func (t Totals) clone() Totals {
	t.Ordered, t.Resuming, t.By = maps.Clone(t.Ordered), maps.Clone(t.Resuming), maps.Clone(t.By)
	t.AttachCycles = maps.Clone(t.AttachCycles)
	t.Failures, t.Openings, t.Resets, t.Refused = maps.Clone(t.Failures), maps.Clone(t.Openings), maps.Clone(t.Resets), maps.Clone(t.Refused)
	return t
}

// count adds one to an entry of a map that may be nil.
func count[K comparable](m *map[K]uint64, key K) {
	if *m == nil {
		*m = map[K]uint64{}
	}
	(*m)[key]++
}

func isAway(s scheduler.TargetState) bool {
	return s == scheduler.TargetSuspending || s == scheduler.TargetSuspended || s == scheduler.TargetResuming
}

// moved updates the sum of the times that targets are away.
func (c *counters) moved(r scheduler.Record) {
	was, is := isAway(r.FromTarget), isAway(r.ToTarget)
	if was == is {
		return
	}
	c.totals.Away += time.Duration(c.away) * (r.At - c.awayAt)
	c.awayAt = r.At
	if is {
		c.away++
	} else {
		c.away--
	}
}

func during(from scheduler.TargetState) During {
	switch from {
	case scheduler.TargetSuspending:
		return DuringSuspend
	case scheduler.TargetResuming:
		return DuringResume
	default:
		return DuringRun
	}
}
