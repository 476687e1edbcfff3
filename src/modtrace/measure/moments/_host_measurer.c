/* Measures strided tensors in main memory, from Python to the row, as `Measurer._measure_memory` does, but faster.

   It reads where the elements are by DLPack's exchange, which torch has from 2.11 on. What is unusual is left to Python:
   subclasses, conjugated or negated views, dtypes that the kernel does not read, memory that is not aligned or freed. */

#include <string.h>

#include "../_exchange.h"
#include "../_kinds.h"
#include "_moments.h"
/* It needs Python.h, which _moments.h includes with the limits of its interface. */
#include "../_measurements.h"

enum { MOST_DIMENSIONS = 16, GATHERED_BYTES = 16384 };

/* As in memory.py: at most this many elements are visited if they share memory. */
static const int64_t MOST_ELEMENTS = (int64_t)1 << 27;

/* What `HostMeasurer()` receives, in this order. */
enum { TYPES, KINDS_OF_TENSORS, DISPATCH_KEYS, TRACING_STATE, MEASUREMENT, COMPLEX_NOTE, HELD_ROWS, FREE, ADDRESSES, HELD };

typedef struct {
    PyObject_HEAD
    PyObject *held[HELD]; /* owned */
    PlainTensors plain;
    RowPath path;
    ExchangeFunction exchange;
} HostMeasurer;

/* ---- Where the elements are. */

/* The memory of a tensor. `shape` and `strides` are without the dimensions of size 1 and those that are expanded. */
typedef struct {
    const char *data;
    int kind, parts, number_bytes;  /* of the numbers; an element has 1 or 2 */
    int dimensions;
    int64_t shape[MOST_DIMENSIONS], strides[MOST_DIMENSIONS];
    int64_t steps[MOST_DIMENSIONS]; /* in the row-major index of the whole tensor */
    int64_t count;                  /* elements, each once */
    int64_t repeats;                /* how often each counts */
    int64_t extent;                 /* elements from the first to the last one in memory */
    int is_dense;                   /* they lie side by side ... */
    int is_row_major;               /* ... and in their order */
} Memory;

/* Reads the type of the numbers. Returns 0 if the kernel does not read it. */
static int read_kind(const Exchanged *found, Memory *memory) {
    enum { FLOAT = 2, BFLOAT = 4, COMPLEX = 5 };
    int bits = found->dtype_bits;
    memory->parts = found->dtype_code == COMPLEX ? 2 : 1;
    if (found->dtype_lanes != 1) return 0;
    if (found->dtype_code == BFLOAT && bits == 16) memory->kind = BFLOAT16;
    else if (found->dtype_code != FLOAT && found->dtype_code != COMPLEX) return 0;
    else if (bits / memory->parts == 16) memory->kind = FLOAT16;
    else if (bits / memory->parts == 32) memory->kind = FLOAT32;
    else if (bits / memory->parts == 64) memory->kind = FLOAT64;
    else return 0;
    memory->number_bytes = bits / memory->parts / 8;
    return 1;
}

/* Returns whether the elements lie side by side, in any order of the dimensions. */
static int is_dense(const Memory *memory) {
    int is_used[MOST_DIMENSIONS] = {0};
    int64_t expected = 1;
    for (int found = 0; found < memory->dimensions; found++) {
        int at = 0;
        while (at < memory->dimensions && (is_used[at] || memory->strides[at] != expected)) at++;
        if (at == memory->dimensions) return 0;
        is_used[at] = 1;
        expected *= memory->shape[at];
    }
    return 1;
}

static void read_dimensions(const Exchanged *found, Memory *memory) {
    int64_t numel = 1, expected = 1;
    memory->dimensions = 0;
    memory->repeats = memory->count = memory->extent = memory->is_row_major = 1;
    for (int at = found->dimensions - 1; at >= 0; at--) {
        int64_t size = found->shape[at], stride = found->strides[at];
        if (size != 1) {
            memory->is_row_major = memory->is_row_major && stride == expected;
            expected *= size;
            if (stride == 0) memory->repeats *= size;
            else {
                int last = memory->dimensions++; /* innermost first */
                memory->shape[last] = size;
                memory->strides[last] = stride;
                memory->steps[last] = numel;
                memory->count *= size;
                memory->extent += (size - 1) * stride;
            }
        }
        numel *= size;
    }
    if (numel == 0) memory->count = memory->extent = 0;
    memory->is_row_major |= numel == 0;
    memory->is_dense = memory->is_row_major || is_dense(memory);
}

/* Returns whether the storage reaches to the last element, which that of a freed one does not; -1 with an exception. */
static int is_held(PyObject *tensor, const Memory *memory) {
    if (memory->count == 0) return 1;
    PyObject *storage = PyObject_CallMethodObjArgs(tensor, shared_names[UNTYPED_STORAGE], NULL);
    PyObject *size = storage == NULL ? NULL : PyObject_CallMethodObjArgs(storage, shared_names[NBYTES], NULL);
    PyObject *offset = size == NULL ? NULL : PyObject_CallMethodObjArgs(tensor, shared_names[STORAGE_OFFSET], NULL);
    int64_t bytes = offset == NULL ? -1 : PyLong_AsLongLong(size), first = offset == NULL ? -1 : PyLong_AsLongLong(offset);
    Py_XDECREF(storage);
    Py_XDECREF(size);
    Py_XDECREF(offset);
    if (PyErr_Occurred()) return -1;
    return bytes >= (first + memory->extent) * memory->parts * memory->number_bytes;
}

/* Returns 1 if the memory can be read here, 0 if not, -1 with an exception. */
static int read_memory(PyObject *tensor, ExchangeFunction exchange, Memory *memory) {
    enum { CPU = 1 };
    Exchanged found;
    if (exchange(tensor, &found) < 0) return PyErr_Clear(), 0;
    if (found.device_type != CPU || found.dimensions > MOST_DIMENSIONS || !read_kind(&found, memory)) return 0;
    read_dimensions(&found, memory);
    memory->data = (const char *)found.data + found.offset_bytes;
    int64_t numbers = memory->count * memory->parts;
    if (!memory->is_dense && numbers > MOST_ELEMENTS) return 0;
    if (memory->count > 0 && (found.data == NULL || (uintptr_t)memory->data % (size_t)memory->number_bytes)) return 0;
    return is_held(tensor, memory);
}

/* ---- Elements that do not lie side by side. */

/* Steps through the elements in their order; the innermost dimension is left out. */
typedef struct {
    int64_t at[MOST_DIMENSIONS];
    int64_t position, index; /* of the first element of the row: in memory, and in the whole tensor */
} Walk;

/* Returns 0 behind the last row. */
static int next_row(const Memory *memory, Walk *walk) {
    for (int dim = 1; dim < memory->dimensions; dim++) {
        walk->position += memory->strides[dim];
        walk->index += memory->steps[dim];
        if (++walk->at[dim] < memory->shape[dim]) return 1;
        walk->position -= memory->shape[dim] * memory->strides[dim];
        walk->index -= memory->shape[dim] * memory->steps[dim];
        walk->at[dim] = 0;
    }
    return 0;
}

/* Complex numbers are aligned as their parts are. With a constant size, a copy is one load and one store. */
#define GATHER(bytes) \
    for (int64_t i = 0; i < count; i++) memcpy(into + i * bytes, from + i * stride * bytes, bytes)

static void gather(char *into, const char *from, int64_t count, int64_t stride, int element_bytes) {
    if (element_bytes == 2) GATHER(2);
    else if (element_bytes == 4) GATHER(4);
    else if (element_bytes == 8) GATHER(8);
    else GATHER(16);
}

static void measure_strided(const Memory *memory, Statistics *found) {
    int element_bytes = memory->parts * memory->number_bytes;
    int64_t most = GATHERED_BYTES / element_bytes, held = 0;
    uint64_t gathered[GATHERED_BYTES / sizeof(uint64_t)];
    Walk walk = {{0}, 0, 0};
    do {
        for (int64_t done = 0; done < memory->shape[0];) {
            int64_t count = memory->shape[0] - done < most - held ? memory->shape[0] - done : most - held;
            const char *from = memory->data + (walk.position + done * memory->strides[0]) * element_bytes;
            gather((char *)gathered + held * element_bytes, from, count, memory->strides[0], element_bytes);
            done += count;
            held += count;
            if (held == most) {
                measure_undisturbed(gathered, held * memory->parts, memory->kind, found);
                held = 0;
            }
        }
    } while (next_row(memory, &walk));
    measure_undisturbed(gathered, held * memory->parts, memory->kind, found);
}

static int is_nonfinite(const char *number, int kind) {
    if (kind == FLOAT64) return (*(const uint64_t *)number & 0x7FF0000000000000) == 0x7FF0000000000000;
    if (kind == FLOAT32) return (*(const uint32_t *)number & 0x7F800000) == 0x7F800000;
    uint16_t exponent = kind == BFLOAT16 ? 0x7F80 : 0x7C00;
    return (*(const uint16_t *)number & exponent) == exponent;
}

/* Returns the row-major index of the first element that is not finite; -1 if somebody has overwritten it since. */
static int64_t find_in_order(const Memory *memory) {
    if (memory->is_row_major) {
        Py_ssize_t at = find_nonfinite(memory->data, memory->count * memory->parts, memory->kind);
        return at < 0 ? -1 : at / memory->parts;
    }
    if (memory->dimensions == 0) return 0;
    int element_bytes = memory->parts * memory->number_bytes;
    Walk walk = {{0}, 0, 0};
    do
        for (int64_t at = 0; at < memory->shape[0]; at++) {
            const char *element = memory->data + (walk.position + at * memory->strides[0]) * element_bytes;
            for (int part = 0; part < memory->parts; part++)
                if (is_nonfinite(element + part * memory->number_bytes, memory->kind))
                    return walk.index + at * memory->steps[0];
        }
    while (next_row(memory, &walk));
    return -1;
}

static void measure_memory(const Memory *memory, double *row) {
    Statistics found = NOTHING_YET;
    int64_t numbers = memory->count * memory->parts;
    if (memory->is_dense) measure_without_gil(memory->data, numbers, memory->kind, &found);
    else if (numbers * memory->number_bytes > GATHERED_BYTES) {
        Py_BEGIN_ALLOW_THREADS
        measure_strided(memory, &found);
        Py_END_ALLOW_THREADS
    } else
        measure_strided(memory, &found);
    finish(&found, (double)numbers, (double)memory->repeats);
    memcpy(row, &found, sizeof found);
    if (found.nans > 0 || found.infs > 0) row[FIRST_INDEX] = (double)find_in_order(memory);
}

/* ---- Rows, and what Python receives. */

/* Takes a row, as a new reference. NULL with an exception set. */
static PyObject *take_row(HostMeasurer *self) {
    PyObject *row = take_free_row(&self->path);
    return row != NULL || PyErr_Occurred() ? row : PyObject_CallMethod(self->held[HELD_ROWS], "take", NULL);
}

static PyObject *make_for(HostMeasurer *self, PyObject *tensor, const Memory *memory, PyObject *row) {
    PyObject *shape = PyObject_GetAttr(tensor, shared_names[SHAPE]), *dtype = PyObject_GetAttr(tensor, shared_names[DTYPE]);
    PyObject *note = memory->parts == 2 ? self->held[COMPLEX_NOTE] : Py_None, *made = NULL;
    if (shape != NULL && dtype != NULL)
        made = make_measurement((PyTypeObject *)self->held[MEASUREMENT], &self->path, row, shape, dtype, note);
    Py_XDECREF(shape);
    Py_XDECREF(dtype);
    return made;
}

/* Measures a tensor. Returns the number of its row, owned, or None if Python has to measure it. */
static PyObject *fill_row(HostMeasurer *self, PyObject *tensor, Memory *memory) {
    int is_read = is_plain(&self->plain, tensor);
    if (is_read > 0) is_read = read_memory(tensor, self->exchange, memory);
    if (is_read <= 0) return is_read ? NULL : Py_NewRef(Py_None);
    PyObject *row = take_row(self);
    uint64_t address = row == NULL ? 0 : address_of_row(&self->path, row);
    if (address == 0) Py_CLEAR(row);
    else measure_memory(memory, (double *)(uintptr_t)address);
    return row;
}

static PyObject *measurer_measure_row(PyObject *self, PyObject *tensor) {
    Memory memory;
    return fill_row((HostMeasurer *)self, tensor, &memory);
}

static PyObject *measurer_measure(PyObject *self, PyObject *tensor) {
    Memory memory;
    PyObject *row = fill_row((HostMeasurer *)self, tensor, &memory);
    if (row == NULL || row == Py_None) return row;
    PyObject *made = make_for((HostMeasurer *)self, tensor, &memory, row);
    Py_DECREF(row);
    return made;
}

/* ---- The type. */

static PyObject *measurer_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *held, *capsule;
    Py_ssize_t block_rows, row_bytes;
    if (!PyArg_ParseTuple(args, "O!Onn:HostMeasurer", &PyTuple_Type, &held, &capsule, &block_rows, &row_bytes)) return NULL;
    const ExchangeTable *table = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (table == NULL) return NULL;
    if (PyTuple_Size(held) != HELD || !PyTuple_Check(PyTuple_GetItem(held, TYPES)) ||
        !PyType_Check(PyTuple_GetItem(held, MEASUREMENT)) || !PyList_Check(PyTuple_GetItem(held, FREE)) ||
        !PyList_Check(PyTuple_GetItem(held, ADDRESSES)) || block_rows <= 0 ||
        row_bytes < (Py_ssize_t)((FIRST_INDEX + 1) * sizeof(double)) || table->major != 1 || table->exchange == NULL)
        return PyErr_Format(PyExc_TypeError, "HostMeasurer() takes %d objects of certain types", HELD);
    HostMeasurer *self = (HostMeasurer *)PyType_GenericAlloc(type, 0);
    if (self == NULL) return NULL;
    for (int at = 0; at < HELD; at++) self->held[at] = Py_NewRef(PyTuple_GetItem(held, at));
    PyObject **own = self->held;
    self->exchange = table->exchange;
    self->plain = (PlainTensors){own[TYPES], own[KINDS_OF_TENSORS], own[DISPATCH_KEYS], own[TRACING_STATE]};
    self->path = (RowPath){own[HELD_ROWS], own[FREE], own[ADDRESSES], block_rows, row_bytes};
    return (PyObject *)self;
}

static int measurer_traverse(PyObject *object, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(object));
    for (int at = 0; at < HELD; at++) Py_VISIT(((HostMeasurer *)object)->held[at]);
    return 0;
}

static void measurer_dealloc(PyObject *object) {
    HostMeasurer *self = (HostMeasurer *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    for (int at = 0; at < HELD; at++) Py_XDECREF(self->held[at]);
    PyObject_GC_Del(object);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"measure", measurer_measure, METH_O, "measure(tensor): returns its measurement; None if Python has to measure it."},
    {"measure_row", measurer_measure_row, METH_O, "measure_row(tensor): the same, but returns the row's number."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "HostMeasurer(held, exchange, block_rows, row_bytes): measures tensors in main memory into rows."},
    {Py_tp_new, measurer_new},
    {Py_tp_dealloc, measurer_dealloc},
    {Py_tp_traverse, measurer_traverse},
    {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec spec = {"modtrace.measure.moments._moments.HostMeasurer", sizeof(HostMeasurer), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};

int add_measurer_type(PyObject *module) {
    if (intern_names() < 0) return -1;
    PyObject *type = PyType_FromModuleAndSpec(module, &spec, NULL);
    int failed = type == NULL ? -1 : PyModule_AddType(module, (PyTypeObject *)type);
    Py_XDECREF(type);
    return failed;
}
