/*
 * gpreempt.h: the client of gpreemptd in C.
 *
 * An inference server announces its work, runs it on quiet GPUs, and completes:
 *
 *	gpreempt_request_t request = { .label = "chat", .gpu_count = GPREEMPT_OWN_GPUS };
 *	gpreempt_lease_t lease;
 *	int err = gpreempt_notify_online(&request, &lease);
 *	run_inference();                    // also when err is not 0
 *	if (err == 0)
 *		gpreempt_complete(&lease);
 *
 * Link with -lgpreempt (pkg-config gpreempt).
 *
 * Address: the unix socket that GPREEMPT_SOCKET names, or
 * /run/gpreempt/gpreemptd.sock. The variable is read when the library connects; a setuid
 * program ignores it. There is no TCP: it needs TLS, which this library does not have.
 *
 * Results: 0, or a negative errno value of this table. gpreempt_last_error() returns
 * the text. A function may return another negative errno value of socket(2) or
 * connect(2).
 *
 *	-ECONNREFUSED   no daemon listens on the socket
 *	-EACCES         this user may not open the socket, or lacks the right for the call
 *	-ETIMEDOUT      the daemon did not answer in time. For 0.1 to 2 s after that, calls
 *	                except gpreempt_complete return this at once, until one has an answer
 *	-ECONNRESET     the connection broke during the call, twice
 *	-EPROTO         the answer is malformed
 *	-EMSGSIZE       the answer is larger than 64 KiB, of a list than 16 MiB
 *	-EBUSY          the daemon refuses for now: a rate or a limit is reached
 *	-ESHUTDOWN      the daemon is stopping
 *	-EINVAL         an argument is out of range
 *	-EEXIST         request_id was used for another announcement
 *	-ESTALE         the lease has ended: announce again
 *	-EPERM          the lease belongs to another process, such as the parent
 *	-ESRCH          the process is unknown or has no queues
 *	-ENOENT         the process has no queue with this id
 *	-EOPNOTSUPP     what was requested cannot be done; see the function
 *	-EINPROGRESS    the daemon continues with it; the state will change soon
 *	-EAGAIN         the daemon does not suspend now: see gpreempt_last_error()
 *	-ECANCELED      gpreempt_cleanup() was called meanwhile
 *	-EREMOTEIO      the daemon has an internal error
 *	-ENOMEM         no memory
 *
 * Time: no function blocks longer than GPREEMPT_BOUND_* says, plus the time in which
 * the calling thread does not run. While no daemon listens, functions return at once.
 *
 * Threads: all functions may be called by all threads, also at the same time. They are
 * not cancellation points, and must not be called by signal handlers. The library has no
 * thread, installs no signal handler and raises no SIGPIPE.
 *
 * fork: a child uses a connection of its own, and cannot complete a lease of its parent.
 * The library must not be used between vfork and exec.
 *
 * Leases end with the connection, so with the process too. The library has one
 * connection, which it opens when a call needs it.
 */
#ifndef GPREEMPT_H
#define GPREEMPT_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The longest duration of a call, in microseconds. */
#define GPREEMPT_BOUND_NOTIFY 100000  /* in addition to max_wait_us */
#define GPREEMPT_BOUND_LEASE 1000000  /* complete and renew */
#define GPREEMPT_BOUND_ADMIN 5000000  /* everything else */

/* The max_wait_us that is assumed for GPREEMPT_BOUND_NOTIFY when a request has none. */
#define GPREEMPT_DEFAULT_MAX_WAIT 200000
/* As gpu_count: all GPUs of the host. */
#define GPREEMPT_ALL_GPUS UINT32_MAX
/* As gpu_count: those on which this process has queues when it announces; all of the host
 * while it has none. */
#define GPREEMPT_OWN_GPUS (UINT32_MAX - 1)
/* As max_wait_us: do not wait for quiet GPUs. */
#define GPREEMPT_NO_WAIT (-1)
/* The longest ttl_us of an announcement. The daemon closes a connection on which it has
 * received nothing for 30 s, and without a thread nothing answers its pings. */
#define GPREEMPT_MAX_TTL 20000000
/* The most queue ids in one call, and one more than the largest. */
#define GPREEMPT_MAX_QUEUES 1024

/* Work to announce. Zero means the daemon's default, except in gpu_count; later versions use
 * reserved. */
typedef struct gpreempt_request {
	/* Name of the work for a person to read, at most 128 bytes; NULL for none. */
	const char *label;
	/* At most 64 bytes; the same id returns the same lease. NULL: a new lease. */
	const char *request_id;
	/* KFD gpu_ids of the GPUs that the work uses, 1 to 64; or gpu_count alone, as
	 * GPREEMPT_ALL_GPUS or GPREEMPT_OWN_GPUS. 0 is -EINVAL. */
	const uint32_t *gpu_ids;
	uint32_t gpu_count;
	/* 1..15; offline processes of lower priority are suspended. 0: 11. */
	uint32_t priority;
	/* Time after which the lease ends, to GPREEMPT_MAX_TTL. 0: the policy's. */
	int64_t ttl_us;
	/* Longest time to wait for quiet GPUs, to 10 s, or GPREEMPT_NO_WAIT. 0: the
	 * policy's. */
	int64_t max_wait_us;
	/* Time until the first packet is submitted, to 1 min; 0: unknown. */
	int64_t eta_us;
	uint64_t reserved[4];
} gpreempt_request_t;

/* Why the GPUs are or are not quiet: QuiesceReason of the API. */
enum gpreempt_reason {
	GPREEMPT_REASON_DONE = 1,
	GPREEMPT_REASON_NOTHING_TO_DO = 2,
	GPREEMPT_REASON_MAX_WAIT = 3,
	GPREEMPT_REASON_DEFERRED = 4,
	GPREEMPT_REASON_NOT_AWAITED = 5,
	GPREEMPT_REASON_SHARE_FLOOR = 6,
	GPREEMPT_REASON_UNSAFE = 7,
	GPREEMPT_REASON_SHADOW = 8,
	GPREEMPT_REASON_DRAINING = 9,
	GPREEMPT_REASON_ENDED = 10,
	GPREEMPT_REASON_HOLD = 11,
	GPREEMPT_REASON_STUCK = 12,
	GPREEMPT_REASON_DRM_QUEUES = 13,
	GPREEMPT_REASON_QUEUE_RESET = 14,
	GPREEMPT_REASON_CANNOT_SUSPEND = 15
};

/* A lease. The caller provides the memory; the library keeps no pointer to it. A lease
 * may be passed between threads, but not used by two at once. */
typedef struct gpreempt_lease {
	/* The daemon's ID, as gpctl shows it; "" when there is no lease. */
	char id[64];
	/* 1 when every offline process of lower priority on the GPUs is suspended. */
	int32_t quiet;
	/* enum gpreempt_reason; later versions may have more. */
	int32_t reason;
	/* Processes that were suspended for it. */
	uint32_t suspended;
	/* 1 when a rule makes the caller, or its workers on these GPUs, offline: this lease does
	 * not suspend them, those of others do. See the warning OWNER_OFFLINE. */
	int32_t owner_offline;
	/* Of the library. */
	int32_t owner;
	/* Granted time to live. */
	int64_t ttl_us;
	/* Of the library. */
	uint64_t connection;
} gpreempt_lease_t;

/* Classes of processes. */
enum gpreempt_class {
	GPREEMPT_CLASS_UNMANAGED = 1,
	GPREEMPT_CLASS_ONLINE = 2,
	GPREEMPT_CLASS_OFFLINE = 3
};

/* States of processes. */
enum gpreempt_state {
	GPREEMPT_STATE_RUNNING = 1,
	GPREEMPT_STATE_SUSPENDING = 2,
	GPREEMPT_STATE_SUSPENDED = 3,
	GPREEMPT_STATE_RESUMING = 4,
	GPREEMPT_STATE_QUARANTINED = 5,
	GPREEMPT_STATE_GONE = 6
};

/* A queue. */
typedef struct gpreempt_queue_info {
	/* KFD queue id, unique within the process only. */
	uint32_t queue_id;
	/* Priority of the process, 0..15. */
	uint32_t priority;
	/* KFD gpu_id. */
	uint32_t gpu_id;
	/* AMD_QUEUE_TAG in the environment of the process, cut to 63 bytes; "" when it has
	 * none, and when the process is of another user and the caller is not an admin. */
	char tag[64];
	/* 0 when its process is suspended or being resumed. Otherwise it may run. */
	int32_t is_active;
	/* In the daemon's pid namespace. */
	int32_t process_id;
	/* enum gpreempt_class and enum gpreempt_state of the process. */
	int32_t process_class;
	int32_t process_state;
	/* Priority in the driver, 0..15; -1 when it is unknown. */
	int32_t kfd_priority;
	/* Virtual address of the ring in the process, and its size; 0 when unknown. */
	uint64_t queue_address;
	uint64_t ring_bytes;
	/* "compute", "sdma", "sdma-xgmi" or "unknown". */
	char type[16];
	/* Command name of the process. */
	char comm[16];
} gpreempt_queue_info_t;

/*
 * gpreempt_init connects to the daemon. It is optional, may be repeated, and returns
 * 0 when a daemon accepted the connection. After an error the other functions may still
 * be called: each connects when it has to.
 */
int gpreempt_init(void);

/*
 * gpreempt_cleanup closes the connection, which ends all leases of the process.
 * Calls in other threads return -ECANCELED. A later call connects again.
 */
void gpreempt_cleanup(void);

/*
 * gpreempt_last_error returns why the last call of this thread failed, as
 * "REASON: text", with the reason of docs/api.md if the daemon refused; "" when it did
 * not fail. Never NULL; valid until the next call of this thread.
 */
const char *gpreempt_last_error(void);

/*
 * gpreempt_notify_online announces work and waits until the GPUs are quiet or
 * max_wait_us has passed. 0: there is a lease, and lease->quiet
 * reports whether the GPUs are quiet. Otherwise *lease is empty, and the work runs
 * beside offline work: run it anyway. -EINVAL is a mistake of the caller, with or without a
 * daemon, unless the daemon alone can see it. Each call has its own lease, of which the daemon
 * grants a process 512 at a time: a server with more requests in flight counts them itself, and
 * announces for the first and completes for the last.
 */
int gpreempt_notify_online(const gpreempt_request_t *request, gpreempt_lease_t *lease);

/*
 * gpreempt_renew sets the time to live from now, to GPREEMPT_MAX_TTL; 0: the policy's.
 * The library has no thread that renews: work that may take longer than lease->ttl_us
 * must call it. -ESTALE: the lease has ended.
 */
int gpreempt_renew(gpreempt_lease_t *lease, int64_t ttl_us);

/*
 * gpreempt_complete ends a lease. 0 also when it had ended before, as it has with its
 * connection, and for an empty lease; *lease is empty then. After an error it may be
 * called again; otherwise the lease ends with its time to live.
 */
int gpreempt_complete(gpreempt_lease_t *lease);

/*
 * Lists of queues, by process and queue id. *queues is an array of *count elements, or
 * NULL when it is empty; release it with gpreempt_free_queue_info. Needs the right to
 * read. find_queues_by_priority returns those whose process has a priority of min to max;
 * find_queues_by_tag those with exactly this tag.
 */
int gpreempt_get_all_queues(gpreempt_queue_info_t **queues, uint32_t *count);
int gpreempt_find_queues_by_priority(uint32_t min, uint32_t max, gpreempt_queue_info_t **queues, uint32_t *count);
int gpreempt_find_queues_by_process(int32_t pid, gpreempt_queue_info_t **queues, uint32_t *count);
int gpreempt_find_queues_by_tag(const char *tag, gpreempt_queue_info_t **queues, uint32_t *count);
void gpreempt_free_queue_info(gpreempt_queue_info_t *queues);

/* gpreempt_get_queue_status returns one queue. -ESRCH, -ENOENT. */
int gpreempt_get_queue_status(int32_t pid, uint32_t queue_id, gpreempt_queue_info_t *queue);

/*
 * gpreempt_suspend_process suspends all queues of an offline process, for ttl_us but at
 * most the policy's max_suspend; 0: max_suspend. It ends by itself then; a repeated call
 * sets the time again. Needs the admin right.
 *
 * ids, if not NULL, are the queues that the caller expects to suspend: all n queues of
 * the process, or nothing is suspended. -EOPNOTSUPP: they are only some of them. The unit
 * of suspending is the process, because its queues depend on each other: a copy queue
 * completes what a compute queue waits for, and ROCr's own utility queue serves both. A
 * process of which half is suspended waits for itself while it holds its GPUs, and
 * criu and the freezer cannot suspend half a process.
 *
 * -EINPROGRESS: it will be suspended soon. -EAGAIN: the daemon does not suspend it now,
 * for example while it drains. -EOPNOTSUPP also: the process is not offline.
 */
int gpreempt_suspend_process(int32_t pid, const uint32_t *ids, uint32_t n, int64_t ttl_us);

/*
 * gpreempt_resume_process ends the suspension. 0: it runs. -EBUSY: a lease keeps it
 * suspended. -EINPROGRESS: it will run soon.
 */
int gpreempt_resume_process(int32_t pid, const uint32_t *ids, uint32_t n);

#ifdef __cplusplus
}
#endif

#endif
