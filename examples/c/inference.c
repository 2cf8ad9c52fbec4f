/* An inference server that announces each of its requests. */
#include <gpreempt.h>
#include <stdio.h>
#include <unistd.h>

int main(void)
{
	const gpreempt_request_t request = { .label = "chat", .max_wait_us = 20000 };

	for (int i = 0; i < 10; i++) {
		gpreempt_lease_t lease;

		if (gpreempt_notify_online(&request, &lease) != 0)
			fprintf(stderr, "beside offline work: %s\n", gpreempt_last_error());
		printf("request %d: %s\n", i, lease.quiet ? "quiet" : "not quiet");
		usleep(6000); /* the work: launch kernels, wait for them */
		if (gpreempt_complete(&lease) != 0)
			fprintf(stderr, "%s\n", gpreempt_last_error());
		usleep(50000);
	}
	gpreempt_cleanup();
	return 0;
}
