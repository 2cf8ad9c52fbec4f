package seccomp

import (
	"fmt"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
)

// maxErrno is the largest errno a program can see (MAX_ERRNO).
const maxErrno = 4095

// The life of a call. It is answered by whoever moves it from waiting to
// answering; it is over when it has its answer or its caller is gone.
const (
	waiting int32 = iota
	answering
	over
)

// Call is a system call that waits for its answer. Its methods may be called
// from any goroutine until the handler it was given to returns.
type Call struct {
	// ID is the kernel's number of the call, never the same for two calls of a
	// listener.
	ID uint64
	// TID is the calling thread in the supervisor's pid namespace, 0 when it
	// cannot be seen from there. It may be another thread's as soon as Valid says
	// false, so what is read under that number counts if Valid says true after it.
	TID int32
	// NR is the number of the system call on the machine's own architecture.
	NR int
	// Args are its arguments. The upper half of those of type int says nothing.
	Args [6]uint64

	listener *Listener
	life     atomic.Int32
	// interrupted: the caller was seen to sleep killably. It is never taken back.
	interrupted atomic.Bool
	// watched: the poller looks, Interrupted need not.
	watched atomic.Bool
	// added: AddFD has moved the caller to a killable sleep, which says nothing
	// from then on.
	added atomic.Bool
}

// Valid reports whether the caller still waits in this call, which it does until
// it is answered or killed. Everything read about the caller, from its memory or
// /proc, is worth something only if Valid says true afterwards, and every effect
// of the call needs a Valid before it.
func (c *Call) Valid() bool {
	return c.life.Load() != over && idValid(c.listener.fd, c.ID)
}

// Interrupted reports whether the wait of a driver in this call would have ended: a
// signal, a group stop, a ptrace stop or the freezer waits for the caller, the
// caller is dead, or the listener is being closed. It does not become false
// again. When it says true, ERESTARTSYS is the answer. For a watched call it
// says what was true at most 5 ms ago; the caller's death it tells at once.
//
// After AddFD it tells of death and closing only.
//
// How: a caller sleeps interruptibly until something is pending for it, then the
// kernel has it sleep again where only death ends it, because of
// WAIT_KILLABLE_RECV (seccomp_do_user_notification). That sleep is the state D of
// its stat file. The signal masks of its status file do not show everything that
// interrupts: a stop for a tracer is in none of them.
func (c *Call) Interrupted() bool {
	if c.interrupted.Load() || c.listener.closing.Load() {
		return true
	}
	if c.watched.Load() {
		return !c.Valid()
	}
	stat := openStat(c.TID)
	defer stat.close()
	return c.lookOnce(stat)
}

// lookOnce finds out whether the call was interrupted. Valid comes after the file
// is open, so it is this caller's.
func (c *Call) lookOnce(stat statFile) bool { return !c.Valid() || c.look(stat) }

// look finds out whether the call was interrupted, from the caller's stat file.
func (c *Call) look(stat statFile) bool {
	state := stat.state()
	if state == 'S' {
		return false // undisturbed, which is cheap to see
	}
	if !c.Valid() {
		return true
	}
	if state == 'D' && !c.added.Load() {
		c.interrupted.Store(true)
	}
	return c.interrupted.Load()
}

// Watch has wake called once when Interrupted turns true, within 5 ms of it,
// unless the call is over before; one that is being answered may still be woken.
// wake must not block. A call is watched once.
func (c *Call) Watch(wake func()) {
	if c.watched.Swap(true) {
		panic("seccomp: a call is watched twice")
	}
	c.listener.busy.Add(1)
	watchers.add(&watch{call: c, wake: wake})
}

// Return answers the call with a value or, when errno is not 0, with an errno
// from 1 to 4095. ERESTARTSYS is for calls that were interrupted and gives
// ErrNotInterrupted for others. ErrGone says that the caller was killed and
// needs no answer, ErrAnswered that it has one.
func (c *Call) Return(value int64, errno syscall.Errno) error {
	switch {
	case errno == ERESTARTSYS:
		if err := c.mayRestart(); err != nil {
			return c.failed("answer", err)
		}
	case errno > maxErrno || errno > ERESTARTSYS && errno <= lastRestart:
		return c.failed("answer", fmt.Errorf("%d is no errno of a program's", int(errno)))
	}
	if errno != 0 {
		value = 0
	}
	return c.answer(response{id: c.ID, val: value, err: -int32(errno)})
}

// lastRestart ends the errnos that only the kernel may see (ERESTARTSYS to
// ERESTART_RESTARTBLOCK, include/linux/errno.h).
const lastRestart = 516

// mayRestart reports whether ERESTARTSYS will be dealt with on the caller's way back:
// only if something is pending for it.
func (c *Call) mayRestart() error {
	if c.interrupted.Load() {
		return nil
	}
	stat := openStat(c.TID)
	defer stat.close()
	switch dead := c.lookOnce(stat); {
	case c.interrupted.Load():
		return nil
	case dead:
		return ErrGone
	default:
		return ErrNotInterrupted
	}
}

// Continue has the kernel execute the call as if there were no filter. The
// program can change what the arguments point to in between.
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

// AddFD returns the caller a descriptor of the file behind fd and leaves the call
// waiting. It tells the number in the caller. The caller closes it; if it has no
// room (EMFILE) the call can be answered with that errno.
//
// Do it last: nothing interrupts the caller's sleep from then on, and Interrupted
// cannot tell.
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

// ReturnFD returns the caller a descriptor of the file behind fd and answers the
// call with its number. If that fails with EMFILE, the call still waits.
//
// It is not done with SECCOMP_ADDFD_FLAG_SEND: when a signal or a stop reaches
// the supervisor's thread before the caller's has run, the kernel takes the
// descriptor back but not the answer, and the program opens its standard input
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
