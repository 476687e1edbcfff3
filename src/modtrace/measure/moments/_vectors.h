/* Sums blocks as `sum_blocks` of _moments.c does, to the same bits, in two thirds of the time, with AVX2.

   The units that add also compare floats, so the extremes are found among the numbers as they are in memory: a sign
   bit above a magnitude. As unsigned numbers, negative floats are above all others, the one furthest below zero
   highest; as signed ones they are below. One vector has the extremes of all lanes, as 16 registers do not hold those
   of each lane beside the sums. (AVX-512 has 32; there float32 is left to the compiler.) */

#pragma once

enum { WIDTH = 8, VECTORS = LANES / WIDTH };

typedef struct {
    __m256i highest, highest_signed;
} Extremes;

BY_CONVERSION static ALWAYS_INLINED Extremes meet(Extremes known, __m256i bits, int kind) {
    if (kind == FLOAT32)
        return (Extremes){_mm256_max_epu32(known.highest, bits), _mm256_max_epi32(known.highest_signed, bits)};
    return (Extremes){_mm256_max_epu16(known.highest, bits), _mm256_max_epi16(known.highest_signed, bits)};
}

BY_CONVERSION static uint32_t find_lowest(const void *source, Py_ssize_t count, int kind) {
    const uint32_t *singles = source, *end = singles + (kind == FLOAT32 ? count : 0);
    const uint16_t *halves = source, *last = halves + (kind == FLOAT32 ? 0 : count);
    uint32_t lowest = UINT32_MAX;
    uint16_t lowest_half = UINT16_MAX;
    for (; singles < end; singles++) lowest = *singles < lowest ? *singles : lowest;
    for (; halves < last; halves++) lowest_half = *halves < lowest_half ? *halves : lowest_half;
    return kind == FLOAT32 ? lowest : lowest_half;
}

/* Returns the number at `at` of a vector. */
static ALWAYS_INLINED uint32_t number_at(const __m256i *vector, int at, int kind) {
    uint32_t number = 0;
    size_t number_bytes = kind == FLOAT32 ? 4 : 2;
    memcpy(&number, (const char *)vector + at * number_bytes, number_bytes);
    return number;
}

/* Finds the minimum and the maximum of blocks. Returns 0 where one of them is a zero, and the other sign of zero may be
   there, too: which of these comes first in its lane is not known. */
BY_CONVERSION static ALWAYS_INLINED int find_extremes(const void *source, Py_ssize_t count, int kind, Extremes known,
                                                      Piece *piece) {
    uint32_t sign = kind == FLOAT32 ? 0x80000000 : 0x8000, highest = 0, positive = 0, lowest = 0;
    int has_positive = 0;
    for (int at = 0; at < (kind == FLOAT32 ? WIDTH : 2 * WIDTH); at++) {
        uint32_t number = number_at(&known.highest, at, kind), other = number_at(&known.highest_signed, at, kind);
        highest = number > highest ? number : highest;
        positive = other < sign && other > positive ? other : positive;
        has_positive |= other < sign;
    }
    int has_negative = highest >= sign, has_both = has_negative && has_positive;
    if (!has_both) lowest = find_lowest(source, count, kind);
    piece->low = to_float(has_negative ? highest : lowest, kind);
    piece->high = to_float(has_positive ? positive : lowest, kind);
    return !(has_both && (highest == sign || positive == 0));
}

/* Returns the lane of a sum: of bfloat16, the even numbers of a load are in one vector, and the odd ones in the next. */
static ALWAYS_INLINED int lane_of(int at, int kind) {
    return kind == BFLOAT16 ? at / (2 * WIDTH) * 2 * WIDTH + 2 * (at % WIDTH) + at / WIDTH % 2 : at;
}

BY_CONVERSION static ALWAYS_INLINED void add_to(__m256d *sums, __m256 of_block) {
    sums[0] = _mm256_add_pd(sums[0], _mm256_cvtps_pd(_mm256_castps256_ps128(of_block)));
    sums[1] = _mm256_add_pd(sums[1], _mm256_cvtps_pd(_mm256_extractf128_ps(of_block, 1)));
}

/* Reads a number for each lane. */
BY_CONVERSION static ALWAYS_INLINED Extremes read_lanes(const char *next, int kind, __m256 *values, Extremes known) {
    int loads = kind == FLOAT32 ? VECTORS : VECTORS / 2;
    for (int load = 0; load < loads; load++, next += sizeof(__m256i)) {
        __m256i bits = _mm256_loadu_si256((const __m256i *)next);
        known = meet(known, bits, kind);
        if (kind == FLOAT32) values[load] = _mm256_castsi256_ps(bits);
        else if (kind == BFLOAT16) {
            values[2 * load] = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
            values[2 * load + 1] = _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32((int)0xFFFF0000)));
        } else {
            values[2 * load] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)next));
            values[2 * load + 1] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)next + 1));
        }
    }
    return known;
}

/* Returns 0 if the signs of zeros have to be looked at. */
BY_CONVERSION static ALWAYS_INLINED int sum_vectors(const void *source, Py_ssize_t blocks, int kind, Piece *piece) {
    int number_bytes = kind == FLOAT32 ? 4 : 2;
    Extremes known = {_mm256_setzero_si256(), _mm256_set1_epi32(kind == FLOAT32 ? INT32_MIN : (int)0x80008000)};
    __m256d sums[2][2 * VECTORS];
    double of_lanes[2][LANES], in_order[2][LANES];
    memset(sums, 0, sizeof sums);
    const char *next = source;
    for (Py_ssize_t block = 0; block < blocks; block++) {
        __m256 sum[VECTORS], square[VECTORS], values[VECTORS];
        fetch(next, BLOCK * number_bytes);
        for (int k = 0; k < VECTORS; k++) sum[k] = square[k] = _mm256_setzero_ps();
        for (int i = 0; i < BLOCK; i += LANES, next += LANES * number_bytes) {
            known = read_lanes(next, kind, values, known);
            for (int k = 0; k < VECTORS; k++) {
                sum[k] = _mm256_add_ps(sum[k], values[k]);
                square[k] = _mm256_add_ps(square[k], _mm256_mul_ps(values[k], values[k]));
            }
        }
        for (int k = 0; k < VECTORS; k++) {
            add_to(sums[0] + 2 * k, sum[k]);
            add_to(sums[1] + 2 * k, square[k]);
        }
    }
    memcpy(of_lanes, sums, sizeof of_lanes);
    for (int at = 0; at < LANES; at++)
        for (int k = 0; k < 2; k++) in_order[k][lane_of(at, kind)] = of_lanes[k][at];
    piece->sum = add_lanes(in_order[0]);
    piece->sumsq = add_lanes(in_order[1]);
    return find_extremes(source, blocks * BLOCK, kind, known, piece);
}

#define BY_VECTORS(name, kind) \
    BY_CONVERSION static Piece vectors_##name(const void *source, Py_ssize_t blocks) { \
        Piece piece; \
        return sum_vectors(source, blocks, kind, &piece) ? piece : lanes_##name(source, blocks); \
    }

BY_VECTORS(float32, FLOAT32)
BY_VECTORS(bfloat16, BFLOAT16)
BY_VECTORS(float16, FLOAT16)
