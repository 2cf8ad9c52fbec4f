// Package tracer hides what it takes to be the ptrace tracer of a running
// program without the program noticing.
//
// KFD answers debug requests only to the OS thread that traces the target's main
// thread, so each target gets a thread of its own: it attaches, runs the closures
// that make those requests, and in between hands every signal, stop and exit of
// the target on to where it was going. The options are zero: nothing dies with the
// tracer, and the children and the other threads of the target are not traced.
//
// What a target can still see is a system call that ends early with EINTR where an
// ignored signal would have left it alone (epoll_wait, for one), and a signal to
// its main thread that comes some tens of microseconds later, or as late as the
// end of the closure that runs when it comes.
//
// The main thread of a process never exits, and a thread that stays keeps what it
// traces. Attach therefore never uses it; a program that pins it in an init
// function, as the daemon does, spares itself the detour.
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
)

// Errors to match with errors.Is. What Attach, Do and Detach return says which
// process it is about.
var (
	// ErrGone says that the process has ended, or that its pid belongs to another
	// process by now.
	ErrGone = errors.New("the process is gone")
	// ErrDetached says that the process is no longer traced by this Thread and may
	// be alive: after Detach, or after a thread other than the main one replaced
	// the program with execve, which ends the main thread.
	ErrDetached = errors.New("the process is no longer traced")
)

// Thread is an OS thread that traces one process. Its methods may be called from
// any goroutine, except that a closure given to Do must not call Do or Detach.
type Thread struct {
	pid   int32
	start uint64

	calls chan call
	// wake is filled when the target may have something to wait for.
	wake   chan struct{}
	detach chan struct{} // closed by the first Detach
	once   sync.Once     // closes detach
	done   chan struct{} // closed when the OS thread has ended
	gone   atomic.Bool   // set before done is closed
}

// call is a closure on its way to the thread.
type call struct {
	f func() error
	// reply has room for the one answer, so that the thread never waits to give it.
	reply chan error
}

// Attach starts a thread that traces the process with this pid and this start time
// (field 22 of /proc/PID/stat, in clock ticks since boot). The process runs on, and
// one that is stopped stays stopped. The caller ends the trace with Detach.
//
// The error is ErrGone, a *DeniedError, the cause of ctx, or what the kernel said.
// When it is not nil the process is not traced or, if it is the cause of ctx, is
// being let go.
func Attach(ctx context.Context, pid int32, start uint64) (*Thread, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	t := &Thread{
		pid:    pid,
		start:  start,
		calls:  make(chan call),
		wake:   make(chan struct{}, 1),
		detach: make(chan struct{}),
		done:   make(chan struct{}),
	}
	attached := make(chan error)
	go func() {
		defer close(t.done)
		lookout.add(t)
		defer lookout.remove(t)
		onThreadOfItsOwn(func() { t.run(ctx, attached) })
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

// Do runs f on the thread and returns its error, or one that holds the message and
// the stack when f panics. Closures run one at a time, in the order they came. If
// ctx ends before f begins, f never runs and the cause of ctx is returned; once f
// has begun Do waits for it. After the end of the trace it is ErrGone or
// ErrDetached.
//
// While f runs, a signal to the target's main thread waits: keep f to the system
// calls that need the thread, without locks, channels and logging.
func (t *Thread) Do(ctx context.Context, f func() error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	c := call{f: f, reply: make(chan error, 1)}
	select {
	case t.calls <- c: // the thread has it, and will answer
		return <-c.reply
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-t.done:
		return t.ended()
	}
}

// Detach lets the target go, with a signal that was on its way to it, and waits
// until it runs on its own or ctx ends; the detaching goes on in either case. It
// comes after the closure that is running, and needs nothing of the target, which
// may sleep in a driver. A target that is gone or detached already is no error.
func (t *Thread) Detach(ctx context.Context) error {
	t.once.Do(func() { close(t.detach) })
	select {
	case <-t.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("process %d: detaching: %w", t.pid, context.Cause(ctx))
	}
}

// Done is closed when the target is no longer traced, for whatever reason.
func (t *Thread) Done() <-chan struct{} { return t.done }

// Gone reports whether the target has ended, as far as the thread has seen; once Done
// is closed the answer no longer changes.
func (t *Thread) Gone() bool { return t.gone.Load() }

func (t *Thread) ended() error {
	if t.gone.Load() {
		return fmt.Errorf("process %d: %w", t.pid, ErrGone)
	}
	return fmt.Errorf("process %d: %w", t.pid, ErrDetached)
}

// run is the life of the thread. Whichever way it ends, the kernel then does all of
// the detaching (exit_ptrace), as it would if this program were killed: the target
// need not stop for it, gets the signal it is stopped to receive, stays stopped if
// it was stopped by one, and as a zombie goes to its parent.
func (t *Thread) run(ctx context.Context, attached chan<- error) {
	err := t.seize()
	select {
	case attached <- err:
	case <-ctx.Done(): // nobody is there to detach later
		return
	}
	for err == nil {
		select {
		case <-t.wake:
			if !t.handOn() {
				return
			}
		case c := <-t.calls:
			t.execute(c)
		case <-t.detach:
			return
		}
	}
}

// execute runs a closure and answers, whatever the closure does.
func (t *Thread) execute(c call) {
	var err error
	returned := false
	defer func() {
		if !returned {
			if cause := recover(); cause != nil {
				err = fmt.Errorf("process %d: panic on the tracing thread: %v\n%s", t.pid, cause, debug.Stack())
			} else {
				err = fmt.Errorf("process %d: a closure ended the tracing thread with runtime.Goexit", t.pid)
			}
		}
		c.reply <- err
	}()
	err = c.f()
	returned = true
}

// threadEnd is how often to look whether a thread has ended, which takes it some
// tens of microseconds.
const threadEnd = 50 * time.Microsecond

// onThreadOfItsOwn runs f on an OS thread that is not the main one and ends with f.
// It returns when the thread is no more, and with it what it traced is let go.
func onThreadOfItsOwn(f func()) {
	ended := make(chan int, 1) // has the thread, or nothing
	go func() {
		defer close(ended)
		runtime.LockOSThread()
		tid := unix.Gettid()
		if tid == unix.Getpid() {
			// The main thread. Held meanwhile, it cannot be the next one too.
			onThreadOfItsOwn(f)
			runtime.UnlockOSThread()
			return
		}
		defer func() { ended <- tid }() // also when f ends the goroutine
		f()
	}()
	tid, own := <-ended
	for own && unix.Tgkill(unix.Getpid(), tid, 0) == nil {
		time.Sleep(threadEnd)
	}
}
