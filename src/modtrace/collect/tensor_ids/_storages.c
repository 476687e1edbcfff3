/* Living storages, and the tensors that are known to show them.

   No weak reference here has a callback. If an object has two that do, and the tuple that `PyObject_ClearWeakRefs`
   makes for them starts a collection that frees one, CPython calls a freed callback (Objects/weakrefobject.c, 3.11).
   Instead each storage has an attribute of ours, which is deallocated with the storage's `__dict__`. Torch keeps the
   Python object of a storage as long as the storage lives, so this is the moment at which the memory is freed. Torch
   copies and saves storages without their attributes.

   No function here keeps a storage alive, and none but `add_storage` and `forget_storages` runs Python code. A
   storage may die at any time that Python code runs, also while another one is added. */

#include "_tensor_ids.h"
#include <stdlib.h>

/* The number of tensors that are remembered for one version of a storage besides the first. */
enum { OBJECTS_KEPT = 64, SMALLEST = 64 };

static size_t home_of(const Storages *self, const void *key) {
    uint64_t mixed = ((uint64_t)(uintptr_t)key >> 4) * UINT64_C(0x9E3779B97F4A7C15);
    return (size_t)(mixed >> 32) & (self->capacity - 1);
}

/* Returns the slot of a key, which is free if the key is not there. */
static size_t place_of(const Storages *self, const void *key) {
    size_t at = home_of(self, key);
    while (self->places[at].key != NULL && self->places[at].key != key) at = (at + 1) & (self->capacity - 1);
    return at;
}

/* Forgets a storage, wherever its attribute is, and keeps the memory for the next one. */
static void drop(Storages *self, Storage *storage) {
    if (storage->life != NULL) storage->life->storage = NULL;
    Py_XDECREF(storage->ref);
    free(storage->others);
    storage->next_spare = self->spare;
    self->spare = storage;
}

/* Changes the bytes that live. Callers count what is allocated. */
static void add_live(Storages *self, int64_t bytes) {
    self->live_bytes += bytes;
    if (self->live_bytes < self->lowest_bytes) self->lowest_bytes = self->live_bytes;
}

static int is_dead(const Storage *storage) { return PyWeakref_GetObject(storage->ref) == Py_None; }

/* Returns the capacity that leaves half of the slots free once the dead storages are gone and one is added. */
static size_t wanted_capacity(const Storages *self) {
    size_t alive = 0;
    for (size_t at = 0; at < self->capacity; at++) alive += self->places[at].key && !is_dead(self->places[at].storage);
    if (self->capacity == 0) return SMALLEST;
    return 2 * alive >= self->capacity ? 2 * self->capacity : self->capacity;
}

/* Reserves a slot for one more, and drops the storages whose death was not seen. */
static int grow(Storages *self) {
    Storages grown = *self;
    grown.capacity = wanted_capacity(self);
    grown.places = calloc(grown.capacity, sizeof *grown.places);
    if (grown.places == NULL) return PyErr_NoMemory(), -1;
    for (size_t at = 0; at < self->capacity; at++) {
        StoragePlace place = self->places[at];
        if (place.key == NULL) continue;
        if (!is_dead(place.storage)) {
            grown.places[place_of(&grown, place.key)] = place;
            continue;
        }
        grown.count--;
        add_live(&grown, -place.storage->live_bytes);
        drop(&grown, place.storage);
    }
    free(self->places);
    *self = grown;
    return 0;
}

/* Frees a slot, and moves up the entries that are behind it only because it was occupied. */
static void vacate(Storages *self, size_t hole) {
    size_t mask = self->capacity - 1;
    for (size_t at = (hole + 1) & mask; self->places[at].key != NULL; at = (at + 1) & mask) {
        size_t home = home_of(self, self->places[at].key);
        if (((at - home) & mask) < ((at - hole) & mask)) continue; /* its own slot is behind the hole */
        self->places[hole] = self->places[at];
        hole = at;
    }
    self->places[hole].key = NULL;
    self->count--;
}

static void remove_storage(Storages *self, Storage *storage) {
    vacate(self, place_of(self, storage->key));
    add_live(self, -storage->live_bytes);
    drop(self, storage);
}

Storage *find_storage(Storages *self, const void *key) {
    if (self->capacity == 0) return NULL;
    const StoragePlace *place = &self->places[place_of(self, key)];
    if (place->key == NULL) return NULL;
    if (PyWeakref_GetObject(place->storage->ref) == key) return place->storage;
    remove_storage(self, place->storage); /* its attribute is kept alive, and another storage has this address now */
    return NULL;
}

/* Removes our attribute from a storage, if the storage lives and still has it. */
static void take_off(const Storages *self, const Storage *storage) {
    PyObject *stored = PyWeakref_GetObject(storage->ref);
    if (stored == NULL || stored == Py_None) return;
    Py_INCREF(stored);
    PyObject_GenericSetAttr(stored, self->attribute, NULL);
    PyErr_Clear();
    Py_DECREF(stored);
}

void forget_storages(Storages *self) {
    StoragePlace *places = self->places;
    size_t capacity = self->capacity;
    PyObject *type, *value, *traceback;
    self->places = NULL;
    self->capacity = self->count = 0;
    self->live_bytes = self->lowest_bytes = self->allocated_bytes = 0;
    /* Removing attributes may free other storages, which must not be found here any more. */
    for (size_t at = 0; at < capacity; at++)
        if (places[at].key != NULL && places[at].storage->life != NULL) places[at].storage->life->storage = NULL;
    PyErr_Fetch(&type, &value, &traceback);
    for (size_t at = 0; at < capacity; at++) {
        if (places[at].key == NULL) continue;
        take_off(self, places[at].storage);
        places[at].storage->life = NULL;
        drop(self, places[at].storage);
    }
    PyErr_Restore(type, value, traceback);
    free(places);
    for (Storage *spare; (spare = self->spare) != NULL; free(spare)) self->spare = spare->next_spare;
}

/* Raises for an object without weak references or attributes, so that its tensor counts as one without storage. */
static int refuse(PyObject *stored) {
    if (PyErr_ExceptionMatches(PyExc_TypeError) || PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear();
        PyErr_Format(PyExc_RuntimeError, "cannot tell a storage of the class %R from others", Py_TYPE(stored));
    }
    return -1;
}

/* Refers to a storage, and adds the attribute that dies with it. Returns -1 with an exception. */
static int attach(Storages *self, Storage *storage, PyObject *stored) {
    storage->ref = PyWeakref_NewRef(stored, NULL);
    if (storage->ref == NULL) return refuse(stored);
    PyObject_GC_UnTrack(storage->ref); /* it calls nothing, and the collector would visit thousands in each step */
    StorageLife *life = PyObject_New(StorageLife, self->type);
    if (life == NULL) return -1;
    life->owner = self;
    life->storage = storage;
    storage->life = life;
    /* Not `PyObject_SetAttr`: a subclass may have a `__setattr__` of its own. */
    int failed = PyObject_GenericSetAttr(stored, self->attribute, (PyObject *)life);
    Py_DECREF(life); /* the storage now holds it */
    return failed ? refuse(stored) : 0;
}

static Storage *new_storage(Storages *self, PyObject *stored) {
    Storage *storage = self->spare;
    if (storage != NULL) self->spare = storage->next_spare;
    else if ((storage = malloc(sizeof *storage)) == NULL) return (Storage *)PyErr_NoMemory();
    *storage = (Storage){.key = stored, .writer = -1};
    if (attach(self, storage, stored) == 0) return storage;
    drop(self, storage);
    return NULL;
}

/* Returns the storage that another thread has added meanwhile, whose attribute ours has replaced. */
static Storage *hand_over(Storages *self, Storage *storage, Storage *known) {
    known->life = storage->life;
    if (known->life != NULL) known->life->storage = known;
    storage->life = NULL;
    drop(self, storage);
    return known;
}

/* Counts all of a storage's memory as allocated by ops: it is new, also where a storage that no op made is resized. */
static void count_memory(Storages *self, Storage *storage, int64_t size_bytes) {
    int64_t more = size_bytes - storage->live_bytes;
    storage->live_bytes = size_bytes;
    if (more > 0) self->allocated_bytes += more;
    add_live(self, more);
}

Storage *add_storage(Storages *self, PyObject *stored, int64_t device, int is_made, int64_t size_bytes) {
    Storage *storage = new_storage(self, stored);
    if (storage == NULL) return NULL;
    Storage *known = find_storage(self, stored);
    if (known != NULL) return hand_over(self, storage, known);
    if (2 * self->count >= self->capacity && grow(self) < 0) return drop(self, storage), NULL;
    self->places[place_of(self, stored)] = (StoragePlace){stored, storage};
    self->count++;
    storage->number = self->next++;
    storage->device = device;
    storage->is_made = is_made;
    storage->size_bytes = size_bytes;
    if (is_made && size_bytes > 0) count_memory(self, storage, size_bytes);
    return storage;
}

void note_size(Storages *self, Storage *storage, int64_t size_bytes) {
    int64_t before = storage->size_bytes;
    if (size_bytes < 0 || size_bytes == before) return;
    storage->size_bytes = size_bytes;
    if (before >= 0) count_memory(self, storage, size_bytes);
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

/* Forgets that an object shows what it has shown: it shows something else now, or has died, and another one has its
   address. What was shown stays known. */
static void let_go(Storage *self, const void *object) {
    static const char nobody;
    if (self->first.object == object) self->first.object = &nobody;
    for (int at = 0; at < self->other_count; at++)
        if (self->others[at].object == object) self->others[at].object = &nobody;
}

int remember_shown(Storage *self, Shown shown) {
    if (self->first.object == NULL) {
        self->first = shown;
        return 0;
    }
    if (self->others == NULL) self->others = malloc(OBJECTS_KEPT * sizeof *self->others);
    if (self->others == NULL) return PyErr_NoMemory(), -1;
    let_go(self, shown.object);
    if (self->other_count >= OBJECTS_KEPT) self->other_count = 0;
    self->others[self->other_count++] = shown;
    return 0;
}

void note_write(Storage *self, int64_t op) {
    if (self->writer == op) return; /* an op counts once, however many tensors it writes through */
    self->version++;
    self->writer = op;
    self->first.object = NULL;
    self->other_count = 0;
}

int list_living(const Storages *self, Column *into) {
    if (column_reserve(into, LIVING_WIDTH * (Py_ssize_t)self->count) < 0) return -1;
    for (size_t at = 0; at < self->capacity; at++) {
        const Storage *storage = self->places[at].storage;
        if (self->places[at].key == NULL || storage->size_bytes <= 0 || is_dead(storage)) continue;
        into->items[into->count++] = storage->number;
        into->items[into->count++] = storage->size_bytes;
        into->items[into->count++] = storage->device;
    }
    return 0;
}

/* Runs when a storage has died, or when its attribute was removed; it stays known then. */
static void life_dealloc(PyObject *object) {
    StorageLife *self = (StorageLife *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (self->storage != NULL) {
        self->storage->life = NULL;
        if (is_dead(self->storage)) remove_storage(self->owner, self->storage);
    }
    PyObject_Free(object);
    Py_DECREF(type);
}

/* Makes copies and pickles of a storage's attributes None. */
static PyObject *life_reduce(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(none)) {
    return Py_BuildValue("O()", Py_TYPE(Py_None));
}

static PyMethodDef life_methods[] = {
    {"__reduce__", life_reduce, METH_NOARGS, "A copy is None."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "An attribute of a storage, which dies with it."},
    {Py_tp_methods, life_methods},
    {Py_tp_dealloc, life_dealloc},
    {0, NULL},
};

PyType_Spec life_spec = {"modtrace.collect.tensor_ids._tensor_ids.StorageLife", sizeof(StorageLife), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
