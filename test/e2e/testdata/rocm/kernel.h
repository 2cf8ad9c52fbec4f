/*
 * The emulated kernel (package engine): what a kernel_object points to, its kernarg, and
 * what it comes to. A kernel for a real GPU has no effect on the emulated one.
 */
#ifndef ROCM_KERNEL_H
#define ROCM_KERNEL_H

#include <stdint.h>
#include <string.h>

enum { OP_MIX = 1, WHOLE_GPU = 1000000 };

struct kernel {
	char magic[8];
	uint32_t op, occupancy;
	uint64_t nanoseconds;
};

struct result {
	volatile uint64_t count, hash;
};

struct mix {
	uint64_t result, value, progress;
};

static inline void make_kernel(struct kernel *k, uint64_t nanoseconds)
{
	memcpy(k->magic, "KFDEMUK1", sizeof k->magic);
	k->op = OP_MIX;
	k->occupancy = WHOLE_GPU;
	k->nanoseconds = nanoseconds;
}

static inline uint64_t mixed(uint64_t hash, uint64_t value)
{
	return (hash ^ value) * 0x100000001b3;
}

#endif
