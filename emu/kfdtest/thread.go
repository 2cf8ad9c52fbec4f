package kfdtest

import (
	"slices"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/emu/driver"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// Thread is a thread. As a [kfd.Sys] it makes calls with the thread's rights, descriptors
// and tracees. Several goroutines may use one Thread at once, unlike a real thread; then a
// signal may end any of the calls.
type Thread struct {
	p   *Process
	tid int32

	// Guarded by Machine.mu.
	tracer *Thread
	dead   bool
	// calls counts the calls in progress, hooks those that run a Fault's Do, held those
	// that a Fault holds or that wait for a pipe.
	calls, hooks, held int
	interrupted        bool
}

var (
	_ kfd.Sys     = (*Thread)(nil)
	_ driver.Task = (*Thread)(nil)
)

// TID returns the thread's ID.
func (t *Thread) TID() int32 { return t.tid }

// Process returns the process of the thread.
func (t *Thread) Process() *Process { return t.p }

// Seize makes the thread the tracer of thread pid (PTRACE_SEIZE): ESRCH if there is no
// such thread, EPERM if it is traced already or of the same process, or without
// driver.CapSysPtrace.
func (t *Thread) Seize(pid int32) error {
	t = t.caller()
	m := t.p.m
	defer m.lock()()
	other := m.threads[pid]
	switch {
	case t.gone():
		return unix.EOWNERDEAD
	case other == nil || other.dead:
		return unix.ESRCH
	case other.p == t.p || other.tracedBy() != nil || !t.p.caps[driver.CapSysPtrace]:
		return unix.EPERM
	}
	other.tracer = t
	return nil
}

// Detach ends the tracing of pid (PTRACE_DETACH): ESRCH if this thread does not
// trace it.
func (t *Thread) Detach(pid int32) error {
	t = t.caller()
	m := t.p.m
	defer m.lock()()
	other := m.threads[pid]
	if t.gone() {
		return unix.EOWNERDEAD
	}
	if other == nil || other.tracedBy() != t {
		return unix.ESRCH
	}
	other.tracer = nil
	return nil
}

// Exit ends the thread and its tracing; the last thread ends the process. A call in
// progress that no signal ends continues.
func (t *Thread) Exit() {
	m := t.p.m
	m.mu.Lock()
	t.interrupted = t.calls > 0
	t.die()
	t.p.threads = slices.DeleteFunc(t.p.threads, func(o *Thread) bool { return o == t })
	last := len(t.p.threads) == 0
	m.mu.Unlock()
	m.Wake()
	if last {
		t.p.Kill()
	}
}

// Interrupt sends the thread a signal with a handler: an interruptible call that waits
// returns EINTR. Without a call in progress it has no effect.
func (t *Thread) Interrupt() {
	t.p.m.mu.Lock()
	t.interrupted = t.calls > 0
	t.p.m.mu.Unlock()
	t.p.m.Wake()
}

// Blocked reports whether the thread waits in a call: in the driver, for a pipe, or held
// by a Fault.
func (t *Thread) Blocked() bool {
	t.p.m.mu.Lock()
	held := t.held > 0
	t.p.m.mu.Unlock()
	waiting, _ := t.p.m.Waiting(t)
	return held || waiting
}

// idle reports whether the thread has no call in progress.
func (t *Thread) idle() bool {
	defer t.p.m.lock()()
	return t.calls == 0
}

// stuck reports whether no signal ends the thread's call: it waits for a lock of the
// driver, or runs code of the test.
func (t *Thread) stuck() bool {
	t.p.m.mu.Lock()
	hooks := t.hooks > 0
	t.p.m.mu.Unlock()
	waiting, interruptible := t.p.m.Waiting(t)
	return hooks || waiting && !interruptible
}

// die ends the thread and its tracing. mu is held.
func (t *Thread) die() {
	t.dead = true
	for _, o := range t.p.m.threads {
		if o.tracer == t {
			o.tracer = nil
		}
	}
}

// gone reports whether the thread has ended or is being killed. mu is held.
func (t *Thread) gone() bool { return t.dead || t.p.killed }

// enter begins a call.
func (t *Thread) enter() error {
	defer t.p.m.lock()()
	if t.gone() {
		return unix.EOWNERDEAD
	}
	t.calls++
	return nil
}

// leave ends a call, and then the process if it is being killed and this was the last
// call. It returns the error of the call.
func (t *Thread) leave(err error) error {
	m := t.p.m
	m.mu.Lock()
	if t.calls--; t.calls == 0 {
		t.interrupted = false
	}
	gone := t.gone()
	m.mu.Unlock()
	if !gone {
		return err
	}
	if t.p.beginExit() {
		t.p.exit()
	}
	m.Wake()
	return unix.EOWNERDEAD
}

// wait waits until cond or stop returns true, and reports whether cond did. Both are called
// without a lock.
func (t *Thread) wait(cond, stop func() bool) bool {
	defer t.count(&t.held)()
	return t.p.m.Driver.Await(cond, stop)
}

// count adds one to a counter of the thread, and subtracts it when the result is called.
func (t *Thread) count(n *int) (end func()) {
	add := func(d int) {
		unlock := t.p.m.lock()
		*n += d
		unlock()
		t.p.m.Wake()
	}
	add(1)
	return func() { add(-1) }
}

// Leader returns the main thread of the process.
func (t *Thread) Leader() driver.Task { return t.p.main }

// Comm returns the name of the program.
func (t *Thread) Comm() string { return "fake" }

// MM returns the address space, nil after the end of the thread.
func (t *Thread) MM() driver.MM {
	defer t.p.m.lock()()
	if t.dead || t.p.mm == nil {
		return nil
	}
	return t.p.mm
}

// Tracer returns the thread that traces this one, nil if none does.
func (t *Thread) Tracer() driver.Task {
	defer t.p.m.lock()()
	if tracer := t.tracedBy(); tracer != nil {
		return tracer
	}
	return nil
}

// Interrupted reports whether a signal is pending, or the thread has ended.
func (t *Thread) Interrupted() bool {
	defer t.p.m.lock()()
	return t.interrupted || t.gone()
}

// Capable reports whether the process has capability c.
func (t *Thread) Capable(c driver.Capability) bool {
	defer t.p.m.lock()()
	return t.p.caps[c]
}

// PIDInside returns the PID in the process's own PID namespace.
func (t *Thread) PIDInside() int32 {
	defer t.p.m.lock()()
	return t.p.inside
}

// Find returns the thread with that ID, nil if no thread has it.
func (t *Thread) Find(pid int32) driver.Task {
	defer t.p.m.lock()()
	if found := t.p.m.threads[pid]; found != nil {
		return found
	}
	return nil
}
