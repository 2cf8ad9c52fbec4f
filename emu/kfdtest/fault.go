package kfdtest

import (
	"slices"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// OpPidfdGetfd is Thread.PidfdGetfd.
const OpPidfdGetfd Op = "pidfd_getfd"

// Call is a call that was made, of those a Fault can be about.
type Call struct {
	// PID and TID are the caller's.
	PID, TID int32
	Op       Op
	// Target is the pid that a DBG_TRAP or a pidfd_getfd names.
	Target int32
	// Mask is the exceptions a DBG_TRAP names.
	Mask kfd.ExceptionMask
	// Queues are the ids a SUSPEND_QUEUES or RESUME_QUEUES names, nil for NULL, and
	// Grace the grace period.
	Queues []uint32
	Grace  uint32
	// Done: it has returned R1 and Err, because of a Fault if Injected.
	Done     bool
	R1       uintptr
	Err      error
	Injected bool
}

// Calls returns the calls made so far, in the order they began.
func (m *Machine) Calls() []Call {
	m.mu.Lock()
	defer m.mu.Unlock()
	calls := make([]Call, 0, len(m.calls))
	for _, c := range m.calls {
		calls = append(calls, *c)
	}
	return calls
}

// Ops returns the names of the calls process p has made so far.
func (m *Machine) Ops(p *Process) []Op {
	var ops []Op
	for _, c := range m.Calls() {
		if c.PID == p.pid {
			ops = append(ops, c.Op)
		}
	}
	return ops
}

// Stage is where in a call a Fault strikes.
type Stage uint8

// The stages.
const (
	// Before the call does anything. Errno is given instead of making it.
	Before Stage = iota
	// After it has had its effect, before it returns. Errno is given instead of its
	// result, and the effect stays.
	After
	// Hardware: when the driver is about to do something to a GPU, with the locks it
	// then holds: the mutex of the process it is about, and the GPU's. Errno is what
	// the hardware gives: EIO during a reset, ETIME when queues do not leave. Do is
	// not called there.
	Hardware
)

// Fault is something that goes wrong at certain calls. The zero value strikes
// nothing but the first call there is.
type Fault struct {
	// Which calls: those of Op, made by Caller, about Target; each empty for any.
	// Target counts for calls that name a pid and, at stage Hardware, for whose queues
	// they are. At stage Hardware, Op is empty for what the driver does by itself too.
	Op             Op
	Caller, Target *Process
	// Stage is where in the call.
	Stage Stage
	// GPU and Step narrow stage Hardware down: a GPU, a kind of step.
	GPU  gpreempt.GPUID
	Step Step
	// Nth counts: 0 and 1 are the first that matches from now on. Always means all
	// from there on, otherwise it is one.
	Nth    int
	Always bool

	// What happens, in this order. Hold: it waits until Injection.Release. Only the
	// death of the caller ends that, and nothing does at stage Hardware.
	Hold bool
	// Do is called by the calling goroutine, without any lock: it may kill any
	// process, and create or destroy queues.
	Do func()
	// Errno is the error.
	Errno unix.Errno
}

// Step is a kind of thing done to a GPU.
type Step = driver.StepKind

// The steps. With a runlist (HWS) there are unmap and map, for all processes at
// once; with MES add and remove for each queue.
const (
	StepUnmap          = driver.StepUnmap
	StepMap            = driver.StepMap
	StepAdd            = driver.StepAdd
	StepRemove         = driver.StepRemove
	StepShaderDebugger = driver.StepShaderDebugger
)

// Injection is a Fault in its Machine.
type Injection struct {
	m       *Machine
	fault   Fault
	reached chan struct{}

	// Guarded by Machine.mu.
	seen, hits int
	released   bool
}

// Inject puts a fault in. Those put in first strike first.
func (m *Machine) Inject(f Fault) *Injection {
	i := &Injection{m: m, fault: f, reached: make(chan struct{})}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.faults = append(m.faults, i)
	return i
}

// Fail has op answer errno to process caller, nil for any: once, or always.
func (m *Machine) Fail(op Op, caller *Process, errno unix.Errno, always bool) *Injection {
	return m.Inject(Fault{Op: op, Caller: caller, Errno: errno, Always: always})
}

// FailGPU has whatever a call op does to a GPU fail, always, until it is removed.
func (m *Machine) FailGPU(op Op, gpu gpreempt.GPUID, errno unix.Errno) *Injection {
	return m.Inject(Fault{Op: op, GPU: gpu, Stage: Hardware, Errno: errno, Always: true})
}

// Hang has the next op hang at the hardware, holding the mutex of the process it is
// about, until it is released.
func (m *Machine) Hang(op Op) *Injection {
	return m.Inject(Fault{Op: op, Stage: Hardware, Hold: true})
}

// Reached is closed when the fault first strikes.
func (i *Injection) Reached() <-chan struct{} { return i.reached }

// Hits describes how often it has struck.
func (i *Injection) Hits() int {
	i.m.mu.Lock()
	defer i.m.mu.Unlock()
	return i.hits
}

// Release releases what it holds, now and later.
func (i *Injection) Release() {
	i.m.mu.Lock()
	i.released = true
	i.m.mu.Unlock()
	i.m.driver.Wake()
}

// Remove takes the fault out, and releases what it holds.
func (i *Injection) Remove() {
	i.m.mu.Lock()
	i.m.faults = slices.DeleteFunc(i.m.faults, func(o *Injection) bool { return o == i })
	i.m.mu.Unlock()
	i.Release()
}

// due reports whether the fault strikes now, and counts. mu is held.
func (i *Injection) due() bool {
	if i.seen++; i.seen < i.fault.Nth || i.hits > 0 && !i.fault.Always {
		return false
	}
	if i.hits++; i.hits == 1 {
		close(i.reached)
	}
	return true
}

// matches reports whether the fault is about a call of the process pid, about target.
// mu is held.
func (i *Injection) matches(stage Stage, op Op, pid, target int32) bool {
	f := &i.fault
	return f.Stage == stage && (f.Op == "" || f.Op == op) && (f.Caller == nil || f.Caller.pid == pid) &&
		(f.Target == nil || f.Target == i.m.owner(target))
}

// owner returns the process that has a thread of that id. mu is held.
func (m *Machine) owner(tid int32) *Process {
	if t := m.threads[tid]; t != nil {
		return t.p
	}
	return nil
}

// observe makes a call: logged, and with what was injected.
func (t *Thread) observe(c Call, do func() (uintptr, error)) (r1 uintptr, err error) {
	m := t.p.m
	c.PID, c.TID = t.p.pid, t.tid
	m.mu.Lock()
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
	m.mu.Lock()
	defer m.mu.Unlock()
	c.Done, c.R1, c.Err, c.Injected = true, r1, err, injected != nil
	return r1, err
}

func (t *Thread) over() bool {
	t.p.m.mu.Lock()
	defer t.p.m.mu.Unlock()
	return t.gone()
}

// strike has the faults of a stage strike, until one gives an error.
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
			t.holdFor(i)
		}
		if i.fault.Do != nil {
			t.run(i.fault.Do)
		}
		if i.fault.Errno != 0 {
			return i.fault.Errno
		}
	}
	return nil
}

// holdFor waits until i is released or the thread dies.
func (t *Thread) holdFor(i *Injection) {
	m := t.p.m
	count := func(n int) {
		m.mu.Lock()
		t.held += n
		m.mu.Unlock()
		m.driver.Wake()
	}
	count(1)
	defer count(-1)
	m.driver.Await(func() bool {
		m.mu.Lock()
		defer m.mu.Unlock()
		return i.released || t.gone()
	}, never)
}

// run calls code of the test's.
func (t *Thread) run(do func()) {
	m := t.p.m
	count := func(n int) {
		m.mu.Lock()
		defer m.mu.Unlock()
		t.hooks += n
	}
	count(1)
	defer count(-1)
	do()
}

// step is the driver's hook: stage Hardware.
func (m *Machine) step(s driver.Step) driver.Outcome {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out driver.Outcome
	for _, i := range m.faults {
		f := &i.fault
		if !i.matches(Hardware, s.Op, s.Caller, s.Process) || f.GPU != 0 && f.GPU != s.GPU || f.Step != "" && f.Step != s.Kind || !i.due() {
			continue
		}
		if f.Hold {
			out.Held = func() bool {
				m.mu.Lock()
				defer m.mu.Unlock()
				return !i.released
			}
		}
		out.Errno = f.Errno
		break
	}
	return out
}
