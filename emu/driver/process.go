package driver

import (
	"slices"

	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// process is struct kfd_process. Of its state, Mask is exception_enable_mask, Debugged is
// debugged_process_count, which becomes negative when a debugger exits that another one
// replaced, and Acks is the count of runtime_enable_sema.
type process struct {
	ProcessState
	lead Task
	// table: byMM finds it.
	table bool
	// refs counts open files, the address space, and a debug session.
	refs int
	// users counts the calls of debuggers that hold the address space; unmapped: only
	// they hold it.
	users    int
	unmapped bool
	// queuesGone: its queues were removed when it ended.
	queuesGone bool
	// freed: the driver has released its memory.
	freed bool

	// events is event_mutex, for debug events and for signals.
	mutex, events mutex
	signals       signals
	svm           []*svmRange // by address; none overlap
	xnack         bool
	pdds          []*pdd
	queues        []*queue // newest first, as in the driver's list
	slots         [kfd.MaxQueues]bool

	// debugger is debugger_process. It has no reference: ENABLE stores it before it refuses.
	// counted is the process whose Debugged has counted this one.
	debugger     *process
	counted      *process
	eventFile    EventFile
	rdebug       uint64
	ttmp         bool
	runtimeRetry bool // is_runtime_retry
	flags        uint32
	limit        *kmapLimit // nil for none
}

// pdd is struct kfd_process_device: a process on a GPU.
type pdd struct {
	p      *process
	gpu    *gpu
	queues []*queue // newest first
	vm     bool     // drm_priv
	// acquired: the process acquired the VM itself, so the memory of its queues is checked.
	acquired   bool
	evicted    int
	exceptions kfd.ExceptionMask
	// hasReset is has_reset_queue, which stays until the process ends.
	hasReset bool
	watches  uint32
	gws      bool
	// fault is the data of ECDeviceMemoryViolation (vm_fault_exc_data), nil for none.
	fault *kfdabi.MemoryEventData
	// memory is by handle (alloc_idr), mmapped is the end of the used mmap offsets.
	memory  map[uint32]*object
	mmapped uint64
}

// queue is struct queue and its properties.
type queue struct {
	QueueState
	pdd          *pdd
	ctlStackSize uint32
	destroyed    bool
	gws          bool
	userMask     bool // is_user_cu_masked
	workaround   bool // is_dbg_wa
	// buffers is its memory, the ring third.
	buffers []*object
}

// wanted is QUEUE_IS_ACTIVE, with the part of the extension in kmap.go.
func (q *queue) wanted() bool {
	return q.eligible() && !q.Held
}

// eligible: only a limit keeps it off its GPU.
func (q *queue) eligible() bool {
	return q.Size > 0 && q.Ring != 0 && q.Percent > 0 && !q.Evicted && !q.Suspended
}

// File is an open file of the device.
type File struct{ p *process }

// Open opens the device for t (kfd_open). The error is an errno.
func (d *Driver) Open(t Task) (*File, error) {
	d.mu.Lock()
	defer d.leave()
	p, err := d.createProcess(t)
	if err != 0 {
		return nil, err
	}
	return &File{p: p}, nil
}

// createProcess finds or creates the process of t, and takes a reference
// (kfd_create_process).
func (d *Driver) createProcess(t Task) (*process, errno) {
	mm := t.MM()
	switch {
	case mm == nil || t.Leader().MM() != mm:
		return nil, EINVAL
	case d.prof.contexts && len(d.gpus) == 0:
		return nil, EINVAL
	case d.locked > 0:
		return nil, EINVAL
	}
	p := d.byMM(mm)
	if p == nil {
		p = d.newProcess(t.Leader(), mm)
		p.refs++ // of the address space (mmu_notifier_get)
	}
	p.refs++
	return p, 0
}

// newProcess creates a process without a reference (create_process).
func (d *Driver) newProcess(lead Task, mm MM) *process {
	p := &process{
		ProcessState: ProcessState{PID: lead.TID(), MM: mm}, lead: lead, table: true, xnack: len(d.gpus) == 0,
	}
	for _, g := range d.gpus {
		p.pdds = append(p.pdds, &pdd{p: p, gpu: g})
	}
	d.procs = append(d.procs, p)
	d.note()
	return p
}

// byMM is find_process_by_mm.
func (d *Driver) byMM(mm MM) *process {
	for _, p := range d.procs {
		if p.table && !p.Secondary && p.MM == mm {
			return p
		}
	}
	return nil
}

// pdd is kfd_process_device_data_by_id, nil if the process has no such GPU.
func (p *process) pdd(gpuID uint32) *pdd {
	for _, x := range p.pdds {
		if uint32(x.gpu.ID) == gpuID {
			return x
		}
	}
	return nil
}

// lookUp is p.pdd for the caller, with the mutex held.
func (d *Driver) lookUp(c *call, gpuID uint32) *pdd {
	defer d.hold(c, &c.p.mutex)()
	return c.p.pdd(gpuID)
}

// queue is get_queue_by_qid.
func (p *process) queue(id uint32) *queue {
	for _, q := range p.queues {
		if q.ID == id {
			return q
		}
	}
	return nil
}

// Release closes an open file, after the last call on it has returned (kfd_release).
func (d *Driver) Release(f *File) {
	d.mu.Lock()
	defer d.leave()
	c := &call{d: d, caller: f.p.PID}
	if f.p.Secondary {
		d.released(c, f.p)
	}
	d.unref(f.p)
	d.note()
}

// MMReleased ends an address space, when its last thread has exited or called exec. by is
// the thread that waits while the driver does its work, which needs locks that others may
// hold. If a debugger's call is under way, that call does the work.
func (d *Driver) MMReleased(by Task, mm MM) {
	d.mu.Lock()
	defer d.leave()
	p := d.byMM(mm)
	if p == nil {
		return
	}
	if p.users > 0 {
		p.unmapped = true
		return
	}
	d.mmReleased(&call{d: d, task: by, caller: p.PID}, p)
}

// mmReleased is kfd_process_notifier_release.
func (d *Driver) mmReleased(c *call, p *process) {
	d.released(c, p)
	d.unref(p) // mmu_notifier_put, and in the end kfd_process_free_notifier
	d.note()
}

// released is kfd_process_notifier_release_internal.
func (d *Driver) released(c *call, p *process) {
	p.table = false
	p.unlimit()
	// It waits for callers that found it in the table (synchronize_srcu): otherwise both
	// would end its session.
	d.wait(c, func() bool { return d.walkers == 0 })
	if d.prof.dequeueFirst {
		d.terminate(c, p)
	}
	p.MM = nil
	d.disable(c, p)
	if p.Debugged > 0 {
		d.walkers++
		for _, target := range slices.Clone(d.procs) {
			if !target.table || target.debugger != p {
				continue
			}
			d.lock(c, &target.mutex)
			d.disable(c, target)
			d.unlock(&target.mutex)
			if p.Debugged == 0 {
				break
			}
		}
		d.walkers--
		d.note()
	}
}

// unref releases a reference. After the last one a worker does the rest
// (kfd_process_ref_release, kfd_process_wq_release).
func (d *Driver) unref(p *process) {
	if p.refs--; p.refs == 0 {
		d.dying = append(d.dying, p)
	}
}

// reap is the worker: it removes processes without a reference. It waits for no lock.
func (d *Driver) reap() {
	locked := func(x *pdd) bool { return x.gpu.dqm.held }
	for {
		i := slices.IndexFunc(d.dying, func(p *process) bool { return !slices.ContainsFunc(p.pdds, locked) })
		if i < 0 {
			return
		}
		p := d.dying[i]
		d.dying = slices.Delete(d.dying, i, i+1)
		d.terminate(&call{d: d, caller: p.PID}, p)
		for _, x := range p.pdds {
			if x.vm && d.prof.contexts {
				d.smiProcess(x, kfdabi.SMIProcessEnd)
			}
		}
		p.freeAll()
		p.freed = true
		d.procs = slices.DeleteFunc(d.procs, func(o *process) bool { return o == p })
		d.note()
	}
}

// terminate removes a process's queues (kfd_process_dequeue_from_all_devices,
// process_termination_cpsch).
func (d *Driver) terminate(c *call, p *process) {
	if p.queuesGone {
		return
	}
	p.queuesGone = true
	for _, x := range p.pdds {
		g := x.gpu
		d.lock(c, &g.dqm)
		queues := x.queues
		for _, q := range queues {
			if q.Active && d.perQueue(g) {
				d.removeQueue(c, q)
			}
			q.Active, q.destroyed = false, true
			g.queues--
		}
		x.queues = nil
		if !d.perQueue(g) { // also for a process that had no queue
			d.executeQueues(c, g, p, DefaultGrace)
		}
		for _, q := range queues { // after a failure the driver resets the waves
			delete(g.mapped, q)
			d.notifyQueue(q, false)
		}
		d.unlock(&g.dqm)
	}
	p.queues = nil
}

// Work does the driver's own work, which waits for the hardware: see Config.Worker.
func (d *Driver) Work() {
	d.mu.Lock()
	defer d.release()
	d.reap()
}

// leave releases the lock, after the worker's work and before files are released.
func (d *Driver) leave() {
	switch {
	case d.cfg.Worker == nil:
		d.reap()
	case len(d.dying) > 0:
		d.cfg.Worker()
	}
	d.release()
}

// release releases the lock and then files.
func (d *Driver) release() {
	puts := d.puts
	d.puts = nil
	d.mu.Unlock()
	for _, f := range puts {
		f.Put()
	}
}
