package proc

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/pkg/discovery"
)

// DeniedError reports why the kernel forbids this program to trace a process, and the
// remedy. It matches unix.EPERM.
type DeniedError struct {
	// PID is the process that cannot be traced.
	PID int32
	// Tracer is the process that traces it, 0 when that is not the reason.
	Tracer int32
	// Why is the reason and Next the remedy, as clauses.
	Why, Next string
}

// Error returns the process, the reason and the remedy.
func (e *DeniedError) Error() string {
	return fmt.Sprintf("process %d cannot be traced: %s: %s", e.PID, e.Why, e.Next)
}

// Unwrap returns the errno of ptrace.
func (e *DeniedError) Unwrap() error { return unix.EPERM }

// ErrTraced matches a DeniedError because of another tracer.
var ErrTraced = errors.New("another program traces the process")

// Is reports whether target is ErrTraced and describes the error.
func (e *DeniedError) Is(target error) bool { return target == ErrTraced && e.Tracer != 0 }

// noTracing is the scope of Yama that forbids ptrace.
const noTracing = "3"

// kernelThread is PF_KTHREAD of the kernel's task flags (include/linux/sched.h).
const kernelThread = 0x00200000

// facts are what a denial may depend on.
type facts struct {
	stat   discovery.ProcStat
	self   bool // the process is this one
	tracer discovery.ProcStatus
	scope  string // kernel.yama.ptrace_scope, "" without Yama
	caps   uint64 // effective capabilities of this thread
}

// denied returns why ptrace failed with EPERM, which has many meanings.
func (t *Tracer) denied() error {
	p, err := Open("/", t.target)
	if err != nil {
		return err
	}
	defer p.Close()
	f, err := inquire(p)
	if gone := p.Check(); errors.Is(gone, ErrGone) { // it may have ended at any step
		return gone
	}
	if err != nil {
		return fmt.Errorf("process %d: %w, and the reason is unknown: %w", t.target.PID,
			os.NewSyscallError("ptrace(PTRACE_SEIZE)", unix.EPERM), err)
	}
	return f.explain(t.target.PID)
}

// inquire reads the facts.
func inquire(p *Process) (facts, error) {
	f := facts{self: p.Key().PID == int32(os.Getpid())}
	var err error
	if f.stat, err = p.Stat(); err != nil {
		return f, err
	}
	status, err := p.Status()
	if err != nil {
		return f, err
	}
	if status.Tracer != 0 {
		if f.tracer, err = Status("/", strconv.Itoa(int(status.Tracer))); err != nil { // the tracer has ended
			f.tracer = discovery.ProcStatus{Name: "unknown", Process: status.Tracer}
		}
	}
	own, err := Status("/", "thread-self")
	if err != nil {
		return f, err
	}
	f.caps = own.Capabilities
	if scope, err := os.ReadFile("/proc/sys/kernel/yama/ptrace_scope"); err == nil {
		f.scope = strings.TrimSpace(string(scope))
	}
	return f, nil
}

// explain returns the first sufficient reason.
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
		e.Why = "its main thread has ended, which is the one that must be traced"
		e.Next = "restart the process, or use another mechanism"
	case f.tracer.Process != 0:
		e.Tracer = f.tracer.Process
		e.Why = fmt.Sprintf("it is already traced by pid %d (%s)", f.tracer.Process, f.tracer.Name)
		e.Next = "end that debugger or tracer; a process can have only one"
	case f.scope == noTracing:
		e.Why = "kernel.yama.ptrace_scope is 3, which forbids ptrace, also to root"
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
