/* Notes the collectives that Python code calls, where they are called: what has to be known before a call blocks. What
   is rare, or new, is asked in Python; see called.py.

   A collective mostly follows a wait, so that the caches are cold and each line of memory counts: the same work takes
   five times as long there as in a loop. */

#include "_called.h"
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(_MSC_VER)
#define THREAD_LOCAL __declspec(thread)
#else
#define THREAD_LOCAL _Thread_local
#endif

#define NAME(name) self->state->names[NAME_##name]

enum { NOT_NOTED = -1, INTERRUPTED = -2, FAILED = -3 };

int64_t clock_ns(Calls *self) { return read_clock(self->held[CLOCK]); }

/* Reports the set exception, which ends the noting. Leaves set what is no Exception. */
static int64_t report(Calls *self) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return INTERRUPTED;
    PyObject *error = take_exception();
    self->is_on = 0;
    PyObject *done = PyObject_CallMethodObjArgs((PyObject *)self, NAME(FAIL), error, NULL);
    Py_XDECREF(error);
    Py_XDECREF(done);
    return done == NULL ? INTERRUPTED : NOT_NOTED;
}

/* ---- The file of the newest collectives, as in store/collective_ring.py. */

enum { MARK_BYTES = 16, RECORDS = 1024, SLOTS = 64, TEXT_BYTES = 252 };

typedef struct {
    int64_t number, start_ns, end_ns, seq_id, bytes_read, bytes_written;
    int32_t step, thread, peer;
    char texts[TEXT_BYTES];
} Record;

Py_ssize_t ring_bytes(void) {
    return (Py_ssize_t)(MARK_BYTES + sizeof(int64_t) + (RECORDS + SLOTS) * sizeof(Record));
}

static int64_t *begun_in(const Calls *self) { return (int64_t *)(self->ring + MARK_BYTES); }

static Record *record_in(const Calls *self, int64_t number) {
    return (Record *)(self->ring + MARK_BYTES + sizeof(int64_t)) + number % RECORDS;
}

/* Returns the number of the record; -1 if there is no file. */
static int64_t keep(Calls *self, const int64_t *numbers, PyObject *texts) {
    if (self->ring == NULL) return -1;
    int64_t number = (*begun_in(self))++;
    Record *record = record_in(self, number);
    char *bytes;
    Py_ssize_t size;
    record->number = 0; /* not whole yet */
    record->start_ns = numbers[START_NS];
    record->end_ns = 0;
    record->seq_id = numbers[NUMBER];
    record->bytes_read = numbers[BYTES_READ];
    record->bytes_written = numbers[BYTES_WRITTEN];
    record->step = self->step;
    record->thread = (int32_t)numbers[THREAD];
    record->peer = (int32_t)numbers[PEER];
    if (PyBytes_AsStringAndSize(texts, &bytes, &size) == 0) {
        size = size < TEXT_BYTES ? size : TEXT_BYTES;
        memcpy(record->texts, bytes, (size_t)size);
        if (size < TEXT_BYTES) record->texts[size] = 0;
    }
    record->number = number + 1;
    return number;
}

/* Returns a record by its number; NULL if it is not kept any more. */
static Record *find_record(const Calls *self, int64_t number) {
    if (self->ring == NULL || number < 0 || number < *begun_in(self) - RECORDS) return NULL;
    return record_in(self, number);
}

static void keep_end(Calls *self, int64_t number, int64_t now_ns) {
    Record *record = find_record(self, number);
    if (record != NULL) record->end_ns = now_ns;
}

/* ---- Threads. */

/* What a thread knows of the listener that it met last. */
static THREAD_LOCAL struct {
    uint64_t serial;
    PyObject *log; /* borrowed: `Calls.logs_known` has it until it gets another serial */
    int64_t number;
} here;

/* Returns the log of this thread, borrowed. */
static PyObject *log_of_thread(Calls *self) {
    if (here.serial == self->serial) return here.log;
    PyObject *log = PyObject_GetAttr(self->held[THREADS], NAME(LOG));
    if (log == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear();
        log = PyObject_GetAttr(self->held[LOGS], NAME(CURRENT));
    }
    int64_t number = log == NULL ? -1 : to_int64(PyObject_GetAttr(log, NAME(NUMBER)));
    int failed = PyErr_Occurred() || PyList_Append(self->logs_known, log) < 0;
    Py_XDECREF(log);
    if (failed) return NULL;
    here.serial = self->serial;
    here.log = log;
    here.number = number;
    return log;
}

int forget_threads(Calls *self) {
    static uint64_t last_serial = 0;
    PyObject *before = self->logs_known, *list = PyList_New(0);
    if (list == NULL) return -1;
    self->serial = ++last_serial;
    self->logs_known = list;
    Py_XDECREF(before);
    return 0;
}

/* ---- Where a collective is called. */

Py_ssize_t find_slot(PyObject *instance, const PyObject *object) {
    int64_t size = to_int64(PyObject_GetAttrString((PyObject *)Py_TYPE(instance), "__basicsize__"));
    enum { STEP = sizeof(PyObject *) };
    if (size < 0) PyErr_Clear();
    for (Py_ssize_t at = sizeof(PyObject); at + STEP <= size; at += STEP)
        if (*(PyObject **)((char *)instance + at) == object) return at;
    return 0;
}

/* Returns an attribute of a log. Reading the slot spares 200 ns, of those that the look-ups of Python take here. */
static PyObject *read_slot(PyObject *log, Py_ssize_t slot, PyObject *name) {
    PyObject *value = slot > 0 ? *(PyObject **)((char *)log + slot) : NULL;
    return value == NULL ? PyObject_GetAttr(log, name) : Py_NewRef(value);
}

typedef struct {
    PyObject *place, *context, *phase; /* owned; None for none */
} Where;

static void drop_where(Where *where) {
    Py_XDECREF(where->place);
    Py_XDECREF(where->context);
    Py_XDECREF(where->phase);
}

static int ask_where(Calls *self, Where *where) {
    PyObject *found = PyObject_CallMethodObjArgs((PyObject *)self, NAME(LOCATE), NULL), *place, *context, *phase;
    int is_found = found != NULL && PyArg_ParseTuple(found, "OOO", &place, &context, &phase);
    if (is_found) *where = (Where){Py_NewRef(place), Py_NewRef(context), Py_NewRef(phase)};
    Py_XDECREF(found);
    return is_found ? 0 : -1;
}

/* In the backward that runs on this thread: a call of a module in it; or ask Python. */
static int locate_in_backward(Calls *self, PyObject *log, PyObject *segment, int64_t task, Where *where) {
    int64_t own_task = segment == Py_None ? -1 : to_int64(PyObject_GetAttr(log, NAME(TASK)));
    if (own_task == -1 && PyErr_Occurred()) return -1;
    if (own_task != task) return ask_where(self, where);
    PyObject *context = read_slot(log, self->context_slot, NAME(CONTEXT));
    PyObject *phase = PyObject_GetAttr(segment, NAME(PHASE));
    *where = (Where){Py_NewRef(segment), context, phase};
    return context == NULL || phase == NULL ? -1 : 0;
}

/* Returns the backward that the engine runs on this thread; -1: none, or with an exception. In a module call it asks
   torch only if any backward runs, because the answer takes 0.7 us after a wait. */
static int64_t find_task(Calls *self, PyObject *segment) {
    if (segment != Py_None && PyList_Size(self->held[BACKWARDS]) == 0) return -1;
    return to_int64(PyObject_CallNoArgs(self->held[GRAPH_TASK_ID]));
}

/* Outside of backwards a call of a module is always in forward. */
static int locate(Calls *self, PyObject *log, Where *where) {
    PyObject *segment = read_slot(log, self->segment_slot, NAME(SEGMENT));
    int64_t task = segment == NULL ? -1 : find_task(self, segment);
    int failed = PyErr_Occurred() ? -1 : 0;
    if (!failed && task >= 0) {
        failed = locate_in_backward(self, log, segment, task, where);
    } else if (!failed && segment != Py_None) {
        PyObject *context = read_slot(log, self->context_slot, NAME(CONTEXT));
        *where = (Where){Py_NewRef(segment), context, Py_NewRef(self->held[FORWARD])};
        failed = where->context == NULL ? -1 : 0;
    } else if (!failed) {
        int may_be = may_be_stepping(self->held[OPTIMIZER_STARTS]);
        failed = may_be < 0 ? -1 : may_be ? ask_where(self, where) : 0;
        if (!may_be) *where = (Where){Py_NewRef(Py_None), Py_NewRef(Py_None), Py_NewRef(Py_None)};
    }
    Py_XDECREF(segment);
    return failed;
}

/* ---- What is moved. */

typedef struct {
    int64_t bytes;
    uint64_t dtype; /* of the first tensor, as the exchange has it, or the address of torch's; 0: there is no tensor */
} Moved;

/* Reads a tensor's size and dtype through DLPack's exchange. Returns whether it could. */
static int exchange(Calls *self, PyObject *tensor, Moved *moved) {
    PyObject *type = (PyObject *)Py_TYPE(tensor);
    Exchanged found;
    if (self->exchange == NULL || (type != self->held[TENSOR] && type != self->held[PARAMETER])) return 0;
    if (self->exchange(tensor, &found) < 0) {
        PyErr_Clear();
        self->exchange = NULL; /* not again, because an exception in torch takes long */
        return 0;
    }
    int64_t bits = (int64_t)found.dtype_bits * found.dtype_lanes;
    for (int at = 0; at < found.dimensions; at++) bits *= found.shape[at];
    moved->bytes += bits / 8;
    if (moved->dtype == 0)
        moved->dtype = found.dtype_code | (uint64_t)found.dtype_bits << 8 | (uint64_t)found.dtype_lanes << 16;
    return 1;
}

static int ask_tensor(Calls *self, PyObject *tensor, Moved *moved) {
    PyObject *size = PyObject_GetAttr(tensor, NAME(NBYTES));
    if (size == NULL && PyErr_ExceptionMatches(PyExc_Exception)) { /* a sparse tensor */
        PyErr_Clear();
        size = PyObject_CallMethodObjArgs((PyObject *)self, NAME(SIZE_OF), tensor, NULL);
    }
    int64_t bytes = to_int64(size);
    if (bytes < 0) return -1;
    moved->bytes += bytes;
    if (moved->dtype != 0) return 0;
    PyObject *dtype = PyObject_GetAttr(tensor, NAME(DTYPE)); /* torch never frees one */
    if (dtype == NULL) return -1;
    moved->dtype = (uint64_t)(uintptr_t)dtype;
    Py_DECREF(dtype);
    return 0;
}

/* Adds up a tensor, or nested lists of them. */
static int add_up(Calls *self, PyObject *tensors, Moved *moved) {
    if (tensors == NULL || tensors == Py_None || exchange(self, tensors, moved)) return 0;
    if (!PyList_Check(tensors) && !PyTuple_Check(tensors)) return ask_tensor(self, tensors, moved);
    int failed = Py_EnterRecursiveCall(" in the tensors of a collective");
    if (failed) return -1;
    for (Py_ssize_t at = 0; !failed && at < PySequence_Size(tensors); at++) {
        PyObject *item = PySequence_GetItem(tensors, at);
        failed = item == NULL ? -1 : add_up(self, item, moved);
        Py_XDECREF(item);
    }
    Py_LeaveRecursiveCall();
    return PyErr_Occurred() ? -1 : failed; /* the size of a subclass may raise */
}

/* Returns the dtype of the first tensor in nested lists, None if there is none; NULL with an exception. */
static PyObject *dtype_of(Calls *self, PyObject *tensors) {
    if (tensors == NULL || tensors == Py_None) return Py_NewRef(Py_None);
    if (!PyList_Check(tensors) && !PyTuple_Check(tensors)) return PyObject_GetAttr(tensors, NAME(DTYPE));
    PyObject *dtype = NULL;
    if (Py_EnterRecursiveCall(" in the tensors of a collective")) return NULL;
    for (Py_ssize_t at = 0; at < PySequence_Size(tensors) && (dtype == NULL || dtype == Py_None); at++) {
        PyObject *item = PySequence_GetItem(tensors, at);
        Py_XDECREF(dtype);
        dtype = item == NULL ? NULL : dtype_of(self, item);
        Py_XDECREF(item);
        if (dtype == NULL) break;
    }
    Py_LeaveRecursiveCall();
    return dtype == NULL && !PyErr_Occurred() ? Py_NewRef(Py_None) : dtype;
}

/* Finds the options of a collective, borrowed, if they tell anything. */
static int find_options(Calls *self, Method *method, PyObject *const *given, Py_ssize_t count, PyObject **options) {
    if (count == 0) return 0;
    PyObject *last = given[count - 1], *type = (PyObject *)Py_TYPE(last);
    if (type != method->options_type) {
        PyObject *answer = PyObject_CallMethodObjArgs((PyObject *)self, NAME(HAS_FACTS), type, NULL);
        PyObject *before = method->options_type;
        int has_facts = answer == NULL ? -1 : PyObject_IsTrue(answer);
        Py_XDECREF(answer);
        if (has_facts < 0) return -1;
        method->has_facts = has_facts;
        method->options_type = Py_NewRef(type);
        Py_XDECREF(before);
    }
    *options = method->has_facts ? last : NULL;
    return 0;
}

/* ---- Groups and sites. */

/* Returns the index of a process group; -1 with an exception. */
static int64_t find_group(Calls *self, PyObject *group) {
    if (self->last_group < self->group_count && self->groups[self->last_group].object == group) return self->last_group;
    for (int64_t at = self->group_count - 1; at >= 0; at--)
        if (self->groups[at].object == group) return self->last_group = at;
    int64_t at = to_int64(PyObject_CallMethodObjArgs((PyObject *)self, NAME(ADD_GROUP), group, NULL));
    if (at < 0 || at < self->group_count) return at;
    PyErr_SetString(PyExc_RuntimeError, "the process group was not added");
    return -1;
}

/* What a site is looked up with. */
typedef struct {
    PyObject *kind, *tensors; /* borrowed */
    int64_t group;
    uint64_t dtype;
    const Where *where;
} SiteKey;

static PyObject *ask_for_site(Calls *self, const SiteKey *key) {
    PyObject *group = PyLong_FromLongLong(key->group), *dtype = dtype_of(self, key->tensors), *site = NULL;
    if (group != NULL && dtype != NULL)
        site = PyObject_CallMethodObjArgs((PyObject *)self, NAME(ADD_SITE), key->kind, group, dtype, key->where->phase,
                                          key->where->context, NULL);
    Py_XDECREF(group);
    Py_XDECREF(dtype);
    return site;
}

void drop_site(Site *site) {
    Site before = *site;
    *site = (Site){0};
    Py_XDECREF(before.kind);
    Py_XDECREF(before.phase);
    Py_XDECREF(before.context);
    Py_XDECREF(before.texts);
}

/* Finds the site of a collective: its number and, owned, its texts. */
static int find_site(Calls *self, const SiteKey *key, int64_t *number, PyObject **texts) {
    const Where *where = key->where;
    uintptr_t hash = (uintptr_t)where->context * 3 ^ (uintptr_t)key->kind ^ (uintptr_t)key->group << 9;
    Site *site = &self->sites[(hash ^ hash >> 8 ^ hash >> 16 ^ key->dtype * 5) / 16 % SITES];
    if (site->kind != key->kind || site->group != key->group || site->dtype != key->dtype ||
        site->phase != where->phase || site->context != where->context) {
        PyObject *found = ask_for_site(self, key), *bytes;
        long long named;
        if (found == NULL || !PyArg_ParseTuple(found, "LO!", &named, &PyBytes_Type, &bytes)) {
            Py_XDECREF(found);
            return -1;
        }
        drop_site(site);
        *site = (Site){Py_NewRef(key->kind), Py_NewRef(where->phase), Py_NewRef(where->context), key->dtype,
                       key->group, named, Py_NewRef(bytes)};
        Py_DECREF(found);
    }
    *number = site->number;
    *texts = Py_NewRef(site->texts);
    return 0;
}

/* ---- The beginning. */

/* Finds the number of a message between two ranks, and the other rank. */
static int number_message(Calls *self, Method *method, int64_t group, PyObject *const *given, Py_ssize_t count,
                          int64_t *numbers) {
    if (method->peer < 0 || method->peer >= count) return 0;
    PyObject *at = PyLong_FromLongLong(group), *found = NULL;
    if (at != NULL)
        found = PyObject_CallMethodObjArgs((PyObject *)self, NAME(NUMBER_MESSAGE), at, method->kind,
                                           given[method->peer], NULL);
    long long peer = -1, number = -1;
    int failed = found == NULL || !PyArg_ParseTuple(found, "LL", &peer, &number) ? -1 : 0;
    numbers[PEER] = peer;
    numbers[NUMBER] = number;
    Py_XDECREF(at);
    Py_XDECREF(found);
    return failed;
}

PyObject *copy_numbers(const Calls *self, int64_t count) {
    enum { BYTES = WIDTH * sizeof(int64_t) };
    PyObject *bytes = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)count * BYTES);
    char *into = bytes == NULL ? NULL : PyByteArray_AsString(bytes);
    for (int64_t at = 0; into != NULL && at < count; at++) memcpy(into + at * BYTES, self->calls[at].numbers, BYTES);
    return bytes;
}

/* Gives neighbouring calls with one place its index in a list, which it returns. */
static PyObject *number_places(Calls *self, int64_t count) {
    PyObject *places = PyList_New(0), *last = NULL;
    for (int64_t at = 0; places != NULL && at < count; at++) {
        PyObject *place = self->calls[at].place;
        if (place != NULL && place != last && PyList_Append(places, place) < 0) Py_CLEAR(places);
        last = place == NULL ? last : place;
        if (places != NULL) self->calls[at].numbers[PLACE] = place == NULL ? -1 : PyList_Size(places) - 1;
    }
    return places;
}

static PyObject *list_options(const Calls *self, int64_t count) {
    PyObject *options = PyList_New((Py_ssize_t)count);
    for (int64_t at = 0; options != NULL && at < count; at++) {
        PyObject *of_call = self->calls[at].options;
        PyList_SetItem(options, (Py_ssize_t)at, Py_NewRef(of_call == NULL ? Py_None : of_call));
    }
    return options;
}

/* Forgets the first calls, of which others hold the objects: freeing one may run any code. The memory stays, because
   new pages would take longer than all else. */
static void forget_calls(Calls *self, int64_t count) {
    for (int64_t at = 0; at < count; at++) {
        Py_XDECREF(self->calls[at].place);
        Py_XDECREF(self->calls[at].options);
    }
    self->count -= count;
    self->first += count;
    memmove(self->calls, self->calls + count, (size_t)self->count * sizeof *self->calls);
}

PyObject *take_calls(Calls *self, int64_t count) {
    long long first = self->first;
    PyObject *places = number_places(self, count), *options = list_options(self, count);
    PyObject *numbers = copy_numbers(self, count);
    PyObject *taken = NULL;
    if (places != NULL && options != NULL && numbers != NULL)
        taken = Py_BuildValue("LOOO", first, numbers, places, options);
    if (taken != NULL && self->first == first && count > 0) forget_calls(self, count);
    Py_XDECREF(places);
    Py_XDECREF(options);
    Py_XDECREF(numbers);
    return taken;
}

/* Makes room for another call. */
static int reserve(Calls *self) {
    if (self->count >= MOST_CALLS) {
        PyObject *lost = take_calls(self, MOST_CALLS / 2);
        if (lost == NULL) return -1;
        Py_DECREF(lost);
    }
    if (self->count < self->capacity) return 0;
    int64_t capacity = self->capacity ? 2 * self->capacity : 64;
    Call *calls = realloc(self->calls, (size_t)capacity * sizeof *calls);
    if (calls == NULL) return PyErr_NoMemory(), -1;
    self->calls = calls;
    self->capacity = capacity;
    return 0;
}

static PyObject *argument(int at, PyObject *const *given, Py_ssize_t count) {
    return at >= 0 && at < count ? given[at] : NULL;
}

/* Appends what is known of a collective. No Python code runs here. Takes the references of the call. */
static int64_t append(Calls *self, const Method *method, Call *call, PyObject *texts) {
    Group *group = &self->groups[call->numbers[GROUP]];
    if (!method->is_message) {
        group->called++;
        if (group->is_numbered) call->numbers[NUMBER] = group->last + 1 - (group->messages > 0 ? group->messages : 0);
    } else if (group->messages >= 0) {
        group->called++;
        group->messages++;
        group->last++;
    }
    call->numbers[KEPT_AS] = keep(self, call->numbers, texts);
    self->calls[self->count] = *call;
    return self->first + self->count++;
}

static int read_moved(Calls *self, PyObject *outputs, PyObject *inputs, int64_t *numbers, uint64_t *dtype) {
    Moved written = {0, 0}, read = {0, 0};
    if (add_up(self, outputs, &written) < 0 || (inputs != outputs && add_up(self, inputs, &read) < 0)) return -1;
    numbers[BYTES_WRITTEN] = written.bytes;
    numbers[BYTES_READ] = inputs == outputs ? written.bytes : read.bytes;
    *dtype = inputs == NULL || inputs == Py_None || inputs == outputs ? written.dtype : read.dtype;
    return 0;
}

static int64_t note(Calls *self, Method *method, PyObject *group, PyObject *const *given, Py_ssize_t count) {
    PyObject *texts = NULL, *log = NULL, *options = NULL;
    Call call = {.numbers = {[NUMBER] = -1, [PEER] = -1}};
    Where where = {NULL, NULL, NULL};
    uint64_t dtype = 0;
    int64_t *numbers = call.numbers, at = find_group(self, group), noted = FAILED;
    if (at < 0) return FAILED;
    if (self->groups[at].is_left_out) return NOT_NOTED;
    numbers[GROUP] = at;
    PyObject *outputs = argument(method->outputs, given, count), *inputs = argument(method->inputs, given, count);
    int failed = read_moved(self, outputs, inputs, numbers, &dtype);
    if (!failed && method->is_message) failed = number_message(self, method, at, given, count, numbers);
    if (!failed && !method->is_message) failed = find_options(self, method, given, count, &options);
    if (!failed) failed = (log = log_of_thread(self)) == NULL || locate(self, log, &where) < 0;
    if (!failed) {
        SiteKey key = {method->kind, inputs == NULL || inputs == Py_None ? outputs : inputs, at, dtype, &where};
        numbers[THREAD] = here.number;
        failed = find_site(self, &key, &numbers[SITE], &texts);
    }
    if (!failed && reserve(self) == 0 && (numbers[START_NS] = clock_ns(self)) > 0) {
        call.place = where.place == Py_None ? NULL : Py_NewRef(where.place);
        call.options = options == NULL ? NULL : Py_NewRef(options);
        noted = append(self, method, &call, texts);
    }
    Py_XDECREF(texts);
    drop_where(&where);
    return noted;
}

int64_t begin_call(Calls *self, Method *method, PyObject *group, PyObject *const *given, Py_ssize_t count) {
    if (!self->is_on || self->held[LOGS] == NULL) return NOT_NOTED;
    int64_t noted = note(self, method, group, given, count);
    return noted == FAILED ? report(self) : noted;
}

/* ---- The end. */

static Call *call_at(Calls *self, int64_t number) {
    int64_t at = number - self->first;
    return at >= 0 && at < self->count ? &self->calls[at] : NULL;
}

/* Returns where a work is, or would be. */
static Waiting *find_waiting(Calls *self, const void *work) {
    uintptr_t hash = (uintptr_t)work / 16;
    Waiting *free_one = NULL, *first = &self->waiting[(hash ^ hash >> 10) % (WAITING - PROBED)];
    for (Waiting *waiting = first; waiting < first + PROBED; waiting++) {
        if (waiting->work == work) return waiting;
        if (waiting->work == NULL && free_one == NULL) free_one = waiting;
    }
    return free_one == NULL ? first : free_one;
}

/* Asks for the number that a collective has on all ranks. Other code may have started some before it, in C++; and the
   answer takes 0.6 us, in which another thread works for the collective already. */
static int correct_number(Calls *self, int64_t call_number, PyObject *group) {
    int64_t last = to_int64(PyObject_CallFunctionObjArgs(self->held[NUMBER_OF_LAST], group, NULL));
    if (last == -1 && PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) return -1;
        PyErr_Clear(); /* the group was destroyed */
        return 0;
    }
    Call *call = call_at(self, call_number);
    if (call == NULL) return 0;
    Group *of = &self->groups[call->numbers[GROUP]];
    int64_t number = last - (of->messages > 0 ? of->messages : 0);
    of->last = last;
    if (number == call->numbers[NUMBER]) return 0;
    call->numbers[NUMBER] = number;
    Record *record = find_record(self, call->numbers[KEPT_AS]);
    if (record != NULL) record->seq_id = number;
    return 0;
}

/* Gloo counts a message once it has begun. */
void forget_message(Calls *self, const Method *method, int64_t number) {
    Call *call = call_at(self, number);
    Group *group = call == NULL ? NULL : &self->groups[call->numbers[GROUP]];
    if (!method->is_message || group == NULL || group->messages < 0) return;
    group->called--;
    group->messages--;
    group->last--;
}

int note_work(Calls *self, const Method *method, int64_t number, PyObject *group, PyObject *work) {
    Call *call = call_at(self, number);
    if (call == NULL) return 0;
    const Group *of = &self->groups[call->numbers[GROUP]];
    if (work != Py_None) {
        *find_waiting(self, work) = (Waiting){work, number, call->numbers[GROUP], call->numbers[KEPT_AS]};
    } else if (of->shows_ends) {
        call->numbers[END_NS] = clock_ns(self);
        keep_end(self, call->numbers[KEPT_AS], call->numbers[END_NS]);
    }
    if (!self->is_on || method->is_message || !of->is_numbered || correct_number(self, number, group) == 0) return 0;
    return report(self) == INTERRUPTED ? -1 : 0;
}

int note_wait(Calls *self, PyObject *work, int64_t start_ns) {
    Waiting *waiting = find_waiting(self, work);
    if (waiting->work != work) return 0;
    int64_t now_ns = clock_ns(self), number = waiting->call;
    int shows_end = self->groups[waiting->group].shows_ends;
    if (shows_end) keep_end(self, waiting->kept_as, now_ns);
    waiting->work = NULL;
    Call *call = call_at(self, number);
    if (call != NULL) {
        call->numbers[WAIT_NS] = now_ns - start_ns;
        if (shows_end) call->numbers[END_NS] = now_ns;
        return 0;
    }
    PyObject *numbers = Py_BuildValue("LLL", (long long)number, (long long)(now_ns - start_ns),
                                      shows_end ? (long long)now_ns : 0LL);
    PyObject *done = NULL;
    if (numbers != NULL) done = PyObject_CallMethodObjArgs((PyObject *)self, NAME(END_LATE), numbers, NULL);
    Py_XDECREF(numbers);
    Py_XDECREF(done);
    return done == NULL && report(self) == INTERRUPTED ? -1 : 0;
}

