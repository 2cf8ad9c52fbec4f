package scheduler

import (
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// ActionKind is what an Action asks the runner to do.
type ActionKind uint8

// The kinds of action.
const (
	// ActRecord: append the change to the event log. It precedes the action that it
	// describes.
	ActRecord ActionKind = iota
	// ActSuspend: suspend all queues of Target; answer with Suspended{Seq}.
	ActSuspend
	// ActResume: resume all queues of Target; answer with Resumed{Seq}.
	ActResume
	// ActAttach: attach a mechanism to Target; answer with Attached.
	ActAttach
	// ActDetach: release Target, whose queues run then; answer with Detached. For a
	// process that has left it may follow another action whose result is still out.
	ActDetach
	// ActInspect: find out what the call waits for that is made for Target and has not
	// returned; answer with Inspected{Seq}.
	ActInspect
	// ActKill: end Target, by SIGKILL. It has refused as many suspensions as its Resistance
	// permits. Nothing is posted but the end of the process.
	ActKill
	// ActAnswer: answer the announcement of Lease. Exactly one for each lease.
	ActAnswer
)

// Action is one thing for the runner to do. It holds no pointers into the core.
type Action struct {
	Kind   ActionKind
	Target gpreempt.ProcessKey
	Lease  LeaseID
	// Seq pairs a Suspend, Resume or Inspect with its result.
	Seq uint64
	// Answer is set for ActAnswer.
	Answer Answer
	// Record is set for ActRecord.
	Record Record
}

// Answer is the answer to an announcement.
type Answer struct {
	Quiesced bool
	// OwnerOffline: an offline target on the lease's GPUs is its owner, or has it among its Kin.
	OwnerOffline bool
	// Reason is the cause for which targets run, one of Answers; CauseDone or CauseNothingToDo if all
	// are suspended.
	Reason Cause
	// Suspended is the number of targets suspended on the lease's GPUs.
	Suspended int
	// CannotSuspend is the number of targets of class offline that run on the lease's GPUs
	// because they cannot be suspended.
	CannotSuspend int
	// Waited is the time from announcement to answer.
	Waited time.Duration
}

// RecordKind is the subject of a Record; the numbers are those of the API.
type RecordKind uint8

// The record kinds.
const (
	RecordNone RecordKind = iota
	RecordTarget
	RecordLease
	RecordBreaker
	RecordPolicy
	RecordDrain
	RecordShadow
	// RecordReset is a QueueReset; the API's 7 is no record.
	RecordReset RecordKind = 8
)

// Cause is why something changed or is as it is, in answers, records and explanations, and what is
// wrong in the result of an action. The obstacles of gpreempt.Obstacles are causes, too.
type Cause = gpreempt.Reason

// The causes.
const (
	CauseSeen       Cause = "seen"
	CauseLease      Cause = "lease"
	CauseByHand     Cause = "by-hand"
	CauseNewQueue   Cause = "new-queue"
	CauseDone       Cause = "done"
	CauseLeaseEnded Cause = "lease-ended"
	CauseLinger     Cause = "linger"
	CauseLingerOver Cause = "linger-over"
	CauseShareFloor Cause = "share-floor"
	// CauseShareCap is on a target that has run for the share that the policy permits, and
	// CauseShareCapOver on one that may run again.
	CauseShareCap     Cause = "share-cap"
	CauseShareCapOver Cause = "share-cap-over"
	// CauseHQDBudget is on an idle target that is suspended to keep hardware slots free,
	// CauseHQDBusy on one that is resumed because it has work, and CauseHQDRoom because there is
	// room for it again.
	CauseHQDBudget Cause = "hqd-budget"
	CauseHQDBusy   Cause = "hqd-busy"
	CauseHQDRoom   Cause = "hqd-room"
	// CausePinOver is on a target that an admin has had suspended for long enough.
	CausePinOver    Cause = "pin-over"
	CauseMaxSuspend Cause = "max-suspend"
	CauseClass      Cause = "class-changed"
	CauseHold       Cause = "hold"
	CausePolicy     Cause = "policy"
	CauseDrain      Cause = "draining"
	CauseBreaker    Cause = "breaker-open"
	// CauseFailed is the result of an action after which some queue is not as asked; the mechanism has
	// undone what it could. The target is quarantined, as for any obstacle.
	CauseFailed Cause = "failed"
	// CauseHardware: the GPU reported an error. The breaker opens, too.
	CauseHardware Cause = "hardware-error"
	// CauseStuck is on a target whose own process holds the lock that an action on it
	// waits for. No GPU is at fault.
	CauseStuck Cause = "stuck"
	// CauseHung is on a breaker: an action has not come back, and not because of CauseStuck.
	CauseHung Cause = "hung"
	// CauseReset is on a breaker, and on a target whose queue the driver has reset or may have.
	CauseReset Cause = "queue-reset"
	CauseAlarm Cause = "alarm"
	CauseRetry Cause = "retry"
	// CauseGone: the process left.
	CauseGone Cause = "gone"
	// CauseReplaced: the process runs another program, and its queues ended with the one before. It can be
	// attached to again at once.
	CauseReplaced       Cause = "replaced"
	CauseQuarantineOver Cause = "quarantine-over"
	CauseCooledDown     Cause = "cooled-down"
	CauseAnnounced      Cause = "announced"
	CauseStarted        Cause = "started"
	CauseQuiet          Cause = "quiet"
	CauseNewTarget      Cause = "new-target"
	// CauseCoalesced is on a lease whose targets were still suspended from the lease
	// before.
	CauseCoalesced Cause = "coalesced"
	// CauseNotReady is why a target without a mechanism runs.
	CauseNotReady Cause = "not-ready"
	// CauseKilled is on a target that is killed because it has refused to be suspended.
	CauseKilled Cause = "killed"
	// CauseNoLease is why a target runs that no lease outranks.
	CauseNoLease Cause = "no-lease"
	// CauseQuarantine is why a target that failed runs.
	CauseQuarantine Cause = "quarantine"

	// CauseResumedByAnother and CauseLapsed are on a suspended target that ran: another program has
	// resumed it, or what resumes everything when the daemon hangs.
	CauseResumedByAnother Cause = "resumed-by-another"
	CauseLapsed           Cause = "lapsed"
)

// The causes of answers only, with CauseDone for targets that are all suspended.
const (
	CauseNothingToDo Cause = "nothing-to-do"
	CauseMaxWait     Cause = "max-wait"
	CauseDeferred    Cause = "deferred"
	CauseNotAwaited  Cause = "not-awaited"
	// CauseUnsafe: the breaker of a GPU is open, a queue was reset, or a mechanism is not ready.
	CauseUnsafe Cause = "unsafe"
	CauseShadow Cause = "shadow"
	CauseEnded  Cause = "ended"
)

// Answers returns the reasons of answers.
func Answers() []Cause {
	return append([]Cause{
		CauseDone, CauseNothingToDo, CauseMaxWait, CauseDeferred, CauseNotAwaited, CauseShareFloor, CauseUnsafe, CauseShadow,
		CauseDrain, CauseEnded, CauseHold, CauseStuck, CauseReset,
	}, gpreempt.Obstacles()...)
}

// Record is one state change. From and to are equal for a target with a new class or
// priority, with a failed resume, with an action that is found stuck or that is killed, and for a lease that was answered although its GPUs are not
// quiet; the cause is the Cause then. The event stream, the log, the statistics,
// the metrics and the traces are all made from records.
type Record struct {
	At   Time
	Kind RecordKind
	// FromTarget and ToTarget are set for RecordTarget and RecordShadow, Class, that of the target, for
	// RecordTarget and RecordReset, FromLease, ToLease and End for RecordLease.
	FromTarget, ToTarget TargetState
	Class                gpreempt.Class
	FromLease, ToLease   LeaseState
	End                  LeaseEnd
	// On is the new state of a breaker or of draining, and for RecordPolicy whether the policy is shadow.
	On     bool
	Target gpreempt.ProcessKey
	Lease  LeaseID
	GPU    gpreempt.GPUID
	// Suspects is, for RecordReset, the number of processes whose queue it may have been.
	Suspects int
	Cause    Cause
	// Took is how long a suspend, a resume, a lease or the wait for an answer lasted, and
	// of a new lease the time since its call arrived.
	Took time.Duration
	// Trace is set for a new lease whose client sent it. It is not changed afterwards.
	Trace *TraceContext
	// Shadow says more of a RecordShadow. It is not changed afterwards.
	Shadow *Shadowed
	// GPUs are those that a new lease covers. They are not changed afterwards.
	GPUs []gpreempt.GPUID
}

// Shadowed is a target that a shadow policy would have suspended, or resumed.
type Shadowed struct {
	// Comm and By are those of TargetSeen; GPUs is how many GPUs the target has queues on.
	Comm, By string
	GPUs     int
	// Client and Label are those of the lease, with a zero Client for an admin's. Cause is that without
	// a lease.
	Client ClientID
	Label  string
	Cause  Cause
}

// Failed reports whether it is about a suspend or a resume that failed.
func (r Record) Failed() bool {
	return r.Kind == RecordTarget && r.ToTarget == TargetResuming && (r.FromTarget == TargetSuspending || r.FromTarget == TargetResuming) &&
		(r.Cause == CauseFailed || r.Cause == CauseHardware || r.Cause.Obstacle() != "")
}
