/*
 * What kfdclient is told and has, what it writes, and its calls of the driver.
 */
#ifndef KFDCLIENT_DRIVER_H
#define KFDCLIENT_DRIVER_H

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#if __has_include(<drm/drm.h>)
#include <linux/kfd_ioctl.h>
#else
#include "uapi.h"
#endif

#ifndef AMDKFD_IOC_RUNTIME_ENABLE /* which came with Linux 6.5 */
struct kfd_ioctl_runtime_enable_args {
	__u64 r_debug;
	__u32 mode_mask, capabilities_mask;
};
#define AMDKFD_IOC_RUNTIME_ENABLE _IOWR('K', 0x25, struct kfd_ioctl_runtime_enable_args)
#define KFD_RUNTIME_ENABLE_MODE_ENABLE_MASK 1
#define KFD_RUNTIME_ENABLE_MODE_TTMP_SAVE_MASK 2
#endif

/* CREATE_QUEUE has grown: the driver takes any size. */
_Static_assert(AMDKFD_IOC_GET_VERSION == 0x80084B01, "GET_VERSION");
_Static_assert(sizeof(struct kfd_ioctl_create_queue_args) == 88 || sizeof(struct kfd_ioctl_create_queue_args) == 96, "CREATE_QUEUE");
_Static_assert(AMDKFD_IOC_DESTROY_QUEUE == 0xC0084B03, "DESTROY_QUEUE");
_Static_assert(AMDKFD_IOC_CREATE_EVENT == 0xC0204B08, "CREATE_EVENT");
_Static_assert(AMDKFD_IOC_DESTROY_EVENT == 0x40084B09, "DESTROY_EVENT");
_Static_assert(AMDKFD_IOC_SET_EVENT == 0x40084B0A, "SET_EVENT");
_Static_assert(AMDKFD_IOC_WAIT_EVENTS == 0xC0184B0C && sizeof(struct kfd_event_data) == 48, "WAIT_EVENTS");
_Static_assert(AMDKFD_IOC_GET_PROCESS_APERTURES_NEW == 0xC0104B14 && sizeof(struct kfd_process_device_apertures) == 56, "GET_PROCESS_APERTURES_NEW");
_Static_assert(AMDKFD_IOC_ACQUIRE_VM == 0x40084B15, "ACQUIRE_VM");
_Static_assert(AMDKFD_IOC_ALLOC_MEMORY_OF_GPU == 0xC0284B16, "ALLOC_MEMORY_OF_GPU");
_Static_assert(AMDKFD_IOC_FREE_MEMORY_OF_GPU == 0x40084B17, "FREE_MEMORY_OF_GPU");
_Static_assert(AMDKFD_IOC_MAP_MEMORY_TO_GPU == 0xC0184B18, "MAP_MEMORY_TO_GPU");
_Static_assert(AMDKFD_IOC_UNMAP_MEMORY_FROM_GPU == 0xC0184B19, "UNMAP_MEMORY_FROM_GPU");
_Static_assert(AMDKFD_IOC_RUNTIME_ENABLE == 0xC0104B25, "RUNTIME_ENABLE");

/* What packages abi and kfdwork say: layouts, and how big things are. */
enum {
	PACKET = 64, SIGNAL = 64, MIX = 24,
	TYPE_INVALID = 1, TYPE_DISPATCH = 2, TYPE_BARRIER_AND = 3,
	HEADER = 1 << 8 | 2 << 9 | 2 << 11, /* the barrier bit, and fences of the system */
	SIGNAL_KIND = 0, SIGNAL_VALUE = 8, SIGNAL_MAILBOX = 16, SIGNAL_EVENT = 24, SIGNAL_USER = 1,
	OP_MIX = 1, WHOLE = 1000000,
	DOORBELLS = 8192, /* bytes a process has on a GPU */
	EVENTS = KFD_SIGNAL_EVENT_LIMIT * 8,
	MIN_SLOTS = 64, MAX_DEPTH = 4096, MAX_GPUS = 64, MAX_WORKERS = 4096, MAX_ARGS = 64, MAX_PARTS = 5,
	PAGE = 4096,
	COPY = 64 << 10, MAX_COPIES = 8, COPY_RING = 4096,
	SDMA_NOP = 0, SDMA_COPY = 1, SDMA_FENCE = 5, SDMA_TRAP = 6,
	NORMAL = 7, /* the priority ROCm's runtime gives a queue */
	STEPS = 61 * 16,
	/* Places in the memory of a queue. */
	AT_WRITE = 0, AT_READ = 128, AT_RESULT = 256, AT_KERNEL = 320, AT_EOP = 4096, AT_RING = 8192,
	AT_COPY_RING = 4096, AT_FENCES = AT_COPY_RING + COPY_RING, AT_COPIES = AT_FENCES + 4096,
};
#define SECOND 1000000000ll

struct gpu {
	uint32_t id, stack, save, debug, xccs, minor;
	bool vm; /* the process has an address space there */
	char *doorbells;
};

struct totals {
	uint64_t made, packets, count, abandoned, hash, want;
};

struct worker {
	struct gpu *gpu;
	uint64_t index, depth, slots;
	bool copies;
	uint32_t event;
	uint64_t mailbox;
	char *mem, *save;
	uint64_t handles[MAX_PARTS]; /* of the parts that are mapped on the GPU */
	int nhandles;
	size_t mem_bytes, save_bytes, at_signals, at_args, at_progress;
	uint64_t *doorbell, random;
	pthread_t thread;
	bool abandon, ended; /* guarded by all_mu, as is the list */

	/* mu guards what follows, for those who ask how it stands. It is not held while
	 * the worker waits or calls the driver. */
	pthread_mutex_t mu;
	uint32_t id;
	bool alive;
	uint64_t written;                  /* packets, or bytes of copies */
	uint64_t pushed, retired;          /* packets of the queue */
	uint64_t copied, copied_hash;      /* copies seen to be over */
	uint64_t hashes[MAX_DEPTH + 1];    /* after n packets, for the latest n */
	int64_t begun[MAX_DEPTH];
	struct totals total;               /* of the queues that are gone */
	uint64_t last, last_hash;          /* what the queue came to that is gone */
	uint64_t latency[STEPS], latencies;
};

static struct {
	uint32_t gpus[MAX_GPUS];
	int ngpus; /* 0: all */
	uint64_t queues, packets, duration, occupancy, depth;
	double rate;
	bool runtime, sdma, churn, poll;
} cfg = {.queues = 1, .depth = 4};

static int kfd = -1, wakeup[2];
static struct gpu gpus[MAX_GPUS];
static int ngpus;
static char *event_page;
static uint64_t interrupted;
static bool failed, runtime_on;

static pthread_mutex_t all_mu = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t all_cond; /* of stopping, and of the workers' abandon, ended */
static struct worker *workers[MAX_WORKERS];
static uint64_t nworkers, made_workers;
static int asked; /* commands that are being carried out */
static bool begun, stopping;

static pthread_mutex_t out_mu = PTHREAD_MUTEX_INITIALIZER, map_mu = PTHREAD_MUTEX_INITIALIZER;
static bool out_broken;

/* Memory that the GPU touches as well. */
static uint64_t get64(const char *p) { return __atomic_load_n((const uint64_t *)p, __ATOMIC_ACQUIRE); }
static uint32_t get32(const char *p) { return __atomic_load_n((const uint32_t *)p, __ATOMIC_ACQUIRE); }
static void put64(char *p, uint64_t v) { __atomic_store_n((uint64_t *)p, v, __ATOMIC_RELEASE); }
static void put32(char *p, uint32_t v) { __atomic_store_n((uint32_t *)p, v, __ATOMIC_RELEASE); }
static uint64_t addr(const char *p) { return (uint64_t)(uintptr_t)p; }

static uint64_t fold(uint64_t hash, uint64_t value) { return (hash ^ value) * 0x100000001b3ull; }

/* SplitMix64. */
#define STEP64 0x9e3779b97f4a7c15ull

static uint64_t mix64(uint64_t z)
{
	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ z >> 27) * 0x94d049bb133111ebull;
	return z ^ z >> 31;
}

static uint64_t packet_value(uint64_t worker, uint64_t n) { return mix64(((worker << 40) + n + 1) * STEP64); }

static int64_t now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * SECOND + t.tv_nsec;
}

/* What is written: one object a line, each in one piece. */

static void write_line(const char *line, size_t n)
{
	pthread_mutex_lock(&out_mu);
	while (n > 0 && !out_broken) {
		ssize_t wrote = write(STDOUT_FILENO, line, n);

		if (wrote >= 0) {
			line += wrote;
			n -= (size_t)wrote;
		} else if (errno != EINTR) {
			out_broken = true;
		}
	}
	pthread_mutex_unlock(&out_mu);
}

static void say(const char *format, ...)
{
	char *line;
	va_list args;
	int n;

	va_start(args, format);
	n = vasprintf(&line, format, args);
	va_end(args);
	if (n < 0)
		abort();
	write_line(line, (size_t)n);
	free(line);
}

/* fail says what went wrong; number is the errno, 0 for none. What is said has no
 * character that JSON would have written otherwise. */
static bool fail(int number, const char *format, ...)
{
	char what[512];
	va_list args;

	va_start(args, format);
	vsnprintf(what, sizeof what, format, args);
	va_end(args);
	if (number != 0)
		say("{\"event\":\"error\",\"errno\":%d,\"what\":\"%s: %s\"}\n", number, what, strerror(number));
	else
		say("{\"event\":\"error\",\"what\":\"%s\"}\n", what);
	return false;
}

/* wrong is fail for what contradicts the proof. */
#define wrong(...) (__atomic_store_n(&failed, true, __ATOMIC_RELAXED), fail(0, __VA_ARGS__))

/* The driver. */

static int call(unsigned long request, void *arg)
{
	int r;

	while ((r = ioctl(kfd, request, arg)) < 0 && errno == EINTR)
		__atomic_add_fetch(&interrupted, 1, __ATOMIC_RELAXED);
	return r < 0 ? errno : 0;
}

static int open_again(const char *path)
{
	int fd;

	while ((fd = open(path, O_RDWR | O_CLOEXEC)) < 0 && errno == EINTR)
		__atomic_add_fetch(&interrupted, 1, __ATOMIC_RELAXED);
	return fd;
}

/* map gives n bytes of memory which a child of fork does not get: plain, or at an
 * offset of the driver's. */
static char *map(size_t n, int fd, uint64_t offset)
{
	int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED;
	char *p = mmap(NULL, n, PROT_READ | PROT_WRITE, flags, fd, (off_t)offset);

	if (p == MAP_FAILED || madvise(p, n, MADV_DONTFORK) != 0) {
		fail(errno, "map %zu bytes", n);
		return NULL;
	}
	return p;
}

static uint32_t read_number(const char *text, const char *name)
{
	size_t n = strlen(name);

	for (const char *line = text; line != NULL && *line != 0; line = strchr(line, '\n'), line += line != NULL)
		if (strncmp(line, name, n) == 0 && line[n] == ' ')
			return (uint32_t)strtoul(line + n, NULL, 10);
	return 0;
}

static bool read_file(const char *path, char *text, size_t n)
{
	FILE *f = fopen(path, "re");
	size_t got;

	if (f == NULL)
		return false;
	got = fread(text, 1, n - 1, f);
	text[got] = 0;
	fclose(f);
	return got > 0;
}

/* debug_area is what the driver wants behind a save area for a debugger, for each XCC
 * (kfd_queue_ctx_save_restore_size). The topology does not list it. */
static uint32_t debug_area(const char *text)
{
	uint32_t per_cu = read_number(text, "simd_per_cu"), per_engine = read_number(text, "simd_arrays_per_engine"), xccs = read_number(text, "num_xcc");
	uint32_t cus = read_number(text, "simd_count") / (per_cu > 0 ? per_cu : 1) / (xccs > 0 ? xccs : 1), waves = cus * 32, most;

	if (read_number(text, "gfx_target_version") < 100100) {
		most = read_number(text, "array_count") / (per_engine > 0 ? per_engine : 1) * 512;
		waves = cus * 40 < most ? cus * 40 : most;
	}
	return (waves * 32 + 63) / 64 * 64;
}

/* describe reads what the topology says of a GPU, as far as there is one. */
static void describe(struct gpu *g)
{
	char path[128], text[4096];
	uint32_t v;

	for (int node = 0; node < 2 * MAX_GPUS; node++) {
		snprintf(path, sizeof path, "/sys/class/kfd/kfd/topology/nodes/%d/gpu_id", node);
		if (!read_file(path, text, sizeof text) || strtoul(text, NULL, 10) != g->id)
			continue;
		snprintf(path, sizeof path, "/sys/class/kfd/kfd/topology/nodes/%d/properties", node);
		if (!read_file(path, text, sizeof text))
			return;
		if ((v = read_number(text, "cwsr_size")) > 0) {
			g->save = v;
			g->debug = debug_area(text);
		}
		if ((v = read_number(text, "ctl_stack_size")) > 0)
			g->stack = v;
		if ((v = read_number(text, "num_xcc")) > 0)
			g->xccs = v;
		g->minor = read_number(text, "drm_render_minor");
		return;
	}
}

static bool acquire_vm(struct gpu *g)
{
	char path[64];
	struct kfd_ioctl_acquire_vm_args args = {.gpu_id = g->id};
	int fd, err;

	if (g->minor == 0)
		return true;
	snprintf(path, sizeof path, "/dev/dri/renderD%u", g->minor);
	if ((fd = open_again(path)) < 0)
		return errno == ENOENT || errno == ENXIO || fail(errno, "open %s", path);
	args.drm_fd = (uint32_t)fd;
	err = call(AMDKFD_IOC_ACQUIRE_VM, &args);
	close(fd);
	g->vm = err == 0;
	return g->vm || fail(err, "ACQUIRE_VM GPU %u", g->id);
}

/* map_on_gpu maps n bytes on the worker's GPU at their address in the process. Linux
 * creates a queue from 6.12 on only if each of its buffers is exactly one such mapping
 * (kfd_queue_acquire_buffers). Without an address space there it does nothing: a
 * replacement of the driver may not need it. */
static bool map_on_gpu(struct worker *w, char *p, size_t n)
{
	struct kfd_ioctl_alloc_memory_of_gpu_args alloc = {
		.va_addr = addr(p), .size = n, .mmap_offset = addr(p), .gpu_id = w->gpu->id,
		.flags = KFD_IOC_ALLOC_MEM_FLAGS_USERPTR | KFD_IOC_ALLOC_MEM_FLAGS_WRITABLE | KFD_IOC_ALLOC_MEM_FLAGS_EXECUTABLE,
	};
	struct kfd_ioctl_map_memory_to_gpu_args args = {.device_ids_array_ptr = addr((char *)&w->gpu->id), .n_devices = 1};
	int err;

	if (!w->gpu->vm)
		return true;
	if ((err = call(AMDKFD_IOC_ALLOC_MEMORY_OF_GPU, &alloc)) != 0)
		return fail(err, "ALLOC_MEMORY_OF_GPU %u", w->gpu->id);
	args.handle = w->handles[w->nhandles++] = alloc.handle;
	err = call(AMDKFD_IOC_MAP_MEMORY_TO_GPU, &args);
	return err == 0 || fail(err, "MAP_MEMORY_TO_GPU %u", w->gpu->id);
}

/* unmap_on_gpu undoes what map_on_gpu did. */
static bool unmap_on_gpu(struct worker *w)
{
	for (; w->nhandles > 0; w->nhandles--) {
		struct kfd_ioctl_unmap_memory_from_gpu_args unmap = {
			.handle = w->handles[w->nhandles - 1], .device_ids_array_ptr = addr((char *)&w->gpu->id), .n_devices = 1,
		};
		struct kfd_ioctl_free_memory_of_gpu_args release = {.handle = unmap.handle};
		int err = call(AMDKFD_IOC_UNMAP_MEMORY_FROM_GPU, &unmap);

		if (err != 0)
			return fail(err, "UNMAP_MEMORY_FROM_GPU %u", w->gpu->id);
		if ((err = call(AMDKFD_IOC_FREE_MEMORY_OF_GPU, &release)) != 0)
			return fail(err, "FREE_MEMORY_OF_GPU %u", w->gpu->id);
	}
	return true;
}

static bool wanted(uint32_t id)
{
	for (int i = 0; i < cfg.ngpus; i++)
		if (cfg.gpus[i] == id)
			return true;
	return cfg.ngpus == 0;
}

static bool find_gpus(void)
{
	struct kfd_process_device_apertures all[MAX_GPUS] = {0};
	struct kfd_ioctl_get_process_apertures_new_args args = {.num_of_nodes = 0};
	int err = call(AMDKFD_IOC_GET_PROCESS_APERTURES_NEW, &args);

	if (err == 0) {
		args.kfd_process_device_apertures_ptr = addr((char *)all);
		args.num_of_nodes = args.num_of_nodes < MAX_GPUS ? args.num_of_nodes : MAX_GPUS;
		err = call(AMDKFD_IOC_GET_PROCESS_APERTURES_NEW, &args);
	}
	if (err != 0)
		return fail(err, "GET_PROCESS_APERTURES_NEW");
	for (uint32_t i = 0; i < args.num_of_nodes; i++) {
		if (!wanted(all[i].gpu_id))
			continue;
		gpus[ngpus] = (struct gpu){.id = all[i].gpu_id, .stack = 4096, .save = 1 << 20, .debug = 1 << 19, .xccs = 1};
		describe(&gpus[ngpus]);
		ngpus++;
	}
	if (ngpus == 0 || ngpus < cfg.ngpus)
		return fail(0, "this process sees %d of the GPUs it is to work on", ngpus);
	return true;
}

static bool set_runtime(bool on)
{
	struct kfd_ioctl_runtime_enable_args args = {0};
	int err;

	if (on)
		args.mode_mask = KFD_RUNTIME_ENABLE_MODE_ENABLE_MASK | KFD_RUNTIME_ENABLE_MODE_TTMP_SAVE_MASK;
	if ((err = call(AMDKFD_IOC_RUNTIME_ENABLE, &args)) != 0)
		return fail(err, "RUNTIME_ENABLE");
	runtime_on = on;
	return true;
}

static bool create_event(struct worker *w)
{
	struct kfd_ioctl_create_event_args args = {.event_type = KFD_IOC_EVENT_SIGNAL, .auto_reset = 1};
	int err = call(AMDKFD_IOC_CREATE_EVENT, &args);

	if (err != 0)
		return fail(err, "CREATE_EVENT");
	pthread_mutex_lock(&map_mu);
	if (event_page == NULL)
		event_page = map(EVENTS, kfd, args.event_page_offset);
	pthread_mutex_unlock(&map_mu);
	if (event_page == NULL)
		return false;
	w->event = args.event_id;
	w->mailbox = addr(event_page + 8 * args.event_slot_index);
	return true;
}

static bool raise_event(struct worker *w)
{
	struct kfd_ioctl_set_event_args args = {.event_id = w->event};
	int err = call(AMDKFD_IOC_SET_EVENT, &args);

	return err == 0 || fail(err, "SET_EVENT");
}

/* wait_event waits for the event, at most about ns. It tells in *raised whether it was
 * raised. */
static bool wait_event(struct worker *w, int64_t ns, bool *raised)
{
	struct kfd_event_data data = {.event_id = w->event};
	struct kfd_ioctl_wait_events_args args = {
		.events_ptr = addr((char *)&data), .num_events = 1, .timeout = (uint32_t)((ns + 999999) / 1000000),
	};
	int err = call(AMDKFD_IOC_WAIT_EVENTS, &args);

	*raised = args.wait_result != KFD_IOC_WAIT_RESULT_TIMEOUT;
	return err == 0 || fail(err, "WAIT_EVENTS");
}

#endif
