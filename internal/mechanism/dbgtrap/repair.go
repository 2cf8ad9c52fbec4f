package dbgtrap

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/log"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/tracer"
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
// mechanism.ErrGone, mechanism.ErrReplaced, mechanism.ErrDebugged, *RuntimeError, *tracer.DeniedError, or
// what else stood in the way.
func (h *hold) regain(ctx context.Context) error {
	if _, err := h.pin.LiveThread(); err != nil {
		return err // not to meddle with another process of that pid
	}
	if h.pin.Replaced() {
		return h.gone()
	}
	anew := h.thread == nil || over(h.thread)
	if anew {
		if err := h.retrace(ctx); err != nil {
			return err
		}
	}
	// Permitted now, since this thread traces it.
	look := func() error {
		_, err := h.m.cfg.Device.Snapshot(h.pid, 0)
		return err
	}
	err := h.on(ctx, look)
	if errors.Is(err, unix.EPERM) && !anew {
		// It does not trace it any more, and has not heard of it: the kernel tells nobody
		// when an execve by another thread takes the place of the main one.
		if err := h.retrace(ctx); err != nil {
			return err
		}
		err = h.on(ctx, look)
	}
	switch ours := h.pipe.taken(); {
	case left(err):
		return h.gone()
	case errors.Is(err, tracer.ErrDetached):
		return fmt.Errorf("process %d: %w", h.target.PID, err)
	case err == nil && ours:
		err = h.reclaim(ctx)
	case err == nil:
		return fmt.Errorf("process %d: %w: it ended our debugging and began its own", h.target.PID, mechanism.ErrDebugged)
	case errors.Is(err, unix.EINVAL):
		err = h.revive(ctx)
	}
	if err != nil {
		return err
	}
	h.log.Info("the target answers to us again")
	return h.stepBack(ctx)
}

// retrace has a new thread trace the target.
func (h *hold) retrace(ctx context.Context) error {
	if err := h.letGo(ctx); err != nil {
		return err
	}
	if err := h.trace(ctx); err != nil {
		return h.whyUntraced(err)
	}
	return nil
}

// whyUntraced says what it means that the target cannot be traced.
func (h *hold) whyUntraced(err error) error {
	if _, gone := h.pin.LiveThread(); gone != nil {
		return gone
	}
	if errors.Is(err, mechanism.ErrGone) {
		return h.gone()
	}
	if denied, ok := errors.AsType[*tracer.DeniedError](err); ok && denied.Tracer != 0 {
		// Whoever traces it has the right to debug it, or can take it.
		return fmt.Errorf("process %d: %w: %w", h.target.PID, mechanism.ErrDebugged, err)
	}
	return fmt.Errorf("the driver no longer takes us for the debugger: %w", err)
}

// reclaim takes back the right to debug the target: ENABLE hands it to who calls
// before it finds that debugging is enabled (kfd_dbg_trap_enable).
func (h *hold) reclaim(ctx context.Context) error {
	err := h.enable(ctx)
	if errors.Is(err, unix.EALREADY) {
		return nil
	}
	return err // nil: somebody ended debugging just now, and it is enabled anew
}

// revive enables debugging again after somebody ended it, once: who does so twice
// means it.
func (h *hold) revive(ctx context.Context) error {
	if h.revived {
		return fmt.Errorf("process %d: %w: it ended our debugging", h.target.PID, mechanism.ErrDebugged)
	}
	h.revived = true
	h.log.Warn("somebody ended the debugging of the target, which is enabled again", log.WasSuspended(len(h.held) > 0))
	err := h.enable(ctx)
	if errors.Is(err, unix.EALREADY) {
		return fmt.Errorf("process %d: %w: %w", h.target.PID, mechanism.ErrDebugged, err)
	}
	return err
}

// over reports whether a thread has lost its target.
func over(t Thread) bool {
	select {
	case <-t.Done():
		return true
	default:
		return false
	}
}
