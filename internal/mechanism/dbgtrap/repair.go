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

// regain makes this program the debugger again after the driver has stopped accepting it:
//
//   - another debugger's ENABLE failed, but took the right to debug: our ENABLE fails in
//     the same way and takes it again;
//   - another program ended debugging: it is enabled again, once;
//   - the thread that traced the target has lost it: another thread traces it.
//
// In the second case queues that were suspended run afterwards. An error is
// mechanism.ErrGone, mechanism.ErrReplaced, mechanism.ErrDebugged, *RuntimeError, *proc.DeniedError, or
// that of the call that failed.
func (d *debuggee) regain(ctx context.Context) error {
	if _, err := d.pin.LiveThread(); err != nil {
		return err // the pid may be that of another process
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
		// It no longer traces the target, and was not notified: the kernel sends no signal
		// when a thread that calls execve replaces the main thread.
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
	d.log.Info("the driver accepts this program as the debugger again")
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

// traceError returns the reason why the target cannot be traced.
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
	return fmt.Errorf("the driver no longer accepts this program as the debugger: %w", err)
}

// reclaim takes the right to debug the target again: ENABLE assigns it to its caller
// before it finds that debugging is enabled (kfd_dbg_trap_enable). The driver has counted this
// program already, so the refusal leaves nothing behind.
func (d *debuggee) reclaim(ctx context.Context) error {
	err := d.enable(ctx)
	if errors.Is(err, unix.EALREADY) {
		return nil
	}
	return err // nil: another program has ended debugging since, and it is enabled again
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
		return d.yield(ctx, err)
	}
	return err
}

// traceEnded reports whether a thread has lost its target.
func traceEnded(t Thread) bool {
	select {
	case <-t.Done():
		return true
	default:
		return false
	}
}
