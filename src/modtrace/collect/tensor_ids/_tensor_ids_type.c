/* The type `TensorIds`: what Python calls, and what it reads. */

#include "_tensor_ids.h"
#include <stddef.h>
#include <stdlib.h>

static PyObject *wrong_count(const char *name, Py_ssize_t wanted, Py_ssize_t given) {
    return PyErr_Format(PyExc_TypeError, "TensorIds.%s() takes %zd arguments, not %zd", name, wanted, given);
}

static PyObject *none_or_null(int failed) {
    if (failed < 0) return NULL;
    Py_RETURN_NONE;
}

static PyObject *ids_read(PyObject *self, PyObject *tensor) {
    return none_or_null(read_tensor((TensorIds *)self, tensor));
}

static PyObject *ids_identify(PyObject *self, PyObject *tensor) {
    int64_t geometry, number = identify_tensor((TensorIds *)self, tensor, &geometry);
    return number < 0 ? NULL : PyLong_FromLongLong(number);
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

static PyObject *ids_write(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 2) return wrong_count("write", 2, count);
    int64_t op = PyLong_AsLongLong(args[1]);
    if (op == -1 && PyErr_Occurred()) return NULL;
    return none_or_null(write_tensor((TensorIds *)self, args[0], op));
}

static PyObject *ids_resized(PyObject *self, PyObject *stored) {
    return none_or_null(note_resized((TensorIds *)self, stored));
}

static PyObject *ids_make(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 4) return wrong_count("make", 4, count);
    int64_t op = PyLong_AsLongLong(args[1]);
    if (op == -1 && PyErr_Occurred()) return NULL;
    return none_or_null(make_tensor((TensorIds *)self, args[0], op, args[2], args[3]));
}

static PyObject *ids_note_unreadable(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 4) return wrong_count("note_unreadable", 4, count);
    int64_t op = PyLong_AsLongLong(args[1]);
    if (op == -1 && PyErr_Occurred()) return NULL;
    return none_or_null(note_unreadable((TensorIds *)self, args[0], op, args[2], args[3]));
}

static PyObject *ids_take(PyObject *self, PyObject *Py_UNUSED(none)) { return take_tensors((TensorIds *)self); }

static PyObject *ids_take_allocated(PyObject *self, PyObject *Py_UNUSED(none)) {
    return PyLong_FromLongLong(take_allocated((TensorIds *)self));
}

static PyObject *ids_living(PyObject *self, PyObject *Py_UNUSED(none)) {
    Column living = {NULL, 0, 0};
    PyObject *found = list_living(&((TensorIds *)self)->storages, &living) < 0 ? NULL : column_to_array(&living);
    free(living.items);
    return found;
}

static PyObject *ids_forget(PyObject *self, PyObject *Py_UNUSED(none)) {
    forget_storages(&((TensorIds *)self)->storages);
    Py_RETURN_NONE;
}

static PyObject *shared(PyObject *object) {
    Py_INCREF(object);
    return object;
}

/* Reads the function in a capsule, or None, into `into`. Returns -1 with TypeError. */
static int use_exchange(PyObject *capsule, ExchangeFunction *into) {
    if (capsule == Py_None) return 0;
    const ExchangeTable *table = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (table == NULL) return -1;
    if (table->major == 1) *into = table->exchange;
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
    {"living", ids_living, METH_NOARGS, "Returns number, bytes and device of each storage that lives and has memory."},
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

PyType_Spec ids_spec = {"modtrace.collect.tensor_ids._tensor_ids.TensorIds", sizeof(TensorIds), 0,
                        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};
