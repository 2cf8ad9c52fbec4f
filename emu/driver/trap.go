package driver

import (
	"fmt"

	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// trapOps implement the operations of DBG_TRAP. The target's mutex is held.
var trapOps = map[kfd.TrapOp]handler{
	kfd.TrapEnable:                   ioctl((*Driver).enable),
	kfd.TrapDisable:                  (*Driver).disableTarget,
	kfd.TrapSendRuntimeEvent:         ioctl((*Driver).sendRuntimeEvent),
	kfdabi.TrapSetExceptionsEnabled:  ioctl((*Driver).setExceptionsEnabled),
	kfdabi.TrapSetWaveLaunchOverride: ioctl((*Driver).setLaunchOverride),
	kfdabi.TrapSetWaveLaunchMode:     ioctl((*Driver).setLaunchMode),
	kfd.TrapSuspendQueues:            ioctl((*Driver).suspendQueues),
	kfd.TrapResumeQueues:             ioctl((*Driver).resumeQueues),
	kfdabi.TrapSetNodeAddressWatch:   ioctl((*Driver).setWatch),
	kfdabi.TrapClearNodeAddressWatch: ioctl((*Driver).clearWatch),
	kfdabi.TrapSetFlags:              ioctl((*Driver).setFlags),
	kfd.TrapQueryDebugEvent:          ioctl((*Driver).queryDebugEvent),
	kfd.TrapQueryExceptionInfo:       ioctl((*Driver).queryExceptionInfo),
	kfd.TrapGetQueueSnapshot:         ioctl((*Driver).queueSnapshot),
	kfd.TrapGetDeviceSnapshot:        ioctl((*Driver).deviceSnapshot),
}

// dbgTrap is kfd_ioctl_set_debug_trap.
func (d *Driver) dbgTrap(c *call) (int, errno) {
	p, args := c.p, copyIn[kfd.TrapDisableArgs](c) // the fields before the union
	op := args.Op
	c.op = TrapOp(op)
	if p.Secondary {
		return 0, EOPNOTSUPP
	}
	if d.cfg.NoHWS {
		return 0, EINVAL
	}
	t := c.task.Find(int32(args.PID))
	if t == nil || t.MM() == nil {
		return 0, ESRCH
	}
	target := d.byMM(t.MM())
	if op == kfd.TrapEnable && t != c.task && t.Tracer() == c.task {
		var err errno
		if target, err = d.createProcess(t); err != 0 {
			return 0, err
		}
		target.refs-- // find_process and kfd_unref_process cancel out
	}
	if target == nil {
		return 0, ESRCH
	}
	if !d.allowed(c, target, op) {
		return 0, EPERM
	}
	// The call has a reference because the target may exit meanwhile. Its address space
	// then ends with the call (get_task_mm), which does the work for that.
	target.refs++
	target.users++
	d.lockTarget(c, target, "kfd_ioctl_set_debug_trap")
	defer func() {
		d.unlock(&target.mutex)
		if target.users--; target.users == 0 && target.unmapped {
			d.mmReleased(c, target)
		}
		d.unref(target)
	}()

	if op != kfd.TrapEnable && !target.Enabled {
		return 0, EINVAL
	}
	if target.Runtime != kfd.RuntimeEnabled && needsRuntime(op) {
		return 0, EPERM
	}
	do := trapOps[op]
	if do == nil {
		return 0, EINVAL
	}
	c.target = target
	return do(d, c)
}

// allowed reports whether the caller may debug target. Before 6.12.103 it must trace the
// target, except for DISABLE; since then it must trace it, or have enabled debugging last.
func (d *Driver) allowed(c *call, target *process, op kfd.TrapOp) bool {
	if target == c.p || target.lead.Tracer() == c.task {
		return true
	}
	if d.prof.processRule {
		return target.debugger == c.p
	}
	return op == kfd.TrapDisable
}

// needsRuntime reports whether op requires that the target's runtime is enabled.
func needsRuntime(op kfd.TrapOp) bool {
	switch op {
	case kfdabi.TrapSetWaveLaunchOverride, kfdabi.TrapSetWaveLaunchMode, kfd.TrapSuspendQueues, kfd.TrapResumeQueues,
		kfdabi.TrapSetNodeAddressWatch, kfdabi.TrapClearNodeAddressWatch, kfdabi.TrapSetFlags:
		return true
	default:
		return false
	}
}

// enable is kfd_dbg_trap_enable, with what kfd_ioctl_set_debug_trap does around it.
func (d *Driver) enable(c *call, args *kfd.TrapEnableArgs) (int, errno) {
	target := c.target
	if target != c.p {
		target.debugger = c.p
	}
	if target.Enabled {
		return 0, EALREADY
	}
	for _, x := range target.pdds {
		if x.gpu.node.GFX < 90000 {
			return 0, ENODEV
		}
		if x.gws && x.gpu.node.noGWSDebug() {
			return 0, EBUSY
		}
	}
	f := c.task.File(args.DbgFD)
	if f == nil {
		return 0, EBADF
	}
	target.eventFile = f
	if target.Runtime == kfd.RuntimeEnabled {
		d.activate(c, target) // the driver ignores the result, too
	}
	target.refs++
	target.Enabled = true
	d.count(target, 1)
	target.counted = target.debugger
	info := target.runtimeInfo()
	var err errno
	if copyTo(c.memory(&args.RinfoPtr), info[:min(int(args.RinfoSize), len(info))]) {
		target.Mask = args.ExceptionMask
	} else {
		err = EFAULT
		d.deactivate(c, target, false, 0)
		if d.prof.enableUnwinds {
			d.endSession(target)
		}
	}
	args.RinfoSize = uint32(len(info))
	d.note()
	return 0, err
}

// count changes the count of targets of the debugger of target. One that was counted and ends
// together with its target still has its memory: that is freed after a grace period
// (mmu_notifier_put).
func (d *Driver) count(target *process, change int) {
	by := target.debugger
	if by == nil {
		return
	}
	if by.freed && by != target.counted {
		d.oops(fmt.Sprintf("write to freed memory in kfd_dbg_trap_enable or kfd_dbg_trap_disable of process %d: its debugger %d, whose ENABLE was refused, has exited", target.PID, by.PID))
	}
	by.Debugged += change
}

// endSession is the common part of DISABLE and of undoing ENABLE. debugger keeps its value.
func (d *Driver) endSession(target *process) {
	d.puts = append(d.puts, target.eventFile)
	target.eventFile = nil
	d.count(target, -1)
	target.counted = nil
	target.Enabled = false
	d.unref(target)
}

func (d *Driver) disableTarget(c *call) (int, errno) {
	d.disable(c, c.target)
	return 0, 0
}

// disable is kfd_dbg_trap_disable.
func (d *Driver) disable(c *call, target *process) {
	if !target.Enabled {
		return
	}
	switch target.Runtime {
	case kfd.RuntimeEnabled:
		d.deactivate(c, target, false, 0)
	case kfd.RuntimeDisabled:
	default:
		target.Runtime = kfd.RuntimeEnabled
	}
	d.endSession(target)
	target.debugger = nil
	// kfd_dbg_clean_exception_status
	for _, x := range target.pdds {
		x.exceptions = 0
	}
	for _, q := range target.queues {
		q.Exceptions = 0
	}
	target.Exceptions = 0
	d.note()
}

// activate is kfd_dbg_trap_activate. target.Runtime has the result.
func (d *Driver) activate(c *call, target *process) {
	if !d.setWorkaround(c, target, true) {
		return
	}
	for i, x := range target.pdds {
		if !x.gpu.node.perVMID(d.prof) {
			if err := d.reserveVMID(c, x); err != 0 {
				target.Runtime = failedState(err)
				d.deactivate(c, target, true, i)
				return
			}
		}
		if err := d.refresh(c, x); err != 0 {
			target.Runtime = kfd.RuntimeFailed
			d.deactivate(c, target, true, i)
			return
		}
	}
}

func failedState(err errno) kfd.RuntimeState {
	if err == EBUSY {
		return kfd.RuntimeBusy
	}
	return kfd.RuntimeFailed
}

// deactivate is kfd_dbg_trap_deactivate, with unwind only for the first n GPUs.
func (d *Driver) deactivate(c *call, target *process, unwind bool, n int) {
	if !unwind {
		n = len(target.pdds)
		d.resumeOn(c, target, nil, true)
		for _, x := range target.pdds {
			for id := range uint32(maxWatches) {
				d.clearWatchOn(c, x, id) // most are not set
			}
		}
		d.refreshAll(c, target) // with the launch mode normal
		d.applyFlags(c, target, 0)
	}
	for _, x := range target.pdds[:n] {
		if !x.gpu.node.perVMID(d.prof) {
			d.releaseVMID(c, x)
		}
		d.refresh(c, x) // a failure is only logged
	}
	d.setWorkaround(c, target, false)
}

// setWorkaround is kfd_dbg_set_workaround: on gfx 11.0.0 to 11.0.3 every queue gets a CU
// mask. It reports whether that worked; otherwise target.Runtime has the reason.
func (d *Driver) setWorkaround(c *call, target *process, on bool) bool {
	for _, q := range target.queues {
		if err := d.setQueueWorkaround(c, q, on); on && err != 0 {
			for _, q := range target.queues {
				d.setQueueWorkaround(c, q, false)
			}
			target.Runtime = failedState(err)
			return false
		}
	}
	return true
}

func (d *Driver) setQueueWorkaround(c *call, q *queue, on bool) errno {
	if !q.pdd.gpu.node.cwsrWorkaround() {
		return 0
	}
	if on && q.userMask {
		return EBUSY
	}
	q.workaround = on
	err := d.reload(c, q)
	if err != 0 {
		q.workaround = false
	}
	return err
}
