// Online requests: for each line on standard input it runs N kernels of a given length and answers
// with the microseconds that took.
//   requests KERNELS KERNEL_MS
#include <cstdio>
#include <cstdlib>
#include <time.h>

static double now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

__global__ void work(long long clocks) {
    long long begin = clock64();
    while (clock64() - begin < clocks) {
    }
}

int main(int argc, char **argv) {
    if (argc != 3)
        return 2;
    int kernels = atoi(argv[1]);
    long long clocks = (long long)(atof(argv[2]) * 1e-3 * 1.7e9);
    work<<<528, 256>>>(1000);
    if (cudaDeviceSynchronize())
        return 1;
    puts("ready");
    fflush(stdout);
    char line[64];
    while (fgets(line, sizeof line, stdin)) {
        double begin = now();
        for (int i = 0; i < kernels; i++)
            work<<<528, 256>>>(clocks);
        if (cudaDeviceSynchronize())
            return 1;
        printf("%.1f\n", now() - begin);
        fflush(stdout);
    }
    return 0;
}
