package tracer

import (
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// detachPatience is how long a target may take to stop before the end of the thread
// releases it. A stop takes microseconds, unless the target sleeps in a driver.
const detachPatience = time.Second

// interruptAgain is how long an interrupt may go without effect before the next.
// One that comes while the target is in execve is lost now and then (seen on Linux
// 6.18: PTRACE_INTERRUPT succeeds, the new program runs and does not stop).
const interruptAgain = 10 * time.Millisecond

// seize makes the calling thread the tracer of the process.
func (t *Thread) seize() error {
	t.over = true
	if err := t.verify(); err != nil {
		return err
	}
	err := ptrace(unix.PTRACE_SEIZE, t.pid, 0)
	switch {
	case errors.Is(err, unix.ESRCH):
		return fmt.Errorf("process %d: %w", t.pid, ErrGone)
	case errors.Is(err, unix.EPERM):
		return t.denied()
	case err != nil:
		return fmt.Errorf("process %d: %w", t.pid, os.NewSyscallError("ptrace(PTRACE_SEIZE)", err))
	}
	t.over = false
	// Between the look and the seizure the pid may have gone to another process. It
	// cannot do so any more: what is traced keeps its pid until the tracer has waited
	// for it.
	return t.verify()
}

// verify gives ErrGone when the pid is not that of the process meant.
func (t *Thread) verify() error {
	stat, err := readStat(t.pid)
	switch {
	case isGone(err), err == nil && stat.Start != t.start, err == nil && !stat.Alive():
		return fmt.Errorf("process %d: %w", t.pid, ErrGone)
	case err != nil:
		return fmt.Errorf("process %d: reading its start time: %w", t.pid, err)
	}
	return nil
}

// handOn sends each stop of the target on its way, until none is left or the target
// is no longer traced.
func (t *Thread) handOn() {
	for {
		switch e := waitFor(t.pid); e.what {
		case nothing:
			return
		case exited, lost:
			t.finish(e)
			return
		case stopped:
			var err error
			if e.groupStop() {
				// It stays stopped, and wakes up by SIGCONT as it would alone.
				err = ptrace(unix.PTRACE_LISTEN, t.pid, 0)
			} else {
				err = ptrace(unix.PTRACE_CONT, t.pid, e.inject())
			}
			if err != nil {
				return // killed in the stop: its end wakes us again
			}
		}
	}
}

// finish ends the trace of a target that has exited, or was lost.
func (t *Thread) finish(e event) {
	t.over = true
	if e.what == lost {
		// Waited for by its parent, when that is us, or replaced by the thread that
		// called execve, which has the pid and the start time but not the tracer.
		t.gone.Store(errors.Is(t.verify(), ErrGone))
		return
	}
	t.gone.Store(true)
	// The exit status belongs to the parent, which sees it once the tracer has. Our
	// own child has no second one to see it.
	if stat, err := readStat(t.pid); err == nil && stat.Parent != int32(os.Getpid()) {
		bury(t.pid)
	}
}

// letGo detaches from the target, unless it is gone.
func (t *Thread) letGo() {
	if t.over {
		return
	}
	t.over = true
	patience := time.NewTimer(detachPatience)
	defer patience.Stop()
	again := time.NewTicker(interruptAgain)
	defer again.Stop()
	t.interrupt()
	for {
		switch e := waitFor(t.pid); e.what {
		case exited, lost:
			t.finish(e)
			return
		case stopped:
			if ptrace(unix.PTRACE_DETACH, t.pid, e.inject()) == nil {
				return
			}
		case nothing:
		}
		select {
		case <-t.wake:
		case <-again.C:
			t.interrupt()
		case <-patience.C:
			return // the thread ends now, and with it the trace
		}
	}
}

// interrupt asks the target to stop. An error says that it is dead or dying, and
// waiting for it tells so too.
func (t *Thread) interrupt() { _ = ptrace(unix.PTRACE_INTERRUPT, t.pid, 0) }
