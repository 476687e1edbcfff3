/* What is known of each operator, found by the address of its Python object. */

#include "_op_mode.h"
#include <stdlib.h>

enum { SMALLEST = 256 };

#define NAME(name) self->state->names[NAME_##name]

static size_t home_of(const OpMode *self, const void *key) {
    uint64_t mixed = ((uint64_t)(uintptr_t)key >> 4) * UINT64_C(0x9E3779B97F4A7C15);
    return (size_t)(mixed >> 32) & (self->op_capacity - 1);
}

/* Returns the slot of an operator, which is NULL if the operator is not there. */
static Op **slot_of(const OpMode *self, const void *key) {
    size_t at = home_of(self, key);
    while (self->ops[at] != NULL && self->ops[at]->func != key) at = (at + 1) & (self->op_capacity - 1);
    return &self->ops[at];
}

static int grow(OpMode *self) {
    Op **before = self->ops;
    size_t capacity = self->op_capacity, wanted = capacity ? 2 * capacity : SMALLEST;
    Op **ops = calloc(wanted, sizeof *ops);
    if (ops == NULL) return PyErr_NoMemory(), -1;
    self->ops = ops;
    self->op_capacity = wanted;
    for (size_t at = 0; at < capacity; at++)
        if (before[at] != NULL) *slot_of(self, before[at]->func) = before[at];
    free(before);
    return 0;
}

static void drop_op(Op *op) {
    for (int at = 0; at < op->written_count; at++) Py_XDECREF(op->written[at].name);
    Py_XDECREF(op->func);
    Py_XDECREF(op->schema);
    Py_XDECREF(op->call);
    Py_XDECREF(op->index);
    free(op->written);
    free(op);
}

void drop_ops(OpMode *self) {
    Op **ops = self->ops;
    size_t capacity = self->op_capacity;
    self->ops = NULL;
    self->op_capacity = self->op_count = 0;
    for (size_t at = 0; at < capacity; at++)
        if (ops[at] != NULL) drop_op(ops[at]);
    free(ops);
}

/* ---- Reading an `OpSchema`. */

static int read_truth(PyObject *schema, const char *name, int *into) {
    *into = to_truth(PyObject_GetAttrString(schema, name));
    return *into < 0 ? -1 : 0;
}

/* Reads a `WrittenArgument`: its key, which is a position or a name, and its name. */
static int read_written(PyObject *argument, Written *into) {
    PyObject *key, *name;
    if (!PyTuple_Check(argument) || !PyArg_ParseTuple(argument, "OU", &key, &name)) return -1;
    into->at = PyLong_Check(key) ? PyLong_AsSsize_t(key) : -1;
    into->name = name;
    Py_INCREF(name);
    return 0;
}

static int read_all_written(PyObject *schema, Op *op) {
    PyObject *written = PyObject_GetAttrString(schema, "written");
    Py_ssize_t count = written == NULL ? -1 : PyTuple_Size(written);
    if (count > 0 && (op->written = calloc((size_t)count, sizeof *op->written)) == NULL) {
        PyErr_NoMemory();
        count = -1;
    }
    int failed = count < 0;
    for (Py_ssize_t at = 0; !failed && at < count; at++) {
        failed = read_written(PyTuple_GetItem(written, at), &op->written[at]) < 0;
        if (!failed) op->written_count++;
    }
    Py_XDECREF(written);
    return failed ? -1 : 0;
}

static int read_schema(PyObject *schema, PyObject *func, Op *op) {
    Py_INCREF(func);
    op->func = func;
    Py_INCREF(schema);
    op->schema = schema;
    PyObject *out_names = PyObject_GetAttrString(schema, "out_names");
    op->has_out = to_truth(out_names);
    op->call = PyObject_GetAttrString(schema, "call");
    op->index = op->call == NULL ? NULL : PyObject_GetAttrString(schema, "index");
    return op->has_out < 0 || op->index == NULL || read_truth(schema, "may_be_ours", &op->may_be_ours) < 0 ||
                   read_truth(schema, "is_collective", &op->is_collective) < 0 ||
                   read_truth(schema, "is_foreach", &op->is_foreach) < 0 ||
                   read_truth(schema, "hides_writes", &op->hides_writes) < 0 ||
                   read_truth(schema, "is_view", &op->is_view) < 0 ||
                   read_truth(schema, "is_uninitialized", &op->is_uninitialized) < 0 ||
                   read_truth(schema, "returns_early", &op->returns_early) < 0 ||
                   read_truth(schema, "is_changing_view", &op->is_changing_view) < 0 || read_all_written(schema, op) < 0
               ? -1
               : 0;
}

static Op *add_op(OpMode *self, PyObject *func) {
    PyObject *schema = PyObject_CallMethodObjArgs((PyObject *)self, NAME(ADD_SCHEMA), func, NULL);
    if (schema == NULL) return NULL;
    Op *op = calloc(1, sizeof *op);
    int failed = op == NULL || read_schema(schema, func, op) < 0;
    if (op == NULL) PyErr_NoMemory();
    Py_DECREF(schema);
    if (!failed && 2 * self->op_count >= self->op_capacity) failed = grow(self) < 0;
    if (failed) return op == NULL ? NULL : (drop_op(op), NULL);
    Op **slot = slot_of(self, func);
    if (*slot != NULL) return drop_op(op), *slot; /* another thread was faster */
    self->op_count++;
    return *slot = op;
}

const Op *find_op(OpMode *self, PyObject *func) {
    const Op *known = self->op_capacity ? *slot_of(self, func) : NULL;
    return known != NULL ? known : add_op(self, func);
}
