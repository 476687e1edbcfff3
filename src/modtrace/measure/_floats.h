/* What the kernels share: compilation for each processor, floating-point settings, and conversion of 16-bit floats. */

#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "_kinds.h"

/* One version of the hot functions for each kind of vector unit; the loader chooses. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && defined(__GNUC__)
#include <cpuid.h>
#include <immintrin.h>
#define FOR_EVERY_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#define BY_CONVERSION __attribute__((target("avx2,f16c")))
#define HAS_CONVERSION

/* Returns whether the processor converts float16 itself; compilers know this question from GCC 11 on. */
static inline int has_conversion(void) {
    static int answer = -1;
    if (answer < 0) {
        unsigned a, b, c = 0, d;
        answer = __builtin_cpu_supports("avx2") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
    }
    return answer;
}
#else
#define FOR_EVERY_CPU
#endif

#if defined(__SSE__) || defined(_M_X64)
#include <xmmintrin.h>
#define HAS_MXCSR
#endif

/* Sets the default arithmetic of IEEE 754, without traps, whatever the user has set; on request results that would be
   subnormal are 0. Returns the state that `end_arithmetic` restores, with the user's flags. */
static inline unsigned begin_arithmetic(int flushes_results) {
#ifdef HAS_MXCSR
    enum { NEAREST_NO_TRAPS = 0x1F80, FLUSH_RESULTS = 0x8000 };
    unsigned before = _mm_getcsr();
    _mm_setcsr(flushes_results ? NEAREST_NO_TRAPS | FLUSH_RESULTS : NEAREST_NO_TRAPS);
    return before;
#else
    return (void)flushes_results, 0;
#endif
}

static inline void end_arithmetic(unsigned before) {
#ifdef HAS_MXCSR
    _mm_setcsr(before);
#else
    (void)before;
#endif
}

#if defined(__GNUC__)
#define NEVER_INLINED __attribute__((noinline))
#else
#define NEVER_INLINED
#endif

#if defined(_MSC_VER)
#define RESTRICT __restrict
#else
#define RESTRICT restrict
#endif

#if defined(__GNUC__)
#define ALWAYS_INLINED inline __attribute__((always_inline))
#else
#define ALWAYS_INLINED inline
#endif

static ALWAYS_INLINED uint32_t bits_of_bfloat16(uint16_t number) { return (uint32_t)number << 16; }

/* Rebiases the exponent by a multiplication, which also converts subnormals; that of NaN and infinity is corrected. There
   is no branch, which would keep compilers from vectorising: without vectors it takes ten times as long. */
static ALWAYS_INLINED uint32_t bits_of_float16(uint16_t number) {
    uint32_t magnitude = (uint32_t)(number & 0x7FFF) << 13, sign = (uint32_t)(number & 0x8000) << 16, rebiased;
    float value;
    memcpy(&value, &magnitude, sizeof value);
    value *= 0x1p112f;
    memcpy(&rebiased, &value, sizeof rebiased);
    return rebiased | (magnitude >= 0x0F800000 ? 0x7F800000 : 0) | sign;
}

FOR_EVERY_CPU static void from_bfloat16(const uint16_t *source, ptrdiff_t count, uint32_t *bits) {
    for (ptrdiff_t i = 0; i < count; i++) bits[i] = bits_of_bfloat16(source[i]);
}

FOR_EVERY_CPU static void from_float16(const uint16_t *source, ptrdiff_t count, uint32_t *bits) {
    for (ptrdiff_t i = 0; i < count; i++) bits[i] = bits_of_float16(source[i]);
}
