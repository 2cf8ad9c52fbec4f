package proc

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// ErrDetached reports that this Tracer no longer traces the process, which may be
// alive: after Detach, or after a thread other than the main one replaced the
// program with execve, which ends the main thread.
var ErrDetached = errors.New("the process is no longer traced")

// Tracer is an OS thread that traces one process. Its methods may be called from
// any goroutine, except that a closure given to Do must not call Do or Detach.
type Tracer struct {
	target gpreempt.ProcessKey

	calls chan call
	// wake is filled when the target may have an event.
	wake   chan struct{}
	detach chan struct{} // closed by the first Detach
	once   sync.Once     // closes detach
	done   chan struct{} // closed when the OS thread has ended
	gone   atomic.Bool   // set before done is closed
}

// call is a closure for the thread.
type call struct {
	f func() error
	// reply has room for the result, so that the thread does not block.
	reply chan error
}

// Trace starts a thread that traces the process with this pid and this start time
// (field 22 of /proc/PID/stat, in clock ticks since boot). A running process continues
// and a stopped one stays stopped. The caller ends the trace with Detach.
//
// The error is ErrGone, a *DeniedError, the cause of ctx, or another error of the
// kernel. After an error the process is not traced; after the cause of ctx it will
// be detached soon.
func Trace(ctx context.Context, pid int32, start uint64) (*Tracer, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	t := &Tracer{
		target: gpreempt.ProcessKey{PID: pid, Start: start},
		calls:  make(chan call),
		wake:   make(chan struct{}, 1),
		detach: make(chan struct{}),
		done:   make(chan struct{}),
	}
	attached := make(chan error)
	go func() {
		defer close(t.done)
		watcher.add(t)
		defer watcher.remove(t)
		onNewThread(func() { t.run(ctx, attached) })
	}()
	select {
	case err := <-attached:
		if err != nil {
			<-t.done
			return nil, err
		}
		return t, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// Do runs f on the thread and returns its error, or one with the message and the stack
// when f panics. Closures run one at a time, in the order of the calls. If ctx ends
// before f begins, f never runs and Do returns the cause of ctx; once f has begun Do
// waits for it. After the end of the trace the error is ErrGone or ErrDetached.
//
// While f runs, signals to the target's main thread are delayed. f should make only the
// calls that need this thread, and must not wait for another goroutine.
func (t *Tracer) Do(ctx context.Context, f func() error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	c := call{f: f, reply: make(chan error, 1)}
	select {
	case t.calls <- c: // the thread will reply
		return <-c.reply
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-t.done:
		return t.ended()
	}
}

// Detach ends the trace, delivers a signal that is pending for the target, and waits
// until the target runs untraced or ctx ends; detaching continues in either case. It
// waits for the closure that is running, but not for the target, which may sleep in a
// driver. It returns nil for a target that is gone or detached already.
func (t *Tracer) Detach(ctx context.Context) error {
	t.once.Do(func() { close(t.detach) })
	select {
	case <-t.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("process %d: detach: %w", t.target.PID, context.Cause(ctx))
	}
}

// Done is closed when the target is no longer traced, for any reason.
func (t *Tracer) Done() <-chan struct{} { return t.done }

// Gone reports whether the thread has seen the end of the target. It is final once Done
// is closed.
func (t *Tracer) Gone() bool { return t.gone.Load() }

func (t *Tracer) ended() error {
	if t.gone.Load() {
		return fmt.Errorf("process %d: %w", t.target.PID, ErrGone)
	}
	return fmt.Errorf("process %d: %w", t.target.PID, ErrDetached)
}

// run is the life of the thread. When it returns, the thread exits and the kernel
// detaches the target (exit_ptrace), as it would if this program were killed: the
// target need not stop for it, receives the signal it is stopped for, stays stopped
// after a stop signal, and as a zombie is left to its parent.
func (t *Tracer) run(ctx context.Context, attached chan<- error) {
	err := t.seize()
	select {
	case attached <- err:
	case <-ctx.Done(): // Trace has returned without the thread
		return
	}
	for err == nil {
		select {
		case <-t.wake:
			if !t.forward() {
				return
			}
		case c := <-t.calls:
			t.execute(c)
		case <-t.detach:
			return
		}
	}
}

// execute runs a closure and replies, also when the closure panics or calls Goexit.
func (t *Tracer) execute(c call) {
	var err error
	returned := false
	defer func() {
		if !returned {
			if cause := recover(); cause != nil {
				err = fmt.Errorf("process %d: panic on the tracing thread: %v\n%s", t.target.PID, cause, debug.Stack())
			} else {
				err = fmt.Errorf("process %d: a closure ended the tracing thread with runtime.Goexit", t.target.PID)
			}
		}
		c.reply <- err
	}()
	err = c.f()
	returned = true
}

// exitPoll is how often to check whether a thread has exited, which takes it some tens
// of microseconds.
const exitPoll = 50 * time.Microsecond

// onNewThread runs f on an OS thread that is not the main one and exits after f. When
// it returns, the thread has exited and what it traced is detached.
func onNewThread(f func()) {
	ended := make(chan int, 1) // receives the thread id, unless f ran on yet another thread
	go func() {
		defer close(ended)
		runtime.LockOSThread()
		tid := unix.Gettid()
		if tid == unix.Getpid() {
			// The main thread. While it is locked, the next goroutine gets another one.
			onNewThread(f)
			runtime.UnlockOSThread()
			return
		}
		defer func() { ended <- tid }() // also when f ends the goroutine
		f()
	}()
	tid, own := <-ended
	for own && unix.Tgkill(unix.Getpid(), tid, 0) == nil {
		time.Sleep(exitPoll)
	}
}
