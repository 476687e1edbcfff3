/* Computes tier 2 of a tensor in one launch: the histogram of exponents, zeros, the largest magnitude's index, the sums
   of magnitudes and of fourth powers, and on demand the largest magnitude of each channel; of many tensors of one dtype
   likewise.

   What is counted or compared is taken from bits, and added up in any order: counts and maxima are exact. Sums are made
   in float64, each at its place, so that even the fourth power of a float32 neither overflows nor is lost.

   No GPU has run this yet: how its 5 operations of float64 and one addition in shared memory for each number compare with
   the time to read it is known from tables alone. An H100 reads 2.9 TB/s, and makes 64 of the former a cycle and SM. */

/* Neighbours often have the same exponent, and additions to one counter wait for each other: 8 tables take turns. (32 of
   them would take as long to empty as the numbers of a part take to count.) The same memory then holds the maxima of
   channels, at most 8,192 of them in one pass over a part (32 kB in all). */
enum { BINS = 256, TABLES = 8, CELLS = 8192 };

/* The words of a row and of a tensor's totals, in front of the maxima of channels, two in a word. */
enum { ZEROS = BINS, ARGMAX, SUMABS, SUM4, CHANNELS };
enum { TOTAL_BINS = 1, TOTAL_CHANNELS = TOTAL_BINS + BINS };

#if IS_WIDE
typedef u64 Bits;
#define INFINITE 0x7FF0000000000000ull
#else
typedef u32 Bits;
#define INFINITE 0x7F800000u
#endif

static __device__ __forceinline__ Bits magnitude_of(Number number) {
#if IS_WIDE
    return (u64)__double_as_longlong(number) & 0x7FFFFFFFFFFFFFFFull;
#else
    return __float_as_uint(number) & 0x7FFFFFFFu;
#endif
}

static __device__ __forceinline__ double value_of(Bits magnitude) {
#if IS_WIDE
    return __longlong_as_double((long long)magnitude);
#else
    return (double)__uint_as_float(magnitude);
#endif
}

/* Returns the bin of a finite number. The biases are 1023 and 127; what is outside of float32 is in the outermost bins. */
static __device__ __forceinline__ u32 bin_of(Bits magnitude) {
#if IS_WIDE
    int bin = (int)(magnitude >> 52) - 896;
    return bin < 0 ? 0 : bin > BINS - 1 ? BINS - 1 : bin;
#else
    return magnitude >> 23;
#endif
}

/* Returns the bits of a magnitude as a float32, whose order is that of magnitudes, NaN above all. */
static __device__ __forceinline__ u32 narrow_bits(Number number) {
#if IS_WIDE
    return __float_as_uint(__double2float_rn(number)) & 0x7FFFFFFFu;
#else
    return magnitude_of(number);
#endif
}

struct Sums {
    double sumabs, sum4;
    u64 zeros, index; /* of the first number that is as large as the largest; NONE: there is no number */
    Bits largest;     /* all NaN are equal, and larger than infinity */
};

static __device__ __forceinline__ Sums no_sums() {
    Sums none = {0, 0, 0, NONE, 0};
    return none;
}

static __device__ __forceinline__ Sums fold(const Sums &a, const Sums &b) {
    int is_first = a.largest > b.largest || (a.largest == b.largest && a.index < b.index);
    Sums both = {__dadd_rn(a.sumabs, b.sumabs), __dadd_rn(a.sum4, b.sum4), a.zeros + b.zeros, is_first ? a.index : b.index,
                 is_first ? a.largest : b.largest};
    return both;
}

static __device__ __forceinline__ Sums shifted_down(const Sums &of, int by) {
    Sums other;
    other.sumabs = __shfl_down_sync(~0u, of.sumabs, by);
    other.sum4 = __shfl_down_sync(~0u, of.sum4, by);
    other.zeros = __shfl_down_sync(~0u, of.zeros, by);
    other.index = __shfl_down_sync(~0u, of.index, by);
    other.largest = __shfl_down_sync(~0u, of.largest, by);
    return other;
}

/* Adds up what `take_numbers` gives it, and counts exponents in `tables`: 8 counters side by side for each bin. */
struct Tier2 {
    const Raw *numbers;
    u32 *tables;
    Sums sums;

    __device__ __forceinline__ void add(Raw raw, u64 index) {
        Bits magnitude = magnitude_of(number_of(raw));
        double value = value_of(magnitude), square = __dmul_rn(value, value);
        sums.sumabs = __dadd_rn(sums.sumabs, value);
        sums.sum4 = __dadd_rn(sums.sum4, __dmul_rn(square, square));
        if (magnitude == 0) sums.zeros++;
        else if (magnitude < INFINITE) atomicAdd(tables + bin_of(magnitude) * TABLES + threadIdx.x % TABLES, 1u);
        Bits comparable = magnitude > INFINITE ? INFINITE + 1 : magnitude;
        if (comparable > sums.largest || sums.index == NONE) {
            sums.largest = comparable;
            sums.index = index;
        }
    }

    __device__ __forceinline__ void vector(const Vector &vector, u64 index) {
#pragma unroll
        for (int at = 0; at < VECTOR; at++) add(vector.raw[at], index + at);
    }

    __device__ __forceinline__ void rest(u64 start, u64 end) {
#pragma unroll 1
        for (u64 at = start; at < end; at++) add(numbers[at], at);
    }
};

/* Finds the largest magnitudes of the channels from `first` on, in `cells`. A vector comes 256 vectors behind the one
   before it, and its first number is number `inside` of a run of `channel`. */
struct Channels {
    const Raw *numbers;
    u32 *cells;
    u64 inner, inside, step_inside;
    u32 channels, channel, step_channel, first, count;

    __device__ __forceinline__ void begin(const Task &task, u64 start) {
        u64 index = start + (u64)threadIdx.x * VECTOR, step = (u64)THREADS * VECTOR;
        numbers = task.numbers;
        inner = task.inner;
        channels = task.channels;
        inside = index % inner;
        channel = index / inner % channels;
        step_inside = step % inner;
        step_channel = step / inner % channels;
    }

    /* Reading first spares nearly all of the additions, which wait for each other where a run is long. */
    __device__ __forceinline__ void add(Raw raw, u32 of) {
        u32 bits = narrow_bits(number_of(raw));
        if (of - first < count && bits > ((volatile u32 *)cells)[of - first]) atomicMax(cells + (of - first), bits);
    }

    __device__ __forceinline__ void next(u64 &at, u32 &of) {
        if (++at < inner) return;
        at = 0;
        if (++of == channels) of = 0;
    }

    __device__ __forceinline__ void vector(const Vector &vector, u64) {
        u64 place = inside;
        u32 of = channel;
#pragma unroll
        for (int at = 0; at < VECTOR; at++, next(place, of)) add(vector.raw[at], of);
        inside += step_inside;
        channel += step_channel;
        if (inside >= inner) {
            inside -= inner;
            channel++;
        }
        if (channel >= channels) channel -= channels;
    }

    __device__ __forceinline__ void rest(u64 start, u64 end) {
        for (u64 at = start; at < end; at++, next(inside, channel)) add(numbers[at], channel);
    }
};

/* Every NaN is written with the same bits, which are not those that a row holds before. */
static __device__ __forceinline__ double with_one_nan(double number) {
    return number == number ? number : __longlong_as_double(0x7FF8000000000000ll);
}

static __device__ __forceinline__ u64 with_one_nan(u32 bits) { return bits > 0x7F800000u ? 0x7FC00000u : bits; }

/* Writes an even number of maxima into the row, beginning with channel `first`. */
static __device__ void write_channels(const Task &task, const volatile u32 *maxima, u32 first, u32 count) {
    u64 *row = (u64 *)task.row + CHANNELS + first / 2;
    for (u32 at = threadIdx.x; 2 * at < count; at += THREADS)
        row[at] = with_one_nan(maxima[2 * at]) | with_one_nan(maxima[2 * at + 1]) << 32;
}

/* Measures the channels of one part, into the row if there is no other part. */
static __device__ void measure_channels(const Task &task, u64 start, u64 end, u32 *cells, u64 *total) {
    u32 *maxima = (u32 *)(total + TOTAL_CHANNELS);
    Channels of;
    of.cells = cells;
    for (of.first = 0; of.first < task.channels; of.first += CELLS) {
        of.count = task.channels - of.first < CELLS ? task.channels - of.first : CELLS;
        for (u32 at = threadIdx.x; at < of.count + of.count % 2; at += THREADS) cells[at] = 0;
        __syncthreads();
        of.begin(task, start);
        take_numbers(of, task.numbers, start, end);
        __syncthreads();
        if (task.parts <= 1) write_channels(task, cells, of.first, of.count);
        else
            for (u32 at = threadIdx.x; at < of.count; at += THREADS)
                if (cells[at] > ((volatile u32 *)maxima)[of.first + at]) atomicMax(maxima + of.first + at, cells[at]);
        __syncthreads();
    }
}

static __device__ void write_row(const Task &task, const Sums &sums, u64 in_bin) {
    u64 *row = (u64 *)task.row, repeats = (u64)task.repeats;
    row[threadIdx.x] = in_bin * repeats;
    if (threadIdx.x) return;
    row[ZEROS] = sums.zeros * repeats;
    row[ARGMAX] = sums.index == NONE ? NONE : sums.index / task.divisor;
    task.row[SUMABS] = with_one_nan(__dmul_rn(sums.sumabs, task.repeats));
    task.row[SUM4] = with_one_nan(__dmul_rn(sums.sum4, task.repeats));
}

/* Thread by thread, every bin is one thread's. */
static __device__ __forceinline__ void measure_part(const Task &task, u32 part, Sums *parts, u64 *total) {
    __shared__ u32 cells[CELLS];
    u64 start = part * task.part_size, end = start + task.part_size, in_bin = 0;
    end = end < task.count ? end : task.count;
    for (int table = 0; table < TABLES; table++) cells[threadIdx.x + table * BINS] = 0;
    __syncthreads();
    Tier2 tier2 = {task.numbers, cells, no_sums()};
    take_numbers(tier2, task.numbers, start, end);
    Sums sums = fold_block(tier2.sums);
    for (int table = 0; table < TABLES; table++) in_bin += cells[threadIdx.x * TABLES + table];
    __syncthreads();
    measure_channels(task, start, end, cells, total);
    if (task.parts > 1) {
        if (threadIdx.x == 0) parts[part] = sums;
        if (in_bin) atomicAdd(total + TOTAL_BINS + threadIdx.x, in_bin);
        if (!is_last_part(task, total)) return;
        sums = fold_parts(no_sums(), parts, task.parts);
        in_bin = ((volatile u64 *)total)[TOTAL_BINS + threadIdx.x];
        total[TOTAL_BINS + threadIdx.x] = 0;
        u32 *maxima = (u32 *)(total + TOTAL_CHANNELS);
        write_channels(task, maxima, 0, task.channels);
        __syncthreads();
        for (u32 at = threadIdx.x; at < task.channels; at += THREADS) maxima[at] = 0;
    }
    write_row(task, sums, in_bin);
}

KERNELS(Sums)
