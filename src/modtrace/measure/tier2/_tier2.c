/* Computes tier 2 of contiguous numbers and the maxima of channels, as tier2.py does, but faster.

   What is counted or compared is taken from the bits, so neither NaN nor what a user has set the processor to matters.
   Sums are made in float64, in 16 lanes that are written out, so that a compiler may vectorise the loops without
   being allowed to reorder or (-ffp-contract=off) to contract anything: every processor gets the same bits, and even
   the fourth power of a float32 neither overflows nor is lost. */

#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "../_floats.h"

enum { LANES = 16, BLOCK = 1024, BINS = 256, MANY = 16384 };

/* Neighbours are often equal, and a counter that has just been written cannot be read for some cycles: four tables take
   turns. They are emptied before 32 bits are full. */
enum { TABLES = 4, BLOCKS_OF_TABLES = 1 << 20 };

static const int32_t NAN32 = 0x7F800001;
static const int64_t NAN64 = 0x7FF0000000000001;

/* The results, which Python reads. */
typedef struct {
    int64_t histogram[BINS], zeros, argmax;
    double sumabs, sum4, largest;
} Tier2;

typedef struct {
    uint32_t tables[TABLES][BINS];
    double sums[LANES], fourths[LANES];
    int64_t zeros, nonfinite, largest; /* the largest as bits, NaN above all others */
    Py_ssize_t largest_in;             /* the first number of its block */
} Running;

typedef union {
    uint32_t bits[BLOCK];
    float values[BLOCK];
} Block32;

typedef union {
    uint64_t bits[BLOCK];
    double values[BLOCK];
} Block64;

/* Keeps gcc 12 from vectorising across groups of 16, which needs shuffles of float64: 1.7 ns a number, not 1.3. */
#if defined(__GNUC__)
#define BETWEEN_GROUPS(values) __builtin_prefetch(values, 0, 3)
#else
#define BETWEEN_GROUPS(values) (void)0
#endif

/* The sums; the block is filled up with zeros. */
#define ADD_UP(WIDTH)                                                                                               \
    FOR_EVERY_CPU static void add_up##WIDTH(const Block##WIDTH *block, Py_ssize_t filled, Running *into) {          \
        double sums[LANES], fourths[LANES];                                                                         \
        memcpy(sums, into->sums, sizeof sums);                                                                      \
        memcpy(fourths, into->fourths, sizeof fourths);                                                             \
        for (Py_ssize_t i = 0; i < filled; i += LANES) {                                                            \
            BETWEEN_GROUPS(block->values + i);                                                                      \
            for (int j = 0; j < LANES; j++) {                                                                       \
                double value = block->values[i + j], square = value * value;                                        \
                sums[j] += fabs(value);                                                                             \
                fourths[j] += square * square;                                                                      \
            }                                                                                                       \
        }                                                                                                           \
        memcpy(into->sums, sums, sizeof sums);                                                                      \
        memcpy(into->fourths, fourths, sizeof fourths);                                                             \
    }

ADD_UP(32)
ADD_UP(64)

/* Finds the largest magnitude and the counts. A compiler may vectorise sums of integers in any order. */
FOR_EVERY_CPU static int32_t scan32(const Block32 *block, Py_ssize_t size, Running *into) {
    int32_t largest = 0, zeros = 0;
    for (Py_ssize_t i = 0; i < size; i++) {
        int32_t magnitude = (int32_t)(block->bits[i] & 0x7FFFFFFF);
        largest = magnitude > largest ? magnitude : largest;
        zeros += magnitude == 0;
    }
    into->zeros += zeros;
    return largest;
}

FOR_EVERY_CPU static int64_t scan64(const Block64 *block, Py_ssize_t size, Running *into) {
    int64_t largest = 0, zeros = 0, nonfinite = 0;
    for (Py_ssize_t i = 0; i < size; i++) {
        int64_t magnitude = (int64_t)(block->bits[i] & INT64_MAX);
        largest = magnitude > largest ? magnitude : largest;
        zeros += magnitude == 0;
        nonfinite += magnitude >= NAN64 - 1;
    }
    into->zeros += zeros;
    into->nonfinite += nonfinite;
    return largest;
}

/* Counts two float32 at a time; the bits around the exponent are cut off. */
static void count_exponents32(const Block32 *block, Py_ssize_t size, Running *into) {
    uint32_t(*tables)[BINS] = into->tables;
    Py_ssize_t whole = size - size % 4;
    for (Py_ssize_t i = 0; i < whole; i += 4) {
        uint64_t first, second;
        memcpy(&first, block->bits + i, sizeof first);
        memcpy(&second, block->bits + i + 2, sizeof second);
        tables[0][first >> 23 & 0xFF]++;
        tables[1][first >> 55 & 0xFF]++;
        tables[2][second >> 23 & 0xFF]++;
        tables[3][second >> 55 & 0xFF]++;
    }
    for (Py_ssize_t i = whole; i < size; i++) tables[0][block->bits[i] >> 23 & 0xFF]++;
}

/* Returns the bin of a float64. The biases are 1023 and 127; numbers outside of float32 are in the outermost bins. */
static inline int bin_of64(uint64_t bits) {
    int bin = (int)(bits >> 52 & 0x7FF) - 896;
    return bin < 0 ? 0 : bin > BINS - 1 ? BINS - 1 : bin;
}

static void count_exponents64(const Block64 *block, Py_ssize_t size, Running *into) {
    uint32_t(*tables)[BINS] = into->tables;
    Py_ssize_t whole = size - size % TABLES;
    for (Py_ssize_t i = 0; i < whole; i += TABLES)
        for (int table = 0; table < TABLES; table++) tables[table][bin_of64(block->bits[i + table])]++;
    for (Py_ssize_t i = whole; i < size; i++) tables[0][bin_of64(block->bits[i])]++;
}

static void load32(const void *source, Py_ssize_t start, Py_ssize_t size, int kind, Block32 *block) {
    if (kind == FLOAT32)
        memcpy(block->bits, (const uint32_t *)source + start, size * sizeof(uint32_t));
    else
        (kind == BFLOAT16 ? from_bfloat16 : from_float16)((const uint16_t *)source + start, size, block->bits);
}

static Py_ssize_t fill_up(Py_ssize_t size) { return (size + LANES - 1) / LANES * LANES; }

static void empty_tables(Running *from, int64_t *histogram) {
    for (int table = 0; table < TABLES; table++)
        for (int bin = 0; bin < BINS; bin++) histogram[bin] += from->tables[table][bin];
    memset(from->tables, 0, sizeof from->tables);
}

static void note_largest(int64_t largest, Py_ssize_t start, Running *into) {
    if (largest > into->largest) {
        into->largest = largest;
        into->largest_in = start;
    }
}

static Py_ssize_t measure32(const void *source, Py_ssize_t count, int kind, Running *running, int64_t *histogram) {
    Block32 block;
    for (Py_ssize_t start = 0, blocks = 1; start < count; start += BLOCK, blocks++) {
        Py_ssize_t size = count - start < BLOCK ? count - start : BLOCK, filled = fill_up(size);
        load32(source, start, size, kind, &block);
        memset(block.bits + size, 0, (filled - size) * sizeof *block.bits);
        add_up32(&block, filled, running);
        int32_t largest = scan32(&block, size, running);
        note_largest(largest > NAN32 ? NAN32 : largest, start, running);
        count_exponents32(&block, size, running);
        if (blocks % BLOCKS_OF_TABLES == 0) empty_tables(running, histogram);
    }
    Py_ssize_t at = 0, start = running->largest_in, size = count - start < BLOCK ? count - start : BLOCK;
    load32(source, start, size, kind, &block);
    while (at < size - 1 && (int64_t)(block.bits[at] & 0x7FFFFFFF) < running->largest) at++;
    return start + at; /* another thread of the user's may have written over the largest meanwhile */
}

static Py_ssize_t measure64(const uint64_t *source, Py_ssize_t count, Running *running, int64_t *histogram) {
    Block64 block;
    for (Py_ssize_t start = 0, blocks = 1; start < count; start += BLOCK, blocks++) {
        Py_ssize_t size = count - start < BLOCK ? count - start : BLOCK, filled = fill_up(size);
        memcpy(block.bits, source + start, size * sizeof *source);
        memset(block.bits + size, 0, (filled - size) * sizeof *block.bits);
        add_up64(&block, filled, running);
        int64_t largest = scan64(&block, size, running);
        note_largest(largest > NAN64 ? NAN64 : largest, start, running);
        count_exponents64(&block, size, running);
        if (blocks % BLOCKS_OF_TABLES == 0) empty_tables(running, histogram);
    }
    Py_ssize_t at = running->largest_in;
    while (at < count - 1 && (int64_t)(source[at] & INT64_MAX) < running->largest) at++;
    return at; /* another thread of the user's may have written over the largest meanwhile */
}

static double number_of(int64_t bits, int kind) {
    if (kind == FLOAT64) {
        double value;
        memcpy(&value, &bits, sizeof value);
        return value;
    }
    uint32_t narrow = (uint32_t)bits;
    float value;
    memcpy(&value, &narrow, sizeof value);
    return value;
}

/* Returns the sum of the lanes. Every NaN is written with the same bits. */
static double sum_of(const double *lanes) {
    double sum = 0;
    for (int j = 0; j < LANES; j++) sum += lanes[j];
    return isnan(sum) ? NAN : sum;
}

NEVER_INLINED static void measure(const void *source, Py_ssize_t count, int kind, Tier2 *found) {
    Running running = {.largest = -1};
    memset(found, 0, sizeof *found);
    found->argmax = kind == FLOAT64 ? measure64(source, count, &running, found->histogram)
                                    : measure32(source, count, kind, &running, found->histogram);
    empty_tables(&running, found->histogram);
    found->histogram[0] -= running.zeros;
    found->histogram[BINS - 1] = kind == FLOAT64 ? found->histogram[BINS - 1] - running.nonfinite : 0;
    found->zeros = running.zeros;
    found->sumabs = sum_of(running.sums);
    found->sum4 = sum_of(running.fourths);
    found->largest = number_of(running.largest, kind);
}

static void measure_undisturbed(const void *source, Py_ssize_t count, int kind, Tier2 *found) {
    unsigned before = begin_arithmetic(0);
    measure(source, count, kind, found);
    end_arithmetic(before);
}

static PyObject *tier2_into(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 4) return PyErr_Format(PyExc_TypeError, "tier2_into() takes 4 arguments, not %zd", nargs);
    void *source = PyLong_AsVoidPtr(args[0]);
    Py_ssize_t count = PyLong_AsSsize_t(args[1]);
    long kind = PyLong_AsLong(args[2]);
    void *target = PyLong_AsVoidPtr(args[3]);
    if (PyErr_Occurred()) return NULL;
    if (count <= 0 || kind < 0 || kind >= KINDS || source == NULL || target == NULL)
        return PyErr_Format(PyExc_ValueError, "tier2_into(): no such memory or kind");
    if (count > MANY) {
        Py_BEGIN_ALLOW_THREADS
        measure_undisturbed(source, count, (int)kind, target);
        Py_END_ALLOW_THREADS
    } else
        measure_undisturbed(source, count, (int)kind, target);
    Py_RETURN_NONE;
}

/* Finds the bits of the largest magnitude of each channel. Those of a NaN are larger than those of any number. */
#define LARGEST(WIDTH)                                                                                              \
    FOR_EVERY_CPU static void largest_of_columns##WIDTH(const int##WIDTH##_t *source, Py_ssize_t rows,              \
                                                        Py_ssize_t channels, int##WIDTH##_t *RESTRICT found) {      \
        for (Py_ssize_t row = 0; row < rows; row++, source += channels)                                             \
            for (Py_ssize_t i = 0; i < channels; i++) {                                                             \
                int##WIDTH##_t magnitude = source[i] & INT##WIDTH##_MAX;                                            \
                found[i] = magnitude > found[i] ? magnitude : found[i];                                             \
            }                                                                                                       \
    }                                                                                                               \
    FOR_EVERY_CPU static int##WIDTH##_t largest_of_run##WIDTH(const int##WIDTH##_t *source, Py_ssize_t length) {    \
        int##WIDTH##_t found = 0;                                                                                   \
        for (Py_ssize_t i = 0; i < length; i++) {                                                                   \
            int##WIDTH##_t magnitude = source[i] & INT##WIDTH##_MAX;                                                \
            found = magnitude > found ? magnitude : found;                                                          \
        }                                                                                                           \
        return found;                                                                                               \
    }                                                                                                               \
    static void largest##WIDTH(const int##WIDTH##_t *source, Py_ssize_t outer, Py_ssize_t channels,                 \
                               Py_ssize_t inner, int##WIDTH##_t *found) {                                           \
        memset(found, 0, channels * sizeof *found);                                                                 \
        if (inner == 1) {                                                                                           \
            largest_of_columns##WIDTH(source, outer, channels, found);                                              \
            return;                                                                                                 \
        }                                                                                                           \
        for (Py_ssize_t row = 0; row < outer; row++)                                                                \
            for (Py_ssize_t i = 0; i < channels; i++, source += inner) {                                            \
                int##WIDTH##_t magnitude = largest_of_run##WIDTH(source, inner);                                    \
                found[i] = magnitude > found[i] ? magnitude : found[i];                                             \
            }                                                                                                       \
    }

LARGEST(16)
LARGEST(32)
LARGEST(64)

static void largest(const void *source, const Py_ssize_t *shape, long size_bytes, void *found) {
    if (size_bytes == 2)
        largest16(source, shape[0], shape[1], shape[2], found);
    else if (size_bytes == 4)
        largest32(source, shape[0], shape[1], shape[2], found);
    else
        largest64(source, shape[0], shape[1], shape[2], found);
}

static PyObject *largest_into(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 6) return PyErr_Format(PyExc_TypeError, "largest_into() takes 6 arguments, not %zd", nargs);
    void *source = PyLong_AsVoidPtr(args[0]);
    Py_ssize_t shape[3] = {PyLong_AsSsize_t(args[1]), PyLong_AsSsize_t(args[2]), PyLong_AsSsize_t(args[3])};
    long size_bytes = PyLong_AsLong(args[4]);
    void *target = PyLong_AsVoidPtr(args[5]);
    if (PyErr_Occurred()) return NULL;
    int is_size = size_bytes == 2 || size_bytes == 4 || size_bytes == 8;
    if (shape[0] <= 0 || shape[1] <= 0 || shape[2] <= 0 || !is_size || source == NULL || target == NULL)
        return PyErr_Format(PyExc_ValueError, "largest_into(): no such memory or size");
    Py_BEGIN_ALLOW_THREADS
    largest(source, shape, size_bytes, target);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"tier2_into", (PyCFunction)(void (*)(void))tier2_into, METH_FASTCALL,
     "tier2_into(address, count, kind, target_address): writes 258 int64 (the histogram, zeros, argmax) and 3 doubles "
     "(sum of magnitudes, sum of fourth powers, largest magnitude); kind: 0 float32, 1 bfloat16, 2 float16, 3 float64."},
    {"largest_into", (PyCFunction)(void (*)(void))largest_into, METH_FASTCALL,
     "largest_into(address, outer, channels, inner, size_bytes, target_address): writes the bits of each channel's "
     "largest magnitude; the sign of an element is its highest bit."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_tier2", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__tier2(void) { return PyModuleDef_Init(&definition); }
