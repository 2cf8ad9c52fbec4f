// Package kfdwork hides how a process makes GPUs work through /dev/kfd with nothing
// but system calls and memory, and how it proves that every packet ran exactly once
// and in order.
//
// It is for tests, samples and the demo: what runs the packets is an emulator (package
// abi says what it understands), not hardware. A real GPU would take its ring, its
// registers and the code of its kernels in memory that was allocated and mapped for it;
// here they are in plain memory of the process.
//
// # The proof
//
// The n-th packet of a queue adds 1 to a count and folds a value only that packet has
// into a hash that depends on the order; the client works out both for itself. After
// the last packet of a queue the count, the hash, the read index, the value of every
// completion signal and the progress of every kernel must be what they should be.
// Copies are compared byte for byte, and their contents folded into the hash. The
// memory of a queue that was destroyed with work in it is used for the next one, so
// that a packet that runs later than it may spoils the next proof.
package workload
