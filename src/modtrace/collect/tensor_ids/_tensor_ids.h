/* The declarations that the parts of the extension `_tensor_ids` share. */

#ifndef MODTRACE_TENSOR_IDS_H
#define MODTRACE_TENSOR_IDS_H

#include "../../measure/_exchange.h"
#include "../_shared.h"

/* Names of attributes and methods of tensors, made once: `names[SHAPE]`. */
enum { DEVICE, DTYPE, IS_COMPLEX, IS_CONJ, IS_NEG, LAYOUT, NBYTES, REQUIRES_GRAD, SHAPE, STORAGE_OFFSET, STRIDE,
       UNTYPED_STORAGE, NAMES };

typedef struct State State;

typedef struct TensorApi TensorApi;

/* ---- Columns of numbers. */

typedef struct {
    int64_t *items;
    Py_ssize_t count, capacity;
} Column;

/* Reserves memory for more numbers. Returns -1 with MemoryError. */
int column_reserve(Column *column, Py_ssize_t more);

/* Returns a new `array.array("q")` of the numbers. */
PyObject *column_to_array(const Column *column);

/* Returns the index of a value in a list without repeats, to which new values are added; -1 with an exception. */
int64_t number_in(PyObject *numbers, PyObject *list, PyObject *value);

/* ---- Storages. */

typedef struct Storages Storages;

/* The part of a storage that a tensor object shows. Only the object's address is kept, so the tensor may die. */
typedef struct {
    const void *object; /* NULL: none */
    const void *data;   /* the address of its first element; NULL: not known */
    int64_t offset, geometry, tensor;
} Shown;

typedef struct StorageLife StorageLife;

/* One storage while it lives, with the tensors that are known to show its present version. */
typedef struct Storage Storage;

struct Storage {
    const void *key;   /* the address of the storage's Python object */
    PyObject *ref;     /* owned: a weak reference to that, without a callback */
    StorageLife *life; /* borrowed; NULL: the attribute was removed, and the storage's death is seen late */
    int64_t number, device, version, writer;
    int64_t size_bytes; /* when it was last asked; -1: not known */
    int64_t live_bytes; /* its part of `Storages.live_bytes` */
    int is_made;        /* an op has made it */
    Shown first;        /* the first tensor, which is mostly the only one */
    Shown *others;      /* OBJECTS_KEPT of them; NULL: none yet */
    int other_count;
    Storage *next_spare; /* the list of unused ones */
};

/* The attribute of a storage's Python object. */
struct StorageLife {
    PyObject_HEAD
    Storages *owner;  /* borrowed; valid as long as `storage` is not NULL */
    Storage *storage; /* borrowed; NULL: forgotten */
};

typedef struct {
    const void *key; /* NULL: free */
    Storage *storage; /* owned */
} StoragePlace;

/* Storages by the address of their Python object: open addressing, at most half full. */
struct Storages {
    PyTypeObject *type;  /* owned by the holder of this: StorageLife */
    PyObject *attribute; /* owned by the holder of this: the attribute's name, unique to the TensorIds */
    StoragePlace *places;
    size_t capacity, count; /* capacity: a power of two */
    Storage *spare;
    int64_t next;            /* the number of the next storage */
    int64_t live_bytes;      /* of the memory that ops have allocated */
    int64_t lowest_bytes;    /* the least of that since the last `take_allocated` */
    int64_t allocated_bytes; /* what was added to storages since then */
};

extern PyType_Spec life_spec;

/* Returns what is known of a storage while its Python object lives; NULL if nothing is. */
Storage *find_storage(Storages *self, const void *key);

/* Adds the storage of a Python object that is not known, and returns it borrowed. Runs Python code. NULL with an
   exception, which is RuntimeError if the object can have no attribute. A negative size is not known. */
Storage *add_storage(Storages *self, PyObject *stored, int64_t device, int is_made, int64_t size_bytes);

/* Records the size that a storage has now; a negative one is not known. */
void note_size(Storages *self, Storage *storage, int64_t size_bytes);

/* Forgets all storages, and removes our attribute from those that live. Runs Python code; keeps exceptions set. */
void forget_storages(Storages *self);

/* Returns the tensor of a storage with this geometry, preferably the object itself; NULL if there is none. */
Shown *find_shown(const Storage *self, const void *object, int64_t offset, int64_t geometry);

/* Remembers a tensor for this version of its storage. Returns -1 with MemoryError if nothing has changed. */
int remember_shown(Storage *self, Shown shown);

void note_write(Storage *self, int64_t op);

/* The numbers that `list_living` appends for a storage: its number, its bytes, its device. */
enum { LIVING_WIDTH = 3 };

/* Appends the storages that live and have memory. Runs no Python code. Returns -1 with MemoryError. */
int list_living(const Storages *self, Column *into);

/* ---- Geometries. */

enum { MOST_DIMENSIONS = 12 };

/* Shape, stride and dtype as plain numbers. */
typedef struct {
    uint64_t dtype;      /* the address of the dtype, or its value in DLPack */
    uint64_t hash;
    int64_t number;      /* -1: this slot is free */
    int32_t flags, size; /* conj and neg; the number of `numbers` */
    int64_t numbers[2 * MOST_DIMENSIONS];
} GeometryKey;

typedef struct {
    PyObject *make;    /* owned: the class Geometry */
    PyObject *all;     /* owned list: Geometry by number */
    PyObject *numbers; /* owned dict: their numbers */
    ExchangeFunction exchange; /* NULL: there is none, or it refused a tensor (on the device `meta`) */
    PyObject *exchanging;      /* owned tuple: the classes for whose instances it may be called */
    GeometryKey *places;
    size_t capacity, count;
    int has_complex; /* only then may a tensor be a conjugated or negated view */
} Geometries;

/* Returns the number of a tensor's geometry; -1 with an exception. Sets `data` to its first element, or to NULL. */
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

/* Returns the number of a tensor, and reserves memory for a use of it; -1 with an exception. `geometry` receives the
   number of the tensor's Geometry. */
int64_t identify_tensor(TensorIds *self, PyObject *tensor, int64_t *geometry);

/* Returns the number of a tensor; -1 if it is new and would become a leaf, and with an exception. */
int64_t find_tensor(TensorIds *self, PyObject *tensor);

/* Where the functions below fail they have changed nothing, and return -1, or NULL, with an exception. */

/* Records that an op reads a tensor. */
int read_tensor(TensorIds *self, PyObject *tensor);

/* Records that an op has written to a tensor, and maybe resized its storage. */
int write_tensor(TensorIds *self, PyObject *tensor, int64_t op);

/* Records the size of a storage that may have been resized. */
int note_resized(TensorIds *self, PyObject *stored);

/* Records that an op returns a tensor; `given` are the op's arguments. */
int make_tensor(TensorIds *self, PyObject *tensor, int64_t op, PyObject *slot, PyObject *given);

/* Returns the rows and uses since the last call, and the tensor of the first row; NULL with an exception. */
PyObject *take_tensors(TensorIds *self);

/* Adds a row for a tensor that raised an error when it was read. */
int note_unreadable(TensorIds *self, PyObject *tensor, int64_t op, PyObject *slot, PyObject *error);

/* Returns the bytes that were added to storages since the last call. */
int64_t take_allocated(TensorIds *self);

/* Finds the numbers of a tensor's geometry and of its slot. Returns -1 with an exception. */
int number_output(TensorIds *self, PyObject *tensor, PyObject *slot, int64_t *geometry, int64_t *slot_number);

/* ---- Arguments of ops. */

extern PyType_Spec reader_spec;

/* Records the tensors that an op reads, and returns a key of its other arguments; NULL with an exception. `kwargs` is
   NULL or a dict. */
PyObject *read_arguments(PyObject *reader, PyObject *schema, PyObject *args, PyObject *kwargs);

/* ---- What other extensions call. */

#define TENSOR_API "modtrace.collect.tensor_ids._tensor_ids.api" /* the name of the capsule */

struct TensorApi {
    PyTypeObject *ids_type, *reader_type;
    int (*reserve)(Column *column, Py_ssize_t more);
    PyObject *(*to_array)(const Column *column);
    PyObject *(*read_arguments)(PyObject *reader, PyObject *schema, PyObject *args, PyObject *kwargs);
    int (*make)(TensorIds *self, PyObject *tensor, int64_t op, PyObject *slot, PyObject *given);
    int (*write)(TensorIds *self, PyObject *tensor, int64_t op);
    int (*resized)(TensorIds *self, PyObject *stored);
    int (*note_unreadable)(TensorIds *self, PyObject *tensor, int64_t op, PyObject *slot, PyObject *error);
    int64_t (*take_allocated)(TensorIds *self);
    int (*number_output)(TensorIds *self, PyObject *tensor, PyObject *slot, int64_t *geometry, int64_t *slot_number);
};

/* The state of the module. Instances hold their types and types hold the module, so it lives long enough. */
struct State {
    PyObject *names[NAMES];
    PyTypeObject *life_type, *ids_type, *reader_type;
    TensorApi api;
};

/* Calls tensor.name(). */
static inline PyObject *call_method(PyObject *object, PyObject *name) {
    return PyObject_CallMethodObjArgs(object, name, NULL);
}

#endif
