/* Lets a C++ compiler for the CPU compile our kernels, and runs them: each thread of a block is a fiber, and a block runs
   until all of its threads wait at a barrier, again and again. A shuffle is such a barrier. */

#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <ucontext.h>
#include <vector>

#define __device__
#define __global__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(threads)

struct Index {
    unsigned x;
};
static Index threadIdx, blockIdx;

static const int MOST_THREADS = 1024, STACK_BYTES = 65536;

struct Fiber {
    ucontext_t first;
    void *place[5];
    std::vector<char> stack;
    bool has_begun, has_ended;
    int shuffles;
};

static Fiber fibers[MOST_THREADS];
static void *scheduler[5];
static uint64_t shuffled[2][MOST_THREADS];
static void (*body)();

/* What jumps changes all registers, which a compiler that looks into it would not see. */
#if defined(__clang__)
#define NOT_LOOKED_INTO __attribute__((noinline))
#else
#define NOT_LOOKED_INTO __attribute__((noipa))
#endif

/* The compiler's own jumps: the C library's are followed by AddressSanitizer, which knows nothing of fibers. */
NOT_LOOKED_INTO static void leave() { __builtin_longjmp(scheduler, 1); }

static void run_body() {
    body();
    fibers[threadIdx.x].has_ended = true;
    leave();
}

NOT_LOOKED_INTO static void __syncthreads() {
    volatile unsigned me = threadIdx.x;
    if (!__builtin_setjmp(fibers[me].place)) leave();
    threadIdx.x = me;
}

NOT_LOOKED_INTO static void enter(Fiber &fiber) {
    if (fiber.has_begun) __builtin_longjmp(fiber.place, 1);
    fiber.has_begun = true;
    setcontext(&fiber.first);
}

NOT_LOOKED_INTO static void resume(unsigned thread) {
    threadIdx.x = thread;
    if (!__builtin_setjmp(scheduler)) enter(fibers[thread]);
}

/* Runs one block; `order` says in which order its threads run between two barriers. */
static void run_block(unsigned block, unsigned threads, const unsigned *order, void (*kernel)()) {
    blockIdx.x = block;
    body = kernel;
    for (unsigned thread = 0; thread < threads; thread++) {
        Fiber &fiber = fibers[thread];
        fiber.has_begun = fiber.has_ended = false;
        fiber.shuffles = 0;
        if (fiber.stack.empty()) fiber.stack.resize(STACK_BYTES);
        getcontext(&fiber.first);
        fiber.first.uc_stack.ss_sp = fiber.stack.data();
        fiber.first.uc_stack.ss_size = fiber.stack.size();
        fiber.first.uc_link = nullptr;
        makecontext(&fiber.first, run_body, 0);
    }
    for (bool runs = true; runs;) {
        runs = false;
        for (unsigned at = 0; at < threads; at++)
            if (!fibers[order[at]].has_ended) {
                resume(order[at]);
                runs = true;
            }
    }
}

template <typename T> static T __shfl_down_sync(unsigned, T value, unsigned by) {
    static_assert(sizeof(T) <= sizeof(uint64_t), "one register or two");
    unsigned me = threadIdx.x, from = me % 32 + by < 32 ? me + by : me;
    uint64_t *slots = shuffled[fibers[me].shuffles++ % 2];
    memcpy(slots + me, &value, sizeof value);
    __syncthreads();
    memcpy(&value, slots + from, sizeof value);
    return value;
}

static void __threadfence() {}
template <typename T> static T atomicAdd(T *address, T by) {
    T before = *address;
    *address += by;
    return before;
}
static unsigned atomicMax(unsigned *address, unsigned other) {
    unsigned before = *address;
    *address = other > before ? other : before;
    return before;
}

template <typename To, typename From> static To same_bits(From value) {
    static_assert(sizeof(To) == sizeof(From), "as many bits");
    To result;
    memcpy(&result, &value, sizeof result);
    return result;
}
static float __uint_as_float(unsigned bits) { return same_bits<float>(bits); }
static unsigned __float_as_uint(float value) { return same_bits<unsigned>(value); }
static double __longlong_as_double(long long bits) { return same_bits<double>(bits); }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static double __dadd_rn(double a, double b) { return a + b; }
static double __dmul_rn(double a, double b) { return a * b; }
static double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
static long long __double_as_longlong(double value) { return same_bits<long long>(value); }
static float __double2float_rn(double value) { return (float)value; }
static unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    uint64_t bytes = (uint64_t)y << 32 | x, chosen = 0;
    for (int at = 0; at < 4; at++) chosen |= (bytes >> 8 * (selector >> 4 * at & 7) & 0xFF) << 8 * at;
    return (unsigned)chosen;
}
