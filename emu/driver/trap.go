package driver

import "github.com/gpreempt/gpreempt/pkg/kfd"

// dbgTrap is kfd_ioctl_set_debug_trap.
func (d *Driver) dbgTrap(c *call) (int, errno) {
	p, pid, op := c.p, int32(c.u32(0)), kfd.TrapOp(c.u32(4))
	c.op = TrapOp(op)
	if p.secondary {
		return 0, EOPNOTSUPP
	}
	if d.cfg.NoHWS {
		return 0, EINVAL
	}
	t := c.task.Find(pid)
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
	// The reference of the call: the target may die meanwhile. Its address space lasts
	// as long as the call (get_task_mm), which then does what is to be done at its end.
	target.refs++
	target.users++
	d.lock(c, &target.mutex)
	defer func() {
		d.unlock(&target.mutex)
		if target.users--; target.users == 0 && target.unmapped {
			d.mmReleased(c, target)
		}
		d.unref(target)
	}()

	if op != kfd.TrapEnable && !target.enabled {
		return 0, EINVAL
	}
	if target.runtime != kfd.RuntimeEnabled && needsRuntime(op) {
		return 0, EPERM
	}
	return d.trapOp(c, target, op)
}

// allowed is whether the caller may debug target: before 6.12.103 who traces it,
// and DISABLE anybody; since then who traces it or enabled last.
func (d *Driver) allowed(c *call, target *process, op kfd.TrapOp) bool {
	if target == c.p || target.lead.Tracer() == c.task {
		return true
	}
	if d.prof.processRule {
		return target.debugger == c.p
	}
	return op == kfd.TrapDisable
}

// needsRuntime reports whether op is for processes whose runtime is enabled.
func needsRuntime(op kfd.TrapOp) bool {
	switch op {
	case kfd.TrapSetWaveLaunchOverride, kfd.TrapSetWaveLaunchMode, kfd.TrapSuspendQueues, kfd.TrapResumeQueues,
		kfd.TrapSetNodeAddressWatch, kfd.TrapClearNodeAddressWatch, kfd.TrapSetFlags:
		return true
	default:
		return false
	}
}

// trapOp does op. The target's mutex is held.
func (d *Driver) trapOp(c *call, target *process, op kfd.TrapOp) (int, errno) {
	switch op {
	case kfd.TrapEnable:
		if target != c.p {
			target.debugger = c.p
		}
		err := d.enable(c, target)
		if err == 0 {
			target.mask = c.exceptions()
		}
		return 0, err
	case kfd.TrapDisable:
		d.disable(c, target)
		return 0, 0
	case kfd.TrapSendRuntimeEvent:
		return 0, d.sendRuntimeEvent(c, target)
	case kfd.TrapSetExceptionsEnabled:
		d.setExceptions(c, target, c.exceptions())
		return 0, 0
	case kfd.TrapSetWaveLaunchOverride:
		return 0, d.setLaunchOverride(c, target)
	case kfd.TrapSetWaveLaunchMode:
		return 0, d.setLaunchMode(c, target, c.u32(8)&0xff)
	case kfd.TrapSuspendQueues:
		return d.suspendQueues(c, target, c.pointer(16), c.u32(24), c.u32(28), c.exceptions())
	case kfd.TrapResumeQueues:
		return d.resumeQueues(c, target, c.pointer(8), c.u32(16))
	case kfd.TrapSetNodeAddressWatch:
		return 0, d.setWatch(c, target)
	case kfd.TrapClearNodeAddressWatch:
		x := target.pdd(c.u32(8))
		if x == nil {
			return 0, ENODEV
		}
		return 0, d.clearWatch(c, x, c.u32(12))
	case kfd.TrapSetFlags:
		return 0, d.setFlags(c, target)
	case kfd.TrapQueryDebugEvent:
		return 0, d.queryDebugEvent(c, target)
	case kfd.TrapQueryExceptionInfo:
		return 0, d.queryExceptionInfo(c, target)
	case kfd.TrapGetQueueSnapshot:
		return 0, d.queueSnapshot(c, target)
	case kfd.TrapGetDeviceSnapshot:
		return 0, d.deviceSnapshot(c, target)
	default:
		return 0, EINVAL
	}
}

// enable is kfd_dbg_trap_enable.
func (d *Driver) enable(c *call, target *process) errno {
	if target.enabled {
		return EALREADY
	}
	for _, x := range target.pdds {
		if x.gpu.node.GFX < 90000 {
			return ENODEV
		}
		if x.gws && x.gpu.node.noGWSDebug() {
			return EBUSY
		}
	}
	f := c.task.File(c.u32(28))
	if f == nil {
		return EBADF
	}
	target.eventFile = f
	if target.runtime == kfd.RuntimeEnabled {
		d.activate(c, target) // the driver does not look at how that went either
	}
	target.refs++
	target.enabled = true
	if target.debugger != nil {
		target.debugger.debugged++
	}
	info := runtimeInfo(target)
	var err errno
	if !writeAt(c.pointer(16), 0, info[:min(int(c.u32(24)), len(info))]) {
		err = EFAULT
		d.deactivate(c, target, false, 0)
		if d.prof.enableUnwinds {
			d.endSession(target)
		}
	}
	c.put32(24, uint32(len(info)))
	d.note()
	return err
}

// endSession is what ENABLE and DISABLE undo alike. debugger keeps its value.
func (d *Driver) endSession(target *process) {
	d.puts = append(d.puts, target.eventFile)
	target.eventFile = nil
	if target.debugger != nil {
		target.debugger.debugged--
	}
	target.enabled = false
	d.unref(target)
}

// disable is kfd_dbg_trap_disable.
func (d *Driver) disable(c *call, target *process) {
	if !target.enabled {
		return
	}
	switch target.runtime {
	case kfd.RuntimeEnabled:
		d.deactivate(c, target, false, 0)
	case kfd.RuntimeDisabled:
	default:
		target.runtime = kfd.RuntimeEnabled
	}
	d.endSession(target)
	target.debugger = nil
	// kfd_dbg_clean_exception_status
	for _, x := range target.pdds {
		x.exceptions = 0
	}
	for _, q := range target.queues {
		q.exceptions = 0
	}
	target.exceptions = 0
	d.note()
}

// activate is kfd_dbg_trap_activate; what became of it is in target.runtime.
func (d *Driver) activate(c *call, target *process) {
	if !d.setWorkaround(c, target, true) {
		return
	}
	for i, x := range target.pdds {
		if !x.gpu.node.perVMID(d.prof) {
			if err := d.reserveVMID(c, x); err != 0 {
				target.runtime = failedState(err)
				d.deactivate(c, target, true, i)
				return
			}
		}
		if err := d.refresh(c, x); err != 0 {
			target.runtime = kfd.RuntimeFailed
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

// deactivate is kfd_dbg_trap_deactivate; with unwind of the first n GPUs only.
func (d *Driver) deactivate(c *call, target *process, unwind bool, n int) {
	if !unwind {
		n = len(target.pdds)
		d.resumeQueues(c, target, nil, 0)
		for _, x := range target.pdds {
			for id := range maxWatches {
				d.clearWatch(c, x, uint32(id)) // most are not set
			}
		}
		d.setLaunchMode(c, target, launchNormal)
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

// setWorkaround is kfd_dbg_set_workaround: on gfx 11.0.0 to 11.0.3 every queue gets
// a CU mask. False leaves target.runtime to tell why.
func (d *Driver) setWorkaround(c *call, target *process, on bool) bool {
	for _, q := range target.queues {
		if err := d.setQueueWorkaround(c, q, on); on && err != 0 {
			for _, q := range target.queues {
				d.setQueueWorkaround(c, q, false)
			}
			target.runtime = failedState(err)
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
