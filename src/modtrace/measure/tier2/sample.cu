/* Reads a sample of a tensor in one launch, of one block; recording/statistics/sample.py chooses the elements. The numbers
   lie in row-major order. What is sampled counts as a channel: `channels` numbers, two in a word behind the first. */

typedef u64 Nothing; /* is found in a part that would have to be folded */

static __device__ __forceinline__ u64 scramble(u64 number) {
    u64 bits = (number + 1) * 0x9E3779B97F4A7C15ull;
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9ull;
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EBull;
    return bits >> 2;
}

/* Returns the index of the element that stands for one of as many equal parts as there are samples. */
static __device__ __forceinline__ u64 place_in_part(u64 part, u64 count, u64 samples) {
    if (count <= samples) return part;
    u64 size = count / samples, rest = count % samples;
    u64 start = part * size + part * rest / samples, end = (part + 1) * size + (part + 1) * rest / samples;
    return start + scramble(part) % (end - start);
}

/* Returns the bits of a sample as a float32. Every NaN has the same, which are not those that a row holds before. */
static __device__ __forceinline__ u32 sampled(const Task &task, u32 at) {
    if (at >= task.channels) return 0;
    u32 parts = task.divisor;
    u64 element = place_in_part(at / parts, task.count / parts, task.channels / parts);
    Number number = number_of(task.numbers[element * parts + at % parts]);
#if IS_WIDE
    float narrow = __double2float_rn(number);
#else
    float narrow = number;
#endif
    return narrow == narrow ? __float_as_uint(narrow) : 0x7FC00000u;
}

static __device__ __forceinline__ void measure_part(const Task &task, u32, Nothing *, u64 *) {
    u64 *row = (u64 *)task.row;
    if (threadIdx.x == 0) row[0] = task.channels;
    for (u32 at = threadIdx.x; 2 * at < task.channels; at += THREADS)
        row[1 + at] = sampled(task, 2 * at) | (u64)sampled(task, 2 * at + 1) << 32;
}

KERNELS(Nothing)
