/* The module `_op_mode` and its type: what Python sets up, calls and reads. */

#include "_op_mode.h"
#include <stddef.h>
#include <stdlib.h>
#include <structmember.h>

static const char *const SPELLED[OP_NAMES] = {
    [NAME_ADD_SCHEMA] = "_add_schema",
    [NAME_ADDING_FOR] = "adding_for",
    [NAME_CHECK_FRAMES] = "_check_frames",
    [NAME_CODES] = "codes",
    [NAME_CONTEXT] = "context",
    [NAME_CONTEXTS] = "contexts",
    [NAME_CREATE_GRAPH] = "create_graph",
    [NAME_CURRENT] = "current",
    [NAME_FAIL] = "fail",
    [NAME_HOOKED] = "hooked",
    [NAME_INSIDE] = "inside",
    [NAME_IS_OURS] = "is_ours",
    [NAME_LOCATE_ELSEWHERE] = "_locate_elsewhere",
    [NAME_LOG] = "log",
    [NAME_MARKS_ADDITIONS] = "marks_additions",
    [NAME_NAME] = "name",
    [NAME_ONLY_WRITTEN] = "only_written",
    [NAME_PINNED] = "pinned",
    [NAME_RAISED] = "_raised",
    [NAME_RECOUNT] = "_recount",
    [NAME_REPORT_LEAVES] = "report_leaves",
    [NAME_SEGMENT] = "segment",
    [NAME_SEQUENCE_NR] = "_sequence_nr",
    [NAME_START_RUN] = "_start_run",
    [NAME_TASK] = "task",
    [NAME_UNTYPED_STORAGE] = "untyped_storage",
    [NAME_VERSION] = "_version",
    [NAME_VERSIONS] = "_versions_of_written",
};

/* ---- Making one. */

/* Everything that a mode owns, but for its operators and its events. */
static const size_t OWNED[] = {
    offsetof(OpMode, where), offsetof(OpMode, backward), offsetof(OpMode, log), offsetof(OpMode, task_backward),
    offsetof(OpMode, maker), offsetof(OpMode, context), offsetof(OpMode, code),
};

enum { OWNED_COUNT = sizeof OWNED / sizeof *OWNED };

static PyObject **owned(PyObject *object, int at) { return (PyObject **)((char *)object + OWNED[at]); }

static PyObject *mode_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs)) {
    OpMode *self = (OpMode *)PyType_GenericAlloc(type, 0); /* all of it is 0 */
    if (self != NULL) self->task = self->usual_mask = -1;
    return (PyObject *)self;
}

/* set_up(state, held): receives the state of this module, and what `HELD` lists. */
static PyObject *mode_set_up(PyObject *object, PyObject *args) {
    OpMode *self = (OpMode *)object;
    PyObject *capsule, *held;
    if (!PyArg_ParseTuple(args, "OO!", &capsule, &PyTuple_Type, &held)) return NULL;
    OpState *state = PyCapsule_GetPointer(capsule, "modtrace.collect.ops._op_mode.state");
    if (state == NULL) return NULL;
    if (PyTuple_Size(held) != HELD || !PyObject_TypeCheck(PyTuple_GetItem(held, IDS), state->api->ids_type) ||
        !PyObject_TypeCheck(PyTuple_GetItem(held, READER), state->api->reader_type) ||
        !PyDict_Check(PyTuple_GetItem(held, NUMBERS)) || !PyDict_Check(PyTuple_GetItem(held, OPTIMIZER_STARTS)) || !PyList_Check(PyTuple_GetItem(held, BEFORE)) ||
        !PyList_Check(PyTuple_GetItem(held, AFTER)) || !PyType_Check(PyTuple_GetItem(held, TENSOR)))
        return PyErr_Format(PyExc_TypeError, "set_up() takes %d objects of certain types", HELD);
    self->state = state;
    for (int at = 0; at < HELD; at++) {
        PyObject *before = self->held[at];
        self->held[at] = Py_NewRef(PyTuple_GetItem(held, at));
        Py_XDECREF(before);
    }
    Py_RETURN_NONE;
}

/* measure_with(...): receives what `MEASURED` lists. */
static PyObject *mode_measure_with(PyObject *object, PyObject *const *given, Py_ssize_t count) {
    OpMode *self = (OpMode *)object;
    if (count != MEASURED || !PyDict_Check(given[LATEST]))
        return PyErr_Format(PyExc_TypeError, "measure_with() takes %d objects of certain types", MEASURED);
    for (int at = 0; at < MEASURED; at++) {
        PyObject *before = self->measured[at];
        self->measured[at] = Py_NewRef(given[at]);
        Py_XDECREF(before);
    }
    Py_RETURN_NONE;
}

static int mode_traverse(PyObject *object, visitproc visit, void *arg) {
    OpMode *self = (OpMode *)object;
    Py_VISIT(Py_TYPE(object));
    for (int at = 0; at < HELD; at++) Py_VISIT(self->held[at]);
    for (int at = 0; at < MEASURED; at++) Py_VISIT(self->measured[at]);
    for (int at = 0; at < OWNED_COUNT; at++) Py_VISIT(*owned(object, at));
    for (size_t at = 0; at < self->op_capacity; at++)
        if (self->ops[at] != NULL) {
            Py_VISIT(self->ops[at]->func);
            Py_VISIT(self->ops[at]->schema);
            Py_VISIT(self->ops[at]->call);
        }
    return 0;
}

/* An op that still comes runs unseen. */
static int mode_clear(PyObject *object) {
    OpMode *self = (OpMode *)object;
    for (int at = 0; at < HELD; at++) Py_CLEAR(self->held[at]);
    for (int at = 0; at < MEASURED; at++) Py_CLEAR(self->measured[at]);
    for (int at = 0; at < OWNED_COUNT; at++) Py_CLEAR(*owned(object, at));
    return 0;
}

static void mode_dealloc(PyObject *object) {
    OpMode *self = (OpMode *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    mode_clear(object);
    drop_ops(self);
    free(self->events.items);
    free(self->measurements.items);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

/* ---- What Python calls. */

static int is_set_up(const OpMode *self) {
    if (self->held[IDS] != NULL) return 1;
    PyErr_SetString(PyExc_RuntimeError, "the mode has not been set up");
    return 0;
}

static PyObject *mode_schema_of(PyObject *self, PyObject *func) {
    const Op *op = is_set_up((OpMode *)self) ? find_op((OpMode *)self, func) : NULL;
    return op == NULL ? NULL : Py_NewRef(op->schema);
}

static PyObject *mode_locate(PyObject *self, PyObject *log) {
    Place place;
    if (!is_set_up((OpMode *)self) || locate((OpMode *)self, log, &place) < 0) return NULL;
    return Py_BuildValue("LLL", (long long)place.at, (long long)place.node, (long long)place.flags);
}

static PyObject *mode_append(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    int64_t event[EVENT_WIDTH];
    if (!is_set_up((OpMode *)self)) return NULL;
    if (count != EVENT_WIDTH) return PyErr_Format(PyExc_TypeError, "append_event() takes %d numbers", EVENT_WIDTH);
    for (int at = 0; at < EVENT_WIDTH; at++) event[at] = PyLong_AsLongLong(given[at]);
    if (PyErr_Occurred() || append_numbers((OpMode *)self, &((OpMode *)self)->events, event, EVENT_WIDTH) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *take_column(OpMode *self, Column *column) {
    if (!is_set_up(self)) return NULL;
    Column taken = *column; /* what another thread appends while the array is made comes next */
    *column = (Column){NULL, 0, 0};
    PyObject *array = self->state->api->to_array(&taken);
    if (array == NULL && column->items == NULL) *column = taken;
    else free(taken.items);
    return array;
}

static PyObject *mode_take_events(PyObject *self, PyObject *Py_UNUSED(none)) {
    return take_column((OpMode *)self, &((OpMode *)self)->events);
}

static PyObject *mode_take_measurements(PyObject *self, PyObject *Py_UNUSED(none)) {
    return take_column((OpMode *)self, &((OpMode *)self)->measurements);
}

static PyObject *mode_get_event_count(PyObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromSsize_t(((OpMode *)self)->events.count / EVENT_WIDTH);
}

#define FAST(function) (PyCFunction)(void (*)(void))function

static PyMethodDef methods[] = {
    {"__torch_dispatch__", FAST(mode_dispatch), METH_FASTCALL | METH_KEYWORDS,
     "__torch_dispatch__(func, types, args=(), kwargs=None): records an op, and returns what it returns."},
    {"set_up", mode_set_up, METH_VARARGS, "set_up(state, held): receives what runs for every op; see _op_mode.h."},
    {"measure_with", FAST(mode_measure_with), METH_FASTCALL,
     "measure_with(...): receives what measures the outputs of ops; see _op_mode.h."},
    {"schema_of", mode_schema_of, METH_O, "schema_of(func): returns the OpSchema of an operator."},
    {"locate", mode_locate, METH_O,
     "locate(log): records where an op runs; returns the event of the segment, the number of the node, and flags."},
    {"append_event", FAST(mode_append), METH_FASTCALL, "append_event(...): appends the numbers of an op."},
    {"take_events", mode_take_events, METH_NOARGS, "take_events(): returns the numbers of the ops since the last call."},
    {"take_measurements", mode_take_measurements, METH_NOARGS,
     "take_measurements(): returns the numbers of the outputs that were measured here since the last call."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"next", T_LONGLONG, offsetof(OpMode, next), 0, "The number of the next op."},
    {"is_running", T_BOOL, offsetof(OpMode, is_running), 0, "Whether an op has begun and has not been noted yet."},
    {"is_off", T_BOOL, offsetof(OpMode, is_off), 0, "Whether ops are only passed on."},
    {"usual_mask", T_LONGLONG, offsetof(OpMode, usual_mask), 0,
     "The captures that want the usual statistics of every output; -1: `OpValues.ended` finds them for each."},
    {"_task", T_LONGLONG, offsetof(OpMode, task), 0, "The graph task that ran last."},
    {"_task_backward", T_OBJECT, offsetof(OpMode, task_backward), 0, "Its backward."},
    {"_maker", T_OBJECT, offsetof(OpMode, maker), 0, "The log of the thread that has made its graph, if it is one."},
    {"_where", T_OBJECT, offsetof(OpMode, where), 0, "Where the last op ran."},
    {"_backward", T_OBJECT, offsetof(OpMode, backward), 0, "The backward of the last op."},
    {"_log", T_OBJECT, offsetof(OpMode, log), 0, "The log of the last op."},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef properties[] = {
    {"event_count", mode_get_event_count, NULL, "The number of ops since they were last taken.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots_of_type[] = {
    {Py_tp_doc, "The base of the dispatch mode: records every op."},
    {Py_tp_new, mode_new},
    {Py_tp_dealloc, mode_dealloc},
    {Py_tp_traverse, mode_traverse},
    {Py_tp_clear, mode_clear},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {Py_tp_getset, properties},
    {0, NULL},
};

static PyType_Spec mode_spec = {"modtrace.collect.ops._op_mode.CompiledOpMode", sizeof(OpMode), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, slots_of_type};

/* ---- The module. */

static int module_exec(PyObject *module) {
    OpState *state = PyModule_GetState(module);
    state->tensor_ids = PyImport_ImportModule("modtrace.collect.tensor_ids._tensor_ids");
    PyObject *capsule = state->tensor_ids == NULL ? NULL : PyObject_GetAttrString(state->tensor_ids, "api");
    state->api = capsule == NULL ? NULL : PyCapsule_GetPointer(capsule, TENSOR_API);
    Py_XDECREF(capsule);
    if (state->api == NULL) return -1;
    if (intern_names(state->names, SPELLED, OP_NAMES) < 0) return -1;
    state->empty = PyTuple_New(0);
    state->no_text = PyUnicode_FromString("");
    PyObject *own = PyCapsule_New(state, "modtrace.collect.ops._op_mode.state", NULL);
    PyObject *type = PyType_FromModuleAndSpec(module, &mode_spec, NULL);
    int failed = state->empty == NULL || state->no_text == NULL || own == NULL || type == NULL ||
                 PyModule_AddObjectRef(module, "state", own) < 0 || PyModule_AddType(module, (PyTypeObject *)type) < 0;
    Py_XDECREF(own);
    Py_XDECREF(type);
    return failed ? -1 : 0;
}

/* Names are in use as long as there is any instance, which holds its type, and so the module. */
static void module_free(void *module) {
    OpState *state = PyModule_GetState(module);
    clear_names(state->names, OP_NAMES);
    Py_CLEAR(state->empty);
    Py_CLEAR(state->no_text);
    Py_CLEAR(state->tensor_ids);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_op_mode", NULL, sizeof(OpState), NULL, slots, NULL, NULL, module_free,
};

PyMODINIT_FUNC PyInit__op_mode(void) { return PyModuleDef_Init(&definition); }
