/* Taps, and the way of a plain tensor that a call takes or returns: from its tap to the hook for its gradient.

   What is done here `CallTaps._measure_tensor` does in Python, for tensors that are less plain too and where this is not
   built. */

#include "../_shared.h"
#include <structmember.h>

/* Attributes and methods of torch's objects. */
enum { BACKWARD_HOOKS, BASE, DTYPE, GRAD_FN, IS_CONTIGUOUS, NEXT_FUNCTIONS, NUMEL, OUTPUT_NR, REGISTER, REQUIRES_GRAD, SEQUENCE_NR, SHAPE, VERSION, NAMES };

static PyObject *names[NAMES];

static const char *const spelled[NAMES] = {
    [BACKWARD_HOOKS] = "_backward_hooks",
    [BASE] = "_base",
    [DTYPE] = "dtype",
    [GRAD_FN] = "grad_fn",
    [IS_CONTIGUOUS] = "is_contiguous",
    [NEXT_FUNCTIONS] = "next_functions",
    [NUMEL] = "numel",
    [OUTPUT_NR] = "output_nr",
    [REGISTER] = "_register_hook_dict",
    [REQUIRES_GRAD] = "requires_grad",
    [SEQUENCE_NR] = "_sequence_nr",
    [SHAPE] = "shape",
    [VERSION] = "_version",
};

typedef struct {
    PyObject_HEAD
    PyObject *weakrefs;
    PyObject *receive, *hooks_ref, *segment, *slot, *mark, *more, *path, *output, *ref, *version, *view, *want, *shape;
    long long event, number, output_nr, task;
} Tap;

/* Puts a new reference, or NULL, in the place of another one. */
static void put(PyObject **place, PyObject *stolen) {
    PyObject *former = *place;
    *place = stolen;
    Py_XDECREF(former);
}

/* Hides an object from the garbage collector, which would visit thousands in each step; no cycle of references leads
   through what is hidden here. */
static void hide(PyObject *object) {
    if (PyType_GetFlags(Py_TYPE(object)) & Py_TPFLAGS_HAVE_GC) PyObject_GC_UnTrack(object);
}

static int tap_init(PyObject *self, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    Tap *tap = (Tap *)self;
    PyObject *segment, *receive;
    if (!PyArg_ParseTuple(args, "OO", &segment, &receive)) return -1;
    put(&tap->segment, Py_NewRef(segment));
    put(&tap->receive, Py_NewRef(receive));
    put(&tap->slot, PyUnicode_FromString(""));
    put(&tap->path, PyUnicode_FromString(""));
    put(&tap->mark, PyLong_FromLong(0));
    tap->event = tap->number = tap->task = -1;
    hide(self); /* a subclass in Python has been tracked */
    return 0;
}

static void tap_dealloc(PyObject *self) {
    Tap *tap = (Tap *)self;
    PyTypeObject *type = Py_TYPE(self);
    if (tap->weakrefs != NULL) PyObject_ClearWeakRefs(self);
    for (PyObject **member = &tap->receive; member <= &tap->shape; member++) Py_CLEAR(*member);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

#define OBJECT(name) {#name, T_OBJECT, offsetof(Tap, name), 0, NULL}
#define NUMBER(name) {#name, T_LONGLONG, offsetof(Tap, name), 0, NULL}

static PyMemberDef tap_members[] = {
    OBJECT(receive), OBJECT(hooks_ref), OBJECT(segment), OBJECT(slot), OBJECT(mark), OBJECT(more), OBJECT(path),
    OBJECT(output), OBJECT(ref), OBJECT(version), OBJECT(view), OBJECT(want), OBJECT(shape), NUMBER(event), NUMBER(number),
    NUMBER(output_nr), NUMBER(task),
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Tap, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot tap_slots[] = {
    {Py_tp_doc, "Tap(segment, receive): what a hook on a tensor knows; see `GradientTap`."},
    {Py_tp_init, tap_init},
    {Py_tp_dealloc, tap_dealloc},
    {Py_tp_members, tap_members},
    {0, NULL},
};

static PyType_Spec tap_spec = {
    "modtrace.collect.values._taps.Tap", sizeof(Tap), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, tap_slots};

/* What taps need that Python gives, in the order of `CallTaps._held`. */
typedef struct {
    PyObject *tap, *base_tap;  /* the classes */
    PyObject *receive;         /* what taps call */
    PyObject *measure;         /* `CaptureMeasurer.measure_wanted` */
    PyObject *is_wrapped;      /* returns whether a tensor belongs to a transform of `torch.func` */
    PyObject *ordered_dict, *cut_below;
} Held;

/* The call that takes or returns a tensor. References are borrowed. */
typedef struct {
    PyObject *tensor, *known, *sites, *taps, *segment, *event, *slot;
    PyObject *mark, *grad_mark, *want, *grad_want;
    PyObject *first_seq; /* the number of the first node that the call can have made; None if no base is looked for */
} Seen;

static PyObject *new_tap(PyObject *type, PyObject *segment, PyObject *receive) {
    PyObject *args = PyTuple_Pack(2, segment, receive), *made = NULL;
    if (args != NULL) made = PyType_GenericAlloc((PyTypeObject *)type, 0);
    if (made != NULL && tap_init(made, args, NULL)) Py_CLEAR(made);
    Py_XDECREF(args);
    return made;
}

static PyObject *refer_to(PyObject *object) {
    PyObject *ref = PyWeakref_NewRef(object, NULL);
    if (ref != NULL) hide(ref);
    return ref;
}

/* Clears an exception that is no interrupt. Returns -1 if there is another one. */
static int pass_over(void) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return -1;
    PyErr_Clear();
    return 0;
}

/* Returns the tap of a tensor as a new reference: a new one unless the segment has one, and the tensor was not written
   to since. */
static Tap *tap_of(const Held *held, const Seen *seen) {
    PyObject *version = PyObject_GetAttr(seen->tensor, names[VERSION]);
    if (version == NULL && pass_over()) return NULL;
    PyObject *key = PyLong_FromVoidPtr(seen->tensor);
    Tap *tap = key == NULL ? NULL : (Tap *)PyDict_GetItemWithError(seen->known, key);
    if (tap != NULL && tap->ref != NULL && PyWeakref_GetObject(tap->ref) == seen->tensor && version != NULL &&
        tap->version != NULL && PyObject_RichCompareBool(version, tap->version, Py_EQ) == 1) {
        Py_INCREF(tap);
    } else if (!PyErr_Occurred() && (tap = (Tap *)new_tap(held->tap, seen->segment, held->receive)) != NULL) {
        tap->version = version;
        version = NULL;
        tap->ref = refer_to(seen->tensor);
        if (tap->ref == NULL || PyDict_SetItem(seen->known, key, (PyObject *)tap)) Py_CLEAR(tap);
    }
    Py_XDECREF(version);
    Py_XDECREF(key);
    return tap;
}

/* Returns the measurement of a tensor; `known` is one that the tensor has already, or None. */
static PyObject *measure(const Held *held, PyObject *tensor, PyObject *want, PyObject *known) {
    PyObject *name = PyUnicode_FromString(""), *found = NULL;
    if (name != NULL) found = PyObject_CallFunctionObjArgs(held->measure, tensor, want, name, known, NULL);
    Py_XDECREF(name);
    return found;
}

static int add_all(PyObject *list, PyObject *const *items, int count) {
    for (int at = 0; at < count; at++)
        if (PyList_Append(list, items[at])) return -1;
    return 0;
}

static int measure_output(const Held *held, const Seen *seen, Tap *tap) {
    PyObject *found = measure(held, seen->tensor, seen->want, tap->output == NULL ? Py_None : tap->output);
    if (found == NULL) return -1;
    put(&tap->output, found);
    PyObject *requires_grad = PyObject_GetAttr(seen->tensor, names[REQUIRES_GRAD]);
    int status = requires_grad == NULL ? -1 : PyObject_SetAttr(found, names[REQUIRES_GRAD], requires_grad);
    Py_XDECREF(requires_grad);
    PyObject *const site[] = {found, seen->event, seen->slot, seen->mark};
    return status ? status : add_all(seen->sites, site, 4);
}

/* Returns the number of a node, and lets torch free deep graphs in turn as `deep_graphs.is_cut_below` says; -1 with an
   exception. */
static long long touch(const Held *held, PyObject *node) {
    PyObject *number = PyObject_CallMethodObjArgs(node, names[SEQUENCE_NR], NULL);
    uint64_t found = number == NULL ? 0 : PyLong_AsUnsignedLongLongMask(number);
    Py_XDECREF(number);
    if (number == NULL || PyErr_Occurred()) return -1;
    if ((found * UINT64_C(0x9E3779B1) & 0x38000000) == 0) {
        PyObject *below = PyObject_GetAttr(node, names[NEXT_FUNCTIONS]);
        PyObject *cut = below == NULL ? NULL : PyObject_CallFunctionObjArgs(held->cut_below, node, below, NULL);
        Py_XDECREF(below);
        Py_XDECREF(cut);
        if (cut == NULL) return -1;
    }
    return (long long)found;
}

/* Gives a tensor that has no hooks the dict for them, as torch does. */
static PyObject *make_hooks(const Held *held, PyObject *tensor, PyObject *node) {
    PyObject *hooks = PyObject_CallNoArgs(held->ordered_dict), *registered = NULL;
    if (hooks == NULL) return NULL;
    if (PyObject_SetAttr(tensor, names[BACKWARD_HOOKS], hooks) == 0)
        registered = node == Py_None ? Py_NewRef(Py_None) : PyObject_CallMethodObjArgs(node, names[REGISTER], tensor, NULL);
    if (registered == NULL) Py_CLEAR(hooks);
    Py_XDECREF(registered);
    return hooks;
}

/* Registers the hook of a tap on a tensor, which `node` made. Returns -1 with an exception. */
static int hook(const Held *held, Tap *tap, PyObject *tensor, PyObject *node) {
    PyObject *hooks = PyObject_GetAttr(tensor, names[BACKWARD_HOOKS]);
    int is_new = hooks == Py_None;
    if (is_new) put(&hooks, make_hooks(held, tensor, node));
    int status = hooks == NULL || PyObject_SetItem(hooks, (PyObject *)tap, (PyObject *)tap) ? -1 : 0;
    if (status == 0 && is_new) hide(hooks); /* until somebody else adds a hook */
    if (status == 0 && (tap->hooks_ref = refer_to(hooks)) == NULL) status = -1;
    Py_XDECREF(hooks);
    if (status == 0 && node != Py_None) tap->number = touch(held, node);
    return status || PyErr_Occurred() ? -1 : 0;
}

/* Returns whether two tensors have the same value of an attribute, or the same result of a method; -1 with an exception. */
static int agree(PyObject *one, PyObject *other, int name, int is_method) {
    PyObject *left = is_method ? PyObject_CallMethodObjArgs(one, names[name], NULL) : PyObject_GetAttr(one, names[name]);
    PyObject *right = is_method ? PyObject_CallMethodObjArgs(other, names[name], NULL) : PyObject_GetAttr(other, names[name]);
    int is_equal = left == NULL || right == NULL ? -1 : PyObject_RichCompareBool(left, right, Py_EQ);
    Py_XDECREF(left);
    Py_XDECREF(right);
    return is_equal;
}

/* Hooks the base of a view that the call made, as `base_made_in` says. Returns 1 if Python is to look for it. */
static int watch_base(const Held *held, const Seen *seen, Tap *tap) {
    if (seen->first_seq == Py_None) return 0;
    PyObject *base = PyObject_GetAttr(seen->tensor, names[BASE]), *node = NULL;
    long long first_seq = PyLong_AsLongLong(seen->first_seq);
    int status = base == NULL || PyErr_Occurred() ? -1 : 0;
    int is_looked_at = status == 0 && base != Py_None;
    if (is_looked_at && first_seq < 0) {
        Py_DECREF(base);
        return 1;
    }
    if (is_looked_at) is_looked_at = agree(base, seen->tensor, NUMEL, 1) == 1 && agree(base, seen->tensor, DTYPE, 0) == 1;
    if (is_looked_at && (node = PyObject_GetAttr(base, names[GRAD_FN])) != NULL && node != Py_None) {
        int is_dense = to_truth(PyObject_CallMethodObjArgs(base, names[IS_CONTIGUOUS], NULL)) == 1 &&
                       to_truth(PyObject_CallMethodObjArgs(seen->tensor, names[IS_CONTIGUOUS], NULL)) == 1;
        int64_t number = is_dense ? to_int64(PyObject_CallMethodObjArgs(node, names[SEQUENCE_NR], NULL)) : -1;
        Tap *made = is_dense && number >= first_seq && !PyErr_Occurred()
                        ? (Tap *)new_tap(held->base_tap, seen->segment, held->receive)
                        : NULL;
        if (made != NULL) {
            made->view = Py_NewRef(tap);
            if ((made->shape = PyObject_GetAttr(seen->tensor, names[SHAPE])) != NULL) hide(made->shape);
            made->output_nr = to_int64(PyObject_GetAttr(base, names[OUTPUT_NR]));
            if (made->shape == NULL || PyErr_Occurred() || hook(held, made, base, node) ||
                PyList_Append(seen->taps, (PyObject *)made))
                status = -1;
            Py_DECREF(made);
        }
    }
    Py_XDECREF(base);
    Py_XDECREF(node);
    return PyErr_Occurred() ? -1 : status;
}

/* Hooks a tensor that requires a gradient. Returns 1 if Python is to look for the base of a view, -1 with an exception. */
static int watch(const Held *held, const Seen *seen, Tap *tap) {
    int requires_grad = to_truth(PyObject_GetAttr(seen->tensor, names[REQUIRES_GRAD]));
    if (requires_grad <= 0) return requires_grad;
    long long event = PyLong_AsLongLong(seen->event);
    if (event < 0) return -1;
    tap->event = event;
    put(&tap->slot, Py_NewRef(seen->slot));
    put(&tap->mark, Py_NewRef(seen->grad_mark));
    put(&tap->want, Py_NewRef(seen->grad_want));
    PyObject *node = PyObject_GetAttr(seen->tensor, names[GRAD_FN]);
    if (node == NULL) return -1;
    int status = hook(held, tap, seen->tensor, node) || PyList_Append(seen->taps, (PyObject *)tap) ? -1 : 0;
    Py_DECREF(node);
    return status ? status : watch_base(held, seen, tap);
}

static int read_held(PyObject *tuple, Held *held) {
    return PyArg_ParseTuple(tuple, "OOOOOOO", &held->tap, &held->base_tap, &held->receive, &held->measure,
                            &held->is_wrapped, &held->ordered_dict, &held->cut_below);
}

static PyObject *tap_tensor(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    if (count != 10 || !PyTuple_Check(args[0]) || !PyDict_Check(args[2]) || !PyList_Check(args[3]) ||
        !PyList_Check(args[4]) || !PyTuple_Check(args[8]) || PyTuple_Size(args[8]) < 4)
        return PyErr_Format(PyExc_TypeError, "tap_tensor(): see _taps.pyi for its ten arguments");
    Held held;
    if (!read_held(args[0], &held)) return NULL;
    PyObject *const asked = args[8];
    Seen seen = {args[1], args[2], args[3], args[4], args[5], args[6], args[7],
                 PyTuple_GetItem(asked, 0), PyTuple_GetItem(asked, 1), PyTuple_GetItem(asked, 2),
                 PyTuple_GetItem(asked, 3), args[9]};
    int is_wrapped = to_truth(PyObject_CallFunctionObjArgs(held.is_wrapped, seen.tensor, NULL));
    if (is_wrapped) return is_wrapped < 0 ? NULL : Py_NewRef(Py_NotImplemented);
    int is_measured = PyObject_IsTrue(seen.mark), is_watched = PyObject_IsTrue(seen.grad_mark);
    if (is_measured < 0 || is_watched < 0) return NULL;
    Tap *tap = tap_of(&held, &seen);
    if (tap == NULL || (is_measured && measure_output(&held, &seen, tap))) {
        Py_XDECREF(tap);
        return NULL;
    }
    PyObject *result = Py_None;
    if (is_watched && tap->hooks_ref != NULL) {
        PyObject *added = PyObject_CallMethod((PyObject *)tap, "add_site", "OOO", seen.event, seen.slot, seen.grad_mark);
        if (added == NULL) result = NULL;
        Py_XDECREF(added);
    } else if (is_watched) {
        /* A view whose base was written to has no gradient: torch raises. */
        int status = watch(&held, &seen, tap);
        if (status < 0 && pass_over()) result = NULL;
        if (status > 0) result = (PyObject *)tap;
    }
    Py_XINCREF(result);
    Py_DECREF(tap);
    return result;
}

/* Returns the known measurement of a gradient, if it is that of the last one and nothing wrote to it since; None
   otherwise. References are borrowed. */
static PyObject *known_of(PyObject *last, PyObject *gradient, PyObject *version) {
    if (last == Py_None || version == NULL) return Py_None;
    PyObject *ref, *former, *found;
    if (!PyArg_ParseTuple(last, "OOO", &ref, &former, &found)) return NULL;
    int is_same = PyWeakref_GetObject(ref) == gradient ? PyObject_RichCompareBool(version, former, Py_EQ) : 0;
    return is_same < 0 ? NULL : is_same ? found : Py_None;
}

static PyObject *tap_gradient(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    if (count != 6 || !PyTuple_Check(args[0]) || !PyList_Check(args[4]) || (args[5] != Py_None && !PyTuple_Check(args[5])))
        return PyErr_Format(PyExc_TypeError, "tap_gradient(): see _taps.pyi for its six arguments");
    Held held;
    PyObject *tap = args[1], *gradient = args[2], *want = args[3], *sites = args[4], *last = Py_NewRef(args[5]);
    PyObject *version = NULL, *found = NULL, *ref = NULL, *result = NULL;
    if (!read_held(args[0], &held)) goto end;
    version = PyObject_GetAttr(gradient, names[VERSION]);
    if (version == NULL && pass_over()) goto end;
    PyObject *known = known_of(last, gradient, version);
    if (known == NULL || (found = measure(&held, gradient, want, known)) == NULL) goto end;
    PyObject *const site[] = {found, tap};
    if (add_all(sites, site, 2) || (ref = refer_to(gradient)) == NULL) goto end;
    result = PyTuple_Pack(3, ref, version == NULL ? Py_None : version, found);
    if (result != NULL) hide(result);
end:
    Py_XDECREF(version);
    Py_XDECREF(found);
    Py_XDECREF(ref);
    Py_DECREF(last);
    return result;
}

static PyMethodDef methods[] = {
    {"tap_tensor", (PyCFunction)(void (*)(void))tap_tensor, METH_FASTCALL,
     "tap_tensor(held, tensor, known, sites, taps, segment, event, slot, asked, first_seq): measures a plain tensor and "
     "hooks it for its gradient."},
    {"tap_gradient", (PyCFunction)(void (*)(void))tap_gradient, METH_FASTCALL,
     "tap_gradient(held, tap, gradient, want, sites, last): measures a gradient, and returns what is to be the last one."},
    {NULL, NULL, 0, NULL},
};

static int execute(PyObject *module) {
    if (intern_names(names, spelled, NAMES)) return -1;
    PyObject *type = PyType_FromSpec(&tap_spec);
    int status = type == NULL ? -1 : PyModule_AddObjectRef(module, "Tap", type);
    Py_XDECREF(type);
    return status;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, execute}, {0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_taps", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__taps(void) { return PyModuleDef_Init(&definition); }
