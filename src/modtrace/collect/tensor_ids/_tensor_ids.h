/* What the parts of the extension `_tensor_ids` know of each other. */

#ifndef MODTRACE_TENSOR_IDS_H
#define MODTRACE_TENSOR_IDS_H

#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#include "_exchange.h"

/* Names of attributes and methods of tensors, made once: `names[SHAPE]`. */
enum { DEVICE, DTYPE, IS_COMPLEX, IS_CONJ, IS_NEG, LAYOUT, NBYTES, REQUIRES_GRAD, SHAPE, STORAGE_OFFSET, STRIDE,
       UNTYPED_STORAGE, NAMES };

/* What the module holds. Types of the module hold the module, and their instances hold them: it lives long enough. */
typedef struct {
    PyObject *names[NAMES];
    PyTypeObject *life_type, *ids_type, *reader_type;
} State;

/* ---- Numbers one behind the other. */

typedef struct {
    int64_t *items;
    Py_ssize_t count, capacity;
} Column;

/* Makes room for some more numbers. -1 with MemoryError. */
int column_reserve(Column *column, Py_ssize_t more);

/* A new `array.array("q")` of the numbers. */
PyObject *column_to_array(const Column *column);

/* The number of a value in a list without repeats, where it is added if it is new. -1 with an exception. */
int64_t number_in(PyObject *numbers, PyObject *list, PyObject *value);

/* ---- Storages. */

typedef struct Storages Storages;

/* What one tensor object shows of its storage. Its address alone is kept: nothing here keeps a tensor alive. */
typedef struct {
    const void *object; /* NULL: none */
    const void *data;   /* where its first element lies; NULL: not known */
    int64_t offset, geometry, tensor;
} Shown;

typedef struct StorageLife StorageLife;

/* One storage while it lives, with the tensors that are known to show its present version. */
typedef struct Storage Storage;

struct Storage {
    const void *key;   /* the address of the storage's Python object */
    PyObject *ref;     /* owned: a weak reference to that, without a callback */
    StorageLife *life; /* borrowed; NULL: somebody has taken the attribute away, and its death is seen late */
    int64_t number, device, version, writer;
    int64_t size_bytes; /* if an op has made it */
    int is_made;        /* an op has */
    Shown first;        /* the first tensor, which is the only one most often */
    Shown *others;      /* OBJECTS_KEPT of them; NULL: none yet */
    int other_count;
    Storage *next_spare; /* of those that are not in use */
};

/* The attribute of a storage's Python object. */
struct StorageLife {
    PyObject_HEAD
    Storages *owner;  /* borrowed; there as long as `storage` is not NULL */
    Storage *storage; /* borrowed; NULL: forgotten */
};

typedef struct {
    const void *key; /* NULL: free */
    Storage *storage; /* owned */
} StoragePlace;

/* Storages by the address of their Python object: open addressing, at most half full. */
struct Storages {
    PyTypeObject *type;  /* owned by whoever has this: StorageLife */
    PyObject *attribute; /* owned by whoever has this: its name, which no other living TensorIds has */
    StoragePlace *places;
    size_t capacity, count; /* capacity: a power of two */
    Storage *spare;
    int64_t live_bytes, next;
};

extern PyType_Spec life_spec;

/* What is known of a storage while its Python object lives; NULL: nothing. */
Storage *find_storage(Storages *self, const void *key);

/* The storage of a Python object that is not known yet; borrowed. Runs Python code. NULL with an exception, which is
   RuntimeError where the object can have no attribute. */
Storage *add_storage(Storages *self, PyObject *stored, int64_t device, int is_made, int64_t size_bytes);

/* Forgets all of them, and takes our attribute off those that live. Runs Python code; leaves exceptions alone. */
void forget_storages(Storages *self);

/* The first tensor of a storage that shows just this, if need be one that is another object; NULL: none. */
Shown *find_shown(const Storage *self, const void *object, int64_t offset, int64_t geometry);

/* Remembers a tensor for this version of its storage. -1 with MemoryError, and nothing has changed. */
int remember_shown(Storage *self, Shown shown);

void note_write(Storage *self, int64_t op);

/* ---- Geometries. */

enum { MOST_DIMENSIONS = 12 };

/* Shape, stride and dtype as plain numbers. */
typedef struct {
    uint64_t dtype;      /* the address of the dtype, or what it is in DLPack: two names for the same */
    uint64_t hash;
    int64_t number;      /* -1: this place is free */
    int32_t flags, size; /* conj and neg; how many numbers */
    int64_t numbers[2 * MOST_DIMENSIONS];
} GeometryKey;

typedef struct {
    PyObject *make;    /* owned: the class Geometry */
    PyObject *all;     /* owned list: Geometry by number */
    PyObject *numbers; /* owned dict: their numbers */
    ExchangeFunction exchange; /* NULL: there is none, or it has refused a tensor (of the device `meta`) */
    PyObject *exchanging;      /* owned tuple: the classes whose instances it may be asked of */
    GeometryKey *places;
    size_t capacity, count;
    int has_complex; /* only then may a tensor be a conjugated or negated view */
} Geometries;

/* The number of what a tensor shows; -1 with an exception. `data` is where its first element lies; NULL: not known. */
int64_t find_geometry(Geometries *self, const State *state, PyObject *tensor, const void **data);

/* ---- Tensors. */

typedef struct {
    PyObject_HEAD
    State *state;
    Column rows, used;
    int64_t first, next; /* the tensor of the first row; the next tensor */
    Storages storages;
    Geometries geometries;
    PyObject *leaves, *devices, *slots;         /* owned lists */
    PyObject *device_numbers, *slot_numbers;    /* owned dicts */
} TensorIds;

extern PyType_Spec ids_spec;

/* Notes that an op reads a tensor. -1 with an exception, and nothing has changed. */
int read_tensor(TensorIds *self, PyObject *tensor);

/* Adds a row for a tensor that has raised an error when it was read. */
int note_unreadable(TensorIds *self, PyObject *tensor, int64_t op, PyObject *slot, PyObject *error);

/* ---- Arguments of ops. */

extern PyType_Spec reader_spec;

/* ---- Small helpers. */

/* tensor.name(), and tensor.name() or tensor.name as a number: -1 with an exception. */
static inline PyObject *call_method(PyObject *object, PyObject *name) {
    return PyObject_CallMethodObjArgs(object, name, NULL);
}

static inline int64_t to_int64(PyObject *stolen) {
    if (stolen == NULL) return -1;
    int64_t number = PyLong_AsLongLong(stolen);
    Py_DECREF(stolen);
    return number;
}

static inline int to_truth(PyObject *stolen) {
    if (stolen == NULL) return -1;
    int truth = PyObject_IsTrue(stolen);
    Py_DECREF(stolen);
    return truth;
}

#endif
