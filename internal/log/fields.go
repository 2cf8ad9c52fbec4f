// This file has the fields of log lines. Each key is defined here only, so that it has the
// same meaning and type in every line. docs/logs.md is generated from it.

package log

import (
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// subjects are the keys of the subject of a line: two lines with the same message are
// repeats only if these are equal. The caller is not among them, because a client can
// connect as any number of processes.
var subjects = []string{"cgroup", "gpu", "kubelet", "mechanism", "method", "socket", "target"}

// Subject reports whether a key is part of the subject of a line.
func Subject(key string) bool { return slices.Contains(subjects, key) }

// The subject of a line.

// Target is a process with queues, PID@START.
func Target(key gpreempt.ProcessKey) zap.Field { return zap.Stringer("target", key) }

// GPU is a GPU, by the driver's gpu_id.
func GPU(id gpreempt.GPUID) zap.Field { return zap.Stringer("gpu", id) }

// Lease is a lease, by the ID that its client knows.
func Lease(id string) zap.Field { return zap.String("lease", id) }

// Mechanism is a mechanism, by its name in the config file.
func Mechanism(name string) zap.Field { return zap.String("mechanism", name) }

// Cgroup is a control group, by its path.
func Cgroup(path string) zap.Field { return zap.String("cgroup", path) }

// Socket is a socket, by its path.
func Socket(path string) zap.Field { return zap.String("socket", path) }

// Kubelet is the address of the kubelet.
func Kubelet(address string) zap.Field { return zap.String("kubelet", address) }

// The caller.

// Peer is the peer of a connection.
func Peer(peer fmt.Stringer) zap.Field { return zap.Stringer("peer", peer) }

// UID is the user of the process that calls.
func UID(uid uint32) zap.Field { return zap.Uint32("uid", uid) }

// GID is the group of the process that calls.
func GID(gid uint32) zap.Field { return zap.Uint32("gid", gid) }

// PID is a process.
func PID(pid int32) zap.Field { return zap.Int32("pid", pid) }

// Start is the start time of the process of pid, in clock ticks since boot.
func Start(ticks uint64) zap.Field { return zap.Uint64("start", ticks) }

// Exe is the program of the process that calls.
func Exe(path string) zap.Field { return zap.String("exe", path) }

// Certificate is the name in a client's certificate.
func Certificate(name string) zap.Field { return zap.String("certificate", name) }

// CertificateSubject is the subject of that certificate.
func CertificateSubject(name string) zap.Field { return zap.String("subject", name) }

// Serial is the serial number of that certificate.
func Serial(number string) zap.Field { return zap.String("serial", number) }

// Address is the address of a client over TCP.
func Address(address string) zap.Field { return zap.String("address", address) }

// The call.

// Audit is in every line of the audit log.
func Audit() zap.Field { return zap.Bool("audit", true) }

// Method is the method that was called.
func Method(name string) zap.Field { return zap.String("method", name) }

// Request is the request as JSON, truncated if it is long.
func Request(text string) zap.Field { return zap.String("request", text) }

// Verb is the action of a call, as gpctl names it.
func Verb(verb string) zap.Field { return zap.String("verb", verb) }

// Outcome is how a call ended: done, failed, refused or panicked.
func Outcome(outcome string) zap.Field { return zap.String("outcome", outcome) }

// Reason is the stable reason of the error a call got.
func Reason(reason gpreempt.Reason) zap.Field { return zap.String("reason", string(reason)) }

// Waited is how long the caller waited.
func Waited(d time.Duration) zap.Field { return zap.Duration("waited", d) }

// A change.

// From is the value before the change.
func From(text string) zap.Field { return zap.String("from", text) }

// To is the value after the change.
func To(text string) zap.Field { return zap.String("to", text) }

// Cause is the stable name of the cause of a change.
func Cause(cause string) zap.Field { return zap.String("cause", cause) }

// End is how a lease ended.
func End(end fmt.Stringer) zap.Field { return zap.Stringer("end", end) }

// Took is the duration of a suspend, a resume, a lease or the wait for an answer.
func Took(d time.Duration) zap.Field { return zap.Duration("took", d) }

// Class is the class of a target: online, offline or unmanaged.
func Class(class gpreempt.Class) zap.Field { return zap.Stringer("class", class) }

// Config is a key of the config file.
func Config(key string) zap.Field { return zap.String("key", key) }

// Live reports whether a changed value is in force without a restart.
func Live(live bool) zap.Field { return zap.Bool("live", live) }

// Problems.

// Err is an error. Without an error there is no field.
func Err(err error) zap.Field { return zap.Error(err) }

// Code is the stable code of a warning.
func Code(code string) zap.Field { return zap.String("code", code) }

// Severity is the severity of a warning: warning or error.
func Severity(severity string) zap.Field { return zap.String("severity", severity) }

// Text is the text of a warning, of the kernel or of a row of the config file.
func Text(text string) zap.Field { return zap.String("text", text) }

// Remedy is what to do about a warning.
func Remedy(text string) zap.Field { return zap.String("remedy", text) }

// Pattern is the pattern that a line of the kernel log matches.
func Pattern(name string) zap.Field { return zap.String("pattern", name) }

// Issue is the public report of that pattern.
func Issue(url string) zap.Field { return zap.String("issue", url) }

// PanicValue is the value of a panic in a handler.
func PanicValue(value any) zap.Field { return zap.Any("panic", value) }

// Stack is the stack of a panic in a handler.
func Stack(stack []byte) zap.Field { return zap.ByteString("stack", stack) }

// Line is the number of a line in a file.
func Line(n int) zap.Field { return zap.Int("line", n) }

// Lines that are not in the log.

// Repeated is the number of lines like this one that were left out since the last.
func Repeated(lines uint64) zap.Field { return zap.Uint64("repeated", lines) }

// Unlogged is the number of rejected calls of this client without a line in the audit log.
func Unlogged(calls uint64) zap.Field { return zap.Uint64("unlogged", calls) }

// Lost is the number of lines that were lost because the reader of the log is too slow.
func Lost(lines int64) zap.Field { return zap.Int64("lost", lines) }

// Details.

// Suspend reports whether an action is a suspend, rather than a resume.
func Suspend(suspend bool) zap.Field { return zap.Bool("suspend", suspend) }

// WasSuspended reports whether queues of the target were suspended.
func WasSuspended(was bool) zap.Field { return zap.Bool("was_suspended", was) }

// Since is the time at which a pause began.
func Since(t time.Time) zap.Field { return zap.Time("since", t) }

// Why is the reason for another way of pausing.
func Why(text string) zap.Field { return zap.String("why", text) }

// Descriptors is the number of descriptors of the driver that a process has.
func Descriptors(n int) zap.Field { return zap.Int("descriptors", n) }

// Paused is the number of those that were paused.
func Paused(n int) zap.Field { return zap.Int("paused", n) }

// Permission is the driver's rule for debugging a process.
func Permission(rule fmt.Stringer) zap.Field { return zap.Stringer("permission", rule) }

// Profile is the driver's profile that was found to fit.
func Profile(name string) zap.Field { return zap.String("profile", name) }

// State is a state for systemd.
func State(state string) zap.Field { return zap.String("state", state) }

// Backend is the kind of the GPUs: of the host, emulated or simulated.
func Backend(name string) zap.Field { return zap.String("backend", name) }

// GPUs is the number of GPUs.
func GPUs(n int) zap.Field { return zap.Int("gpus", n) }

// TCP is the TCP address of the daemon; empty without one.
func TCP(address string) zap.Field { return zap.String("tcp", address) }

// Version is the version of gpreemptd.
func Version(version string) zap.Field { return zap.String("version", version) }
