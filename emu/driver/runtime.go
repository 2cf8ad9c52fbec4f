package driver

import (
	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// runtimeEnable is kfd_ioctl_runtime_enable.
func (d *Driver) runtimeEnable(c *call, args *kfdabi.RuntimeEnableArgs) (int, errno) {
	p := c.p
	defer d.hold(c, &p.mutex)()
	if args.ModeMask&kfdabi.RuntimeEnableModeEnable != 0 {
		return 0, d.runtimeOn(c, p, args)
	}
	return 0, d.runtimeOff(c, p)
}

// runtimeOn is runtime_enable.
func (d *Driver) runtimeOn(c *call, p *process, args *kfdabi.RuntimeEnableArgs) errno {
	if !p.runtimeRetry {
		if p.Runtime != kfd.RuntimeDisabled {
			return EBUSY
		}
		for _, x := range p.pdds {
			if len(x.queues) > 0 {
				return EEXIST
			}
			if x.gpu.node.mes() {
				if err := d.refresh(c, x); err != 0 && d.prof.contexts {
					return err // 7.2 looks at it
				}
			}
		}
		p.Runtime, p.rdebug, p.ttmp = kfd.RuntimeEnabled, args.RDebug, args.ModeMask&kfdabi.RuntimeEnableModeTTMPSave != 0
		d.note()
	}
	if !p.Enabled {
		return 0
	}
	if !p.runtimeRetry {
		d.activate(c, p)
		d.raise(c, p, nil, kfd.ECProcessRuntime.Mask(), 0, c.task)
	}
	return d.awaitDebugger(c, p)
}

// runtimeOff is runtime_disable.
func (d *Driver) runtimeOff(c *call, p *process) errno {
	was := p.Runtime == kfd.RuntimeEnabled
	p.Runtime, p.rdebug = kfd.RuntimeDisabled, 0
	d.note()
	if p.Enabled {
		if was {
			d.deactivate(c, p, false, 0)
		}
		if !p.runtimeRetry {
			d.raise(c, p, nil, kfd.ECProcessRuntime.Mask(), 0, c.task)
		}
		if err := d.awaitDebugger(c, p); err != 0 {
			return err
		}
	}
	p.ttmp = false
	var last errno
	for _, x := range p.pdds {
		if x.gpu.node.perVMID(d.prof) {
			if err := d.refresh(c, x); err != 0 && d.prof.contexts {
				last = err // 7.2 looks at it
			}
		}
	}
	return last
}

// awaitDebugger waits, without the mutex, for the debugger's SEND_RUNTIME_EVENT, which may
// have been sent before (down_interruptible of runtime_enable_sema).
func (d *Driver) awaitDebugger(c *call, p *process) errno {
	d.unlock(&p.mutex)
	answered := d.waitInterruptible(c, func() bool { return p.Acks > 0 })
	if answered {
		p.Acks--
	}
	d.lock(c, &p.mutex)
	p.runtimeRetry = !answered
	if !answered {
		return EINTR
	}
	return 0
}
