// Package engine executes the packets of emulated queues in the memory of real processes:
// it watches doorbells, reads packets and commands, submits them to the model of the GPU,
// and applies their effects when they end.
//
// Each packet takes effect exactly once, however often its queue is unmapped and mapped
// again; package abi defines the effects and their order. A packet has no effect after its
// queue was removed or its process ended.
//
// # Threads
//
// One goroutine polls all doorbells, and reads rings. The effect of a packet is applied
// in the callback of the model for its end, with the machine locked: after a queue was
// unmapped, or removed here, none of its packets takes effect. A large copy holds the
// machine's lock while its bytes are copied, about half a millisecond for each megabyte.
// Another goroutine, without locks, reports events and faults.
package engine
