// Package engine executes the packets of emulated queues in the memory of real processes:
// it watches doorbells, reads packets and commands, submits them to the model of the GPU,
// and applies their effects when they end.
//
// Each packet takes effect exactly once, however often its queue is unmapped and mapped
// again. A packet has no effect after its queue was removed or its process ended.
//
// The package also has the layouts that a program and the emulated GPU share in the
// program's memory: AQL packets, signals, SDMA commands, and emulated kernels. The
// interface of the driver is in pkg/kfd.
//
// # AMD's layouts
//
// Layouts and meanings are those of the HSA runtime's headers: hsa.h and hsa_ext_amd.h
// for packets, amd_hsa_signal.h for signals, sdma_registers.h of ROCR-Runtime for SDMA
// commands in the form they have from gfx9 on; those of the kernel's soc15d.h and of AMD's
// kfdtest for PM4 packets of the compute micro engine. Everything is little endian.
//
// A producer that takes a slot of an AQL ring increments the write index, writes the
// packet without its first four bytes, stores those last and atomically, and rings the
// doorbell with the packet's index. The emulated GPU ignores the value of the doorbell. A
// slot that is not INVALID counts as a complete packet. So all headers of a new ring must
// be INVALID (1), or all its memory 0, which the packet processor treats as reserved and
// also waits for.
//
// # Emulated kernels
//
// GPU code is never run. A kernel_object that points to a Kernel, recognized by its magic,
// is an emulated kernel: it takes the time and the share of the GPU in the Kernel, and its
// operation has its effect when it ends. Any other kernel_object is a real kernel: it
// takes the time that the emulator is configured with, fills the GPU, and has no effect.
//
//	kernel_object -> Kernel:  magic u64 "KFDEMUK1" | op u32 | occupancy u32 | duration u64
//	kernarg       -> Mix:     result u64 | value u64 | progress u64
//	result        -> count u64 | hash u64
//
// When a Mix kernel ends, count is incremented and hash becomes MixHash(hash, value),
// which depends on the order. If progress is not 0, it is the address of a u64 for the
// completed millionths of the kernel, written when its queue is unmapped in the middle of
// it, and when it ends.
//
// # The order of effects
//
// When an AQL packet and all packets before it in its ring have ended, these steps follow
// in order: the packet's effect, its header becomes INVALID, the read index is
// incremented, the two timestamps of its completion signal are written, the signal is
// decremented once, the event's mailbox gets the event's ID, and the event is signalled.
// So a program that sees the signal also sees everything else. Packets without the barrier
// bit may run at the same time as those before them, and have their effect when they end,
// but complete in order.
//
// SDMA commands run one after the other. Those that move data (Copy, CopyRect, Fill,
// Write, Timestamp) do so before the read index passes them, those that notify (Fence,
// Atomic, Trap) after.
//
// PM4 packets run one after the other, too, also behind a kernel. Data is written before the
// read pointer passes the packet, and the event of a RELEASE_MEM follows. The read pointer
// stays at an INDIRECT_BUFFER until the last packet in the buffer has ended, and a queue that is
// unmapped in a buffer continues there: the hardware saves the place in the buffer (cp_hqd_ib_*
// of the MQD). A buffer can continue in another (chain), but not contain another: the second
// level is that of graphics rings. What the hardware does with a packet that it does not have is
// not documented; here the queue stops, as after an invalid AQL packet.
//
// A signal is decremented by reading and writing it: there are no atomic operations on
// another process's memory. A program that changes the value of a signal while a packet
// that will decrement it is running can lose one of the two changes.
//
// # Threads
//
// One goroutine polls all doorbells, and reads rings. The effect of a packet is applied
// in the callback of the model for its end, with the machine locked: after a queue was
// unmapped, or removed here, none of its packets takes effect. A large copy holds the
// machine's lock while its bytes are copied, about half a millisecond for each megabyte.
// Another goroutine, without locks, reports events and faults.
package engine
