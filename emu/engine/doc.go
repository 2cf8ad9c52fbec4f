// Package engine hides how the emulated GPUs get at their work: it watches doorbells,
// reads packets and commands out of the memory of real processes, has gpusim say when
// they run and end, and carries out their effects in that memory.
//
// Each packet takes effect exactly once, however often its queue is taken off the GPU
// and put back; package abi says what follows what. A packet of a queue that is gone,
// or whose process is, has no effect any more.
//
// # Threads
//
// One goroutine polls all doorbells, and reads rings. What a packet does when it ends is
// done where gpusim tells that it ended, with the machine locked: so after a queue has
// been taken off the GPU, or removed here, nothing of it happens any more. A large copy
// holds the machine for as long as copying its bytes takes, about half a millisecond
// for each megabyte. Events and faults are told by another goroutine, which holds
// nothing.
package engine
