/* Computes the statistics of the numbers of a tensor in one launch, and of many tensors of one dtype in one.

   A tensor is cut into parts, and each block of threads measures one of them. The block that finishes last folds the
   parts in their order and writes the row. How a tensor is cut depends on its dtype and count alone, and all arithmetic
   is spelled out, so that every card, every alignment and every order of blocks gives the same bits; so does a C++
   compiler for the CPU, with which the tests run this file.

   It is compiled at run time, for one dtype at a time, and includes nothing: KIND says how a number lies in memory. */

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

/* Between these limits the squares of float32, and sums of 16 of them, are well inside its range. */
#define SMALLEST 0x1p-40f
#define LARGEST 0x1p40f

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

struct Moments {
    Number low, high; /* without NaN */
    double sum, square;
    u64 nans, infs, first; /* first: the index of the first number that is not finite */
};

static const u64 NONE = ~0ull;

static __device__ __forceinline__ Number lower(Number a, Number b) { return b < a ? b : a; }
static __device__ __forceinline__ Number higher(Number a, Number b) { return b > a ? b : a; }

static __device__ __forceinline__ Number infinity() {
#if IS_WIDE
    return __longlong_as_double(0x7FF0000000000000ll);
#else
    return __uint_as_float(0x7F800000u);
#endif
}

static __device__ __forceinline__ Moments nothing() {
    Moments none = {infinity(), -infinity(), 0, 0, 0, 0, NONE};
    return none;
}

static __device__ __forceinline__ Moments fold(const Moments &a, const Moments &b) {
    Moments both;
    both.low = lower(a.low, b.low);
    both.high = higher(a.high, b.high);
    both.sum = __dadd_rn(a.sum, b.sum);
    both.square = __dadd_rn(a.square, b.square);
    both.nans = a.nans + b.nans;
    both.infs = a.infs + b.infs;
    both.first = a.first < b.first ? a.first : b.first;
    return both;
}

/* Adds one number of any size. */
static __device__ __forceinline__ void add_number(Moments &into, Number number, u64 index) {
    into.low = lower(into.low, number); /* a NaN compares as false */
    into.high = higher(into.high, number);
    into.sum = __dadd_rn(into.sum, (double)number);
    into.square = __fma_rn((double)number, (double)number, into.square);
    if (number != number || number == infinity() || number == -infinity()) {
        if (number != number) into.nans++;
        else into.infs++;
        if (index < into.first) into.first = index;
    }
}

static __device__ __forceinline__ void add_numbers(Moments &into, const Raw *numbers, u64 start, u64 end) {
#pragma unroll 1
    for (u64 at = start; at < end; at++) add_number(into, number_of(numbers[at]), at);
}

/* Adds a vector, which begins at `index`. If its numbers are finite and of medium size, they are added up in float32
   first. */
static __device__ __forceinline__ void add_vector(
    Moments &into, const Vector &vector, const Raw *numbers, u64 index) {
#if IS_WIDE
#pragma unroll
    for (int at = 0; at < VECTOR; at++) add_number(into, number_of(vector.raw[at]), index + at);
#else
    float low[VECTOR / 2], high[VECTOR / 2], sum[VECTOR / 2], square[VECTOR / 2];
#pragma unroll
    for (int at = 0; at < VECTOR / 2; at++) {
        float a = number_of(vector.raw[2 * at]), b = number_of(vector.raw[2 * at + 1]);
        low[at] = fminf(a, b);
        high[at] = fmaxf(a, b);
        sum[at] = __fadd_rn(a, b);
        square[at] = __fmaf_rn(b, b, __fmul_rn(a, a));
    }
#pragma unroll
    for (int half = VECTOR / 4; half > 0; half /= 2)
#pragma unroll
        for (int at = 0; at < half; at++) {
            low[at] = fminf(low[at], low[at + half]);
            high[at] = fmaxf(high[at], high[at + half]);
            sum[at] = __fadd_rn(sum[at], sum[at + half]);
            square[at] = __fadd_rn(square[at], square[at + half]);
        }
    float magnitude = fmaxf(fabsf(low[0]), fabsf(high[0]));
    if (sum[0] == sum[0] && magnitude <= LARGEST && (magnitude >= SMALLEST || magnitude == 0)) {
        into.low = lower(into.low, low[0]);
        into.high = higher(into.high, high[0]);
        into.sum = __dadd_rn(into.sum, (double)sum[0]);
        into.square = __dadd_rn(into.square, (double)square[0]);
    } else
        add_numbers(into, numbers, index, index + VECTOR);
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

/* Measures the numbers from `start` to `end`; thread by thread, every 256th vector. */
static __device__ __forceinline__ Moments measure(const Raw *numbers, u64 start, u64 end) {
    Moments found = nothing();
    int is_aligned = (u64)numbers % VECTOR_BYTES == 0;
    u64 whole = start + (end - start) / VECTOR * VECTOR, step = (u64)THREADS * VECTOR;
    u64 at = start + (u64)threadIdx.x * VECTOR;
    for (; at + (IN_FLIGHT - 1) * step < whole; at += IN_FLIGHT * step) {
        Vector vectors[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) vectors[i] = load(numbers + at + i * step, is_aligned);
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) add_vector(found, vectors[i], numbers, at + i * step);
    }
    for (; at < whole; at += step) add_vector(found, load(numbers + at, is_aligned), numbers, at);
    if (at == whole) add_numbers(found, numbers, whole, end);
    return found;
}

static __device__ __forceinline__ Moments shifted_down(const Moments &of, int by) {
    Moments other;
    other.low = __shfl_down_sync(~0u, of.low, by);
    other.high = __shfl_down_sync(~0u, of.high, by);
    other.sum = __shfl_down_sync(~0u, of.sum, by);
    other.square = __shfl_down_sync(~0u, of.square, by);
    other.nans = __shfl_down_sync(~0u, of.nans, by);
    other.infs = __shfl_down_sync(~0u, of.infs, by);
    other.first = __shfl_down_sync(~0u, of.first, by);
    return other;
}

/* Folds what the threads of a block have found; the first thread gets the result. */
static __device__ __forceinline__ Moments fold_block(Moments found) {
    __shared__ Moments of_warps[WARPS];
#pragma unroll
    for (int by = 16; by > 0; by /= 2) found = fold(found, shifted_down(found, by));
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = found;
    __syncthreads();
    if (threadIdx.x == 0)
        for (int warp = 1; warp < WARPS; warp++) found = fold(found, of_warps[warp]);
    __syncthreads();
    return found;
}

/* What is measured: one tensor. The host writes it, and it is passed by value or lies in a table. */
struct Task {
    const Raw *numbers;
    u64 count;      /* of numbers: two for a complex element */
    u64 part_size;  /* numbers of each part but the last: a multiple of VECTOR */
    double repeats; /* how often each counts */
    double *row;
    u32 parts;
    u32 first_part; /* where what is found in its parts begins, and its counter is, among those of all tensors */
    u32 divisor;    /* numbers of an element; 0: they are not in row-major order */
    u32 padding;
};

static __device__ void write_row(const Moments &found, const Task &task) {
    double *row = task.row, nan = __longlong_as_double(0x7FF8000000000000ll);
    int has_extremes = task.count > 0 && found.nans == 0;
    row[0] = __dmul_rn((double)task.count, task.repeats);
    row[1] = has_extremes ? (double)found.low : nan;
    row[2] = has_extremes ? (double)found.high : nan;
    row[3] = found.nans ? nan : __dmul_rn(found.sum, task.repeats);
    row[4] = found.nans ? nan : __dmul_rn(found.square, task.repeats);
    row[5] = __dmul_rn((double)found.nans, task.repeats);
    row[6] = __dmul_rn((double)found.infs, task.repeats);
    row[7] = task.divisor && found.first != NONE ? (double)(found.first / task.divisor) : -1.0;
}

/* Measures one part of a tensor, and writes the row if it is the last part that is measured. */
static __device__ __forceinline__ void measure_part(const Task &task, u32 part, Moments *parts, u32 *counters) {
    u64 start = part * task.part_size, end = start + task.part_size;
    Moments found = fold_block(measure(task.numbers, start, end < task.count ? end : task.count));
    if (task.parts <= 1) {
        if (threadIdx.x == 0) write_row(found, task);
        return;
    }
    __shared__ int is_last;
    if (threadIdx.x == 0) {
        parts[task.first_part + part] = found;
        __threadfence();
        is_last = atomicAdd(counters + task.first_part, 1u) == task.parts - 1;
        __threadfence();
    }
    __syncthreads();
    if (!is_last) return;
    found = nothing();
    for (u32 at = threadIdx.x; at < task.parts; at += THREADS) found = fold(found, parts[task.first_part + at]);
    found = fold_block(found);
    if (threadIdx.x == 0) {
        write_row(found, task);
        counters[task.first_part] = 0;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) measure_one(Task task, Moments *parts, u32 *counters) {
    measure_part(task, blockIdx.x, parts, counters);
}

/* `owners`: for each block the number of its task. */
extern "C" __global__ void __launch_bounds__(THREADS)
measure_many(const Task *tasks, const u32 *owners, Moments *parts, u32 *counters) {
    Task task = tasks[owners[blockIdx.x]];
    measure_part(task, blockIdx.x - task.first_part, parts, counters);
}
