// A job whose results must not change by suspensions. In each round it sets a buffer of 96 MiB anew,
// works on it in long kernels, and compares a checksum of 64 bits with that of the first round:
// integer arithmetic, chains of fp32 operations in registers and shared memory, tensor core
// products, and atomic additions of integers.
//
//   check FILE KERNEL_MS
//
// Words of FILE as job.cu's: 0 count; 1 stop; 2 rounds; 3 error; 7 pause; 8 pauses. And 9 rounds
// with another checksum; 10 the first checksum; 13 the last; 14 change a bit in the next round, to
// see that it is found.
#include <cuda_fp16.h>
#include <fcntl.h>
#include <mma.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

typedef unsigned long long word;

static const size_t N = 24 << 20; // of 4 bytes
static const int THREADS = 256, BINS = 4096;

__device__ static unsigned mix(unsigned x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

__device__ static word mix64(word x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// Each kernel has as many blocks as the GPU holds at once: block 0 counts until the kernel ends.
// It alone reads the counter: see job.cu.
__device__ static bool counts() { return threadIdx.x == 0 && blockIdx.x == 0; }

__device__ static void tick(volatile word *counter, word &count) {
    if (counts())
        *counter = ++count;
}

#define EACH_TILE for (size_t i = blockIdx.x * (size_t)THREADS + threadIdx.x; i < N; i += (size_t)gridDim.x * THREADS)

__global__ void reset(unsigned *data, word *bins, word *sum) {
    EACH_TILE
        data[i] = mix((unsigned)i);
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < BINS; i += gridDim.x * THREADS)
        bins[i] = 0;
    if (blockIdx.x == 0 && threadIdx.x == 0)
        *sum = 0;
}

__global__ void integers(volatile word *counter, unsigned *data, int steps) {
    word count = counts() ? *counter : 0;
    EACH_TILE {
        unsigned x = data[i];
        for (int k = 0; k < steps; k++) {
            x = mix(x + k);
            if (k % 64 == 0)
                tick(counter, count);
        }
        data[i] = x;
    }
}

// A logistic map: it stays between 0 and 1, and doubles a difference with each step, so that no
// wrong bit is lost.
__device__ static float chaos(float x) { return 3.99f * fmaf(-x, x, x); }

// N is a multiple of THREADS, so that all threads of a block make the same steps.
__global__ void floats(volatile word *counter, unsigned *data, int steps) {
    __shared__ float near[THREADS];
    word count = counts() ? *counter : 0;
    int t = threadIdx.x;
    EACH_TILE {
        float x = (data[i] & 0xffffff) / 16777216.0f;
        for (int k = 0; k < steps; k++) {
            for (int j = 0; j < 8; j++)
                x = chaos(x);
            near[t] = x;
            __syncthreads();
            x = fmaf(0.9f, x, 0.1f * near[(t + 1 + k) % THREADS]);
            __syncthreads();
            if (k % 16 == 0)
                tick(counter, count);
        }
        data[i] ^= __float_as_uint(x) * 2654435761u;
    }
}

__global__ void products(volatile word *counter, unsigned *data, int steps) {
    using namespace nvcuda::wmma;
    __shared__ __align__(32) half inputs[THREADS / 32][256];
    __shared__ __align__(32) float outputs[THREADS / 32][256];
    word count = counts() ? *counter : 0;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    EACH_TILE {
        unsigned x = data[i];
        for (int j = 0; j < 8; j++) // numbers of 0 to 7, the eight of a word
            inputs[warp][lane * 8 + j] = __float2half((float)(x >> (4 * j) & 7));
        __syncwarp();
        fragment<matrix_a, 16, 16, 16, half, row_major> a;
        fragment<matrix_b, 16, 16, 16, half, col_major> b;
        fragment<accumulator, 16, 16, 16, float> sum;
        load_matrix_sync(a, inputs[warp], 16);
        load_matrix_sync(b, inputs[warp], 16);
        fill_fragment(sum, 0.0f);
        for (int k = 0; k < steps; k++) {
            mma_sync(sum, a, b, sum);
            if (k % 64 == 0)
                tick(counter, count);
        }
        store_matrix_sync(outputs[warp], sum, 16, mem_row_major);
        __syncwarp();
        for (int j = 0; j < 8; j++)
            x = x * 31 + __float_as_uint(outputs[warp][lane * 8 + j]);
        data[i] = x;
        __syncwarp();
    }
}

__global__ void additions(volatile word *counter, const unsigned *data, word *bins, int steps) {
    word count = counts() ? *counter : 0;
    EACH_TILE {
        unsigned x = data[i];
        for (int k = 0; k < steps; k++) {
            x = mix(x + k);
            atomicAdd(&bins[x % BINS], (word)(x >> 12));
            if (k % 4 == 0)
                tick(counter, count);
        }
    }
}

__global__ void checksum(const unsigned *data, const word *bins, word *sum) {
    word mine = 0;
    EACH_TILE
        mine += mix64((word)i << 32 | data[i]);
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < BINS; i += gridDim.x * THREADS)
        mine += mix64(bins[i] + i);
    atomicAdd(sum, mine); // the order does not matter: these are integers
}

static word *words;
static int blocks;
static volatile word *counter;
static unsigned *data;
static word *bins, *sum;

static word get(int i) { return *(volatile word *)&words[i]; }

static void need(cudaError_t error) {
    if (error == cudaSuccess)
        return;
    fprintf(stderr, "check: %s\n", cudaGetErrorString(error));
    words[3] = error;
    exit(1);
}

// Each waits for its end, so that holds meet each kind of kernel about as often.
static void kernel(int which, int steps) {
    switch (which) {
    case 0: integers<<<blocks, THREADS>>>(counter, data, steps); break;
    case 1: floats<<<blocks, THREADS>>>(counter, data, steps); break;
    case 2: products<<<blocks, THREADS>>>(counter, data, steps); break;
    case 3: additions<<<blocks, THREADS>>>(counter, data, bins, steps); break;
    }
    need(cudaGetLastError());
    need(cudaDeviceSynchronize());
}

static float timed(int which, int steps) {
    cudaEvent_t begin, end;
    float ms = 0;
    need(cudaEventCreate(&begin));
    need(cudaEventCreate(&end));
    need(cudaEventRecord(begin));
    kernel(which, steps);
    need(cudaEventRecord(end));
    need(cudaEventSynchronize(end));
    need(cudaEventElapsedTime(&ms, begin, end));
    return ms;
}

int main(int argc, char **argv) {
    if (argc != 3)
        return 2;
    int fd = open(argv[1], O_RDWR | O_CREAT, 0600);
    if (fd < 0 || ftruncate(fd, 4096))
        return 2;
    words = (word *)mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    memset(words, 0, 4096);
    words[12] = 1;
    cudaDeviceProp properties;
    need(cudaGetDeviceProperties(&properties, 0));
    need(cudaHostRegister(words, 4096, cudaHostRegisterMapped | cudaHostRegisterPortable));
    need(cudaHostGetDevicePointer((void **)&counter, words, 0));
    need(cudaMalloc(&data, N * 4));
    need(cudaMalloc(&bins, BINS * sizeof(word)));
    need(cudaMalloc(&sum, sizeof(word)));
    int least = 32, each = 0;
    need(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, integers, THREADS, 0)), least = each < least ? each : least;
    need(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, floats, THREADS, 0)), least = each < least ? each : least;
    need(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, products, THREADS, 0)), least = each < least ? each : least;
    need(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, additions, THREADS, 0)), least = each < least ? each : least;
    blocks = least * properties.multiProcessorCount;

    // The steps that take KERNEL_MS. They stay the same from here on, and so do the results.
    int steps[4];
    reset<<<blocks, THREADS>>>(data, bins, sum);
    for (int which = 0; which < 4; which++) {
        int few = which == 3 ? 1 : 8;
        timed(which, few);
        double without = timed(which, few), with = timed(which, 5 * few);
        double step = (with - without) / (4 * few);
        double n = step > 0 ? atof(argv[2]) / step : few;
        steps[which] = n < 1 ? 1 : n > 100000 ? 100000 : (int)n;
        fprintf(stderr, "check: kernel %d: %d steps, %.1f ms\n", which, steps[which], timed(which, steps[which]));
    }
    for (word round = 0; !get(1); round++) {
        while (get(7) && !get(1)) {
            words[8] = 1;
            usleep(200);
        }
        words[8] = 0;
        reset<<<blocks, THREADS>>>(data, bins, sum);
        for (int which = 0; which < 4; which++)
            kernel(which, steps[which]);
        if (get(14)) {
            unsigned value;
            need(cudaMemcpy(&value, data + N / 2, 4, cudaMemcpyDeviceToHost));
            value ^= 1;
            need(cudaMemcpy(data + N / 2, &value, 4, cudaMemcpyHostToDevice));
            words[14] = 0;
        }
        checksum<<<blocks, THREADS>>>(data, bins, sum);
        need(cudaGetLastError());
        word is;
        need(cudaMemcpy(&is, sum, sizeof is, cudaMemcpyDeviceToHost));
        if (round == 0)
            words[10] = is;
        words[13] = is;
        if (is != words[10])
            words[9]++;
        words[2] = round + 1;
    }
    return 0;
}
