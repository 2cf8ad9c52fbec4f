package seccomp

import (
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
)

// maxErrno is the largest errno a program can see (MAX_ERRNO).
const maxErrno = 4095

// The states of a call. The goroutine that moves it from waiting to answering answers it.
// It is over when it has its answer or its caller has ended.
const (
	waiting int32 = iota
	answering
	over
)

// Call is a system call that waits for its answer. Any goroutine may call its methods
// until the handler returns.
type Call struct {
	// ID is the kernel's number of the call, unique in a listener.
	ID uint64
	// TID is the calling thread in the supervisor's pid namespace, 0 if it is not visible
	// there. After the call has ended the number may belong to another thread: what was
	// read with it counts only if Valid returns true afterwards.
	TID int32
	// NR is the number of the system call on the machine's own architecture.
	NR int
	// Args are its arguments. The upper half of those of type int is undefined.
	Args [6]uint64

	listener *Listener
	life     atomic.Int32
	// interrupted: the caller was found in a killable sleep. It is never reset.
	interrupted atomic.Bool
	// passed: another goroutine receives calls, or the handler has returned.
	passed atomic.Bool
	// added: AddFD has moved the caller to a killable sleep, so the sleep no longer shows
	// an interruption.
	added atomic.Bool

	// mu guards stat, the caller's stat file, opened when it is first needed.
	mu     sync.Mutex
	stat   statFile
	opened bool
}

// Valid reports whether the caller still waits in this call, which it does until it is
// answered or killed. What was read about the caller, from its memory or /proc, counts
// only if Valid returns true afterwards, and every effect of the call needs a Valid
// before it.
func (c *Call) Valid() bool {
	return c.life.Load() != over && idValid(c.listener.fd, c.ID)
}

// Interrupted reports whether the wait of a driver in this call would have ended: a
// signal, a group stop, a ptrace stop or the freezer is pending for the caller, the caller
// is dead, or the listener is being closed. It does not become false again. If it returns
// true, answer with ERESTARTSYS.
//
// After AddFD it reports only death and closing.
//
// A caller sleeps interruptibly until something is pending for it; then the kernel moves
// it to a sleep that only death ends, because of WAIT_KILLABLE_RECV
// (seccomp_do_user_notification). That sleep is the state D in its stat file. The signal
// masks of its status file do not show every interruption: a stop for a tracer is in none
// of them.
func (c *Call) Interrupted() bool {
	return c.interrupted.Load() || c.listener.closing.Load() || c.look()
}

// look reports whether the call was interrupted or is over, from the caller's stat file.
func (c *Call) look() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	first := !c.opened
	if first {
		c.stat, c.opened = openStat(c.TID), true
	}
	state := c.stat.state()
	if state == 'S' && !first {
		return false // the common case, without another system call
	}
	// Valid after the file was opened, so the file belongs to this caller.
	if !c.Valid() {
		return true
	}
	if state == 'D' && !c.added.Load() {
		c.interrupted.Store(true)
	}
	return c.interrupted.Load()
}

// end closes the stat file. The handler has returned.
func (c *Call) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.opened {
		c.stat.close()
	}
	c.stat, c.opened = -1, true
}

// Wait says that the handler may wait: from now on another goroutine receives the calls of the
// listener. Repeated calls have no effect.
func (c *Call) Wait() {
	if !c.passed.Swap(true) {
		c.listener.busy.Add(1)
		go c.listener.serve()
	}
}

// Watch arranges one call of wake when Interrupted becomes true, within 5 ms, unless the
// call is over before. wake may be called while the call is being answered, and must not
// block.
func (c *Call) Watch(wake func()) {
	c.listener.busy.Add(1)
	watchers.add(&watch{call: c, wake: wake})
}

// Return answers the call with a value or, when errno is not 0, with an errno from 1 to
// 4095. ERESTARTSYS is for interrupted calls; for others the error is ErrNotInterrupted.
// ErrGone means that the caller was killed, ErrAnswered that the call has its answer.
func (c *Call) Return(value int64, errno syscall.Errno) error {
	switch {
	case errno == ERESTARTSYS:
		if err := c.mayRestart(); err != nil {
			return c.failed("answer", err)
		}
	case errno > maxErrno || errno > ERESTARTSYS && errno <= lastRestart:
		return c.failed("answer", fmt.Errorf("invalid errno %d", int(errno)))
	}
	if errno != 0 {
		value = 0
	}
	return c.answer(response{id: c.ID, val: value, err: -int32(errno)})
}

// lastRestart is the last errno internal to the kernel (ERESTARTSYS to
// ERESTART_RESTARTBLOCK, include/linux/errno.h).
const lastRestart = 516

// mayRestart checks that the kernel will handle ERESTARTSYS: only if something is pending
// for the caller.
func (c *Call) mayRestart() error {
	switch over := c.look(); {
	case c.interrupted.Load():
		return nil
	case over || !c.Valid(): // a caller that is ending may sleep again
		return ErrGone
	default:
		return ErrNotInterrupted
	}
}

// Continue makes the kernel execute the call as without a filter. Meanwhile the program
// can change the memory of the arguments.
func (c *Call) Continue() error {
	return c.answer(response{id: c.ID, flags: unix.SECCOMP_USER_NOTIF_FLAG_CONTINUE})
}

func (c *Call) answer(r response) error {
	if !c.life.CompareAndSwap(waiting, answering) {
		return c.failed("answer", ErrAnswered)
	}
	errno := send(c.listener.fd, r)
	switch {
	case errno == 0:
		c.life.Store(over)
		return nil
	case gone(errno):
		c.life.Store(over)
		return c.failed("answer", ErrGone)
	default:
		c.life.Store(waiting)
		return c.failed("answer", errno)
	}
}

// AddFD opens a descriptor of the file behind fd in the caller and returns its number
// there. The call still waits. After EMFILE the call can be answered with that errno.
//
// Do it last: from then on nothing interrupts the caller's sleep, and Interrupted does not
// notice interruptions.
func (c *Call) AddFD(fd int, cloexec bool) (int, error) {
	if c.life.Load() != waiting {
		return -1, c.failed("add a descriptor", ErrAnswered)
	}
	c.added.Store(true)
	a := addition{id: c.ID, srcfd: uint32(fd)}
	if cloexec {
		a.newfdFlags = unix.O_CLOEXEC
	}
	n, errno := addFD(c.listener.fd, a)
	switch {
	case errno == 0:
		return n, nil
	case gone(errno):
		return -1, c.failed("add a descriptor", ErrGone)
	default:
		return -1, c.failed("add a descriptor", errno)
	}
}

// ReturnFD opens a descriptor of the file behind fd in the caller and answers the call
// with its number. If that fails with EMFILE, the call still waits.
//
// It does not use SECCOMP_ADDFD_FLAG_SEND: when a signal or a stop reaches the
// supervisor's thread before the caller has run, the kernel closes the descriptor but
// keeps the answer, and the program uses its standard input instead
// (seccomp_notify_addfd).
func (c *Call) ReturnFD(fd int, cloexec bool) error {
	n, err := c.AddFD(fd, cloexec)
	if err != nil {
		return err
	}
	return c.Return(int64(n), 0)
}

func (c *Call) failed(what string, err error) error {
	return fmt.Errorf("seccomp: %s: system call %d of thread %d: %w", what, c.NR, c.TID, err)
}
