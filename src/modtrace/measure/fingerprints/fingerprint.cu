/* Computes the hash and the sketch of a tensor in one launch, and of many tensors of one dtype likewise;
   recording/statistics/fingerprints.py defines both. The numbers lie in row-major order.

   The hash is made of integers: every order of summation gives the same bits. In the sketch at most 64 numbers are added
   up in float32 before float64 takes over, each at its place. No sum leaves a thread before the end of its part: a thread
   owns as many buckets as a vector has numbers, and of each block of 64 numbers it reads the vector that belongs there,
   whose bytes it swaps.

   No GPU has run this yet. */

enum { LANES = 64, BLOCKS = 4096, WORDS = 65536, SLOTS = LANES / VECTOR, AT_ONCE = THREADS / SLOTS };
enum { AHEAD = VECTOR > 8 ? 2 : 4 }; /* vectors that a thread reads first: with 16 numbers each, 4 take 170 registers */
enum { HASH = 1, SKETCH = 2 }; /* of `wanted` */

/* The words of a row: the sketch, the halves of the hash. Those of a tensor's totals: a counter, the hash. */
enum { LOW_OF_HASH = LANES, HIGH_OF_HASH };
enum { TOTAL_HASH = 1 };

/* Tags of mix(). */
enum { CHUNK_SIGNS = 4, CHUNK_SWAP = 5, WORD_WEIGHT = 6, ROW_WEIGHT = 7 };

/* Of each block of a chunk: bit l is 1 if lane l is negative; lane l belongs to bucket `l ^ swap`. */
static __device__ const u64 SIGNS[] = {BLOCK_SIGNS};
static __device__ const u8 SWAPS[] = {BLOCK_SWAPS};

/* Sums of 64 numbers below this are well inside of float32. A vector with others is added to float64 sums. */
#if IS_WIDE
#define LARGEST 0x1.fffffffffffffp1023
#else
#define LARGEST 0x1p100f
#endif

#define MIX_FACTOR 0x9E3779B97F4A7C15ull

static __device__ __forceinline__ u64 mix_start(u64 tag) { return tag * 0xD1342543DE82EF95ull + 0x2545F4914F6CDD1Dull; }

static __device__ __forceinline__ u64 finish_mix(u64 bits) {
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9ull;
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EBull;
    return bits ^ bits >> 31;
}

static __device__ __forceinline__ u64 mix(u64 tag, u64 number) {
    return finish_mix(number * MIX_FACTOR + mix_start(tag));
}

union Content {
    Vector vector;
    u32 words[VECTOR_BYTES / 4];
};

/* Returns the sum of words times their weights in the row; `word` is the place of the first. Some 24 operations on
   integers for a word: as long as an H100 needs to read it, by the tables of its throughput. */
static __device__ __forceinline__ u64 sum_words(const Content &content, u64 word) {
    u64 sum = 0, bits = word % WORDS * MIX_FACTOR + mix_start(WORD_WEIGHT);
#pragma unroll
    for (int at = 0; at < VECTOR_BYTES / 4; at++, bits += MIX_FACTOR)
        sum += (u64)(long long)(int)content.words[at] * (finish_mix(bits) | 1);
    return sum;
}

/* Puts number j of a vector to place `j ^ swap`. */
static __device__ __forceinline__ Content swapped(const Content &from, u32 swap) {
    Content to = from;
    u32 bytes = swap % VECTOR * sizeof(Raw);
#pragma unroll
    for (int by = 1; by < VECTOR_BYTES / 4; by *= 2)
#pragma unroll
        for (int at = 0; at < VECTOR_BYTES / 4; at++)
            if (!(at & by)) {
                u32 a = to.words[at], b = to.words[at | by];
                to.words[at] = bytes & 4 * by ? b : a;
                to.words[at | by] = bytes & 4 * by ? a : b;
            }
    if (sizeof(Raw) < 4) {
#pragma unroll
        for (int at = 0; at < VECTOR_BYTES / 4; at++)
            to.words[at] = __byte_perm(to.words[at], 0, 0x3210u ^ (bytes & 3) * 0x1111u);
    }
    return to;
}

static __device__ __forceinline__ int is_medium(Number number) { return number <= LARGEST && number >= -LARGEST; }

/* What a thread has found: the sums of its buckets, of the numbers of this row of words, and of all that came before. */
struct Found {
    u64 words, hash;
    Number narrow[VECTOR];
    double wide[VECTOR];
};

/* Where the next vector lies. */
struct Place {
    u64 index;
    u32 swap, signs; /* bit j: of number j of the vector */
};

/* One row of words, or a part of one, in which the signs and the swap of the chunk are the same. */
struct Segment {
    u64 row, chunk_signs, chunk_swap;

    __device__ __forceinline__ explicit Segment(u64 start) {
        u64 chunk = start / ((u64)LANES * BLOCKS);
        row = start * sizeof(Raw) / 4 / WORDS;
        chunk_signs = mix(CHUNK_SIGNS, chunk) >> first_bucket();
        chunk_swap = mix(CHUNK_SWAP, chunk) % LANES;
    }

    static __device__ __forceinline__ u32 first_bucket() { return threadIdx.x % SLOTS * VECTOR; }

    __device__ __forceinline__ Place place(u64 block) const {
        u32 swap = SWAPS[block % BLOCKS] ^ (u32)chunk_swap, lane = first_bucket() ^ (swap & ~(VECTOR - 1u));
        Place place = {block * LANES + lane, swap, (u32)(SIGNS[block % BLOCKS] >> lane)};
        return place;
    }
};

/* Adds the first `count` numbers of a vector to the float64 sums, those that are finite. */
static __device__ __forceinline__ void add_carefully(
    Found &into, const Content &content, const Place &place, u32 count, u64 chunk_signs) {
    Content buckets = swapped(content, place.swap);
#pragma unroll
    for (u32 at = 0; at < VECTOR; at++) {
        u32 from = (at ^ place.swap) % VECTOR;
        Number number = number_of(buckets.vector.raw[at]);
        int is_finite = number - number == 0;
        double value = (place.signs >> from ^ chunk_signs >> at) & 1 ? -(double)number : (double)number;
        if (from < count && is_finite) into.wide[at] = __dadd_rn(into.wide[at], value);
    }
}

static __device__ __forceinline__ void add_to_sketch(
    Found &into, const Content &content, const Place &place, u64 chunk_signs) {
    Content buckets = swapped(content, place.swap);
    Number numbers[VECTOR];
    int is_fit = 1;
#pragma unroll
    for (u32 at = 0; at < VECTOR; at++) {
        numbers[at] = number_of(buckets.vector.raw[at]);
        is_fit &= is_medium(numbers[at]);
    }
    if (!is_fit) {
        add_carefully(into, content, place, VECTOR, chunk_signs);
        return;
    }
#pragma unroll
    for (u32 at = 0; at < VECTOR; at++) {
        Number number = place.signs >> (at ^ place.swap) % VECTOR & 1 ? -numbers[at] : numbers[at];
#if IS_WIDE
        into.narrow[at] = __dadd_rn(into.narrow[at], number);
#else
        into.narrow[at] = __fadd_rn(into.narrow[at], number);
#endif
    }
}

static __device__ __forceinline__ void take_vector(
    const Task &task, const Segment &segment, const Vector &vector, const Place &place, Found &into) {
    Content content = {vector};
    if (task.wanted & HASH) into.words += sum_words(content, place.index * sizeof(Raw) / 4);
    if (task.wanted & SKETCH) add_to_sketch(into, content, place, segment.chunk_signs);
}

/* Takes the numbers of a vector that are before `end`. */
static __device__ void take_rest(const Task &task, const Segment &segment, const Place &place, u64 end, Found &into) {
    if (place.index >= end) return;
    u32 count = end - place.index < VECTOR ? end - place.index : VECTOR;
    Content content = {};
#pragma unroll
    for (u32 at = 0; at < VECTOR; at++)
        if (at < count) content.vector.raw[at] = task.numbers[place.index + at];
    if (task.wanted & HASH) into.words += sum_words(content, place.index * sizeof(Raw) / 4);
    if (task.wanted & SKETCH) add_carefully(into, content, place, count, segment.chunk_signs);
}

static __device__ __forceinline__ void take_segment(const Task &task, u64 start, u64 end, Found &into) {
    Segment segment(start);
    int is_aligned = (u64)task.numbers % VECTOR_BYTES == 0;
    u64 block = start / LANES + threadIdx.x / SLOTS, whole = end / LANES;
    into.words = 0;
#pragma unroll
    for (int at = 0; at < VECTOR; at++) into.narrow[at] = 0;
    for (; block + (AHEAD - 1) * AT_ONCE < whole; block += AHEAD * AT_ONCE) {
        Place places[AHEAD];
        Vector vectors[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            places[i] = segment.place(block + i * AT_ONCE);
            vectors[i] = load(task.numbers + places[i].index, is_aligned);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) take_vector(task, segment, vectors[i], places[i], into);
    }
    for (; block < whole; block += AT_ONCE) {
        Place place = segment.place(block);
        take_vector(task, segment, load(task.numbers + place.index, is_aligned), place, into);
    }
    if (block == whole) take_rest(task, segment, segment.place(block), end, into);
    into.hash += into.words * (mix(ROW_WEIGHT, segment.row) | 1);
#pragma unroll
    for (int at = 0; at < VECTOR; at++) {
        double sum = into.narrow[at];
        into.wide[at] = __dadd_rn(into.wide[at], segment.chunk_signs >> at & 1 ? -sum : sum);
    }
}

struct Hash {
    u64 bits;
};

static __device__ __forceinline__ Hash fold(const Hash &a, const Hash &b) { return {a.bits + b.bits}; }
static __device__ __forceinline__ Hash shifted_down(const Hash &of, int by) {
    return {__shfl_down_sync(~0u, of.bits, by)};
}

struct Sketch {
    double buckets[LANES];
};

/* Returns the sum of a bucket over all threads of the block, for each of the first 64 threads. */
static __device__ __forceinline__ double fold_sketch(const Found &found) {
    __shared__ Sketch of_warps[WARPS];
#pragma unroll
    for (int at = 0; at < VECTOR; at++) {
        double sum = found.wide[at];
#pragma unroll
        for (int by = 16; by >= SLOTS; by /= 2) sum = __dadd_rn(sum, __shfl_down_sync(~0u, sum, by));
        if (threadIdx.x % 32 < SLOTS) of_warps[threadIdx.x / 32].buckets[threadIdx.x % SLOTS * VECTOR + at] = sum;
    }
    __syncthreads();
    double sum = 0;
    for (int warp = 0; warp < WARPS; warp++) sum = __dadd_rn(sum, of_warps[warp].buckets[threadIdx.x % LANES]);
    __syncthreads();
    return sum;
}

/* Returns the same over all parts of the tensor. */
static __device__ __forceinline__ double fold_parts(const Sketch *parts, u32 count) {
    __shared__ Sketch of_groups[THREADS / LANES];
    u32 bucket = threadIdx.x % LANES, group = threadIdx.x / LANES;
    double sum = 0;
#pragma unroll 8
    for (u32 at = group; at < count; at += THREADS / LANES) sum = __dadd_rn(sum, parts[at].buckets[bucket]);
    of_groups[group].buckets[bucket] = sum;
    __syncthreads();
    sum = 0;
    for (int at = 0; at < THREADS / LANES; at++) sum = __dadd_rn(sum, of_groups[at].buckets[bucket]);
    return sum;
}

static __device__ void write_row(const Task &task, double bucket, u64 hash) {
    u64 *row = (u64 *)task.row;
    if (threadIdx.x < LANES)
        task.row[threadIdx.x] = bucket == bucket ? bucket : __longlong_as_double(0x7FF8000000000000ll);
    if (threadIdx.x) return;
    row[LOW_OF_HASH] = hash & 0xFFFFFFFFu; /* a whole one might be what a row holds before */
    row[HIGH_OF_HASH] = hash >> 32;
}

static __device__ __forceinline__ void measure_part(const Task &task, u32 part, Sketch *parts, u64 *total) {
    u64 start = part * task.part_size, end = start + task.part_size, of_row = (u64)WORDS * 4 / sizeof(Raw);
    end = end < task.count ? end : task.count;
    Found found = {};
    for (u64 next; start < end; start = next) {
        next = (start / of_row + 1) * of_row;
        next = next < end ? next : end;
        take_segment(task, start, next, found);
    }
    u64 hash = fold_block(Hash{found.hash}).bits;
    double bucket = task.wanted & SKETCH ? fold_sketch(found) : 0;
    if (task.parts > 1) {
        if (threadIdx.x < LANES) parts[part].buckets[threadIdx.x] = bucket;
        if (threadIdx.x == 0) atomicAdd(total + TOTAL_HASH, hash);
        if (!is_last_part(task, total)) return;
        bucket = task.wanted & SKETCH ? fold_parts(parts, task.parts) : 0;
        hash = ((volatile u64 *)total)[TOTAL_HASH];
        __syncthreads();
        if (threadIdx.x == 0) total[TOTAL_HASH] = 0;
    }
    write_row(task, bucket, hash);
}

KERNELS(Sketch)
