// Online requests: for each line N on standard input it runs N kernels and answers with the
// microseconds that took. For a line "N announce" it announces them first, by the C client, and
// answers with the microseconds of both, of the announcement, and whether the GPUs were quiet.
//   requests KERNEL_MS
//
// A kernel is a fixed amount of work, and not of time: a clock runs on while a kernel is off the
// GPU, so that kernels that wait for it would get shorter beside others. The amount is found at the
// start, when the GPU must be free.
#include <cstdio>
#include <cstdlib>
#include <time.h>
#ifdef CLIENT
#include "gpreempt.h"
#endif

static double now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

__global__ void work(long long steps, float *sink) {
    float x = threadIdx.x;
    for (long long i = 0; i < steps; i++)
        x = fmaf(x, 0.999f, 1.0f);
    if (x < 0) // never, but the compiler does not know that
        *sink = x;
}

static float *sink;

static double run(int kernels, long long steps) {
    double begin = now();
    for (int i = 0; i < kernels; i++)
        work<<<528, 256>>>(steps, sink);
    if (cudaDeviceSynchronize())
        exit(1);
    return now() - begin;
}

static void announced(int kernels, long long steps) {
#ifdef CLIENT
    gpreempt_request_t request = {"requests"};
    request.gpu_count = GPREEMPT_ALL_GPUS;
    gpreempt_lease_t lease = {};
    double begin = now();
    if (gpreempt_notify_online(&request, &lease))
        fprintf(stderr, "requests: %s\n", gpreempt_last_error());
    double announce = now() - begin;
    run(kernels, steps);
    printf("%.1f %.1f %d\n", now() - begin, announce, lease.quiet);
    fflush(stdout); // the reader measures until the answer, without Complete
    if (gpreempt_complete(&lease))
        fprintf(stderr, "requests: %s\n", gpreempt_last_error());
#else
    printf("built without the C client\n");
#endif
}

int main(int argc, char **argv) {
    if (argc != 2 || cudaMalloc(&sink, 4))
        return 2;
    double wanted = atof(argv[1]) * 1e3;
    long long steps = 100000;
    run(200, steps); // the clocks of the GPU rise
    for (int i = 0; i < 3; i++)
        steps = (long long)(steps * wanted * 100 / run(100, steps)) + 1;
    printf("%lld\n", steps);
    fflush(stdout);
    char line[64];
    while (fgets(line, sizeof line, stdin)) {
        int kernels = 0;
        char announce = 0;
        sscanf(line, "%d %c", &kernels, &announce);
        if (announce)
            announced(kernels, steps);
        else
            printf("%.1f\n", run(kernels, steps));
        fflush(stdout);
    }
    return 0;
}
