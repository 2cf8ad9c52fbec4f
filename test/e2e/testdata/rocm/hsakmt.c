/*
 * A program on libhsakmt, the library below ROCm's runtime: it looks at the machine,
 * makes events, memory and a queue, and has the GPU execute packets, for the emulated
 * machine. It writes a line for each thing it did, and ends with status 1 at the first
 * that went wrong. Build it with:
 *
 *	cc -O2 -Wall -Wextra -Werror -o hsakmt hsakmt.c -lhsakmt
 */
#include <hsakmt.h>
#include <stdio.h>
#include <stdlib.h>

#include "kernel.h"

enum {
	PAGE = 4096,
	RING = 65536, /* bytes */
	PACKETS = 1500, /* more than the ring holds */
	PATIENCE = 30000, /* milliseconds */
	NODES = 16,
};

/* The parts of AQL that are needed (hsa.h, amd_hsa_signal.h). */
struct signal {
	int64_t kind;
	volatile int64_t value;
	uint64_t mailbox;
	uint32_t event, pad;
	uint64_t start, end, reserved[2];
};

struct packet {
	uint16_t header, setup, workgroup[3], reserved0;
	uint32_t grid[3], private_bytes, group_bytes;
	uint64_t kernel, kernarg, reserved2, completion;
};

enum {
	INVALID = 1,
	DISPATCH = 2,
	BARRIER = 1 << 8,
	SYSTEM_FENCES = 2 << 9 | 2 << 11,
	USER_SIGNAL = 1,
};

#define CHECK(call)                                                   \
	do {                                                          \
		HSAKMT_STATUS status = (call);                        \
		if (status != HSAKMT_STATUS_SUCCESS) {                \
			printf("%s: status %d\n", #call, status);     \
			exit(1);                                      \
		}                                                     \
	} while (0)

#define WANT(cond)                                                    \
	do {                                                          \
		if (!(cond)) {                                        \
			printf("line %d: not so: %s\n", __LINE__, #cond); \
			exit(1);                                      \
		}                                                     \
	} while (0)

static HSAuint32 gpu; /* a node */

static void look(void)
{
	HsaVersionInfo version;
	HsaSystemProperties system;
	HsaClockCounters before, after;
	HSAuint32 gpus = 0;

	CHECK(hsaKmtGetVersion(&version));
	printf("version %u.%u\n", version.KernelInterfaceMajorVersion, version.KernelInterfaceMinorVersion);
	CHECK(hsaKmtAcquireSystemProperties(&system));
	for (HSAuint32 node = 0; node < system.NumNodes; node++) {
		HsaNodeProperties p;
		HsaMemoryProperties banks[NODES];

		CHECK(hsaKmtGetNodeProperties(node, &p));
		WANT(p.NumMemoryBanks <= NODES);
		CHECK(hsaKmtGetNodeMemoryProperties(node, p.NumMemoryBanks, banks));
		if (p.NumFComputeCores == 0) {
			WANT(p.NumCPUCores > 0);
			continue;
		}
		gpu = node;
		gpus++;
		printf("gpu gfx%u%u%x %u SIMDs, %u copy engines\n", p.EngineId.ui32.Major, p.EngineId.ui32.Minor, p.EngineId.ui32.Stepping,
			p.NumFComputeCores, p.NumSdmaEngines + p.NumSdmaXgmiEngines);
	}
	printf("gpus %u\n", gpus);
	WANT(gpus > 0);
	CHECK(hsaKmtGetClockCounters(gpu, &before));
	CHECK(hsaKmtGetClockCounters(gpu, &after));
	WANT(after.GPUClockCounter >= before.GPUClockCounter && after.SystemClockCounter >= before.SystemClockCounter);
}

static HsaEvent *event(bool manual)
{
	HsaEventDescriptor d = {.EventType = HSA_EVENTTYPE_SIGNAL, .NodeId = gpu};
	HsaEvent *e;

	CHECK(hsaKmtCreateEvent(&d, manual, false, &e));
	return e;
}

static void events(void)
{
	HsaEvent *e[2] = {event(true), event(false)};

	WANT(hsaKmtWaitOnEvent(e[0], 0) == HSAKMT_STATUS_WAIT_TIMEOUT);
	CHECK(hsaKmtSetEvent(e[0]));
	CHECK(hsaKmtWaitOnEvent(e[0], PATIENCE));
	CHECK(hsaKmtWaitOnEvent(e[0], PATIENCE)); /* it stays */
	WANT(hsaKmtWaitOnMultipleEvents(e, 2, true, 0) == HSAKMT_STATUS_WAIT_TIMEOUT);
	CHECK(hsaKmtSetEvent(e[1]));
	CHECK(hsaKmtWaitOnMultipleEvents(e, 2, true, PATIENCE));
	WANT(hsaKmtWaitOnEvent(e[1], 0) == HSAKMT_STATUS_WAIT_TIMEOUT); /* it does not */
	CHECK(hsaKmtResetEvent(e[0]));
	WANT(hsaKmtWaitOnEvent(e[0], 0) == HSAKMT_STATUS_WAIT_TIMEOUT);
	CHECK(hsaKmtDestroyEvent(e[0]));
	CHECK(hsaKmtDestroyEvent(e[1]));
	printf("events\n");
}

/* memory gives memory of a node that the host reaches, and GPUs. */
static void *memory(HSAuint32 node, HSAuint64 bytes)
{
	HsaMemFlags flags = {.ui32 = {.NonPaged = node == gpu, .PageSize = HSA_PAGE_SIZE_4KB, .HostAccess = 1, .ExecuteAccess = 1}};
	HSAuint64 va;
	void *p;

	CHECK(hsaKmtAllocMemory(node, bytes, flags, &p));
	CHECK(hsaKmtMapMemoryToGPU(p, bytes, &va));
	memset(p, 0, bytes);
	return p;
}

static void release(void *p, HSAuint64 bytes)
{
	CHECK(hsaKmtUnmapMemoryToGPU(p));
	CHECK(hsaKmtFreeMemory(p, bytes));
}

static void queue(void)
{
	enum { SLOTS = RING / sizeof(struct packet), ARGS = SLOTS * sizeof(struct mix), SIGNALS = SLOTS * sizeof(struct signal) };
	struct packet *ring = memory(0, RING);
	volatile uint64_t *indexes = memory(0, PAGE); /* write, read */
	struct kernel *kernel = memory(gpu, PAGE);
	struct mix *args = memory(0, ARGS);
	struct signal *signals = memory(0, SIGNALS);
	struct result *result = memory(gpu, PAGE);
	HsaEvent *done = event(false);
	HsaQueueResource q = {.Queue_write_ptr_aql = (HSAuint64 *)&indexes[0], .Queue_read_ptr_aql = (HSAuint64 *)&indexes[1]};
	uint64_t want = 0;

	make_kernel(kernel, 20000);
	for (int i = 0; i < SLOTS; i++)
		ring[i].header = INVALID;
	CHECK(hsaKmtCreateQueue(gpu, HSA_QUEUE_COMPUTE_AQL, 100, HSA_QUEUE_PRIORITY_NORMAL, ring, RING, NULL, &q));
	printf("queue\n");
	for (uint64_t n = 0; n < PACKETS; n++) {
		struct packet *p = &ring[n % SLOTS];
		struct signal *s = &signals[n % SLOTS];

		while (n >= SLOTS && s->value != 0)
			hsaKmtWaitOnEvent(done, 1); /* of any packet */
		WANT(p->header == INVALID);
		*s = (struct signal){.kind = USER_SIGNAL, .value = 1, .mailbox = done->EventData.HWData2, .event = done->EventId};
		args[n % SLOTS] = (struct mix){.result = (uint64_t)result, .value = n};
		want = mixed(want, n);
		*p = (struct packet){
			.header = INVALID, .setup = 1, .workgroup = {1, 1, 1}, .grid = {1, 1, 1},
			.kernel = (uint64_t)kernel, .kernarg = (uint64_t)&args[n % SLOTS], .completion = (uint64_t)s,
		};
		__atomic_store_n(&p->header, DISPATCH | BARRIER | SYSTEM_FENCES, __ATOMIC_RELEASE);
		__atomic_store_n(&indexes[0], n + 1, __ATOMIC_RELEASE);
		__atomic_store_n(q.Queue_DoorBell_aql, n, __ATOMIC_RELEASE);
	}
	/* What an event tells of is not always the last packet. */
	for (int i = 0; signals[(PACKETS - 1) % SLOTS].value != 0; i++) {
		HSAKMT_STATUS status = hsaKmtWaitOnEvent(done, PATIENCE);

		WANT(status == HSAKMT_STATUS_SUCCESS && i < PACKETS);
	}
	WANT(result->count == PACKETS && result->hash == want);
	WANT(indexes[1] == PACKETS);
	printf("packets %lu\n", result->count);
	CHECK(hsaKmtDestroyQueue(q.QueueId));
	CHECK(hsaKmtDestroyEvent(done));
	release(ring, RING);
	release((void *)indexes, PAGE);
	release(kernel, PAGE);
	release(args, ARGS);
	release(signals, SIGNALS);
	release(result, PAGE);
}

int main(void)
{
	setvbuf(stdout, NULL, _IOLBF, 0);
	CHECK(hsaKmtOpenKFD());
	look();
	events();
	queue();
	CHECK(hsaKmtReleaseSystemProperties());
	CHECK(hsaKmtCloseKFD());
	printf("done\n");
	return 0;
}
