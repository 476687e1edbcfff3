/* Finds where an op runs: in which call, in which backward, for which node. What is rare is left to mode.py. */

#include "_op_mode.h"

#define NAME(name) self->state->names[NAME_##name]
#define CALL(function) PyObject_CallNoArgs(self->held[function])

/* Returns an attribute as a number; -1 with an exception if it is none. */
static int64_t number_of(PyObject *object, PyObject *name) { return to_int64(PyObject_GetAttr(object, name)); }

static int is_none(PyObject *object, PyObject *name) {
    PyObject *value = PyObject_GetAttr(object, name);
    Py_XDECREF(value);
    return value == NULL ? -1 : value == Py_None;
}

static int is_true(PyObject *object, PyObject *name) { return to_truth(PyObject_GetAttr(object, name)); }

/* ---- Modes of autograd. */

static int read_flags(OpMode *self, int64_t *flags) {
    int has_grad = to_truth(CALL(IS_GRAD_ENABLED));
    *flags = 0;
    if (has_grad <= 0) return has_grad;
    PyObject *hooks = PyObject_CallFunctionObjArgs(self->held[SAVED_TENSORS_HOOKS], Py_True, NULL);
    if (hooks == NULL) return -1;
    Py_DECREF(hooks);
    *flags = hooks == Py_None ? GRAD_MODE : GRAD_MODE | PACKS;
    return 0;
}

/* ---- In a module call. */

static int64_t last_context(OpMode *self, PyObject *log) {
    PyObject *contexts = PyObject_GetAttr(log, NAME(CONTEXTS));
    Py_ssize_t size = contexts == NULL ? -1 : PyList_Size(contexts);
    Py_XDECREF(contexts);
    return size < 0 ? -2 : size - 1;
}

/* Returns whether the set of the functions that were seen to run ops in a context has this one; -1 with an exception. A
   set never loses any, and hashing a function's code takes long. Takes the references of both. */
static int is_in_context(OpMode *self, PyObject *context, PyObject *code) {
    if (context == self->context && code == self->code) return Py_DECREF(context), Py_DECREF(code), 1;
    PyObject *codes = PyObject_GetAttr(context, NAME(CODES));
    int is_known = codes == NULL ? -1 : PySet_Contains(codes, code);
    Py_XDECREF(codes);
    PyObject *before = is_known > 0 ? self->context : context, *code_before = is_known > 0 ? self->code : code;
    if (is_known > 0) {
        self->context = context;
        self->code = code;
    }
    Py_XDECREF(before);
    Py_XDECREF(code_before);
    return is_known;
}

/* Returns whether the function that runs the op was seen to run ops in this context; -1 with an exception. */
static int is_known_code(OpMode *self, PyObject *log, PyFrameObject *frame) {
    PyObject *context = PyObject_GetAttr(log, NAME(CONTEXT));
    int is_known = context == NULL ? -1 : is_in_context(self, context, (PyObject *)PyFrame_GetCode(frame));
    return is_known ? is_known : is_true(log, NAME(PINNED));
}

/* Checks that the call still runs, because hooks miss a KeyboardInterrupt. `where` is owned, and may change. */
static int check_frames(OpMode *self, PyObject *log, PyObject **where, Place *place) {
    PyFrameObject *frame = PyEval_GetFrame(); /* borrowed; NULL on a thread of the engine's own */
    int is_known = frame == NULL ? 1 : is_known_code(self, log, frame);
    if (is_known) return is_known < 0 ? -1 : 0;
    Py_DECREF(*where);
    *where = PyObject_CallMethodObjArgs((PyObject *)self, NAME(CHECK_FRAMES), log, frame, NULL);
    if (*where == NULL) return -1;
    place->at = last_context(self, log);
    return place->at < -1 ? -1 : 0;
}

/* ---- Elsewhere. */

/* Answers in Python. `where` and `backward` are owned. */
static int locate_in_python(OpMode *self, PyObject *log, int64_t task, Place *place, PyObject **where,
                            PyObject **backward) {
    PyObject *number = PyLong_FromLongLong(task), *flags = PyLong_FromLongLong(place->flags), *found = NULL;
    if (number != NULL && flags != NULL)
        found = PyObject_CallMethodObjArgs((PyObject *)self, NAME(LOCATE_ELSEWHERE), log, number, flags, NULL);
    Py_XDECREF(number);
    Py_XDECREF(flags);
    long long node, more;
    PyObject *found_where, *found_backward;
    int is_read = found != NULL && PyArg_ParseTuple(found, "OOLL", &found_where, &found_backward, &node, &more);
    if (is_read) {
        *where = Py_NewRef(found_where);
        *backward = Py_NewRef(found_backward);
        place->node = node;
        place->flags |= more;
    }
    Py_XDECREF(found);
    return is_read ? 0 : -1;
}

/* Returns 1 if the engine runs a node of a known backward for which nothing is unusual; 0 otherwise, -1 with an
   exception. */
static int is_usual(OpMode *self, PyObject *log, int64_t task, const Place *place) {
    PyObject *backward = self->task_backward, *maker = self->maker;
    if (task != self->task || backward == NULL || backward == Py_None || maker == NULL || maker == Py_None) return 0;
    int is_usual = is_none(log, NAME(HOOKED));
    if (is_usual > 0) is_usual = is_none(backward, NAME(INSIDE));
    if (is_usual > 0 && place->flags & GRAD_MODE) is_usual = is_true(backward, NAME(CREATE_GRAPH));
    if (is_usual <= 0) return is_usual;
    int begun = may_be_stepping(self->held[OPTIMIZER_STARTS]);
    return begun < 0 ? -1 : !begun;
}

/* Returns the flag for whether the engine sums gradients behind the node; 0 if that is not watched, -1 with an
   exception. */
static int flag_of_adding(OpMode *self, PyObject *backward, uint64_t number) {
    int marks_additions = is_true(backward, NAME(MARKS_ADDITIONS));
    if (marks_additions <= 0) return marks_additions;
    int64_t adding_for = number_of(backward, NAME(ADDING_FOR));
    if (adding_for == -1 && PyErr_Occurred()) return -1;
    return adding_for == (int64_t)number ? ADDING : NOT_ADDING;
}

/* Reads the node that the engine runs. Returns 1, 0 if there is none, or -1 with an exception. */
static int read_node(OpMode *self, PyObject *backward, Place *place) {
    PyObject *node = CALL(CURRENT_NODE);
    PyObject *answer = node == NULL || node == Py_None ? NULL : PyObject_CallMethodObjArgs(node, NAME(SEQUENCE_NR), NULL);
    uint64_t number = answer == NULL ? 0 : PyLong_AsUnsignedLongLong(answer);
    PyObject *custom = self->held[CUSTOM_FUNCTION];
    int flags = ACCUMULATES;
    if (answer != NULL && !PyErr_Occurred() && number != UINT64_MAX) {
        place->node = (int64_t)number;
        flags = flag_of_adding(self, backward, number);
        if (flags >= 0 && PyType_Check(custom) && PyObject_TypeCheck(node, (PyTypeObject *)custom)) flags |= CUSTOM_NODE;
    }
    int is_read = PyErr_Occurred() ? -1 : answer != NULL;
    if (is_read > 0) place->flags |= flags;
    Py_XDECREF(answer);
    Py_XDECREF(node);
    return is_read;
}

static int locate_elsewhere(OpMode *self, PyObject *log, int64_t task, Place *place, PyObject **where,
                            PyObject **backward) {
    *where = *backward = NULL;
    if (task < 0) {
        int begun = may_be_stepping(self->held[OPTIMIZER_STARTS]);
        if (begun < 0) return -1;
        if (begun) return locate_in_python(self, log, task, place, where, backward);
        place->flags |= NOT_ADDING;
        *where = Py_NewRef(Py_None);
        *backward = Py_NewRef(Py_None);
        return 0;
    }
    int is_done = is_usual(self, log, task, place);
    if (is_done > 0) {
        *where = Py_NewRef(self->maker);
        *backward = Py_NewRef(self->task_backward);
        is_done = read_node(self, *backward, place);
        if (is_done > 0) return 0;
        Py_CLEAR(*where);
        Py_CLEAR(*backward);
    }
    return is_done < 0 ? -1 : locate_in_python(self, log, task, place, where, backward);
}

/* ---- Both. */

/* Finds `where` and `backward`, owned. */
static int find_place(OpMode *self, PyObject *log, Place *place, PyObject **where, PyObject **backward) {
    *where = *backward = NULL;
    place->node = NO_NODE;
    if (read_flags(self, &place->flags) < 0) return -1;
    int64_t task = to_int64(CALL(GRAPH_TASK_ID));
    if (task == -1 && PyErr_Occurred()) return -1;
    place->at = last_context(self, log);
    if (place->at < -1) return -1;
    PyObject *segment = PyObject_GetAttr(log, NAME(SEGMENT));
    if (segment == NULL) return -1;
    int64_t own_task = number_of(log, NAME(TASK));
    if (own_task == -1 && PyErr_Occurred()) return Py_DECREF(segment), -1;
    if (segment == Py_None || own_task != task) {
        Py_DECREF(segment);
        return locate_elsewhere(self, log, task, place, where, backward);
    }
    place->flags |= NOT_ADDING;
    *where = segment;
    *backward = Py_NewRef(Py_None);
    return check_frames(self, log, where, place);
}

int locate(OpMode *self, PyObject *log, Place *place) {
    PyObject *where, *backward;
    int failed = find_place(self, log, place, &where, &backward);
    if (!failed && (where != self->where || backward != self->backward || log != self->log)) {
        PyObject *done = PyObject_CallMethodObjArgs((PyObject *)self, NAME(START_RUN), where, backward, log, NULL);
        failed = done == NULL ? -1 : 0;
        Py_XDECREF(done);
    }
    Py_XDECREF(where);
    Py_XDECREF(backward);
    return failed;
}
