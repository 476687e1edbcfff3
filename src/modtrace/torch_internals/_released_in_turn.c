/* The module `_released_in_turn`: a type whose instances release what they hold one after another, not within each
   other. CPython calls this a trashcan; its own (2.3 to 3.12, and anew from 3.14 on) does the same for its containers,
   but in 3.13 only 10,000 deep, by which time the nodes between them have filled the stack. */

#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#if defined(_MSC_VER)
#define THREAD_LOCAL __declspec(thread)
#else
#define THREAD_LOCAL _Thread_local
#endif

typedef struct Holder {
    PyObject_HEAD
    PyObject *held;
    struct Holder *next; /* among those that wait */
} Holder;

static THREAD_LOCAL int is_releasing = 0;
static THREAD_LOCAL Holder *waiting = NULL; /* dead, but what they hold is still to be released */

static PyObject *holder_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *held;
    if (kwargs != NULL && PyDict_Size(kwargs) > 0) {
        PyErr_SetString(PyExc_TypeError, "ReleasedInTurn takes no keyword arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "O:ReleasedInTurn", &held)) return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Holder *self = (Holder *)allocate(type, 0);
    if (self == NULL) return NULL;
    Py_INCREF(held);
    self->held = held;
    self->next = NULL;
    return (PyObject *)self;
}

static void release(Holder *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject *held = self->held;
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
    Py_XDECREF(held); /* other holders may die in here: they wait */
}

static void holder_dealloc(PyObject *object) {
    Holder *self = (Holder *)object;
    if (is_releasing) {
        self->next = waiting;
        waiting = self;
        return;
    }
    PyObject *kind, *value, *traceback;
    PyErr_Fetch(&kind, &value, &traceback); /* what is released may look at the exception that is set */
    is_releasing = 1;
    release(self);
    while (waiting != NULL) {
        Holder *next = waiting;
        waiting = next->next;
        release(next);
    }
    is_releasing = 0;
    PyErr_Restore(kind, value, traceback);
}

PyDoc_STRVAR(holder_doc,
             "ReleasedInTurn(held)\n--\n\n"
             "Holds an object, and releases it after what is being released on the thread, if that is held so, too.");

static PyType_Slot holder_slots[] = {
    {Py_tp_doc, (void *)holder_doc}, {Py_tp_new, holder_new}, {Py_tp_dealloc, holder_dealloc}, {0, NULL},
};

static PyType_Spec holder_spec = {
    "modtrace.torch_internals._released_in_turn.ReleasedInTurn", sizeof(Holder), 0, Py_TPFLAGS_DEFAULT, holder_slots,
};

static int module_exec(PyObject *module) {
    PyObject *type = PyType_FromModuleAndSpec(module, &holder_spec, NULL);
    int failed = type == NULL || PyModule_AddType(module, (PyTypeObject *)type) < 0;
    Py_XDECREF(type);
    return failed ? -1 : 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_released_in_turn", NULL, 0, NULL, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__released_in_turn(void) { return PyModuleDef_Init(&definition); }
