/*
 * A program on ROCm's runtime (ROCr), for the emulated machine: it makes queues, waits
 * for a barrier on each, then has the GPU execute kernels on all until it is told to
 * stop, and proves that each ran exactly once and in order. It takes kfdclient's flag
 * --runtime and its commands "report" and "stop", and answers as that does. Build it with:
 *
 *	cc -O2 -Wall -Wextra -Werror -pthread -o hsa hsa.c -lhsa-runtime64
 */
#include <errno.h>
#include <fcntl.h>
#include <hsa/hsa.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "kernel.h"

enum { QUEUES = 2, SLOTS = 64, DEPTH = 4, NANOSECONDS = 500000 };

static void fail(const char *what, hsa_status_t status)
{
	const char *why = "";

	hsa_status_string(status, &why);
	printf("{\"event\":\"error\",\"what\":\"%s: %s\"}\n", what, why);
	exit(1);
}

#define CHECK(call)                                                   \
	do {                                                          \
		hsa_status_t status = (call);                         \
		if (status != HSA_STATUS_SUCCESS)                     \
			fail(#call, status);                          \
	} while (0)

struct worker {
	pthread_t thread;
	hsa_queue_t *queue;
	hsa_signal_t signals[DEPTH];
	struct kernel *kernel;
	struct mix *args; /* DEPTH of them */
	struct result *result;
	uint64_t packets, hash; /* that is expected */
};

static hsa_agent_t gpu, cpu;
static hsa_region_t region;
static bool stop;

static hsa_status_t see_agent(hsa_agent_t agent, void *unused)
{
	hsa_device_type_t type;

	(void)unused;
	CHECK(hsa_agent_get_info(agent, HSA_AGENT_INFO_DEVICE, &type));
	if (type == HSA_DEVICE_TYPE_GPU)
		gpu = agent;
	else
		cpu = agent;
	return HSA_STATUS_SUCCESS;
}

/* see_region finds memory that host and GPU share. */
static hsa_status_t see_region(hsa_region_t r, void *unused)
{
	hsa_region_segment_t segment;
	hsa_region_global_flag_t flags;

	(void)unused;
	CHECK(hsa_region_get_info(r, HSA_REGION_INFO_SEGMENT, &segment));
	if (segment != HSA_REGION_SEGMENT_GLOBAL)
		return HSA_STATUS_SUCCESS;
	CHECK(hsa_region_get_info(r, HSA_REGION_INFO_GLOBAL_FLAGS, &flags));
	if (flags & HSA_REGION_GLOBAL_FLAG_KERNARG)
		region = r;
	return HSA_STATUS_SUCCESS;
}

/* submit gives the next packet to the GPU: all but its first word is in p. */
static void submit(hsa_queue_t *q, const hsa_kernel_dispatch_packet_t *p, uint16_t type)
{
	uint64_t n = hsa_queue_add_write_index_relaxed(q, 1);
	hsa_kernel_dispatch_packet_t *slot = (hsa_kernel_dispatch_packet_t *)q->base_address + n % q->size;
	uint32_t first = type << HSA_PACKET_HEADER_TYPE | 1 << HSA_PACKET_HEADER_BARRIER |
		HSA_FENCE_SCOPE_SYSTEM << HSA_PACKET_HEADER_SCACQUIRE_FENCE_SCOPE |
		HSA_FENCE_SCOPE_SYSTEM << HSA_PACKET_HEADER_SCRELEASE_FENCE_SCOPE | (uint32_t)p->setup << 16;

	memcpy((char *)slot + 4, (const char *)p + 4, sizeof *p - 4);
	__atomic_store_n((uint32_t *)slot, first, __ATOMIC_RELEASE);
	hsa_signal_store_screlease(q->doorbell_signal, n);
}

static void await(hsa_signal_t s)
{
	while (hsa_signal_wait_scacquire(s, HSA_SIGNAL_CONDITION_LT, 1, UINT64_MAX, HSA_WAIT_STATE_BLOCKED) > 0)
		;
}

/* work keeps DEPTH kernels on the queue. */
static void *work(void *arg)
{
	struct worker *w = arg;

	for (uint64_t n = 0;; n++) {
		hsa_signal_t s = w->signals[n % DEPTH];

		await(s); /* of the packet DEPTH before */
		if (__atomic_load_n(&stop, __ATOMIC_RELAXED))
			break;
		hsa_signal_store_relaxed(s, 1);
		w->args[n % DEPTH] = (struct mix){.result = (uint64_t)w->result, .value = n};
		submit(w->queue, &(hsa_kernel_dispatch_packet_t){
			.setup = 1, .workgroup_size_x = 1, .workgroup_size_y = 1, .workgroup_size_z = 1,
			.grid_size_x = 1, .grid_size_y = 1, .grid_size_z = 1,
			.kernel_object = (uint64_t)w->kernel, .kernarg_address = &w->args[n % DEPTH], .completion_signal = s,
		}, HSA_PACKET_TYPE_KERNEL_DISPATCH);
		w->hash = mixed(w->hash, n);
		w->packets++;
	}
	for (int i = 0; i < DEPTH; i++)
		await(w->signals[i]);
	return NULL;
}

/* enable_runtime does what the runtime does since ROCm 6: without it nobody can suspend
 * the queues. Debian's 5.2.3 asks with a request of an older debugger (0x82), which no
 * driver of Linux's knows. */
static void enable_runtime(void)
{
	struct {
		uint64_t r_debug;
		uint32_t mode, capabilities;
	} args = {.mode = 1}; /* KFD_RUNTIME_ENABLE_MODE_ENABLE_MASK */
	int kfd = open("/dev/kfd", O_RDWR | O_CLOEXEC);

	if (ioctl(kfd, _IOWR('K', 0x25, args), &args) == 0 || errno == EBUSY) /* busy: it is done */
		return;
	printf("{\"event\":\"error\",\"what\":\"AMDKFD_IOC_RUNTIME_ENABLE\",\"errno\":%d}\n", errno);
	exit(1);
}

static void start(struct worker *w)
{
	hsa_signal_t barrier;
	hsa_barrier_and_packet_t p = {0};
	char *memory;

	CHECK(hsa_queue_create(gpu, SLOTS, HSA_QUEUE_TYPE_MULTI, NULL, NULL, UINT32_MAX, UINT32_MAX, &w->queue));
	CHECK(hsa_signal_create(1, 0, NULL, &barrier));
	p.completion_signal = barrier;
	submit(w->queue, (hsa_kernel_dispatch_packet_t *)&p, HSA_PACKET_TYPE_BARRIER_AND);
	await(barrier);
	CHECK(hsa_signal_destroy(barrier));

	CHECK(hsa_memory_allocate(region, 4096, (void **)&memory));
	memset(memory, 0, 4096);
	w->kernel = (struct kernel *)memory;
	w->result = (struct result *)(memory + 256);
	w->args = (struct mix *)(memory + 512);
	make_kernel(w->kernel, NANOSECONDS);
	for (int i = 0; i < DEPTH; i++)
		CHECK(hsa_signal_create(0, 0, NULL, &w->signals[i]));
	if (pthread_create(&w->thread, NULL, work, w) != 0)
		abort();
}

static void end(struct worker *w)
{
	pthread_join(w->thread, NULL);
	CHECK(hsa_queue_destroy(w->queue));
	for (int i = 0; i < DEPTH; i++)
		CHECK(hsa_signal_destroy(w->signals[i]));
}

int main(int argc, char **argv)
{
	static struct worker workers[QUEUES];
	char line[64];
	uint64_t packets = 0, count = 0;
	bool ok = true;

	setvbuf(stdout, NULL, _IOLBF, 0);
	CHECK(hsa_init());
	if (argc > 1 && strcmp(argv[1], "--runtime") == 0)
		enable_runtime();
	CHECK(hsa_iterate_agents(see_agent, NULL));
	if (gpu.handle == 0)
		fail("looking for a GPU", HSA_STATUS_ERROR_INVALID_AGENT);
	CHECK(hsa_agent_iterate_regions(cpu, see_region, NULL));
	for (int i = 0; i < QUEUES; i++)
		start(&workers[i]);
	printf("{\"event\":\"ready\",\"pid\":%d}\n", getpid());
	while (fgets(line, sizeof line, stdin) != NULL && strcmp(line, "stop\n") != 0) {
		count = 0;
		for (int i = 0; i < QUEUES; i++)
			count += workers[i].result->count;
		printf("{\"event\":\"report\",\"count\":%lu}\n", count);
	}
	__atomic_store_n(&stop, true, __ATOMIC_RELAXED);
	count = 0;
	for (int i = 0; i < QUEUES; i++) {
		struct worker *w = &workers[i];

		end(w);
		packets += w->packets;
		count += w->result->count;
		ok = ok && w->result->count == w->packets && w->result->hash == w->hash;
		CHECK(hsa_memory_free(w->kernel));
	}
	CHECK(hsa_shut_down());
	printf("{\"event\":\"done\",\"packets\":%lu,\"count\":%lu,\"ok\":%s}\n", packets, count, ok ? "true" : "false");
	return ok ? 0 : 1;
}
