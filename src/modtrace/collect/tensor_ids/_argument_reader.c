/* Makes a key of an op's arguments without its tensors, as argument_reader.py does, but faster. */

#include "_tensor_ids.h"
#include <stdlib.h>
#include <string.h>

/* What a reader holds: the ids, torch.Tensor, the types of arguments that are kept as they are, and the marks. */
enum { IDS, TENSOR, PLAIN, TENSOR_MARK, FLOAT_MARK, TRUTH_MARK, HELD };

typedef struct {
    PyObject_HEAD
    PyObject *held[HELD]; /* all owned */
} ArgumentReader;

/* Python objects that become a tuple; most ops have few. */
typedef struct {
    PyObject **items; /* owned, each of them too */
    Py_ssize_t count, capacity;
    PyObject *few[32];
} Items;

static void start_items(Items *self) {
    self->items = self->few;
    self->count = 0;
    self->capacity = sizeof self->few / sizeof *self->few;
}

static int grow(Items *self) {
    size_t size = (size_t)self->capacity * sizeof *self->items;
    PyObject **items = self->items == self->few ? malloc(2 * size) : realloc(self->items, 2 * size);
    if (items == NULL) return PyErr_NoMemory(), -1;
    if (self->items == self->few) memcpy(items, self->few, size);
    self->items = items;
    self->capacity *= 2;
    return 0;
}

/* Appends an item and takes its reference; NULL stands for an exception. */
static int append_owned(Items *self, PyObject *item) {
    if (item == NULL) return -1;
    if (self->count == self->capacity && grow(self) < 0) return Py_DECREF(item), -1;
    self->items[self->count++] = item;
    return 0;
}

static int append(Items *self, PyObject *item) {
    Py_INCREF(item);
    return append_owned(self, item);
}

static void drop_items(Items *self) {
    for (Py_ssize_t at = 0; at < self->count; at++) Py_DECREF(self->items[at]);
    if (self->items != self->few) free(self->items);
}

/* Returns a new tuple of the items, which are released in every case; NULL if `failed`. */
static PyObject *finish_items(Items *self, int failed) {
    PyObject *tuple = failed ? NULL : PyTuple_New(self->count);
    for (Py_ssize_t at = 0; tuple != NULL && at < self->count; at++) {
        Py_INCREF(self->items[at]);
        PyTuple_SetItem(tuple, at, self->items[at]);
    }
    drop_items(self);
    return tuple;
}

/* ---- One argument. */

static int read_argument(ArgumentReader *self, PyObject *arg, Items *into);

static int append_tensor(ArgumentReader *self, PyObject *tensor, Items *into) {
    TensorIds *ids = (TensorIds *)self->held[IDS];
    if (read_tensor(ids, tensor) < 0) {
        if (!PyErr_ExceptionMatches(PyExc_Exception)) return -1; /* not a KeyboardInterrupt */
        PyObject *error = take_exception(), *slot = PyUnicode_FromString("");
        int noted = slot == NULL ? -1 : note_unreadable(ids, tensor, -1, slot, error);
        Py_DECREF(error);
        Py_XDECREF(slot);
        if (noted < 0) return -1;
    }
    return append(into, self->held[TENSOR_MARK]);
}

/* Appends a float with a mark, since 1.0 equals 1. NaN is not equal to itself, and 0.0 equals -0.0. */
static int append_float(ArgumentReader *self, PyObject *arg, Items *into) {
    double value = PyFloat_AsDouble(arg);
    if (append(into, self->held[FLOAT_MARK]) < 0) return -1;
    if (value == value && value != 0.0) return append(into, arg);
    return append_owned(into, PyObject_Repr(arg));
}

static PyObject *read_sequence(ArgumentReader *self, PyObject *sequence) {
    Items inner;
    start_items(&inner);
    int failed = 0;
    for (Py_ssize_t at = 0; !failed && at < PySequence_Size(sequence); at++) {
        PyObject *item = PySequence_GetItem(sequence, at);
        failed = item == NULL || read_argument(self, item, &inner) < 0;
        Py_XDECREF(item);
    }
    return finish_items(&inner, failed);
}

static int append_sequence(ArgumentReader *self, PyObject *sequence, Items *into) {
    if (Py_EnterRecursiveCall(" in the arguments of an op")) return -1;
    PyObject *tuple = read_sequence(self, sequence);
    Py_LeaveRecursiveCall();
    return append_owned(into, tuple);
}

static int append_dict(ArgumentReader *self, PyObject *dict, Items *into) {
    PyObject *pairs = PyDict_Items(dict);
    int failed = pairs == NULL ? -1 : append_sequence(self, pairs, into);
    Py_XDECREF(pairs);
    return failed;
}

static int append_class(PyObject *arg, Items *into) {
    if (PyComplex_CheckExact(arg)) return append_owned(into, PyObject_Repr(arg)); /* 1 + 0j equals 1 */
    PyObject *name = PyObject_GetAttrString((PyObject *)Py_TYPE(arg), "__name__");
    if (name == NULL) return -1;
    PyObject *text = PyUnicode_FromFormat("<%U>", name);
    Py_DECREF(name);
    return append_owned(into, text);
}

static int append_other(ArgumentReader *self, PyObject *arg, Items *into) {
    int is_plain = PySet_Contains(self->held[PLAIN], (PyObject *)Py_TYPE(arg));
    if (is_plain < 0) return -1;
    if (is_plain) return append(into, arg);
    if (PyDict_Check(arg)) return append_dict(self, arg, into);
    return append_class(arg, into);
}

static int read_argument(ArgumentReader *self, PyObject *arg, Items *into) {
    if (PyObject_TypeCheck(arg, (PyTypeObject *)self->held[TENSOR])) return append_tensor(self, arg, into);
    if (arg == Py_None || PyLong_CheckExact(arg)) return append(into, arg);
    if (PyFloat_CheckExact(arg)) return append_float(self, arg, into);
    if (PyBool_Check(arg)) return append(into, self->held[TRUTH_MARK]) < 0 ? -1 : append(into, arg);
    if (PyList_Check(arg) || PyTuple_Check(arg)) return append_sequence(self, arg, into);
    return append_other(self, arg, into);
}

/* ---- All arguments. */

static int read_by_position(ArgumentReader *self, PyObject *args, Items *into) {
    for (Py_ssize_t at = 0, size = PyTuple_Size(args); at < size; at++)
        if (read_argument(self, PyTuple_GetItem(args, at), into) < 0) return -1;
    return 0;
}

static int read_by_name(ArgumentReader *self, PyObject *kwargs, Items *into) {
    PyObject *name, *arg;
    Py_ssize_t at = 0;
    while (PyDict_Next(kwargs, &at, &name, &arg))
        if (append(into, name) < 0 || read_argument(self, arg, into) < 0) return -1;
    return 0;
}

PyObject *read_arguments(PyObject *reader, PyObject *schema, PyObject *args, PyObject *kwargs) {
    ArgumentReader *self = (ArgumentReader *)reader;
    Items found;
    start_items(&found);
    int failed = append(&found, schema) < 0 || append_owned(&found, PyLong_FromSsize_t(PyTuple_Size(args))) < 0 ||
                 read_by_position(self, args, &found) < 0 || (kwargs != NULL && read_by_name(self, kwargs, &found) < 0);
    return finish_items(&found, failed);
}

static PyObject *reader_read(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 3 || !PyTuple_Check(args[1]) || (args[2] != Py_None && !PyDict_Check(args[2]))) {
        PyErr_SetString(PyExc_TypeError, "ArgumentReader.read() takes a number, a tuple, and a dict or None");
        return NULL;
    }
    return read_arguments(self, args[0], args[1], args[2] == Py_None ? NULL : args[2]);
}

/* ---- The type. */

static PyObject *reader_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"ids", "tensor", "plain", "marks", NULL};
    PyObject *held[HELD];
    State *state = PyType_GetModuleState(type);
    if (state == NULL ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!O!(OOO):ArgumentReader", names, state->ids_type, &held[IDS],
                                     &PyType_Type, &held[TENSOR], &PyFrozenSet_Type, &held[PLAIN], &held[TENSOR_MARK],
                                     &held[FLOAT_MARK], &held[TRUTH_MARK]))
        return NULL;
    ArgumentReader *self = (ArgumentReader *)PyType_GenericAlloc(type, 0);
    if (self == NULL) return NULL;
    for (int at = 0; at < HELD; at++) {
        Py_INCREF(held[at]);
        self->held[at] = held[at];
    }
    return (PyObject *)self;
}

static int reader_traverse(PyObject *object, visitproc visit, void *arg) {
    ArgumentReader *self = (ArgumentReader *)object;
    Py_VISIT(Py_TYPE(object));
    for (int at = 0; at < HELD; at++) Py_VISIT(self->held[at]);
    return 0;
}

static void reader_dealloc(PyObject *object) {
    ArgumentReader *self = (ArgumentReader *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    for (int at = 0; at < HELD; at++) Py_XDECREF(self->held[at]);
    PyObject_GC_Del(object);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"read", (PyCFunction)(void (*)(void))reader_read, METH_FASTCALL,
     "read(schema, args, kwargs): records what an op reads; returns a key of its arguments."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "ArgumentReader(ids, tensor, plain, marks): reads the arguments of ops."},
    {Py_tp_new, reader_new},
    {Py_tp_dealloc, reader_dealloc},
    {Py_tp_traverse, reader_traverse},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec reader_spec = {"modtrace.collect.tensor_ids._tensor_ids.ArgumentReader", sizeof(ArgumentReader), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};
