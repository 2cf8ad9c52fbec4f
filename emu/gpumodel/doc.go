// Package gpumodel implements a model of the GPUs of one machine, as their driver and
// the files of the kernel show them: hardware queue slots, kernels that share the compute
// units, runlist cycles and their costs, and the texts of sysfs, debugfs and /proc.
//
// Machine is a discrete-event model in virtual time: the same calls at the same
// virtual times with the same seed have the same result to the nanosecond.
// Realtime runs a Machine along the wall clock.
//
// What is modelled:
//
//   - AQL and SDMA queues are rings with a write and a read index. Packets start
//     in order; one waits for all before it to end unless its Overlap is set.
//     The read index passes a packet when it and all before it have ended.
//   - Running kernels share a GPU: while their occupancies add up to at most
//     1 they run at full speed, beyond that each at the same fraction of it.
//     Copies share the link in the same way and do not use compute units.
//   - A queue runs only while it is mapped to a hardware slot. When the queues or
//     the processes of a GPU do not all fit, sets of them take turns.
//   - A driver outside of the model makes the queues and decides which of them run:
//     AttachQueue, then the two halves of a runlist cycle, Unmap and Map (HWS), or
//     AddQueue and RemoveQueue (MES). Board connects it with package driver.
//   - HWS: in a runlist cycle all queues of the GPU are unmapped, and those of the new
//     runlist mapped; meanwhile nothing on that GPU progresses. Preempted kernels keep
//     their progress. A turn is a cycle, too. SchedulerCycles counts a Map that follows
//     an Unmap as part of its cycle.
//   - MES: each queue is removed and added by itself; the others run on.
//   - The changes of one GPU's schedule are made one after the other.
//   - A mapped queue has a hardware slot and its process a VMID. A slot keeps the
//     registers of a queue that has left it; the queue's MQD keeps the position at which
//     the queue was last unmapped.
//
// What is not modelled: the effect of priorities, memory, caches, clocks, resets except
// ClearGPU, secondary contexts of a process, queues of the driver's own except the HIQ.
//
// The file tree has the texts of the kernel that was set (SetKernel): sysfs and
// debugfs of the driver, and the files of /proc about GPU processes. Formats,
// places of registers and fields are the driver's. Values that nothing in the model
// represents are those of a host with MI308X, or invented.
//
// Every duration is modelled, none measured on hardware. A program that prints a
// result of this package must call it simulated or emulated.
package gpumodel
