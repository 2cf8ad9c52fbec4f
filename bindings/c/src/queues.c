/* Queues, and the suspending of processes by admins. */
#include <errno.h>
#include <pb_decode.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpreempt/v1/admin.pb.h"
#include "internal.h"

#define SERVICE "/gpreempt.v1.AdminService/"
#define CALL(method, max) { .path = SERVICE method, .limit = (max), .bound_us = GPREEMPT_BOUND_ADMIN }
#define TAG "AMD_QUEUE_TAG"
/* The most queues in a list: 64 processes with as many as the driver permits. */
#define MAX_LIST 65536

/* What to list. Zero: all. */
struct filter {
	int32_t pid;
	gpreempt_v1_Class process_class;
	uint32_t min_priority, max_priority;
	bool tags;       /* set the tags */
	const char *tag; /* only these */
};

struct list {
	gpreempt_queue_info_t *queues;
	size_t count, capacity;
	const struct filter *filter;
	int err;
};

static void cut(char *to, size_t room, const char *from)
{
	size_t n = strlen(from);

	if (n >= room)
		n = room - 1;
	memcpy(to, from, n);
	to[n] = 0;
}

/* on_queue is called for each queue of an answer. */
static bool on_queue(pb_istream_t *stream, const pb_field_t *field, void **arg)
{
	gpreempt_v1_Queue m = gpreempt_v1_Queue_init_zero;
	struct list *l = *arg;
	gpreempt_queue_info_t *q;

	(void)field;
	if (!pb_decode(stream, gpreempt_v1_Queue_fields, &m))
		return false;
	if (m.priority < l->filter->min_priority || m.priority > l->filter->max_priority)
		return true;
	if (l->count == l->capacity) {
		size_t capacity = l->capacity == 0 ? 16 : l->capacity * 2;
		gpreempt_queue_info_t *grown = capacity > MAX_LIST ? NULL : realloc(l->queues, capacity * sizeof(*grown));

		if (grown == NULL) {
			l->err = capacity > MAX_LIST ? -EMSGSIZE : -ENOMEM;
			return false;
		}
		l->queues = grown;
		l->capacity = capacity;
	}
	q = &l->queues[l->count++];
	memset(q, 0, sizeof(*q));
	q->queue_id = m.queue_id;
	q->priority = m.priority;
	q->gpu_id = m.gpu_id;
	q->is_active = m.state != gpreempt_v1_TargetState_TARGET_STATE_SUSPENDED &&
		       m.state != gpreempt_v1_TargetState_TARGET_STATE_RESUMING && m.state != gpreempt_v1_TargetState_TARGET_STATE_GONE;
	q->process_id = m.pid;
	q->process_class = (int32_t)m.class;
	q->process_state = (int32_t)m.state;
	q->kfd_priority = m.has_kfd_priority ? (int32_t)m.kfd_priority : -1;
	q->queue_address = m.ring_address;
	q->ring_bytes = m.ring_bytes;
	cut(q->type, sizeof(q->type), m.type);
	cut(q->comm, sizeof(q->comm), m.comm);
	return true;
}

static int by_process_and_id(const void *a, const void *b)
{
	const gpreempt_queue_info_t *x = a, *y = b;

	if (x->process_id != y->process_id)
		return x->process_id < y->process_id ? -1 : 1;
	return x->queue_id < y->queue_id ? -1 : x->queue_id > y->queue_id;
}

/* first returns the first queue of a process in a sorted list, or the end. */
static size_t first(const struct list *l, int32_t pid)
{
	size_t low = 0, high = l->count;

	while (low < high) {
		size_t middle = low + (high - low) / 2;

		if (l->queues[middle].process_id < pid)
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}

/* on_text keeps the beginning of a string. */
static bool on_text(pb_istream_t *stream, const pb_field_t *field, void **arg)
{
	char *to = *arg;
	size_t n = stream->bytes_left < 63 ? stream->bytes_left : 63;

	(void)field;
	if (!pb_read(stream, (pb_byte_t *)to, n))
		return false;
	to[n] = 0;
	return pb_read(stream, NULL, stream->bytes_left);
}

/* on_variable is called for each variable of the environment of a target. */
static bool on_variable(pb_istream_t *stream, const pb_field_t *field, void **arg)
{
	gpreempt_v1_Target_EnvironmentEntry m = gpreempt_v1_Target_EnvironmentEntry_init_zero;
	char key[64] = "", value[64] = "";

	(void)field;
	m.key.funcs.decode = m.value.funcs.decode = on_text;
	m.key.arg = key;
	m.value.arg = value;
	if (!pb_decode(stream, gpreempt_v1_Target_EnvironmentEntry_fields, &m))
		return false;
	if (strcmp(key, TAG) == 0)
		strcpy(*arg, value);
	return true;
}

/* on_target is called for each target of an answer. */
static bool on_target(pb_istream_t *stream, const pb_field_t *field, void **arg)
{
	gpreempt_v1_Target m = gpreempt_v1_Target_init_zero;
	struct list *l = *arg;
	char tag[64] = "";

	(void)field;
	m.environment.funcs.decode = on_variable;
	m.environment.arg = tag;
	if (!pb_decode(stream, gpreempt_v1_Target_fields, &m))
		return false;
	for (size_t i = first(l, m.pid); i < l->count && l->queues[i].process_id == m.pid; i++)
		strcpy(l->queues[i].tag, tag);
	return true;
}

static int set_tags(struct list *l)
{
	gpreempt_v1_ListTargetsRequest request = gpreempt_v1_ListTargetsRequest_init_zero;
	gpreempt_v1_ListTargetsResponse answer = gpreempt_v1_ListTargetsResponse_init_zero;
	struct gp_call call = CALL("ListTargets", GP_LIST_ANSWER);
	size_t kept = 0;
	int err;

	answer.targets.funcs.decode = on_target;
	answer.targets.arg = l;
	err = gp_rpc(&call, (struct gp_message){ gpreempt_v1_ListTargetsRequest_fields, &request },
		     (struct gp_message){ gpreempt_v1_ListTargetsResponse_fields, &answer });
	if (err != 0 || l->filter->tag == NULL)
		return err;
	for (size_t i = 0; i < l->count; i++)
		if (strcmp(l->queues[i].tag, l->filter->tag) == 0)
			l->queues[kept++] = l->queues[i];
	l->count = kept;
	return 0;
}

/* list sets l to the queues of a filter, by process and id. */
static int list(struct list *l, const struct filter *f)
{
	gpreempt_v1_ListQueuesRequest request = gpreempt_v1_ListQueuesRequest_init_zero;
	gpreempt_v1_ListQueuesResponse answer = gpreempt_v1_ListQueuesResponse_init_zero;
	struct gp_call call = CALL("ListQueues", GP_LIST_ANSWER);
	int err;

	*l = (struct list){ .filter = f };
	request.class = f->process_class;
	if (f->pid != 0)
		snprintf(request.target_id, sizeof(request.target_id), "%d", f->pid);
	answer.queues.funcs.decode = on_queue;
	answer.queues.arg = l;
	err = gp_rpc(&call, (struct gp_message){ gpreempt_v1_ListQueuesRequest_fields, &request },
		     (struct gp_message){ gpreempt_v1_ListQueuesResponse_fields, &answer });
	if (l->err != 0)
		err = gp_fail(l->err, "there are more than %d queues, or no memory", MAX_LIST);
	if (err == 0 && l->count > 0) {
		qsort(l->queues, l->count, sizeof(*l->queues), by_process_and_id);
		if (f->tags)
			err = set_tags(l);
	}
	if (err != 0 || l->count == 0) {
		free(l->queues);
		l->queues = NULL;
		l->count = 0;
	}
	return err;
}

static int find(const struct filter *f, gpreempt_queue_info_t **queues, uint32_t *count)
{
	struct list l;
	int err;

	gp_clear_error();
	if (queues == NULL || count == NULL)
		return gp_fail(-EINVAL, "queues or count is NULL");
	*queues = NULL;
	*count = 0;
	err = list(&l, f);
	if (err == 0) {
		*queues = l.queues;
		*count = (uint32_t)l.count;
	}
	return err;
}

int gpreempt_get_all_queues(gpreempt_queue_info_t **queues, uint32_t *count)
{
	return find(&(struct filter){ .max_priority = UINT32_MAX, .tags = true }, queues, count);
}

int gpreempt_find_queues_by_priority(uint32_t min, uint32_t max, gpreempt_queue_info_t **queues, uint32_t *count)
{
	return find(&(struct filter){ .min_priority = min, .max_priority = max, .tags = true }, queues, count);
}

static int check_pid(int32_t pid)
{
	return pid > 0 ? 0 : gp_fail(-EINVAL, "pid %d is not above 0", pid);
}

int gpreempt_find_queues_by_process(int32_t pid, gpreempt_queue_info_t **queues, uint32_t *count)
{
	int err = check_pid(pid);

	return err != 0 ? err : find(&(struct filter){ .pid = pid, .max_priority = UINT32_MAX, .tags = true }, queues, count);
}

int gpreempt_find_queues_by_tag(const char *tag, gpreempt_queue_info_t **queues, uint32_t *count)
{
	if (tag == NULL || *tag == 0)
		return gp_fail(-EINVAL, "tag is empty");
	return find(&(struct filter){ .max_priority = UINT32_MAX, .tags = true, .tag = tag }, queues, count);
}

void gpreempt_free_queue_info(gpreempt_queue_info_t *queues) { free(queues); }

int gpreempt_get_queue_status(int32_t pid, uint32_t queue_id, gpreempt_queue_info_t *queue)
{
	gpreempt_queue_info_t *queues;
	uint32_t count;
	int err;

	if (queue == NULL)
		return gp_fail(-EINVAL, "queue is NULL");
	memset(queue, 0, sizeof(*queue));
	err = gpreempt_find_queues_by_process(pid, &queues, &count);
	if (err != 0)
		return err;
	err = count == 0 ? gp_fail(-ESRCH, "process %d has no queues", pid) :
			   gp_fail(-ENOENT, "process %d has no queue %u", pid, queue_id);
	for (uint32_t i = 0; i < count; i++) {
		if (queues[i].queue_id == queue_id) {
			*queue = queues[i];
			gp_clear_error();
			err = 0;
			break;
		}
	}
	free(queues);
	return err;
}

static int by_value(const void *a, const void *b)
{
	uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

	return x < y ? -1 : x > y;
}

/* resolve finds the one process that has all these queues, and no other queue. pid 0:
 * among offline processes. */
static int resolve(int32_t pid, const uint32_t *ids, uint32_t n, int32_t *found)
{
	const struct filter f = {
		.pid = pid, .max_priority = UINT32_MAX,
		.process_class = pid == 0 ? gpreempt_v1_Class_CLASS_OFFLINE : gpreempt_v1_Class_CLASS_UNSPECIFIED,
	};
	uint32_t wanted[GPREEMPT_MAX_QUEUES];
	uint32_t unique = 0, whole = 0, part = 0;
	struct list l;
	int err;

	if (ids == NULL || n == 0 || n > GPREEMPT_MAX_QUEUES)
		return gp_fail(-EINVAL, "%u queue ids: use 1 to %d", n, GPREEMPT_MAX_QUEUES);
	memcpy(wanted, ids, n * sizeof(*ids));
	qsort(wanted, n, sizeof(*wanted), by_value);
	for (uint32_t i = 0; i < n; i++)
		if (i == 0 || wanted[i] != wanted[i - 1])
			wanted[unique++] = wanted[i];

	err = list(&l, &f);
	if (err != 0)
		return err;
	for (size_t begin = 0, end; begin < l.count; begin = end) {
		uint32_t has = 0; /* of the wanted ones; both lists are sorted */

		for (end = begin; end < l.count && l.queues[end].process_id == l.queues[begin].process_id; end++)
			if (has < unique && l.queues[end].queue_id == wanted[has])
				has++;
		if (has < unique)
			continue;
		part++;
		if (end - begin == unique) {
			whole++;
			*found = l.queues[begin].process_id;
		}
	}
	err = 0;
	if (pid != 0 && l.count == 0)
		err = gp_fail(-ESRCH, "process %d has no queues", pid);
	else if (part == 0)
		err = gp_fail(-ENOENT, "no %s has all of these %u queues", pid != 0 ? "such process" : "offline process", unique);
	else if (part > 1)
		err = gp_fail(-ENOTUNIQ, "%u processes have queues with these ids: use gpreempt_suspend_process or gpreempt_resume_process", part);
	else if (whole == 0)
		err = gp_fail(-EOPNOTSUPP, "the process has more queues than these %u: it is suspended and resumed as a whole", unique);
	free(l.queues);
	return err;
}

/* max_suspend reads the policy. */
static int max_suspend(int64_t *us)
{
	gpreempt_v1_GetPolicyRequest request = gpreempt_v1_GetPolicyRequest_init_zero;
	gpreempt_v1_GetPolicyResponse answer = gpreempt_v1_GetPolicyResponse_init_zero;
	struct gp_call call = CALL("GetPolicy", GP_SMALL_ANSWER);
	int err = gp_rpc(&call, (struct gp_message){ gpreempt_v1_GetPolicyRequest_fields, &request },
			 (struct gp_message){ gpreempt_v1_GetPolicyResponse_fields, &answer });

	*us = gp_microseconds(&answer.policy.max_suspend);
	return err;
}

static int suspend_target(int32_t pid, int64_t ttl_us)
{
	gpreempt_v1_SuspendTargetRequest request = gpreempt_v1_SuspendTargetRequest_init_zero;
	gpreempt_v1_SuspendTargetResponse answer = gpreempt_v1_SuspendTargetResponse_init_zero;
	struct gp_call call = CALL("SuspendTarget", GP_SMALL_ANSWER);
	int err = 0;

	if (ttl_us == 0)
		err = max_suspend(&ttl_us);
	if (err != 0)
		return err;
	snprintf(request.target_id, sizeof(request.target_id), "%d", pid);
	request.has_ttl = true;
	request.ttl = gp_duration(ttl_us);
	err = gp_rpc(&call, (struct gp_message){ gpreempt_v1_SuspendTargetRequest_fields, &request },
		     (struct gp_message){ gpreempt_v1_SuspendTargetResponse_fields, &answer });
	if (err != 0 || answer.quiesced)
		return err;
	if (answer.reason == gpreempt_v1_QuiesceReason_QUIESCE_REASON_MAX_WAIT)
		return gp_fail(-EINPROGRESS, "process %d is being suspended", pid);
	return gp_fail(-EAGAIN, "process %d is not suspended now: reason %d of gpreempt_reason", pid, (int)answer.reason);
}

static int resume_target(int32_t pid)
{
	gpreempt_v1_ResumeTargetRequest request = gpreempt_v1_ResumeTargetRequest_init_zero;
	gpreempt_v1_ResumeTargetResponse answer = gpreempt_v1_ResumeTargetResponse_init_zero;
	struct gp_call call = CALL("ResumeTarget", GP_SMALL_ANSWER);
	int err;

	snprintf(request.target_id, sizeof(request.target_id), "%d", pid);
	err = gp_rpc(&call, (struct gp_message){ gpreempt_v1_ResumeTargetRequest_fields, &request },
		     (struct gp_message){ gpreempt_v1_ResumeTargetResponse_fields, &answer });
	if (err != 0)
		return err;
	switch (answer.state) {
	case gpreempt_v1_TargetState_TARGET_STATE_SUSPENDING:
	case gpreempt_v1_TargetState_TARGET_STATE_SUSPENDED:
		return gp_fail(-EBUSY, "a lease keeps process %d suspended", pid);
	case gpreempt_v1_TargetState_TARGET_STATE_RESUMING:
		return gp_fail(-EINPROGRESS, "process %d is being resumed", pid);
	default:
		return 0;
	}
}

int gpreempt_suspend_process(int32_t pid, const uint32_t *ids, uint32_t n, int64_t ttl_us)
{
	int err;

	gp_clear_error();
	if (ttl_us < 0)
		return gp_fail(-EINVAL, "ttl_us is negative");
	err = check_pid(pid);
	if (err == 0 && ids != NULL)
		err = resolve(pid, ids, n, &pid);
	return err != 0 ? err : suspend_target(pid, ttl_us);
}

int gpreempt_resume_process(int32_t pid, const uint32_t *ids, uint32_t n)
{
	int err;

	gp_clear_error();
	err = check_pid(pid);
	if (err == 0 && ids != NULL)
		err = resolve(pid, ids, n, &pid);
	return err != 0 ? err : resume_target(pid);
}

int gpreempt_suspend_queues(const uint32_t *ids, uint32_t n, uint32_t grace_us)
{
	int32_t pid = 0;
	int err;

	(void)grace_us;
	gp_clear_error();
	err = resolve(0, ids, n, &pid);
	return err != 0 ? err : suspend_target(pid, 0);
}

int gpreempt_resume_queues(const uint32_t *ids, uint32_t n)
{
	int32_t pid = 0;
	int err;

	gp_clear_error();
	err = resolve(0, ids, n, &pid);
	return err != 0 ? err : resume_target(pid);
}

int gpreempt_batch_unmap_queues(const uint32_t *ids, uint32_t n, uint32_t grace_us)
{
	return gpreempt_suspend_queues(ids, n, grace_us);
}

int gpreempt_fast_remap_queues(const uint32_t *ids, uint32_t n) { return gpreempt_resume_queues(ids, n); }

int gpreempt_set_hqd_reservation(uint32_t gpu_id, uint32_t online_percent, uint32_t offline_percent)
{
	gp_clear_error();
	if (online_percent > 100 || offline_percent > 100 - online_percent)
		return gp_fail(-EINVAL, "%u and %u are more than 100 percent", online_percent, offline_percent);
	return gp_fail(-EOPNOTSUPP, "firmware assigns the hardware slots of GPU %u, and the driver cannot reserve any", gpu_id);
}
