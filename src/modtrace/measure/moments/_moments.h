/* The declarations that the parts of the extension `_moments` share. */

#ifndef MODTRACE_MOMENTS_H
#define MODTRACE_MOMENTS_H

#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>

/* The first numbers of a row. */
typedef struct {
    double count, low, high, sum, sumsq, nans, infs;
} Statistics;

/* The place in a row behind them: the index of the first element that is not finite. */
enum { FIRST_INDEX = sizeof(Statistics) / sizeof(double) };

#define NOTHING_YET ((Statistics){0, INFINITY, -INFINITY, 0, 0, 0, 0})

/* Adds `count` contiguous numbers of a kind, whatever floating-point settings the user has. The second lets other
   threads run meanwhile, where it takes long. */
void measure_undisturbed(const void *source, Py_ssize_t count, int kind, Statistics *found);
void measure_without_gil(const void *source, Py_ssize_t count, int kind, Statistics *found);

/* Ends with how many numbers there were, each of which counts `repeats` times. */
void finish(Statistics *found, double count, double repeats);

/* Returns the index of the first number that is not finite; -1 if somebody has overwritten it since it was counted. */
Py_ssize_t find_nonfinite(const void *source, Py_ssize_t count, int kind);

int add_measurer_type(PyObject *module);

#endif
