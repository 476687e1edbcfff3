/* The declarations that the parts of the extension `_op_mode` share. */

#ifndef MODTRACE_OP_MODE_H
#define MODTRACE_OP_MODE_H

#include "../tensor_ids/_tensor_ids.h"

/* Numbers that an op has in the events, as in mode.py. */
enum { EVENT_OP, EVENT_SCHEMA, EVENT_ARGUMENTS, EVENT_USES, EVENT_TENSORS, EVENT_START_NS, EVENT_END_NS, EVENT_AT,
       EVENT_SEQUENCE, EVENT_FLAGS, EVENT_LIVE_BEFORE, EVENT_LIVE_AFTER, EVENT_NODE, EVENT_ALLOCATED, EVENT_WIDTH };

/* Flags, as in mode.py. */
enum { RAISED = 1, GRAD_MODE = 2, ADDING = 4, NOT_ADDING = 8, CUSTOM_NODE = 16, ACCUMULATES = 32, PACKS = 64 };

enum { NO_NODE = -1 };

/* What `set_up` receives, in this order. */
enum { IDS, READER, NUMBERS, ADD_ARGUMENTS, BEFORE, AFTER, LOGS, THREADS, TENSOR, CUSTOM_FUNCTION, IS_GRAD_ENABLED,
       SAVED_TENSORS_HOOKS, GRAPH_TASK_ID, CURRENT_NODE, SEQUENCE_NR, CLOCK, OPTIMIZER_STARTS, HELD };

/* What `measure_with` receives, in this order. */
enum { VALUES, ENDED, MEASURE, LATEST, MEASURED };

/* Numbers that a measurement has, as in values.py. */
enum { MEASURED_ROW, MEASURED_OP, MEASURED_MASK, MEASURED_SLOT, MEASURED_GEOMETRY, MEASURED_START_NS, MEASURED_END_NS,
       MEASURED_WIDTH };

/* Names of attributes and methods, made once. */
enum { NAME_ADD_SCHEMA, NAME_ADDING_FOR, NAME_CHECK_FRAMES, NAME_CODES, NAME_CONTEXT, NAME_CONTEXTS,
       NAME_CREATE_GRAPH, NAME_CURRENT, NAME_FAIL, NAME_HOOKED, NAME_INSIDE, NAME_IS_OURS,
       NAME_LOCATE_ELSEWHERE, NAME_LOG, NAME_MARKS_ADDITIONS, NAME_NAME, NAME_ONLY_WRITTEN, NAME_PINNED,
       NAME_RAISED, NAME_RECOUNT, NAME_REPORT_LEAVES, NAME_SEGMENT, NAME_SEQUENCE_NR, NAME_START_RUN, NAME_TASK,
       NAME_UNTYPED_STORAGE, NAME_VERSION, NAME_VERSIONS, OP_NAMES };

/* An argument that an op writes to. */
typedef struct {
    Py_ssize_t at;  /* its position; -1: it is given by name alone */
    PyObject *name; /* owned */
} Written;

/* One operator. */
typedef struct {
    PyObject *func;   /* owned, so that no other op gets its address */
    PyObject *schema; /* owned: OpSchema */
    PyObject *call;   /* owned: what runs the op */
    PyObject *index;  /* owned: its number */
    int may_be_ours, is_collective, is_foreach, is_changing_view, has_out, hides_writes, is_view, is_uninitialized,
        returns_early;
    int written_count;
    Written *written;
} Op;

typedef struct {
    PyObject *names[OP_NAMES];
    PyObject *empty, *no_text; /* (), "" */
    PyObject *tensor_ids;      /* the module; as long as it lives, `api` is valid */
    const TensorApi *api;
} OpState;

typedef struct {
    PyObject_HEAD
    OpState *state;
    PyObject *held[HELD];               /* owned; NULL before `set_up` */
    PyObject *where, *backward, *log;   /* of the last op; owned. `where` is the mode itself: no op has run yet */
    PyObject *task_backward, *maker;    /* of the graph task that ran last; owned, or NULL */
    PyObject *context, *code;           /* a context, and a function that runs ops in it; owned, or NULL */
    PyObject *measured[MEASURED];       /* owned; NULL if ops are not measured */
    long long usual_mask;               /* the captures that want every output; -1: `OpValues.ended` finds them */
    long long task, next;               /* that task; the number of the next op */
    char is_running, is_off;
    Column events, measurements;
    Op **ops; /* open addressing by the address of `func`, at most half full */
    size_t op_capacity, op_count;
} OpMode;

/* An op that runs. */
typedef struct {
    const Op *of;
    PyObject *args, *kwargs; /* borrowed; kwargs is NULL if there are none */
    PyObject *versions;      /* owned: what a foreach op writes to, with its versions; NULL for other ops */
    long long mask;          /* the captures that want what it returns, while that is measured */
    int64_t event[EVENT_WIDTH];
} Run;

/* Receives a tensor of an output, and its slot. Returns -1 with an exception. */
typedef int (*Visit)(OpMode *self, PyObject *tensor, PyObject *slot, Run *run);

/* Where an op runs. */
typedef struct {
    int64_t at, node, flags;
} Place;

/* Finds where an op runs, and begins another run of ops if it is not where the last one ran. Returns -1 with an
   exception. */
int locate(OpMode *self, PyObject *log, Place *place);

/* Returns what is known of an operator, borrowed: operators live as long as the mode. NULL with an exception. */
const Op *find_op(OpMode *self, PyObject *func);

/* Appends an event or a measurement. Returns -1 with MemoryError. */
int append_numbers(OpMode *self, Column *column, const int64_t *numbers, int width);

/* Visits each tensor of an output, with its slot, as `tensors_in` does. */
int visit_tensors(OpMode *self, PyObject *value, PyObject *slot, Run *run, Visit visit);

/* Measures what an op has returned. Returns -1 with what is no Exception. */
int measure_outputs(OpMode *self, Run *run, PyObject *output);

/* Returns the time; -1 with an exception. */
int64_t clock_ns(OpMode *self);

/* Clears the set exception. Leaves set what is no Exception, and returns -1. */
int forgive(void);

/* What torch calls for every op. */
PyObject *mode_dispatch(PyObject *self, PyObject *const *given, Py_ssize_t count, PyObject *names);

/* Frees what is known of operators. */
void drop_ops(OpMode *self);

#endif
