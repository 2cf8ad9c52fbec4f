// Package sim runs a scenario in virtual time: it says what a way of sharing GPUs does to the
// latency of online work and to the throughput of offline work. The preemptive way is decided
// by the daemon's own core (pkg/scheduler); the others are baselines of published systems.
//
// Everything here is a model and every result is simulated. The model:
//
//   - A queue runs its kernels in order. The kernels of different queues share the compute
//     units of a GPU: up to full occupancy at full speed, beyond that each at a fraction of it
//     (Sharing).
//   - Work is a fluid between interruptions: a kernel costs no event of its own. The kernel in
//     flight and what is left of it follow from the progress of its queue, and are looked up
//     only when something interrupts it.
//   - Suspending and resuming take the time in Costs, by process and GPU. The cycles of a
//     GPU's runlist are made one after the other and stop everything on that GPU.
//   - Attaching a mechanism takes no time, and no call fails.
//   - With Options.Slots, more queues than slots take turns: the next set is mapped every 10 ms
//     by a runlist cycle, whether its queues have work or not.
//   - Not modelled: memory and its bandwidth, caches, clocks, copies.
//
// The same scenario, scheme, options and seed have the same result, byte for byte, on one
// architecture. The package has no clock, does no I/O and starts no goroutine.
package sim
