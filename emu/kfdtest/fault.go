package kfdtest

import (
	"slices"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// OpPidfdGetfd is Thread.PidfdGetfd.
const OpPidfdGetfd driver.Op = "pidfd_getfd"

// Call is a call that was made, of the kinds that a Fault can select.
type Call struct {
	// PID and TID are the caller's.
	PID, TID int32
	Op       driver.Op
	// Target is the pid in a DBG_TRAP or a pidfd_getfd.
	Target int32
	// Mask is the exceptions in a DBG_TRAP.
	Mask kfd.ExceptionMask
	// Queues are the IDs in a SUSPEND_QUEUES or RESUME_QUEUES, nil for NULL. Grace is the
	// grace period.
	Queues []uint32
	Grace  uint32
	// Done: it has returned R1 and Err, because of a Fault if Injected.
	Done     bool
	R1       uintptr
	Err      error
	Injected bool
}

// callsKept is the least number of calls that a Machine remembers.
const callsKept = 1 << 16

// Calls returns the calls made so far, in the order of their start: at least the last 65536.
func (m *Machine) Calls() []Call {
	defer m.lock()()
	calls := make([]Call, 0, len(m.calls))
	for _, c := range m.calls {
		calls = append(calls, *c)
	}
	return calls
}

// Ops returns the names of the calls process p has made so far.
func (m *Machine) Ops(p *Process) []driver.Op {
	var ops []driver.Op
	for _, c := range m.Calls() {
		if c.PID == p.pid {
			ops = append(ops, c.Op)
		}
	}
	return ops
}

// Stage is the part of a call at which a Fault strikes.
type Stage uint8

// The stages.
const (
	// Before: before the call has any effect. Errno replaces the call.
	Before Stage = iota
	// After: after the call's effect, before it returns. Errno replaces the result, and
	// the effect stays.
	After
	// Hardware: at an operation of the driver on a GPU. The driver holds the mutex of the
	// process that the operation is about, and the GPU's lock. Errno is the result of the
	// hardware: EIO during a reset, ETIME when an unmap fails. Do is not called.
	Hardware
)

// Fault is an injected failure of certain calls. The zero value strikes the first call
// only.
type Fault struct {
	// Op, Caller and Target select calls; empty selects any. Target is the pid in the
	// call or, at stage Hardware, the process whose queues it is about. At stage Hardware,
	// an empty Op also selects the driver's own work.
	Op             driver.Op
	Caller, Target *Process
	// Stage is the part of the call.
	Stage Stage
	// GPU and Step select, at stage Hardware, a GPU and a kind of step.
	GPU  gpreempt.GPUID
	Step driver.StepKind
	// Nth selects the Nth matching call from now on; 0 means the first. Always also
	// selects all later ones.
	Nth    int
	Always bool

	// Hold comes first: the call waits until Injection.Release, or until the caller dies,
	// except at stage Hardware.
	Hold bool
	// Do comes next. The calling goroutine calls it without any lock: it may kill any
	// process, and create or destroy queues.
	Do func()
	// Errno comes last: it is the error, if it is not 0.
	Errno unix.Errno
}

// Injection is a Fault in its Machine.
type Injection struct {
	m       *Machine
	fault   Fault
	reached chan struct{}

	// Guarded by Machine.mu.
	seen, hits int
	released   bool
}

// Inject adds a fault. Faults strike in the order in which they were added.
func (m *Machine) Inject(f Fault) *Injection {
	i := &Injection{m: m, fault: f, reached: make(chan struct{})}
	defer m.lock()()
	m.faults = append(m.faults, i)
	return i
}

// Fail makes calls op of process caller, nil for any, fail with errno: once, or always.
func (m *Machine) Fail(op driver.Op, caller *Process, errno unix.Errno, always bool) *Injection {
	return m.Inject(Fault{Op: op, Caller: caller, Errno: errno, Always: always})
}

// FailGPU makes all operations of calls op on a GPU fail until the fault is removed.
func (m *Machine) FailGPU(op driver.Op, gpu gpreempt.GPUID, errno unix.Errno) *Injection {
	return m.Inject(Fault{Op: op, GPU: gpu, Stage: Hardware, Errno: errno, Always: true})
}

// Hang makes the next op hang at the hardware until it is released. Meanwhile it holds the
// mutex of the process that it is about.
func (m *Machine) Hang(op driver.Op) *Injection {
	return m.Inject(Fault{Op: op, Stage: Hardware, Hold: true})
}

// Reached is closed when the fault first strikes.
func (i *Injection) Reached() <-chan struct{} { return i.reached }

// Hits returns how often the fault has struck.
func (i *Injection) Hits() int {
	defer i.m.lock()()
	return i.hits
}

// holds reports whether the fault holds the calls that it strikes.
func (i *Injection) holds() bool {
	defer i.m.lock()()
	return !i.released
}

// Release releases the calls that the fault holds, now and later.
func (i *Injection) Release() {
	i.m.mu.Lock()
	i.released = true
	i.m.mu.Unlock()
	i.m.Wake()
}

// Remove removes the fault and releases the calls that it holds.
func (i *Injection) Remove() {
	i.m.mu.Lock()
	i.m.faults = slices.DeleteFunc(i.m.faults, func(o *Injection) bool { return o == i })
	i.m.mu.Unlock()
	i.Release()
}

// due counts a matching call and reports whether the fault strikes it. mu is held.
func (i *Injection) due() bool {
	if i.seen++; i.seen < i.fault.Nth || i.hits > 0 && !i.fault.Always {
		return false
	}
	if i.hits++; i.hits == 1 {
		close(i.reached)
	}
	return true
}

// matches reports whether the fault selects a call of the process pid about target. mu is
// held.
func (i *Injection) matches(stage Stage, op driver.Op, pid, target int32) bool {
	f := &i.fault
	return f.Stage == stage && (f.Op == "" || f.Op == op) && (f.Caller == nil || f.Caller.pid == pid) &&
		(f.Target == nil || f.Target == i.m.owner(target))
}

// owner returns the process of a thread. mu is held.
func (m *Machine) owner(tid int32) *Process {
	if t := m.threads[tid]; t != nil {
		return t.p
	}
	return nil
}

// observe makes a call, with its record in Calls and with the injected faults.
func (t *Thread) observe(c Call, do func() (uintptr, error)) (r1 uintptr, err error) {
	m := t.p.m
	c.PID, c.TID = t.p.pid, t.tid
	m.mu.Lock()
	if len(m.calls) == 2*callsKept {
		m.calls = slices.Delete(m.calls, 0, callsKept)
	}
	m.calls = append(m.calls, &c)
	m.mu.Unlock()

	injected := t.strike(Before, &c)
	if injected == nil && !t.over() {
		r1, err = do()
		injected = t.strike(After, &c)
	}
	if injected != nil {
		err = injected
	}
	if err != nil {
		r1 = ^uintptr(0)
	}
	defer m.lock()()
	c.Done, c.R1, c.Err, c.Injected = true, r1, err, injected != nil
	return r1, err
}

func (t *Thread) over() bool {
	defer t.p.m.lock()()
	return t.gone()
}

// strike applies the faults of a stage until one returns an error.
func (t *Thread) strike(stage Stage, c *Call) error {
	m := t.p.m
	m.mu.Lock()
	faults := slices.Clone(m.faults)
	m.mu.Unlock()
	for _, i := range faults {
		m.mu.Lock()
		due := i.matches(stage, c.Op, c.PID, c.Target) && i.due()
		m.mu.Unlock()
		if !due {
			continue
		}
		if i.fault.Hold {
			t.wait(func() bool { return !i.holds() }, t.over)
		}
		if i.fault.Do != nil {
			end := t.count(&t.hooks)
			i.fault.Do()
			end()
		}
		if i.fault.Errno != 0 {
			return i.fault.Errno
		}
	}
	return nil
}

// step is the driver's hook. It applies the faults of stage Hardware.
func (m *Machine) step(s driver.Step) driver.Outcome {
	if out, struck := m.strikeStep(s); struck || m.hardware == nil {
		return out
	}
	return m.hardware(s)
}

// strikeStep has the first fault strike that is about a step; false when none is.
func (m *Machine) strikeStep(s driver.Step) (out driver.Outcome, struck bool) {
	defer m.lock()()
	for _, i := range m.faults {
		f := &i.fault
		if !i.matches(Hardware, s.Op, s.Caller, s.Process) || f.GPU != 0 && f.GPU != s.GPU || f.Step != "" && f.Step != s.Kind || !i.due() {
			continue
		}
		if f.Hold {
			out.Held = i.holds
		}
		out.Errno = f.Errno
		return out, true
	}
	return out, false
}
