package driver

import (
	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// raise sets exceptions, notifies the debugger if it enabled them, and reports whether it
// did (kfd_dbg_ev_raise). by is the thread that writes the '.', nil for a worker.
func (d *Driver) raise(c *call, p *process, g *gpu, mask kfd.ExceptionMask, source uint32, by Task) bool {
	if !p.Enabled {
		return false
	}
	defer d.hold(c, &p.events)()
	switch {
	case mask&kfdabi.ExceptionsOfDevice != 0:
		for _, x := range p.pdds {
			if x.gpu == g {
				x.exceptions |= mask & kfdabi.ExceptionsOfDevice
			}
		}
	case mask&kfdabi.ExceptionsOfProcess != 0:
		p.Exceptions |= mask & kfdabi.ExceptionsOfProcess
	default:
		if q := p.queue(source); q != nil && q.pdd.gpu == g {
			q.Exceptions |= mask
		}
	}
	d.note()
	if p.Mask&mask == 0 {
		return false
	}
	d.writeDot(c, p, by)
	return true
}

// writeDot is kernel_write of a '.'. At a full pipe in blocking mode the thread waits,
// with its locks, until a signal. A worker would wait without locks; here it skips the
// write, because the pipe already notifies the reader.
func (d *Driver) writeDot(c *call, p *process, by Task) {
	f := p.eventFile
	if f == nil {
		return
	}
	if by == nil {
		f.WriteDot(nil)
		return
	}
	d.waitInterruptible(c, func() bool { return !f.WriteDot(by) })
}

// setExceptionsEnabled is kfd_dbg_set_enabled_debug_exception_mask.
func (d *Driver) setExceptionsEnabled(c *call, args *kfdabi.TrapSetExceptionsEnabledArgs) (int, errno) {
	p := c.target
	defer d.hold(c, &p.events)()
	pending := p.Exceptions
	for _, q := range p.queues {
		pending |= q.Exceptions
	}
	for _, x := range p.pdds {
		pending |= x.exceptions
	}
	if args.ExceptionMask&pending != 0 {
		d.writeDot(c, p, c.task)
	}
	p.Mask = args.ExceptionMask
	return 0, 0
}

// sendRuntimeEvent is kfd_dbg_send_exception_to_runtime.
func (d *Driver) sendRuntimeEvent(c *call, args *kfd.TrapSendRuntimeEventArgs) (int, errno) {
	p, mask := c.target, args.ExceptionMask
	if violation := kfdabi.ECDeviceMemoryViolation.Mask(); mask&violation != 0 {
		x := p.pdd(args.GPUID)
		if x == nil {
			return 0, ENODEV
		}
		d.evict(c, x) // kfd_dqm_evict_pasid; it is never restored
		p.signalFault(orImprecise(x.fault, x.gpu))
		mask &^= violation
	}
	if runtime := kfd.ECProcessRuntime.Mask(); mask&runtime != 0 {
		p.Acks++
		mask &^= runtime
	}
	if q := p.queue(args.QueueID); q != nil {
		q.Sent |= mask // a worker does this, whose errors are ignored
	}
	d.note()
	return 0, 0
}

// queryDebugEvent is kfd_dbg_ev_query_debug_event.
func (d *Driver) queryDebugEvent(c *call, args *kfd.TrapQueryDebugEventArgs) (int, errno) {
	p, clearMask := c.target, args.ExceptionMask
	defer d.hold(c, &p.events)()
	args.ExceptionMask, args.GPUID, args.QueueID = 0, 0, 0
	found := func(pending *kfd.ExceptionMask) bool {
		if *pending&p.Mask == 0 {
			return false
		}
		args.ExceptionMask = *pending
		*pending &^= clearMask
		d.note()
		return true
	}
	for _, q := range p.queues {
		if found(&q.Exceptions) {
			args.GPUID, args.QueueID = uint32(q.pdd.gpu.ID), q.ID
			return 0, 0
		}
	}
	for _, x := range p.pdds {
		if found(&x.exceptions) {
			args.GPUID = uint32(x.gpu.ID)
			return 0, 0
		}
	}
	if found(&p.Exceptions) {
		return 0, 0
	}
	return 0, EAGAIN
}

// queryExceptionInfo is kfd_dbg_trap_query_exception_info.
func (d *Driver) queryExceptionInfo(c *call, args *kfd.TrapQueryExceptionInfoArgs) (int, errno) {
	p, info := c.target, c.memory(&args.InfoPtr)
	if info == nil {
		return 0, EINVAL
	}
	defer d.hold(c, &p.events)()
	var pending *kfd.ExceptionMask
	var known []byte
	switch mask := args.ExceptionCode.Mask(); {
	case mask&kfdabi.ExceptionsOfQueue != 0:
		q := p.queue(args.SourceID)
		if q == nil {
			return 0, EINVAL
		}
		pending = &q.Exceptions
	case mask&kfdabi.ExceptionsOfDevice != 0:
		x := p.pdd(args.SourceID)
		if x == nil {
			return 0, EINVAL
		}
		// The driver has data of a memory violation, but never sets its size.
		pending = &x.exceptions
	case mask&kfdabi.ExceptionsOfProcess != 0:
		pending = &p.Exceptions
		if args.ExceptionCode == kfd.ECProcessRuntime {
			known = p.runtimeInfo()
		}
	default:
		return 0, EINVAL
	}
	if !pending.Has(args.ExceptionCode) {
		return 0, ENODATA
	}
	if !copyTo(info, known[:min(int(args.InfoSize), len(known))]) {
		return 0, EFAULT
	}
	args.InfoSize = uint32(len(known))
	if args.ClearException != 0 {
		*pending &^= args.ExceptionCode.Mask()
		d.note()
	}
	return 0, 0
}

// runtimeInfo returns struct kfd_runtime_info of the process.
func (p *process) runtimeInfo() []byte {
	return bytesOf(kfd.RuntimeInfo{RDebug: p.rdebug, State: p.Runtime, TTMPSetup: flag(p.ttmp)})
}

// Raise raises exceptions as an interrupt does (kfd_set_dbg_ev_from_interrupt): of a
// queue, or with kfdabi.NoQueue of a GPU. It reports whether the debugger was notified, or
// the runtime because no debugger enabled them.
func (d *Driver) Raise(mm MM, id gpreempt.GPUID, queue uint32, mask kfd.ExceptionMask) bool {
	d.mu.Lock()
	defer d.leave()
	p, g := d.byMM(mm), d.gpu(id)
	if p == nil || g == nil {
		return false
	}
	c := &call{d: d}
	return d.interrupt(c, p, g, queue, mask, nil)
}

// Fault is the interrupt for an invalid memory access of a process on a GPU
// (event_interrupt_wq_v9). If no debugger enabled the exception, it signals the memory
// events of the process and removes its queues from the GPU permanently.
func (d *Driver) Fault(mm MM, id gpreempt.GPUID, fault MemoryFault) {
	d.mu.Lock()
	defer d.leave()
	p, g := d.byMM(mm), d.gpu(id)
	if p == nil || g == nil {
		return
	}
	d.emit(g, kfdabi.SMIVMFault, d.smiAbout(p), "%x:%s\n", uint32(p.PID), p.lead.Comm())
	d.interrupt(&call{d: d}, p, g, kfdabi.NoQueue, kfdabi.ECDeviceMemoryViolation.Mask(), new(fault.data(g)))
}

// interrupt is kfd_set_dbg_ev_from_interrupt.
func (d *Driver) interrupt(c *call, p *process, g *gpu, queue uint32, mask kfd.ExceptionMask, fault *kfdabi.MemoryEventData) bool {
	if x := p.pdd(uint32(g.ID)); p.Enabled && x.fault == nil && mask.Has(kfdabi.ECDeviceMemoryViolation) {
		x.fault = fault
	}
	if d.raise(c, p, g, mask, queue, nil) {
		return true
	}
	switch {
	case mask&kfdabi.ExceptionsOfQueue != 0 && p.Runtime == kfd.RuntimeEnabled:
		defer d.hold(c, &p.mutex)()
		q := p.queue(queue)
		if q == nil || q.pdd.gpu != g {
			return false
		}
		q.Sent |= mask
		return true
	case mask.Has(kfdabi.ECDeviceMemoryViolation):
		d.evict(c, p.pdd(uint32(g.ID)))
		p.signalFault(orImprecise(fault, g))
		return true
	}
	return false
}
