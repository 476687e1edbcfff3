/* Measures what ops return, as `OpValues.ended` does, where all captures want every output and its usual statistics. */

#include "_op_mode.h"

#define NAME(name) self->state->names[NAME_##name]

/* Appends a number. Returns -1 with an exception. */
static int append_number(PyObject *list, int64_t value) {
    PyObject *number = PyLong_FromLongLong(value);
    int failed = number == NULL ? -1 : PyList_Append(list, number);
    Py_XDECREF(number);
    return failed;
}

/* Remembers a tensor with its version and its measurement, for the module that returns it too. No cycle of references
   leads through what is made here, and the collector would visit thousands in each step. */
static int remember(OpMode *self, PyObject *tensor, PyObject *found) {
    if (self->where == Py_None || (PyObject *)Py_TYPE(tensor) != self->held[TENSOR]) return 0;
    PyObject *version = PyObject_GetAttr(tensor, NAME(VERSION));
    if (version == NULL) return forgive(); /* torch counts none in inference mode */
    PyObject *ref = PyWeakref_NewRef(tensor, NULL), *key = PyLong_FromVoidPtr(tensor);
    PyObject *known = ref == NULL || key == NULL ? NULL : PyTuple_Pack(3, ref, version, found);
    int failed = known == NULL ? -1 : PyDict_SetItem(self->measured[LATEST], key, known);
    if (!failed) {
        PyObject_GC_UnTrack(ref);
        PyObject_GC_UnTrack(known);
    }
    Py_DECREF(version);
    Py_XDECREF(ref);
    Py_XDECREF(key);
    Py_XDECREF(known);
    return failed;
}

/* Adds a measurement, with what `MeasuredOps` says of it. */
static int add_measurement(OpMode *self, PyObject *tensor, PyObject *slot, const Run *run, PyObject *found, int64_t start_ns) {
    PyObject *sites = Py_NewRef(self->measured[SITES]), *intervals = Py_NewRef(self->measured[INTERVALS]);
    PyObject *start = PyLong_FromLongLong(start_ns);
    int failed = start == NULL || PyObject_SetAttr(found, NAME(START_NS), start) < 0 || PyList_Append(sites, found) < 0 ||
                 append_number(sites, run->event[EVENT_OP]) < 0 || PyList_Append(sites, slot) < 0 ||
                 append_number(sites, run->mask) < 0 || remember(self, tensor, found) < 0 ||
                 PyList_Append(intervals, start) < 0 || append_number(intervals, clock_ns(self)) < 0;
    Py_XDECREF(start);
    Py_DECREF(sites);
    Py_DECREF(intervals);
    return failed ? -1 : 0;
}

/* Leaves a tensor to Python, which answers for its errors itself. */
static int measure_in_python(OpMode *self, PyObject *tensor, PyObject *slot, const Run *run, int is_initialized) {
    PyObject *done = PyObject_CallMethod(self->measured[VALUES], "measure_output", "OLOOLi", tensor,
                                         (long long)run->event[EVENT_OP], slot, run->of->schema,
                                         run->mask, is_initialized);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static int measure_output(OpMode *self, PyObject *tensor, PyObject *slot, Run *run) {
    if (run->of->is_uninitialized && PyUnicode_GetLength(slot) == 0) return measure_in_python(self, tensor, slot, run, 0);
    int64_t start_ns = clock_ns(self);
    PyObject *measure = Py_NewRef(self->measured[MEASURE]); /* another thread may put another one there */
    PyObject *found = PyObject_CallFunctionObjArgs(measure, tensor, NULL);
    Py_DECREF(measure);
    int failed = found == NULL ? forgive() : 0; /* Python notes why it cannot be measured */
    if (!failed && (found == NULL || found == Py_None)) failed = measure_in_python(self, tensor, slot, run, 1);
    else if (!failed) failed = add_measurement(self, tensor, slot, run, found, start_ns);
    Py_XDECREF(found);
    return failed;
}

int measure_outputs(OpMode *self, Run *run, PyObject *output) {
    if (run->of->hides_writes) PyDict_Clear(self->measured[LATEST]);
    run->mask = self->usual_mask; /* another thread may change it meanwhile */
    if (run->of->is_view || run->of->returns_early || run->mask == 0) return 0;
    if (visit_tensors(self, output, self->state->no_text, run, measure_output) == 0) return 0;
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return -1;
    PyObject *error = take_exception();
    PyObject *done = PyObject_CallMethod(self->measured[VALUES], "fail", "O", error);
    Py_DECREF(error);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}
