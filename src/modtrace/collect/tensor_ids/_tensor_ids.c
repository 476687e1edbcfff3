/* Numbers for tensors, as the class in tensor_ids.py gives them, but faster. That class is the specification.

   Whatever may run Python code comes first in each function, and only then anything changes: an exception leaves
   everything as it was, and a storage that dies meanwhile takes nothing away that is in use. */

#include "_tensor_ids.h"
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum { NO_STORAGE = -1, NO_OP = -1 };

/* The numbers in a tensor's row, and their bits. */
enum { ROW_STORAGE, ROW_VERSION, ROW_OFFSET, ROW_GEOMETRY, ROW_DEVICE, ROW_PRODUCER, ROW_SLOT, ROW_BITS, ROW_WIDTH };
enum { BIT_REQUIRES_GRAD = 1, BIT_FRESH = 2, BIT_UNREAD = 4 }; /* UNREAD: not asked yet; it is not returned to Python */

/* The storage and geometry that a tensor shows. */
typedef struct {
    PyObject *stored; /* owned: while it is held, its storage keeps its address */
    const void *data; /* NULL: not known */
    int64_t geometry, offset;
} Sight;

/* Reads all fields except the offset. */
static int read_sight(TensorIds *self, PyObject *tensor, Sight *sight) {
    sight->stored = call_method(tensor, self->state->names[UNTYPED_STORAGE]);
    if (sight->stored == NULL) return -1;
    sight->geometry = find_geometry(&self->geometries, self->state, tensor, &sight->data);
    if (sight->geometry >= 0) return 0;
    Py_DECREF(sight->stored);
    return -1;
}

static int look_for_offset(TensorIds *self, PyObject *tensor, Sight *sight) {
    sight->offset = to_int64(call_method(tensor, self->state->names[STORAGE_OFFSET]));
    return sight->offset == -1 && PyErr_Occurred() ? -1 : 0;
}

static int64_t device_of(TensorIds *self, PyObject *tensor) {
    PyObject *device = PyObject_GetAttr(tensor, self->state->names[DEVICE]);
    if (device == NULL) return -1;
    int64_t number = number_in(self->device_numbers, self->devices, device);
    Py_DECREF(device);
    return number;
}

static int64_t slot_of(TensorIds *self, PyObject *slot) {
    if (PyUnicode_Check(slot) && PyUnicode_GetLength(slot) == 0) return 0;
    return number_in(self->slot_numbers, self->slots, slot);
}

/* Reads the size of a storage in bytes. -1: it is not known, because it is symbolic, or because a subclass raises.
   Returns -1 with an exception that is not to be caught. */
static int read_size(TensorIds *self, PyObject *stored, int64_t *size) {
    PyObject *answer = call_method(stored, self->state->names[NBYTES]);
    int is_size = answer != NULL && PyLong_CheckExact(answer); /* asking a SymInt for its number adds a guard */
    *size = is_size ? PyLong_AsLongLong(answer) : -1;
    Py_XDECREF(answer);
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) return -1;
    PyErr_Clear();
    return 0;
}

static Storage *meet_storage(TensorIds *self, PyObject *tensor, PyObject *stored, int is_made) {
    Storage *storage = find_storage(&self->storages, stored);
    if (storage != NULL) return storage;
    int64_t device = device_of(self, tensor), size;
    if (device < 0 || read_size(self, stored, &size) < 0) return NULL;
    return add_storage(&self->storages, stored, device, is_made, size);
}

/* ---- Rows and uses. */

static void append_use(TensorIds *self, int64_t tensor, int64_t geometry) {
    int64_t *use = self->used.items + self->used.count;
    use[0] = tensor;
    use[1] = geometry;
    self->used.count += 2;
}

/* Reserves slots for a row and a use, so that neither can fail later. */
static int reserve(TensorIds *self) {
    return column_reserve(&self->rows, ROW_WIDTH) < 0 || column_reserve(&self->used, 2) < 0 ? -1 : 0;
}

static void append_row(TensorIds *self, const int64_t row[ROW_WIDTH]) {
    memcpy(self->rows.items + self->rows.count, row, ROW_WIDTH * sizeof *row);
    self->rows.count += ROW_WIDTH;
    self->next++;
}

/* Adds a tensor, for which memory is reserved. Returns its number, or -1 with MemoryError. */
static int64_t add_tensor(TensorIds *self, Storage *storage, PyObject *tensor, const Sight *sight, int64_t producer,
                          int64_t slot, int64_t bits) {
    Shown shown = {tensor, sight->data, sight->offset, sight->geometry, self->next};
    if (remember_shown(storage, shown) < 0) return -1;
    append_row(self, (int64_t[ROW_WIDTH]){storage->number, storage->version, sight->offset, sight->geometry,
                                          storage->device, producer, slot, bits});
    return shown.tensor;
}

/* ---- Reading. */

static int64_t *bits_of(TensorIds *self, int64_t tensor) {
    return tensor < self->first ? NULL : &self->rows.items[(tensor - self->first) * ROW_WIDTH + ROW_BITS];
}

/* Asks an op's output whether it requires a gradient when it is first read, because it gets its node after the op. */
static int ask_if_unread(TensorIds *self, PyObject *tensor, int64_t number) {
    int64_t *bits = bits_of(self, number);
    if (bits == NULL || !(*bits & BIT_UNREAD)) return 0;
    int requires_grad = to_truth(PyObject_GetAttr(tensor, self->state->names[REQUIRES_GRAD]));
    if (requires_grad < 0) return -1;
    bits = bits_of(self, number);
    if (bits != NULL) *bits = (*bits & ~(int64_t)BIT_UNREAD) | (requires_grad ? BIT_REQUIRES_GRAD : 0);
    return 0;
}

static int append_leaf(TensorIds *self, PyObject *tensor, int64_t number) {
    PyObject *leaf = Py_BuildValue("LO", (long long)number, tensor);
    int failed = leaf == NULL || PyList_Append(self->leaves, leaf) < 0;
    Py_XDECREF(leaf);
    return failed ? -1 : 0;
}

/* Adds a tensor that shows something new. Returns its number, or -1 with an exception. */
static int64_t meet_new(TensorIds *self, PyObject *tensor, const Sight *sight) {
    int requires_grad = to_truth(PyObject_GetAttr(tensor, self->state->names[REQUIRES_GRAD]));
    if (requires_grad < 0) return -1;
    Storage *storage = meet_storage(self, tensor, sight->stored, 0);
    if (storage == NULL || reserve(self) < 0) return -1;
    int64_t writer = storage->writer;
    int is_made = storage->is_made;
    int64_t number = add_tensor(self, storage, tensor, sight, writer, 0, requires_grad ? BIT_REQUIRES_GRAD : 0);
    if (number >= 0 && !is_made && append_leaf(self, tensor, number) < 0) return -1;
    return number;
}

/* Returns the number of a tensor that the quick look-up did not find. */
static int64_t meet(TensorIds *self, PyObject *tensor, Sight *sight) {
    if (look_for_offset(self, tensor, sight) < 0) return -1;
    Storage *storage = find_storage(&self->storages, sight->stored);
    Shown *known = storage == NULL ? NULL : find_shown(storage, tensor, sight->offset, sight->geometry);
    if (known == NULL) return meet_new(self, tensor, sight);
    if (known->object == tensor) {
        known->data = sight->data; /* the storage has moved */
        return known->tensor;
    }
    /* autograd had saved it, and has made a new tensor of it */
    Shown shown = {tensor, sight->data, sight->offset, sight->geometry, known->tensor};
    return remember_shown(storage, shown) < 0 ? -1 : shown.tensor;
}

/* Returns the number of a tensor. In one storage, the same geometry at the same address has the same offset. */
static int64_t number_of(TensorIds *self, PyObject *tensor, Sight *sight) {
    const Storage *storage = find_storage(&self->storages, sight->stored);
    if (storage != NULL && storage->first.object == tensor && storage->first.geometry == sight->geometry &&
        storage->first.data == sight->data && sight->data != NULL)
        return storage->first.tensor;
    return meet(self, tensor, sight);
}

/* Returns the number of a tensor, and reserves memory for a use of it; -1 with an exception. */
static int64_t identify(TensorIds *self, PyObject *tensor, int64_t *geometry) {
    Sight sight;
    if (read_sight(self, tensor, &sight) < 0) return -1;
    int64_t number = number_of(self, tensor, &sight);
    Py_DECREF(sight.stored);
    if (number < 0 || ask_if_unread(self, tensor, number) < 0 || reserve(self) < 0) return -1;
    *geometry = sight.geometry;
    return number;
}

int read_tensor(TensorIds *self, PyObject *tensor) {
    int64_t geometry, number = identify(self, tensor, &geometry);
    if (number < 0) return -1;
    append_use(self, number, geometry);
    return 0;
}

static PyObject *ids_read(PyObject *self, PyObject *tensor) {
    if (read_tensor((TensorIds *)self, tensor) < 0) return NULL;
    Py_RETURN_NONE;
}

static PyObject *ids_identify(PyObject *self, PyObject *tensor) {
    int64_t geometry, number = identify((TensorIds *)self, tensor, &geometry);
    return number < 0 ? NULL : PyLong_FromLongLong(number);
}

/* Returns the number of a tensor; -1 if it is new and would become a leaf, and with an exception. */
static int64_t find_tensor(TensorIds *self, PyObject *tensor) {
    Sight sight;
    int64_t number = -1;
    if (read_sight(self, tensor, &sight) < 0) return -1;
    if (look_for_offset(self, tensor, &sight) == 0) {
        const Storage *storage = find_storage(&self->storages, sight.stored);
        const Shown *known = storage == NULL ? NULL : find_shown(storage, tensor, sight.offset, sight.geometry);
        if (known != NULL) number = known->tensor;
        else if (storage != NULL && storage->is_made) number = meet_new(self, tensor, &sight);
    }
    Py_DECREF(sight.stored);
    return number;
}

static PyObject *ids_find(PyObject *self, PyObject *tensor) {
    int64_t number = find_tensor((TensorIds *)self, tensor);
    return number < 0 && PyErr_Occurred() ? NULL : PyLong_FromLongLong(number);
}

static PyObject *ids_storage_of(PyObject *object, PyObject *tensor) {
    TensorIds *self = (TensorIds *)object;
    PyObject *stored = call_method(tensor, self->state->names[UNTYPED_STORAGE]);
    if (stored == NULL) return NULL;
    const Storage *storage = find_storage(&self->storages, stored);
    Py_DECREF(stored);
    return PyLong_FromLongLong(storage == NULL ? -1 : storage->number);
}

/* ---- Writing and making. */

static PyObject *wrong_count(const char *name, Py_ssize_t wanted, Py_ssize_t given) {
    return PyErr_Format(PyExc_TypeError, "TensorIds.%s() takes %zd arguments, not %zd", name, wanted, given);
}

static PyObject *ids_write(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    TensorIds *self = (TensorIds *)object;
    if (count != 2) return wrong_count("write", 2, count);
    int64_t op = PyLong_AsLongLong(args[1]);
    if (op == -1 && PyErr_Occurred()) return NULL;
    PyObject *stored = call_method(args[0], self->state->names[UNTYPED_STORAGE]);
    if (stored == NULL) return NULL;
    int64_t size;
    Storage *storage = read_size(self, stored, &size) < 0 ? NULL : meet_storage(self, args[0], stored, 0);
    if (storage != NULL) {
        note_write(storage, op);
        note_size(&self->storages, storage, size);
    }
    Py_DECREF(stored);
    if (storage == NULL) return NULL;
    Py_RETURN_NONE;
}

static PyObject *ids_resized(PyObject *object, PyObject *stored) {
    TensorIds *self = (TensorIds *)object;
    int64_t size;
    if (read_size(self, stored, &size) < 0) return NULL;
    Storage *storage = find_storage(&self->storages, stored);
    if (storage != NULL) note_size(&self->storages, storage, size);
    Py_RETURN_NONE;
}

static int is_among(PyObject *tensor, PyObject *given) {
    PyObject *iterator = PyObject_GetIter(given), *each;
    if (iterator == NULL) return -1;
    int is_found = 0;
    while (!is_found && (each = PyIter_Next(iterator)) != NULL) {
        is_found = each == tensor;
        Py_DECREF(each);
    }
    Py_DECREF(iterator);
    return PyErr_Occurred() ? -1 : is_found;
}

/* Returns whether an op that has not written returns a tensor that it was given; -1 with an exception. */
static int is_passed_on(TensorIds *self, PyObject *tensor, PyObject *stored, int64_t op, PyObject *given) {
    Storage *storage = find_storage(&self->storages, stored);
    return storage == NULL || storage->writer == op ? 0 : is_among(tensor, given);
}

static int make_new(TensorIds *self, PyObject *tensor, const Sight *sight, int64_t op, int64_t slot) {
    int64_t bits = BIT_UNREAD;
    int is_fresh = find_storage(&self->storages, sight->stored) == NULL;
    Storage *storage = meet_storage(self, tensor, sight->stored, 1);
    if (storage == NULL || reserve(self) < 0) return -1;
    if (is_fresh) {
        bits |= BIT_FRESH;
        storage->writer = op;
    }
    return add_tensor(self, storage, tensor, sight, op, slot, bits) < 0 ? -1 : 0;
}

static PyObject *ids_make(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    TensorIds *self = (TensorIds *)object;
    if (count != 4) return wrong_count("make", 4, count);
    int64_t op = PyLong_AsLongLong(args[1]);
    if (op == -1 && PyErr_Occurred()) return NULL;
    Sight sight;
    if (read_sight(self, args[0], &sight) < 0) return NULL;
    int64_t slot = slot_of(self, args[2]);
    int done = slot < 0 ? -1 : is_passed_on(self, args[0], sight.stored, op, args[3]);
    if (done == 0) done = look_for_offset(self, args[0], &sight);
    if (done == 0) done = make_new(self, args[0], &sight, op, slot);
    Py_DECREF(sight.stored);
    if (done < 0) return NULL;
    Py_RETURN_NONE;
}

/* Returns Python's description of an unreadable tensor: Geometry, device or None, requires_grad; owned. */
static PyObject *describe_unreadable(const TensorIds *self, PyObject *tensor, PyObject *error) {
    PyObject *found = PyObject_CallMethod(self->geometries.make, "of_unreadable", "OO", tensor, error);
    if (found == NULL || (PyTuple_Check(found) && PyTuple_Size(found) == 3)) return found;
    PyErr_SetString(PyExc_TypeError, "Geometry.of_unreadable() has to return a tuple of 3");
    Py_DECREF(found);
    return NULL;
}

int note_unreadable(TensorIds *self, PyObject *tensor, int64_t op, PyObject *slot_text, PyObject *error) {
    PyObject *found = describe_unreadable(self, tensor, error);
    if (found == NULL) return -1;
    int64_t geometry = number_in(self->geometries.numbers, self->geometries.all, PyTuple_GetItem(found, 0));
    int64_t device = geometry < 0 ? -1 : number_in(self->device_numbers, self->devices, PyTuple_GetItem(found, 1));
    int64_t slot = device < 0 ? -1 : slot_of(self, slot_text);
    int requires_grad = slot < 0 ? -1 : PyObject_IsTrue(PyTuple_GetItem(found, 2));
    Py_DECREF(found);
    if (requires_grad < 0 || reserve(self) < 0) return -1;
    if (op == NO_OP) append_use(self, self->next, geometry);
    append_row(self, (int64_t[ROW_WIDTH]){NO_STORAGE, 0, 0, geometry, device, op, slot,
                                          requires_grad ? BIT_REQUIRES_GRAD : 0});
    return 0;
}

static PyObject *ids_note_unreadable(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 4) return wrong_count("note_unreadable", 4, count);
    int64_t op = PyLong_AsLongLong(args[1]);
    if (op == -1 && PyErr_Occurred()) return NULL;
    if (note_unreadable((TensorIds *)self, args[0], op, args[2], args[3]) < 0) return NULL;
    Py_RETURN_NONE;
}

/* ---- Taking and forgetting. */

static PyObject *rows_to_array(const TensorIds *self) {
    for (Py_ssize_t at = ROW_BITS; at < self->rows.count; at += ROW_WIDTH) self->rows.items[at] &= ~(int64_t)BIT_UNREAD;
    return column_to_array(&self->rows);
}

static PyObject *ids_take(PyObject *object, PyObject *Py_UNUSED(none)) {
    TensorIds *self = (TensorIds *)object;
    PyObject *used = column_to_array(&self->used);
    PyObject *rows = used == NULL ? NULL : rows_to_array(self);
    PyObject *taken = rows == NULL ? NULL : Py_BuildValue("OOL", rows, used, (long long)self->first);
    Py_XDECREF(rows);
    Py_XDECREF(used);
    if (taken == NULL) return NULL;
    self->rows.count = self->used.count = 0;
    self->first = self->next;
    return taken;
}

static PyObject *ids_take_allocated(PyObject *object, PyObject *Py_UNUSED(none)) {
    Storages *storages = &((TensorIds *)object)->storages;
    int64_t allocated = storages->allocated_bytes;
    storages->allocated_bytes = 0;
    storages->lowest_bytes = storages->live_bytes;
    return PyLong_FromLongLong(allocated);
}

static PyObject *ids_forget(PyObject *self, PyObject *Py_UNUSED(none)) {
    forget_storages(&((TensorIds *)self)->storages);
    Py_RETURN_NONE;
}

/* ---- The type. */

static PyObject *shared(PyObject *object) {
    Py_INCREF(object);
    return object;
}

/* Reads the function in a capsule, or None, into `into`. Returns -1 with TypeError. */
static int use_exchange(PyObject *capsule, ExchangeFunction *into) {
    if (capsule == Py_None) return 0;
    const ExchangeTable *table = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (table == NULL) return -1;
    if (table->major == 1) *into = table->look;
    return 0;
}

static PyObject *ids_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"geometry", "exchange", "exchanging", NULL};
    PyObject *geometry, *exchange, *exchanging;
    ExchangeFunction function = NULL;
    State *state = PyType_GetModuleState(type);
    if (state == NULL ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "OOO!:TensorIds", names, &geometry, &exchange, &PyTuple_Type,
                                     &exchanging) ||
        use_exchange(exchange, &function) < 0)
        return NULL;
    TensorIds *self = (TensorIds *)PyType_GenericAlloc(type, 0); /* all of it is 0 */
    if (self == NULL) return NULL;
    self->state = state;
    self->storages.type = (PyTypeObject *)shared((PyObject *)state->life_type);
    self->storages.attribute = PyUnicode_FromFormat("_modtrace_%p", (void *)self);
    self->geometries.exchange = function;
    self->geometries.exchanging = shared(exchanging);
    self->geometries.make = shared(geometry);
    self->geometries.all = PyList_New(0);
    self->geometries.numbers = PyDict_New();
    self->leaves = PyList_New(0);
    self->devices = PyList_New(0);
    self->device_numbers = PyDict_New();
    self->slots = Py_BuildValue("[s]", "");
    self->slot_numbers = Py_BuildValue("{si}", "", 0);
    if (!PyErr_Occurred()) return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

/* Where the objects are that it owns. */
static const size_t OWNED[] = {
    offsetof(TensorIds, storages.type), offsetof(TensorIds, storages.attribute), offsetof(TensorIds, leaves),
    offsetof(TensorIds, geometries.make), offsetof(TensorIds, geometries.all), offsetof(TensorIds, geometries.numbers),
    offsetof(TensorIds, geometries.exchanging), offsetof(TensorIds, devices), offsetof(TensorIds, device_numbers),
    offsetof(TensorIds, slots), offsetof(TensorIds, slot_numbers),
};

enum { OWNED_COUNT = sizeof OWNED / sizeof *OWNED };

static PyObject *owned(PyObject *object, int at) { return *(PyObject **)((char *)object + OWNED[at]); }

/* References to storages are not visited, because they do not lead back here. Every cycle through this object
   also goes through a list or a dictionary, which Python clears. */
static int ids_traverse(PyObject *object, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(object));
    for (int at = 0; at < OWNED_COUNT; at++) Py_VISIT(owned(object, at));
    return 0;
}

static void ids_dealloc(PyObject *object) {
    TensorIds *self = (TensorIds *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    forget_storages(&self->storages);
    for (int at = 0; at < OWNED_COUNT; at++) Py_XDECREF(owned(object, at));
    free(self->geometries.places);
    free(self->rows.items);
    free(self->used.items);
    PyObject_GC_Del(object);
    Py_DECREF(type);
}

#define GETTER(name, value) \
    static PyObject *get_##name(PyObject *object, void *Py_UNUSED(closure)) { \
        TensorIds *self = (TensorIds *)object; \
        return value; \
    }

GETTER(used_count, PyLong_FromSsize_t(self->used.count))
GETTER(live_bytes, PyLong_FromLongLong(self->storages.live_bytes))
GETTER(lowest_bytes, PyLong_FromLongLong(self->storages.lowest_bytes))
GETTER(next, PyLong_FromLongLong(self->next))
GETTER(leaves, shared(self->leaves))
GETTER(geometries, shared(self->geometries.all))
GETTER(devices, shared(self->devices))
GETTER(slots, shared(self->slots))

static int set_leaves(PyObject *object, PyObject *value, void *Py_UNUSED(closure)) {
    TensorIds *self = (TensorIds *)object;
    if (value == NULL || !PyList_Check(value)) {
        PyErr_SetString(PyExc_TypeError, "TensorIds.leaves: give a list");
        return -1;
    }
    PyObject *before = self->leaves;
    self->leaves = shared(value);
    Py_DECREF(before);
    return 0;
}

static PyGetSetDef attributes[] = {
    {"used_count", get_used_count, NULL, "The number of entries for uses since they were last taken.", NULL},
    {"live_bytes", get_live_bytes, NULL, "The bytes of living storages that ops have allocated.", NULL},
    {"lowest_bytes", get_lowest_bytes, NULL, "The least of live_bytes since the last call of take_allocated.", NULL},
    {"next", get_next, NULL, "The number of the next tensor.", NULL},
    {"leaves", get_leaves, set_leaves, "Tensors whose storages no op has made, with their numbers.", NULL},
    {"geometries", get_geometries, NULL, "By number.", NULL},
    {"devices", get_devices, NULL, "By number.", NULL},
    {"slots", get_slots, NULL, "By number.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

#define FAST(function) (PyCFunction)(void (*)(void))function

static PyMethodDef methods[] = {
    {"take", ids_take, METH_NOARGS, "Returns the rows and uses since the last call, and the tensor of the first row."},
    {"take_allocated", ids_take_allocated, METH_NOARGS, "Returns the bytes added to storages since the last call."},
    {"forget", ids_forget, METH_NOARGS, "Forgets every storage, so that each tensor from now on is new."},
    {"read", ids_read, METH_O, "read(tensor): records that an op reads a tensor."},
    {"identify", ids_identify, METH_O, "identify(tensor): returns the number of a tensor that no op reads."},
    {"find", ids_find, METH_O, "find(tensor): returns its number; -1 if it is new and would become a leaf."},
    {"storage_of", ids_storage_of, METH_O, "storage_of(tensor): returns the number of its storage; -1 if it is new."},
    {"write", FAST(ids_write), METH_FASTCALL, "write(tensor, op): records that an op has written to a tensor."},
    {"resized", ids_resized, METH_O, "resized(storage): records the size of a storage that may have been resized."},
    {"make", FAST(ids_make), METH_FASTCALL, "make(tensor, op, slot, given): records that an op returns a tensor."},
    {"note_unreadable", FAST(ids_note_unreadable), METH_FASTCALL,
     "note_unreadable(tensor, op, slot, error): adds a tensor that raised an error when it was read."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "TensorIds(geometry, exchange, exchanging): numbers for tensors; the class Geometry, torch's capsule for DLPack's "
                "exchange or None, and the classes of tensors for which it may be called."},
    {Py_tp_new, ids_new},
    {Py_tp_dealloc, ids_dealloc},
    {Py_tp_traverse, ids_traverse},
    {Py_tp_methods, methods},
    {Py_tp_getset, attributes},
    {0, NULL},
};

PyType_Spec ids_spec = {"modtrace.collect._tensor_ids.TensorIds", sizeof(TensorIds), 0,
                        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};
