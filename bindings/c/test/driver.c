/*
 * driver.c calls the library as lines on standard input say, and writes a line for each:
 * the name of the result, and what there is to report.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../gpreempt_poc.h"

static gpreempt_lease_t lease, last; /* the last one that was granted, and the last */

/* again repeats a call that a busy machine did not answer in time. */
#define again(call)                                                   \
	({                                                            \
		int err_ = (call);                                    \
		for (int i_ = 0; err_ == -ETIMEDOUT && i_ < 50; i_++) { \
			usleep(100000);                               \
			err_ = (call);                                \
		}                                                     \
		err_;                                                 \
	})

static void result(int err)
{
	printf("%s", err == 0 ? "ok" : strerrorname_np(-err));
	if (err != 0 && *gpreempt_last_error() == 0)
		printf(" NO TEXT");
}

static void show(int err, queue_info_t *queues, uint32_t count)
{
	result(err);
	for (uint32_t i = 0; i < count; i++)
		printf(" %d:%u:%s:%s:%s", queues[i].process_id, queues[i].queue_id, queues[i].is_active ? "active" : "inactive",
		       queues[i].comm, queues[i].tag);
	free_queue_info(queues);
}

static int online(const char *label, long max_wait_ms)
{
	gpreempt_request_t request = {
		.label = label, .gpu_count = GPREEMPT_ALL_GPUS, .max_wait_us = max_wait_ms < 0 ? GPREEMPT_NO_WAIT : max_wait_ms * 1000, .ttl_us = GPREEMPT_MAX_TTL,
	};
	int err = notify_online_task(&request, &last);

	if (err == 0)
		lease = last;
	return err;
}

static void *work(void *failures)
{
	for (int i = 0; i < 25; i++) {
		gpreempt_request_t request = { .gpu_count = GPREEMPT_ALL_GPUS, .max_wait_us = 10000000, .ttl_us = GPREEMPT_MAX_TTL };
		gpreempt_lease_t mine;
		queue_info_t *queues;
		uint32_t count;

		if (again(notify_online_task(&request, &mine)) != 0 || !mine.quiet || again(gpreempt_renew(&mine, GPREEMPT_MAX_TTL)) != 0 ||
		    again(get_all_queues(&queues, &count)) != 0)
			__atomic_add_fetch((int *)failures, 1, __ATOMIC_RELAXED);
		else
			free_queue_info(queues);
		if (again(online_task_complete(&mine)) != 0)
			__atomic_add_fetch((int *)failures, 1, __ATOMIC_RELAXED);
	}
	return NULL;
}

static void threads(int n)
{
	pthread_t all[64];
	int failures = 0;

	for (int i = 0; i < n; i++)
		pthread_create(&all[i], NULL, work, &failures);
	for (int i = 0; i < n; i++)
		pthread_join(all[i], NULL);
	printf("%d", failures);
}

/* in_child reports the lease of the parent, and a lease of its own. clone is _Fork, which
 * runs no handlers of fork. */
static void in_child(pid_t (*clone)(void))
{
	int err, status = 0;
	pid_t pid;

	fflush(stdout);
	pid = clone();
	if (pid == 0) {
		gpreempt_request_t request = { .gpu_count = GPREEMPT_OWN_GPUS };
		gpreempt_lease_t mine;

		result(online_task_complete(&lease));
		printf(" ");
		err = again(notify_online_task(&request, &mine));
		result(err);
		printf(" ");
		result(again(online_task_complete(&mine)));
		printf(" ");
		fflush(stdout);
		gpreempt_poc_cleanup();
		_exit(0);
	}
	waitpid(pid, &status, 0);
	printf("%s", status == 0 ? "ended" : "died");
}

/* signals reports whether anything has changed how signals are handled. */
static void signals(void)
{
	for (int i = 1; i < 65; i++) {
		struct sigaction a;

		if (sigaction(i, NULL, &a) == 0 && a.sa_handler != SIG_DFL && !(i == SIGPIPE && a.sa_handler == SIG_IGN))
			printf(" %d", i);
	}
}

static uint32_t parse(char *list, uint32_t *ids)
{
	uint32_t n = 0;

	for (char *id = strtok(list, ","); id != NULL && n < GPREEMPT_MAX_QUEUES; id = strtok(NULL, ","))
		ids[n++] = (uint32_t)strtoul(id, NULL, 10);
	return n;
}

int main(void)
{
	uint32_t ids[GPREEMPT_MAX_QUEUES];
	char line[4096], word[32], arg[2048];

	while (fgets(line, sizeof(line), stdin) != NULL) {
		queue_info_t *queues = NULL, queue = { 0 };
		uint32_t count = 0;
		long number = 0;
		int err;

		arg[0] = 0;
		if (sscanf(line, "%31s %2047s %ld", word, arg, &number) < 1)
			continue;
		if (strcmp(word, "init") == 0) {
			result(gpreempt_poc_init());
		} else if (strcmp(word, "cleanup") == 0) {
			gpreempt_poc_cleanup();
			printf("ok");
		} else if (strcmp(word, "socket") == 0) {
			gpreempt_poc_cleanup();
			setenv("GPREEMPT_SOCKET", arg, 1);
			printf("ok");
		} else if (strcmp(word, "online") == 0) {
			result(online(arg, number));
				printf(" quiet=%d suspended=%u", last.quiet, last.suspended);
		} else if (strcmp(word, "renew") == 0) {
			result(again(gpreempt_renew(&lease, strtol(arg, NULL, 10))));
		} else if (strcmp(word, "complete") == 0) {
			result(again(online_task_complete(&lease)));
		} else if (strcmp(word, "complete-once") == 0) {
			result(online_task_complete(&lease));
		} else if (strcmp(word, "lease") == 0) {
			printf("%s", lease.id);
		} else if (strcmp(word, "all") == 0) {
			err = get_all_queues(&queues, &count);
			show(err, queues, count);
		} else if (strcmp(word, "priority") == 0) {
			err = find_queues_by_priority((uint32_t)strtoul(arg, NULL, 10), (uint32_t)number, &queues, &count);
			show(err, queues, count);
		} else if (strcmp(word, "process") == 0) {
			err = find_queues_by_process((int32_t)strtol(arg, NULL, 10), &queues, &count);
			show(err, queues, count);
		} else if (strcmp(word, "tag") == 0) {
			err = find_queues_by_tag(arg, &queues, &count);
			show(err, queues, count);
		} else if (strcmp(word, "status") == 0) {
			result(gpreempt_get_queue_status((int32_t)strtol(arg, NULL, 10), (uint32_t)number, &queue));
			printf(" active=%d", queue.is_active);
		} else if (strcmp(word, "suspend-process") == 0) {
			result(gpreempt_suspend_process((int32_t)number, NULL, 0, strtol(arg, NULL, 10)));
		} else if (strcmp(word, "resume-process") == 0) {
			result(gpreempt_resume_process((int32_t)number, NULL, 0));
		} else if (strcmp(word, "suspend-ids") == 0) {
			count = parse(arg, ids);
			result(gpreempt_suspend_process((int32_t)number, ids, count, 0));
		} else if (strcmp(word, "resume-ids") == 0) {
			count = parse(arg, ids);
			result(gpreempt_resume_process((int32_t)number, ids, count));
		} else if (strcmp(word, "suspend") == 0) {
			count = parse(arg, ids);
			result(gpreempt_batch_unmap_queues(ids, count, 1000));
		} else if (strcmp(word, "resume") == 0) {
			count = parse(arg, ids);
			result(gpreempt_fast_remap_queues(ids, count));
		} else if (strcmp(word, "reserve") == 0) {
			result(gpreempt_set_hqd_reservation(1, (uint32_t)strtoul(arg, NULL, 10), (uint32_t)number));
		} else if (strcmp(word, "threads") == 0) {
			threads((int)strtol(arg, NULL, 10));
		} else if (strcmp(word, "fork") == 0) {
			in_child(fork);
		} else if (strcmp(word, "clone") == 0) {
			in_child(_Fork);
		} else if (strcmp(word, "signals") == 0) {
			printf("changed:");
			signals();
		} else if (strcmp(word, "error") == 0) {
			printf("%s", gpreempt_last_error());
		} else {
			printf("unknown %s", word);
		}
		printf("\n");
		fflush(stdout);
	}
	gpreempt_poc_cleanup();
	return 0;
}
