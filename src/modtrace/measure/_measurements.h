/* What measuring in C has in common in main memory and on CUDA devices: plain tensors, free rows, and `Measurement`. */

#pragma once

#include <Python.h>
#include <stdint.h>

/* Names of attributes and methods, which `intern_names` makes once. */
enum { DTYPE, EXTRA, NBYTES, NOTE, RAW_REPR, REQUIRES_GRAD, ROW, ROWS, SHAPE, START_NS, STORAGE_OFFSET, UNTYPED_STORAGE, SHARED_NAMES };

static PyObject *shared_names[SHARED_NAMES];

static int intern_names(void) {
    static const char *const spelled[SHARED_NAMES] = {
        [DTYPE] = "dtype",
        [EXTRA] = "extra",
        [NBYTES] = "nbytes",
        [NOTE] = "note",
        [RAW_REPR] = "raw_repr",
        [REQUIRES_GRAD] = "requires_grad",
        [ROW] = "row",
        [ROWS] = "rows",
        [SHAPE] = "shape",
        [START_NS] = "start_ns",
        [STORAGE_OFFSET] = "storage_offset",
        [UNTYPED_STORAGE] = "untyped_storage",
    };
    for (int at = 0; at < SHARED_NAMES; at++)
        if (shared_names[at] == NULL && (shared_names[at] = PyUnicode_InternFromString(spelled[at])) == NULL) return -1;
    return 0;
}

/* How tensors are known that may be read as they are. The holder owns the references. */
typedef struct {
    PyObject *types;         /* the only classes: subclasses may redefine anything */
    PyObject *kinds;         /* numbers of their dispatch keys */
    PyObject *dispatch_keys; /* returns those of a tensor */
    PyObject *tracing_state; /* returns None unless a tracer would see that a shape is read */
} PlainTensors;

/* Returns 1 if a tensor is plain and nobody traces; 0 otherwise, -1 with an exception set. */
static int is_plain(const PlainTensors *plain, PyObject *tensor) {
    int is_type = 0;
    for (Py_ssize_t at = 0; !is_type && at < PyTuple_Size(plain->types); at++)
        is_type = (PyObject *)Py_TYPE(tensor) == PyTuple_GetItem(plain->types, at);
    if (!is_type) return 0;
    PyObject *tracing = PyObject_CallNoArgs(plain->tracing_state);
    if (tracing == NULL) return -1;
    Py_DECREF(tracing);
    if (tracing != Py_None) return 0;
    PyObject *keys = PyObject_CallFunctionObjArgs(plain->dispatch_keys, tensor, NULL);
    PyObject *number = keys == NULL ? NULL : PyObject_CallMethodObjArgs(keys, shared_names[RAW_REPR], NULL);
    int is_kind = number == NULL ? -1 : PySequence_Contains(plain->kinds, number);
    Py_XDECREF(keys);
    Py_XDECREF(number);
    return is_kind;
}

/* Where rows are: what `HostRows.path` returns. References are borrowed. */
typedef struct {
    PyObject *rows, *free, *addresses; /* `HostRows`, with the numbers of its free rows and the addresses of its blocks */
    Py_ssize_t block_rows, row_bytes;
} RowPath;

/* Takes the number of a free row, as a new reference; NULL if there is none, or with an exception set. */
static PyObject *take_free_row(const RowPath *path) {
    Py_ssize_t last = PyList_Size(path->free) - 1;
    PyObject *row = last < 0 ? NULL : PyList_GetItem(path->free, last);
    if (row == NULL) return NULL;
    Py_INCREF(row);
    if (PyList_SetSlice(path->free, last, last + 1, NULL)) Py_CLEAR(row);
    return row;
}

/* Returns the address of a row; 0 with an exception set. */
static uint64_t address_of_row(const RowPath *path, PyObject *row) {
    Py_ssize_t number = PyLong_AsSsize_t(row);
    PyObject *block = number < 0 ? NULL : PyList_GetItem(path->addresses, number / path->block_rows);
    uint64_t address = block == NULL ? 0 : PyLong_AsUnsignedLongLong(block);
    return PyErr_Occurred() ? 0 : address + (uint64_t)(number % path->block_rows * path->row_bytes);
}

/* Makes a `Measurement` without a call of `__init__`, which takes 0.5 us. */
static PyObject *make_measurement(
    PyTypeObject *kind, const RowPath *path, PyObject *row, PyObject *shape, PyObject *dtype, PyObject *note) {
    PyObject *made = PyType_GenericAlloc(kind, 0), *zero = made == NULL ? NULL : PyLong_FromLong(0);
    if (zero == NULL || PyObject_SetAttr(made, shared_names[ROWS], path->rows) || PyObject_SetAttr(made, shared_names[ROW], row) ||
        PyObject_SetAttr(made, shared_names[SHAPE], shape) || PyObject_SetAttr(made, shared_names[DTYPE], dtype) ||
        PyObject_SetAttr(made, shared_names[NOTE], note) || PyObject_SetAttr(made, shared_names[START_NS], zero) ||
        PyObject_SetAttr(made, shared_names[EXTRA], Py_None) || PyObject_SetAttr(made, shared_names[REQUIRES_GRAD], Py_None))
        Py_CLEAR(made);
    /* No cycle of references leads through it or its shape, and the garbage collector would visit thousands in each
       step. */
    if (made != NULL) {
        PyObject_GC_UnTrack(made);
        PyObject_GC_UnTrack(shape);
    }
    Py_XDECREF(zero);
    return made;
}
