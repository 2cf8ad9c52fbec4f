package tracer

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/pkg/discovery"
)

// DeniedError says why the kernel does not let this program trace a process, and
// what to do about it. It matches unix.EPERM.
type DeniedError struct {
	// PID is the process that was to be traced.
	PID int32
	// Tracer is the process that traces it already, 0 when that is not the reason.
	Tracer int32
	// Why is the reason, and Next what to do, as clauses.
	Why, Next string
}

// Error returns the process, the reason and the remedy.
func (e *DeniedError) Error() string {
	return fmt.Sprintf("process %d cannot be traced: %s: %s", e.PID, e.Why, e.Next)
}

// Unwrap returns the kernel's word for it.
func (e *DeniedError) Unwrap() error { return unix.EPERM }

// noTracing is Yama's scope in which nobody may trace.
const noTracing = "3"

// kernelThread is PF_KTHREAD of the kernel's task flags (include/linux/sched.h).
const kernelThread = 0x00200000

// facts are what decides who may trace whom.
type facts struct {
	stat   discovery.ProcStat
	self   bool // the process is this one
	tracer discovery.ProcStatus
	scope  string // kernel.yama.ptrace_scope, "" without Yama
	caps   uint64 // those in effect for this thread
}

// denied finds out why ptrace gave EPERM, which has many meanings.
func (t *Thread) denied() error {
	f, err := t.inquire()
	// Looked at last: a process that ends does so between any two looks.
	if gone := t.verify(); errors.Is(gone, ErrGone) {
		return gone
	}
	if err != nil {
		return fmt.Errorf("process %d: %w, and why could not be found out: %w", t.pid,
			os.NewSyscallError("ptrace(PTRACE_SEIZE)", unix.EPERM), err)
	}
	return f.explain(t.pid)
}

// inquire gathers the facts.
func (t *Thread) inquire() (facts, error) {
	f := facts{self: t.pid == int32(os.Getpid())}
	var err error
	if f.stat, err = readStat(t.pid); err != nil {
		return f, err
	}
	status, err := readStatus(procPath(t.pid, "status"))
	if err != nil {
		return f, err
	}
	if status.Tracer != 0 {
		// The tracer may have ended since: then its number is all there is to say.
		if f.tracer, err = readStatus(procPath(status.Tracer, "status")); err != nil {
			f.tracer = discovery.ProcStatus{Name: "unknown", Process: status.Tracer}
		}
	}
	own, err := readStatus("/proc/thread-self/status")
	if err != nil {
		return f, err
	}
	f.caps = own.Capabilities
	if scope, err := os.ReadFile("/proc/sys/kernel/yama/ptrace_scope"); err == nil {
		f.scope = strings.TrimSpace(string(scope))
	}
	return f, nil
}

// explain returns the first reason that is enough by itself.
func (f facts) explain(pid int32) *DeniedError {
	e := &DeniedError{PID: pid}
	switch {
	case f.self:
		e.Why = "it is the tracing program itself"
		e.Next = "classify it as one that is never suspended"
	case f.stat.Flags&kernelThread != 0:
		e.Why = "it is a kernel thread"
		e.Next = "choose a process that has GPU queues"
	case f.stat.MainEnded():
		e.Why = "its main thread has ended while others run, and that is the thread to trace"
		e.Next = "it cannot be suspended this way; restart it if it must be"
	case f.tracer.Process != 0:
		e.Tracer = f.tracer.Process
		e.Why = fmt.Sprintf("it is already traced by pid %d (%s)", f.tracer.Process, f.tracer.Name)
		e.Next = "end that debugger or tracer; a process has one at a time"
	case f.scope == noTracing:
		e.Why = "kernel.yama.ptrace_scope is 3, which forbids tracing to everyone, root included"
		e.Next = "set it to 2 or less in /etc/sysctl.d and reboot; 3 cannot be undone at run time"
	case f.caps&(1<<unix.CAP_SYS_PTRACE) == 0:
		e.Why = "this program lacks CAP_SYS_PTRACE"
		e.Next = "run it as root, or add CAP_SYS_PTRACE to its unit (CapabilityBoundingSet, AmbientCapabilities) or container"
	default:
		e.Why = "a security module, a seccomp filter or a user namespace forbids it"
		e.Next = "look for a denial of ptrace in the audit log (SELinux, AppArmor), and run this program in the user namespace of the process or its parent"
	}
	return e
}
