/* Runs the kernels of a source on the CPU, for one KIND, with the arguments of a launch. */

#include "cuda_on_cpu.h"

#include SOURCE

static void **arguments;

/* What is found in parts has a type that only the source knows. */
template <typename Part> static void call_one(void (*kernel)(Task, Part *, u64 *)) {
    kernel(*(Task *)arguments[0], *(Part **)arguments[1], *(u64 **)arguments[2]);
}

template <typename Part> static void call_many(void (*kernel)(const Task *, const u32 *, Part *, u64 *)) {
    kernel(*(const Task **)arguments[0], *(const u32 **)arguments[1], *(Part **)arguments[2], *(u64 **)arguments[3]);
}

static void one() { call_one(measure_one); }
static void many() { call_many(measure_many); }

/* Runs the blocks in the order of `blocks`; their threads begin in the order of `threads`. */
extern "C" void run(int is_many, unsigned count, const unsigned *blocks, const unsigned *threads, void **given) {
    arguments = given;
    for (unsigned at = 0; at < count; at++) run_block(blocks[at], THREADS, threads, is_many ? many : one);
}
