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

// Reason is the stable name of an error for programs; docs/api.md lists all. The server
// sends it as the reason of a google.rpc.ErrorInfo.
type Reason string

// The reasons.
const (
	ReasonUnknownGPU        Reason = "UNKNOWN_GPU"
	ReasonUnknownTarget     Reason = "UNKNOWN_TARGET"
	ReasonUnknownLease      Reason = "UNKNOWN_LEASE"
	ReasonForeignLease      Reason = "FOREIGN_LEASE"
	ReasonPriorityRange     Reason = "PRIORITY_OUT_OF_RANGE"
	ReasonTTLRange          Reason = "TTL_OUT_OF_RANGE"
	ReasonDurationRange     Reason = "DURATION_OUT_OF_RANGE"
	ReasonRequestIDReused   Reason = "REQUEST_ID_REUSED"
	ReasonRequestIDTooLong  Reason = "REQUEST_ID_TOO_LONG"
	ReasonLabelTooLong      Reason = "LABEL_TOO_LONG"
	ReasonIdleByHand        Reason = "COMPLETE_ON_IDLE_REFUSED"
	ReasonMissingField      Reason = "MISSING_FIELD"
	ReasonLeasesPerClient   Reason = "LEASES_PER_CLIENT"
	ReasonLeasesPerUser     Reason = "LEASES_PER_USER"
	ReasonLeasesTotal       Reason = "LEASES_TOTAL"
	ReasonRateLimited       Reason = "RATE_LIMITED"
	ReasonStreamsPerClient  Reason = "STREAMS_PER_CLIENT"
	ReasonConnsPerUser      Reason = "CONNECTIONS_PER_USER"
	ReasonConnsTotal        Reason = "CONNECTIONS_TOTAL"
	ReasonSlowRequest       Reason = "SLOW_REQUEST"
	ReasonMessageTooLarge   Reason = "MESSAGE_TOO_LARGE"
	ReasonNotOnline         Reason = "ONLINE_RIGHT_MISSING"
	ReasonNotAdmin          Reason = "ADMIN_RIGHT_MISSING"
	ReasonNoIdentity        Reason = "PEER_IDENTITY_MISSING"
	ReasonNotOffline        Reason = "TARGET_NOT_OFFLINE"
	ReasonBadPolicy         Reason = "INVALID_POLICY"
	ReasonBadClass          Reason = "INVALID_CLASS"
	ReasonUnknownMechanism  Reason = "UNKNOWN_MECHANISM"
	ReasonBadFrame          Reason = "INVALID_FRAME"
	ReasonShuttingDown      Reason = "SHUTTING_DOWN"
	ReasonRevisionCompacted Reason = "REVISION_COMPACTED"
	ReasonSlowReader        Reason = "SLOW_READER"
	ReasonHQDsUnreadable    Reason = "HQDS_UNREADABLE"
	ReasonGPUWithoutVM      Reason = "GPU_WITHOUT_VM"
	ReasonNeverDebug        Reason = "NEVER_DEBUG"
	ReasonDRMQueues         Reason = "DRM_QUEUES"
	ReasonResisted          Reason = "RESISTED"
	ReasonInternal          Reason = "INTERNAL"
	ReasonDaemonUnavailable Reason = "DAEMON_UNAVAILABLE"
	ReasonSecondDaemon      Reason = "SECOND_DAEMON"
	ReasonSocketTaken       Reason = "SOCKET_TAKEN"
	ReasonSocketPassed      Reason = "SOCKET_PASSED"
	ReasonOpenDirectory     Reason = "SOCKET_DIRECTORY_OPEN"
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
