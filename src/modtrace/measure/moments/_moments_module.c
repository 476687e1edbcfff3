/* The module `_moments`. */

#include <string.h>

#include "../_kinds.h"
#include "_moments.h"

static PyObject *measure_into(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 5) return PyErr_Format(PyExc_TypeError, "measure_into() takes 5 arguments, not %zd", nargs);
    void *source = PyLong_AsVoidPtr(args[0]);
    Py_ssize_t count = PyLong_AsSsize_t(args[1]);
    double repeats = PyLong_AsDouble(args[2]);
    long kind = PyLong_AsLong(args[3]);
    double *row = PyLong_AsVoidPtr(args[4]);
    if (PyErr_Occurred()) return NULL;
    if (count < 0 || kind < 0 || kind >= KINDS || (count > 0 && source == NULL) || row == NULL)
        return PyErr_Format(PyExc_ValueError, "measure_into(): no such memory or kind");
    Statistics found = NOTHING_YET;
    measure_without_gil(source, count, (int)kind, &found);
    finish(&found, (double)count, repeats);
    memcpy(row, &found, sizeof found);
    if (found.nans == 0 && found.infs == 0) Py_RETURN_FALSE;
    row[sizeof found / sizeof *row] = (double)find_nonfinite(source, count, (int)kind);
    Py_RETURN_TRUE;
}

static PyMethodDef methods[] = {
    {"measure_into", (PyCFunction)(void (*)(void))measure_into, METH_FASTCALL,
     "measure_into(address, count, repeats, kind, row_address): writes 7 doubles and returns False; if a number is not "
     "finite, also the index of the first one, and returns True; kind: 0 float32, 1 bfloat16, 2 float16, 3 float64."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{Py_mod_exec, add_measurer_type}, {0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_moments", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__moments(void) { return PyModuleDef_Init(&definition); }
