/* The declarations that the parts of the extension `_called` share. */

#ifndef MODTRACE_CALLED_H
#define MODTRACE_CALLED_H

#include "../../measure/_exchange.h"
#include "../_shared.h"

/* Numbers of a collective, as in rows.py; -1 is not known, and a time of 0 has not come yet. */
enum { SITE, GROUP, START_NS, END_NS, WAIT_NS, NUMBER, BYTES_READ, BYTES_WRITTEN, THREAD, PEER, PLACE, KEPT_AS, WIDTH };

/* What `set_up` receives, in this order. */
enum { LOGS, THREADS, OPTIMIZER_STARTS, GRAPH_TASK_ID, BACKWARDS, NUMBER_OF_LAST, CLOCK, TENSOR, PARAMETER, FORWARD, HELD };

/* Names of attributes and methods, made once. */
enum { NAME_ADD_GROUP, NAME_ADD_SITE, NAME_CONTEXT, NAME_CURRENT, NAME_DTYPE, NAME_END_LATE, NAME_FAIL, NAME_HAS_FACTS,
       NAME_LOCATE, NAME_LOG, NAME_NBYTES, NAME_NUMBER, NAME_NUMBER_MESSAGE, NAME_PHASE, NAME_SEGMENT, NAME_SIZE_OF,
       NAME_TASK, CALL_NAMES };

typedef struct {
    PyObject *names[CALL_NAMES];
    PyObject *listener_type; /* CompiledCalls */
} CallState;

/* A collective that was called. */
typedef struct {
    int64_t numbers[WIDTH];
    PyObject *place;   /* owned: the segment, or a CallRef; NULL for none */
    PyObject *options; /* owned: those of torch; NULL if they tell nothing */
} Call;

/* A process group. */
typedef struct {
    const void *object;   /* its address; NULL once it is freed */
    int64_t messages;     /* that its backend has counted as collectives; -1 if it does not count them */
    int64_t last;         /* the number that it counted when this was last asked */
    int64_t called;       /* collectives, and messages where they count */
    char is_left_out;     /* it has no name */
    char is_numbered;     /* its collectives have the same numbers on all ranks */
    char shows_ends;      /* `Work.wait` returns when a collective is complete, and not only ordered */
} Group;

/* What the collectives of one place share; Python objects are compared by their addresses, and owned. */
typedef struct {
    PyObject *kind, *phase, *context;
    uint64_t dtype; /* as `Moved` has it */
    int64_t group, number;
    PyObject *texts; /* owned: for the ring */
} Site;

/* What the program may wait for. */
typedef struct {
    const void *work; /* its address */
    int64_t call, group, kept_as;
} Waiting;

enum { MOST_CALLS = 1 << 16, SITES = 256, WAITING = 1024, PROBED = 8, MOST_ARGUMENTS = 16 };

/* The listener: notes collectives until Python takes them. */
typedef struct {
    PyObject_HEAD
    CallState *state;
    PyObject *held[HELD];               /* owned; NULL before `set_up` */
    Py_ssize_t segment_slot, context_slot; /* where a log keeps them; 0: not known */
    Call *calls;          /* those that were not taken */
    int64_t first, count, capacity; /* the number of the first of them; how many there are, and have room */
    Group *groups;
    int64_t group_count, last_group; /* that of the last collective */
    char *ring; /* the memory of the newest collectives; NULL for none */
    PyObject *ring_memory; /* owned: keeps it mapped */
    int step;              /* the number of the running step */
    char is_on;
    uint64_t serial;       /* of what threads know of this listener */
    PyObject *logs_known;  /* owned: a list of the logs that threads know */
    ExchangeFunction exchange; /* NULL: there is none, or it refused a tensor */
    Site sites[SITES];     /* by a hash of their addresses; others are forgotten */
    Waiting waiting[WAITING];
} Calls;

/* A method of torch that is replaced. */
typedef struct {
    PyObject_HEAD
    CallState *state;
    PyObject *original, *listeners, *kind; /* owned; `kind` is the name of the collective */
    PyObject *order;                       /* owned: puts arguments by name in order */
    int outputs, inputs, peer;             /* positions of arguments; -1 for none */
    char is_message;
    PyObject *options_type; /* owned: that of the last call ... */
    int has_facts;          /* ... and whether such options tell anything */
} Method;

/* Notes a collective that begins, and returns its number; -1 if it is not noted, -2 with what is no Exception.
   `given` are the arguments behind the group. */
int64_t begin_call(Calls *self, Method *method, PyObject *group, PyObject *const *given, Py_ssize_t count);

/* Takes a message that has raised off those that its group has counted. */
void forget_message(Calls *self, const Method *method, int64_t call);

/* Notes what a call has returned. Returns -1 with what is no Exception. */
int note_work(Calls *self, const Method *method, int64_t call, PyObject *group, PyObject *work);

/* Notes that the program has waited. Returns -1 with what is no Exception. */
int note_wait(Calls *self, PyObject *work, int64_t start_ns);

/* Returns the time of `time.perf_counter_ns`; -1 with an exception. */
int64_t clock_ns(Calls *self);

/* Returns the first calls as Python has them, and forgets them; NULL with an exception. */
PyObject *take_calls(Calls *self, int64_t count);

/* Returns the numbers of the first calls as a `bytearray`. */
PyObject *copy_numbers(const Calls *self, int64_t count);

/* Returns where the instances of a class with `__slots__` keep an object, given one in which it is; 0 if it is not
   found. */
Py_ssize_t find_slot(PyObject *instance, const PyObject *object);

void drop_site(Site *site);

/* Returns the size of the file of the newest collectives. */
Py_ssize_t ring_bytes(void);

/* Has threads ask again for their logs. Returns -1 with an exception. */
int forget_threads(Calls *self);

#endif
