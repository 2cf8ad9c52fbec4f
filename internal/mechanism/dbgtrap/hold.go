package dbgtrap

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/log"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/proc"
	"github.com/gpreempt/gpreempt/internal/tracer"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// subscribed are the exceptions the driver tells us of. Each one in it no longer
// reaches the target's runtime by itself: memory faults and the like stay out, or
// the target would hang where it should die. A destroyed queue needs no telling:
// each snapshot shows it.
var subscribed = kfd.Exceptions(kfd.ECQueueNew, kfd.ECProcessRuntime)

// born is what makes a new queue unfit to be suspended until it is cleared.
var born = kfd.ECQueueNew.Mask()

// maxInterrupts bounds how often an interrupted ENABLE is made again.
const maxInterrupts = 8

// hold is the debug session of a target as the driver knows it. Its methods may
// block, for seconds for each GPU, and belong to one goroutine, the session's;
// those said to be made on the tracing thread are run by on.
type hold struct {
	m      *Mechanism
	target gpreempt.ProcessKey
	log    *zap.Logger

	pin *proc.Process
	// pid is what the driver is told: the target's, or that of another of its
	// threads once its main thread has ended.
	pid int32
	// thread traces the target, nil when that is not needed.
	thread Thread
	// pipe is nil before debugging was enabled.
	pipe *eventPipe
	// state is the runtime's as last told; hadRuntime that it was enabled once.
	state      kfd.RuntimeState
	hadRuntime bool
	// owesAck tells that the target may be waiting for SEND_RUNTIME_EVENT.
	owesAck bool
	// revived tells that debugging was enabled again after somebody ended it.
	revived bool
	// held are the queues that are suspended.
	held idSet
	// stranded tells that a GPU failed to take queues back.
	stranded bool
	// news is set when queues were born or the runtime came or went.
	news bool
	// notify has the session call serve.
	notify func()
	// seen is the last snapshot: for Queues, which any goroutine may ask.
	seen atomic.Pointer[[]kfd.QueueSnapshotEntry]
}

func newHold(m *Mechanism, target gpreempt.ProcessKey, notify func()) *hold {
	return &hold{
		m: m, target: target, pid: target.PID, held: idSet{}, notify: notify,
		log: m.cfg.Log.With(log.Target(target)),
	}
}

// begin takes hold of the target. It ends early when attaching ends, as far as it
// can; ctx is for what must not. Whatever it returns, end undoes it.
func (h *hold) begin(ctx, attaching context.Context) error {
	var err error
	if h.pin, err = proc.Open(h.m.cfg.Root, h.target); err != nil {
		return err
	}
	h.pin.PinProgram()
	if err := h.trace(attaching); err != nil {
		return err
	}
	err = h.enable(ctx)
	switch {
	case errors.Is(err, unix.EALREADY):
		// The right to debug the target has moved here by now, if the other debugger
		// is one that does not trace it; it gets it back by the same way once we let go
		// of the trace, which is next.
		h.unstick(ctx)
		return fmt.Errorf("process %d: %w: end it (rocgdb, a GPU core dump, another gpreemptd), or let another mechanism hold the process: %w", h.target.PID, mechanism.ErrDebugged, err)
	case left(err):
		return h.gone()
	case err != nil:
		return err
	}
	h.news = false // who attaches looks anyway
	return h.stepBack(ctx)
}

// unstick resumes the queues of a target that another debugger holds without tracing
// it. That one may be dead: when somebody had taken its right before, the driver does
// not connect the two, and what it had suspended stays so (kfd_process_notifier_release_internal).
// A living one, such as a GPU core dump, finds queues running.
func (h *hold) unstick(ctx context.Context) {
	err := h.on(ctx, func() error {
		_, err := h.m.cfg.Device.ResumeAll(h.pid)
		return err
	})
	if err != nil {
		h.log.Info("a target that another debugger holds may be suspended, and could not be resumed", log.Err(err))
	}
}

// trace attaches to the target, whose thread then makes the calls.
func (h *hold) trace(ctx context.Context) error {
	thread, err := h.m.cfg.Attach(ctx, h.target.PID, h.target.Start)
	if errors.Is(err, tracer.ErrGone) {
		return mechanism.ErrGone
	}
	if err != nil {
		return err
	}
	h.thread = thread
	go func() {
		<-thread.Done()
		h.notify()
	}()
	return nil
}

// on runs f where the driver listens: on the tracing thread while there is one.
func (h *hold) on(ctx context.Context, f func() error) error {
	if h.thread == nil {
		return f()
	}
	return h.thread.Do(ctx, f)
}

// op runs f like on; when the driver no longer takes us for the debugger it repairs
// that and runs f once more. f begins anew then. The errors of final are among
// those it returns.
func (h *hold) op(ctx context.Context, f func() error) error {
	if !h.pipe.taken() {
		// Debugging has ended. By now the pid may be another process's, and that one be
		// held too: the driver would take us for its debugger.
		if err := h.regain(ctx); err != nil {
			return err
		}
	}
	err := h.on(ctx, f)
	if left(err) && h.followThread() {
		err = h.on(ctx, f)
	}
	if lostTouch(err) {
		h.log.Debug("the target does not answer to us", log.Err(err))
		if err := h.regain(ctx); err != nil {
			return err
		}
		err = h.on(ctx, f)
	}
	if left(err) {
		return h.gone()
	}
	return err
}

// gone returns why the driver does not know the process any more: mechanism.ErrGone, or
// mechanism.ErrReplaced when the process is alive.
func (h *hold) gone() error {
	tid, err := h.pin.LiveThread()
	if err != nil {
		return err
	}
	return fmt.Errorf("process %d: %w: attach to it again when it uses the GPU", tid, mechanism.ErrReplaced)
}

// followThread finds another thread of a target whose main thread has ended: the
// driver then no longer finds the target by its pid (get_task_mm), and would leave
// what is suspended so.
func (h *hold) followThread() bool {
	tid, err := h.pin.LiveThread()
	if err != nil || tid == h.pid {
		return false // who asked says why
	}
	h.pid = tid
	return true
}

// enable begins debugging, on the tracing thread; events come by a new pipe. An
// error means that debugging is not enabled, not by us at least.
func (h *hold) enable(ctx context.Context) error {
	var err error
	for range maxInterrupts {
		if err = h.enableOnce(ctx); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
	return err
}

func (h *hold) enableOnce(ctx context.Context) error {
	pipe, err := newEventPipe(h.notify)
	if err != nil {
		return err
	}
	var info kfd.RuntimeInfo
	err = h.on(ctx, func() (err error) {
		info, err = h.m.cfg.Device.Enable(h.pid, subscribed, pipe.write)
		return err
	})
	pipe.handOver()
	if err != nil {
		// An interrupted call may have enabled it, and so has 6.12 when it could not
		// write its answer. The pipe tells.
		if pipe.taken() {
			err = errors.Join(err, h.on(ctx, h.disable))
		}
		pipe.close()
		return err
	}
	if h.pipe != nil {
		h.pipe.close()
	}
	h.pipe = pipe
	h.runtimeIs(info.State)
	if err := h.usable(); err != nil {
		return errors.Join(err, h.on(ctx, h.disable))
	}
	return h.on(ctx, func() error {
		// Acknowledge before anything was announced. The driver counts, so the next
		// RUNTIME_ENABLE or RUNTIME_DISABLE of the target does not wait for us; each
		// answer to one (answerRuntime) then stands for the next. We need no target to
		// wait: activation is over before it does. And without one ahead, a target that
		// announces itself just before we disable or die waits for ever, since neither
		// releases it; one that such a death left waiting is released by this.
		if err := h.acknowledge(); err != nil {
			return err
		}
		snapshot, err := h.snapshot()
		if err == nil && h.state == kfd.RuntimeDisabled && len(snapshot) > 0 {
			return h.without(len(snapshot))
		}
		return err
	})
}

// runtimeIs takes note of the runtime's state. Whatever changed it, the driver has
// resumed all queues meanwhile.
func (h *hold) runtimeIs(state kfd.RuntimeState) {
	h.state = state
	h.hadRuntime = h.hadRuntime || state == kfd.RuntimeEnabled
	clear(h.held)
	h.stranded = false
}

// usable returns the error of a runtime whose activation failed.
func (h *hold) usable() error {
	if h.state == kfd.RuntimeBusy || h.state == kfd.RuntimeFailed {
		return &RuntimeError{Target: h.target, State: h.state}
	}
	return nil
}

// without returns the error of a target that has queues and no runtime.
func (h *hold) without(queues int) error {
	return &RuntimeError{Target: h.target, State: h.state, Queues: queues, Ended: h.hadRuntime}
}

// stepBack ends the trace where the kernel does not need it: a traced process is
// seen by other debuggers, and each of its signals takes a detour.
func (h *hold) stepBack(ctx context.Context) error {
	if h.m.permission(h.pid) != kfd.PermissionProcess {
		return nil
	}
	return h.letGo(ctx)
}

func (h *hold) letGo(ctx context.Context) error {
	thread := h.thread
	if thread == nil {
		return nil
	}
	h.thread = nil
	return thread.Detach(ctx)
}

// snapshot lists the queues and makes the new ones fit to be suspended. It is made
// on the tracing thread.
func (h *hold) snapshot() ([]kfd.QueueSnapshotEntry, error) {
	for {
		snapshot, err := h.m.cfg.Device.Snapshot(h.pid, born)
		if errors.Is(err, unix.EINTR) {
			clear(h.held) // which of them were new is lost; suspending them again does no harm
			continue
		}
		h.news = h.news || slices.ContainsFunc(snapshot, func(q kfd.QueueSnapshotEntry) bool {
			return q.ExceptionStatus.Has(kfd.ECQueueNew)
		})
		if err == nil {
			h.seen.Store(&snapshot)
		}
		return snapshot, err
	}
}

// disable ends debugging, on the tracing thread if there is one: everything runs.
// That it was not enabled, or that the target is gone, is no error.
func (h *hold) disable() error {
	for {
		err := h.m.cfg.Device.Disable(h.pid)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EINVAL), left(err):
			return nil
		}
		return err
	}
}

// end releases the target: every queue runs, nobody debugs or traces it. On an
// error the driver may still have us for the debugger, and end is to be called
// again.
func (h *hold) end(ctx context.Context) error {
	if err := h.undebug(ctx); err != nil {
		return err
	}
	if h.pipe != nil {
		h.pipe.close()
		h.pipe = nil
	}
	if err := h.letGo(ctx); err != nil {
		return err
	}
	if h.pin != nil {
		h.pin.Close()
		h.pin = nil
	}
	return nil
}

// undebug ends debugging, which also resumes what is suspended. The pipe tells
// whether there is anything to end: a DISABLE then cannot hit another debugger, or
// another process that got the pid.
func (h *hold) undebug(ctx context.Context) error {
	h.revived = true // from here on debugging is not to be enabled again
	if h.thread != nil && over(h.thread) {
		// DISABLE may do without: it asks nothing where the tracing thread is asked for,
		// and elsewhere it asks for the process.
		if err := h.letGo(ctx); err != nil {
			return err
		}
	}
	for attempt := 0; ; attempt++ {
		if h.pipe == nil || !h.pipe.taken() {
			return nil
		}
		err := h.on(ctx, h.disable)
		switch {
		case err == nil && h.pipe.taken() && h.followThread() && attempt == 0:
			continue // its main thread has ended, and it was not found by its pid
		case err == nil, left(err):
			return nil
		case attempt > 0 || !lostTouch(err):
			return fmt.Errorf("process %d could not be let go, and may be suspended: %w", h.target.PID, err)
		}
		// Another debugger has taken it from us, or the trace has ended.
		if regaining := h.regain(ctx); regaining != nil && h.pipe.taken() {
			return fmt.Errorf("process %d could not be let go, and may be suspended: %w", h.target.PID, regaining)
		}
	}
}

// running reports whether a queue that can be suspended is not, by the last snapshot.
func (h *hold) running() bool {
	snapshot := h.seen.Load()
	return h.state == kfd.RuntimeEnabled && snapshot != nil && slices.ContainsFunc(*snapshot, func(q kfd.QueueSnapshotEntry) bool {
		_, held := h.held[q.QueueID]
		return !held
	})
}
