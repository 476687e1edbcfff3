/* The hot loops of _fingerprint.c: sums of words times weights, and sums of signed blocks. */

#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "../_floats.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define HAS_AVX2
#endif

enum { LANES = 64 };

static uint64_t mix(uint64_t tag, uint64_t number) {
    uint64_t bits = number * 0x9E3779B97F4A7C15u + tag * 0xD1342543DE82EF95u + 0x2545F4914F6CDD1Du;
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EBu;
    return bits ^ bits >> 31;
}

/* Returns the sum of words times weights. A product has two halves, since few vector units multiply 64-bit numbers: a
   weight is low + 2^32 high, and of word * high no more than 32 bits are left. */
static uint64_t sum_words_anywhere(const char *source, ptrdiff_t count, const int32_t *low, const int32_t *high) {
    uint64_t lows = 0;
    uint32_t highs = 0;
    for (ptrdiff_t i = 0; i < count; i++) {
        int32_t word;
        memcpy(&word, source + 4 * i, sizeof word);
        lows += (uint64_t)((int64_t)word * low[i]);
        highs += (uint32_t)word * (uint32_t)high[i];
    }
    return lows + ((uint64_t)highs << 32);
}

#ifdef HAS_AVX2
/* Does the same by the instruction that multiplies every other of eight words, which GCC 12 does not use. 1,048,576
   words take 145 us (EPYC with AVX-512), and 278 us above. */
__attribute__((target("avx2"))) static uint64_t sum_words_avx2(const char *source, ptrdiff_t count,
                                                               const int32_t *low, const int32_t *high) {
    __m256i even = _mm256_setzero_si256(), odd = even, highs = even;
    ptrdiff_t whole = count - count % 16;
    for (ptrdiff_t i = 0; i < whole; i += 16)
        for (ptrdiff_t j = i; j < i + 16; j += 8) {
            __m256i word = _mm256_loadu_si256((const void *)(source + 4 * j));
            __m256i weight = _mm256_loadu_si256((const void *)(low + j));
            __m256i next_word = _mm256_srli_epi64(word, 32), next_weight = _mm256_srli_epi64(weight, 32);
            even = _mm256_add_epi64(even, _mm256_mul_epi32(word, weight));
            odd = _mm256_add_epi64(odd, _mm256_mul_epi32(next_word, next_weight));
            highs = _mm256_add_epi32(highs, _mm256_mullo_epi32(word, _mm256_loadu_si256((const void *)(high + j))));
        }
    uint64_t lows[4], sum = 0;
    uint32_t high_parts[8], high_sum = 0;
    _mm256_storeu_si256((void *)lows, _mm256_add_epi64(even, odd));
    _mm256_storeu_si256((void *)high_parts, highs);
    for (int i = 0; i < 4; i++) sum += lows[i];
    for (int i = 0; i < 8; i++) high_sum += high_parts[i];
    sum += (uint64_t)high_sum << 32;
    return sum + sum_words_anywhere(source + 4 * whole, count - whole, low + whole, high + whole);
}
#endif

static uint64_t sum_words(const char *source, ptrdiff_t count, const int32_t *low, const int32_t *high) {
#ifdef HAS_AVX2
    if (__builtin_cpu_supports("avx2")) return sum_words_avx2(source, count, low, high);
#endif
    return sum_words_anywhere(source, count, low, high);
}

/* Adds whole blocks, each to its row; then adds the rows up, element l of row h to sum l ^ h: first those that differ
   in the upper bits of h, which swap whole groups of 8. */
#define DEFINE_ROWS(NUMBER, ADD_BLOCKS, FOLD_ROWS)                                                                   \
    FOR_EVERY_CPU static void ADD_BLOCKS(NUMBER (*RESTRICT rows)[LANES], const NUMBER *RESTRICT source,              \
                                         ptrdiff_t blocks, const uint64_t *signs, const uint8_t *swaps) {            \
        for (ptrdiff_t block = 0; block < blocks; block++, source += LANES) {                                        \
            NUMBER *RESTRICT row = rows[swaps[block]];                                                               \
            uint32_t first = (uint32_t)signs[block], second = (uint32_t)(signs[block] >> 32);                        \
            for (int l = 0; l < LANES / 2; l++) row[l] += first >> l & 1 ? -source[l] : source[l];                   \
            for (int l = 0; l < LANES / 2; l++)                                                                      \
                row[l + LANES / 2] += second >> l & 1 ? -source[l + LANES / 2] : source[l + LANES / 2];              \
        }                                                                                                            \
    }                                                                                                                \
    FOR_EVERY_CPU static void FOLD_ROWS(NUMBER (*rows)[LANES], double *sums) {                                       \
        double of_lower_bits[8][LANES] = {{0}};                                                                      \
        for (int h = 0; h < LANES; h++)                                                                              \
            for (int group = 0; group < LANES; group += 8)                                                           \
                for (int l = 0; l < 8; l++) of_lower_bits[h & 7][(group ^ (h & ~7)) + l] += rows[h][group + l];      \
        for (int h = 0; h < 8; h++)                                                                                  \
            for (int l = 0; l < LANES; l++) sums[l ^ h] += of_lower_bits[h][l];                                      \
        memset(rows, 0, LANES * sizeof *rows);                                                                       \
    }

DEFINE_ROWS(float, add_float32, fold_float32)
DEFINE_ROWS(double, add_float64, fold_float64)
