/* Computes the statistics of contiguous numbers in one pass, as measure/moments/cpu_kernel.py does, but faster.

   Everything is strict IEEE 754 arithmetic in 32 lanes that are written out, so that a compiler may vectorise the
   loops without being allowed to reorder or (-ffp-contract=off) to contract anything: every processor and every rank
   gets the same bits. float32 sums hold 16 terms a lane before they go to float64: they
   are off by at most 1e-6 of the sum of magnitudes. */

#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "../_floats.h"
#include "_moments.h"

enum { LANES = 32, BLOCK = 512, PIECE = 16384, WIDE_LANES = 16, WIDE_PIECE = 2048 };

/* Between these limits, squares and sums of 16 of them are well inside the range of float32. */
static const double SMALLEST = 0x1p-40, LARGEST = 0x1p40;

typedef struct {
    double low, high, sum, sumsq;
} Piece;

/* Prefetches what will be read 8 KB later. What an op has just written has often left the nearer caches:
   131,072 floats take 16 us with this and 27 us without (Xeon, 2 MB of L2). */
static inline void fetch(const void *source, Py_ssize_t size_bytes) {
#if defined(__GNUC__)
    for (Py_ssize_t at = 0; at < size_bytes; at += 64) __builtin_prefetch((const char *)source + 8192 + at, 0, 3);
#else
    (void)source, (void)size_bytes;
#endif
}

static ALWAYS_INLINED float to_float(uint32_t number, int kind) {
    uint32_t bits = kind == FLOAT32    ? number
                    : kind == BFLOAT16 ? bits_of_bfloat16((uint16_t)number)
                                       : bits_of_float16((uint16_t)number);
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static ALWAYS_INLINED float read_number(const void *source, Py_ssize_t at, int kind) {
    return kind == FLOAT32 ? ((const float *)source)[at] : to_float(((const uint16_t *)source)[at], kind);
}

static ALWAYS_INLINED double add_lanes(const double *sums) {
    double sum = sums[0];
    for (int j = 1; j < LANES; j++) sum += sums[j];
    return sum;
}

static ALWAYS_INLINED Piece fold(const float *low, const float *high, const double *sums, const double *squares) {
    Piece found = {low[0], high[0], add_lanes(sums), add_lanes(squares)};
    for (int j = 1; j < LANES; j++) {
        found.low = low[j] < found.low ? low[j] : found.low;
        found.high = high[j] > found.high ? high[j] : found.high;
    }
    return found;
}

/* Measures whole blocks of finite numbers of medium size. The result itself shows whether they were. */
static ALWAYS_INLINED Piece sum_blocks(const void *source, Py_ssize_t blocks, int kind) {
    int number_bytes = kind == FLOAT32 ? 4 : 2;
    float low[LANES], high[LANES];
    double sums[LANES], squares[LANES];
    for (int j = 0; j < LANES; j++) {
        low[j] = INFINITY;
        high[j] = -INFINITY;
        sums[j] = squares[j] = 0;
    }
    for (Py_ssize_t block = 0; block < blocks; block++, source = (const char *)source + BLOCK * number_bytes) {
        float sum[LANES] = {0}, square[LANES] = {0};
        fetch(source, BLOCK * number_bytes);
        for (int i = 0; i < BLOCK; i += LANES)
            for (int j = 0; j < LANES; j++) {
                float value = read_number(source, i + j, kind);
                low[j] = value < low[j] ? value : low[j];
                high[j] = value > high[j] ? value : high[j];
                sum[j] += value;
                square[j] += value * value;
            }
        for (int j = 0; j < LANES; j++) {
            sums[j] += sum[j];
            squares[j] += square[j];
        }
    }
    return fold(low, high, sums, squares);
}

FOR_EVERY_CPU static Piece lanes_float32(const void *source, Py_ssize_t blocks) { return sum_blocks(source, blocks, FLOAT32); }
FOR_EVERY_CPU static Piece lanes_bfloat16(const void *source, Py_ssize_t blocks) { return sum_blocks(source, blocks, BFLOAT16); }
FOR_EVERY_CPU static Piece lanes_float16(const void *source, Py_ssize_t blocks) { return sum_blocks(source, blocks, FLOAT16); }

typedef Piece (*SumBlocks)(const void *, Py_ssize_t);

#ifdef HAS_CONVERSION
#include "_vectors.h"
#endif

static SumBlocks choose_sum(int kind) {
#ifdef HAS_CONVERSION
    if (kind == BFLOAT16 && has_conversion()) return vectors_bfloat16;
    if (kind == FLOAT16 && has_conversion()) return vectors_float16;
    if (kind == FLOAT32 && has_conversion() && !__builtin_cpu_supports("avx512f")) return vectors_float32;
#endif
    return kind == FLOAT32 ? lanes_float32 : kind == BFLOAT16 ? lanes_bfloat16 : lanes_float16;
}

/* Measures any number of float64. A NaN is in the sums, but in neither low nor high, because it compares as false. */
FOR_EVERY_CPU static Piece sum_float64(const double *source, Py_ssize_t count) {
    double low[WIDE_LANES], high[WIDE_LANES], sums[WIDE_LANES], squares[WIDE_LANES];
    for (int j = 0; j < WIDE_LANES; j++) {
        low[j] = INFINITY;
        high[j] = -INFINITY;
        sums[j] = squares[j] = 0;
    }
    Py_ssize_t whole = count - count % WIDE_LANES;
    for (Py_ssize_t i = 0; i < whole; i += WIDE_LANES) {
        fetch(source + i, WIDE_LANES * sizeof *source);
        for (int j = 0; j < WIDE_LANES; j++) {
            double value = source[i + j];
            low[j] = value < low[j] ? value : low[j];
            high[j] = value > high[j] ? value : high[j];
            sums[j] += value;
            squares[j] += value * value;
        }
    }
    Piece found = {low[0], high[0], sums[0], squares[0]};
    for (int j = 1; j < WIDE_LANES; j++) {
        found.low = low[j] < found.low ? low[j] : found.low;
        found.high = high[j] > found.high ? high[j] : found.high;
        found.sum += sums[j];
        found.sumsq += squares[j];
    }
    for (Py_ssize_t i = whole; i < count; i++) {
        double value = source[i];
        found.low = value < found.low ? value : found.low;
        found.high = value > found.high ? value : found.high;
        found.sum += value;
        found.sumsq += value * value;
    }
    return found;
}

static void add(Statistics *into, const Piece *piece) {
    into->low = piece->low < into->low ? piece->low : into->low;
    into->high = piece->high > into->high ? piece->high : into->high;
    into->sum += piece->sum;
    into->sumsq += piece->sumsq;
}

static int shows_nonfinite(const Piece *piece) {
    return isnan(piece->sum) || piece->low == -INFINITY || piece->high == INFINITY;
}

FOR_EVERY_CPU static void count_nonfinite(const double *source, Py_ssize_t count, Statistics *into) {
    int64_t nans = 0, infs = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        nans += source[i] != source[i];
        infs += fabs(source[i]) == INFINITY;
    }
    into->nans += (double)nans;
    into->infs += (double)infs;
}

static void measure_float64(const double *source, Py_ssize_t count, Statistics *into) {
    for (; count > 0; source += PIECE, count -= PIECE) {
        Py_ssize_t size = count < PIECE ? count : PIECE;
        Piece piece = sum_float64(source, size);
        add(into, &piece);
        if (shows_nonfinite(&piece)) count_nonfinite(source, size, into);
    }
}

/* Measures numbers of any size in float64. */
FOR_EVERY_CPU static void measure_widened(const float *source, Py_ssize_t count, Statistics *into) {
    double wide[WIDE_PIECE];
    for (Py_ssize_t i = 0; i < count; i++) wide[i] = source[i];
    measure_float64(wide, count, into);
}

static void measure_slowly(const void *source, Py_ssize_t count, int kind, Statistics *into) {
    union {
        uint32_t bits[WIDE_PIECE];
        float values[WIDE_PIECE];
    } wide;
    for (Py_ssize_t at = 0; at < count; at += WIDE_PIECE) {
        Py_ssize_t size = count - at < WIDE_PIECE ? count - at : WIDE_PIECE;
        if (kind == BFLOAT16) from_bfloat16((const uint16_t *)source + at, size, wide.bits);
        else if (kind == FLOAT16) from_float16((const uint16_t *)source + at, size, wide.bits);
        measure_widened(kind == FLOAT32 ? (const float *)source + at : wide.values, size, into);
    }
}

static int is_middling(const Piece *piece) {
    double magnitude = -piece->low > piece->high ? -piece->low : piece->high;
    return !isnan(piece->sum) && (magnitude == 0 || (SMALLEST <= magnitude && magnitude <= LARGEST));
}

static void measure_singles(const void *source, Py_ssize_t count, int kind, Statistics *into) {
    SumBlocks sum = choose_sum(kind);
    int number_bytes = kind == FLOAT32 ? 4 : 2;
    const char *next = source;
    for (; count > 0; next += PIECE * number_bytes, count -= PIECE) {
        Py_ssize_t size = count < PIECE ? count : PIECE, whole = size - size % BLOCK;
        if (whole > 0) {
            Piece piece = sum(next, whole / BLOCK);
            if (is_middling(&piece)) add(into, &piece);
            else measure_slowly(next, whole, kind, into);
        }
        measure_slowly(next + whole * number_bytes, size - whole, kind, into);
    }
}

/* The exponent of a number that is not finite has all bits set. */
#define FIND(type, exponent) \
    for (Py_ssize_t at = 0; at < count; at++) { \
        if ((((const type *)source)[at] & (exponent)) == (exponent)) return at; \
    }

NEVER_INLINED Py_ssize_t find_nonfinite(const void *source, Py_ssize_t count, int kind) {
    switch (kind) {
    case FLOAT64: FIND(uint64_t, 0x7FF0000000000000) break;
    case FLOAT32: FIND(uint32_t, 0x7F800000) break;
    case BFLOAT16: FIND(uint16_t, 0x7F80) break;
    default: FIND(uint16_t, 0x7C00)
    }
    return -1;
}

void finish(Statistics *found, double count, double repeats) {
    if (count == 0 || found->nans > 0) found->low = found->high = NAN;
    if (found->nans > 0) found->sum = found->sumsq = NAN;
    found->count = count * repeats;
    found->sum *= repeats;
    found->sumsq *= repeats;
    found->nans *= repeats;
    found->infs *= repeats;
}

NEVER_INLINED static void measure(const void *source, Py_ssize_t count, int kind, Statistics *found) {
    if (kind == FLOAT64)
        measure_float64(source, count, found);
    else
        measure_singles(source, count, kind, found);
}

/* float32 squares of small numbers underflow, which takes hundreds of cycles each unless it flushes to zero; it changes
   nothing, for sums that small are made in float64. */
void measure_undisturbed(const void *source, Py_ssize_t count, int kind, Statistics *found) {
    unsigned before = begin_arithmetic(kind != FLOAT64);
    measure(source, count, kind, found);
    end_arithmetic(before);
}

void measure_without_gil(const void *source, Py_ssize_t count, int kind, Statistics *found) {
    if (count > PIECE) {
        Py_BEGIN_ALLOW_THREADS
        measure_undisturbed(source, count, kind, found);
        Py_END_ALLOW_THREADS
    } else
        measure_undisturbed(source, count, kind, found);
}
