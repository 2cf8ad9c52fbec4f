// Package logkey hides how the facts of a log line are named: each key is made here
// and nowhere else, so that it means the same and has the same type in every line.
// docs/logs.md is made from this file.
package logkey

import (
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// subjects are the keys of what a line is about: two lines of one message are
// repeats only where all of these are alike. Who calls is not among them: whoever may
// connect can do so as any number of processes.
var subjects = []string{"cgroup", "gpu", "kubelet", "mechanism", "method", "socket", "target"}

// Subject reports whether the field of a key says what a line is about, rather than
// how it was this time.
func Subject(key string) bool { return slices.Contains(subjects, key) }

// What a line is about.

// Target is a process with queues, PID@START.
func Target(key gpreempt.ProcessKey) zap.Field { return zap.Stringer("target", key) }

// GPU is a GPU, by the driver's gpu_id.
func GPU(id gpreempt.GPUID) zap.Field { return zap.Stringer("gpu", id) }

// Lease is a lease, by the id its client knows.
func Lease(id string) zap.Field { return zap.String("lease", id) }

// Mechanism is a way of suspending, by its name in the config file.
func Mechanism(name string) zap.Field { return zap.String("mechanism", name) }

// Cgroup is a control group, by its path.
func Cgroup(path string) zap.Field { return zap.String("cgroup", path) }

// Socket is a socket, by its path.
func Socket(path string) zap.Field { return zap.String("socket", path) }

// Kubelet is the address of the kubelet that is asked.
func Kubelet(address string) zap.Field { return zap.String("kubelet", address) }

// Who calls.

// Peer is whoever is at the other end of a connection.
func Peer(peer fmt.Stringer) zap.Field { return zap.Stringer("peer", peer) }

// UID is the user of the process that calls.
func UID(uid uint32) zap.Field { return zap.Uint32("uid", uid) }

// GID is the group of the process that calls.
func GID(gid uint32) zap.Field { return zap.Uint32("gid", gid) }

// PID is a process.
func PID(pid int32) zap.Field { return zap.Int32("pid", pid) }

// Start is when the process of pid began, in clock ticks since boot.
func Start(ticks uint64) zap.Field { return zap.Uint64("start", ticks) }

// Exe is the program of the process that calls.
func Exe(path string) zap.Field { return zap.String("exe", path) }

// Certificate is the name a client's certificate gives it.
func Certificate(name string) zap.Field { return zap.String("certificate", name) }

// CertificateSubject is the subject of that certificate.
func CertificateSubject(name string) zap.Field { return zap.String("subject", name) }

// Serial is the serial number of that certificate.
func Serial(number string) zap.Field { return zap.String("serial", number) }

// Address is where a client calls from, over TCP.
func Address(address string) zap.Field { return zap.String("address", address) }

// What was asked.

// Audit is on every line of the audit log.
func Audit() zap.Field { return zap.Bool("audit", true) }

// Method is the method that was called.
func Method(name string) zap.Field { return zap.String("method", name) }

// Request is the request as JSON, cut off when it is long.
func Request(text string) zap.Field { return zap.String("request", text) }

// Verb is what a call did, in the words of gpctl.
func Verb(verb string) zap.Field { return zap.String("verb", verb) }

// Outcome is how a call ended: done, failed, refused or panicked.
func Outcome(outcome string) zap.Field { return zap.String("outcome", outcome) }

// Reason is the stable reason of the error a call got.
func Reason(reason gpreempt.Reason) zap.Field { return zap.String("reason", string(reason)) }

// Waited is how long something was waited for.
func Waited(d time.Duration) zap.Field { return zap.Duration("waited", d) }

// What changed.

// From is what it was before.
func From(text string) zap.Field { return zap.String("from", text) }

// To is what it is now.
func To(text string) zap.Field { return zap.String("to", text) }

// Cause is the stable word for why a state changed.
func Cause(cause string) zap.Field { return zap.String("cause", cause) }

// End is how a lease ended.
func End(end fmt.Stringer) zap.Field { return zap.Stringer("end", end) }

// Took is how long a suspend, a resume, a lease or the wait for an answer lasted.
func Took(d time.Duration) zap.Field { return zap.Duration("took", d) }

// Class is the class of a target: online, offline or unmanaged.
func Class(class gpreempt.Class) zap.Field { return zap.Stringer("class", class) }

// Config is a key of the config file.
func Config(key string) zap.Field { return zap.String("key", key) }

// Live reports whether a changed value is in force without a restart.
func Live(live bool) zap.Field { return zap.Bool("live", live) }

// What is wrong.

// Err is what went wrong. It makes no field of nil.
func Err(err error) zap.Field { return zap.Error(err) }

// Code is the stable code of a warning.
func Code(code string) zap.Field { return zap.String("code", code) }

// Severity is that of a warning: warning or error.
func Severity(severity string) zap.Field { return zap.String("severity", severity) }

// Text is what somebody else says: a warning, the kernel, a row of the config file.
func Text(text string) zap.Field { return zap.String("text", text) }

// Remedy is what to do about a warning.
func Remedy(text string) zap.Field { return zap.String("remedy", text) }

// Pattern is the pattern that a line of the kernel log matches.
func Pattern(name string) zap.Field { return zap.String("pattern", name) }

// Issue is the public report of that pattern.
func Issue(url string) zap.Field { return zap.String("issue", url) }

// Panic is what a handler panicked with.
func Panic(value any) zap.Field { return zap.Any("panic", value) }

// Stack is where a handler panicked.
func Stack(stack []byte) zap.Field { return zap.ByteString("stack", stack) }

// RetryIn is when it is tried again.
func RetryIn(d time.Duration) zap.Field { return zap.Duration("retry_in", d) }

// Line is the number of a line in a file.
func Line(n int) zap.Field { return zap.Int("line", n) }

// What was left out of the log.

// Repeated is how many lines like this one came since the last and were left out.
func Repeated(lines uint64) zap.Field { return zap.Uint64("repeated", lines) }

// Unlogged is how many refused calls of this client had no line of the audit log.
func Unlogged(calls uint64) zap.Field { return zap.Uint64("unlogged", calls) }

// Lost is how many lines were lost because the reader of the log is too slow.
func Lost(lines int64) zap.Field { return zap.Int64("lost", lines) }

// How it was.

// Comm is the command of a process, as the kernel knows it.
func Comm(comm string) zap.Field { return zap.String("comm", comm) }

// Suspend reports whether an action is a suspend, rather than a resume.
func Suspend(suspend bool) zap.Field { return zap.Bool("suspend", suspend) }

// WasSuspended reports whether queues of the target were suspended.
func WasSuspended(was bool) zap.Field { return zap.Bool("was_suspended", was) }

// Since is when a pause began.
func Since(t time.Time) zap.Field { return zap.Time("since", t) }

// Why is why a mechanism does it in another way.
func Why(text string) zap.Field { return zap.String("why", text) }

// Descriptors is how many descriptors of the driver a process has.
func Descriptors(n int) zap.Field { return zap.Int("descriptors", n) }

// Paused is how many of those were paused.
func Paused(n int) zap.Field { return zap.Int("paused", n) }

// Permission is the driver's rule of who may debug a process.
func Permission(rule fmt.Stringer) zap.Field { return zap.Stringer("permission", rule) }

// Profile is the driver's profile that was found to fit.
func Profile(name string) zap.Field { return zap.String("profile", name) }

// State is what systemd was to be told.
func State(state string) zap.Field { return zap.String("state", state) }

// Backend is what the GPUs are: the host's, or a simulation.
func Backend(name string) zap.Field { return zap.String("backend", name) }

// GPUs is how many GPUs there are.
func GPUs(n int) zap.Field { return zap.Int("gpus", n) }

// TCP is where clients connect over TCP; empty without.
func TCP(address string) zap.Field { return zap.String("tcp", address) }

// Version is that of gpreemptd.
func Version(version string) zap.Field { return zap.String("version", version) }
