// An offline job that counts its progress in host memory from the device, so that a reader sees
// within microseconds whether it runs.
//
//   job FILE KERNEL_MS [long|coop|tensor|graph|managed] [--contexts N] [--child]
//
// long     kernels of KERNEL_MS that fill the GPU
// coop     the same by a cooperative launch, with a barrier of the whole grid in each step
// tensor   the same, with tensor core products
// graph    a CUDA graph of kernels of 20 us, replayed
// managed  kernels that touch managed memory, which the CPU touches, too: before each kernel, and
//          by a thread meanwhile. So there are faults at any time.
//
// Each context has its own channels: with N contexts N kernels take turns on the GPU. --child forks
// a process that has the driver's descriptors of this one, as the workers of a data loader do.
//
// Words of FILE: 0 count; 1 stop; 2 kernels; 3 error; 4 create one more context; 5 its count;
// 6 its state; 7 pause before the next kernel; 8 contexts that pause; 10 the child; 11 end the child;
// 12 contexts; 16 and on: counts of the contexts after the first.
#include <cooperative_groups.h>
#include <cuda.h>
#include <fcntl.h>
#include <mma.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

typedef unsigned long long word;

static const size_t MANAGED = 256 << 20; // far below what is free: more of it can hang a GPU
static const int THREADS = 256;

// One thread counts, and it alone reads the counter: while the reads of host memory of all threads
// are under way, some 8 ms, the GPU cannot be taken from the kernel.
__device__ static bool counts() { return threadIdx.x == 0 && blockIdx.x == 0; }

__device__ static void wait(long long clocks) {
    long long begin = clock64();
    while (clock64() - begin < clocks) {
    }
}

__global__ void spin(volatile word *counter, long long clocks) {
    long long begin = clock64();
    word n = counts() ? *counter : 0;
    while (clock64() - begin < clocks) {
        wait(3000);
        if (counts())
            *counter = ++n;
    }
}

// Every block must make the same number of steps: a barrier waits for all.
__global__ void together(volatile word *counter, long long steps) {
    cooperative_groups::grid_group grid = cooperative_groups::this_grid();
    word n = counts() ? *counter : 0;
    for (long long i = 0; i < steps; i++) {
        wait(1500);
        if (counts())
            *counter = ++n;
        grid.sync();
    }
}

__global__ void products(volatile word *counter, long long clocks, float *sink) {
    using namespace nvcuda::wmma;
    fragment<matrix_a, 16, 16, 16, half, row_major> a;
    fragment<matrix_b, 16, 16, 16, half, col_major> b;
    fragment<accumulator, 16, 16, 16, float> sum;
    fill_fragment(a, __float2half(0.5f));
    fill_fragment(b, __float2half(0.25f));
    fill_fragment(sum, 0.0f);
    long long begin = clock64();
    word n = counts() ? *counter : 0;
    while (clock64() - begin < clocks) {
        for (int i = 0; i < 64; i++)
            mma_sync(sum, a, b, sum);
        if (counts())
            *counter = ++n;
    }
    if (sum.x[0] < 0) // never, but the compiler does not know that
        *sink = sum.x[0];
}

__global__ void brief(volatile word *counter, long long clocks) {
    wait(clocks);
    if (counts())
        *counter = *counter + 1;
}

__global__ void touch(volatile word *counter, unsigned *data, size_t n, long long clocks) {
    word count = counts() ? *counter : 0;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        data[i] = data[i] * 2654435761u + 1;
        wait(clocks);
        if (counts())
            *counter = ++count;
    }
}

static word *words;
static double milliseconds;
static long long clocks;
static const char *mode = "long";
static int multiprocessors;

static word get(int i) { return *(volatile word *)&words[i]; }

static bool failed(cudaError_t error) {
    if (error == cudaSuccess)
        return false;
    fprintf(stderr, "job: %s\n", cudaGetErrorString(error));
    words[3] = error;
    return true;
}

template <class Kernel> static int resident(Kernel kernel) {
    int each = 0;
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, THREADS, 0);
    return each * multiprocessors; // all are on the GPU at once: block 0 counts for as long as the kernel runs
}

// pause waits while the measuring program wants the GPU without this job.
static void pause_here() {
    if (!get(7))
        return;
    __sync_fetch_and_add(&words[8], 1);
    while (get(7) && !get(1))
        usleep(200);
    __sync_fetch_and_sub(&words[8], 1);
}

static unsigned *data;
static volatile bool touches = true;

static void cpu_touches() {
    for (size_t page = 0; touches; page = (page + 1) % (MANAGED / 4096)) {
        ((volatile unsigned *)data)[page * 1024] ^= 1;
        usleep(100);
    }
}

// work runs kernels in the current context, which count in a word.
static int work(int index) {
    word *counter;
    float *sink;
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t replay = 0;
    if (failed(cudaHostGetDevicePointer((void **)&counter, words, 0)) || failed(cudaMalloc(&sink, 4)) || failed(cudaStreamCreate(&stream)))
        return 1;
    counter += index;
    bool coop = !strcmp(mode, "coop"), tensor = !strcmp(mode, "tensor"), managed = !strcmp(mode, "managed");
    int blocks = coop ? resident(together) : tensor ? resident(products) : managed ? resident(touch) : resident(spin);
    long long steps = (long long)(milliseconds * 1000 / 4); // a step with its barrier takes a few microseconds
    if (!strcmp(mode, "graph")) {
        int nodes = (int)(milliseconds * 1000 / 20) + 1, all = resident(brief);
        if (failed(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal)))
            return 1;
        for (int i = 0; i < nodes && i < 2000; i++)
            brief<<<all, THREADS, 0, stream>>>(counter, (long long)(20e-6 * 1.7e9));
        if (failed(cudaStreamEndCapture(stream, &graph)) || failed(cudaGraphInstantiateWithFlags(&replay, graph, 0)))
            return 1;
    }
    std::thread toucher;
    if (managed) {
        size_t available, total;
        if (failed(cudaMemGetInfo(&available, &total)) || available < 4 * MANAGED || failed(cudaMallocManaged(&data, MANAGED)))
            return 1;
        memset(data, 1, MANAGED);
        int concurrent = 0;
        cudaDeviceGetAttribute(&concurrent, cudaDevAttrConcurrentManagedAccess, 0);
        if (concurrent)
            toucher = std::thread(cpu_touches);
    }
    while (!get(1)) {
        pause_here();
        if (replay) {
            cudaGraphLaunch(replay, stream);
        } else if (coop) {
            void *arguments[] = {&counter, &steps};
            cudaLaunchCooperativeKernel((void *)together, dim3(blocks), dim3(THREADS), arguments, 0, stream);
        } else if (tensor) {
            products<<<blocks, THREADS, 0, stream>>>(counter, clocks, sink);
        } else if (managed) {
            for (size_t i = 0; i < MANAGED / 4; i += 8 * 1024) // every eighth page goes to the CPU
                ((volatile unsigned *)data)[i] += 1;
            touch<<<blocks, THREADS, 0, stream>>>(counter, data, MANAGED / 4, 3000);
        } else {
            spin<<<blocks, THREADS, 0, stream>>>(counter, clocks);
        }
        if (failed(cudaGetLastError()) || failed(cudaStreamSynchronize(stream)))
            break;
        __sync_fetch_and_add(&words[2], 1);
    }
    touches = false;
    if (toucher.joinable())
        toucher.join();
    return words[3] != 0;
}

// another makes a context of its own in this thread.
static bool another() {
    CUdevice device;
    CUcontext context;
    if (cuInit(0) || cuDeviceGet(&device, 0))
        return false;
#if CUDA_VERSION >= 13000
    CUctxCreateParams parameters = {};
    return !cuCtxCreate(&context, &parameters, 0, device);
#else
    return !cuCtxCreate(&context, 0, device);
#endif
}

// newborn makes a context when it is told to: while this process is suspended.
static void newborn() {
    while (!get(4))
        usleep(1000);
    if (get(1))
        return;
    if (!another()) {
        words[6] = 2;
        return;
    }
    words[6] = 1; // it exists
    word *counter;
    if (failed(cudaHostGetDevicePointer((void **)&counter, words, 0))) {
        words[6] = 3;
        return;
    }
    while (!get(1)) {
        spin<<<1, 32>>>(counter + 5, clocks);
        if (failed(cudaDeviceSynchronize()))
            return;
    }
}

static void fork_child() {
    pid_t parent = getpid(), child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        while (!get(11) && getppid() == parent)
            usleep(1000);
        _exit(0);
    }
    words[10] = child;
}

int main(int argc, char **argv) {
    int contexts = 1;
    bool child = false;
    if (argc < 3)
        return 2;
    for (int i = 3; i < argc; i++) {
        if (!strcmp(argv[i], "--contexts") && i + 1 < argc)
            contexts = atoi(argv[++i]);
        else if (!strcmp(argv[i], "--child"))
            child = true;
        else
            mode = argv[i];
    }
    int fd = open(argv[1], O_RDWR | O_CREAT, 0600);
    if (fd < 0 || ftruncate(fd, 4096))
        return 2;
    words = (word *)mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    memset(words, 0, 4096);
    words[12] = contexts;
    milliseconds = atof(argv[2]);
    clocks = (long long)(milliseconds * 1e-3 * 1.7e9);
    cudaDeviceProp properties;
    if (failed(cudaGetDeviceProperties(&properties, 0)) || failed(cudaSetDevice(0)) ||
        failed(cudaHostRegister(words, 4096, cudaHostRegisterMapped | cudaHostRegisterPortable)))
        return 1;
    multiprocessors = properties.multiProcessorCount;
    if (child)
        fork_child();
    std::vector<std::thread> others;
    others.emplace_back(newborn);
    for (int i = 1; i < contexts; i++)
        others.emplace_back([i] {
            if (!another() || work(15 + i))
                words[3] = words[3] ? words[3] : 1;
        });
    int status = work(0);
    words[1] = 1;
    words[4] = 1;
    words[11] = 1;
    for (std::thread &t : others)
        t.join();
    return status;
}
