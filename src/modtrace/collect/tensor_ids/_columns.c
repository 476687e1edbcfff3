/* The containers that the other parts of the extension use: growing columns of integers, and lists without repeats. */

#include "_tensor_ids.h"
#include <stdlib.h>

int column_reserve(Column *column, Py_ssize_t more) {
    if (column->count + more <= column->capacity) return 0;
    Py_ssize_t capacity = column->capacity ? 2 * column->capacity : 1024;
    int64_t *items = realloc(column->items, (size_t)capacity * sizeof *items);
    if (items == NULL) return PyErr_NoMemory(), -1;
    column->items = items;
    column->capacity = capacity;
    return 0;
}

PyObject *column_to_array(const Column *column) {
    PyObject *module = PyImport_ImportModule("array");
    PyObject *type = module == NULL ? NULL : PyObject_GetAttrString(module, "array");
    Py_ssize_t size = column->count * (Py_ssize_t)sizeof *column->items;
    const char *bytes = size == 0 ? "" : (const char *)column->items; /* no memory before the first number */
    PyObject *array = NULL;
    if (type != NULL) array = PyObject_CallFunction(type, "sy#", "q", bytes, size);
    Py_XDECREF(type);
    Py_XDECREF(module);
    return array;
}

int64_t number_in(PyObject *numbers, PyObject *list, PyObject *value) {
    PyObject *known = PyDict_GetItemWithError(numbers, value); /* borrowed */
    if (known != NULL) return PyLong_AsLongLong(known);
    if (PyErr_Occurred()) return -1;
    Py_ssize_t number = PyList_Size(list);
    PyObject *wrapped = PyLong_FromSsize_t(number);
    int failed = wrapped == NULL || PyList_Append(list, value) < 0 || PyDict_SetItem(numbers, value, wrapped) < 0;
    Py_XDECREF(wrapped);
    return failed ? -1 : number;
}
