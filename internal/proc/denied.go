package proc

import (
	"errors"
	"fmt"
	"os"

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

// denied returns why ptrace failed with EPERM. It looks at the process; whether this program may
// trace anything (Yama, capabilities) is checked by the mechanisms' probes and by gpctl doctor.
func (t *Tracer) denied() error {
	p, err := Open("/", t.target)
	if err != nil {
		return err
	}
	defer p.Close()
	stat, err := p.Stat()
	var status discovery.ProcStatus
	if err == nil {
		status, err = p.Status()
	}
	if gone := p.Check(); errors.Is(gone, ErrGone) { // it may have ended at any step
		return gone
	}
	if err != nil {
		return fmt.Errorf("process %d: %w, and the reason is unknown: %w", t.target.PID,
			os.NewSyscallError("ptrace(PTRACE_SEIZE)", unix.EPERM), err)
	}
	tracer, _ := TracerOf("/", status)
	return explain(t.target.PID, stat, tracer)
}

// explain returns the first sufficient reason. tracer is zero without one.
func explain(pid int32, stat discovery.ProcStat, tracer discovery.ProcStatus) *DeniedError {
	e := &DeniedError{PID: pid, Tracer: tracer.Process}
	switch {
	case stat.MainEnded():
		e.Tracer = 0
		e.Why = "its main thread has ended, which is the one that must be traced"
		e.Next = "restart the process, or use another mechanism"
	case tracer.Process != 0:
		e.Why, e.Next = Traced(tracer)
	default:
		e.Why = "this program lacks CAP_SYS_PTRACE, or Yama, a security module, a seccomp filter or a user namespace forbids it"
		e.Next = "run gpctl doctor, look for a denial of ptrace in the audit log (SELinux, AppArmor), and run this program in the user namespace of the process or its parent"
	}
	return e
}
