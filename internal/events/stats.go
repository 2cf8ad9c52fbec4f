package events

import (
	"slices"
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/scheduler"
)

// LatencySamples is how many of the last durations the percentiles are taken over.
const LatencySamples = 4096

// Latency summarises durations.
type Latency struct {
	// Count is the number of durations ever.
	Count uint64
	// Mean is over all of them.
	Mean time.Duration
	// P50, P95 and P99 are nearest-rank percentiles, and Max the largest, over the
	// last LatencySamples.
	P50, P95, P99, Max time.Duration
}

// Stats counts what happened since the log was made.
type Stats struct {
	// Announcements were answered; Quiesced of them with the GPUs quiet,
	// MaxWaitPassed because the wait was over first.
	Announcements, Quiesced, MaxWaitPassed uint64
	// Suspends and Resumes that succeeded.
	Suspends, Resumes uint64
	// Failures are suspends and resumes that failed, each retry that fails too, and
	// targets put into quarantine for another reason.
	Failures uint64
	// Coalesced leases found targets still suspended from the lease before.
	Coalesced uint64
	// ForcedResumes were due to the share floor or max_suspend.
	ForcedResumes uint64
	// ShadowSuspends are what the shadow policy would have suspended.
	ShadowSuspends uint64
	// Refused counts requests and connections that were refused, by why; nil when
	// none was.
	Refused map[gpreempt.Reason]uint64
	// Quiesce is from announcement to quiet GPUs, Suspend and Resume are what the
	// mechanism needed, Lease is how long leases lived.
	Quiesce, Suspend, Resume, Lease Latency
}

// fold is the statistics in the making. It is a function of the records and
// answers given to it, in their order.
type fold struct {
	totals                          Totals // its histograms, and what follows from the log, stay empty
	decide, wait, reply             Histogram
	quiesce, suspend, resume, lease samples
	// away targets there are since awayAt.
	away   int
	awayAt scheduler.Time
}

func (f *fold) init() {
	for _, h := range [...]*Histogram{&f.decide, &f.wait, &f.reply, &f.quiesce.Histogram, &f.suspend.Histogram, &f.resume.Histogram} {
		h.bounds = callBounds
	}
	f.lease.bounds = leaseBounds
}

func (f *fold) record(r scheduler.Record, mechanism string) {
	switch r.Kind {
	case scheduler.RecordTarget:
		f.moved(r)
		f.target(r, mechanism)
	case scheduler.RecordLease:
		if r.Cause == scheduler.CauseCoalesced {
			f.totals.Coalesced++
		}
		if r.ToLease == scheduler.LeaseEnded {
			f.totals.Ended[r.End]++
			f.lease.add(r.Took)
		}
	case scheduler.RecordShadow:
		if r.ToTarget == scheduler.TargetSuspended {
			f.totals.ShadowSuspends++
		}
	case scheduler.RecordBreaker:
		if r.On {
			count(&f.totals.Openings, Opening{r.GPU, r.Cause})
		}
	case scheduler.RecordNone, scheduler.RecordPolicy, scheduler.RecordDrain:
	}
}

func (f *fold) target(r scheduler.Record, mechanism string) {
	from, to := r.FromTarget, r.ToTarget
	if from != to && to == scheduler.TargetQuarantined {
		f.totals.Quarantined++
	}
	// A failed suspend or resume is followed by a resume into quarantine: the
	// failure is counted when it happens, the resume as one that succeeded.
	intoQuarantine := to == scheduler.TargetQuarantined && r.Cause == scheduler.CauseQuarantine
	switch {
	case from == scheduler.TargetSuspending && to == scheduler.TargetSuspended:
		f.suspend.add(r.Took)
		count(&f.totals.By, mechanism)
	case from == scheduler.TargetResuming && (to == scheduler.TargetRunning || intoQuarantine):
		f.resume.add(r.Took)
	case r.Cause == scheduler.CauseFailed, r.Cause == scheduler.CauseHardware, from != to && to == scheduler.TargetQuarantined:
		count(&f.totals.Failures, Failure{during(from), r.Cause})
	case from == to: // a retry, or another class
	case to == scheduler.TargetSuspending:
		count(&f.totals.Ordered, r.Cause)
	case to == scheduler.TargetResuming:
		count(&f.totals.Resuming, r.Cause)
	}
}

func (f *fold) answer(a scheduler.Answer, s Stages) {
	f.totals.Announcements[a.Reason]++
	f.decide.add(max(s.Decide, 0))
	f.wait.add(max(a.Waited, 0))
	f.reply.add(max(s.Reply, 0))
	if a.Quiesced {
		f.quiesce.add(a.Waited)
	}
}

func (f *fold) refused(why gpreempt.Reason) { count(&f.totals.Refused, why) }

// samples keeps the last durations beside the histogram of all. Durations below 0
// count as 0.
type samples struct {
	Histogram

	last [LatencySamples]time.Duration
}

func (s *samples) add(d time.Duration) {
	d = max(d, 0)
	s.last[s.count%LatencySamples] = d
	s.Histogram.add(d)
}

// stats summarises the fold, and spoils the order of its samples: it is called
// on a copy.
func (f *fold) stats() Stats {
	t := &f.totals
	s := Stats{
		Quiesced: f.quiesce.count, MaxWaitPassed: t.Announcements[scheduler.QuiesceMaxWait],
		Suspends: f.suspend.count, Resumes: f.resume.count,
		Coalesced: t.Coalesced, ForcedResumes: t.Resuming[scheduler.CauseShareFloor] + t.Resuming[scheduler.CauseMaxSuspend],
		ShadowSuspends: t.ShadowSuspends, Refused: t.Refused,
		Quiesce: f.quiesce.latency(), Suspend: f.suspend.latency(), Resume: f.resume.latency(), Lease: f.lease.latency(),
	}
	for _, n := range t.Announcements {
		s.Announcements += n
	}
	for _, n := range t.Failures {
		s.Failures += n
	}
	return s
}

func (s *samples) latency() Latency {
	if s.count == 0 {
		return Latency{}
	}
	sorted := s.last[:min(s.count, LatencySamples)]
	slices.Sort(sorted)
	return Latency{
		Count: s.count,
		Mean:  s.mean(),
		P50:   nearestRank(sorted, 50),
		P95:   nearestRank(sorted, 95),
		P99:   nearestRank(sorted, 99),
		Max:   sorted[len(sorted)-1],
	}
}

// nearestRank returns the smallest sample that at least percent of the samples,
// sorted and not empty, do not exceed.
func nearestRank(sorted []time.Duration, percent int) time.Duration {
	return sorted[(len(sorted)*percent+99)/100-1]
}
