/* Measures what ops return, as `OpValues.ended` does, where all captures want every output and its usual statistics. */

#include "_op_mode.h"

#define NAME(name) self->state->names[NAME_##name]

/* Remembers a tensor with its version, its row and when it was measured, for the module that returns it too. No cycle of
   references leads through what is made here, and the collector would visit thousands in each step. */
static int remember(OpMode *self, PyObject *tensor, PyObject *row, int64_t start_ns) {
    if (self->where == Py_None || (PyObject *)Py_TYPE(tensor) != self->held[TENSOR]) return 0;
    PyObject *version = PyObject_GetAttr(tensor, NAME(VERSION));
    if (version == NULL) return forgive(); /* torch counts none in inference mode */
    PyObject *ref = PyWeakref_NewRef(tensor, NULL), *key = PyLong_FromVoidPtr(tensor), *start = PyLong_FromLongLong(start_ns);
    PyObject *known = ref == NULL || key == NULL || start == NULL ? NULL : PyTuple_Pack(4, ref, version, row, start);
    int failed = known == NULL ? -1 : PyDict_SetItem(self->measured[LATEST], key, known);
    if (!failed) {
        PyObject_GC_UnTrack(ref);
        PyObject_GC_UnTrack(known);
    }
    Py_DECREF(version);
    Py_XDECREF(ref);
    Py_XDECREF(key);
    Py_XDECREF(start);
    Py_XDECREF(known);
    return failed;
}

/* Adds a measurement. */
static int add_measurement(OpMode *self, PyObject *tensor, PyObject *slot, const Run *run, PyObject *row, int64_t start_ns) {
    const TensorApi *api = self->state->api;
    int64_t numbers[MEASURED_WIDTH] = {PyLong_AsLongLong(row), run->event[EVENT_OP], run->mask};
    if (api->number_output((TensorIds *)self->held[IDS], tensor, slot, &numbers[MEASURED_GEOMETRY], &numbers[MEASURED_SLOT]) < 0 ||
        remember(self, tensor, row, start_ns) < 0)
        return -1;
    numbers[MEASURED_START_NS] = start_ns;
    numbers[MEASURED_END_NS] = clock_ns(self);
    return PyErr_Occurred() ? -1 : append_numbers(self, &self->measurements, numbers, MEASURED_WIDTH);
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
    PyObject *found = PyObject_CallFunctionObjArgs(self->measured[MEASURE], tensor, NULL);
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
