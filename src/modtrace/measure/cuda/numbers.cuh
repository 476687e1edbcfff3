/* What the kernels share: how the numbers of a tensor lie in memory, how they are read, and how blocks divide the work.

   A tensor is cut into parts, and each block of threads measures one of them. The block that finishes last folds the
   parts in their order and writes the row. How a tensor is cut depends on its dtype and count alone, and all arithmetic
   is spelled out, so that every card, every alignment and every order of blocks gives the same bits; so does a C++
   compiler for the CPU, with which the tests run these files.

   This file stands in front of each of the kernels, which are compiled at run time, for one dtype at a time, and include
   nothing: KIND says how a number lies in memory. */

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define FLOAT32 0
#define BFLOAT16 1
#define FLOAT16 2
#define FLOAT64 3
#define BOOL 4
#define UINT8 5
#define INT8 6
#define UINT16 7
#define INT16 8
#define UINT32 9
#define INT32 10
#define UINT64 11
#define INT64 12
#define TABLE 13

enum { THREADS = 256, WARPS = THREADS / 32, VECTOR_BYTES = 16 };

/* How a number is read, and as what it is added up. */
#if KIND == FLOAT32
typedef float Raw;
#elif KIND == FLOAT64
typedef double Raw;
#elif KIND == BFLOAT16 || KIND == FLOAT16 || KIND == UINT16
typedef u16 Raw;
#elif KIND == INT16
typedef short Raw;
#elif KIND == INT8
typedef signed char Raw;
#elif KIND == UINT32
typedef u32 Raw;
#elif KIND == INT32
typedef int Raw;
#elif KIND == UINT64
typedef u64 Raw;
#elif KIND == INT64
typedef long long Raw;
#else
typedef u8 Raw;
#endif

#if KIND == FLOAT64 || KIND == UINT32 || KIND == INT32 || KIND == UINT64 || KIND == INT64
typedef double Number;
#define IS_WIDE 1
#else
typedef float Number;
#define IS_WIDE 0
#endif

/* Numbers of a vector, and vectors that a thread reads before it looks at the first (H200: as fast as `x.sum()`). */
enum { VECTOR = VECTOR_BYTES / sizeof(Raw), IN_FLIGHT = VECTOR > 4 ? 4 : 8 };

struct alignas(VECTOR_BYTES) Vector {
    Raw raw[VECTOR];
};

#if KIND == TABLE
static __device__ const u32 NUMBERS[] = {NUMBER_BITS}; /* of each byte the bits of a float32 */
#endif

static __device__ __forceinline__ Number number_of(Raw raw) {
#if KIND == BFLOAT16
    return __uint_as_float((u32)raw << 16);
#elif KIND == FLOAT16
    /* A multiplication rebiases the exponent, of subnormals too; infinity and NaN are corrected. */
    u32 magnitude = (u32)(raw & 0x7FFF) << 13, sign = (u32)(raw & 0x8000) << 16;
    u32 rebiased = __float_as_uint(__fmul_rn(__uint_as_float(magnitude), 0x1p112f));
    return __uint_as_float((magnitude >= 0x0F800000u ? magnitude | 0x7F800000u : rebiased) | sign);
#elif KIND == BOOL
    return raw != 0;
#elif KIND == TABLE
    return __uint_as_float(NUMBERS[raw]);
#else
    return (Number)raw;
#endif
}

static const u64 NONE = ~0ull;

static __device__ __forceinline__ Number infinity() {
#if IS_WIDE
    return __longlong_as_double(0x7FF0000000000000ll);
#else
    return __uint_as_float(0x7F800000u);
#endif
}

/* Reads a vector; number by number where the tensor does not begin as a vector does. */
static __device__ __forceinline__ Vector load(const Raw *numbers, int is_aligned) {
    if (is_aligned) return *(const Vector *)numbers;
    Vector vector;
#pragma unroll
    for (int at = 0; at < VECTOR; at++) vector.raw[at] = numbers[at];
    return vector;
}

/* Gives the numbers from `start` to `end` to `take`; thread by thread, every 256th vector. */
template <typename Take>
static __device__ __forceinline__ void take_numbers(Take &take, const Raw *numbers, u64 start, u64 end) {
    int is_aligned = (u64)numbers % VECTOR_BYTES == 0;
    u64 whole = start + (end - start) / VECTOR * VECTOR, step = (u64)THREADS * VECTOR;
    u64 at = start + (u64)threadIdx.x * VECTOR;
    for (; at + (IN_FLIGHT - 1) * step < whole; at += IN_FLIGHT * step) {
        Vector vectors[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) vectors[i] = load(numbers + at + i * step, is_aligned);
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) take.vector(vectors[i], at + i * step);
    }
    for (; at < whole; at += step) take.vector(load(numbers + at, is_aligned), at);
    if (at == whole) take.rest(whole, end);
}

/* Folds what the threads of a block have found; the first thread gets the result. */
template <typename Found> static __device__ __forceinline__ Found fold_block(Found found) {
    __shared__ Found of_warps[WARPS];
#pragma unroll
    for (int by = 16; by > 0; by /= 2) found = fold(found, shifted_down(found, by));
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = found;
    __syncthreads();
    if (threadIdx.x == 0)
        for (int warp = 1; warp < WARPS; warp++) found = fold(found, of_warps[warp]);
    __syncthreads();
    return found;
}

/* Folds what was found in all parts of a tensor into `nothing`, in an order that is always the same. */
template <typename Found>
static __device__ __forceinline__ Found fold_parts(Found nothing, const Found *parts, u32 count) {
    for (u32 at = threadIdx.x; at < count; at += THREADS) nothing = fold(nothing, parts[at]);
    return fold_block(nothing);
}

/* What is measured: one tensor. The host writes it, and it is passed by value or lies in a table. */
struct Task {
    const Raw *numbers;
    u64 count;      /* of numbers: two for a complex element */
    u64 part_size;  /* numbers of each part but the last: a multiple of VECTOR */
    u64 inner;      /* numbers of a channel that lie side by side */
    double repeats; /* how often each number counts */
    double *row;
    u32 parts;
    u32 first_part;  /* where what is found in its parts begins, among those of all tensors */
    u32 first_total; /* where its words begin among the totals of all tensors; in the first one parts are counted */
    u32 divisor;     /* numbers of an element; 0: they are not in row-major order */
    u32 channels;    /* whose largest magnitudes are wanted */
    u32 wanted;      /* what else, where a kernel measures more than one thing */
    u32 width;       /* of the row */
    u32 padding;
};

/* Returns whether this block is the last of its tensor. What the blocks have written before is visible to it then. */
static __device__ __forceinline__ int is_last_part(const Task &task, u64 *total) {
    __shared__ int is_last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = atomicAdd((u32 *)total, 1u) == task.parts - 1;
        if (is_last) *(u32 *)total = 0; /* for the next launch */
        __threadfence();
    }
    __syncthreads();
    return is_last;
}

/* The kernels of a file, which measure one tensor, and many. `Part` is what is found in a part, and
   `measure_part(task, part, parts, total)` measures one, and writes the row if it is the last that is measured. Totals
   are 0 before and after each launch. `owners`: for each block the number of its task. */
#define KERNELS(Part)                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS) measure_one(Task task, Part *parts, u64 *totals) {        \
        measure_part(task, blockIdx.x, parts, totals);                                                              \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                           \
        measure_many(const Task *tasks, const u32 *owners, Part *parts, u64 *totals) {                              \
        Task task = tasks[owners[blockIdx.x]];                                                                      \
        measure_part(task, blockIdx.x - task.first_part, parts + task.first_part, totals + task.first_total);       \
    }
