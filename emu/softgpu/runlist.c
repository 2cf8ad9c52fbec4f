// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * The queues that a scheduler has mapped: what RUN_LIST and UNMAP_QUEUES do.
 * Runlists and MQDs are read from the memory that the driver wrote.
 */
#include <linux/ktime.h>
#include <linux/slab.h>

#include "softgpu.h"
#include "kfd_pm4_headers_ai.h"
#include "kfd_pm4_opcodes.h"
#include "kfd_kernel_queue.h"
#include "v9_structs.h"
#include "gc/gc_9_0_sh_mask.h"
#include "sdma0/sdma0_4_0_sh_mask.h"

static bool is_static(const struct pm4_mes_map_queues *p)
{
	return p->bitfields2.queue_type ==
	       queue_type__mes_map_queues__normal_latency_static_queue_vi ||
	       p->bitfields2.queue_type == queue_type__mes_map_queues__low_latency_static_queue_vi;
}

/* sdma_engine returns the engine that a MAP_QUEUES names, or -1: a compute queue. */
static int sdma_engine(const struct pm4_mes_map_queues *p)
{
	int sel = p->bitfields2.engine_sel;

	switch (p->bitfields2.extended_engine_sel) {
	case extended_engine_sel__mes_map_queues__sdma0_to_7_sel:
		return sel;
	case extended_engine_sel__mes_map_queues__sdma8_to_15_sel:
		return sel + 8;
	default:
		return sel - engine_sel__mes_map_queues__sdma0_vi < 0 ? -1 :
			sel - engine_sel__mes_map_queues__sdma0_vi;
	}
}

static int read_compute_mqd(struct soft_queue *q)
{
	struct v9_mqd *m = kmalloc(sizeof(*m), GFP_KERNEL);
	int err;

	if (!m)
		return -ENOMEM;
	err = soft_gart_read(q->mqd, m, sizeof(*m));
	if (!err) {
		q->ring = ((u64)m->cp_hqd_pq_base_hi << 32 | m->cp_hqd_pq_base_lo) << 8;
		q->ring_bytes = 8ull << (m->cp_hqd_pq_control & CP_HQD_PQ_CONTROL__QUEUE_SIZE_MASK);
		q->rptr = (u64)m->cp_hqd_pq_rptr_report_addr_hi << 32 |
			  m->cp_hqd_pq_rptr_report_addr_lo;
		q->type = m->cp_hqd_pq_control & CP_HQD_PQ_CONTROL__QUEUE_FULL_EN_MASK ?
			  KFD_IOC_QUEUE_TYPE_COMPUTE_AQL : KFD_IOC_QUEUE_TYPE_COMPUTE;
	}
	kfree(m);
	return err;
}

static int read_sdma_mqd(struct soft_queue *q, bool xgmi)
{
	struct v9_sdma_mqd m;
	int err;

	err = soft_gart_read(q->mqd, &m, sizeof(m));
	if (err)
		return err;
	q->ring = ((u64)m.sdmax_rlcx_rb_base_hi << 32 | m.sdmax_rlcx_rb_base) << 8;
	q->ring_bytes = 4ull << ((m.sdmax_rlcx_rb_cntl & SDMA0_RLC0_RB_CNTL__RB_SIZE_MASK) >>
				 SDMA0_RLC0_RB_CNTL__RB_SIZE__SHIFT);
	q->rptr = (u64)m.sdmax_rlcx_rb_rptr_addr_hi << 32 | m.sdmax_rlcx_rb_rptr_addr_lo;
	q->type = xgmi ? KFD_IOC_QUEUE_TYPE_SDMA_XGMI : KFD_IOC_QUEUE_TYPE_SDMA;
	return 0;
}

static pid_t pid_of(u32 pasid)
{
#if SOFT_SINCE(7, 2)
	struct kfd_process *p = kfd_lookup_process_by_pasid(pasid, NULL);
#else
	struct kfd_process *p = kfd_lookup_process_by_pasid(pasid);
#endif
	pid_t pid;

	if (!p)
		return 0;
	pid = p->lead_thread->pid;
	kfd_unref_process(p);
	return pid;
}

/* free_slot returns a queue slot of the MEC's that the driver gave to us, or -1. */
static int free_slot(struct soft_dev *s)
{
	struct kfd_dev *kfd = s->adev->kfd.dev;
	struct soft_queue *q;
	int slot;

	for_each_set_bit(slot, kfd->shared_resources.cp_queue_bitmap, AMDGPU_MAX_QUEUES) {
		bool used = false;

		list_for_each_entry(q, &s->hws.queues, list)
			used |= q->mapped && q->slot == slot;
		if (!used)
			return slot;
	}
	return -1;
}

/* soft_hws_find is called with the lock held. */
struct soft_queue *soft_hws_find(struct soft_hws *h, u64 mqd, u32 pasid)
{
	struct soft_queue *q;

	lockdep_assert_held(&h->lock);
	list_for_each_entry(q, &h->queues, list)
		if (q->mqd == mqd && q->pasid == pasid)
			return q;
	return NULL;
}

/*
 * soft_hws_map maps a queue, which is freed, or belongs to the list from then
 * on. One that is mapped already stays so.
 */
void soft_hws_map(struct soft_dev *s, struct soft_queue *new)
{
	bool compute = new->type == KFD_IOC_QUEUE_TYPE_COMPUTE ||
		       new->type == KFD_IOC_QUEUE_TYPE_COMPUTE_AQL;
	struct soft_hws *h = &s->hws;
	struct soft_queue *q;

	new->pid = pid_of(new->pasid);
	spin_lock(&h->lock);
	q = soft_hws_find(h, new->mqd, new->pasid);
	if (!q) {
		list_add_tail(&new->list, &h->queues);
		swap(q, new);
	}
	q->stays = true;
	if (!q->mapped) {
		if (new) {	/* the driver may have changed the ring */
			q->ring = new->ring;
			q->ring_bytes = new->ring_bytes;
			q->is_static = new->is_static;
		}
		q->slot = compute ? free_slot(s) : -1;
		q->mapped = true;
		h->maps++;
		soft_channel_map(s, q);
		soft_trace(s, "map pid %d doorbell %#x type %u ring %#llx+%#llx", q->pid,
			   q->doorbell, q->type, q->ring, q->ring_bytes);
	}
	spin_unlock(&h->lock);
	kfree(new);
}

static void map_queue(struct soft_dev *s, const struct pm4_mes_map_queues *p, u32 pasid)
{
	int engine = sdma_engine(p);
	struct soft_queue *q;
	int err;

	q = kzalloc(sizeof(*q), GFP_KERNEL | __GFP_NOFAIL);
	q->mqd = (u64)p->mqd_addr_hi << 32 | p->mqd_addr_lo;
	q->pasid = pasid;
	q->wptr = (u64)p->wptr_addr_hi << 32 | p->wptr_addr_lo;
	q->doorbell = p->bitfields3.doorbell_offset;
	q->is_static = is_static(p);
	q->engine = engine;
	if (engine < 0)
		err = read_compute_mqd(q);
	else
		err = read_sdma_mqd(q, engine >= kfd_get_num_sdma_engines(soft_node(s)));
	if (err) {
		dev_err(s->adev->dev, "softgpu: no MQD at %#llx\n", q->mqd);
		kfree(q);
		return;
	}
	soft_hws_map(s, q);
}

/* soft_hws_fault returns the fault of a queue or NULL; the lock is held. */
struct soft_fault *soft_hws_fault(struct soft_hws *h, u32 doorbell)
{
	struct soft_fault *f;

	lockdep_assert_held(&h->lock);
	list_for_each_entry(f, &h->faults, list)
		if (f->doorbell == doorbell)
			return f;
	return NULL;
}

/*
 * soft_hws_holds reports whether the unmap must still wait for a selected
 * queue. A reset unmaps queues that ignore a preemption, but the packet
 * processor must acknowledge those too.
 */
bool soft_hws_holds(struct soft_hws *h, bool reset)
{
	struct soft_queue *q;
	bool yes = false;

	spin_lock(&h->lock);
	list_for_each_entry(q, &h->queues, list) {
		struct soft_fault *f = soft_hws_fault(h, q->doorbell);

		yes |= q->leaves && ((q->wait_seq && !soft_channel_away()) ||
				     (f && !f->refuses && !reset));
	}
	spin_unlock(&h->lock);
	return yes;
}

static bool stopped(struct soft_hws *h)
{
	return READ_ONCE(h->stop);
}

static void note_unmap(struct soft_unmap *u, struct soft_queue *q)
{
	u32 i;

	u->queues++;
	for (i = 0; i < u->npids; i++)
		if (u->pids[i] == q->pid)
			return;
	if (u->npids < ARRAY_SIZE(u->pids))
		u->pids[u->npids++] = q->pid;
}

/*
 * Unmaps the queues that are marked to leave. A queue that refuses stays on its
 * HQD, and the HIQ's MQD gets the doorbell of one for compute. Returns -EINTR if the HIQ is about
 * to be freed.
 */
static int unmap_marked(struct soft_dev *s, bool reset, struct soft_unmap *u)
{
	struct soft_hws *h = &s->hws;
	struct soft_queue *q;
	struct v9_mqd *hiq = h->hiq->queue->mqd;
	unsigned int slow;

	spin_lock(&h->lock);
	list_for_each_entry(q, &h->queues, list)
		if (q->leaves)
			q->wait_seq = soft_channel_unmap(s, q, reset);
	slow = h->slow_us;
	spin_unlock(&h->lock);
	if (slow)
		wait_event_hrtimeout(h->wait, stopped(h), ns_to_ktime((u64)slow * NSEC_PER_USEC));
	while (!wait_event_timeout(h->wait, stopped(h) || !soft_hws_holds(h, reset), SOFT_LATE))
		soft_channel_late(s);
	if (stopped(h))
		return -EINTR;

	spin_lock(&h->lock);
	list_for_each_entry(q, &h->queues, list) {
		struct soft_fault *f = soft_hws_fault(h, q->doorbell);

		if (!q->leaves)
			continue;
		q->leaves = false;
		q->told = false;
		if (f && f->refuses && !reset) {
			q->stuck = true;
			if (q->engine < 0)
				hiq->queue_doorbell_id0 = q->doorbell;
			continue;
		}
		q->mapped = false;
		q->stuck = false;
		q->cycled++;
		note_unmap(u, q);
	}
	spin_unlock(&h->lock);
	return 0;
}

static bool selected(const struct pm4_mes_unmap_queues *p, const struct soft_queue *q)
{
	u32 bells[] = {
		p->bitfields3b.doorbell_offset0, p->bitfields4.doorbell_offset1,
		p->bitfields5.doorbell_offset2, p->bitfields6.doorbell_offset3,
	};
	u32 i;

	switch (p->bitfields2.queue_sel) {
	case queue_sel__mes_unmap_queues__perform_request_on_specified_queues:
		for (i = 0; i < p->bitfields2.num_queues && i < ARRAY_SIZE(bells); i++)
			if (bells[i] == q->doorbell)
				return true;
		return false;
	case queue_sel__mes_unmap_queues__perform_request_on_pasid_queues:
		return q->pasid == p->bitfields3a.pasid;
	case queue_sel__mes_unmap_queues__unmap_all_non_static_queues:
		return !q->is_static;
	default:
		return true;
	}
}

int soft_hws_unmap_queues(struct soft_dev *s, const struct pm4_mes_unmap_queues *p)
{
	bool reset = p->bitfields2.action == action__mes_unmap_queues__reset_queues;
	struct soft_hws *h = &s->hws;
	ktime_t start = ktime_get();
	struct soft_unmap u = {
		.action = p->bitfields2.action,
		.select = p->bitfields2.queue_sel,
		.param = p->ordinal3,
		.grace = h->grace,
	};
	struct soft_queue *q;
	int err;

	spin_lock(&h->lock);
	list_for_each_entry(q, &h->queues, list)
		q->leaves = q->mapped && !q->stuck && selected(p, q);
	spin_unlock(&h->lock);
	err = unmap_marked(s, reset, &u);
	u.usec = ktime_us_delta(ktime_get(), start);
	soft_trace(s, "unmap action %u select %u param %#x grace %#x: %u queues, error %d",
		   u.action, u.select, u.param, u.grace, u.queues, err);
	if (err)
		return err;
	spin_lock(&h->lock);
	h->last[h->unmaps++ % SOFT_UNMAPS] = u;
	h->removes += u.queues;
	spin_unlock(&h->lock);
	return 0;
}

/* parse_runlist maps what the buffer has, and marks what stays. */
static void parse_runlist(struct soft_dev *s, const u32 *ib, u32 n)
{
	u32 i = 0, pasid = 0, len;

	while (i < n) {
		union PM4_MES_TYPE_3_HEADER h = { .u32All = ib[i] };

		len = h.type == PM4_TYPE_3 ? h.count + 2 : 1;
		if (i + len > n)
			break;
		if (h.type == PM4_TYPE_3 && h.opcode == IT_MAP_PROCESS)
			pasid = ((const struct pm4_mes_map_process *)&ib[i])->bitfields2.pasid;
		else if (h.type == PM4_TYPE_3 && h.opcode == IT_MAP_QUEUES)
			map_queue(s, (const void *)&ib[i], pasid);
		/* RUN_LIST at the end: too many for one round, so the hardware repeats it */
		i += len;
	}
}

int soft_hws_run_list(struct soft_dev *s, const struct pm4_mes_runlist *p)
{
	size_t size = p->bitfields4.ib_size * sizeof(u32);
	u64 addr = (u64)p->ib_base_hi << 32 | p->ordinal2;
	struct soft_hws *h = &s->hws;
	struct soft_unmap u = {};
	struct soft_queue *q;
	u32 *ib;
	int err;

	ib = kvmalloc(size, GFP_KERNEL);
	if (!ib)
		return -ENOMEM;
	err = soft_gart_read(addr, ib, size);
	if (err) {
		dev_err(s->adev->dev, "softgpu: no runlist at %#llx\n", addr);
		goto free;
	}
	spin_lock(&h->lock);
	list_for_each_entry(q, &h->queues, list)
		q->stays = false;
	spin_unlock(&h->lock);
	parse_runlist(s, ib, size / sizeof(u32));
	spin_lock(&h->lock);
	list_for_each_entry(q, &h->queues, list)
		q->leaves = q->mapped && !q->stays;
	h->adds++;
	spin_unlock(&h->lock);
	err = unmap_marked(s, true, &u);
free:
	kvfree(ib);
	return err;
}

