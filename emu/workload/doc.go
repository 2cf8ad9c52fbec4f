// Package workload implements a program that gives GPUs work through /dev/kfd, with only
// system calls and memory, and proves that every packet ran exactly once and in order.
//
// It is for tests, samples and the demo: an emulator runs the packets (see package engine),
// not hardware. All buffers are memory of the process, and where it has an address space on
// the GPU, they are mapped there at the same addresses, as the real driver requires.
//
// # The proof
//
// The n-th packet of a queue adds 1 to a count and mixes a value that only this packet has
// into a hash that depends on the order. The client computes both itself. After the last
// packet of a queue it compares the count, the hash, the read index, the value of every
// completion signal and the progress of every kernel with the expected values. Copies are
// compared byte for byte, and their contents are mixed into the hash. The memory of a
// queue that was destroyed with work in it is used for the next one, so that a packet that
// runs too late makes the next proof fail.
package workload
