// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * The firmware's scheduler. A thread for each node executes the packets that
 * the driver writes to the HIQ, in their order. The driver waits for it as for
 * the firmware: by polling a fence.
 */
#include <linux/slab.h>

#include "softgpu.h"
#include "kfd_device_queue_manager.h"
#include "kfd_kernel_queue.h"
#include "kfd_pm4_headers_ai.h"
#include "kfd_pm4_opcodes.h"

/* soft_hws_hangs counts a fence, and reports whether it is one that must not be written. */
bool soft_hws_hangs(struct soft_hws *h)
{
	bool hang;

	spin_lock(&h->lock);
	hang = h->hang;
	if (hang) {
		h->hang--;
		h->hung++;
	} else {
		h->fences++;
	}
	spin_unlock(&h->lock);
	return hang;
}

static void query_status(struct soft_dev *s, const struct pm4_mes_query_status *p)
{
	bool hang = soft_hws_hangs(&s->hws);

	soft_trace(s, "fence %#x%s", p->data_lo, hang ? " is not written" : "");
	if (!hang && soft_gart_write64((u64)p->addr_hi << 32 | p->addr_lo,
				       (u64)p->data_hi << 32 | p->data_lo))
		dev_err(s->adev->dev, "softgpu: no fence at %#x%08x\n", p->addr_hi, p->addr_lo);
}

/* execute returns an error if the scheduler must stop: it is idle until its next start. */
static int execute(struct soft_dev *s, const u32 *p, union PM4_MES_TYPE_3_HEADER header)
{
	const struct pm4_mec_write_data_mmio *write = (const void *)p;

	switch (header.opcode) {
	case IT_NOP:
	case IT_SET_RESOURCES:
		return 0;
	case IT_RUN_LIST:
		return soft_hws_run_list(s, (const void *)p);
	case IT_UNMAP_QUEUES:
		return soft_hws_unmap_queues(s, (const void *)p);
	case IT_QUERY_STATUS:
		query_status(s, (const void *)p);
		return 0;
	case IT_WRITE_DATA:	/* the driver writes only this one */
		spin_lock(&s->hws.lock);
		s->hws.grace = write->data;
		spin_unlock(&s->hws.lock);
		return 0;
	default:
		dev_err(s->adev->dev, "softgpu: unknown packet %#x\n", header.u32All);
		return -EINVAL;
	}
}

static void hws_work(struct kthread_work *work)
{
	struct soft_dev *s = container_of(work, struct soft_dev, hws.work);
	struct soft_hws *h = &s->hws;

	for (;;) {
		union PM4_MES_TYPE_3_HEADER header;
		struct kernel_queue *hiq;
		u32 size, len, r, w;
		const u32 *p;
		int err = 0;

		spin_lock(&h->lock);
		hiq = h->dead || h->stop ? NULL : h->hiq;
		r = h->rptr;
		w = h->wptr;
		spin_unlock(&h->lock);
		if (!hiq || r == w)
			return;
		size = hiq->queue->properties.queue_size / sizeof(u32);
		p = hiq->pq_kernel_addr + r;
		header.u32All = *p;
		len = header.u32All == hiq->nop_packet ? 1 : header.count + 2;
		if (header.type != PM4_TYPE_3 || r + len > size) {
			dev_err(s->adev->dev, "softgpu: no packet: %#x\n", header.u32All);
			err = -EINVAL;
		} else if (len > 1) {
			err = execute(s, p, header);
		}
		spin_lock(&h->lock);
		if (err)
			h->dead = true;
		else
			h->rptr = (r + len) % size;
		spin_unlock(&h->lock);
		if (!err)
			WRITE_ONCE(*hiq->rptr_kernel, (r + len) % size);
	}
}

SOFT_WRAP(int, kq_submit_packet, struct kernel_queue *kq)
{
	struct soft_dev *s = soft_of(kq->dev->adev);
	struct soft_hws *h;
	int err;

	err = __real_kq_submit_packet(kq);
	if (!s || err)
		return err;
	h = &s->hws;
	spin_lock(&h->lock);
	if (h->hiq != kq) {	/* the first packet after a start */
		h->hiq = kq;
		h->rptr = 0;
		h->dead = false;
		h->stop = false;
	}
	h->wptr = kq->pending_wptr;
	spin_unlock(&h->lock);
	kthread_queue_work(h->worker, &h->work);
	return 0;
}

/* off takes a queue away without waiting; the lock is held. */
static void off(struct soft_dev *s, struct soft_queue *q)
{
	soft_channel_unmap(s, q, true);
	q->mapped = false;
	q->stuck = false;
	q->leaves = false;
	q->told = false;
	q->wait_seq = 0;
}

/* Without its HIQ the scheduler runs nothing: the queues go without an answer. */
static void stop(struct soft_dev *s)
{
	struct soft_hws *h = &s->hws;
	struct soft_queue *q;

	spin_lock(&h->lock);
	h->stop = true;
	spin_unlock(&h->lock);
	wake_up_all(&h->wait);
	kthread_flush_work(&h->work);
	spin_lock(&h->lock);
	h->hiq = NULL;
	list_for_each_entry(q, &h->queues, list)
		if (q->mapped)
			off(s, q);
	spin_unlock(&h->lock);
}

SOFT_WRAP(void, kernel_queue_uninit, struct kernel_queue *kq)
{
	struct soft_dev *s = soft_of(kq->dev->adev);

	if (s)
		stop(s);
	__real_kernel_queue_uninit(kq);
}

/* soft_hws_release ends the faults of one queue, or of all. */
void soft_hws_release(struct soft_dev *s, bool all, u32 doorbell)
{
	struct soft_hws *h = &s->hws;
	struct soft_fault *f, *next;

	spin_lock(&h->lock);
	list_for_each_entry_safe(f, next, &h->faults, list)
		if (all || f->doorbell == doorbell) {
			list_del(&f->list);
			kfree(f);
		}
	spin_unlock(&h->lock);
	wake_up_all(&h->wait);
}

/* A queue is freed after it was unmapped, or after the unmap failed. */
static void forget(struct soft_dev *s, u64 mqd, u32 pasid)
{
	struct soft_hws *h = &s->hws;
	struct soft_queue *q;

	spin_lock(&h->lock);
	q = soft_hws_find(h, mqd, pasid);
	if (q) {
		if (q->mapped)
			off(s, q);
		soft_channel_remove(s, q);
		list_del(&q->list);
	}
	spin_unlock(&h->lock);
	kfree(q);
	wake_up_all(&h->wait);
}

SOFT_WRAP(void, uninit_queue, struct queue *q)
{
	struct soft_dev *s = q && q->device ? soft_of(q->device->adev) : NULL;

	/* the HIQ has no process, or an error in its place */
	if (s && q->properties.type != KFD_QUEUE_TYPE_HIQ) {
		soft_hws_release(s, false, q->properties.doorbell_off);
		forget(s, q->gart_mqd_addr, soft_pasid(s, q->process));
	}
	__real_uninit_queue(q);
}

/* soft_hws_in_slot returns the address of the MQD of the queue in a slot, or 0, and its VMID. */
u64 soft_hws_in_slot(struct soft_dev *s, u32 pipe, u32 queue, u32 *vmid)
{
	int slot = pipe * s->adev->gfx.mec.num_queue_per_pipe + queue;
	struct soft_hws *h = &s->hws;
	struct soft_queue *q;
	u64 mqd = 0;

	spin_lock(&h->lock);
	list_for_each_entry(q, &h->queues, list)
		if (q->mapped && q->slot == slot) {
			mqd = q->mqd;
			*vmid = 8 + q->pasid % 8;
			break;
		}
	spin_unlock(&h->lock);
	return mqd;
}

/*
 * soft_hws_stuck_ring returns the ring address of the queue that refused to
 * leave a slot, or 0, and takes it away for a reset.
 */
u64 soft_hws_stuck_ring(struct soft_dev *s, u32 pipe, u32 queue, bool reset)
{
	int slot = pipe * s->adev->gfx.mec.num_queue_per_pipe + queue;
	struct soft_hws *h = &s->hws;
	struct soft_queue *q;
	u64 ring = 0;

	spin_lock(&h->lock);
	list_for_each_entry(q, &h->queues, list)
		if (q->stuck && q->slot == slot) {
			ring = q->ring;
			if (reset)
				off(s, q);
			break;
		}
	spin_unlock(&h->lock);
	return ring;
}

/*
 * soft_hws_stuck_sdma returns the doorbell of the queue that refused to leave an
 * SDMA engine, or 0, and takes it away for a reset.
 */
u32 soft_hws_stuck_sdma(struct soft_dev *s, int engine, bool reset)
{
	struct soft_hws *h = &s->hws;
	struct soft_queue *q;
	u32 doorbell = 0;

	spin_lock(&h->lock);
	list_for_each_entry(q, &h->queues, list)
		if (q->stuck && q->engine == engine) {
			doorbell = q->doorbell;
			if (reset)
				off(s, q);
			break;
		}
	spin_unlock(&h->lock);
	return doorbell;
}

/* soft_hws_reset is called in a reset, while the driver has the scheduler stopped. */
void soft_hws_reset(struct soft_dev *s)
{
	struct soft_hws *h = &s->hws;
	struct soft_queue *q;

	soft_hws_release(s, true, 0);
	spin_lock(&h->lock);
	list_for_each_entry(q, &h->queues, list)
		if (q->mapped)	/* MES: the driver does not remove them in a reset */
			off(s, q);
	h->grace = SOFT_IQ_WAIT_TIME2;
	h->resets++;
	spin_unlock(&h->lock);
}

int soft_hws_init(struct soft_dev *s)
{
	struct soft_hws *h = &s->hws;

	spin_lock_init(&h->lock);
	INIT_LIST_HEAD(&h->queues);
	INIT_LIST_HEAD(&h->faults);
	init_waitqueue_head(&h->wait);
	kthread_init_work(&h->work, hws_work);
	h->grace = SOFT_IQ_WAIT_TIME2;
	h->worker = kthread_create_worker(0, "softgpu-%d", s->index);
	if (IS_ERR(h->worker)) {
		int err = PTR_ERR(h->worker);

		h->worker = NULL;
		return err;
	}
	/* firmware does not compete for the CPU with the thread that polls its fence */
	sched_set_fifo_low(h->worker->task);
	return 0;
}

void soft_hws_fini(struct soft_dev *s)
{
	if (!s->hws.worker)
		return;
	stop(s);
	kthread_destroy_worker(s->hws.worker);
	WARN_ON(!list_empty(&s->hws.queues));
	soft_hws_release(s, true, 0);
}
