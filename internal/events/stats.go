package events

import (
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// Stats are the counts since the log was made.
type Stats struct {
	// Announcements were answered; Quiesced of them with all targets suspended, and
	// MaxWaitPassed because max_wait passed before.
	Announcements, Quiesced, MaxWaitPassed uint64
	// Suspends and Resumes that succeeded.
	Suspends, Resumes uint64
	// Failures are suspends and resumes that failed, each retry that fails too, and
	// targets put into quarantine for another reason.
	Failures uint64
	// Coalesced leases began while targets were still suspended from the lease before.
	Coalesced uint64
	// ForcedResumes were due to the share floor or max_suspend.
	ForcedResumes uint64
	// ShadowSuspends are what the shadow policy would have suspended.
	ShadowSuspends uint64
	// AttachCycles are runlist cycles that attaching to targets and releasing them caused
	// on GPUs that they have no queue on.
	AttachCycles uint64
	// Refused counts rejected requests and connections, by reason; nil for none.
	Refused map[gpreempt.Reason]uint64
	// Quiesce is the time from announcement to an answer with all targets suspended.
	// Suspend and Resume are the times of the mechanism. Lease is how long leases lived.
	Quiesce, Suspend, Resume, Lease Latency
}

// counters are the statistics of a log: a function of the records and answers counted,
// in their order. Log.mu guards them.
type counters struct {
	totals                                               Totals // without its histograms and the fields that follow from the log
	decide, wait, reply, quiesce, suspend, resume, lease histogram
	// away is the number of targets that are off the GPUs, since awayAt.
	away   int
	awayAt scheduler.Time
}

func newCounters() counters {
	return counters{
		decide: newHistogram(callBounds), wait: newHistogram(callBounds), reply: newHistogram(callBounds), quiesce: newHistogram(callBounds),
		suspend: newHistogram(callBounds), resume: newHistogram(callBounds), lease: newHistogram(leaseBounds),
	}
}

func (c *counters) record(r scheduler.Record, mechanism string) {
	switch r.Kind {
	case scheduler.RecordTarget:
		c.moved(r)
		c.target(r, mechanism)
	case scheduler.RecordLease:
		if r.Cause == scheduler.CauseCoalesced {
			c.totals.Coalesced++
		}
		if r.ToLease == scheduler.LeaseEnded {
			c.totals.Ended[r.End]++
			c.lease.add(r.Took)
		}
	case scheduler.RecordShadow:
		if r.ToTarget == scheduler.TargetSuspended {
			c.totals.ShadowSuspends++
		}
	case scheduler.RecordBreaker:
		if r.On {
			count(&c.totals.Openings, Opening{r.GPU, r.Cause})
		}
	case scheduler.RecordReset:
		count(&c.totals.Resets, QueueReset{r.GPU, r.Class, !r.Target.IsZero()})
	case scheduler.RecordNone, scheduler.RecordPolicy, scheduler.RecordDrain:
	}
}

func (c *counters) target(r scheduler.Record, mechanism string) {
	from, to := r.FromTarget, r.ToTarget
	if from != to && to == scheduler.TargetQuarantined {
		c.totals.Quarantined++
	}
	// A failed suspend or resume is followed by a resume into quarantine: the
	// failure is counted when it happens, the resume as one that succeeded.
	intoQuarantine := to == scheduler.TargetQuarantined && (r.Cause == scheduler.CauseQuarantine || r.Cause == scheduler.CauseStuck || r.Cause == scheduler.CauseReset)
	switch {
	case from == scheduler.TargetSuspending && to == scheduler.TargetSuspended:
		c.suspend.add(r.Took)
		count(&c.totals.By, mechanism)
	case from == scheduler.TargetResuming && (to == scheduler.TargetRunning || intoQuarantine):
		c.resume.add(r.Took)
	case r.Cause == scheduler.CauseFailed, r.Cause == scheduler.CauseHardware, from == scheduler.TargetSuspending && r.Cause == scheduler.CauseReset, from == to && r.Cause == scheduler.CauseStuck, from != to && to == scheduler.TargetQuarantined:
		count(&c.totals.Failures, Failure{during(from), r.Cause})
	case from == to && r.Cause != scheduler.CauseNewQueue: // a retry, or another class
	case to == scheduler.TargetSuspending, from == to: // which the mechanism has suspended by itself
		count(&c.totals.Ordered, r.Cause)
	case to == scheduler.TargetResuming:
		count(&c.totals.Resuming, r.Cause)
	}
}

func (c *counters) answer(a scheduler.Answer, s Stages) {
	c.totals.Announcements[a.Reason]++
	c.decide.add(s.Decide)
	c.wait.add(a.Waited)
	c.reply.add(s.Reply)
	if a.Quiesced {
		c.quiesce.add(a.Waited)
	}
}

func (c *counters) refused(why gpreempt.Reason) { count(&c.totals.Refused, why) }

// Stats returns the statistics of everything appended and answered since the log was made.
func (l *Log) Stats() Stats {
	l.mu.Lock()
	t, c := l.counters.totals.clone(), &l.counters
	longest := [...]time.Duration{c.quiesce.max, c.suspend.max, c.resume.max, c.lease.max}
	l.mu.Unlock()
	s := Stats{
		MaxWaitPassed: t.Announcements[scheduler.QuiesceMaxWait],
		Coalesced:     t.Coalesced, ForcedResumes: t.Resuming[scheduler.CauseShareFloor] + t.Resuming[scheduler.CauseMaxSuspend],
		ShadowSuspends: t.ShadowSuspends, Refused: t.Refused,
		Quiesce: latency(c.quiesce.snapshot(), longest[0]), Suspend: latency(c.suspend.snapshot(), longest[1]),
		Resume: latency(c.resume.snapshot(), longest[2]), Lease: latency(c.lease.snapshot(), longest[3]),
	}
	s.Quiesced, s.Suspends, s.Resumes = s.Quiesce.Count, s.Suspend.Count, s.Resume.Count
	for _, n := range t.Announcements {
		s.Announcements += n
	}
	for _, n := range t.AttachCycles {
		s.AttachCycles += n
	}
	for _, n := range t.Failures {
		s.Failures += n
	}
	return s
}
