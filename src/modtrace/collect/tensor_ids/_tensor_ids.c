/* Numbers for tensors, as the class in tensor_ids.py gives them, but faster. That class is the specification.

   Whatever may run Python code comes first in each function, and only then anything changes: an exception leaves
   everything as it was, and a storage that dies meanwhile takes nothing away that is in use. */

#include "_tensor_ids.h"
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

static int read_offset(TensorIds *self, PyObject *tensor, Sight *sight) {
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

int number_output(TensorIds *self, PyObject *tensor, PyObject *slot, int64_t *geometry, int64_t *slot_number) {
    const void *data;
    *geometry = find_geometry(&self->geometries, self->state, tensor, &data);
    *slot_number = *geometry < 0 ? -1 : slot_of(self, slot);
    return *slot_number < 0 ? -1 : 0;
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
    if (read_offset(self, tensor, sight) < 0) return -1;
    Storage *storage = find_storage(&self->storages, sight->stored);
    Shown *known = storage == NULL ? NULL : find_shown(storage, tensor, sight->offset, sight->geometry);
    if (known == NULL) return meet_new(self, tensor, sight);
    if (known->object == tensor) known->data = sight->data; /* the storage has moved */
    return known->tensor; /* another object: autograd had saved it, and has made a new tensor of it */
}

/* Returns the number of a tensor. In one storage, the same geometry at the same address has the same offset. */
static int64_t number_of(TensorIds *self, PyObject *tensor, Sight *sight) {
    const Storage *storage = find_storage(&self->storages, sight->stored);
    if (storage != NULL && storage->first.object == tensor && storage->first.geometry == sight->geometry &&
        storage->first.data == sight->data && sight->data != NULL)
        return storage->first.tensor;
    return meet(self, tensor, sight);
}

int64_t identify_tensor(TensorIds *self, PyObject *tensor, int64_t *geometry) {
    Sight sight;
    if (read_sight(self, tensor, &sight) < 0) return -1;
    int64_t number = number_of(self, tensor, &sight);
    Py_DECREF(sight.stored);
    if (number < 0 || ask_if_unread(self, tensor, number) < 0 || reserve(self) < 0) return -1;
    *geometry = sight.geometry;
    return number;
}

int read_tensor(TensorIds *self, PyObject *tensor) {
    int64_t geometry, number = identify_tensor(self, tensor, &geometry);
    if (number < 0) return -1;
    append_use(self, number, geometry);
    return 0;
}

int64_t find_tensor(TensorIds *self, PyObject *tensor) {
    Sight sight;
    int64_t number = -1;
    if (read_sight(self, tensor, &sight) < 0) return -1;
    if (read_offset(self, tensor, &sight) == 0) {
        const Storage *storage = find_storage(&self->storages, sight.stored);
        const Shown *known = storage == NULL ? NULL : find_shown(storage, tensor, sight.offset, sight.geometry);
        if (known != NULL) number = known->tensor;
        else if (storage != NULL && storage->is_made) number = meet_new(self, tensor, &sight);
    }
    Py_DECREF(sight.stored);
    return number;
}

/* ---- Writing and making. */

int write_tensor(TensorIds *self, PyObject *tensor, int64_t op) {
    PyObject *stored = call_method(tensor, self->state->names[UNTYPED_STORAGE]);
    if (stored == NULL) return -1;
    int64_t size;
    Storage *storage = read_size(self, stored, &size) < 0 ? NULL : meet_storage(self, tensor, stored, 0);
    if (storage != NULL) {
        note_write(storage, op);
        note_size(&self->storages, storage, size);
    }
    Py_DECREF(stored);
    return storage == NULL ? -1 : 0;
}

int note_resized(TensorIds *self, PyObject *stored) {
    int64_t size;
    if (read_size(self, stored, &size) < 0) return -1;
    Storage *storage = find_storage(&self->storages, stored);
    if (storage != NULL) note_size(&self->storages, storage, size);
    return 0;
}

static int is_among(PyObject *tensor, PyObject *given) {
    PyObject *iterator = PyObject_GetIter(given), *item;
    if (iterator == NULL) return -1;
    int is_found = 0;
    while (!is_found && (item = PyIter_Next(iterator)) != NULL) {
        is_found = item == tensor;
        Py_DECREF(item);
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

int make_tensor(TensorIds *self, PyObject *tensor, int64_t op, PyObject *slot_text, PyObject *given) {
    Sight sight;
    if (read_sight(self, tensor, &sight) < 0) return -1;
    int64_t slot = slot_of(self, slot_text);
    int done = slot < 0 ? -1 : is_passed_on(self, tensor, sight.stored, op, given);
    if (done == 0) done = read_offset(self, tensor, &sight);
    if (done == 0) done = make_new(self, tensor, &sight, op, slot);
    Py_DECREF(sight.stored);
    return done;
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

/* ---- Taking. */

int64_t take_allocated(TensorIds *self) {
    Storages *storages = &self->storages;
    int64_t allocated = storages->allocated_bytes;
    storages->allocated_bytes = 0;
    storages->lowest_bytes = storages->live_bytes;
    return allocated;
}

static PyObject *rows_to_array(const TensorIds *self) {
    for (Py_ssize_t at = ROW_BITS; at < self->rows.count; at += ROW_WIDTH) self->rows.items[at] &= ~(int64_t)BIT_UNREAD;
    return column_to_array(&self->rows);
}

PyObject *take_tensors(TensorIds *self) {
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
