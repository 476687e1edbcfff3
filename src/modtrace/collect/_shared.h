/* What several extensions that record have in common: Python's limited API, and functions over its objects. */

#ifndef MODTRACE_SHARED_H
#define MODTRACE_SHARED_H

#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <time.h>

/* Returns an object as a number; -1 with an exception if there is none, or it is none. */
static inline int64_t to_int64(PyObject *stolen) {
    if (stolen == NULL) return -1;
    int64_t number = PyLong_AsLongLong(stolen);
    Py_DECREF(stolen);
    return number;
}

/* Returns the time of `time.perf_counter_ns`, or of what a test has put in its place; -1 with an exception. */
static inline int64_t read_clock(PyObject *clock) {
#if defined(__linux__) /* Python's own function reads this clock there, and takes 100 ns more */
    struct timespec now;
    if (PyCFunction_Check(clock)) {
        clock_gettime(CLOCK_MONOTONIC, &now);
        return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    }
#endif
    return to_int64(PyObject_CallNoArgs(clock));
}

/* Returns whether an object is true; -1 with an exception if there is none. */
static inline int to_truth(PyObject *stolen) {
    if (stolen == NULL) return -1;
    int is_true = PyObject_IsTrue(stolen);
    Py_DECREF(stolen);
    return is_true;
}

/* Returns the set exception, owned, and clears it. */
static inline PyObject *take_exception(void) {
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback != NULL) PyException_SetTraceback(error, traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return error;
}

/* Makes the names of attributes and methods of a module. Returns -1 with an exception. */
static inline int intern_names(PyObject **names, const char *const *spelled, int count) {
    for (int at = 0; at < count; at++)
        if ((names[at] = PyUnicode_InternFromString(spelled[at])) == NULL) return -1;
    return 0;
}

static inline void clear_names(PyObject **names, int count) {
    for (int at = 0; at < count; at++) Py_CLEAR(names[at]);
}

/* Returns whether an optimizer may be stepping on this thread, as `OptimizerWatch.has_begun` does, from its `starts`; -1
   with an exception. */
static inline int may_be_stepping(PyObject *starts) {
    if (PyDict_Size(starts) == 0) return 0;
    PyObject *thread = PyLong_FromUnsignedLong(PyThread_get_thread_ident());
    PyObject *own = thread == NULL ? NULL : PyDict_GetItemWithError(starts, thread);
    Py_XDECREF(thread);
    return own == NULL ? (PyErr_Occurred() ? -1 : 0) : PyObject_IsTrue(own);
}

#endif
