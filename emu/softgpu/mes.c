// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * MES, the scheduler of GC 11: the driver adds and removes each queue by a call
 * that waits for the firmware, 3 s at most. There is no HIQ and no runlist.
 */
#include <linux/slab.h>

#include "softgpu.h"
#include "mes_v11_api_def.h"
#include "v11_structs.h"

#define MES_TIMEOUT	(3 * HZ)	/* as in mes_v11_0.c */
#define MES_VERSION	0x50

static struct soft_dev *mes_dev(struct amdgpu_mes *mes)
{
	return soft_of(container_of(mes, struct amdgpu_device, mes));
}

/* silent reports whether the firmware does not answer; the caller has waited then. */
static bool silent(struct soft_hws *h)
{
	unsigned int slow = READ_ONCE(h->slow_us);
	bool hang = soft_hws_hangs(h);

	if (hang)
		schedule_timeout_uninterruptible(MES_TIMEOUT);
	else if (slow)
		schedule_timeout_uninterruptible(usecs_to_jiffies(slow));
	return hang;
}

static int read_compute(struct soft_queue *q)
{
	struct v11_compute_mqd *m = kmalloc(sizeof(*m), GFP_KERNEL);
	int err;

	if (!m)
		return -ENOMEM;
	err = soft_gart_read(q->mqd, m, sizeof(*m));
	if (!err) {
		q->ring = ((u64)m->cp_hqd_pq_base_hi << 32 | m->cp_hqd_pq_base_lo) << 8;
		q->rptr = (u64)m->cp_hqd_pq_rptr_report_addr_hi << 32 |
			  m->cp_hqd_pq_rptr_report_addr_lo;
	}
	kfree(m);
	return err;
}

static int read_sdma(struct soft_queue *q)
{
	struct v11_sdma_mqd m;
	int err;

	err = soft_gart_read(q->mqd, &m, sizeof(m));
	if (err)
		return err;
	q->ring = ((u64)m.sdmax_rlcx_rb_base_hi << 32 | m.sdmax_rlcx_rb_base) << 8;
	q->rptr = (u64)m.sdmax_rlcx_rb_rptr_addr_hi << 32 | m.sdmax_rlcx_rb_rptr_addr_lo;
	return 0;
}

static int add_hw_queue(struct amdgpu_mes *mes, struct mes_add_queue_input *input)
{
	struct soft_dev *s = mes_dev(mes);
	struct soft_queue *q;
	int err;

	if (silent(&s->hws))
		return -ETIMEDOUT;
	q = kzalloc(sizeof(*q), GFP_KERNEL);
	if (!q)
		return -ENOMEM;
	q->mqd = input->mqd_addr;
	q->pasid = input->process_id;
	q->doorbell = input->doorbell_offset;
	q->engine = -1;	/* only of use with HWS */
	q->wptr = input->wptr_addr;
	q->ring_bytes = (u64)input->queue_size * sizeof(u32);
	if (input->queue_type == MES_QUEUE_TYPE_SDMA) {
		q->type = KFD_IOC_QUEUE_TYPE_SDMA;
		err = read_sdma(q);
	} else {
		q->type = input->is_aql_queue ? KFD_IOC_QUEUE_TYPE_COMPUTE_AQL :
						KFD_IOC_QUEUE_TYPE_COMPUTE;
		err = read_compute(q);
	}
	if (err) {
		kfree(q);
		return err;
	}
	soft_hws_map(s, q);
	spin_lock(&s->hws.lock);
	s->hws.adds++;
	spin_unlock(&s->hws.lock);
	return 0;
}

static struct soft_queue *mapped_queue(struct soft_hws *h, u32 doorbell)
{
	struct soft_queue *q;

	list_for_each_entry(q, &h->queues, list)
		if (q->mapped && q->doorbell == doorbell)
			return q;
	return NULL;
}

/* The driver's lock of the MES keeps a second call out, and the queue in the list. */
static int remove_hw_queue(struct amdgpu_mes *mes, struct mes_remove_queue_input *input)
{
	struct soft_dev *s = mes_dev(mes);
	struct soft_hws *h = &s->hws;
	struct soft_fault *f;
	struct soft_queue *q;
	int err = 0;

	if (silent(h))
		return -ETIMEDOUT;
	spin_lock(&h->lock);
	q = mapped_queue(h, input->doorbell_offset);
	f = soft_hws_fault(h, input->doorbell_offset);
	if (q && f && f->refuses) {	/* once, so that the driver may try again */
		err = -ETIMEDOUT;	/* the firmware's error is the same to the driver */
		list_del(&f->list);
	} else {
		f = NULL;
	}
	if (q && !err) {
		q->leaves = true;
		q->wait_seq = soft_channel_unmap(s, q, false);
	}
	spin_unlock(&h->lock);
	kfree(f);
	if (!q || err)
		return err;
	wait_event_timeout(h->wait, !soft_hws_holds(h, false), MES_TIMEOUT);
	if (soft_hws_holds(h, false)) {
		soft_channel_late(s);
		err = -ETIMEDOUT;
	}
	spin_lock(&h->lock);
	q->leaves = false;
	q->wait_seq = 0;
	q->told = false;
	if (!err) {
		q->mapped = false;
		q->cycled++;
		h->removes++;
	}
	spin_unlock(&h->lock);
	soft_trace(s, "remove doorbell %#x: error %d", input->doorbell_offset, err);
	return err;
}

/* The shader debugger's settings have no effect on a queue that is not executed here. */
static int misc_op(struct amdgpu_mes *mes, struct mes_misc_op_input *input)
{
	return silent(&mes_dev(mes)->hws) ? -ETIMEDOUT : 0;
}

static int suspend_gang(struct amdgpu_mes *mes, struct mes_suspend_gang_input *input)
{
	return 0;
}

static int resume_gang(struct amdgpu_mes *mes, struct mes_resume_gang_input *input)
{
	return 0;
}

static const struct amdgpu_mes_funcs mes_funcs = {
	.add_hw_queue = add_hw_queue,
	.remove_hw_queue = remove_hw_queue,
	.misc_op = misc_op,
	.suspend_gang = suspend_gang,
	.resume_gang = resume_gang,
};

void soft_mes_init(struct amdgpu_device *adev)
{
	adev->enable_mes = true;
	adev->mes.adev = adev;
	adev->mes.sched_version = SOFT_MES_API << AMDGPU_MES_API_VERSION_SHIFT | MES_VERSION;
	adev->mes.kiq_version = MES_VERSION;
	adev->mes.funcs = &mes_funcs;
	mutex_init(&adev->mes.mutex_hidden);
}
