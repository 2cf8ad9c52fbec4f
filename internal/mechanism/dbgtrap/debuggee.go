package dbgtrap

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gpreempt/gpreempt/internal/log"
	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/internal/proc"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// subscribed are the exceptions that the driver reports to us. Each of them no longer
// reaches the target's runtime by itself: memory faults and the like stay out, or
// the target would hang where it should die. A destroyed queue needs no
// event: each snapshot shows it.
var subscribed = kfd.Exceptions(kfd.ECQueueNew, kfd.ECProcessRuntime)

// born is what makes a new queue unfit to be suspended until it is cleared.
var born = kfd.ECQueueNew.Mask()

// maxInterrupts bounds how often an interrupted ENABLE is repeated.
const maxInterrupts = 8

// debuggee is a target as the driver's debug interface knows it. Its methods may block,
// for seconds for each GPU, and are called by one goroutine, that of the session. Those
// that must run on the tracing thread say so, and are called by on.
type debuggee struct {
	m      *Mechanism
	target gpreempt.ProcessKey
	log    *zap.Logger

	pin *proc.Process
	// pid is what calls of the driver name: the target's, or that of another of its
	// threads once its main thread has ended.
	pid int32
	// thread traces the target, nil when that is not needed.
	thread Thread
	// dropped is closed before the trace is ended on purpose.
	dropped chan struct{}
	// pipe is nil before debugging was enabled.
	pipe *eventPipe
	// state is the runtime's state as last reported; hadRuntime, that it was enabled once.
	state      kfd.RuntimeState
	hadRuntime bool
	// ackPending: the target may be waiting for SEND_RUNTIME_EVENT.
	ackPending bool
	// enabledAgain: debugging was enabled again after another program ended it.
	enabledAgain bool
	// suspended are the queues that are suspended.
	suspended idSet
	// gpus are those that the driver lists for the target, in its order; nil before they
	// mattered. vms are those with a VM of it.
	gpus []gpreempt.GPU
	vms  map[gpreempt.GPUID]bool
	// resumeIncomplete: a GPU failed to take queues back.
	resumeIncomplete bool
	// changed is set when queues were born or the runtime started or ended.
	changed bool
	// notify has the session call serve.
	notify func()
	// calling is the thread that makes a call now, 0 for none.
	calling atomic.Int32
	// seen is the last snapshot, for Mechanism.Queues, which any goroutine may call.
	seen atomic.Pointer[[]kfd.QueueSnapshotEntry]
}

func newDebuggee(m *Mechanism, target gpreempt.ProcessKey, notify func()) *debuggee {
	return &debuggee{
		m: m, target: target, pid: target.PID, suspended: idSet{}, notify: notify,
		log: m.cfg.Log.With(log.Target(target)),
	}
}

// begin begins to debug the target. attaching may end it early; ctx is for the calls that
// must be made to their end. Whatever begin returns, end undoes it.
func (d *debuggee) begin(ctx, attaching context.Context) error {
	var err error
	if d.pin, err = proc.Open(d.m.cfg.Root, d.target); err != nil {
		return err
	}
	d.pin.PinProgram()
	if err := d.trace(attaching); err != nil {
		return err
	}
	if err := d.checkVacant(ctx); err != nil {
		return err
	}
	err = d.enable(ctx)
	switch {
	case errors.Is(err, unix.EALREADY):
		return d.yield(ctx, err)
	case isGone(err):
		return d.gone()
	case err != nil:
		return err
	}
	d.changed = false // discovery reads the process after an Attach
	return d.dropTrace(ctx)
}

// checkVacant returns mechanism.ErrDebugged if somebody debugs the target: then ENABLE must
// not be called. An ENABLE that is refused makes its caller the target's debugger without
// counting it (kfd_ioctl_set_debug_trap). When the caller ends, the driver keeps a pointer to
// freed memory, and writes to it at the end of the target; and when the target ends first,
// one of the caller's own targets is not resumed at the caller's death.
//
// A snapshot changes nothing, and is refused with EINVAL while nobody debugs the target. From
// then to ENABLE this program traces it, so that only the target itself, or a process whose
// earlier ENABLE failed, can come first: yield is for that.
func (d *debuggee) checkVacant(ctx context.Context) error {
	err := d.on(ctx, func() error {
		_, err := d.m.cfg.Device.Snapshot(d.pid, 0)
		return err
	})
	switch {
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ESRCH): // ENABLE may create what is not there
		return nil
	case isGone(err):
		return d.gone()
	case err != nil:
		return err
	}
	if d.m.cfg.Deserted != nil && d.m.cfg.Deserted(d.target) {
		d.resumeForeign(ctx)
	}
	return d.debugged(nil)
}

// debugged is the error of a target that somebody else debugs.
func (d *debuggee) debugged(cause error) error {
	err := fmt.Errorf("process %d: %w: end it (rocgdb, a GPU core dump, another gpreemptd), or let another mechanism suspend the process", d.target.PID, mechanism.ErrDebugged)
	if cause != nil {
		err = fmt.Errorf("%w: %w", err, cause)
	}
	return err
}

// yield ends the debugging of a target whose ENABLE was refused. The driver takes this
// program for the debugger since, see checkVacant, and DISABLE makes it forget that.
func (d *debuggee) yield(ctx context.Context, refused error) error {
	return errors.Join(d.debugged(refused), d.on(ctx, d.disable))
}

// resumeForeign resumes the queues of a target that somebody else has debugged for long
// without tracing it. That debugger may be dead: when a third one had taken its right before,
// the driver does not connect the two, and the queues stay suspended
// (kfd_process_notifier_release_internal).
func (d *debuggee) resumeForeign(ctx context.Context) {
	err := d.on(ctx, func() error {
		_, err := d.m.cfg.Device.ResumeAll(d.pid)
		return err
	})
	if err != nil {
		d.log.Info("target of another debugger may be suspended and could not be resumed", log.Err(err))
	}
}

// trace attaches to the target, whose thread then makes the calls.
func (d *debuggee) trace(ctx context.Context) error {
	thread, err := d.m.cfg.Attach(ctx, d.target.PID, d.target.Start)
	if errors.Is(err, proc.ErrGone) {
		return mechanism.ErrGone
	}
	if err != nil {
		return err
	}
	dropped := make(chan struct{})
	d.thread, d.dropped = thread, dropped
	go func() {
		<-thread.Done()
		select {
		case <-dropped:
		default:
			d.notify()
		}
	}()
	return nil
}

// on runs f on the thread that the driver accepts: the tracing thread while there is one.
func (d *debuggee) on(ctx context.Context, f func() error) error {
	call := func() error {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		d.calling.Store(int32(unix.Gettid()))
		defer d.calling.Store(0)
		return f()
	}
	if d.thread == nil {
		return call()
	}
	return d.thread.Do(ctx, call)
}

// op runs f like on; when the driver no longer accepts this program as the debugger, op
// repairs that and runs f once more, from its beginning. The errors of final are among
// those it returns.
func (d *debuggee) op(ctx context.Context, f func() error) error {
	if !d.pipe.taken() {
		// Debugging has ended. By now the pid may be that of another process, which
		// this program may debug too: the driver would accept the call.
		if err := d.regain(ctx); err != nil {
			return err
		}
	}
	err := d.on(ctx, f)
	if isGone(err) && d.followThread() {
		err = d.on(ctx, f)
	}
	if notDebugger(err) {
		d.log.Debug("the target does not answer to us", log.Err(err))
		if err := d.regain(ctx); err != nil {
			return err
		}
		err = d.on(ctx, f)
	}
	if isGone(err) {
		return d.gone()
	}
	return err
}

// gone returns why the driver does not know the process any more: mechanism.ErrGone, or
// mechanism.ErrReplaced when the process is alive.
func (d *debuggee) gone() error {
	tid, err := d.pin.LiveThread()
	if err != nil {
		return err
	}
	return fmt.Errorf("process %d: %w: attach to it again when it uses the GPU", tid, mechanism.ErrReplaced)
}

// followThread finds another thread of a target whose main thread has ended: the
// driver then no longer finds the target by its pid (get_task_mm), and could not resume
// what is suspended.
func (d *debuggee) followThread() bool {
	tid, err := d.pin.LiveThread()
	if err != nil || tid == d.pid {
		return false // the error of the call stands
	}
	d.pid = tid
	return true
}

// enable begins debugging, on the tracing thread; events come by a new pipe. An
// error means that this program has not enabled debugging.
func (d *debuggee) enable(ctx context.Context) error {
	var err error
	for range maxInterrupts {
		if err = d.enableOnce(ctx); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
	return err
}

func (d *debuggee) enableOnce(ctx context.Context) error {
	pipe, err := newEventPipe(d.notify)
	if err != nil {
		return err
	}
	var info kfd.RuntimeInfo
	err = d.on(ctx, func() (err error) {
		info, err = d.m.cfg.Device.Enable(d.pid, subscribed, pipe.write)
		return err
	})
	pipe.handOver()
	if err != nil {
		// An interrupted call may have enabled it, and so has 6.12 when it could not
		// write its answer. The pipe shows that.
		if pipe.taken() {
			err = errors.Join(err, d.on(ctx, d.disable))
		}
		pipe.close()
		return err
	}
	if d.pipe != nil {
		d.pipe.close()
	}
	d.pipe = pipe
	d.setRuntime(info.State)
	if err := d.usable(); err != nil {
		return errors.Join(err, d.on(ctx, d.disable))
	}
	return d.on(ctx, func() error {
		// Acknowledge before anything was announced. The driver counts, so the next
		// RUNTIME_ENABLE or RUNTIME_DISABLE of the target does not wait for us; each
		// answer to one (answerRuntime) then stands for the next. We need no target to
		// wait: activation is over before it does. And without one ahead, a target that
		// announces itself just before we disable or die waits without end, since neither
		// releases it; a target that waits since such a death is released by this.
		if err := d.acknowledge(); err != nil {
			return err
		}
		snapshot, err := d.snapshot()
		switch {
		case err != nil:
			return err
		case d.state == kfd.RuntimeDisabled && len(snapshot) > 0:
			return d.without(len(snapshot))
		}
		return d.checkVMs(snapshot)
	})
}

// setRuntime records the runtime's state. Whatever changed it, the driver has
// resumed all queues meanwhile.
func (d *debuggee) setRuntime(state kfd.RuntimeState) {
	d.state = state
	d.hadRuntime = d.hadRuntime || state == kfd.RuntimeEnabled
	clear(d.suspended)
	d.resumeIncomplete = false
}

// usable returns the error of a runtime whose activation failed.
func (d *debuggee) usable() error {
	if d.state == kfd.RuntimeBusy || d.state == kfd.RuntimeFailed {
		return &RuntimeError{Target: d.target, State: d.state}
	}
	return nil
}

// without returns the error of a target that has queues and no runtime.
func (d *debuggee) without(queues int) error {
	return &RuntimeError{Target: d.target, State: d.state, Queues: queues, Ended: d.hadRuntime}
}

// dropTrace ends the trace where the kernel does not need it: a traced process is
// seen by other debuggers, and each of its signals takes a detour.
func (d *debuggee) dropTrace(ctx context.Context) error {
	if d.m.permission(d.pid) != kfd.PermissionProcess {
		return nil
	}
	return d.detachTrace(ctx)
}

func (d *debuggee) detachTrace(ctx context.Context) error {
	thread := d.thread
	if thread == nil {
		return nil
	}
	d.thread = nil
	close(d.dropped)
	return thread.Detach(ctx)
}

// snapshot lists the queues and makes the new ones fit to be suspended. It is made
// on the tracing thread.
func (d *debuggee) snapshot() ([]kfd.QueueSnapshotEntry, error) {
	for {
		snapshot, err := d.m.cfg.Device.Snapshot(d.pid, born)
		if errors.Is(err, unix.EINTR) {
			clear(d.suspended) // which of them were new is lost; suspending them again is harmless
			continue
		}
		d.changed = d.changed || slices.ContainsFunc(snapshot, func(q kfd.QueueSnapshotEntry) bool {
			return q.ExceptionStatus.Has(kfd.ECQueueNew)
		})
		if err == nil {
			d.seen.Store(&snapshot)
		}
		return snapshot, err
	}
}

// disable ends debugging, on the tracing thread if there is one: everything runs.
// It returns nil if debugging was not enabled or the target is gone.
func (d *debuggee) disable() error {
	for {
		err := d.m.cfg.Device.Disable(d.pid)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EINVAL), isGone(err):
			return nil
		}
		return err
	}
}

// end releases the target: every queue runs, and this program neither debugs nor traces
// it. After an error this program may still be the debugger, and end must be called again.
func (d *debuggee) end(ctx context.Context) error {
	if err := d.endDebugging(ctx); err != nil {
		return err
	}
	if d.pipe != nil {
		d.pipe.close()
		d.pipe = nil
	}
	if err := d.detachTrace(ctx); err != nil {
		return err
	}
	if d.pin != nil {
		d.pin.Close()
		d.pin = nil
	}
	return nil
}

// endDebugging ends debugging, which also resumes what is suspended. The pipe shows
// whether there is anything to end: a DISABLE then cannot hit another debugger, or
// another process that got the pid.
func (d *debuggee) endDebugging(ctx context.Context) error {
	d.enabledAgain = true // from here on debugging is not to be enabled again
	if d.thread != nil && traceEnded(d.thread) {
		// DISABLE works without the thread: where the driver asks for the tracing thread,
		// it does not ask DISABLE for it, and elsewhere it asks for the process.
		if err := d.detachTrace(ctx); err != nil {
			return err
		}
	}
	for attempt := 0; ; attempt++ {
		if d.pipe == nil || !d.pipe.taken() {
			return nil
		}
		err := d.on(ctx, d.disable)
		switch {
		case err == nil && d.pipe.taken() && d.followThread() && attempt == 0:
			continue // its main thread has ended, and it was not found by its pid
		case err == nil, isGone(err):
			return nil
		case attempt > 0 || !notDebugger(err):
			return fmt.Errorf("process %d could not be released and may be suspended: %w", d.target.PID, err)
		}
		// Another debugger has taken it from us, or the trace has ended.
		if regaining := d.regain(ctx); regaining != nil && d.pipe.taken() {
			return fmt.Errorf("process %d could not be released and may be suspended: %w", d.target.PID, regaining)
		}
	}
}

// running reports whether a queue that can be suspended is not, by the last snapshot.
func (d *debuggee) running() bool {
	snapshot := d.seen.Load()
	return d.state == kfd.RuntimeEnabled && snapshot != nil && slices.ContainsFunc(*snapshot, func(q kfd.QueueSnapshotEntry) bool {
		_, held := d.suspended[q.QueueID]
		return !held
	})
}
