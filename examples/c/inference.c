/* An inference server that announces each of its requests. */
#include <gpreempt.h>
#include <stdio.h>
#include <unistd.h>

int main(void)
{
	const gpreempt_request_t request = { .label = "chat", .gpu_count = GPREEMPT_ALL_GPUS, .max_wait_us = 20000 };
	int last = 0;

	for (int i = 0; i < 10; i++) {
		gpreempt_lease_t lease;
		int err = gpreempt_notify_online(&request, &lease);

		if (err != last) /* once, not for each request */
			fprintf(stderr, "%s%s\n", err ? "inference runs unprotected: " : "inference is protected again", gpreempt_last_error());
		last = err;
		printf("request %d: %s\n", i, lease.quiet ? "quiet" : "not quiet");
		usleep(6000); /* the work: launch kernels, wait for them */
		if (gpreempt_complete(&lease) != 0)
			fprintf(stderr, "%s\n", gpreempt_last_error());
		usleep(50000);
	}
	gpreempt_cleanup();
	return 0;
}
