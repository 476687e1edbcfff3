/* The module `_called` and its types: what torch calls in place of its methods, and what Python reads. */

#include "_called.h"
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <structmember.h>

static const char *const SPELLED[CALL_NAMES] = {
    [NAME_ADD_GROUP] = "_add_group",
    [NAME_ADD_SITE] = "_add_site",
    [NAME_CONTEXT] = "context",
    [NAME_CURRENT] = "current",
    [NAME_DTYPE] = "dtype",
    [NAME_END_LATE] = "_end_late",
    [NAME_FAIL] = "_fail",
    [NAME_HAS_FACTS] = "_has_facts",
    [NAME_LOCATE] = "_locate",
    [NAME_LOG] = "log",
    [NAME_NBYTES] = "nbytes",
    [NAME_NUMBER] = "number",
    [NAME_NUMBER_MESSAGE] = "_number_message",
    [NAME_PHASE] = "phase",
    [NAME_SEGMENT] = "segment",
    [NAME_SIZE_OF] = "_size_of",
    [NAME_TASK] = "task",
};

#define FAST(function) (PyCFunction)(void (*)(void))function

/* ---- Methods of torch. */

/* Returns the arguments by name as a dictionary. */
static PyObject *named_arguments(PyObject *const *values, PyObject *names) {
    PyObject *named = PyDict_New();
    for (Py_ssize_t at = 0; named != NULL && at < PyTuple_Size(names); at++)
        if (PyDict_SetItem(named, PyTuple_GetItem(names, at), values[at]) < 0) Py_CLEAR(named);
    return named;
}

static PyObject *positional_arguments(PyObject *const *given, Py_ssize_t count) {
    PyObject *args = PyTuple_New(count);
    for (Py_ssize_t at = 0; args != NULL && at < count; at++) PyTuple_SetItem(args, at, Py_NewRef(given[at]));
    return args;
}

/* Returns a listener; NULL behind the last one. */
static Calls *listener_at(const Method *self, Py_ssize_t at) {
    if (at >= PyList_Size(self->listeners)) return NULL;
    PyObject *listener = PyList_GetItem(self->listeners, at);
    if (!PyObject_TypeCheck(listener, (PyTypeObject *)self->state->listener_type)) return NULL;
    return (Calls *)Py_NewRef(listener);
}

typedef struct {
    PyObject *args, *kwargs;        /* as they were given, with the group; kwargs may be NULL */
    PyObject *const *noted;         /* those to note, without the group */
    Py_ssize_t count;
} Arguments;

/* Calls the original, with all listeners from one on. */
static PyObject *start_with(Method *self, const Arguments *of, Py_ssize_t at) {
    Calls *listener = listener_at(self, at);
    if (listener == NULL) return PyObject_Call(self->original, of->args, of->kwargs);
    int64_t call = begin_call(listener, self, PyTuple_GetItem(of->args, 0), of->noted, of->count);
    PyObject *work = call == -2 ? NULL : start_with(self, of, at + 1);
    if (work == NULL && call >= 0) forget_message(listener, self, call);
    if (work != NULL && call >= 0 && note_work(listener, self, call, PyTuple_GetItem(of->args, 0), work) < 0)
        Py_CLEAR(work);
    Py_DECREF(listener);
    return work;
}

/* Orders arguments by name behind the others, as `called.order_arguments` does. */
static PyObject *order_arguments(Method *self, PyObject *const *given, Py_ssize_t count, PyObject *kwargs) {
    PyObject *args = positional_arguments(given, count);
    PyObject *ordered = args == NULL ? NULL : PyObject_CallFunctionObjArgs(self->order, args, kwargs, NULL);
    Py_XDECREF(args);
    if (ordered != NULL && !PyTuple_Check(ordered)) Py_CLEAR(ordered);
    return ordered;
}

static PyObject *method_start(PyObject *object, PyObject *const *given, Py_ssize_t count, PyObject *names) {
    Method *self = (Method *)object;
    Arguments of = {.args = positional_arguments(given, count), .noted = given + 1, .count = count - 1};
    PyObject *ordered = NULL, *copied[MOST_ARGUMENTS], *work = NULL;
    int failed = of.args == NULL;
    if (!failed && names != NULL && PyTuple_Size(names) > 0) {
        of.kwargs = named_arguments(given + count, names);
        failed = of.kwargs == NULL;
    }
    if (!failed && of.kwargs != NULL && count > 0) {
        ordered = order_arguments(self, given + 1, count - 1, of.kwargs);
        failed = ordered == NULL;
        of.noted = copied;
        of.count = 0;
        while (!failed && of.count < MOST_ARGUMENTS && of.count < PyTuple_Size(ordered)) {
            copied[of.count] = PyTuple_GetItem(ordered, of.count); /* borrowed */
            of.count++;
        }
    }
    if (!failed)
        work = count == 0 ? PyObject_Call(self->original, of.args, of.kwargs) : start_with(self, &of, 0);
    Py_XDECREF(ordered);
    Py_XDECREF(of.kwargs);
    Py_XDECREF(of.args);
    return work;
}

static PyObject *method_wait(PyObject *object, PyObject *const *given, Py_ssize_t count, PyObject *names) {
    Method *self = (Method *)object;
    PyObject *args = positional_arguments(given, count), *kwargs = NULL, *result = NULL;
    Calls *listener = count == 0 ? NULL : listener_at(self, 0);
    int64_t start_ns = listener == NULL ? 0 : clock_ns(listener);
    Py_XDECREF(listener);
    if (args != NULL && names != NULL && (kwargs = named_arguments(given + count, names)) == NULL) Py_CLEAR(args);
    if (args != NULL) result = PyObject_Call(self->original, args, kwargs);
    for (Py_ssize_t at = 0; result != NULL && start_ns > 0 && (listener = listener_at(self, at)) != NULL; at++) {
        if (note_wait(listener, given[0], start_ns) < 0) Py_CLEAR(result);
        Py_DECREF(listener);
    }
    Py_XDECREF(kwargs);
    Py_XDECREF(args);
    return result;
}

static PyObject *method_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *original, *listeners, *kind, *order;
    int outputs, inputs, peer, is_message;
    if (!PyArg_ParseTuple(args, "OO!OOiiii", &original, &PyList_Type, &listeners, &order, &kind, &outputs, &inputs,
                          &peer, &is_message))
        return NULL;
    Method *self = (Method *)PyType_GenericAlloc(type, 0);
    if (self == NULL) return NULL;
    self->state = PyType_GetModuleState(type);
    self->original = Py_NewRef(original);
    self->listeners = Py_NewRef(listeners);
    self->order = Py_NewRef(order);
    self->kind = Py_NewRef(kind);
    self->outputs = outputs;
    self->inputs = inputs;
    self->peer = peer;
    self->is_message = is_message != 0;
    return (PyObject *)self;
}

static int method_traverse(PyObject *object, visitproc visit, void *arg) {
    Method *self = (Method *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->original);
    Py_VISIT(self->listeners);
    Py_VISIT(self->order);
    Py_VISIT(self->options_type);
    return 0;
}

static void method_dealloc(PyObject *object) {
    Method *self = (Method *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    Py_XDECREF(self->original);
    Py_XDECREF(self->listeners);
    Py_XDECREF(self->order);
    Py_XDECREF(self->kind);
    Py_XDECREF(self->options_type);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMethodDef methods_of_method[] = {
    {"start", FAST(method_start), METH_FASTCALL | METH_KEYWORDS,
     "start(group, ...): calls the method of a process group, and notes the collective."},
    {"wait", FAST(method_wait), METH_FASTCALL | METH_KEYWORDS,
     "wait(work, ...): calls the method of a work, and notes how long it takes."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots_of_method[] = {
    {Py_tp_doc, "CompiledMethod(original, listeners, order, kind, outputs, inputs, peer, is_message)\n--\n\n"
                "A method of torch that tells listeners of its calls."},
    {Py_tp_new, method_new},
    {Py_tp_dealloc, method_dealloc},
    {Py_tp_traverse, method_traverse},
    {Py_tp_methods, methods_of_method},
    {0, NULL},
};

static PyType_Spec method_spec = {"modtrace.collect.collectives._called.CompiledMethod", sizeof(Method), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots_of_method};

/* ---- The listener. */

static PyObject *calls_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs)) {
    Calls *self = (Calls *)PyType_GenericAlloc(type, 0); /* all of it is 0 */
    if (self != NULL && forget_threads(self) < 0) Py_CLEAR(self);
    return (PyObject *)self;
}

/* set_up(state, exchange, probe, held): receives the state of this module, torch's capsule for DLPack's exchange or
   None, a log whose segment and context are objects of their own, and what `HELD` lists. */
static PyObject *calls_set_up(PyObject *object, PyObject *args) {
    Calls *self = (Calls *)object;
    PyObject *capsule, *exchange, *probe, *held;
    if (!PyArg_ParseTuple(args, "OOOO!", &capsule, &exchange, &probe, &PyTuple_Type, &held)) return NULL;
    CallState *state = PyCapsule_GetPointer(capsule, "modtrace.collect.collectives._called.state");
    if (state == NULL) return NULL;
    if (PyTuple_Size(held) != HELD || !PyDict_Check(PyTuple_GetItem(held, OPTIMIZER_STARTS)) ||
        !PyList_Check(PyTuple_GetItem(held, BACKWARDS)))
        return PyErr_Format(PyExc_TypeError, "set_up() takes %d objects of certain types", HELD);
    const ExchangeTable *table = exchange == Py_None ? NULL : PyCapsule_GetPointer(exchange, "dlpack_exchange_api");
    if (exchange != Py_None && table == NULL) return NULL;
    self->exchange = table != NULL && table->major == 1 ? table->exchange : NULL;
    PyObject *segment = PyObject_GetAttrString(probe, "segment"), *context = PyObject_GetAttrString(probe, "context");
    if (segment != NULL && context != NULL) {
        self->segment_slot = find_slot(probe, segment);
        self->context_slot = find_slot(probe, context);
    }
    Py_XDECREF(segment);
    Py_XDECREF(context);
    if (PyErr_Occurred()) return NULL;
    self->state = state;
    for (int at = 0; at < HELD; at++) {
        PyObject *before = self->held[at];
        self->held[at] = Py_NewRef(PyTuple_GetItem(held, at));
        Py_XDECREF(before);
    }
    Py_RETURN_NONE;
}

static PyObject *calls_append_group(PyObject *object, PyObject *args) {
    Calls *self = (Calls *)object;
    PyObject *group;
    long long messages, last;
    int is_left_out, is_numbered, shows_ends;
    if (!PyArg_ParseTuple(args, "OLLppp", &group, &messages, &last, &is_left_out, &is_numbered, &shows_ends))
        return NULL;
    Group *groups = realloc(self->groups, (size_t)(self->group_count + 1) * sizeof *groups);
    if (groups == NULL) return PyErr_NoMemory();
    self->groups = groups;
    groups[self->group_count] = (Group){group, messages, last, 0, (char)is_left_out, (char)is_numbered,
                                             (char)shows_ends};
    return PyLong_FromLongLong(self->group_count++);
}

/* Returns a group by its index; NULL with an exception. */
static Group *group_at(Calls *self, PyObject *index) {
    long long at = PyLong_AsLongLong(index);
    if (at >= 0 && at < self->group_count) return &self->groups[at];
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_IndexError, "there is no such process group");
    return NULL;
}

static PyObject *calls_forget_group(PyObject *self, PyObject *index) {
    Group *group = group_at((Calls *)self, index);
    if (group == NULL) return NULL;
    group->object = NULL;
    Py_RETURN_NONE;
}

static PyObject *calls_count(PyObject *self, PyObject *index) {
    const Group *group = group_at((Calls *)self, index);
    return group == NULL ? NULL : Py_BuildValue("LL", (long long)group->called, (long long)group->messages);
}

/* keep_in(memory, address, size): writes the newest to memory, until it is None. */
static PyObject *calls_keep_in(PyObject *object, PyObject *args) {
    Calls *self = (Calls *)object;
    PyObject *memory, *before = self->ring_memory;
    unsigned long long address;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "OKn", &memory, &address, &size)) return NULL;
    if (memory != Py_None && size != ring_bytes()) return PyErr_Format(PyExc_ValueError, "keep_in(): another file");
    self->ring = memory == Py_None ? NULL : (char *)(uintptr_t)address;
    self->ring_memory = memory == Py_None ? NULL : Py_NewRef(memory);
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

static PyObject *calls_read(PyObject *object, PyObject *Py_UNUSED(none)) {
    Calls *self = (Calls *)object;
    long long first = self->first; /* making an object may free others, which may run any code */
    return Py_BuildValue("LN", first, copy_numbers(self, self->count));
}

/* take(until_ns): returns the calls that began before a time, and forgets them. */
static PyObject *calls_take(PyObject *object, PyObject *until) {
    Calls *self = (Calls *)object;
    int64_t until_ns = PyLong_AsLongLong(until), count = 0;
    if (PyErr_Occurred() || forget_threads(self) < 0) return NULL;
    while (count < self->count && self->calls[count].numbers[START_NS] < until_ns) count++;
    return take_calls(self, count);
}

static int calls_traverse(PyObject *object, visitproc visit, void *arg) {
    Calls *self = (Calls *)object;
    Py_VISIT(Py_TYPE(object));
    for (int at = 0; at < HELD; at++) Py_VISIT(self->held[at]);
    for (int64_t at = 0; at < self->count; at++) {
        Py_VISIT(self->calls[at].place);
        Py_VISIT(self->calls[at].options);
    }
    for (int at = 0; at < SITES; at++) {
        Py_VISIT(self->sites[at].context);
    }
    Py_VISIT(self->ring_memory);
    Py_VISIT(self->logs_known);
    return 0;
}

/* A collective that still comes is not noted. */
static int calls_clear(PyObject *object) {
    Calls *self = (Calls *)object;
    self->is_on = 0;
    for (int at = 0; at < HELD; at++) Py_CLEAR(self->held[at]);
    self->ring = NULL;
    Py_CLEAR(self->ring_memory);
    self->serial = 0;
    Py_CLEAR(self->logs_known);
    for (int at = 0; at < SITES; at++) drop_site(&self->sites[at]);
    Call *calls = self->calls;
    int64_t count = self->count;
    self->calls = NULL;
    self->count = self->capacity = 0;
    for (int64_t at = 0; at < count; at++) {
        Py_XDECREF(calls[at].place);
        Py_XDECREF(calls[at].options);
    }
    free(calls);
    return 0;
}

static void calls_dealloc(PyObject *object) {
    Calls *self = (Calls *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    calls_clear(object);
    free(self->groups);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMethodDef methods_of_calls[] = {
    {"set_up", calls_set_up, METH_VARARGS,
     "set_up(state, exchange, probe, held): receives what runs for every collective; see _called.h."},
    {"append_group", calls_append_group, METH_VARARGS,
     "append_group(group, messages, last, is_left_out, is_numbered, shows_ends): returns the index of a new process "
     "group."},
    {"forget_group", calls_forget_group, METH_O, "forget_group(index): says that a process group was freed."},
    {"count", calls_count, METH_O,
     "count(index): returns how many collectives of a group were called, and the messages that its backend counts; -1: "
     "it counts none."},
    {"keep_in", calls_keep_in, METH_VARARGS,
     "keep_in(memory, address, size): writes the newest collectives to the file that is mapped there, until it gets "
     "None."},
    {"read", calls_read, METH_NOARGS,
     "read(): returns the number of the first collective that was not taken, and the numbers of all."},
    {"take", calls_take, METH_O,
     "take(until_ns): returns the collectives that began before a time, and forgets them: the number of the first, "
     "their numbers, places, and options."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"is_on", T_BOOL, offsetof(Calls, is_on), 0, "Whether collectives are noted."},
    {"step", T_INT, offsetof(Calls, step), 0, "The number of the running step."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots_of_calls[] = {
    {Py_tp_doc, "The base of what notes collectives that Python code calls."},
    {Py_tp_new, calls_new},
    {Py_tp_dealloc, calls_dealloc},
    {Py_tp_traverse, calls_traverse},
    {Py_tp_clear, calls_clear},
    {Py_tp_methods, methods_of_calls},
    {Py_tp_members, members},
    {0, NULL},
};

static PyType_Spec calls_spec = {"modtrace.collect.collectives._called.CompiledCalls", sizeof(Calls), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, slots_of_calls};

/* ---- The module. */

static int module_exec(PyObject *module) {
    CallState *state = PyModule_GetState(module);
    if (intern_names(state->names, SPELLED, CALL_NAMES) < 0) return -1;
    state->listener_type = PyType_FromModuleAndSpec(module, &calls_spec, NULL);
    PyObject *own = PyCapsule_New(state, "modtrace.collect.collectives._called.state", NULL);
    PyObject *type = PyType_FromModuleAndSpec(module, &method_spec, NULL);
    int failed = state->listener_type == NULL || own == NULL || type == NULL ||
                 PyModule_AddObjectRef(module, "state", own) < 0 ||
                 PyModule_AddType(module, (PyTypeObject *)type) < 0 ||
                 PyModule_AddType(module, (PyTypeObject *)state->listener_type) < 0;
    Py_XDECREF(own);
    Py_XDECREF(type);
    return failed ? -1 : 0;
}

/* Names are in use as long as there is any instance, which holds its type, and so the module. */
static void module_free(void *module) {
    CallState *state = PyModule_GetState(module);
    clear_names(state->names, CALL_NAMES);
    Py_CLEAR(state->listener_type);
}

static int module_traverse(PyObject *module, visitproc visit, void *arg) {
    Py_VISIT(((CallState *)PyModule_GetState(module))->listener_type);
    return 0;
}

static int module_clear(PyObject *module) {
    Py_CLEAR(((CallState *)PyModule_GetState(module))->listener_type);
    return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_called", NULL, sizeof(CallState), NULL, slots, module_traverse, module_clear, module_free,
};

PyMODINIT_FUNC PyInit__called(void) { return PyModuleDef_Init(&definition); }
