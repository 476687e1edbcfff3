/* The module `_tensor_ids`: its types, and the names it looks up on tensors. */

#include "_tensor_ids.h"

static const char *const NAMES_OF_TENSORS[NAMES] = {
    [DEVICE] = "device",
    [DTYPE] = "dtype",
    [IS_COMPLEX] = "is_complex",
    [IS_CONJ] = "is_conj",
    [IS_NEG] = "is_neg",
    [LAYOUT] = "layout",
    [NBYTES] = "nbytes",
    [REQUIRES_GRAD] = "requires_grad",
    [SHAPE] = "shape",
    [STORAGE_OFFSET] = "storage_offset",
    [STRIDE] = "stride",
    [UNTYPED_STORAGE] = "untyped_storage",
};

static PyTypeObject *add_type(PyObject *module, PyType_Spec *spec) {
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    if (type != NULL && PyModule_AddType(module, (PyTypeObject *)type) < 0) Py_CLEAR(type);
    return (PyTypeObject *)type;
}

/* Adds what other extensions call. It lives as long as the module, which they hold. */
static int add_api(PyObject *module, State *state) {
    state->api = (TensorApi){state->ids_type, state->reader_type, column_reserve, column_to_array, read_arguments,
                             make_tensor, write_tensor, note_resized, note_unreadable, take_allocated,
                             number_output};
    PyObject *capsule = PyCapsule_New(&state->api, TENSOR_API, NULL);
    int failed = capsule == NULL ? -1 : PyModule_AddObjectRef(module, "api", capsule);
    Py_XDECREF(capsule);
    return failed;
}

static int module_exec(PyObject *module) {
    State *state = PyModule_GetState(module);
    if (intern_names(state->names, NAMES_OF_TENSORS, NAMES) < 0) return -1;
    state->life_type = add_type(module, &life_spec);
    state->ids_type = state->life_type == NULL ? NULL : add_type(module, &ids_spec);
    state->reader_type = state->ids_type == NULL ? NULL : add_type(module, &reader_spec);
    return state->reader_type == NULL ? -1 : add_api(module, state);
}

static int module_traverse(PyObject *module, visitproc visit, void *arg) {
    State *state = PyModule_GetState(module);
    Py_VISIT(state->life_type);
    Py_VISIT(state->ids_type);
    Py_VISIT(state->reader_type);
    return 0;
}

static int module_clear(PyObject *module) {
    State *state = PyModule_GetState(module);
    Py_CLEAR(state->life_type);
    Py_CLEAR(state->ids_type);
    Py_CLEAR(state->reader_type);
    return 0;
}

/* Names are in use as long as there is any instance. */
static void module_free(void *module) {
    State *state = PyModule_GetState(module);
    module_clear(module);
    clear_names(state->names, NAMES);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_tensor_ids", NULL, sizeof(State), NULL, slots, module_traverse, module_clear, module_free,
};

PyMODINIT_FUNC PyInit__tensor_ids(void) { return PyModuleDef_Init(&definition); }
