/* What both recording and measuring an op need: the tensors in what it returns or is given, the clock, errors, columns. */

#include "_op_mode.h"
#include <string.h>

int forgive(void) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return -1;
    PyErr_Clear();
    return 0;
}

int64_t clock_ns(OpMode *self) { return read_clock(self->held[CLOCK]); }

int append_numbers(OpMode *self, Column *column, const int64_t *numbers, int width) {
    if (self->state->api->reserve(column, width) < 0) return -1;
    memcpy(column->items + column->count, numbers, (size_t)width * sizeof *numbers);
    column->count += width;
    return 0;
}

static int is_tensor(const OpMode *self, PyObject *value) {
    return PyObject_TypeCheck(value, (PyTypeObject *)self->held[TENSOR]);
}

/* Visits the tensors in a part. Takes the references of its slot and of the part. */
static int visit_part(OpMode *self, PyObject *part, PyObject *slot, Run *run, Visit visit) {
    int failed = slot == NULL || part == NULL ? -1 : 0;
    if (!failed && (failed = Py_EnterRecursiveCall(" in the output of an op")) == 0) {
        failed = visit_tensors(self, part, slot, run, visit);
        Py_LeaveRecursiveCall();
    }
    Py_XDECREF(part);
    Py_XDECREF(slot);
    return failed;
}

static int visit_dict(OpMode *self, PyObject *dict, PyObject *slot, Run *run, Visit visit) {
    PyObject *pairs = PyDict_Items(dict);
    int failed = pairs == NULL ? -1 : 0;
    for (Py_ssize_t at = 0; !failed && at < PyList_Size(pairs); at++) {
        PyObject *name, *item;
        if (!PyArg_ParseTuple(PyList_GetItem(pairs, at), "OO", &name, &item)) failed = -1;
        else failed = visit_part(self, Py_NewRef(item), PyUnicode_FromFormat("%U[%R]", slot, name), run, visit);
    }
    Py_XDECREF(pairs);
    return failed;
}

int visit_tensors(OpMode *self, PyObject *value, PyObject *slot, Run *run, Visit visit) {
    if (is_tensor(self, value)) return visit(self, value, slot, run);
    if (PyDict_Check(value)) return visit_dict(self, value, slot, run, visit);
    if (!PyList_Check(value) && !PyTuple_Check(value)) return 0;
    Py_ssize_t size = PySequence_Size(value); /* a subclass may raise */
    for (Py_ssize_t at = 0; at < size; at++) {
        PyObject *text = PyUnicode_FromFormat("%U[%zd]", slot, at);
        if (visit_part(self, PySequence_GetItem(value, at), text, run, visit) < 0) return -1;
    }
    return size < 0 ? -1 : 0;
}

