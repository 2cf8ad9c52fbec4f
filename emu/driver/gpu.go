package driver

import (
	"github.com/gpreempt/gpreempt/emu/kfdabi"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
)

// gpu is a node with its queue manager: struct kfd_node, struct device_queue_manager.
// GraceNow of its state is the register CP_IQ_WAIT_TIME2.SCH_WAVE.
type gpu struct {
	GPUState
	node Node
	dqm  mutex
	// runlist: the hardware has a runlist (active_runlist). mapped are the queues that the
	// hardware runs.
	runlist bool
	mapped  map[*queue]bool
	// kmapFailed: the last runlist for the extension failed.
	kmapFailed bool
	// queues counts the queues of all processes (total_queue_count).
	queues int
	// owner is the process that has the debug VMID (trap_debug_vmid).
	owner    *process
	watches  uint32
	profiler *process
	wakes    int // of destroy_wait
	resets   uint32
	smi      []*SMIStream

	// vramUsed is in bytes, vramUsedAligned is what AVAILABLE_MEMORY subtracts.
	vramUsed, vramUsedAligned uint64
}

// maxQueuesPerDevice is the module parameter max_num_of_queues_per_device.
const maxQueuesPerDevice = 4096

// perQueue reports whether queues are added and removed one by one, without a runlist: by
// MES, or by the driver itself without HWS.
func (d *Driver) perQueue(g *gpu) bool { return g.node.mes() || d.cfg.NoHWS }

// step calls the hook for the result of a step, and applies the step's effect on the
// hardware. The GPU's lock is held.
func (d *Driver) step(c *call, kind StepKind, g *gpu, p *process, q *queue) errno {
	id := kfdabi.NoQueue
	if q != nil {
		id = q.ID
	}
	var out Outcome
	if d.hook != nil {
		s := Step{Kind: kind, GPU: g.ID, Op: c.op, Task: c.task, Caller: c.caller, Process: p.PID, Queue: id}
		switch kind {
		case StepMap:
			s.Queues = mappedQueues(d.activeOn(g))
		case StepAdd, StepRemove:
			s.Queues = mappedQueues([]*queue{q})
		case StepUnmap:
			s.Grace = g.GraceNow
		case StepShaderDebugger:
		}
		out = d.hook(s)
		if out.Held != nil {
			d.wait(c, func() bool { return !out.Held() })
		}
		if kind == StepRemove && out.Errno == ETIME {
			return d.notRemoved(g, q)
		}
		if out.Errno != 0 {
			g.Hung = g.Hung || out.Errno == ETIME
			return out.Errno
		}
	}
	switch kind {
	case StepUnmap:
		g.Unmaps++
		pids := map[int32]bool{}
		for q := range g.mapped {
			pids[q.pdd.p.PID] = true
		}
		for pid := range pids {
			g.Cycled[pid]++
		}
		clear(g.mapped)
		if err := d.resetStuck(g, out.Stuck); err != 0 {
			return err
		}
		g.runlist = false
	case StepMap:
		g.Maps++
		for _, q := range d.activeOn(g) {
			g.mapped[q] = true
		}
		g.runlist = true
	case StepAdd:
		g.Adds++
		g.mapped[q] = true
	case StepRemove:
		g.Removes++
		delete(g.mapped, q)
	case StepShaderDebugger:
	}
	d.note()
	return 0
}

// activeOn returns the queues that belong in the GPU's runlist.
func (d *Driver) activeOn(g *gpu) []*queue {
	var queues []*queue
	for _, p := range d.procs {
		for _, x := range p.pdds {
			if x.gpu != g {
				continue
			}
			for _, q := range x.queues {
				if q.Active {
					queues = append(queues, q)
				}
			}
		}
	}
	return queues
}

// executeQueues is execute_queues_cpsch: it unmaps all queues and maps those that should
// run, on behalf of p.
func (d *Driver) executeQueues(c *call, g *gpu, p *process, grace uint32) errno {
	if g.Resetting {
		return EIO
	}
	if err := d.unmap(c, g, p, grace); err != 0 {
		return err
	}
	return d.mapQueues(c, g, p)
}

// unmap is unmap_queues_cpsch.
func (d *Driver) unmap(c *call, g *gpu, p *process, grace uint32) errno {
	if g.Resetting || !g.runlist { // a reset stops the scheduler (sched_running)
		return 0
	}
	if grace != DefaultGrace {
		g.GraceNow = d.graceRegister(g, grace)
	}
	g.Grace = append(g.Grace, g.GraceNow)
	if err := d.step(c, StepUnmap, g, p, nil); err != 0 {
		return err // the grace period stays as it is
	}
	if grace != DefaultGrace {
		g.GraceNow = DefaultGrace
	}
	return 0
}

// graceRegister is what a grace period becomes in its field of 8 bits, where 0 is
// without end: 0 becomes 1, others are cut off (kfd_packet_manager_v9.c,
// pm_config_dequeue_wait_counts_v9). From 7.3 on, 0 remains where the firmware takes it; but
// then the driver leaves the default in the field (kgd_gfx_v9_build_dequeue_wait_counts_packet_info).
func (d *Driver) graceRegister(g *gpu, grace uint32) uint32 {
	switch {
	case grace != 0:
		return grace & 0xff
	case d.prof.graceOfZero && g.node.graceOfZero():
		return DefaultGrace
	}
	return 1
}

// mapQueues is map_queues_cpsch.
func (d *Driver) mapQueues(c *call, g *gpu, p *process) errno {
	if g.Resetting || g.runlist || len(d.activeOn(g)) == 0 {
		return 0
	}
	return d.step(c, StepMap, g, p, nil)
}

// addQueue and removeQueue are add_queue_mes and remove_queue_mes.
func (d *Driver) addQueue(c *call, q *queue) errno { return d.stepQueue(c, StepAdd, q) }

func (d *Driver) removeQueue(c *call, q *queue) errno { return d.stepQueue(c, StepRemove, q) }

func (d *Driver) stepQueue(c *call, kind StepKind, q *queue) errno {
	if kind == StepRemove && q.Reset && d.prof.removes != removeFails {
		return 0 // also if RESUME_QUEUES has added it since
	}
	if q.pdd.gpu.Resetting {
		return EIO
	}
	return d.step(c, kind, q.pdd.gpu, q.pdd.p, q)
}

// changeQueue adds q to its GPU or removes it, with HWS by a new runlist.
func (d *Driver) changeQueue(c *call, kind StepKind, q *queue) errno {
	if d.perQueue(q.pdd.gpu) {
		return d.stepQueue(c, kind, q)
	}
	return d.executeQueues(c, q.pdd.gpu, q.pdd.p, DefaultGrace)
}

// refresh updates the hardware's debug settings of a process: debug_refresh_runlist with
// HWS, kfd_dbg_set_mes_debug_mode with MES.
func (d *Driver) refresh(c *call, x *pdd) errno {
	g := x.gpu
	if d.cfg.NoHWS {
		return EINVAL
	}
	if !g.node.perVMID(d.prof) {
		return 0
	}
	defer d.hold(c, &g.dqm)()
	if g.node.mes() {
		return d.step(c, StepShaderDebugger, g, x.p, nil)
	}
	if err := d.unmap(c, g, x.p, 0); err != 0 {
		return err
	}
	return d.mapQueues(c, g, x.p)
}

// reserveVMID is reserve_debug_trap_vmid, releaseVMID is release_debug_trap_vmid.
func (d *Driver) reserveVMID(c *call, x *pdd) errno {
	g := x.gpu
	defer d.hold(c, &g.dqm)()
	if g.owner != nil {
		return EBUSY
	}
	if err := d.unmap(c, g, x.p, DefaultGrace); err != 0 {
		return err
	}
	g.owner = x.p
	return d.mapQueues(c, g, x.p)
}

func (d *Driver) releaseVMID(c *call, x *pdd) {
	g := x.gpu
	defer d.hold(c, &g.dqm)()
	// The driver does not check who has it.
	if g.owner == nil || d.unmap(c, g, x.p, DefaultGrace) != 0 {
		return
	}
	g.owner = nil
	d.mapQueues(c, g, x.p) // a failure is only logged
}

func (d *Driver) gpu(id gpreempt.GPUID) *gpu {
	for _, g := range d.gpus {
		if g.ID == id {
			return g
		}
	}
	return nil
}

// StartReset begins a reset of a GPU: all processes are evicted from all GPUs, and
// operations on the GPU fail with EIO (kgd2kfd_pre_reset).
func (d *Driver) StartReset(id gpreempt.GPUID) {
	d.mu.Lock()
	defer d.leave()
	g := d.gpu(id)
	if g == nil || g.Resetting {
		return
	}
	g.resets++
	d.smiReset(g, kfdabi.SMIGPUPreReset)
	if d.locked++; d.locked == 1 {
		for _, p := range d.procs {
			if p.table {
				d.evictProcess(&call{d: d}, p, kfdabi.TriggerSuspend) // a failure is only logged
			}
		}
	}
	g.Resetting = true
	clear(g.mapped)
	g.runlist = false
	d.signalReset(g, false)
	d.note()
}

// EndReset ends a reset. Evicted queues stay evicted (kgd2kfd_post_reset).
func (d *Driver) EndReset(id gpreempt.GPUID) {
	d.mu.Lock()
	defer d.leave()
	g := d.gpu(id)
	if g == nil || !g.Resetting {
		return
	}
	g.Resetting, g.Hung = false, false
	g.GraceNow = DefaultGrace
	d.locked--
	d.smiReset(g, kfdabi.SMIGPUPostReset)
	d.note()
}
