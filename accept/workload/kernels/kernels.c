// The kernels of the acceptance, for amdgcn. `make kernels` builds them with Debian's LLVM.
//
// Each verify kernel keeps values in one kind of storage for ROUNDS rounds and stores what
// became of them, one word for each lane. expected (kernels.go) computes the same words without rounds.

typedef unsigned int u32;
typedef unsigned long u64;
typedef float f32x32 __attribute__((ext_vector_type(32)));
#define KERNEL __attribute__((amdgpu_kernel, visibility("protected")))
#define SIZE(n) __attribute__((amdgpu_flat_work_group_size(n, n)))
#define WAVES(n) __attribute__((amdgpu_waves_per_eu(n, n)))
#define LDS __attribute__((address_space(3)))
#define PRIVATE __attribute__((address_space(5)))

enum { LANES = 256, VALUES = 96, WORDS = 16384 / LANES, LINE = 16 };

// One round of a value: an affine map of full period.
static u32 next(u32 v) { return v * 1664525u + 1013904223u; }

// The first value of a lane.
static u32 first(u32 seed, u32 lane, u32 i) {
	u32 x = seed + lane * 0x9e3779b9u + i * 0x85ebca6bu;
	x = (x ^ (x >> 16)) * 0x7feb352du;
	x = (x ^ (x >> 15)) * 0x846ca68bu;
	return x ^ (x >> 16);
}

static u32 fold(u32 sum, u32 v) { return (sum ^ v) * 16777619u; }

static u32 lane(void) { return __builtin_amdgcn_workgroup_id_x() * LANES + __builtin_amdgcn_workitem_id_x(); }

// Counts until the host stops it: the heartbeat.
KERNEL SIZE(64) void beat(u64 *words, u32 *stop) {
	u64 *word = words + __builtin_amdgcn_workgroup_id_x() * 8;
	for (u64 n = 1; __scoped_atomic_load_n(stop, __ATOMIC_RELAXED, __MEMORY_SCOPE_SYSTEM) == 0; n++)
		if (__builtin_amdgcn_workitem_id_x() == 0)
			__scoped_atomic_store_n(word, n, __ATOMIC_RELAXED, __MEMORY_SCOPE_SYSTEM);
}

// Architected vector registers.
KERNEL SIZE(LANES) void vgpr(u32 *out, u32 seed, u32 rounds) {
	u32 v[VALUES];
	for (u32 i = 0; i < VALUES; i++)
		v[i] = first(seed, lane(), i);
#pragma clang loop unroll(disable)
	for (u32 n = 0; n < rounds; n++)
		for (u32 i = 0; i < VALUES; i++) {
			v[i] = next(v[i]);
			__asm__ volatile("" : "+v"(v[i]));
		}
	u32 sum = 0;
	for (u32 i = 0; i < VALUES; i++)
		sum = fold(sum, v[i]);
	out[lane()] = sum;
}

// Accumulation registers: a value leaves its register once in a round.
KERNEL SIZE(LANES) WAVES(1) void agpr(u32 *out, u32 seed, u32 rounds) {
	u32 a[VALUES];
	for (u32 i = 0; i < VALUES; i++)
		__asm__ volatile("v_accvgpr_write_b32 %0, %1" : "=a"(a[i]) : "v"(first(seed, lane(), i)));
#pragma clang loop unroll(disable)
	for (u32 n = 0; n < rounds; n++)
		for (u32 i = 0; i < VALUES; i++) {
			u32 v;
			__asm__ volatile("v_accvgpr_read_b32 %0, %1\n\ts_nop 4" : "=v"(v) : "a"(a[i]));
			v = next(v);
			__asm__ volatile("v_accvgpr_write_b32 %0, %1\n\ts_nop 4" : "=a"(a[i]) : "v"(v));
		}
	u32 sum = 0;
	for (u32 i = 0; i < VALUES; i++) {
		u32 v;
		__asm__ volatile("v_accvgpr_read_b32 %0, %1\n\ts_nop 4" : "=v"(v) : "a"(a[i]));
		sum = fold(sum, v);
	}
	out[lane()] = sum;
}

// Matrix instructions, interrupted with partial sums: every element grows by 1 in a round,
// which is exact below 2^24.
KERNEL SIZE(LANES) WAVES(1) void mfma(u32 *out, u32 seed, u32 rounds) {
	f32x32 acc;
	for (u32 i = 0; i < 32; i++)
		acc[i] = (float)(first(seed, lane(), i) & 0xffff);
#pragma clang loop unroll(disable)
	for (u32 n = 0; n < rounds; n++)
		acc = __builtin_amdgcn_mfma_f32_32x32x1f32(1.0f, 1.0f, acc, 0, 0, 0);
	u32 sum = 0;
	for (u32 i = 0; i < 32; i++)
		sum = fold(sum, (u32)acc[i]);
	out[lane()] = sum;
}

// LDS and barriers: in a round every value moves to the next lane.
KERNEL SIZE(LANES) void lds(u32 *out, u32 seed, u32 rounds) {
	static LDS u32 words[WORDS][LANES] __attribute__((loader_uninitialized));
	u32 self = __builtin_amdgcn_workitem_id_x();
	for (u32 i = 0; i < WORDS; i++)
		words[i][self] = first(seed, lane(), i);
#pragma clang loop unroll(disable)
	for (u32 n = 0; n < rounds; n++)
		for (u32 i = 0; i < WORDS; i++) {
			__builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "workgroup");
			__builtin_amdgcn_s_barrier();
			u32 v = next(words[i][self]);
			__builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "workgroup");
			__builtin_amdgcn_s_barrier();
			words[i][(self + 1) % LANES] = v;
		}
	__builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "workgroup");
	__builtin_amdgcn_s_barrier();
	u32 sum = 0;
	for (u32 i = 0; i < WORDS; i++)
		sum = fold(sum, words[i][self]);
	out[lane()] = sum;
}

// Scratch: a value leaves its memory once in a round.
KERNEL SIZE(LANES) void scratch(u32 *out, u32 seed, u32 rounds) {
	u32 words[VALUES];
	volatile PRIVATE u32 *v = (volatile PRIVATE u32 *)words; // which stay in memory
	for (u32 i = 0; i < VALUES; i++)
		v[i] = first(seed, lane(), i);
#pragma clang loop unroll(disable)
	for (u32 n = 0; n < rounds; n++)
		for (u32 i = 0; i < VALUES; i++)
			v[i] = next(v[i]);
	u32 sum = 0;
	for (u32 i = 0; i < VALUES; i++)
		sum = fold(sum, v[i]);
	out[lane()] = sum;
}

// Waits until every workgroup has come here n times. All of them must be resident. The words of
// the workgroups are in cache lines of their own, in memory of the host: plain stores and loads
// do, so that no atomic operation has to cross the bus.
static void meet(u32 *words, u32 groups, u32 n) {
	u32 self = __builtin_amdgcn_workitem_id_x();
	__builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "");
	__builtin_amdgcn_s_barrier();
	if (self == 0)
		__scoped_atomic_store_n(words + __builtin_amdgcn_workgroup_id_x() * LINE, n, __ATOMIC_RELEASE, __MEMORY_SCOPE_SYSTEM);
	for (u32 g = self; g < groups; g += LANES)
		while (__scoped_atomic_load_n(words + g * LINE, __ATOMIC_ACQUIRE, __MEMORY_SCOPE_SYSTEM) < n)
			__builtin_amdgcn_s_sleep(1);
	__builtin_amdgcn_s_barrier();
	__builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "");
}

// A barrier across workgroups: in a round every value moves to the next workgroup.
KERNEL SIZE(LANES) void grid(u32 *out, u32 seed, u32 rounds, u32 *words, u32 groups) {
	u32 self = __builtin_amdgcn_workitem_id_x(), group = __builtin_amdgcn_workgroup_id_x();
	u32 to = (group + 1) % groups * LANES + self;
	u32 v = first(seed, lane(), 0);
#pragma clang loop unroll(disable)
	for (u32 n = 0; n < rounds; n++) {
		__scoped_atomic_store_n(out + to, next(v), __ATOMIC_RELAXED, __MEMORY_SCOPE_SYSTEM);
		meet(words, groups, 2 * n + 1);
		v = __scoped_atomic_load_n(out + lane(), __ATOMIC_RELAXED, __MEMORY_SCOPE_SYSTEM);
		meet(words, groups, 2 * n + 2);
	}
	out[lane()] = v;
}

// Reads an address.
KERNEL SIZE(64) void touch(u32 *out, u32 *at) { *out = __scoped_atomic_load_n(at, __ATOMIC_RELAXED, __MEMORY_SCOPE_SYSTEM); }

// llvm.debugtrap, which is s_trap 3, and what trapped left in s40.
KERNEL SIZE(64) void debugtrap(u32 *out) {
	u32 seen;
	__asm__ volatile("s_mov_b32 s40, 0\n\ts_trap 3\n\ts_nop 7\n\ts_mov_b32 %0, s40" : "=s"(seen) : : "s40");
	*out = 4 | seen;
}

// A second-level trap handler (cwsr_trap_handler_gfx9.asm jumps to it), which returns behind the
// s_trap with bit 0 of s40 set, and bit 1 if the driver says that the process is debugged.
__asm__(".text\n.p2align 8\n.globl trapped\n.protected trapped\n.type trapped,@function\ntrapped:\n"
#ifdef __gfx90a__
	".set saved, 11\n"
#else
	".set saved, 13\n"
#endif
	"s_bfe_u32 s40, ttmp[saved], 0x10017\n"
	"s_lshl_b32 s40, s40, 1\n"
	"s_or_b32 s40, s40, 1\n"
	"s_add_u32 ttmp0, ttmp0, 4\n"
	"s_addc_u32 ttmp1, ttmp1, 0\n"
	"s_and_b32 ttmp1, ttmp1, 0xffff\n"
	"s_lshr_b32 ttmp2, ttmp[saved], 26 - 15\n"
	"s_and_b32 ttmp2, ttmp2, 0x1f8000\n"
	"s_setreg_b32 hwreg(HW_REG_IB_STS), ttmp2\n"
	"s_and_b64 exec, exec, exec\n"
	"s_and_b64 vcc, vcc, vcc\n"
	"s_setreg_b32 hwreg(HW_REG_STATUS), ttmp12\n"
	"s_rfe_b64 [ttmp0, ttmp1]\n"
	".size trapped, . - trapped\n");
