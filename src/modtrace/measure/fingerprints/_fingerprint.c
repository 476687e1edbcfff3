/* Computes the hash and the sketch of numbers in one pass; recording/statistics/fingerprints.py defines both.

   The hash is made of integers: every processor, compiler and order of summation gives the same bits. In the sketch at
   most 64 numbers are added up in float32 before float64 takes over, each with its sign, in an order that is
   written out; -ffp-contract=off. */

#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "_fingerprint_loops.h"
#include "../_floats.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words are read as they lie in memory: numpy does this where they are not little-endian"
#endif

enum { BLOCKS = 4096, WORDS = 65536, TILE = 1024, MOST_DIMS = 64, RUN = 128, FREE_GIL = 16384 };
enum { CHUNK_SIGNS = 4, CHUNK_SWAP = 5, ROW_WEIGHT = 7 }; /* tags of mix() */

/* The elements and what to compute. Strides are in bytes of memory, steps in elements of the flat tensor. */
typedef struct {
    const char *source;
    int64_t first;
    int dims;
    Py_ssize_t sizes[MOST_DIMS], strides[MOST_DIMS], steps[MOST_DIMS];
    int item_size, kind;
    const int32_t *low, *high; /* the weights of words are low + 2^32 high; NULL: no hash */
    const uint64_t *signs;     /* of the lanes of each block */
    const uint8_t *swaps;      /* the row that each block is added to */
    double *sketch;            /* NULL: none */
    int is_careful;            /* non-finite numbers count as 0, and every sum is a float64 */
} Task;

typedef struct {
    uint64_t hash;
    int64_t chunk;
    union {
        float narrow[LANES][LANES];
        double wide[LANES][LANES];
    } rows; /* of the chunk */
    double sketch[LANES];
    Py_ssize_t gathered; /* elements that are not contiguous, until there are enough */
    int64_t gathered_at;
    uint64_t gathered_bytes[TILE];
} Sums;

static uint64_t hash_words(const Task *task, const char *source, Py_ssize_t count, int64_t word) {
    int64_t at = word % WORDS;
    return sum_words(source, count, task->low + at, task->high + at) * (mix(ROW_WEIGHT, (uint64_t)(word / WORDS)) | 1);
}

/* Hashes a part of a word. The rest is 0 here, and is added with the part that has it. */
static uint64_t hash_part(const Task *task, const char *source, Py_ssize_t size_bytes, int64_t at_byte) {
    char word[4] = {0};
    memcpy(word + at_byte % 4, source, (size_t)size_bytes);
    return hash_words(task, word, 1, at_byte / 4);
}

static uint64_t hash_bytes(const Task *task, const char *source, Py_ssize_t size_bytes, int64_t at_byte) {
    uint64_t hash = 0;
    for (Py_ssize_t taken; size_bytes > 0; source += taken, at_byte += taken, size_bytes -= taken) {
        if (at_byte % 4 || size_bytes < 4) {
            Py_ssize_t missing = 4 - at_byte % 4;
            taken = missing < size_bytes ? missing : size_bytes;
            hash += hash_part(task, source, taken, at_byte);
        } else {
            Py_ssize_t words = size_bytes / 4, of_row = WORDS - at_byte / 4 % WORDS;
            if (words > of_row) words = of_row;
            hash += hash_words(task, source, words, at_byte / 4);
            taken = 4 * words;
        }
    }
    return hash;
}

static int is_wide(const Task *task) { return task->is_careful || task->kind == FLOAT64; }

static void close_chunk(const Task *task, Sums *sums) {
    double folded[LANES] = {0};
    if (is_wide(task))
        fold_float64(sums->rows.wide, folded);
    else
        fold_float32(sums->rows.narrow, folded);
    uint64_t signs = mix(CHUNK_SIGNS, (uint64_t)sums->chunk);
    int swap = (int)(mix(CHUNK_SWAP, (uint64_t)sums->chunk) % LANES);
    for (int b = 0; b < LANES; b++) sums->sketch[b] += signs >> b & 1 ? -folded[b ^ swap] : folded[b ^ swap];
}

static void add_blocks(const Task *task, Sums *sums, const void *numbers, Py_ssize_t blocks, int64_t block) {
    const uint64_t *signs = task->signs + block;
    const uint8_t *swaps = task->swaps + block;
    if (is_wide(task))
        add_float64(sums->rows.wide, numbers, blocks, signs, swaps);
    else
        add_float32(sums->rows.narrow, numbers, blocks, signs, swaps);
}

/* Adds a part of a block, with zeros around it. */
static void add_part(const Task *task, Sums *sums, const void *numbers, size_t size_bytes, int64_t block, size_t from) {
    double padded[LANES] = {0};
    memcpy((char *)padded + from, numbers, size_bytes);
    add_blocks(task, sums, padded, 1, block);
}

/* Adds numbers to the sketch; they are float64 if sums are, and float32 otherwise. */
static void sketch_numbers(const Task *task, Sums *sums, const void *numbers, Py_ssize_t count, int64_t place) {
    const char *next = numbers;
    Py_ssize_t size = is_wide(task) ? sizeof(double) : sizeof(float);
    for (Py_ssize_t taken; count > 0; next += taken * size, place += taken, count -= taken) {
        int64_t block = place / LANES, lane = place % LANES, at = block % BLOCKS;
        if (block / BLOCKS != sums->chunk) {
            if (sums->chunk >= 0) close_chunk(task, sums);
            sums->chunk = block / BLOCKS;
        }
        if (lane || count < LANES) {
            taken = count < LANES - lane ? count : LANES - lane;
            add_part(task, sums, next, (size_t)(taken * size), at, (size_t)(lane * size));
        } else {
            Py_ssize_t blocks = count / LANES < BLOCKS - at ? count / LANES : BLOCKS - at;
            add_blocks(task, sums, next, blocks, at);
            taken = blocks * LANES;
        }
    }
}

static void sketch_carefully(const Task *task, Sums *sums, const void *numbers, int kind, Py_ssize_t count,
                             int64_t place) {
    double finite[TILE];
    for (Py_ssize_t i = 0; i < count; i++) {
        double value = kind == FLOAT64 ? ((const double *)numbers)[i] : ((const float *)numbers)[i];
        finite[i] = isfinite(value) ? value : 0;
    }
    sketch_numbers(task, sums, finite, count, place);
}

static void sketch_tile(const Task *task, Sums *sums, const void *source, Py_ssize_t count, int64_t place) {
    uint32_t bits[TILE];
    int kind = task->kind;
    if (kind == BFLOAT16 || kind == FLOAT16) {
        (kind == BFLOAT16 ? from_bfloat16 : from_float16)(source, count, bits);
        source = bits;
        kind = FLOAT32;
    }
    if (task->is_careful)
        sketch_carefully(task, sums, source, kind, count, place);
    else
        sketch_numbers(task, sums, source, count, place);
}

/* Takes contiguous elements. They are in the nearest cache when the sketch reads them again. */
static void take_dense(const Task *task, Sums *sums, const char *source, Py_ssize_t count, int64_t place) {
    for (Py_ssize_t taken; count > 0; source += taken * task->item_size, place += taken, count -= taken) {
        taken = count < TILE ? count : TILE;
        if (task->low) sums->hash += hash_bytes(task, source, taken * task->item_size, place * task->item_size);
        if (task->sketch) sketch_tile(task, sums, source, taken, place);
    }
}

static void take_gathered(const Task *task, Sums *sums) {
    take_dense(task, sums, (const char *)sums->gathered_bytes, sums->gathered, sums->gathered_at);
    sums->gathered = 0;
}

static void copy_strided(char *to, const char *from, Py_ssize_t count, Py_ssize_t stride, int item_size) {
    Py_ssize_t i;
    if (stride == item_size)
        memcpy(to, from, (size_t)(count * stride));
    else if (item_size == 1)
        for (i = 0; i < count; i++) to[i] = from[i * stride];
    else if (item_size == 2)
        for (i = 0; i < count; i++) memcpy(to + 2 * i, from + i * stride, 2);
    else if (item_size == 4)
        for (i = 0; i < count; i++) memcpy(to + 4 * i, from + i * stride, 4);
    else
        for (i = 0; i < count; i++) memcpy(to + 8 * i, from + i * stride, 8);
}

/* Takes a row of elements that are consecutive in the flat tensor. Short rows wait for the next one. */
static void take_run(const Task *task, Sums *sums, const char *source, int64_t place) {
    Py_ssize_t count = task->sizes[task->dims - 1], stride = task->strides[task->dims - 1];
    if (sums->gathered && sums->gathered_at + sums->gathered != place) take_gathered(task, sums);
    if (stride == task->item_size && count >= RUN && (uintptr_t)source % (uintptr_t)task->item_size == 0) {
        take_gathered(task, sums);
        take_dense(task, sums, source, count, place);
        return;
    }
    for (Py_ssize_t taken; count > 0; source += taken * stride, place += taken, count -= taken) {
        if (sums->gathered == TILE) take_gathered(task, sums);
        if (!sums->gathered) sums->gathered_at = place;
        taken = count < TILE - sums->gathered ? count : TILE - sums->gathered;
        char *to = (char *)sums->gathered_bytes + sums->gathered * task->item_size;
        copy_strided(to, source, taken, stride, task->item_size);
        sums->gathered += taken;
    }
}

static void walk(const Task *task, Sums *sums) {
    Py_ssize_t passed[MOST_DIMS] = {0};
    const char *source = task->source;
    int64_t place = task->first;
    int dim;
    do {
        take_run(task, sums, source, place);
        for (dim = task->dims - 2; dim >= 0; dim--) {
            source += task->strides[dim];
            place += task->steps[dim];
            if (++passed[dim] < task->sizes[dim]) break;
            source -= task->strides[dim] * task->sizes[dim];
            place -= task->steps[dim] * task->sizes[dim];
            passed[dim] = 0;
        }
    } while (dim >= 0);
    take_gathered(task, sums);
    if (sums->chunk >= 0) close_chunk(task, sums);
}

NEVER_INLINED static uint64_t take_all(Task *task) {
    Sums sums;
    sums.hash = 0;
    sums.chunk = -1;
    sums.gathered = 0;
    if (task->sketch) {
        memset(&sums.rows, 0, is_wide(task) ? sizeof sums.rows.wide : sizeof sums.rows.narrow);
        memset(sums.sketch, 0, sizeof sums.sketch);
    }
    walk(task, &sums);
    if (task->sketch) memcpy(task->sketch, sums.sketch, sizeof sums.sketch);
    return sums.hash;
}

static int is_poisoned(const double *sketch) {
    for (int b = 0; b < LANES; b++)
        if (!isfinite(sketch[b])) return 1;
    return 0;
}

static uint64_t take_twice_if_needed(Task *task) {
    uint64_t hash = take_all(task);
    if (task->sketch && is_poisoned(task->sketch)) {
        task->is_careful = 1;
        task->low = NULL;
        take_all(task);
    }
    return hash;
}

static uint64_t take_undisturbed(Task *task) {
    unsigned before = begin_arithmetic(0);
    uint64_t hash = take_twice_if_needed(task);
    end_arithmetic(before);
    return hash;
}

static int read_sizes(PyObject *tuple, Py_ssize_t dims, Py_ssize_t *into) {
    if (PyTuple_Size(tuple) != dims) return 0;
    for (Py_ssize_t dim = 0; dim < dims; dim++) into[dim] = PyLong_AsSsize_t(PyTuple_GetItem(tuple, dim));
    return !PyErr_Occurred();
}

static PyObject *refuse(const char *what) {
    return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "fingerprint(): no such %s", what);
}

static int is_known(const Task *task) {
    int size = task->item_size, sketched = task->kind == FLOAT64 ? 8 : task->kind == FLOAT32 ? 4 : 2;
    if (task->source == NULL || task->first < 0 || (size != 1 && size != 2 && size != 4 && size != 8)) return 0;
    return !task->sketch ||
           (task->kind >= 0 && task->kind < KINDS && size == sketched && task->signs && task->swaps);
}

static PyObject *fingerprint(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 11) return PyErr_Format(PyExc_TypeError, "fingerprint() takes 11 arguments, not %zd", nargs);
    Task task;
    Py_ssize_t dims = PyTuple_Size(args[1]), count = 1;
    if (dims < 1 || dims > MOST_DIMS) return refuse("number of dimensions");
    if (!read_sizes(args[1], dims, task.sizes) || !read_sizes(args[2], dims, task.strides) ||
        !read_sizes(args[3], dims, task.steps))
        return refuse("dimensions");
    task.dims = (int)dims;
    task.source = PyLong_AsVoidPtr(args[0]);
    task.first = PyLong_AsLongLong(args[4]);
    task.item_size = (int)PyLong_AsLong(args[5]);
    task.kind = (int)PyLong_AsLong(args[6]);
    task.low = PyLong_AsVoidPtr(args[7]);
    task.high = task.low ? task.low + WORDS : NULL;
    task.signs = PyLong_AsVoidPtr(args[8]);
    task.swaps = PyLong_AsVoidPtr(args[9]);
    task.sketch = PyLong_AsVoidPtr(args[10]);
    task.is_careful = 0;
    if (PyErr_Occurred() || !is_known(&task)) return refuse("memory or kind");
    for (Py_ssize_t dim = 0; dim < dims; dim++) {
        if (task.sizes[dim] < 1) return refuse("size");
        count *= task.sizes[dim];
    }
    uint64_t hash;
    if (count > FREE_GIL) {
        Py_BEGIN_ALLOW_THREADS
        hash = take_undisturbed(&task);
        Py_END_ALLOW_THREADS
    } else
        hash = take_undisturbed(&task);
    return PyLong_FromUnsignedLongLong(hash);
}

static PyMethodDef methods[] = {
    {"fingerprint", (PyCFunction)(void (*)(void))fingerprint, METH_FASTCALL,
     "fingerprint(address, sizes, strides, steps, first, item_size, kind, weights, signs, swaps, sketch): the hash; "
     "writes 64 doubles; kind: 0 float32, 1 bfloat16, 2 float16, 3 float64; no hash, or no sketch, where weights or "
     "sketch is 0."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_fingerprint", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__fingerprint(void) { return PyModuleDef_Init(&definition); }
