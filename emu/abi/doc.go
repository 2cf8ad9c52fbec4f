// Package abi hides the layouts that a program and the emulated GPU share in the
// program's memory: AQL packets, signals, SDMA commands, and the emulated kernels.
//
// # What is AMD's
//
// Layouts and meanings are those of the HSA runtime's headers: hsa.h and hsa_ext_amd.h
// for packets, amd_hsa_signal.h for signals, sdma_registers.h of ROCR-Runtime for SDMA
// commands in the form they have from gfx9 on. Everything is little endian.
//
// A producer that takes a slot of an AQL ring increments the write index, writes the
// packet without its first four bytes, stores those last and in one piece, and rings
// the doorbell with the packet's index. What the doorbell says does not matter to the
// emulated GPU, only that it was rung. A slot that is not INVALID any more is taken for
// a whole packet, whoever wrote it and however far others are; so all headers of a new
// ring must be INVALID (1), or all its memory 0, which the packet processor takes for
// reserved and waits for as well.
//
// # What is emulated
//
// No code of a GPU is ever run. A kernel_object that points to a Kernel, by its magic,
// is an emulated kernel: it takes the time and the share of the GPU it says, and has
// the effect of its operation when it ends. A kernel_object that points anywhere else
// is a real kernel: it takes the time the emulator was told, fills the GPU, and has no
// effect.
//
//	kernel_object -> Kernel:  magic u64 "KFDEMUK1" | op u32 | occupancy u32 | duration u64
//	kernarg       -> Mix:     result u64 | value u64 | progress u64
//	result        -> count u64 | hash u64
//
// When a Mix kernel ends, count is incremented and hash becomes MixHash(hash, value),
// which depends on the order. Where progress is not 0, a u64 there gets the
// millionths of the kernel that are done: when its queue is taken off the GPU in the
// middle of it, and a million when it ends.
//
// # The order of effects
//
// When an AQL packet has ended, and all before it in its ring have, these follow one
// another: its effect has been had, its header becomes INVALID, the read index is
// incremented, the two timestamps of its completion signal are written, the signal is
// decremented once, the event's mailbox gets the event's id, and the event is
// signalled. So who sees the signal finds everything else done. Packets without the
// barrier bit may run at the same time as those before them, and have their effect when
// they end, but complete in order.
//
// SDMA commands run one after the other. Those that move data (Copy, CopyRect, Fill,
// Write, Timestamp) do it before the read index passes them, those that tell of it
// (Fence, Atomic, Trap) after.
//
// A signal is decremented by reading and writing it: real atomics on another process's
// memory there are none. A program that changes the value of a signal itself while a
// packet that will decrement it is running can lose one of the two changes.
package abi
