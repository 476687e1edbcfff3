/* Computes the statistics of the numbers of a tensor in one launch, and of many tensors of one dtype in one. */

/* Between these limits the squares of float32, and sums of 16 of them, are well inside its range. */
#define SMALLEST 0x1p-40f
#define LARGEST 0x1p40f

struct Moments {
    Number low, high; /* without NaN */
    double sum, square;
    u64 nans, infs, first; /* first: the index of the first number that is not finite */
};

static __device__ __forceinline__ Number lower(Number a, Number b) { return b < a ? b : a; }
static __device__ __forceinline__ Number higher(Number a, Number b) { return b > a ? b : a; }

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

/* Measures what `take_numbers` gives it. */
struct Measuring {
    const Raw *numbers;
    Moments found;

    __device__ __forceinline__ void vector(const Vector &vector, u64 index) {
        add_vector(found, vector, numbers, index);
    }
    __device__ __forceinline__ void rest(u64 start, u64 end) { add_numbers(found, numbers, start, end); }
};

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

static __device__ __forceinline__ void measure_part(const Task &task, u32 part, Moments *parts, u64 *total) {
    u64 start = part * task.part_size, end = start + task.part_size;
    Measuring measuring = {task.numbers, nothing()};
    take_numbers(measuring, task.numbers, start, end < task.count ? end : task.count);
    Moments found = fold_block(measuring.found);
    if (task.parts > 1) {
        if (threadIdx.x == 0) parts[part] = found;
        if (!is_last_part(task, total)) return;
        found = fold_parts(nothing(), parts, task.parts);
    }
    if (threadIdx.x == 0) write_row(found, task);
}

KERNELS(Moments)
