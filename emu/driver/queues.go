package driver

import (
	"slices"

	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

const (
	maxPercent  = 100
	maxPriority = 15
	minRing     = 1024 // bytes
	// Every GPU here has sdmaEngines. The first pcieEngines of them are for PCIe, the
	// others for XGMI.
	sdmaEngines = 16
	pcieEngines = 2
)

func powerOf2(n uint32) bool { return n&(n-1) == 0 } // or 0

// createQueue is kfd_ioctl_create_queue, pqm_create_queue and create_queue_cpsch.
func (d *Driver) createQueue(c *call, args *kfdabi.CreateQueueArgs) (int, errno) {
	p := c.p
	if percent(args.QueuePercentage) > maxPercent || args.QueuePriority > maxPriority || !powerOf2(args.RingSize) {
		return 0, EINVAL
	}
	args.RingSize = max(args.RingSize, minRing)
	if d.prof.contexts && !powerOf2(args.MetadataRingSize) {
		return 0, EINVAL
	}
	if args.QueueType > kfd.QueueTypeSDMAByEngID {
		return 0, ENOTSUPP
	}
	d.lock(c, &p.mutex)
	q, err := d.newQueue(c, args)
	d.unlock(&p.mutex)
	if err != 0 {
		return 0, err
	}
	// Without the mutex, as in the driver: the queue may have been destroyed by now.
	d.raise(c, p, q.pdd.gpu, kfd.ECQueueNew.Mask(), q.ID, c.task)
	return 0, 0
}

// percent is the share of time in CreateQueueArgs.QueuePercentage.
func percent(queuePercentage uint32) uint32 { return queuePercentage & 0xff }

func (d *Driver) newQueue(c *call, args *kfdabi.CreateQueueArgs) (*queue, errno) {
	p, kind := c.p, args.QueueType
	x := p.pdd(args.GPUID)
	if x == nil {
		return nil, EINVAL
	}
	if kind == kfd.QueueTypeSDMAByEngID {
		if args.SDMAEngineID >= sdmaEngines {
			return nil, EINVAL
		}
		kind = kfd.QueueTypeSDMA
		if args.SDMAEngineID >= pcieEngines {
			kind = kfd.QueueTypeSDMAXGMI
		}
	}
	var buffers []*object
	if x.acquired && d.prof.checksBuffers {
		var err errno
		if buffers, err = x.acquireBuffers(args, d.ringBytes(args), kind); err != 0 {
			return nil, err
		}
	}
	d.initVMs(x)
	if len(x.queues) >= x.gpu.node.maxQueues(d.prof) {
		return nil, ENOSPC
	}
	slot := slices.Index(p.slots[:], false)
	if slot < 0 {
		return nil, ENOMEM
	}
	if x.gpu.queues >= maxQueuesPerDevice {
		return nil, EPERM
	}
	if !d.roomForCopies(x.gpu, kind) {
		return nil, ENOMEM
	}
	d.serial++
	q := &queue{pdd: x, ctlStackSize: args.CtlStackSize, workaround: p.Enabled && x.gpu.node.cwsrWorkaround(), QueueState: QueueState{
		ID: uint32(slot), Serial: d.serial, GPU: x.gpu.ID, Type: kind, Evicted: x.evicted > 0, Exceptions: kfd.ECQueueNew.Mask(),
		Size: args.RingSize, Percent: percent(args.QueuePercentage), Priority: args.QueuePriority,
		Ring: args.RingBaseAddress, Read: args.ReadPointerAddress, Write: args.WritePointerAddress,
		Ctx: args.CtxSaveRestoreAddress, CtxSize: args.CtxSaveRestoreSize,
		Doorbell: uint32(slot) * 8, // the driver picks others for some queues
	}}
	p.slots[slot] = true
	d.notifyQueue(q, true)
	if err := d.start(c, q); err != 0 {
		p.slots[slot] = false
		d.notifyQueue(q, false)
		return nil, err
	}
	q.hold(buffers)
	p.queues = slices.Insert(p.queues, 0, q)
	args.QueueID = q.ID
	args.DoorbellOffset = d.cfg.Offsets.Doorbells(x.gpu.ID) | uint64(q.Doorbell)
	d.note()
	return q, 0
}

// roomForCopies reports whether a GPU has a free SDMA queue of the kind, if it is such a
// kind (allocate_sdma_queue).
func (d *Driver) roomForCopies(g *gpu, kind uint32) bool {
	limit := 0
	switch kind {
	case kfd.QueueTypeSDMA:
		limit = g.node.SDMAQueues
	case kfd.QueueTypeSDMAXGMI:
		limit = g.node.XGMIQueues
	}
	if limit == 0 {
		return true
	}
	for _, p := range d.procs {
		for _, x := range p.pdds {
			for _, q := range x.queues {
				if x.gpu == g && q.Type == kind {
					limit--
				}
			}
		}
	}
	return limit > 0
}

func (d *Driver) notifyQueue(q *queue, created bool) {
	if d.cfg.Queue != nil {
		d.cfg.Queue(mappedQueues([]*queue{q})[0], created)
	}
}

// start puts a new queue on its GPU (create_queue_cpsch).
func (d *Driver) start(c *call, q *queue) (err errno) {
	x, g := q.pdd, q.pdd.gpu
	defer d.hold(c, &g.dqm)()
	q.Held = !d.perQueue(g) && q.bornHeld()
	q.Active = q.wanted()
	x.queues = slices.Insert(x.queues, 0, q)
	if q.Active {
		err = d.changeQueue(c, StepAdd, q)
	}
	if err != 0 {
		x.queues = slices.Delete(x.queues, 0, 1)
		q.Active = false
		return err
	}
	g.queues++
	return 0
}

// destroyQueue is kfd_ioctl_destroy_queue and pqm_destroy_queue.
func (d *Driver) destroyQueue(c *call, args *kfdabi.DestroyQueueArgs) (int, errno) {
	p := c.p
	defer d.hold(c, &p.mutex)()
	q := p.queue(args.QueueID)
	if q == nil {
		return 0, EINVAL
	}
	q.release() // also if the queue stays
	gone, err := d.stop(c, q)
	if gone {
		q.destroyed = true
		p.queues = slices.DeleteFunc(p.queues, func(o *queue) bool { return o == q })
		p.slots[q.ID] = false
		d.notifyQueue(q, false)
		d.note()
	}
	return 0, err
}

// stop is destroy_queue_cpsch. gone: the queue was removed, possibly after an error.
func (d *Driver) stop(c *call, q *queue) (gone bool, err errno) {
	x, g := q.pdd, q.pdd.gpu
	d.lock(c, &g.dqm)
	if err := d.awaitDestroy(c, q); err != 0 {
		d.unlock(&g.dqm)
		return false, err
	}
	if q.Active {
		q.Active = false
		err = d.changeQueue(c, StepRemove, q)
	}
	x.queues = slices.DeleteFunc(x.queues, func(o *queue) bool { return o == q })
	g.queues--
	d.unlock(&g.dqm)
	d.raise(c, x.p, g, kfdabi.ECDeviceQueueDelete.Mask(), 0, c.task)
	return true, err
}

// awaitDestroy is wait_on_destroy_queue: while the process is debugged, a suspended queue
// is not destroyed before it is resumed. It releases the locks while it waits.
func (d *Driver) awaitDestroy(c *call, q *queue) errno {
	p, g := q.pdd.p, q.pdd.gpu
	if q.Destroying && d.prof.destroyRecovers {
		return EBUSY
	}
	q.Destroying = true
	if !p.Enabled || !q.Suspended {
		return 0
	}
	d.unlock(&g.dqm)
	d.unlock(&p.mutex)
	// wait_event checks the flag only when a successful resume or a signal wakes it.
	seen := g.wakes
	resumed := d.waitInterruptible(c, func() bool {
		if g.wakes == seen && !c.task.Interrupted() {
			return false
		}
		seen = g.wakes
		return !q.Suspended
	})
	d.lock(c, &p.mutex)
	d.lock(c, &g.dqm)
	if q.destroyed {
		// Two calls destroyed it at once: a use after free in the driver, here an error.
		return EINVAL
	}
	if !resumed {
		if d.prof.destroyRecovers {
			q.Destroying = false
		}
		return ERESTARTSYS
	}
	return 0
}

// updateQueue is kfd_ioctl_update_queue and pqm_update_queue_properties.
func (d *Driver) updateQueue(c *call, args *kfdabi.UpdateQueueArgs) (int, errno) {
	p := c.p
	if percent(args.QueuePercentage) > maxPercent || args.QueuePriority > maxPriority || !powerOf2(args.RingSize) {
		return 0, EINVAL
	}
	defer d.hold(c, &p.mutex)()
	q := p.queue(args.QueueID)
	if q == nil {
		return 0, EFAULT
	}
	size := max(args.RingSize, minRing)
	if q.pdd.acquired && d.prof.checksBuffers && args.RingBaseAddress != 0 {
		ring := q.pdd.mapping(args.RingBaseAddress, uint64(size))
		if ring == nil {
			return 0, EFAULT
		}
		q.replaceRing(ring)
	}
	q.Ring, q.Size = args.RingBaseAddress, size
	q.Percent, q.Priority = percent(args.QueuePercentage), args.QueuePriority
	return 0, d.reload(c, q)
}

// reload is update_queue: the queue is removed from its GPU, and added if it should run.
func (d *Driver) reload(c *call, q *queue) errno {
	x, g := q.pdd, q.pdd.gpu
	defer d.hold(c, &g.dqm)()
	if !d.perQueue(g) {
		if err := d.unmap(c, g, x.p, DefaultGrace); err != 0 {
			return err
		}
		q.Active = q.wanted()
		return d.mapQueues(c, g, x.p)
	}
	if q.Active {
		if err := d.removeQueue(c, q); err != 0 {
			return err
		}
	}
	if q.Active = q.wanted(); q.Active {
		return d.addQueue(c, q)
	}
	return 0
}

// maxCUs is the most bits of a CU mask that are used.
const maxCUs = 1024

// setCUMask is kfd_ioctl_set_cu_mask and pqm_update_mqd.
func (d *Driver) setCUMask(c *call, args *kfdabi.SetCUMaskArgs) (int, errno) {
	p, bits := c.p, args.NumCUMask
	if bits%32 != 0 || bits == 0 {
		return 0, EINVAL
	}
	words, ok := copyFrom[uint32](c.memory(&args.CUMaskPtr), int(min(bits, maxCUs)/32))
	if !ok {
		return 0, EFAULT
	}
	defer d.hold(c, &p.mutex)()
	q := p.queue(args.QueueID)
	if q == nil {
		return 0, EFAULT
	}
	if q.workaround {
		return 0, EBUSY
	}
	if q.pdd.gpu.node.GFX >= 100000 && slices.ContainsFunc(words, unpaired) {
		return 0, EINVAL
	}
	if err := d.reload(c, q); err != 0 {
		return 0, err
	}
	q.userMask = true
	return 0, 0
}

// unpaired reports whether one CU of a pair is set and the other is not.
func unpaired(word uint32) bool {
	const even = 0x55555555
	return word&even != word>>1&even
}

// allocQueueGWS is kfd_ioctl_alloc_queue_gws and pqm_set_gws. Every GPU has GWS.
func (d *Driver) allocQueueGWS(c *call, args *kfdabi.AllocQueueGWSArgs) (int, errno) {
	p, wanted := c.p, args.NumGWS != 0
	defer d.hold(c, &p.mutex)()
	q := p.queue(args.QueueID)
	switch {
	case q == nil:
		return 0, EINVAL
	case d.cfg.NoHWS:
		return 0, ENODEV
	case p.Enabled && q.pdd.gpu.node.noGWSDebug():
		return 0, EBUSY
	}
	args.FirstGWS = 0
	switch {
	case wanted && q.pdd.gws:
		return 0, EBUSY
	case !wanted && !q.pdd.gws:
		return 0, EINVAL
	}
	q.pdd.gws, q.gws = wanted, wanted
	return 0, d.reload(c, q)
}

// noGWSDebug reports whether processes with GWS cannot be debugged on the node.
func (n Node) noGWSDebug() bool { return n.NoGWSDebug || n.cwsrWorkaround() }
