package scheduler

import (
	"time"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Time is the runner's monotonic clock: nanoseconds since an arbitrary start. The core
// reads no clock.
type Time = time.Duration

// LeaseID names a lease within one run of the daemon.
type LeaseID uint64

// ClientID names a holder of leases: one process during its life; or one certificate, with pid 0 and
// a start of its own. The zero ClientID is an admin, whose leases outlive any connection.
type ClientID gpreempt.ProcessKey

// IsAdmin reports whether it is an admin.
func (id ClientID) IsAdmin() bool { return id == ClientID{} }

// UserID names the user of a client: a limit applies to all processes of one user
// together.
type UserID string

// TraceContext is the place of an announcement in a distributed trace: the headers
// traceparent and tracestate of W3C Trace Context.
type TraceContext struct {
	Parent string `json:"parent"`
	State  string `json:"state,omitempty"`
}

// Event is something that happened. The concrete types below are the whole set.
type Event interface{ event() }

type (
	// Tick lets due deadlines fire; it carries nothing.
	Tick struct{}

	// GPUAdded makes a GPU known, as a target with queues on it does. Leases on
	// unknown GPUs are refused. Adding a GPU twice is harmless.
	GPUAdded struct {
		GPU gpreempt.GPUID `json:"gpu"`
	}

	// TargetSeen adds a process or updates it.
	TargetSeen struct {
		Target gpreempt.ProcessKey `json:"target"`
		// Job is the name of the job that the process belongs to; "" for none.
		Job      string            `json:"job,omitempty"`
		Class    gpreempt.Class    `json:"class"`
		Priority gpreempt.Priority `json:"priority"`
		// GPUs its queues are on, ascending, without duplicates. The core keeps
		// the slice; the caller must not change it afterwards.
		GPUs []gpreempt.GPUID `json:"gpus,omitempty"`
		// Kin are the processes whose leases do not suspend it, as its own do not, because its
		// work is theirs. The core keeps the slice; the caller must not change it afterwards.
		Kin []gpreempt.ProcessKey `json:"kin,omitempty"`
		// Comm is its command name, and By what classified it. Both are recorded for a shadow policy
		// and change nothing else.
		Comm string `json:"comm,omitempty"`
		By   string `json:"by,omitempty"`
		// OnResist is what is done when it resists being suspended.
		OnResist gpreempt.Resistance `json:"on_resist,omitzero"`
		// Queues is a number that grows with each queue that the target creates. It is
		// ignored while a mechanism is attached that reports births itself.
		Queues uint64 `json:"queues,omitempty"`
	}

	// TargetGone reports that the process exited; ESRCH from the mechanism means the same.
	TargetGone struct {
		Target gpreempt.ProcessKey `json:"target"`
	}

	// Attached is the result of an Attach action. A target is suspended only while a
	// mechanism is attached to it.
	Attached struct {
		Target gpreempt.ProcessKey `json:"target"`
		Result Cause               `json:"result,omitempty"`
		// FailedGPUs are those that reported a hardware error.
		FailedGPUs []gpreempt.GPUID `json:"failed_gpus,omitempty"`
		// ReportsBirths: Running is posted for each queue born from now on.
		ReportsBirths bool `json:"reports_births,omitempty"`
	}

	// Detached is the result of a Detach action, which has no Seq. After success all queues run and
	// the process is released; another Detach follows any other result but CauseGone.
	Detached Suspended

	// Lost says that the mechanism can suspend the target no longer, without an action
	// having failed: another debugger took the process, its runtime or a GPU failed, or
	// it has replaced its program.
	Lost struct {
		Target     gpreempt.ProcessKey `json:"target"`
		Result     Cause               `json:"result,omitempty"`
		FailedGPUs []gpreempt.GPUID    `json:"failed_gpus,omitempty"`
	}

	// Running says that the mechanism has seen a queue of the target run that may have to be
	// suspended again.
	Running struct {
		Target gpreempt.ProcessKey `json:"target"`
		// Cause is CauseNewQueue, CauseResumedByAnother or CauseLapsed.
		Cause Cause `json:"cause"`
		// Suspended is the number of new queues that the mechanism has suspended at once: none runs any
		// more. 0 for one that runs.
		Suspended int `json:"suspended,omitempty"`
	}

	// LeaseRequested is an announcement. Core.Admit has checked every range.
	LeaseRequested struct {
		Lease  LeaseID  `json:"lease"`
		Client ClientID `json:"client,omitzero"`
		User   UserID   `json:"user,omitempty"`
		// Owner is the process whose work the client announces: the lease does not suspend it,
		// nor what has it among its Kin. That of the first lease of a client counts for all.
		// Zero for an admin, and for a client that is not a process of this host.
		Owner     gpreempt.ProcessKey `json:"owner,omitzero"`
		RequestID string              `json:"request_id,omitempty"`
		GPUs      []gpreempt.GPUID    `json:"gpus,omitempty"`
		Priority  gpreempt.Priority   `json:"priority"`
		// TTL and MaxWait may be PolicyDefault until Core.Admit.
		TTL     time.Duration `json:"ttl"`
		MaxWait time.Duration `json:"max_wait"`
		ETA     time.Duration `json:"eta,omitempty"`
		OnIdle  bool          `json:"on_idle,omitempty"`
		// Arrived is when the call arrived, 0 for now; Trace and Label are the client's. All are
		// recorded and change nothing else.
		Arrived Time          `json:"arrived,omitempty"`
		Label   string        `json:"label,omitempty"`
		Trace   *TraceContext `json:"trace,omitempty"`
	}

	// LeaseRenewed sets a live lease's time to live from now.
	LeaseRenewed struct {
		Lease LeaseID       `json:"lease"`
		TTL   time.Duration `json:"ttl"`
	}

	// LeaseFinished ends a lease for any reason except expiry and idleness, which
	// the core detects itself.
	LeaseFinished struct {
		Lease LeaseID  `json:"lease"`
		End   LeaseEnd `json:"end"`
	}

	// ClientGone ends every lease of a client.
	ClientGone struct {
		Client ClientID `json:"client"`
		End    LeaseEnd `json:"end"`
	}

	// ClientBacklog reports whether the GPU queues of a client's process have work:
	// write pointer ahead of read pointer on any of them.
	ClientBacklog struct {
		Client ClientID `json:"client"`
		Busy   bool     `json:"busy"`
	}

	// Suspended is the result of a Suspend action.
	Suspended struct {
		Target gpreempt.ProcessKey `json:"target"`
		// Seq is the Seq of the action.
		Seq uint64 `json:"seq"`
		// Result is "" if every queue of the target is as asked; otherwise CauseGone, CauseReplaced,
		// CauseHardware, an obstacle, or CauseFailed.
		Result Cause `json:"result,omitempty"`
		// FailedGPUs are those that reported a hardware error.
		FailedGPUs []gpreempt.GPUID `json:"failed_gpus,omitempty"`
		// Took is how long the mechanism needed.
		Took time.Duration `json:"took"`
	}

	// Resumed is the result of a Resume action.
	Resumed Suspended

	// Inspected is the result of an Inspect action.
	Inspected struct {
		Target gpreempt.ProcessKey `json:"target"`
		// Seq is the Seq of the action.
		Seq uint64 `json:"seq"`
		// Stuck: the call waits for a lock that the target itself holds. False also when
		// that is not known.
		Stuck bool `json:"stuck,omitempty"`
	}

	// Alarm reports from outside that a GPU fails, such as by a line of the kernel
	// log: the breaker of that GPU opens. GPU 0 means every GPU. A suspend there that is in
	// flight has failed, whatever its result says: what a failing driver returns is no proof.
	Alarm struct {
		GPU gpreempt.GPUID `json:"gpu"`
		// Unmap: a queue did not leave the GPU, and the driver resets that queue, or the GPU.
		// Announcements that wait for the GPU are answered: it is not quiet.
		Unmap bool `json:"unmap,omitempty"`
	}

	// QueueReset reports that the driver has reset a queue on a GPU, because it could not
	// take it off. It is an Alarm with Unmap, too. The offline targets among Suspects are
	// quarantined.
	QueueReset struct {
		GPU gpreempt.GPUID `json:"gpu"`
		// Process is the one that the driver names; zero for one that is not known.
		Process gpreempt.ProcessKey `json:"process,omitzero"`
		// Suspects are those whose queue it may have been, Process among them. The core keeps
		// no reference.
		Suspects []gpreempt.ProcessKey `json:"suspects,omitempty"`
	}

	// Pin has the job of a target run, or be suspended, for a time, whatever leases say. It
	// replaces the pin that the target has; only an admin replaces one of an admin.
	Pin struct {
		Target gpreempt.ProcessKey `json:"target"`
		// Cause is what pins it. An admin: CauseHold has it run, and ends its quarantine;
		// CauseByHand has it suspended, whatever the share floor. What keeps slots free:
		// CauseHQDBudget has it suspended, CauseHQDBusy and CauseHQDRoom no longer.
		Cause Cause         `json:"cause"`
		For   time.Duration `json:"for,omitempty"`
	}

	// PolicyChanged replaces the policy.
	PolicyChanged struct {
		Policy Policy `json:"policy"`
	}

	// Drain starts or ends draining.
	Drain struct {
		On bool `json:"on"`
	}

	// Stopped ends the attaching of mechanisms: what is attached is detached as soon
	// as it runs. It follows the Drain of a shutdown.
	Stopped struct{}
)

func (Tick) event()           {}
func (GPUAdded) event()       {}
func (TargetSeen) event()     {}
func (TargetGone) event()     {}
func (LeaseRequested) event() {}
func (LeaseRenewed) event()   {}
func (LeaseFinished) event()  {}
func (ClientGone) event()     {}
func (ClientBacklog) event()  {}
func (Attached) event()       {}
func (Detached) event()       {}
func (Lost) event()           {}
func (Running) event()        {}
func (Suspended) event()      {}
func (Resumed) event()        {}
func (Inspected) event()      {}
func (Alarm) event()          {}
func (QueueReset) event()     {}
func (Pin) event()            {}
func (PolicyChanged) event()  {}
func (Drain) event()          {}
func (Stopped) event()        {}

// LeaseEnd is why a lease ended.
type LeaseEnd uint8

// The ends; the numbers are those of the API.
const (
	EndNone LeaseEnd = iota
	EndCompleted
	EndExpired
	EndDisconnected
	EndClientDied
	EndIdle
	EndReleased
)

// TargetState is where a target stands.
type TargetState uint8

// The target states; the numbers are those of the API. A state ends only as
// written beside it.
const (
	// TargetNone is before the target is known.
	TargetNone TargetState = iota
	// TargetRunning ends with a Suspend action, a quarantine or the process.
	TargetRunning
	// TargetSuspending ends with the Suspended event.
	TargetSuspending
	// TargetSuspended ends with a Resume action, or a second Suspend when a queue
	// was born meanwhile, or the process.
	TargetSuspended
	// TargetResuming ends with the Resumed event.
	TargetResuming
	// TargetQuarantined is running, and is not suspended until the quarantine ends.
	TargetQuarantined
	// TargetLeft is final: the process has exited.
	TargetLeft
)

// LeaseState is where a lease stands.
type LeaseState uint8

// The lease states; the numbers are those of the API.
const (
	LeaseNone LeaseState = iota
	// LeaseWaiting (API: REQUESTED) ends when its eta says so, or with the lease.
	LeaseWaiting
	// LeaseQuiescing ends when nothing more is to be suspended for it.
	LeaseQuiescing
	// LeaseHeld ends with the lease; it returns to Quiescing when a new target
	// appears on its GPUs.
	LeaseHeld
	// LeaseEnded is final.
	LeaseEnded
)
