package driver

import (
	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// Sizes of the parts of a checkpoint: struct kfd_criu_process_priv_data,
// kfd_criu_device_priv_data and kfd_criu_queue_priv_data, and a queue's MQD.
const (
	criuProcessBytes = 8
	criuDeviceBytes  = 8
	criuQueueBytes   = 112
	criuMQDBytes     = 2048
)

// criu is kfd_ioctl_criu.
func (d *Driver) criu(c *call, args *kfd.CRIUArgs) (int, errno) {
	c.op = CRIUOp(args.Op)
	switch args.Op {
	case kfd.CRIUOpProcessInfo:
		return 0, d.criuProcessInfo(c, args)
	case kfd.CRIUOpUnpause:
		return 0, d.criuUnpause(c)
	case kfdabi.CRIUOpCheckpoint, kfdabi.CRIUOpRestore, kfdabi.CRIUOpResume:
		return 0, ENOSYS
	default:
		return 0, EINVAL
	}
}

// criuProcessInfo is criu_process_info.
func (d *Driver) criuProcessInfo(c *call, args *kfd.CRIUArgs) errno {
	p := c.p
	d.lockTarget(c, p, "criu_process_info")
	defer d.unlock(&p.mutex)
	if len(p.pdds) == 0 {
		return ENODEV
	}
	pausedHere := false
	if !p.Paused || !d.prof.pauseOnce {
		if err := d.evictProcess(c, p, kfd.TriggerCRIUCheckpoint); err != 0 {
			if !d.prof.pauseOnce {
				d.restoreProcess(c, p) // its errors are ignored
				p.Paused = false
			}
			return err
		}
		p.Paused, pausedHere = true, true
	}
	d.note()
	args.PID = uint32(p.lead.PIDInside())
	queues, err := criuQueues(p)
	if err != 0 {
		if pausedHere {
			d.restoreProcess(c, p)
			p.Paused = false
		}
		return err
	}
	args.NumDevices, args.NumBOs, args.NumObjects = uint32(len(p.pdds)), 0, uint32(queues)
	args.PrivDataSize = uint64(criuProcessBytes + criuDeviceBytes*len(p.pdds) + (criuQueueBytes+criuMQDBytes)*queues)
	return 0
}

// criuQueues is kfd_process_get_queue_info.
func criuQueues(p *process) (int, errno) {
	for _, q := range p.queues {
		if q.Type > kfd.QueueTypeSDMAXGMI {
			return 0, EOPNOTSUPP
		}
	}
	return len(p.queues), 0
}

// criuUnpause is criu_unpause.
func (d *Driver) criuUnpause(c *call) errno {
	p := c.p
	d.lockTarget(c, p, "criu_unpause")
	defer d.unlock(&p.mutex)
	if !p.Paused {
		return EINVAL
	}
	err := d.restoreProcess(c, p)
	if err == 0 {
		p.Paused = false
		d.note()
	}
	return err
}

// evictProcess is kfd_process_evict_queues. EIO, of a GPU that hangs or is being reset,
// does not end the loop, but the error of the last GPU is returned.
func (d *Driver) evictProcess(c *call, p *process, trigger kfd.SMITrigger) (err errno) {
	for i, x := range p.pdds {
		d.smiQueues(x, kfd.SMIQueueEviction, trigger)
		if err = d.evict(c, x); err != 0 && err != EIO {
			for _, x := range p.pdds[:i] {
				d.smiQueues(x, kfd.SMIQueueRestore, 0)
				d.restore(c, x) // a failure is only logged
			}
			return err
		}
	}
	return err
}

// restoreProcess is kfd_process_restore_queues.
func (d *Driver) restoreProcess(c *call, p *process) (first errno) {
	for _, x := range p.pdds {
		d.smiQueues(x, kfd.SMIQueueRestore, 0)
		if err := d.restore(c, x); err != 0 && first == 0 {
			first = err
		}
	}
	return first
}

// evict is evict_process_queues_cpsch.
func (d *Driver) evict(c *call, x *pdd) (err errno) {
	g := x.gpu
	defer d.hold(c, &g.dqm)()
	if x.evicted++; x.evicted > 1 || !x.vm {
		return 0
	}
	for _, q := range x.queues {
		q.Evicted = true
		if !q.Active {
			continue
		}
		q.Active = false
		if d.perQueue(g) {
			if e := d.removeQueue(c, q); e != 0 {
				err = e
			}
		}
	}
	d.note()
	if d.perQueue(g) {
		return err
	}
	return d.executeQueues(c, g, x.p, DefaultGrace)
}

// restore is restore_process_queues_cpsch.
func (d *Driver) restore(c *call, x *pdd) errno {
	g := x.gpu
	defer d.hold(c, &g.dqm)()
	switch {
	case x.evicted == 0: // WARN_ON_ONCE
		return 0
	case x.evicted > 1:
		x.evicted--
		d.note()
		return 0
	case !x.vm:
		x.evicted = 0
		return 0
	}
	for _, q := range x.queues {
		q.Evicted = false
		if !q.wanted() {
			continue
		}
		q.Active = true
		if d.perQueue(g) {
			if err := d.addQueue(c, q); err != 0 {
				return err // without a change of the count
			}
		}
	}
	var err errno
	if !d.perQueue(g) {
		err = d.executeQueues(c, g, x.p, DefaultGrace)
	}
	x.evicted = 0
	d.note()
	return err
}

// Evict evicts a process's queues from all GPUs, as for a lack of memory. Restore undoes
// one Evict. The error is an errno.
func (d *Driver) Evict(mm MM, trigger kfd.SMITrigger) error {
	return d.withProcess(mm, func(c *call, p *process) errno { return d.evictProcess(c, p, trigger) })
}

// Restore undoes one Evict. The error is an errno.
func (d *Driver) Restore(mm MM) error {
	return d.withProcess(mm, d.restoreProcess)
}

// withProcess does the driver's own work for the process that has an address space: ESRCH
// if the driver knows none.
func (d *Driver) withProcess(mm MM, do func(*call, *process) errno) error {
	d.mu.Lock()
	defer d.leave()
	p := d.byMM(mm)
	if p == nil {
		return ESRCH
	}
	if err := do(&call{d: d}, p); err != 0 {
		return err
	}
	return nil
}
