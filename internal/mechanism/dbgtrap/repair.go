package dbgtrap

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/log"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/proc"
)

// regain makes the target answer to us again after the driver has stopped taking
// us for its debugger:
//
//   - another debugger's ENABLE, although it failed, took the right to debug: an
//     ENABLE of ours, which fails the same way, takes it back;
//   - somebody ended debugging: it is enabled again, once;
//   - the thread that traced the target lost it: another one does.
//
// Queues that were suspended run afterwards in the second case. An error is
// mechanism.ErrGone, mechanism.ErrReplaced, mechanism.ErrDebugged, *RuntimeError, *proc.DeniedError, or
// that of the call that failed.
func (d *debuggee) regain(ctx context.Context) error {
	if _, err := d.pin.LiveThread(); err != nil {
		return err // not to meddle with another process of that pid
	}
	if d.pin.Replaced() {
		return d.gone()
	}
	anew := d.thread == nil || traceEnded(d.thread)
	if anew {
		if err := d.retrace(ctx); err != nil {
			return err
		}
	}
	// Permitted now, since this thread traces it.
	look := func() error {
		_, err := d.m.cfg.Device.Snapshot(d.pid, 0)
		return err
	}
	err := d.on(ctx, look)
	if errors.Is(err, unix.EPERM) && !anew {
		// It does not trace it any more, and was not notified: the kernel sends no signal
		// when an execve by another thread takes the place of the main one.
		if err := d.retrace(ctx); err != nil {
			return err
		}
		err = d.on(ctx, look)
	}
	switch ours := d.pipe.taken(); {
	case isGone(err):
		return d.gone()
	case errors.Is(err, proc.ErrDetached):
		return fmt.Errorf("process %d: %w", d.target.PID, err)
	case err == nil && ours:
		err = d.reclaim(ctx)
	case err == nil:
		return fmt.Errorf("process %d: %w: it ended our debugging and began its own", d.target.PID, mechanism.ErrDebugged)
	case errors.Is(err, unix.EINVAL):
		err = d.enableAgain(ctx)
	}
	if err != nil {
		return err
	}
	d.log.Info("the driver takes this program for the debugger again")
	return d.dropTrace(ctx)
}

// retrace has a new thread trace the target.
func (d *debuggee) retrace(ctx context.Context) error {
	if err := d.detachTrace(ctx); err != nil {
		return err
	}
	if err := d.trace(ctx); err != nil {
		return d.traceError(err)
	}
	return nil
}

// traceError says what it means that the target cannot be traced.
func (d *debuggee) traceError(err error) error {
	if _, gone := d.pin.LiveThread(); gone != nil {
		return gone
	}
	if errors.Is(err, mechanism.ErrGone) {
		return d.gone()
	}
	if denied, ok := errors.AsType[*proc.DeniedError](err); ok && denied.Tracer != 0 {
		// The tracer has the right to debug it, or can take it.
		return fmt.Errorf("process %d: %w: %w", d.target.PID, mechanism.ErrDebugged, err)
	}
	return fmt.Errorf("the driver no longer takes us for the debugger: %w", err)
}

// reclaim takes back the right to debug the target: ENABLE gives it to its caller
// before it finds that debugging is enabled (kfd_dbg_trap_enable).
func (d *debuggee) reclaim(ctx context.Context) error {
	err := d.enable(ctx)
	if errors.Is(err, unix.EALREADY) {
		return nil
	}
	return err // nil: somebody ended debugging just now, and it is enabled anew
}

// enableAgain enables debugging again after another program ended it, once: one that does
// so twice intends it.
func (d *debuggee) enableAgain(ctx context.Context) error {
	if d.enabledAgain {
		return fmt.Errorf("process %d: %w: it ended our debugging", d.target.PID, mechanism.ErrDebugged)
	}
	d.enabledAgain = true
	d.log.Warn("another program ended the debugging of the target: enabled again", log.WasSuspended(len(d.suspended) > 0))
	err := d.enable(ctx)
	if errors.Is(err, unix.EALREADY) {
		return fmt.Errorf("process %d: %w: %w", d.target.PID, mechanism.ErrDebugged, err)
	}
	return err
}

// over reports whether a thread has lost its target.
func traceEnded(t Thread) bool {
	select {
	case <-t.Done():
		return true
	default:
		return false
	}
}
