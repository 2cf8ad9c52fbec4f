package kfdtest

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/gpreempt/gpreempt/internal/proc"
)

// Tracing is an OS thread of this process that traces a process of the machine: what
// proc.Tracer is for a real process.
type Tracing struct {
	pid   int32
	calls chan func()
	end   chan struct{} // closed to end the trace
	once  sync.Once
	done  chan struct{}
	gone  atomic.Bool
}

// Trace starts a thread that traces a process, until Detach or the process's end. The
// errors are proc.ErrGone, and proc.DeniedError when another thread traces it.
func (m *Machine) Trace(pid int32) (*Tracing, error) {
	m.mu.Lock()
	p := m.procs[pid]
	m.mu.Unlock()
	if p == nil || p.Dead() {
		return nil, fmt.Errorf("process %d: %w", pid, proc.ErrGone)
	}
	t := &Tracing{pid: pid, calls: make(chan func()), end: make(chan struct{}), done: make(chan struct{})}
	seized := make(chan error)
	go t.run(m.self, seized)
	if err := <-seized; err != nil {
		return nil, &proc.DeniedError{PID: pid, Tracer: 1, Why: "it is traced already", Next: "end that"}
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		// A real tracer is notified when its target ends.
		if m.Await(ctx, p.Dead) == nil {
			t.gone.Store(true)
			t.finish()
		}
	}()
	go func() { <-t.done; cancel() }()
	return t, nil
}

func (t *Tracing) run(self *Process, seized chan<- error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer close(t.done)
	err := self.Main().Seize(t.pid)
	seized <- err
	if err != nil {
		return
	}
	defer func() { _ = self.Main().Detach(t.pid) }() // it may be dead
	for {
		select {
		case f := <-t.calls:
			f()
		case <-t.end:
			return
		}
	}
}

func (t *Tracing) finish() { t.once.Do(func() { close(t.end) }) }

// Do calls f on the thread. After the end of the trace it returns proc.ErrGone or
// proc.ErrDetached.
func (t *Tracing) Do(ctx context.Context, f func() error) error {
	answer := make(chan error, 1)
	select {
	case t.calls <- func() { answer <- f() }:
		return <-answer
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-t.done:
		if t.gone.Load() {
			return fmt.Errorf("process %d: %w", t.pid, proc.ErrGone)
		}
		return fmt.Errorf("process %d: %w", t.pid, proc.ErrDetached)
	}
}

// Detach ends the trace and waits for that.
func (t *Tracing) Detach(context.Context) error {
	t.finish()
	<-t.done
	return nil
}

// Done returns a channel that is closed when the trace has ended.
func (t *Tracing) Done() <-chan struct{} { return t.done }

// Gone reports whether the trace ended because the process did.
func (t *Tracing) Gone() bool { return t.gone.Load() }
