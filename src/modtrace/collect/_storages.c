/* Storages while they live, and the tensors that are known to show them.

   No function here keeps a storage alive, and none but `add_storage` runs Python code. A storage's death may be told at
   any time that Python code runs, also while one is added. */

#include "_tensor_ids.h"
#include <stdlib.h>

/* Tensors that are remembered for one version of a storage beside the first. */
enum { OBJECTS_KEPT = 64, SMALLEST = 64 };

static size_t home_of(const Storages *self, const void *key) {
    uint64_t mixed = ((uint64_t)(uintptr_t)key >> 4) * UINT64_C(0x9E3779B97F4A7C15);
    return (size_t)(mixed >> 32) & (self->capacity - 1);
}

/* Where a key stands, or would. */
static size_t place_of(const Storages *self, const void *key) {
    size_t at = home_of(self, key);
    while (self->places[at].key != NULL && self->places[at].key != key) at = (at + 1) & (self->capacity - 1);
    return at;
}

Storage *find_storage(const Storages *self, const void *key) {
    if (self->capacity == 0) return NULL;
    const StoragePlace *place = &self->places[place_of(self, key)];
    return place->key == NULL ? NULL : place->storage;
}

static int grow(Storages *self) {
    Storages grown = *self;
    grown.capacity = self->capacity ? 2 * self->capacity : SMALLEST;
    grown.places = calloc(grown.capacity, sizeof *grown.places);
    if (grown.places == NULL) return PyErr_NoMemory(), -1;
    for (size_t at = 0; at < self->capacity; at++)
        if (self->places[at].key != NULL) grown.places[place_of(&grown, self->places[at].key)] = self->places[at];
    free(self->places);
    *self = grown;
    return 0;
}

/* Frees a place, and moves up what stands behind it only because that was taken. */
static void vacate(Storages *self, size_t hole) {
    size_t mask = self->capacity - 1;
    for (size_t at = (hole + 1) & mask; self->places[at].key != NULL; at = (at + 1) & mask) {
        size_t home = home_of(self, self->places[at].key);
        if (((at - home) & mask) < ((at - hole) & mask)) continue; /* its home lies behind the hole */
        self->places[hole] = self->places[at];
        hole = at;
    }
    self->places[hole].key = NULL;
    self->count--;
}

/* Lets go of a storage's reference, which may free the storage. */
static void release(Storage *storage) {
    PyObject *ref = storage->ref;
    storage->owner = NULL;
    storage->ref = NULL;
    Py_XDECREF(ref);
}

static void remove_storage(Storages *self, Storage *storage) {
    size_t at = place_of(self, storage->key);
    if (self->places[at].storage == storage) vacate(self, at);
    self->live_bytes -= storage->size_bytes;
    release(storage);
}

void forget_storages(Storages *self) {
    StoragePlace *places = self->places;
    size_t capacity = self->capacity;
    self->places = NULL;
    self->capacity = self->count = 0;
    self->live_bytes = 0;
    for (size_t at = 0; at < capacity; at++)
        if (places[at].key != NULL) release(places[at].storage);
    free(places);
}

static Storage *new_storage(const Storages *self, PyObject *stored) {
    Storage *storage = (Storage *)PyType_GenericAlloc(self->type, 0); /* all of it is 0 */
    if (storage == NULL) return NULL;
    storage->key = stored;
    storage->writer = -1;
    storage->ref = PyWeakref_NewRef(stored, (PyObject *)storage);
    Storage *held = storage->ref == NULL ? NULL : storage;
    Py_DECREF(storage); /* its reference holds it from now on */
    return held;
}

Storage *add_storage(Storages *self, PyObject *stored, int64_t device, int is_made, int64_t size_bytes) {
    Storage *storage = new_storage(self, stored);
    if (storage == NULL) return NULL;
    if (2 * self->count >= self->capacity && grow(self) < 0) return release(storage), NULL;
    StoragePlace *place = &self->places[place_of(self, stored)];
    if (place->key != NULL) return release(storage), place->storage; /* another thread was faster */
    *place = (StoragePlace){stored, storage};
    self->count++;
    storage->owner = self;
    storage->number = self->next++;
    storage->device = device;
    storage->is_made = is_made;
    storage->size_bytes = size_bytes;
    self->live_bytes += size_bytes;
    return storage;
}

static int shows(const Shown *shown, int64_t offset, int64_t geometry) {
    return shown->object != NULL && shown->offset == offset && shown->geometry == geometry;
}

Shown *find_shown(const Storage *self, const void *object, int64_t offset, int64_t geometry) {
    for (int at = 0; at < self->other_count; at++)
        if (self->others[at].object == object && shows(&self->others[at], offset, geometry)) return &self->others[at];
    if (shows(&self->first, offset, geometry)) return (Shown *)&self->first;
    for (int at = 0; at < self->other_count; at++)
        if (shows(&self->others[at], offset, geometry)) return &self->others[at];
    return NULL;
}

/* The place of one more object; that of the object itself, if it is there. */
static Shown *place_among_others(Storage *self, const void *object) {
    for (int at = 0; at < self->other_count; at++)
        if (self->others[at].object == object) return &self->others[at];
    if (self->other_count >= OBJECTS_KEPT) self->other_count = 0;
    return &self->others[self->other_count++];
}

int remember_shown(Storage *self, Shown shown) {
    if (self->first.object == NULL || self->first.object == shown.object) {
        self->first = shown;
        return 0;
    }
    if (self->others == NULL) self->others = malloc(OBJECTS_KEPT * sizeof *self->others);
    if (self->others == NULL) return PyErr_NoMemory(), -1;
    *place_among_others(self, shown.object) = shown;
    return 0;
}

void note_write(Storage *self, int64_t op) {
    if (self->writer == op) return; /* one op writes once, through however many tensors */
    self->version++;
    self->writer = op;
    self->first.object = NULL;
    self->other_count = 0;
}

/* The weak reference calls it: its storage has died. */
static PyObject *storage_call(PyObject *object, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs)) {
    Storage *self = (Storage *)object;
    if (self->owner != NULL) remove_storage(self->owner, self);
    Py_RETURN_NONE;
}

static void storage_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    free(((Storage *)object)->others);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyType_Slot slots[] = {
    {Py_tp_doc, "One storage; called when it has died."},
    {Py_tp_call, storage_call},
    {Py_tp_dealloc, storage_dealloc},
    {0, NULL},
};

PyType_Spec storage_spec = {"modtrace.collect._tensor_ids.Storage", sizeof(Storage), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
