/* Stands for libcuda.so.1 where there is no GPU: checks every launch as a driver would, and runs the kernel on the CPU,
   either at once or when it is told to, its blocks and threads in a random order. An image of a program is the path of a
   library that `kernels_on_cpu.cpp` has been compiled to. */

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <dlfcn.h>
#include <deque>
#include <mutex>
#include <numeric>
#include <random>
#include <vector>

typedef void (*Run)(int, unsigned, const unsigned *, const unsigned *, void **);

enum { INVALID_VALUE = 1, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, STREAM_CAPTURE_UNSUPPORTED = 900 };
enum { DEVICES = 2, THREADS = 256 };

struct Context {
    int device;
};
struct Program {
    Run run;
    Context *context;
};
struct Function {
    Program *program;
    int is_many;
};
struct Order { /* a launch, or a copy */
    uint64_t stream;
    Function *function;
    unsigned blocks;
    std::vector<std::vector<char>> arguments;
    uint64_t to;
    const void *from;
    size_t bytes;
};

static Context contexts[DEVICES] = {{0}, {1}};
static thread_local std::vector<Context *> current;
static std::mutex lock; /* over what follows */
static std::deque<Order> queue;
static uint64_t captured_stream;
static int is_deferring, fails_next;
static std::mt19937 randomness;
static void (*begin_work)(uint64_t stream, int is_copy); /* around all that runs on a device */
static void (*end_work)();

/* Each device has its streams: 0x1000 and 0x2000 are the default ones. */
static bool is_stream_of_current(const void *stream) {
    return !current.empty() && (uint64_t)stream >> 12 == (uint64_t)current.back()->device + 1;
}

extern "C" {
/* What tests read and set. */
uint64_t fake_launches, fake_copies, fake_refused;
uint64_t fake_streams[DEVICES] = {0x1000, 0x2000}; /* the default stream of each device */

void fake_reset(unsigned seed) {
    std::lock_guard<std::mutex> guard(lock);
    queue.clear();
    captured_stream = 0;
    is_deferring = fails_next = 0;
    fake_launches = fake_copies = fake_refused = 0;
    randomness.seed(seed);
}
void fake_capture(uint64_t stream) { captured_stream = stream; }
void fake_defer(int whether) { is_deferring = whether; }
void fake_fail(int status) { fails_next = status; }
void fake_surround(void (*begin)(uint64_t, int), void (*end)()) { begin_work = begin, end_work = end; }

static void run_alone(Order &launch);
static void run(Order &launch) {
    if (begin_work) begin_work(launch.stream, launch.function == nullptr);
    run_alone(launch);
    if (end_work) end_work();
}

static void run_alone(Order &launch) {
    if (launch.function == nullptr) {
        memcpy((void *)launch.to, launch.from, launch.bytes); /* what lies there now */
        return;
    }
    std::vector<unsigned> blocks(launch.blocks), threads(THREADS);
    std::iota(blocks.begin(), blocks.end(), 0u);
    std::iota(threads.begin(), threads.end(), 0u);
    std::shuffle(blocks.begin(), blocks.end(), randomness);
    std::shuffle(threads.begin(), threads.end(), randomness);
    std::vector<void *> arguments;
    for (auto &argument : launch.arguments) arguments.push_back(argument.data());
    launch.function->program->run(
        launch.function->is_many, launch.blocks, blocks.data(), threads.data(), arguments.data());
}

/* Runs what has been ordered so far, one after the other. */
void fake_run() {
    std::lock_guard<std::mutex> guard(lock);
    for (; !queue.empty(); queue.pop_front()) run(queue.front());
}

int cuDeviceGet(int *device, int ordinal) {
    if (ordinal < 0 || ordinal >= DEVICES) return INVALID_VALUE;
    *device = ordinal;
    return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = &contexts[device];
    return 0;
}
int cuCtxGetCurrent(void **context) {
    *context = current.empty() ? nullptr : current.back();
    return 0;
}
int cuCtxPushCurrent_v2(void *context) {
    current.push_back((Context *)context);
    return 0;
}
int cuCtxPopCurrent_v2(void **context) {
    if (current.empty()) return INVALID_CONTEXT;
    *context = current.back();
    current.pop_back();
    return 0;
}
int cuModuleLoadData(void **program, const void *image) {
    void *library = current.empty() ? nullptr : dlopen((const char *)image, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return current.empty() ? INVALID_CONTEXT : INVALID_VALUE;
    *program = new Program{(Run)dlsym(library, "run"), current.back()};
    return 0;
}
int cuModuleGetFunction(void **function, void *program, const char *name) {
    if (strcmp(name, "measure_one") && strcmp(name, "measure_many")) return INVALID_VALUE;
    *function = new Function{(Program *)program, !strcmp(name, "measure_many")};
    return 0;
}
int cuStreamIsCapturing(void *stream, int *is_capturing) {
    if (current.empty()) return INVALID_CONTEXT;
    *is_capturing = captured_stream != 0 && (uint64_t)stream == captured_stream;
    return 0;
}
int cuGetErrorName(int status, const char **name) {
    *name = status == INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT" : "CUDA_ERROR_INVALID_VALUE";
    return 0;
}

int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *stream) {
    std::lock_guard<std::mutex> guard(lock);
    if (!is_stream_of_current(stream)) {
        fake_refused++;
        return INVALID_HANDLE;
    }
    fake_copies++;
    queue.push_back({(uint64_t)stream, nullptr, 0, {}, to, from, bytes});
    if (!is_deferring) {
        run(queue.back());
        queue.pop_back();
    }
    return 0;
}

int cuLaunchKernel(void *handle, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y,
                   unsigned threads_z, unsigned shared_bytes, void *stream, void **arguments, void **extra) {
    std::lock_guard<std::mutex> guard(lock);
    Function *function = (Function *)handle;
    int status = fails_next;
    fails_next = 0;
    if (current.empty() || current.back() != function->program->context) status = INVALID_CONTEXT;
    else if (!is_stream_of_current(stream)) status = INVALID_HANDLE;
    else if ((uint64_t)stream == captured_stream) status = STREAM_CAPTURE_UNSUPPORTED;
    else if (x == 0 || y != 1 || z != 1 || threads != THREADS || threads_y != 1 || threads_z != 1 || shared_bytes || extra)
        status = INVALID_VALUE;
    if (status) {
        fake_refused++;
        return status;
    }
    fake_launches++;
    Order launch{(uint64_t)stream, function, x, {}, 0, nullptr, 0};
    const size_t one[] = {80, 8, 8}, many[] = {8, 8, 8, 8};
    const size_t *sizes = function->is_many ? many : one;
    for (size_t at = 0; at < (function->is_many ? 4u : 3u); at++)
        launch.arguments.emplace_back((char *)arguments[at], (char *)arguments[at] + sizes[at]);
    if (is_deferring) queue.push_back(std::move(launch));
    else run(launch);
    return 0;
}
}
