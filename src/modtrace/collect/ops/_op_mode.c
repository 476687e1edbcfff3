/* The base of the dispatch mode in mode.py: what runs for every op, from its arguments to its event.

   An op runs any code: `call` releases the GIL, and hooks, kernels in Python and other threads may run ops of their own
   meanwhile. So nothing that they can move is held across it. */

#include "_op_mode.h"

#define NAME(name) self->state->names[NAME_##name]
#define TENSORS(self) ((TensorIds *)(self)->held[IDS])
#define API(self) (self)->state->api

/* ---- Errors of our own. */

/* Reports the set exception, and ends recording. Leaves set what is no Exception, and returns -1. */
static int report(OpMode *self, const Op *op) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return -1;
    PyObject *error = take_exception();
    PyObject *name = PyObject_GetAttr(op->schema, NAME(NAME));
    PyObject *where = name == NULL ? NULL : PyUnicode_FromFormat("the op %U", name), *done = NULL;
    if (where != NULL) done = PyObject_CallMethodObjArgs((PyObject *)self, NAME(FAIL), error, where, NULL);
    Py_DECREF(error);
    Py_XDECREF(name);
    Py_XDECREF(where);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* ---- The tensors of an output. */

static int make(OpMode *self, PyObject *tensor, PyObject *slot, Run *run) {
    PyObject *given = run->of->is_changing_view ? self->state->empty : run->args;
    int64_t number = run->event[EVENT_OP];
    if (API(self)->make(TENSORS(self), tensor, number, slot, given) >= 0) return 0;
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return -1;
    PyObject *error = take_exception(); /* it has no storage, or a subclass of the user's raises */
    int failed = API(self)->note_unreadable(TENSORS(self), tensor, number, slot, error);
    Py_DECREF(error);
    return failed;
}

/* ---- Writes. */

/* Records a write. What is unreadable is another tensor every time it is met. */
static int write_to(OpMode *self, PyObject *tensor, PyObject *Py_UNUSED(slot), Run *run) {
    return API(self)->write(TENSORS(self), tensor, run->event[EVENT_OP]) < 0 ? forgive() : 0;
}

/* Records that a storage may have been resized, but not written to: the op has raised, or changes what a tensor shows. */
static int resize(OpMode *self, PyObject *tensor, PyObject *Py_UNUSED(slot), Run *Py_UNUSED(run)) {
    PyObject *stored = call_method(tensor, NAME(UNTYPED_STORAGE));
    int failed = stored == NULL ? -1 : API(self)->resized(TENSORS(self), stored);
    Py_XDECREF(stored);
    return failed < 0 ? forgive() : 0;
}

/* Returns the argument that an op writes to, borrowed; NULL if it is not given, or with an exception. */
static PyObject *written_argument(const Written *written, const Run *run) {
    if (written->at >= 0 && written->at < PyTuple_Size(run->args)) return PyTuple_GetItem(run->args, written->at);
    return run->kwargs == NULL ? NULL : PyDict_GetItemWithError(run->kwargs, written->name);
}

static int note_writes(OpMode *self, Run *run, int has_raised) {
    Visit visit = has_raised || run->of->is_changing_view ? resize : write_to;
    for (int at = 0; at < run->of->written_count; at++) {
        PyObject *given = written_argument(&run->of->written[at], run);
        if (given == NULL && PyErr_Occurred()) return -1;
        if (given != NULL && visit_tensors(self, given, self->state->no_text, run, visit) < 0) return -1;
    }
    return 0;
}

/* ---- Before an op. */

static PyObject *log_of_thread(OpMode *self) {
    PyObject *log = PyObject_GetAttr(self->held[THREADS], NAME(LOG));
    if (log != NULL || !PyErr_ExceptionMatches(PyExc_AttributeError)) return log;
    PyErr_Clear();
    return PyObject_GetAttr(self->held[LOGS], NAME(CURRENT));
}

/* Calls keepers, each with the op, its schema and one or two objects more. */
static int notify(OpMode *self, int list, Run *run, PyObject *first, PyObject *second) {
    PyObject *keepers = self->held[list];
    if (PyList_Size(keepers) == 0) return 0;
    PyObject *number = PyLong_FromLongLong(run->event[EVENT_OP]);
    int failed = number == NULL ? -1 : 0;
    for (Py_ssize_t at = 0; !failed && at < PyList_Size(keepers); at++) {
        PyObject *keeper = Py_NewRef(PyList_GetItem(keepers, at));
        if (list == AFTER && keeper == self->measured[ENDED] && self->usual_mask >= 0) { /* C stands in for it */
            failed = measure_outputs(self, run, first);
            Py_DECREF(keeper);
            continue;
        }
        PyObject *done = PyObject_CallFunctionObjArgs(keeper, number, run->of->schema, first, second, NULL);
        failed = done == NULL ? -1 : 0;
        Py_XDECREF(done);
        Py_DECREF(keeper);
    }
    Py_XDECREF(number);
    return failed;
}

/* Returns the number of a set of arguments; -1 with an exception. */
static int64_t number_arguments(OpMode *self, const Op *op, PyObject *key) {
    PyObject *known = PyDict_GetItemWithError(self->held[NUMBERS], key);
    if (known != NULL) return PyLong_AsLongLong(known);
    if (PyErr_Occurred()) return -1;
    return to_int64(PyObject_CallFunctionObjArgs(self->held[ADD_ARGUMENTS], op->schema, key, NULL));
}

static int report_leaves(OpMode *self, PyObject *log, const Run *run, PyObject *kwargs) {
    if (PyList_Size(TENSORS(self)->leaves) == 0) return 0;
    PyObject *only_written = run->of->has_out
                                 ? PyObject_CallMethodObjArgs(run->of->schema, NAME(ONLY_WRITTEN), kwargs, NULL)
                                 : Py_NewRef(self->state->empty);
    PyObject *done = NULL;
    if (only_written != NULL)
        done = PyObject_CallMethodObjArgs((PyObject *)self, NAME(REPORT_LEAVES), log, only_written, NULL);
    Py_XDECREF(only_written);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Reads what stands before the op: arguments, location, leaves. Returns -1 with an exception. */
static int read_before(OpMode *self, Run *run, PyObject *log, PyObject *kwargs) {
    int64_t *event = run->event;
    PyObject *key = API(self)->read_arguments(self->held[READER], run->of->index, run->args, run->kwargs);
    if (key == NULL) return -1;
    event[EVENT_ARGUMENTS] = number_arguments(self, run->of, key);
    Py_DECREF(key);
    Place place;
    if (event[EVENT_ARGUMENTS] < 0 || report_leaves(self, log, run, kwargs) < 0 || locate(self, log, &place) < 0 ||
        notify(self, BEFORE, run, run->args, kwargs) < 0)
        return -1;
    event[EVENT_AT] = place.at;
    event[EVENT_NODE] = place.node;
    event[EVENT_FLAGS] = place.flags;
    event[EVENT_SEQUENCE] = to_int64(PyObject_CallNoArgs(self->held[SEQUENCE_NR]));
    if (PyErr_Occurred()) return -1;
    /* What a storage gained since the last op is counted with this one. */
    event[EVENT_USES] = TENSORS(self)->used.count;
    event[EVENT_LIVE_BEFORE] = TENSORS(self)->storages.lowest_bytes;
    if (run->of->is_foreach) {
        run->versions = PyObject_CallMethodObjArgs((PyObject *)self, NAME(VERSIONS), run->of->schema, run->args, kwargs, NULL);
        if (run->versions == NULL) return -1;
    }
    event[EVENT_START_NS] = clock_ns(self);
    return PyErr_Occurred() ? -1 : 0;
}

static int begin(OpMode *self, Run *run) {
    PyObject *log = log_of_thread(self), *kwargs = run->kwargs == NULL ? PyDict_New() : Py_NewRef(run->kwargs);
    int failed = log == NULL || kwargs == NULL ? -1 : read_before(self, run, log, kwargs);
    Py_XDECREF(log);
    Py_XDECREF(kwargs);
    return failed;
}

/* ---- After an op. */

static int finish_event(OpMode *self, Run *run) {
    TensorIds *ids = TENSORS(self);
    run->event[EVENT_TENSORS] = ids->next;
    run->event[EVENT_LIVE_AFTER] = ids->storages.live_bytes;
    run->event[EVENT_ALLOCATED] = API(self)->take_allocated(ids);
    if (append_numbers(self, &self->events, run->event, EVENT_WIDTH) < 0) return -1;
    self->is_running = 0;
    return 0;
}

/* Passes on what an op has raised, if torch may have raised it. Returns -1 with an exception. */
static int pass_on(OpMode *self, const Run *run, PyObject *error) {
    if (error == NULL || !PyErr_GivenExceptionMatches(error, PyExc_RuntimeError)) return 0;
    PyObject *number = PyLong_FromLongLong(run->event[EVENT_OP]), *done = NULL;
    if (number != NULL) done = PyObject_CallMethodObjArgs((PyObject *)self, NAME(RAISED), number, error, NULL);
    Py_XDECREF(number);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Records an op that has raised; its exception is set before and after, unless a KeyboardInterrupt has come. */
static void end_raised(OpMode *self, Run *run) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    run->event[EVENT_END_NS] = clock_ns(self);
    run->event[EVENT_FLAGS] |= RAISED;
    int failed = PyErr_Occurred() || note_writes(self, run, 1) < 0 || finish_event(self, run) < 0 ||
                 pass_on(self, run, value) < 0;
    self->is_running = 0;
    if (!failed || report(self, run->of) == 0) {
        PyErr_Restore(type, value, traceback);
        return;
    }
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
}

static int note_output(OpMode *self, Run *run, PyObject *output) {
    if (run->of->written_count > 0) {
        if (note_writes(self, run, 0) < 0) return -1;
        if (run->versions != NULL) {
            PyObject *done = PyObject_CallMethodObjArgs((PyObject *)self, NAME(RECOUNT), run->versions, NULL);
            Py_XDECREF(done);
            if (done == NULL) return -1;
        }
    } else if (run->of->is_collective && /* it declares no argument that it writes to: that is what it returns */
               visit_tensors(self, output, self->state->no_text, run, write_to) < 0)
        return -1;
    return visit_tensors(self, output, self->state->no_text, run, make);
}

static int end(OpMode *self, Run *run, PyObject *output) {
    run->event[EVENT_END_NS] = clock_ns(self);
    if (PyErr_Occurred() || note_output(self, run, output) < 0 || finish_event(self, run) < 0) return -1;
    return notify(self, AFTER, run, output, NULL);
}

/* ---- An op. */

static PyObject *run_recorded(OpMode *self, Run *run) {
    run->event[EVENT_OP] = self->next++;
    run->event[EVENT_SCHEMA] = PyLong_AsLongLong(run->of->index);
    self->is_running = 1;
    if (begin(self, run) < 0) return report(self, run->of) < 0 ? NULL : PyObject_Call(run->of->call, run->args, run->kwargs);
    PyObject *output = PyObject_Call(run->of->call, run->args, run->kwargs);
    if (output == NULL) end_raised(self, run);
    else if (end(self, run, output) < 0 && report(self, run->of) < 0) Py_CLEAR(output);
    return output;
}

/* Returns whether an op is to be recorded; -1 with an exception. */
static int is_seen(OpMode *self, const Run *run) {
    if (self->is_off) return 0;
    if (!run->of->may_be_ours) return 1;
    int is_ours = to_truth(PyObject_CallMethodObjArgs(run->of->schema, NAME(IS_OURS), run->args, NULL));
    return is_ours < 0 ? -1 : !is_ours;
}

static PyObject *dispatch(OpMode *self, PyObject *func, PyObject *args, PyObject *kwargs) {
    if (kwargs == Py_None || (kwargs != NULL && PyDict_Check(kwargs) && PyDict_Size(kwargs) == 0)) kwargs = NULL;
    if (!PyTuple_Check(args) || (kwargs != NULL && !PyDict_Check(kwargs)))
        return PyErr_Format(PyExc_TypeError, "__torch_dispatch__() takes a function, types, a tuple and a dict");
    if (self->held[IDS] == NULL) return PyObject_Call(func, args, kwargs);
    Run run = {find_op(self, func), args, kwargs, NULL, 0, {0}};
    if (run.of == NULL) return NULL;
    int is_to_be_seen = is_seen(self, &run);
    if (is_to_be_seen < 0) return NULL;
    PyObject *output = is_to_be_seen ? run_recorded(self, &run) : PyObject_Call(run.of->call, args, kwargs);
    Py_XDECREF(run.versions);
    return output;
}

PyObject *mode_dispatch(PyObject *object, PyObject *const *given, Py_ssize_t count, PyObject *names) {
    OpMode *self = (OpMode *)object;
    static const char *const SPELLED[] = {"func", "types", "args", "kwargs"};
    PyObject *values[] = {NULL, NULL, self->state == NULL ? NULL : self->state->empty, NULL};
    if (count > 4) return PyErr_Format(PyExc_TypeError, "__torch_dispatch__() takes 4 arguments");
    for (Py_ssize_t at = 0; at < count; at++) values[at] = given[at];
    for (Py_ssize_t at = 0; names != NULL && at < PyTuple_Size(names); at++)
        for (int name = 0; name < 4; name++)
            if (PyUnicode_CompareWithASCIIString(PyTuple_GetItem(names, at), SPELLED[name]) == 0)
                values[name] = given[count + at];
    if (values[0] == NULL || values[2] == NULL)
        return PyErr_Format(PyExc_TypeError, "__torch_dispatch__() needs a function and its arguments");
    return dispatch(self, values[0], values[2], values[3]);
}
