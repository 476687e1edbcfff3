/* Runs the kernels of moments.cu on the CPU, for one KIND, with the arguments of a launch. */

#include "cuda_on_cpu.h"

#include "moments.cu"

static void **arguments;

static void one() { measure_one(*(Task *)arguments[0], *(Moments **)arguments[1], *(u32 **)arguments[2]); }

static void many() {
    measure_many(
        *(const Task **)arguments[0], *(const u32 **)arguments[1], *(Moments **)arguments[2], *(u32 **)arguments[3]);
}

/* Runs the blocks in the order of `blocks`; their threads begin in the order of `threads`. */
extern "C" void run(int is_many, unsigned count, const unsigned *blocks, const unsigned *threads, void **given) {
    arguments = given;
    for (unsigned at = 0; at < count; at++) run_block(blocks[at], THREADS, threads, is_many ? many : one);
}
