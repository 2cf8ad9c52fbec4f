package dbgtrap

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gpreempt/gpreempt/internal/mechanism"
	"github.com/gpreempt/gpreempt/pkg/discovery"
	"github.com/gpreempt/gpreempt/pkg/gpreempt"
	"github.com/gpreempt/gpreempt/pkg/kfd"
)

// SUSPEND_QUEUES flushes the TLB of each GPU that comes after the first with a suspended
// queue, in the driver's list for the process, and does not ask whether the process has a VM
// there: without one the kernel crashes (suspend_queues, kfd_flush_tlb). So no such call is
// made. A VM is never given up, and the list does not change: what was found once holds.

// withoutVM is the error of a process that SUSPEND_QUEUES must not be called for.
func withoutVM(pid int32, gpus []gpreempt.GPUID) *gpreempt.Error {
	names := make([]string, len(gpus))
	for i, gpu := range gpus {
		names[i] = gpu.String()
	}
	return &gpreempt.Error{
		Code: gpreempt.CodeFailedPrecondition, Reason: gpreempt.ReasonGPUWithoutVM,
		Message: fmt.Sprintf("process %d has a queue, and on GPU %s, which comes later in the driver's list, no VM that is known of: SUSPEND_QUEUES could crash the kernel",
			pid, strings.Join(names, ", ")),
		Next: "allow the process the render node of every GPU that its device cgroup allows, or have the cgroup deny the GPU; or let another mechanism suspend the process",
	}
}

// crashing returns those of gpus on which a missing VM crashes the kernel.
func (m *Mechanism) crashing(gpus []gpreempt.GPUID) []gpreempt.GPUID {
	if m.cfg.Crashes == nil {
		return gpus
	}
	return slices.DeleteFunc(gpus, func(gpu gpreempt.GPUID) bool { return !m.cfg.Crashes(gpu) })
}

// probeVMs looks at what is known without debugging the process.
func (m *Mechanism) probeVMs(target gpreempt.ProcessKey) mechanism.Evidence {
	gpus, err := discovery.ProcessGPUs(m.cfg.Files, target.PID)
	if err != nil {
		return mechanism.Evidence{}
	}
	var used []gpreempt.GPUID
	for _, g := range m.cfg.GPUs(target) {
		used = append(used, g.ID)
	}
	later := discovery.GPUsAfter(gpus, used)
	e := mechanism.Evidence{Check: "VMs", Found: "on every GPU that needs one", OK: true}
	if without := m.crashing(discovery.WithoutVM(m.cfg.Files, target.PID, later)); len(without) > 0 {
		err := withoutVM(target.PID, without)
		e.Found, e.Remedy, e.Reason, e.OK = err.Message, err.Next, err.Reason, false
	}
	return e
}

// suspendQueues makes the call, unless it could crash the kernel. snapshot has the queues
// ids. It is made on the tracing thread.
func (d *debuggee) suspendQueues(ids []uint32, snapshot []kfd.QueueSnapshotEntry) ([]kfd.QueueResult, error) {
	if err := d.checkVMs(snapshot); err != nil {
		return nil, err
	}
	return d.m.cfg.Device.Suspend(d.pid, ids)
}

// checkVMs returns an error if SUSPEND_QUEUES of the queues in snapshot could crash the
// kernel. Once every VM that matters is known it makes no call and reads no file. It is made
// on the tracing thread.
func (d *debuggee) checkVMs(snapshot []kfd.QueueSnapshotEntry) error {
	if len(snapshot) == 0 {
		return nil
	}
	if d.gpus == nil {
		if err := d.listGPUs(); err != nil {
			return err
		}
	}
	used := make([]gpreempt.GPUID, len(snapshot))
	for i := range snapshot {
		used[i] = gpreempt.GPUID(snapshot[i].GPUID)
		d.vms[used[i]] = true
	}
	later := discovery.GPUsAfter(d.gpus, used)
	later = slices.DeleteFunc(later, func(g gpreempt.GPU) bool { return d.vms[g.ID] })
	if len(later) == 0 {
		return nil
	}
	without := discovery.WithoutVM(d.m.cfg.Files, d.target.PID, later)
	for _, g := range later {
		d.vms[g.ID] = !slices.Contains(without, g.ID)
	}
	if without = d.m.crashing(without); len(without) > 0 {
		return withoutVM(d.target.PID, without)
	}
	return nil
}

// listGPUs asks for the driver's list of the target's GPUs. The topology has their render
// nodes; without it, other signs of a VM count.
func (d *debuggee) listGPUs() error {
	devices, err := d.m.cfg.Device.DeviceSnapshot(d.pid)
	if err != nil {
		return err
	}
	known, err := discovery.NewFS(d.m.cfg.Files).GPUs()
	if err != nil {
		known = nil
	}
	gpus := make([]gpreempt.GPU, len(devices))
	for i := range devices {
		gpus[i].ID = gpreempt.GPUID(devices[i].GPUID)
		if at := slices.IndexFunc(known, func(g gpreempt.GPU) bool { return g.ID == gpus[i].ID }); at >= 0 {
			gpus[i] = known[at]
		}
	}
	d.gpus, d.vms = gpus, map[gpreempt.GPUID]bool{}
	return nil
}
