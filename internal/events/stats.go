package events

import (
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
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

// counter is a metric that counts, by up to two labels.
type counter struct {
	*prometheus.CounterVec
	by map[[2]string]prometheus.Counter // by the values of the labels; guarded by Log.mu
}

func newCounter(m *metric) counter {
	return counter{prometheus.NewCounterVec(prometheus.CounterOpts{Name: m.name, Help: m.help}, m.labels), map[[2]string]prometheus.Counter{}}
}

// of returns the counter for values of the labels, which is there with 0 from now on. Unlike
// WithLabelValues it allocates only the first time.
func (c counter) of(labels ...string) prometheus.Counter {
	var key [2]string
	copy(key[:], labels)
	n := c.by[key]
	if n == nil {
		n = c.WithLabelValues(slices.Clone(labels)...)
		c.by[key] = n
	}
	return n
}

// sum returns the number that all labels have counted.
func (c counter) sum() (all uint64) {
	for _, n := range c.by {
		all += counted(n)
	}
	return all
}

func counted(n prometheus.Counter) uint64 {
	var m dto.Metric
	_ = n.Write(&m) // the client's counter returns no error
	return uint64(m.GetCounter().GetValue())
}

// counters are the statistics of a log: a function of the records and answers counted,
// in their order. They are the metrics of the same names. Log.mu guards their changes.
type counters struct {
	announcements, preemptions, suspends, resumes, failures, quarantines, coalesced, ended, shadow, openings, resets, cycles, refused counter

	decide, wait, reply, quiesce, suspend, resume, lease histogram
	report                                               shadowReport
	// away is the number of targets that are off the GPUs, since awayAt. awayFor is how long all
	// targets together have been, until then.
	away    int
	awayAt  scheduler.Time
	awayFor time.Duration
}

func newCounters() counters {
	c := counters{
		announcements: newCounter(announcements), preemptions: newCounter(preemptions), suspends: newCounter(suspends), resumes: newCounter(resumes),
		failures: newCounter(failures), quarantines: newCounter(quarantines), coalesced: newCounter(coalesced), ended: newCounter(leasesEnded),
		shadow: newCounter(shadow), openings: newCounter(openings), resets: newCounter(queueResets), cycles: newCounter(attachCycles), refused: newCounter(refusals),
		decide: newHistogram(stage, callBounds, "decide"), wait: newHistogram(stage, callBounds, "wait"), reply: newHistogram(stage, callBounds, "reply"),
		quiesce: newHistogram(quiesce, callBounds), suspend: newHistogram(suspend, callBounds), resume: newHistogram(resume, callBounds),
		lease: newHistogram(lease, leaseBounds),
	}
	// Those that are there from the beginning: a rate over what appears with its first
	// event misses that event.
	for _, reason := range scheduler.Answers() {
		c.announcements.of(string(reason))
	}
	for end := scheduler.EndCompleted; end <= scheduler.EndReleased; end++ {
		c.ended.of(end.String())
	}
	for _, cause := range suspendCauses {
		c.preemptions.of(string(cause))
	}
	for _, cause := range resumeCauses {
		c.resumes.of(string(cause))
	}
	for during, causes := range failureCauses {
		for _, cause := range causes {
			c.failures.of(during, string(cause))
		}
	}
	for _, n := range []counter{c.quarantines, c.coalesced, c.shadow} {
		n.of()
	}
	return c
}

var (
	suspendCauses = []scheduler.Cause{scheduler.CauseLease, scheduler.CauseByHand, scheduler.CauseNewQueue, scheduler.CauseResumedByAnother, scheduler.CauseLapsed, scheduler.CauseHQDBudget, scheduler.CauseShareCap}
	resumeCauses  = []scheduler.Cause{
		scheduler.CauseLeaseEnded, scheduler.CauseLingerOver, scheduler.CauseShareFloor, scheduler.CauseMaxSuspend, scheduler.CauseBreaker,
		scheduler.CauseHQDBusy, scheduler.CauseHQDRoom, scheduler.CausePinOver, scheduler.CauseShareCapOver, scheduler.CauseReset,
	}
	failureCauses = map[string][]scheduler.Cause{ // by what the target did
		"suspend": {scheduler.CauseFailed, gpreempt.ReasonResisted, scheduler.CauseHardware, scheduler.CauseStuck, scheduler.CauseReset},
		"resume":  {scheduler.CauseFailed, gpreempt.ReasonResisted, scheduler.CauseHardware, scheduler.CauseStuck},
		"run":     {scheduler.CauseReset},
	}
	openingCauses = []scheduler.Cause{scheduler.CauseAlarm, scheduler.CauseHung, scheduler.CauseHardware, scheduler.CauseReset}
)

// ofGPUs makes the counters of GPUs and mechanisms that count nothing yet.
func (c *counters) ofGPUs(gpus []scheduler.GPUInfo, mechanisms []string) {
	for _, m := range mechanisms {
		c.suspends.of(named(m))
	}
	for _, gpu := range gpus {
		id := gpu.ID.String()
		c.cycles.of(id)
		for _, cause := range openingCauses {
			c.openings.of(id, string(cause))
		}
		for class := gpreempt.Unmanaged; class <= gpreempt.Offline; class++ {
			c.resets.of(id, class.String())
		}
		c.resets.of(id, unknownClass)
	}
}

// unknownClass is the class of a process that is not known.
const unknownClass = "unknown"

func (c *counters) record(r scheduler.Record, mechanism string) {
	c.report.record(r)
	switch r.Kind {
	case scheduler.RecordTarget:
		c.moved(r)
		c.target(r, mechanism)
	case scheduler.RecordLease:
		if r.Cause == scheduler.CauseCoalesced {
			c.coalesced.of().Inc()
		}
		if r.ToLease == scheduler.LeaseEnded {
			c.ended.of(r.End.String()).Inc()
			c.lease.add(r.Took)
		}
	case scheduler.RecordShadow:
		if r.ToTarget == scheduler.TargetSuspended {
			c.shadow.of().Inc()
		}
	case scheduler.RecordBreaker:
		if r.On {
			c.openings.of(r.GPU.String(), string(r.Cause)).Inc()
		}
	case scheduler.RecordReset:
		class := unknownClass
		if !r.Target.IsZero() {
			class = r.Class.String()
		}
		c.resets.of(r.GPU.String(), class).Inc()
	case scheduler.RecordNone, scheduler.RecordPolicy, scheduler.RecordDrain:
	}
}

func (c *counters) target(r scheduler.Record, mechanism string) {
	from, to := r.FromTarget, r.ToTarget
	if from != to && to == scheduler.TargetQuarantined {
		c.quarantines.of().Inc()
	}
	// A failed suspend or resume is followed by a resume into quarantine: the
	// failure is counted when it happens, the resume as one that succeeded.
	intoQuarantine := to == scheduler.TargetQuarantined && (r.Cause == scheduler.CauseQuarantine || r.Cause == scheduler.CauseStuck || r.Cause == scheduler.CauseReset)
	switch {
	case from == scheduler.TargetSuspending && to == scheduler.TargetSuspended:
		c.suspend.add(r.Took)
		c.suspends.of(named(mechanism)).Inc()
	case from == scheduler.TargetResuming && (to == scheduler.TargetRunning || intoQuarantine):
		c.resume.add(r.Took)
	case r.Failed(), from == scheduler.TargetSuspending && r.Cause == scheduler.CauseReset, from == to && r.Cause == scheduler.CauseStuck, from != to && to == scheduler.TargetQuarantined:
		c.failures.of(during(from), string(r.Cause)).Inc()
	case from == to && r.Cause != scheduler.CauseNewQueue: // a retry, or another class
	case to == scheduler.TargetSuspending, from == to: // which the mechanism has suspended by itself
		c.preemptions.of(string(r.Cause)).Inc()
	case to == scheduler.TargetResuming:
		c.resumes.of(string(r.Cause)).Inc()
	}
}

// during returns what a target did when something failed.
func during(from scheduler.TargetState) string {
	switch from {
	case scheduler.TargetSuspending:
		return "suspend"
	case scheduler.TargetResuming:
		return "resume"
	default:
		return "run"
	}
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
	c.awayFor, c.awayAt = c.awayUntil(r.At), r.At
	if is {
		c.away++
	} else {
		c.away--
	}
}

// awayUntil returns the total time of all targets in the states suspending, suspended and resuming.
func (c *counters) awayUntil(now scheduler.Time) time.Duration {
	return c.awayFor + time.Duration(c.away)*max(0, now-c.awayAt)
}

func (c *counters) answer(a scheduler.Answer, s Stages) {
	c.announcements.of(string(a.Reason)).Inc()
	c.decide.add(s.Decide)
	c.wait.add(a.Waited)
	c.reply.add(s.Reply)
	if a.Quiesced {
		c.quiesce.add(a.Waited)
	}
}

// Stats returns the statistics of everything appended and answered since the log was made.
func (l *Log) Stats() Stats {
	l.mu.Lock()
	defer l.mu.Unlock()
	c := &l.counters
	s := Stats{
		Announcements: c.announcements.sum(), MaxWaitPassed: counted(c.announcements.of(string(scheduler.CauseMaxWait))),
		Failures: c.failures.sum(), Coalesced: c.coalesced.sum(), ShadowSuspends: c.shadow.sum(), AttachCycles: c.cycles.sum(),
		ForcedResumes: counted(c.resumes.of(string(scheduler.CauseShareFloor))) + counted(c.resumes.of(string(scheduler.CauseMaxSuspend))),
		Quiesce:       c.quiesce.latency(), Suspend: c.suspend.latency(), Resume: c.resume.latency(), Lease: c.lease.latency(),
	}
	s.Quiesced, s.Suspends, s.Resumes = s.Quiesce.Count, s.Suspend.Count, s.Resume.Count
	for why, n := range c.refused.by {
		if s.Refused == nil {
			s.Refused = map[gpreempt.Reason]uint64{}
		}
		s.Refused[gpreempt.Reason(why[0])] = counted(n)
	}
	return s
}
