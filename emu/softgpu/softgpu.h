/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/*
 * softgpu: KFD nodes without a GPU, for tests of the driver's own code.
 * README.md describes which functions of the driver are replaced, and why.
 */
#ifndef SOFTGPU_H_
#define SOFTGPU_H_

#include <linux/kthread.h>
#include <linux/list.h>
#include <linux/spinlock.h>
#include <linux/types.h>
#include <linux/version.h>
#include <linux/wait.h>

#include "amdgpu.h"
#include "amdgpu_amdkfd.h"
#include "amdgpu_mes.h"
#include "kfd_priv.h"

/* The sources are for 6.12, 7.2 and 7.3; what differs is between #if SOFT_SINCE() and #endif. */
#define SOFT_SINCE(major, minor)	(LINUX_VERSION_CODE >= KERNEL_VERSION(major, minor, 0))

#define SOFT_MAX_NODES		8
#define SOFT_DOORBELL_ORDER	9	/* 2 MiB of doorbells, as on the hardware */
#define SOFT_DOORBELL_BYTES	(PAGE_SIZE << SOFT_DOORBELL_ORDER)
#define SOFT_LATE		(5 * HZ)	/* the driver waits for 9 s */
#define SOFT_UNMAPS		64	/* as many unmaps of a node are remembered */

/*
 * The linker resolves a call of name() in another file to __wrap_name(), and
 * __real_name() is the driver's function. A call inside the file that defines
 * name() still reaches the driver's function.
 */
#define SOFT_WRAP(type, name, ...)		\
	type __real_##name(__VA_ARGS__);	\
	type __wrap_##name(__VA_ARGS__);	\
	type __wrap_##name(__VA_ARGS__)

/* struct soft_queue is a queue from its first mapping until the driver frees it. */
struct soft_queue {
	struct list_head list;		/* in soft_hws.queues */
	u64 mqd;			/* GPU address; with the PASID it identifies the queue */
	u32 pasid;
	pid_t pid;
	u64 ring, ring_bytes, rptr, wptr;
	u32 doorbell;			/* index of a dword in the node's doorbells */
	u32 type;			/* as in the uAPI's CREATE_QUEUE */
	int slot;			/* while mapped: bit in cp_queue_bitmap, -1 for SDMA */
	int engine;			/* of SDMA, or -1 */
	bool is_static;
	bool mapped;
	bool stays;			/* in the next runlist too */
	bool leaves;			/* selected by the unmap in progress */
	bool stuck;			/* mapped, and did not answer a preemption */
	bool told;			/* the packet processor has its MAP record */
	u64 wait_seq;			/* the UNMAP record that is not acknowledged, or 0 */
	u32 cycled;			/* times that it was unmapped */
};

/* struct soft_fault makes an unmap of one queue fail. */
struct soft_fault {
	struct list_head list;		/* in soft_hws.faults */
	u32 doorbell;
	bool refuses;			/* false: the unmap does not end */
};

/* struct soft_unmap is what one UNMAP_QUEUES did. */
struct soft_unmap {
	u32 action, select, param;	/* the packet's fields */
	u32 grace;			/* CP_IQ_WAIT_TIME2 */
	u32 queues;			/* unmapped */
	s64 usec;
	u32 npids;
	pid_t pids[8];			/* the processes of these queues */
};

/* struct soft_hws is the firmware's scheduler of one node. */
struct soft_hws {
	spinlock_t lock;		/* guards all below, but not work and worker */
	struct list_head queues;
	struct list_head faults;
	struct kernel_queue *hiq;	/* NULL while the scheduler is not started */
	u32 rptr, wptr;			/* in dwords of the HIQ */
	bool dead;			/* executes no packet until the next start */
	bool stop;			/* the HIQ is about to be freed */
	unsigned int hang;		/* so many fences will not be written */
	unsigned int slow_us;
	u32 grace;
	u32 adds, maps, unmaps, removes, fences, hung, resets;
	struct soft_unmap last[SOFT_UNMAPS];

	wait_queue_head_t wait;
	struct kthread_worker *worker;
	struct kthread_work work;
};

/* struct soft_dev is a node. */
struct soft_dev {
	int index;
	struct amdgpu_device *adev;
	struct platform_device *plat;
	struct pci_dev *pdev;
	void *doorbells;
	spinlock_t doorbell_lock;	/* guards doorbell_pages */
	DECLARE_BITMAP(doorbell_pages, 1 << SOFT_DOORBELL_ORDER);
	struct soft_hws hws;
};

/* device.c */
extern struct soft_dev *soft_devs[SOFT_MAX_NODES];
struct soft_dev *soft_of(struct amdgpu_device *adev);
struct soft_dev *soft_by_gpu_id(u32 gpu_id);
struct kfd_node *soft_node(struct soft_dev *s);

/* soft_pasid returns what runlists and interrupts of a node call a process, 0: not known there. */
static inline u32 soft_pasid(struct soft_dev *s, struct kfd_process *p)
{
#if SOFT_SINCE(7, 2)
	struct kfd_process_device *pdd = kfd_get_process_device_data(soft_node(s), p);

	return pdd ? pdd->pasid : 0;
#else
	return p->pasid;
#endif
}

/* registers.c */
#define SOFT_IQ_WAIT_TIME2	0x40401008	/* a made-up value after power-on */
const struct kfd2kgd_calls *soft_kfd2kgd(struct amdgpu_device *adev);
void soft_set_functions(struct amdgpu_device *adev);

/* gart.c */
int soft_gart_read(u64 addr, void *buf, size_t size);
int soft_gart_write64(u64 addr, u64 value);

/* vm.c */
extern const struct drm_driver soft_drm_driver;

/* bo.c */
struct amdgpu_bo *soft_bo_create(struct amdgpu_device *adev, u64 size, bool backed, u64 user_addr);
int soft_bo_vmap(struct amdgpu_bo *bo, void **cpu);
void soft_bo_vunmap(struct amdgpu_bo *bo);

/* hws.c */
int soft_hws_init(struct soft_dev *s);
void soft_hws_fini(struct soft_dev *s);
void soft_hws_reset(struct soft_dev *s);
void soft_hws_release(struct soft_dev *s, bool all, u32 doorbell);
u64 soft_hws_in_slot(struct soft_dev *s, u32 pipe, u32 queue, u32 *vmid);
u64 soft_hws_stuck_ring(struct soft_dev *s, u32 pipe, u32 queue, bool reset);
u32 soft_hws_stuck_sdma(struct soft_dev *s, int engine, bool reset);

/* runlist.c */
struct pm4_mes_runlist;
struct pm4_mes_unmap_queues;
struct soft_queue *soft_hws_find(struct soft_hws *h, u64 mqd, u32 pasid);
struct soft_fault *soft_hws_fault(struct soft_hws *h, u32 doorbell);
bool soft_hws_hangs(struct soft_hws *h);
bool soft_hws_holds(struct soft_hws *h, bool reset);
void soft_hws_map(struct soft_dev *s, struct soft_queue *new);
/* called by the scheduler's thread; an error stops it */
int soft_hws_run_list(struct soft_dev *s, const struct pm4_mes_runlist *p);
int soft_hws_unmap_queues(struct soft_dev *s, const struct pm4_mes_unmap_queues *p);

/* mes.c */
#define SOFT_MES_API	14	/* the first with which debugging is allowed */
void soft_mes_init(struct amdgpu_device *adev);

/* interrupt.c */
int soft_interrupt_event(struct soft_dev *s, pid_t pid, u32 event);
int soft_interrupt_fault(struct soft_dev *s, pid_t pid, u64 addr);
struct kfd_process *soft_process(pid_t pid);

/* channel.c */
void soft_channel_init(void);
int soft_channel_register(void);
bool soft_channel_away(void);
void soft_channel_late(struct soft_dev *s);
void soft_channel_watch(struct kfd_process *p);
void soft_channel_unregister(void);
/* These are called with soft_hws.lock held. */
void soft_channel_map(struct soft_dev *s, struct soft_queue *q);
u64 soft_channel_unmap(struct soft_dev *s, struct soft_queue *q, bool reset);
void soft_channel_remove(struct soft_dev *s, struct soft_queue *q);

/* control.c */
void soft_control_init(void);
void soft_control_fini(void);
void soft_trace(struct soft_dev *s, const char *fmt, ...) __printf(2, 3);

#endif
