package driver

import (
	"fmt"

	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// queueIDs is get_queue_ids: it returns the array with every ID marked invalid.
func (d *Driver) queueIDs(array Memory, n uint32) ([]uint32, errno) {
	if d.prof.arrayChecks {
		if array == nil {
			if n != 0 {
				return nil, EINVAL
			}
			return nil, 0
		}
		if n > kfd.MaxQueues {
			return nil, EINVAL
		}
	}
	if n > 1<<16 {
		return nil, ENOMEM // without the checks the kernel's allocation fails
	}
	ids, ok := copyFrom[uint32](array, int(n))
	if !ok {
		return nil, EFAULT
	}
	for i := range ids {
		ids[i] |= kfd.QueueInvalidMask
	}
	return ids, 0
}

// index is q_array_get_index, -1 if the queue is not in the array.
func index(ids []uint32, q *queue) int {
	for i, id := range ids {
		if id&^kfd.QueueInvalidMask == q.ID {
			return i
		}
	}
	return -1
}

// suspendQueues is suspend_queues.
func (d *Driver) suspendQueues(c *call, args *kfd.TrapSuspendQueuesArgs) (int, errno) {
	p, array := c.target, c.memory(&args.QueueArrayPtr)
	ids, err := d.queueIDs(array, args.NumQueues)
	if err != 0 {
		return 0, err
	}
	total := 0
	for _, x := range p.pdds {
		g := x.gpu
		d.lock(c, &p.events)
		d.lock(c, &g.dqm)
		together := 0
		if g.node.mes() {
			total += d.suspendEach(c, x, ids, args.ExceptionMask)
		} else {
			together = d.suspendTogether(c, x, ids, args.GracePeriod, args.ExceptionMask)
			total += together
		}
		d.unlock(&g.dqm)
		d.unlock(&p.events)
		if d.prof.suspendFlushes && together == 0 && total > 0 && !x.vm {
			d.oops(fmt.Sprintf("NULL pointer in kfd_flush_tlb, from suspend_queues of process %d on GPU %v, of which it has no VM", p.PID, g.ID))
		}
	}
	copyTo(array, bytesOf(ids)) // a failure is only logged
	return total, 0
}

// oops ends the program, unless the configuration says otherwise. A panic of this goroutine
// could be recovered, with the driver's lock held.
func (d *Driver) oops(what string) {
	if d.cfg.Oops != nil {
		d.cfg.Oops(what)
		return
	}
	go panic("kernel oops (emulated): " + what)
	select {}
}

// suspendEach is the part of suspend_queues for MES.
func (d *Driver) suspendEach(c *call, x *pdd, ids []uint32, clearMask kfd.ExceptionMask) (suspended int) {
	for _, q := range x.queues {
		i := index(ids, q)
		if i < 0 {
			continue
		}
		switch err := d.suspendQueue(c, q); err {
		case 0:
			ids[i] &^= kfd.QueueInvalidMask
			q.Exceptions &^= clearMask
			suspended++
		case EBUSY:
		default:
			ids[i] |= kfd.QueueErrorMask
			return suspended
		}
	}
	return suspended
}

// suspendTogether is the part of suspend_queues for HWS: one new runlist for the GPU,
// which all processes share.
func (d *Driver) suspendTogether(c *call, x *pdd, ids []uint32, grace uint32, clearMask kfd.ExceptionMask) int {
	suspended := 0
	for _, q := range x.queues {
		if i := index(ids, q); i >= 0 && d.suspendQueue(c, q) == 0 {
			ids[i] &^= kfd.QueueInvalidMask
			suspended++
		}
	}
	if suspended == 0 {
		return 0
	}
	err := d.executeQueues(c, x.gpu, x.p, grace)
	for _, q := range x.queues {
		switch i := index(ids, q); {
		case i < 0:
		case err != 0:
			ids[i] |= kfd.QueueErrorMask
		default:
			q.Exceptions &^= clearMask
		}
	}
	if err != 0 {
		return 0
	}
	return suspended
}

// suspendQueue is suspend_single_queue. EBUSY means that the queue was skipped.
func (d *Driver) suspendQueue(c *call, q *queue) errno {
	if q.Suspended {
		return 0
	}
	if q.Exceptions.Has(kfd.ECQueueNew) || q.Destroying {
		return EBUSY
	}
	q.Suspended = true
	d.note()
	if q.Active {
		if q.pdd.gpu.node.mes() {
			if err := d.removeQueue(c, q); err != 0 {
				return err
			}
		}
		q.Active = false
	}
	return 0
}

// resumeQueues is resume_queues.
func (d *Driver) resumeQueues(c *call, args *kfd.TrapResumeQueuesArgs) (int, errno) {
	array := c.memory(&args.QueueArrayPtr)
	if array == nil {
		return d.resumeOn(c, c.target, nil, true), 0
	}
	ids, err := d.queueIDs(array, args.NumQueues)
	if err != 0 {
		return 0, err
	}
	total := d.resumeOn(c, c.target, ids, false)
	copyTo(array, bytesOf(ids)) // a failure is only logged
	return total, 0
}

// resumeOn resumes the queues ids, or all, on each GPU of p and returns how many.
func (d *Driver) resumeOn(c *call, p *process, ids []uint32, all bool) (resumed int) {
	for _, x := range p.pdds {
		d.lock(c, &x.gpu.dqm)
		resumed += d.resumeOnGPU(c, x, ids, all)
		d.unlock(&x.gpu.dqm)
	}
	return resumed
}

// resumeOnGPU is the part of resume_queues for one GPU.
func (d *Driver) resumeOnGPU(c *call, x *pdd, ids []uint32, all bool) int {
	g, resumed := x.gpu, 0
	for _, q := range x.queues {
		i := index(ids, q)
		if !all && i < 0 {
			continue
		}
		err := d.resumeQueue(c, q)
		if !all {
			if err != 0 {
				ids[i] |= kfd.QueueErrorMask
				break
			}
			ids[i] &^= kfd.QueueInvalidMask
		}
		if g.node.mes() {
			g.wakes++
			if err != 0 {
				continue
			}
		}
		resumed++
	}
	if g.node.mes() || resumed == 0 {
		d.note()
		return resumed
	}
	if d.executeQueues(c, g, x.p, DefaultGrace) != 0 {
		for _, q := range x.queues {
			if i := index(ids, q); i >= 0 {
				ids[i] |= kfd.QueueErrorMask
			}
		}
		return 0
	}
	g.wakes++
	d.note()
	return resumed
}

// resumeQueue is resume_single_queue.
func (d *Driver) resumeQueue(c *call, q *queue) errno {
	if !q.Suspended {
		return 0
	}
	q.Suspended = false
	d.note()
	if !q.wanted() {
		return 0
	}
	if q.pdd.gpu.node.mes() {
		if err := d.addQueue(c, q); err != 0 {
			return err
		}
	}
	q.Active = true
	return 0
}
