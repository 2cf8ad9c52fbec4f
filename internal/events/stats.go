package events

import (
	"math/bits"
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
	counts                          Stats // its Latency fields stay empty
	quiesce, suspend, resume, lease samples
}

func (f *fold) record(r scheduler.Record) {
	switch r.Kind {
	case scheduler.RecordTarget:
		f.target(r)
	case scheduler.RecordLease:
		if r.Cause == scheduler.CauseCoalesced {
			f.counts.Coalesced++
		}
		if r.ToLease == scheduler.LeaseEnded {
			f.lease.add(r.Took)
		}
	case scheduler.RecordShadow:
		if r.ToTarget == scheduler.TargetSuspended {
			f.counts.ShadowSuspends++
		}
	case scheduler.RecordNone, scheduler.RecordBreaker, scheduler.RecordPolicy, scheduler.RecordDrain:
	}
}

func (f *fold) target(r scheduler.Record) {
	from, to := r.FromTarget, r.ToTarget
	// A failed suspend or resume is followed by a resume into quarantine: the
	// failure is counted when it happens, the resume as one that succeeded.
	intoQuarantine := to == scheduler.TargetQuarantined && r.Cause == scheduler.CauseQuarantine
	switch {
	case from == scheduler.TargetSuspending && to == scheduler.TargetSuspended:
		f.counts.Suspends++
		f.suspend.add(r.Took)
	case from == scheduler.TargetResuming && (to == scheduler.TargetRunning || intoQuarantine):
		f.counts.Resumes++
		f.resume.add(r.Took)
	case r.Cause == scheduler.CauseFailed, r.Cause == scheduler.CauseHardware, from != to && to == scheduler.TargetQuarantined:
		f.counts.Failures++
	case to == scheduler.TargetResuming && (r.Cause == scheduler.CauseShareFloor || r.Cause == scheduler.CauseMaxSuspend):
		f.counts.ForcedResumes++
	}
}

func (f *fold) answer(a scheduler.Answer) {
	f.counts.Announcements++
	if a.Quiesced {
		f.counts.Quiesced++
		f.quiesce.add(a.Waited)
	}
	if a.Reason == scheduler.QuiesceMaxWait {
		f.counts.MaxWaitPassed++
	}
}

func (f *fold) refused(why gpreempt.Reason) {
	if f.counts.Refused == nil {
		f.counts.Refused = map[gpreempt.Reason]uint64{}
	}
	f.counts.Refused[why]++
}

// samples keeps the exact sum of all durations and the last of them. Durations
// below 0 count as 0.
type samples struct {
	count uint64
	// sumHigh and sumLow are the 128-bit sum in nanoseconds: 64 bits would
	// overflow after 292 years of lease time, a few months at 1000 leases.
	sumHigh, sumLow uint64
	last            [LatencySamples]time.Duration
}

func (s *samples) add(d time.Duration) {
	d = max(d, 0)
	s.last[s.count%LatencySamples] = d
	s.count++
	var carry uint64
	s.sumLow, carry = bits.Add64(s.sumLow, uint64(d), 0)
	s.sumHigh += carry
}

// stats summarises the fold, and spoils the order of its samples: it is called
// on a copy.
func (f *fold) stats() Stats {
	s := f.counts
	s.Quiesce = f.quiesce.latency()
	s.Suspend = f.suspend.latency()
	s.Resume = f.resume.latency()
	s.Lease = f.lease.latency()
	return s
}

func (s *samples) latency() Latency {
	if s.count == 0 {
		return Latency{}
	}
	mean, _ := bits.Div64(s.sumHigh, s.sumLow, s.count)
	sorted := s.last[:min(s.count, LatencySamples)]
	slices.Sort(sorted)
	return Latency{
		Count: s.count,
		Mean:  time.Duration(mean),
		P50:   nearestRank(sorted, 50),
		P95:   nearestRank(sorted, 95),
		P99:   nearestRank(sorted, 99),
		Max:   sorted[len(sorted)-1],
	}
}

// nearestRank gives the smallest sample that at least percent of the samples,
// sorted and not empty, do not exceed.
func nearestRank(sorted []time.Duration, percent int) time.Duration {
	return sorted[(len(sorted)*percent+99)/100-1]
}
