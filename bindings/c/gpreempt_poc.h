/*
 * gpreempt_poc.h: the names that the design documents of gpreempt use, over gpreempt.h.
 * docs/design-documents.md says what differs.
 */
#ifndef GPREEMPT_POC_H
#define GPREEMPT_POC_H

#include "gpreempt.h"

#ifdef __cplusplus
extern "C" {
#endif

/* As gpreempt_init and gpreempt_cleanup. */
int gpreempt_poc_init(void);
void gpreempt_poc_cleanup(void);

/*
 * gpreempt_suspend_queues and gpreempt_resume_queues are gpreempt_suspend_process and
 * gpreempt_resume_process for the one offline process that has all of these queues.
 * -ENOENT: no offline process has them. -ENOTUNIQ: several have, because ids are unique
 * within a process only. grace_us is ignored: the daemon chooses the grace period of its
 * mechanism, and the driver's unit is not a time.
 */
int gpreempt_suspend_queues(const uint32_t *ids, uint32_t n, uint32_t grace_us);
int gpreempt_resume_queues(const uint32_t *ids, uint32_t n);

/*
 * The same: the driver unmaps all queues of a process in one runlist cycle and maps them
 * where the firmware chooses.
 */
int gpreempt_batch_unmap_queues(const uint32_t *ids, uint32_t n, uint32_t grace_us);
int gpreempt_fast_remap_queues(const uint32_t *ids, uint32_t n);

/*
 * gpreempt_set_hqd_reservation returns -EOPNOTSUPP, and -EINVAL for percentages of more
 * than 100 in sum: firmware assigns the hardware slots, and the driver cannot reserve any.
 */
int gpreempt_set_hqd_reservation(uint32_t gpu_id, uint32_t online_percent, uint32_t offline_percent);

/* The names without a prefix. */
typedef gpreempt_queue_info_t queue_info_t;
#define get_all_queues gpreempt_get_all_queues
#define find_queues_by_priority gpreempt_find_queues_by_priority
#define find_queues_by_process gpreempt_find_queues_by_process
#define find_queues_by_tag gpreempt_find_queues_by_tag
#define free_queue_info gpreempt_free_queue_info
#define notify_online_task gpreempt_notify_online
#define online_task_complete gpreempt_complete

#ifdef __cplusplus
}
#endif

#endif
