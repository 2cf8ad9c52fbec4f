/* Announcements and leases. */
#include <errno.h>
#include <pb_decode.h>
#include <pb_encode.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "gpreempt/v1/online.pb.h"
#include "internal.h"

#define SERVICE "/gpreempt.v1.OnlineService/"

int gp_rpc(struct gp_call *call, struct gp_message request, struct gp_message answer)
{
	uint8_t out[2048]; /* the largest request, with 64 GPUs, has less */
	pb_ostream_t to = pb_ostream_from_buffer(out, sizeof(out));
	int err;

	if (!pb_encode(&to, request.fields, request.m))
		return gp_fail(-EINVAL, "the request cannot be encoded: %s", PB_GET_ERROR(&to));
	call->out = out;
	call->out_len = to.bytes_written;
	err = gp_call(call);
	if (err == 0) {
		pb_istream_t from = pb_istream_from_buffer(call->in, call->in_len);

		if (!pb_decode(&from, answer.fields, answer.m))
			err = gp_fail(-EPROTO, "the answer cannot be decoded: %s", PB_GET_ERROR(&from));
	}
	free(call->memory);
	call->memory = NULL;
	call->out = call->in = NULL;
	return err;
}

int gpreempt_init(void)
{
	gp_clear_error();
	return gp_connect();
}

void gpreempt_cleanup(void) { gp_disconnect(); }

int gpreempt_poc_init(void) { return gpreempt_init(); }

void gpreempt_poc_cleanup(void) { gpreempt_cleanup(); }

google_protobuf_Duration gp_duration(int64_t us)
{
	return (google_protobuf_Duration){ .seconds = us / 1000000, .nanos = (int32_t)(us % 1000000) * 1000 };
}

int64_t gp_microseconds(const google_protobuf_Duration *d)
{
	return d->seconds < 0 ? 0 : d->seconds >= 3600 ? (int64_t)3600 * 1000000 : d->seconds * 1000000 + d->nanos / 1000;
}

/* set copies a duration of a request, of which 0 means absent. */
static int set(bool *has, google_protobuf_Duration *to, int64_t us, int64_t max, const char *name)
{
	if (us < 0 || us > max)
		return gp_fail(-EINVAL, "%s is out of range: use 0 to %lld", name, (long long)max);
	*has = us != 0;
	*to = gp_duration(us);
	return 0;
}

static int copy(char *to, size_t room, const char *from, const char *name)
{
	if (from == NULL)
		return 0;
	if (strlen(from) >= room)
		return gp_fail(-EINVAL, "%s has more than %zu bytes", name, room - 1);
	strcpy(to, from);
	return 0;
}

/* announcement translates and checks a request. */
static int announcement(const gpreempt_request_t *r, gpreempt_v1_NotifyOnlineRequest *m)
{
	const size_t most = sizeof(m->gpus) / sizeof(*m->gpus);
	int64_t max_wait = r->max_wait_us == GPREEMPT_NO_WAIT ? 0 : r->max_wait_us;
	int err;

	for (size_t i = 0; i < sizeof(r->reserved) / sizeof(*r->reserved); i++)
		if (r->reserved[i] != 0)
			return gp_fail(-EINVAL, "reserved is not zero");
	if (r->gpu_count == GPREEMPT_ALL_GPUS) {
		m->gpus_count = 1;
		m->gpus[0].which_by = gpreempt_v1_GpuSelector_all_tag;
		m->gpus[0].by.all = true;
	} else if (r->gpu_count != GPREEMPT_OWN_GPUS) { /* those are what the daemon takes without names */
		if (r->gpu_count == 0 || r->gpu_count > most || r->gpu_ids == NULL)
			return gp_fail(-EINVAL, "gpu_count is %u: use 1 to %zu gpu_ids, GPREEMPT_ALL_GPUS or GPREEMPT_OWN_GPUS", r->gpu_count, most);
		m->gpus_count = (pb_size_t)r->gpu_count;
		for (uint32_t i = 0; i < r->gpu_count; i++) {
			m->gpus[i].which_by = gpreempt_v1_GpuSelector_gpu_id_tag;
			m->gpus[i].by.gpu_id = r->gpu_ids[i];
		}
	}
	m->has_priority = r->priority != 0;
	m->priority = r->priority;
	if ((err = copy(m->label, sizeof(m->label), r->label, "label")) != 0 ||
	    (err = copy(m->request_id, sizeof(m->request_id), r->request_id, "request_id")) != 0 ||
	    (err = set(&m->has_ttl, &m->ttl, r->ttl_us, GPREEMPT_MAX_TTL, "ttl_us")) != 0 ||
	    (err = set(&m->has_max_wait, &m->max_wait, max_wait, 10000000, "max_wait_us")) != 0 ||
	    (err = set(&m->has_eta, &m->eta, r->eta_us, 60000000, "eta_us")) != 0)
		return err;
	if (r->max_wait_us == GPREEMPT_NO_WAIT)
		m->has_max_wait = true;
	return 0;
}

int gpreempt_notify_online(const gpreempt_request_t *request, gpreempt_lease_t *lease)
{
	gpreempt_v1_NotifyOnlineRequest m = gpreempt_v1_NotifyOnlineRequest_init_zero;
	gpreempt_v1_NotifyOnlineResponse answer = gpreempt_v1_NotifyOnlineResponse_init_zero;
	struct gp_call call = { .path = SERVICE "NotifyOnline", .limit = GP_SMALL_ANSWER };
	int err;

	gp_clear_error();
	if (lease == NULL)
		return gp_fail(-EINVAL, "lease is NULL");
	memset(lease, 0, sizeof(*lease));
	if (request == NULL)
		return gp_fail(-EINVAL, "request is NULL: it names the GPUs, such as gpu_count = GPREEMPT_ALL_GPUS");
	err = announcement(request, &m);
	if (err != 0)
		return err;
	call.bound_us = GPREEMPT_BOUND_NOTIFY + (m.has_max_wait ? gp_microseconds(&m.max_wait) : GPREEMPT_DEFAULT_MAX_WAIT);
	err = gp_rpc(&call, (struct gp_message){ gpreempt_v1_NotifyOnlineRequest_fields, &m },
		     (struct gp_message){ gpreempt_v1_NotifyOnlineResponse_fields, &answer });
	if (err != 0)
		return err;
	if (answer.lease_id[0] == 0)
		return gp_fail(-EPROTO, "the answer has no lease");
	strcpy(lease->id, answer.lease_id);
	lease->quiet = answer.quiesced;
	lease->reason = (int32_t)answer.reason;
	lease->suspended = answer.suspended_targets;
	lease->owner_offline = answer.owner_offline;
	lease->ttl_us = gp_microseconds(&answer.ttl);
	lease->owner = getpid();
	lease->connection = call.connection;
	return 0;
}

/* check returns 0 for a lease of this process, and sets id. */
static int check(const gpreempt_lease_t *lease, char *id, size_t room)
{
	if (lease == NULL || memchr(lease->id, 0, sizeof(lease->id)) == NULL)
		return gp_fail(-EINVAL, "invalid lease");
	if (lease->id[0] != 0 && lease->owner != getpid())
		return gp_fail(-EPERM, "the lease belongs to process %d", lease->owner);
	return copy(id, room, lease->id, "lease->id");
}

int gpreempt_renew(gpreempt_lease_t *lease, int64_t ttl_us)
{
	gpreempt_v1_RenewRequest m = gpreempt_v1_RenewRequest_init_zero;
	gpreempt_v1_RenewResponse answer = gpreempt_v1_RenewResponse_init_zero;
	struct gp_call call = { .path = SERVICE "Renew", .limit = GP_SMALL_ANSWER, .bound_us = GPREEMPT_BOUND_LEASE };
	int err;

	gp_clear_error();
	if ((err = check(lease, m.lease_id, sizeof(m.lease_id))) != 0 ||
	    (err = set(&m.has_ttl, &m.ttl, ttl_us, GPREEMPT_MAX_TTL, "ttl_us")) != 0)
		return err;
	if (lease->id[0] != 0 && gp_connected(lease->connection))
		err = gp_rpc(&call, (struct gp_message){ gpreempt_v1_RenewRequest_fields, &m },
			     (struct gp_message){ gpreempt_v1_RenewResponse_fields, &answer });
	if (lease->id[0] == 0 || !gp_connected(lease->connection))
		return gp_fail(-ESTALE, "the lease has ended with its connection");
	if (err == 0)
		lease->ttl_us = gp_microseconds(&answer.ttl);
	return err;
}

int gpreempt_complete(gpreempt_lease_t *lease)
{
	gpreempt_v1_CompleteRequest m = gpreempt_v1_CompleteRequest_init_zero;
	gpreempt_v1_CompleteResponse answer = gpreempt_v1_CompleteResponse_init_zero;
	struct gp_call call = { .path = SERVICE "Complete", .limit = GP_SMALL_ANSWER, .bound_us = GPREEMPT_BOUND_LEASE, .urgent = true };
	int err;

	gp_clear_error();
	err = check(lease, m.lease_id, sizeof(m.lease_id));
	if (err != 0)
		return err;
	if (m.lease_id[0] != 0 && gp_connected(lease->connection))
		err = gp_rpc(&call, (struct gp_message){ gpreempt_v1_CompleteRequest_fields, &m },
			     (struct gp_message){ gpreempt_v1_CompleteResponse_fields, &answer });
	if (err != 0 && err != -ESTALE && gp_connected(lease->connection))
		return err;
	gp_clear_error(); /* it has ended */
	memset(lease, 0, sizeof(*lease));
	return 0;
}
