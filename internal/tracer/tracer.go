// Package tracer implements a ptrace tracer that a running program does not notice.
//
// KFD answers debug requests only to the OS thread that traces the target's main
// thread, so each target gets a thread of its own. The thread attaches, runs the
// closures that make those requests, and meanwhile forwards each signal, stop and exit
// of the target. It sets no ptrace options: nothing dies with the tracer, and the
// children and the other threads of the target are not traced.
//
// Two effects remain visible to a target. A system call ends early with EINTR where an
// ignored signal would not have interrupted it (epoll_wait, for one). And a signal to
// its main thread arrives some tens of microseconds later, or at the end of the closure
// that runs when the signal is sent.
//
// The main thread of a process never exits, and a thread that stays keeps what it
// traces. Attach therefore never uses it; a program that pins its main goroutine to it
// in an init function, as the daemon does, avoids a detour.
package tracer

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

	"github.com/gpreempt/gpreempt/internal/proc"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// Errors to match with errors.Is. The errors of Attach, Do and Detach name the process.
var (
	// ErrGone reports that the process has ended, or that its pid names another process.
	ErrGone = proc.ErrGone
	// ErrDetached reports that this Thread no longer traces the process, which may be
	// alive: after Detach, or after a thread other than the main one replaced the
	// program with execve, which ends the main thread.
	ErrDetached = errors.New("the process is no longer traced")
)

// Thread is an OS thread that traces one process. Its methods may be called from
// any goroutine, except that a closure given to Do must not call Do or Detach.
type Thread struct {
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

// Attach starts a thread that traces the process with this pid and this start time
// (field 22 of /proc/PID/stat, in clock ticks since boot). A running process continues
// and a stopped one stays stopped. The caller ends the trace with Detach.
//
// The error is ErrGone, a *DeniedError, the cause of ctx, or another error of the
// kernel. After an error the process is not traced; after the cause of ctx it is about
// to be detached.
func Attach(ctx context.Context, pid int32, start uint64) (*Thread, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	t := &Thread{
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
func (t *Thread) Do(ctx context.Context, f func() error) error {
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
func (t *Thread) Detach(ctx context.Context) error {
	t.once.Do(func() { close(t.detach) })
	select {
	case <-t.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("process %d: detaching: %w", t.target.PID, context.Cause(ctx))
	}
}

// Done is closed when the target is no longer traced, for any reason.
func (t *Thread) Done() <-chan struct{} { return t.done }

// Gone reports whether the thread has seen the end of the target. It is final once Done
// is closed.
func (t *Thread) Gone() bool { return t.gone.Load() }

func (t *Thread) ended() error {
	if t.gone.Load() {
		return fmt.Errorf("process %d: %w", t.target.PID, ErrGone)
	}
	return fmt.Errorf("process %d: %w", t.target.PID, ErrDetached)
}

// run is the life of the thread. When it returns, the thread exits and the kernel
// detaches the target (exit_ptrace), as it would if this program were killed: the
// target need not stop for it, receives the signal it is stopped for, stays stopped
// after a stop signal, and as a zombie is left to its parent.
func (t *Thread) run(ctx context.Context, attached chan<- error) {
	err := t.seize()
	select {
	case attached <- err:
	case <-ctx.Done(): // Attach has returned without the thread
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
func (t *Thread) execute(c call) {
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
