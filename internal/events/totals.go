package events

import (
	"maps"
	"time"

	dto "github.com/prometheus/client_model/go"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// Stages is where the time of one announcement went, beside the wait its answer tells.
type Stages struct {
	// Decide is from the arrival of the call until the scheduler has dealt with it: it
	// is read, admitted, and what it needs is ordered.
	Decide time.Duration
	// Reply is from the scheduler's answer until the call has taken it.
	Reply time.Duration
}

// During says what a target was at when something failed.
type During uint8

// What a target can be at.
const (
	DuringRun During = iota
	DuringSuspend
	DuringResume
)

// String names it.
func (d During) String() string { return [...]string{"run", "suspend", "resume"}[d] }

// Failure is a kind of failure.
type Failure struct {
	During During
	Cause  scheduler.Cause
}

// Opening is a GPU's breaker that opened, and why.
type Opening struct {
	GPU   gpreempt.GPUID
	Cause scheduler.Cause
}

// Totals is everything counted since the log was made. Each map is nil while it
// has no entry.
type Totals struct {
	// Announcements were answered, by the reason of the answer; Quiesced of them with
	// the GPUs quiet.
	Announcements [scheduler.QuiesceHold + 1]uint64
	// Decide, Wait and Reply are the stages of all of them; Quiesce is the wait of
	// those that ended with the GPUs quiet.
	Decide, Wait, Reply, Quiesce *dto.Histogram
	// Ordered are suspends that were begun, by why; Resuming are resumes.
	Ordered, Resuming map[scheduler.Cause]uint64
	// Suspend and Resume are what the mechanism needed for those that succeeded.
	Suspend, Resume *dto.Histogram
	// By counts suspends that succeeded by the mechanism.
	By map[string]uint64
	// Failures are suspends and resumes that failed, each retry that fails too, and
	// targets put into quarantine for another reason.
	Failures map[Failure]uint64
	// Quarantined counts targets put into quarantine.
	Quarantined uint64
	// Coalesced leases found targets still suspended from the lease before.
	Coalesced uint64
	// Ended are leases by how they ended, Lease is how long they lived.
	Ended [scheduler.EndReleased + 1]uint64
	Lease *dto.Histogram
	// ShadowSuspends are what the shadow policy would have suspended.
	ShadowSuspends uint64
	// Openings are breakers that opened.
	Openings map[Opening]uint64
	// Refused counts requests and connections that were refused, by why.
	Refused map[gpreempt.Reason]uint64
	// Away is how long targets were away together: suspending, suspended or resuming.
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
	t.Appended = l.last
	if l.last > 0 {
		t.Overwritten = l.oldest() - 1
	}
	l.mu.Unlock()
	t.Decide, t.Wait, t.Reply, t.Quiesce = c.decide.snapshot(), c.wait.snapshot(), c.reply.snapshot(), c.quiesce.snapshot()
	t.Suspend, t.Resume, t.Lease = c.suspend.snapshot(), c.resume.snapshot(), c.lease.snapshot()
	return &t
}

func (t Totals) clone() Totals {
	t.Ordered, t.Resuming, t.By = maps.Clone(t.Ordered), maps.Clone(t.Resuming), maps.Clone(t.By)
	t.Failures, t.Openings, t.Refused = maps.Clone(t.Failures), maps.Clone(t.Openings), maps.Clone(t.Refused)
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

// moved keeps the time targets are away: a target came or went.
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
