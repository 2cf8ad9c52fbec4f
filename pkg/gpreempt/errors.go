package gpreempt

import "errors"

// Code is the class of an error. Its numbers are those of the gRPC status code that the
// server returns.
type Code uint32

// The codes in use, with gRPC's numbers.
const (
	CodeInvalidArgument    Code = 3
	CodeNotFound           Code = 5
	CodeAlreadyExists      Code = 6
	CodePermissionDenied   Code = 7
	CodeResourceExhausted  Code = 8
	CodeFailedPrecondition Code = 9
	CodeOutOfRange         Code = 11
	CodeInternal           Code = 13
	CodeUnavailable        Code = 14
	CodeUnauthenticated    Code = 16
)

// Reason is the stable word for why something was refused, prevented, changed or left as it is. One thing has
// one word in the results of mechanisms, events, metrics, explanations and answers. The server sends that of an
// error as the reason of a google.rpc.ErrorInfo, in capital letters as is usual there.
type Reason string

// The reasons of calls. The comment of each begins with its code; make gen writes docs/reference/errors.md
// from all.
const (
	// INVALID_ARGUMENT: a selector matches no GPU of this host. See `gpctl gpu list`.
	ReasonUnknownGPU Reason = "UNKNOWN_GPU"
	// INVALID_ARGUMENT: a priority above 15.
	ReasonPriorityRange Reason = "PRIORITY_OUT_OF_RANGE"
	// INVALID_ARGUMENT: a ttl that is not above 0, or above the policy's bound, which the message names.
	ReasonTTLRange Reason = "TTL_OUT_OF_RANGE"
	// INVALID_ARGUMENT: a duration outside the range that the message names.
	ReasonDurationRange Reason = "DURATION_OUT_OF_RANGE"
	// INVALID_ARGUMENT: a request id of more than 64 bytes.
	ReasonRequestIDTooLong Reason = "REQUEST_ID_TOO_LONG"
	// ALREADY_EXISTS: a request id of another announcement. Use a new one for each.
	ReasonRequestIDReused Reason = "REQUEST_ID_REUSED"
	// INVALID_ARGUMENT: a label of more than 128 bytes.
	ReasonLabelTooLong Reason = "LABEL_TOO_LONG"
	// INVALID_ARGUMENT: complete_on_idle in a lease of an admin or by TCP, which has no process whose queues
	// could become idle. The ttl bounds the lease.
	ReasonIdleByHand Reason = "COMPLETE_ON_IDLE_REFUSED"
	// INVALID_ARGUMENT: a required field is missing.
	ReasonMissingField Reason = "MISSING_FIELD"
	// INVALID_ARGUMENT: a Session frame without content. Send announce, complete or renew.
	ReasonBadFrame Reason = "INVALID_FRAME"
	// INVALID_ARGUMENT: an unknown preset, or a knob outside the range that the message names.
	ReasonBadPolicy Reason = "INVALID_POLICY"
	// INVALID_ARGUMENT: an unknown class, or a mechanism for a class that is never suspended.
	ReasonBadClass Reason = "INVALID_CLASS"
	// INVALID_ARGUMENT: a mechanism that this daemon does not have. Enable it in the config file.
	ReasonUnknownMechanism Reason = "UNKNOWN_MECHANISM"
	// NOT_FOUND: the lease ended long ago, or belongs to an earlier run of the daemon. Announce again.
	ReasonUnknownLease Reason = "UNKNOWN_LEASE"
	// NOT_FOUND: no such process, or it has no queues. See `gpctl target list`.
	ReasonUnknownTarget Reason = "UNKNOWN_TARGET"
	// PERMISSION_DENIED: the lease belongs to another process. An admin can release it: `gpctl lease release`.
	ReasonForeignLease Reason = "FOREIGN_LEASE"
	// PERMISSION_DENIED: the caller has no online right. Join the group, or list the certificate's name, as
	// the message says.
	ReasonNotOnline Reason = "ONLINE_RIGHT_MISSING"
	// PERMISSION_DENIED: the caller has no admin right. Join the group, or list the certificate's name, as the
	// message says.
	ReasonNotAdmin Reason = "ADMIN_RIGHT_MISSING"
	// UNAUTHENTICATED: the kernel does not report the caller's process. Connect from the daemon's pid
	// namespace or one below.
	ReasonNoIdentity Reason = "PEER_IDENTITY_MISSING"
	// RESOURCE_EXHAUSTED: live leases of the process: half of `limits.leases_per_user`.
	ReasonLeasesPerClient Reason = "LEASES_PER_CLIENT"
	// RESOURCE_EXHAUSTED: `limits.leases_per_user` live leases of all processes of the user.
	ReasonLeasesPerUser Reason = "LEASES_PER_USER"
	// RESOURCE_EXHAUSTED: 4096 live leases of all clients, or as many of admins; less for a user who has
	// many. See `gpctl lease list`.
	ReasonLeasesTotal Reason = "LEASES_TOTAL"
	// RESOURCE_EXHAUSTED: requests that cost more than `limits.requests_per_user` of the user, or half of it of
	// the process, or too many calls in flight; or the user connects, or is
	// refused, too often. The Session stream needs less of the daemon.
	ReasonRateLimited Reason = "RATE_LIMITED"
	// RESOURCE_EXHAUSTED: more than 16 streams of the process. Use one stream for many leases.
	ReasonStreamsPerClient Reason = "STREAMS_PER_CLIENT"
	// RESOURCE_EXHAUSTED: a message above 64 KiB. gRPC itself refuses it, without an
	// ErrorInfo.
	ReasonMessageTooLarge Reason = "MESSAGE_TOO_LARGE"
	// RESOURCE_EXHAUSTED: a watch fell too far behind: list again, then watch. Also for a connection whose
	// answers are not read.
	ReasonSlowReader Reason = "SLOW_READER"
	// FAILED_PRECONDITION: an admin suspends a target that is not offline. Classify it first: `gpctl target
	// classify`.
	ReasonNotOffline Reason = "TARGET_NOT_OFFLINE"
	// FAILED_PRECONDITION: debugfs is not mounted, or the driver does not show its hardware slots.
	ReasonHQDsUnreadable Reason = "HQDS_UNREADABLE"
	// OUT_OF_RANGE: a watch from a revision that is no longer kept. List again, then watch.
	ReasonRevisionCompacted Reason = "REVISION_COMPACTED"
	// UNAVAILABLE: the daemon is stopping. Continue without a lease.
	ReasonShuttingDown Reason = "SHUTTING_DOWN"
	// UNAVAILABLE: the client library found no daemon that answers, or it refuses the certificate.
	// See `systemctl status gpreemptd`.
	ReasonDaemonUnavailable Reason = "DAEMON_UNAVAILABLE"
	// INTERNAL: a bug in the daemon, which continues. Report it with the daemon's log.
	ReasonInternal Reason = "INTERNAL"
)

// The reasons of refused connections, with those of rights, RATE_LIMITED and SLOW_READER.
const (
	// RESOURCE_EXHAUSTED: 256 connections of the user.
	ReasonConnsPerUser Reason = "CONNECTIONS_PER_USER"
	// RESOURCE_EXHAUSTED: no place is left of 1024 connections, or the user has many of them. `ss -xp`
	// shows the processes.
	ReasonConnsTotal Reason = "CONNECTIONS_TOTAL"
	// the message of a call did not follow its header within 5 s; the connection is closed.
	ReasonSlowRequest Reason = "SLOW_REQUEST"
)

// The obstacles: why a process is not suspended.
const (
	// no mechanism can suspend the process, or the last attempt failed, and no reason below says more.
	ReasonCannotSuspend Reason = "cannot-suspend"
	// the rule of the process has never_debug, and the mechanism is a debugger. See docs/mechanisms.md.
	ReasonNeverDebug Reason = "never-debug"
	// FAILED_PRECONDITION: on a later GPU the process has no VM that is known of, so that suspending it could
	// crash the kernel. See docs/mechanisms.md.
	ReasonGPUWithoutVM Reason = "gpu-without-vm"
	// another program traces, debugs or resumes the process. See docs/mechanisms.md.
	ReasonResisted Reason = "resisted"
	// the process has user queues of DRM. See docs/mechanisms.md.
	ReasonDRMQueues Reason = "drm-queues"
)

// obstacles are those above, the worst last, with the words after "the process ". A mechanism that reports one
// of them says all that the scheduler, the events, the metrics and the explanation need.
var obstacles = []struct {
	reason Reason
	words  string
}{
	{ReasonCannotSuspend, "could not be suspended or attached to at the last attempt"},
	{ReasonNeverDebug, "has never_debug in its rule, and no mechanism is enabled that is no debugger"},
	{ReasonGPUWithoutVM, "has no VM that is known of on a later GPU, where suspending it could crash the kernel"},
	{ReasonResisted, "is traced, debugged or resumed by another program"},
	{ReasonDRMQueues, "has user queues of DRM, which no enabled mechanism can suspend"},
}

// Obstacles returns the reasons why a process is not suspended, the worst last.
func Obstacles() (all []Reason) {
	for _, o := range obstacles {
		all = append(all, o.reason)
	}
	return all
}

// Obstacle returns the words for an obstacle, after "the process "; "" for another reason.
func (r Reason) Obstacle() string {
	for _, o := range obstacles {
		if o.reason == r {
			return o.words
		}
	}
	return ""
}

// The reasons why gpreemptd does not start.
const (
	// another daemon has the instance lock.
	ReasonSecondDaemon Reason = "SECOND_DAEMON"
	// another user could place a socket into a directory of the socket's or the lock's path. Change its owner
	// or mode.
	ReasonOpenDirectory Reason = "SOCKET_DIRECTORY_OPEN"
	// another program listens on the socket's path, or another file is there.
	ReasonSocketTaken Reason = "SOCKET_TAKEN"
	// systemd passed a file that is not the daemon's socket. Correct `ListenStream=` in gpreemptd.socket.
	ReasonSocketPassed Reason = "SOCKET_PASSED"
)

// Error is an error with what happened, to what, and what to do next. All of it is
// transferred over gRPC.
type Error struct {
	Code   Code
	Reason Reason
	// Message says what happened, to what.
	Message string
	// Next says what to do, as a sentence.
	Next string
}

// Errorf would hide which part is the remedy, so errors are written as values:
// &Error{Code: ..., Reason: ..., Message: ..., Next: ...}.
func (e *Error) Error() string {
	if e.Next == "" {
		return e.Message
	}
	return e.Message + ": " + e.Next
}

// Is matches another *Error by reason, so that errors.Is(err, &Error{Reason: R})
// works on both sides of the wire.
func (e *Error) Is(target error) bool {
	t, ok := target.(*Error)
	return ok && t.Reason == e.Reason
}

// ReasonOf returns the reason of the first *Error in err's chain, or "".
func ReasonOf(err error) Reason {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Reason
	}
	return ""
}
