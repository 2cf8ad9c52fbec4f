// The functions of the design documents in C, in the order in which these call them: poc WHAT PID.
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpreempt_poc.h"

static void said(const char *what, int result)
{
	printf("%s = %d %s\n", what, result, result < 0 ? gpreempt_last_error() : "");
}

static void list(const char *what, int err, queue_info_t *queues, uint32_t n)
{
	printf("%s = %d: %u queues\n", what, err, n);
	for (uint32_t i = 0; i < n; i++)
		printf("  queue_id %u priority %u gpu_id %u process_id %d is_active %d address %s tag [%s]\n", queues[i].queue_id, queues[i].priority,
		       queues[i].gpu_id, queues[i].process_id, queues[i].is_active, queues[i].queue_address ? "known" : "unknown", queues[i].tag);
	free_queue_info(queues);
}

static void active(int32_t pid, uint32_t id)
{
	queue_info_t q;
	int err = gpreempt_get_queue_status(pid, id, &q);

	printf("get_queue_status(%u) = %d: is_active %d\n", id, err, err ? -1 : q.is_active);
}

int main(int argc, char **argv)
{
	const uint32_t ids[] = { 0, 1, 2 }, nobodys[] = { 77, 78 };
	const char *what = argc > 2 ? argv[1] : "";
	int32_t pid = argc > 2 ? atoi(argv[2]) : 0;
	queue_info_t *queues = NULL;
	uint32_t n = 0;
	int err;

	said("gpreempt_poc_init", gpreempt_poc_init());
	if (!strcmp(what, "suspend")) {
		said("suspend_queues", gpreempt_suspend_queues(ids, 3, 1000));
		active(pid, 0);
		said("suspend_queues again", gpreempt_suspend_queues(ids, 3, 1000));
		said("resume_queues", gpreempt_resume_queues(ids, 3));
		said("resume_queues again", gpreempt_resume_queues(ids, 3));
		active(pid, 0);
		said("suspend_queues of nobody", gpreempt_suspend_queues(nobodys, 2, 1000));
		said("a part of its queues", gpreempt_suspend_queues(ids + 1, 2, 1000));
	} else if (!strcmp(what, "unmap")) {
		said("batch_unmap_queues", gpreempt_batch_unmap_queues(ids, 3, 1000));
		active(pid, 2);
	} else if (!strcmp(what, "remap")) {
		said("batch_unmap_queues", gpreempt_batch_unmap_queues(ids, 3, 100));
		active(pid, 2);
		said("fast_remap_queues", gpreempt_fast_remap_queues(ids, 3));
		active(pid, 2);
	} else if (!strcmp(what, "reserve")) {
		said("set_hqd_reservation(30, 70)", gpreempt_set_hqd_reservation(0, 30, 70));
		said("set_hqd_reservation(80, 30)", gpreempt_set_hqd_reservation(0, 80, 30));
	} else if (!strcmp(what, "list")) {
		err = get_all_queues(&queues, &n);
		list("get_all_queues", err, queues, n);
		err = find_queues_by_process(pid, &queues, &n);
		list("find_queues_by_process", err, queues, n);
		err = find_queues_by_priority(0, 5, &queues, &n);
		list("find_queues_by_priority(0, 5)", err, queues, n);
		err = find_queues_by_priority(10, 15, &queues, &n);
		list("find_queues_by_priority(10, 15)", err, queues, n);
	} else if (!strcmp(what, "tag")) {
		err = find_queues_by_tag("OFFLINE_AI", &queues, &n);
		list("find_queues_by_tag(OFFLINE_AI)", err, queues, n);
		err = find_queues_by_tag("ONLINE_AI", &queues, &n);
		list("find_queues_by_tag(ONLINE_AI)", err, queues, n);
	}
	gpreempt_poc_cleanup();
	return 0;
}
