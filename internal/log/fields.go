package log

import (
	"fmt"
	"slices"

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// subjects are the keys of the subject of a line: two lines with the same message are
// repeats only if these are equal. The caller is not among them, because a client can
// connect as any number of processes.
var subjects = []string{"cgroup", "gpu", "mechanism", "method", "socket", "target"}

// Subject reports whether a key is part of the subject of a line.
func Subject(key string) bool { return slices.Contains(subjects, key) }

// The fields of log lines. Each key is defined here only, so that it has the same meaning and
// type in every line. docs/reference/logs.md is generated from this table. Without an error, Err is no
// field.
var (
	// The subject of a line.
	Target    = stringer[gpreempt.ProcessKey]("target") // a process with queues, PID@START
	GPU       = stringer[gpreempt.GPUID]("gpu")         // a GPU, by the driver's gpu_id
	Lease     = field("lease", zap.String)              // a lease, by the ID that its client knows
	Mechanism = field("mechanism", zap.String)          // a mechanism, by its name in the config file
	Cgroup    = field("cgroup", zap.String)             // a control group, by its path
	Socket    = field("socket", zap.String)             // a socket, by its path

	// The caller.
	Peer               = stringer[fmt.Stringer]("peer")   // the peer of a connection
	UID                = field("uid", zap.Uint32)         // the user of the process that calls
	GID                = field("gid", zap.Uint32)         // the group of the process that calls
	PID                = field("pid", zap.Int32)          // a process
	Start              = field("start", zap.Uint64)       // the start time of the process of pid, in clock ticks since boot
	Exe                = field("exe", zap.String)         // the program of the process that calls
	Certificate        = field("certificate", zap.String) // the name in a client's certificate
	CertificateSubject = field("subject", zap.String)     // the subject of that certificate
	Serial             = field("serial", zap.String)      // the serial number of that certificate
	Address            = field("address", zap.String)     // the address of a client over TCP

	// The call.
	Audit   = field("audit", zap.Bool)      // in every line of the audit log
	Method  = field("method", zap.String)   // the method that was called
	Request = field("request", zap.String)  // the request as JSON, truncated if it is long
	Verb    = field("verb", zap.String)     // the action of a call, as gpctl names it
	Outcome = field("outcome", zap.String)  // how a call ended: done, failed, refused or panicked
	Reason  = field("reason", zap.String)   // the stable reason of the error a call got
	Waited  = field("waited", zap.Duration) // how long the caller waited
	Unread  = field("unread", zap.Int64)    // bytes of answers that the client has not read

	// A change.
	From    = field("from", zap.String)         // the value before the change
	To      = field("to", zap.String)           // the value after the change
	Cause   = field("cause", zap.String)        // the stable name of the cause of a change
	End     = stringer[fmt.Stringer]("end")     // how a lease ended
	Took    = field("took", zap.Duration)       // the duration of a suspend, a resume, a lease or the wait for an answer
	Class   = stringer[gpreempt.Class]("class") // the class of a target: online, offline or unmanaged
	Config  = field("key", zap.String)          // a key of the config file
	Changes = field("changes", zap.Int)         // the number of keys of the config file whose values changed
	Live    = field("live", zap.Bool)           // whether a changed value is in force without a restart

	// Problems.
	Err        = zap.Error                      // an error
	Code       = field("code", zap.String)      // the stable code of a warning
	Severity   = field("severity", zap.String)  // the severity of a warning: warning or error
	Text       = field("text", zap.String)      // the text of a warning, of the kernel or of a row of the config file
	Remedy     = field("remedy", zap.String)    // what to do about a warning
	Suspects   = field("suspects", zap.Int)     // the number of processes of which one lost a queue
	Pattern    = field("pattern", zap.String)   // the pattern that a line of the kernel log matches
	Issue      = field("issue", zap.String)     // the public report of that pattern
	PanicValue = field("panic", zap.Any)        // the value of a panic in a handler
	Stack      = field("stack", zap.ByteString) // the stack of a panic in a handler
	Line       = field("line", zap.Int)         // the number of a line in a file

	// Lines that are not in the log.
	Repeated = field("repeated", zap.Uint64) // the number of lines like this one that were left out since the last
	Unlogged = field("unlogged", zap.Uint64) // the number of rejected calls of this user without a line in the audit log
	Lost     = field("lost", zap.Int64)      // the number of lines that were lost because the reader of the log is too slow

	// Details.
	Suspend      = field("suspend", zap.Bool)           // whether an action is a suspend, rather than a resume
	WasSuspended = field("was_suspended", zap.Bool)     // whether queues of the target were suspended
	Since        = field("since", zap.Time)             // the time at which a pause began
	Why          = field("why", zap.String)             // the reason for another way of pausing
	Descriptors  = field("descriptors", zap.Int)        // the number of descriptors of the driver that a process has
	Paused       = field("paused", zap.Int)             // the number of those that were paused
	Permission   = stringer[fmt.Stringer]("permission") // the driver's rule for debugging a process
	Profile      = field("profile", zap.String)         // the driver's profile that was found to fit
	State        = field("state", zap.String)           // a state for systemd
	Backend      = field("backend", zap.String)         // the kind of the GPUs: of the host, emulated or simulated
	GPUs         = field("gpus", zap.Int)               // the number of GPUs
	TCP          = field("tcp", zap.String)             // the TCP address of the daemon; empty without one
	Version      = field("version", zap.String)         // the version of gpreemptd
)

// field returns the constructor of a field with a key.
func field[T any](key string, of func(string, T) zap.Field) func(T) zap.Field {
	return func(value T) zap.Field { return of(key, value) }
}

// stringer returns the constructor of a field with the text of a value.
func stringer[T fmt.Stringer](key string) func(T) zap.Field {
	return func(value T) zap.Field { return zap.Stringer(key, value) }
}
