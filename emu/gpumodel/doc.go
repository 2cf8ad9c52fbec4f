// Package gpusim hides a simulated machine full of GPUs behind what a kernel
// driver offers: processes, queues, suspend and resume, and sysfs.
//
// Machine is a discrete-event model in virtual time: the same calls at the same
// virtual times with the same seed give the same result to the nanosecond.
// Realtime runs a Machine along the wall clock.
//
// What is modelled:
//
//   - AQL and SDMA queues are rings with a write and a read index. Packets start
//     in order; one waits for all before it to end unless its Overlap is set.
//     The read index passes a packet when it and all before it have ended.
//   - Running kernels share a GPU: while their occupancies add up to no more
//     than 1 they run at full speed, beyond that each at the same fraction of it.
//     Copies share the link in the same way and leave the compute units alone.
//   - A queue runs only while it is mapped to a hardware slot. When the queues or
//     the processes of a GPU do not all fit, sets of them take turns.
//   - HWS: every suspend, resume, turn, birth and death of a queue is a runlist
//     cycle: all queues of that GPU are unmapped, the rest is mapped again, and
//     meanwhile nothing on that GPU progresses. Preempted kernels keep their
//     place. A process has its GPUs handled one after the other.
//   - MES: each queue is removed and added by itself; the others run on.
//   - Suspending and resuming one process are serialised, and so is all that
//     happens to one GPU's schedule.
//   - A machine decides its schedule itself, as CreateQueue, Suspend and Resume ask, or a
//     driver outside does, with AttachQueue and the two halves of a cycle, Unmap and Map
//     (HWS), or AddQueue and RemoveQueue (MES). Costs, turns, counters and texts are the
//     same. SchedulerCycles counts a Map that follows an Unmap as part of its cycle.
//   - A mapped queue has a hardware slot and its process a VMID. A slot keeps what
//     was in it when its queue leaves; the queue's MQD keeps where it was when it was
//     last taken off.
//
// What is not modelled: what priorities do, memory, caches, clocks, resets other than
// what ClearGPU says, a process's secondary contexts, queues of the driver's own other than the HIQ.
//
// The file tree has the texts of the kernel that was set (SetKernel): sysfs and
// debugfs of the driver, and /proc as far as GPU processes are concerned. Formats,
// places of registers and fields are the driver's. Values that nothing in the model
// stands for are those a host with MI308X showed, or made up.
//
// Every duration is modelled, none measured on hardware. Whatever prints a
// result of this package has to call it simulated.
package gpumodel
