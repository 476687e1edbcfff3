/* Numbers for the geometries of tensors: shape, stride, dtype, layout, and whether conjugated or negated.

   A dictionary of `Geometry` decides. Before it, a table of plain numbers is searched, for which no Python object is
   made or hashed. */

#include "_tensor_ids.h"
#include <stdlib.h>
#include <string.h>

enum { CONJ = 1, NEG = 2, SMALLEST = 64 };

/* A tensor's geometry as Python objects; all owned. */
typedef struct {
    PyObject *shape, *stride, *dtype;
} Shape;

static void release(Shape *shape) {
    Py_CLEAR(shape->shape);
    Py_CLEAR(shape->stride);
    Py_CLEAR(shape->dtype);
}

static int read_shape(const State *state, PyObject *tensor, Shape *found) {
    found->shape = PyObject_GetAttr(tensor, state->names[SHAPE]);
    found->stride = found->shape == NULL ? NULL : call_method(tensor, state->names[STRIDE]);
    found->dtype = found->stride == NULL ? NULL : PyObject_GetAttr(tensor, state->names[DTYPE]);
    if (found->dtype != NULL) return 0;
    release(found);
    return -1;
}

/* Appends a tuple of plain integers. Returns 0 for others (sizes of nested and fake tensors), and if it is too long. */
static int append_numbers(GeometryKey *key, PyObject *tuple) {
    if (!PyTuple_Check(tuple)) return 0;
    Py_ssize_t size = PyTuple_Size(tuple);
    if (size > MOST_DIMENSIONS) return 0;
    for (Py_ssize_t at = 0; at < size; at++) {
        PyObject *item = PyTuple_GetItem(tuple, at);
        if (!PyLong_CheckExact(item)) return 0;
        int64_t number = key->numbers[key->size++] = PyLong_AsLongLong(item);
        if (number == -1 && PyErr_Occurred()) return PyErr_Clear(), 0;
    }
    return 1;
}

static uint64_t hash_of(const GeometryKey *key) {
    uint64_t hash = key->dtype + (uint64_t)key->flags;
    for (int at = 0; at < key->size; at++) {
        hash = (hash ^ (uint64_t)key->numbers[at]) * UINT64_C(0x9E3779B97F4A7C15);
        hash ^= hash >> 29;
    }
    return hash;
}

/* Makes the key of a shape. Returns 0 if plain numbers cannot express it. */
static int make_key(const Shape *shape, int flags, GeometryKey *key) {
    key->dtype = (uint64_t)(uintptr_t)shape->dtype;
    key->flags = flags;
    key->size = 0;
    if (!append_numbers(key, shape->shape)) return 0;
    int dimensions = key->size;
    if (!append_numbers(key, shape->stride) || key->size != 2 * dimensions) return 0;
    key->hash = hash_of(key);
    return 1;
}

static int are_same(const GeometryKey *one, const GeometryKey *other) {
    return one->hash == other->hash && one->dtype == other->dtype && one->flags == other->flags &&
           one->size == other->size && memcmp(one->numbers, other->numbers, one->size * sizeof *one->numbers) == 0;
}

/* Returns the slot of a key, which is free if the key is not there. */
static GeometryKey *place_of(const Geometries *self, const GeometryKey *key) {
    size_t at = (size_t)key->hash & (self->capacity - 1);
    while (self->places[at].number >= 0 && !are_same(&self->places[at], key)) at = (at + 1) & (self->capacity - 1);
    return &self->places[at];
}

static int grow(Geometries *self) {
    Geometries grown = *self;
    grown.capacity = self->capacity ? 2 * self->capacity : SMALLEST;
    grown.places = malloc(grown.capacity * sizeof *grown.places);
    if (grown.places == NULL) return PyErr_NoMemory(), -1;
    for (size_t at = 0; at < grown.capacity; at++) grown.places[at].number = -1;
    for (size_t at = 0; at < self->capacity; at++)
        if (self->places[at].number >= 0) *place_of(&grown, &self->places[at]) = self->places[at];
    free(self->places);
    *self = grown;
    return 0;
}

static int64_t insert(Geometries *self, const GeometryKey *key, int64_t number) {
    if (number < 0 || (2 * self->count >= self->capacity && grow(self) < 0)) return -1;
    GeometryKey *place = place_of(self, key);
    if (place->number < 0) self->count++;
    *place = *key;
    place->number = number;
    return number;
}

/* Returns a tensor's flags, if there may be any; -1 with an exception. */
static int flags_of(const Geometries *self, const State *state, PyObject *tensor) {
    if (!self->has_complex) return 0;
    int conj = to_truth(call_method(tensor, state->names[IS_CONJ]));
    if (conj < 0) return -1;
    int neg = to_truth(call_method(tensor, state->names[IS_NEG]));
    return neg < 0 ? -1 : (conj ? CONJ : 0) | (neg ? NEG : 0);
}

static int notice_complex(Geometries *self, const State *state, PyObject *dtype) {
    int is_complex = self->has_complex ? 1 : to_truth(PyObject_GetAttr(dtype, state->names[IS_COMPLEX]));
    if (is_complex > 0) self->has_complex = 1;
    return is_complex;
}

/* Returns the number of a Geometry by the dictionary. TypeError if an answer of the tensor is not of torch's type. */
static int64_t number_by_dictionary(Geometries *self, const State *state, PyObject *tensor, const Shape *shape, int flags) {
    PyObject *layout = PyObject_GetAttr(tensor, state->names[LAYOUT]);
    if (layout == NULL) return -1;
    PyObject *conj = flags & CONJ ? Py_True : Py_False, *neg = flags & NEG ? Py_True : Py_False;
    PyObject *geometry = PyObject_CallMethod(self->make, "of", "OOOOOO", shape->shape, shape->stride, shape->dtype,
                                             layout, conj, neg);
    Py_DECREF(layout);
    if (geometry == NULL) return -1;
    int64_t number = number_in(self->numbers, self->all, geometry);
    Py_DECREF(geometry);
    return number;
}

static int64_t add_geometry(Geometries *self, const State *state, PyObject *tensor, const Shape *shape) {
    if (notice_complex(self, state, shape->dtype) < 0) return -1;
    int flags = flags_of(self, state, tensor);
    if (flags < 0) return -1;
    int64_t number = number_by_dictionary(self, state, tensor, shape, flags);
    GeometryKey key;
    return make_key(shape, flags, &key) ? insert(self, &key, number) : number;
}

/* Returns whether a tensor's class has the attributes of torch itself. */
static int may_exchange(const Geometries *self, PyObject *tensor) {
    if (self->exchange == NULL) return 0;
    for (Py_ssize_t at = 0; at < PyTuple_Size(self->exchanging); at++)
        if ((PyObject *)Py_TYPE(tensor) == PyTuple_GetItem(self->exchanging, at)) return 1;
    return 0;
}

/* Makes the key of a tensor in one call. Returns 0 if its attributes must be read. */
static int exchange_key(Geometries *self, PyObject *tensor, int flags, GeometryKey *key, const void **data) {
    Exchanged found;
    if (!may_exchange(self, tensor)) return 0;
    if (self->exchange(tensor, &found) < 0) {
        PyErr_Clear();
        self->exchange = NULL; /* not again, because an exception in torch takes long */
        return 0;
    }
    if (found.dimensions > MOST_DIMENSIONS) return 0;
    *data = found.data;
    key->dtype = found.dtype_code | (uint64_t)found.dtype_bits << 8 | (uint64_t)found.dtype_lanes << 16;
    key->flags = flags;
    key->size = 2 * found.dimensions;
    for (int at = 0; at < found.dimensions; at++) {
        key->numbers[at] = found.shape[at];
        key->numbers[found.dimensions + at] = found.strides[at];
    }
    key->hash = hash_of(key);
    return 1;
}

static int64_t find_by_key(const Geometries *self, const GeometryKey *key) {
    return self->capacity > 0 ? place_of(self, key)->number : -1;
}

static int64_t find_by_attributes(Geometries *self, const State *state, PyObject *tensor, int flags) {
    Shape shape;
    GeometryKey key;
    if (read_shape(state, tensor, &shape) < 0) return -1;
    int64_t number = make_key(&shape, flags, &key) ? find_by_key(self, &key) : -1;
    if (number < 0) number = add_geometry(self, state, tensor, &shape);
    release(&shape);
    return number;
}

int64_t find_geometry(Geometries *self, const State *state, PyObject *tensor, const void **data) {
    GeometryKey key;
    *data = NULL;
    int had_complex = self->has_complex, flags = flags_of(self, state, tensor);
    if (flags < 0) return -1;
    if (!exchange_key(self, tensor, flags, &key, data)) return find_by_attributes(self, state, tensor, flags);
    int64_t number = find_by_key(self, &key);
    if (number >= 0) return number;
    number = find_by_attributes(self, state, tensor, flags);
    return self->has_complex == had_complex ? insert(self, &key, number) : number; /* otherwise `flags` are not known */
}
