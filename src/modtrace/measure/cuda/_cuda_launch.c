/* Launches kernels by the driver API of CUDA, whose library is opened at run time: nothing of CUDA is needed to build.

   A kernel belongs to the primary context of one device, which is the one that torch uses. Where another context is
   current on the calling thread, or none, as on a thread that has not used the device yet, it is made current for the
   length of the call. */

#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../_measurements.h"

typedef int (*Launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);

static struct {
    int (*cuDeviceGet)(int *, int);
    int (*cuDevicePrimaryCtxRetain)(void **, int);
    int (*cuCtxGetCurrent)(void **);
    int (*cuCtxPushCurrent_v2)(void *);
    int (*cuCtxPopCurrent_v2)(void **);
    int (*cuModuleLoadData)(void **, const void *);
    int (*cuModuleGetFunction)(void **, void *, const char *);
    int (*cuStreamIsCapturing)(void *, int *);
    int (*cuMemcpyHtoDAsync_v2)(uint64_t, const void *, size_t, void *);
    int (*cuGetErrorName)(int, const char **);
    Launch cuLaunchKernel;
} driver;

static int is_open;

static const char *const names[] = {
    "cuDeviceGet",         "cuDevicePrimaryCtxRetain", "cuCtxGetCurrent",
    "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2",       "cuModuleLoadData",
    "cuModuleGetFunction", "cuStreamIsCapturing",      "cuMemcpyHtoDAsync_v2",
    "cuGetErrorName",      "cuLaunchKernel",
};

static PyObject *failed(const char *what, int status) {
    const char *name = NULL;
    if (driver.cuGetErrorName == NULL || driver.cuGetErrorName(status, &name) || name == NULL) name = "unknown error";
    return PyErr_Format(PyExc_RuntimeError, "%s: %s (%d)", what, name, status);
}

/* open(path): opens the driver's library. */
static PyObject *open_driver(PyObject *Py_UNUSED(module), PyObject *args) {
    const char *path;
    if (!PyArg_ParseTuple(args, "s", &path)) return NULL;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) return PyErr_Format(PyExc_OSError, "%s", dlerror());
    void *found[sizeof names / sizeof *names];
    for (size_t at = 0; at < sizeof names / sizeof *names; at++) {
        found[at] = dlsym(library, names[at]);
        if (found[at] == NULL) return PyErr_Format(PyExc_OSError, "%s has no %s", path, names[at]);
    }
    _Static_assert(sizeof found == sizeof driver, "one name for each function");
    memcpy(&driver, found, sizeof found);
    is_open = 1;
    Py_RETURN_NONE;
}

/* load(device, image, names) -> (context, function, ...): loads a compiled program into the primary context. */
static PyObject *load(PyObject *Py_UNUSED(module), PyObject *args) {
    int ordinal, device, status;
    const char *image;
    Py_ssize_t size;
    PyObject *wanted;
    if (!PyArg_ParseTuple(args, "iy#O!", &ordinal, &image, &size, &PyTuple_Type, &wanted)) return NULL;
    if (!is_open) return PyErr_Format(PyExc_RuntimeError, "load(): open() the driver first");
    void *context, *before, *program = NULL;
    if ((status = driver.cuDeviceGet(&device, ordinal))) return failed("cuDeviceGet", status);
    if ((status = driver.cuDevicePrimaryCtxRetain(&context, device))) return failed("cuDevicePrimaryCtxRetain", status);
    Py_ssize_t count = PyTuple_Size(wanted);
    PyObject *found = PyTuple_New(count + 1);
    if (found == NULL) return NULL;
    PyTuple_SetItem(found, 0, PyLong_FromVoidPtr(context));
    const char *what = "cuCtxPushCurrent";
    if (!(status = driver.cuCtxPushCurrent_v2(context))) {
        what = "cuModuleLoadData";
        Py_BEGIN_ALLOW_THREADS
        status = driver.cuModuleLoadData(&program, image);
        Py_END_ALLOW_THREADS
        for (Py_ssize_t at = 0; !status && at < count; at++) {
            void *function = NULL;
            PyObject *name = PyUnicode_AsUTF8String(PyTuple_GetItem(wanted, at));
            if (name == NULL) break;
            what = "cuModuleGetFunction";
            status = driver.cuModuleGetFunction(&function, program, PyBytes_AsString(name));
            Py_DECREF(name);
            PyTuple_SetItem(found, at + 1, PyLong_FromVoidPtr(function));
        }
        driver.cuCtxPopCurrent_v2(&before);
    }
    if (status || PyErr_Occurred()) {
        Py_DECREF(found);
        return status ? failed(what, status) : NULL;
    }
    return found;
}

/* As in numbers.cuh. */
typedef struct {
    uint64_t numbers, count, part_size, inner;
    double repeats;
    uint64_t row;
    uint32_t parts, first_part, first_total, divisor, channels, wanted, width, padding;
} Task;

enum { THREADS = 256, VECTOR_BYTES = 16 };

/* What a row holds until the kernel has written it, as in rows.py. */
static const uint64_t AWAITED = 0x7FF8A3A17ED00001;

static void await(const Task *task) {
    uint64_t *row = (uint64_t *)(uintptr_t)task->row;
    for (uint32_t at = 0; at < task->width; at++) row[at] = AWAITED;
}

static void forget(const Task *task) { memset((void *)(uintptr_t)task->row, 0, task->width * sizeof(uint64_t)); }

/* The functions of a dtype, as a tuple in Python: cuda_kernels.py explains its fields. */
typedef struct {
    unsigned long long context, measure_one, measure_many, number_bytes, part_bytes;
    unsigned parts, most_parts, row_width, total_width;
} Program;

static int read_program(PyObject *tuple, Program *program) {
    if (!PyArg_ParseTuple(tuple, "KKKKKIIII", &program->context, &program->measure_one, &program->measure_many,
                          &program->number_bytes, &program->part_bytes, &program->parts, &program->most_parts,
                          &program->row_width, &program->total_width))
        return 0;
    if (is_open && program->measure_one && program->measure_many && 0 < program->number_bytes &&
        program->number_bytes <= VECTOR_BYTES && program->number_bytes <= program->part_bytes && program->most_parts)
        return 1;
    PyErr_Format(PyExc_ValueError, "no such function, or size of a number");
    return 0;
}

static uint32_t width_of_channels(const Task *task) { return (task->channels + 1) / 2; }

/* Cuts a tensor into parts, by its count and the size of a number alone, and sets the size of its row. */
static void cut(Task *task, const Program *program) {
    uint64_t unit = program->part_bytes / program->number_bytes, units = (task->count + unit - 1) / unit;
    uint64_t units_of_part = (units + program->most_parts - 1) / program->most_parts;
    units_of_part = units_of_part ? units_of_part : 1;
    task->part_size = units_of_part * unit;
    task->parts = units ? (uint32_t)((units + units_of_part - 1) / units_of_part) : 1;
    task->width = program->row_width + width_of_channels(task);
}

/* The status of a launch that was left out, because the stream is being captured in a CUDA graph. */
enum { LEFT_OUT = -1 };

typedef struct {
    void *function, *context, *stream;
    unsigned blocks;
    void **arguments;
    uint64_t to; /* where `bytes` bytes are copied before: on the device */
    const void *from;
    size_t bytes;
} Order;

static int launch_unlocked(const Order *order) {
    void *current = NULL, *before;
    int capture = 0, is_pushed = 0, status = driver.cuCtxGetCurrent(&current);
    if (!status && current != order->context) {
        status = driver.cuCtxPushCurrent_v2(order->context);
        is_pushed = !status;
    }
    if (!status) status = driver.cuStreamIsCapturing(order->stream, &capture);
    if (!status && capture) status = LEFT_OUT;
    if (!status && order->bytes)
        status = driver.cuMemcpyHtoDAsync_v2(order->to, order->from, order->bytes, order->stream);
    if (!status)
        status = driver.cuLaunchKernel(order->function, order->blocks, 1, 1, THREADS, 1, 1, 0, order->stream,
                                       order->arguments, NULL);
    if (is_pushed) driver.cuCtxPopCurrent_v2(&before);
    return status;
}

static int launch(const Order *order) {
    int status;
    Py_BEGIN_ALLOW_THREADS /* a launch waits while the stream is full, maybe for another thread of Python */
    status = launch_unlocked(order);
    Py_END_ALLOW_THREADS
    return status;
}

static PyObject *was_launched(int status) {
    if (status == LEFT_OUT) Py_RETURN_FALSE;
    if (status) return failed("cuLaunchKernel", status);
    Py_RETURN_TRUE;
}

/* Reads a tuple (numbers, count, repeats, divisor, row, wanted, channels, inner). */
static int read_task(PyObject *tuple, Task *task) {
    unsigned long long numbers, count, row, inner;
    memset(task, 0, sizeof *task);
    if (!PyArg_ParseTuple(tuple, "KKdIKIIK", &numbers, &count, &task->repeats, &task->divisor, &row, &task->wanted,
                          &task->channels, &inner))
        return 0;
    task->numbers = numbers;
    task->count = count;
    task->inner = inner;
    task->row = row;
    if (row && (inner || !task->channels)) return 1;
    PyErr_Format(PyExc_ValueError, "no row, or channels of no numbers");
    return 0;
}

/* Launches the kernel for one tensor; `scratch` is (address of the parts, address of the totals). */
static PyObject *measure_task(Task *task, const Program *program, PyObject *stream, PyObject *scratch) {
    unsigned long long parts, totals;
    void *handle = PyLong_AsVoidPtr(stream);
    if (PyErr_Occurred() || !PyArg_ParseTuple(scratch, "KK", &parts, &totals)) return NULL;
    if (!task->row) return PyErr_Format(PyExc_ValueError, "no row");
    cut(task, program);
    void *arguments[] = {task, &parts, &totals};
    Order order = {(void *)(uintptr_t)program->measure_one, (void *)(uintptr_t)program->context, handle, task->parts,
                   arguments, 0, NULL, 0};
    await(task);
    int status = launch(&order);
    if (status) forget(task);
    return was_launched(status);
}

/* measure(task, program, stream, scratch) */
static PyObject *measure(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs) {
    Task task;
    Program program;
    if (nargs != 4) return PyErr_Format(PyExc_TypeError, "measure() takes 4 arguments, not %zd", nargs);
    if (!read_task(args[0], &task) || !read_program(args[1], &program)) return NULL;
    return measure_task(&task, &program, args[2], args[3]);
}

enum { DEVICE, IS_CONTIGUOUS, NUMEL, DATA_PTR, OWN_NAMES };
static const char *const spelled[OWN_NAMES] = {"device", "is_contiguous", "numel", "data_ptr"};
static PyObject *own_names[OWN_NAMES];

/* Calls a method without arguments. Returns 0, with an exception set, if it raises, or does not return a number. */
static int ask(PyObject *object, PyObject *name, unsigned long long *number) {
    PyObject *result = PyObject_CallMethodObjArgs(object, name, NULL);
    if (result == NULL) return 0;
    *number = PyLong_AsUnsignedLongLong(result);
    Py_DECREF(result);
    return !PyErr_Occurred();
}

/* Reads where the elements of a contiguous tensor are. Returns 0 if it is not contiguous or its storage is too short, -1
   with an exception set. */
static int read_tensor(PyObject *tensor, const Program *program, Task *task) {
    unsigned long long is_contiguous, numel, address, offset, held;
    if (!ask(tensor, own_names[IS_CONTIGUOUS], &is_contiguous)) return -1;
    if (!is_contiguous) return 0;
    if (!ask(tensor, own_names[NUMEL], &numel)) return -1;
    memset(task, 0, sizeof *task);
    task->repeats = 1;
    task->divisor = program->parts;
    if (numel == 0) return 1;
    if (!ask(tensor, own_names[DATA_PTR], &address) || !ask(tensor, shared_names[STORAGE_OFFSET], &offset)) return -1;
    PyObject *storage = PyObject_CallMethodObjArgs(tensor, shared_names[UNTYPED_STORAGE], NULL);
    if (storage == NULL) return -1;
    int is_read = ask(storage, shared_names[NBYTES], &held);
    Py_DECREF(storage);
    if (!is_read) return -1;
    if (address == 0) return 0;
    task->numbers = address;
    task->count = numel * program->parts;
    return held >= (offset + numel) * program->parts * program->number_bytes && address % program->number_bytes == 0;
}

/* Tensors of one dtype that are measured together. */
typedef struct {
    PyObject_HEAD
    Task *tasks;
    size_t count, capacity;
    uint64_t blocks, totals; /* of all, and of one more */
    Program program;
    PyObject *tensors;  /* their memory must not be freed before the launch */
    PyObject *results;  /* what is made of their rows: not used here */
} Batch;

static PyTypeObject *batch_type;

static int append(Batch *batch, Task *task) {
    if (batch->count + 1 >= batch->capacity) {
        size_t capacity = batch->capacity ? 2 * batch->capacity : 256;
        Task *tasks = realloc(batch->tasks, capacity * sizeof *tasks);
        if (tasks == NULL) return PyErr_NoMemory(), 0;
        batch->tasks = tasks;
        batch->capacity = capacity;
    }
    cut(task, &batch->program);
    task->first_part = (uint32_t)batch->blocks - 1;
    task->first_total = (uint32_t)batch->totals;
    batch->blocks += task->parts;
    batch->totals += batch->program.total_width + width_of_channels(task);
    batch->tasks[batch->count++] = *task;
    return 1;
}

static PyObject *batch_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *tuple;
    Program program;
    if (!PyArg_ParseTuple(args, "O!", &PyTuple_Type, &tuple) || !read_program(tuple, &program)) return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Batch *batch = (Batch *)allocate(type, 0);
    if (batch == NULL) return NULL;
    batch->program = program;
    batch->blocks = 1;
    batch->totals = program.total_width;
    batch->tensors = PyList_New(0);
    batch->results = PyList_New(0);
    if (batch->tensors == NULL || batch->results == NULL) Py_CLEAR(batch);
    return (PyObject *)batch;
}

static void batch_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    free(((Batch *)self)->tasks);
    Py_XDECREF(((Batch *)self)->tensors);
    Py_XDECREF(((Batch *)self)->results);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* Removes what was appended to a list behind its first entries. */
static void shorten(PyObject *list, Py_ssize_t size) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    if (PyList_SetSlice(list, size, PyList_Size(list), NULL)) PyErr_Clear();
    PyErr_Restore(type, value, trace);
}

/* Adds a tensor with its measurement. Returns 0 with an exception set if there is no memory for that. */
static int add_to_batch(Batch *batch, Task *task, PyObject *tensor, PyObject *result) {
    Py_ssize_t size = PyList_Size(batch->tensors);
    if (PyList_Append(batch->tensors, tensor) || PyList_Append(batch->results, result) || !append(batch, task)) {
        shorten(batch->tensors, size);
        shorten(batch->results, size);
        return 0;
    }
    await(task);
    return 1;
}

/* add(task, tensor, result) */
static PyObject *batch_add(PyObject *self, PyObject *args) {
    PyObject *tuple, *tensor, *result;
    Task task;
    if (!PyArg_ParseTuple(args, "O!OO", &PyTuple_Type, &tuple, &tensor, &result) || !read_task(tuple, &task)) return NULL;
    if (!add_to_batch((Batch *)self, &task, tensor, result)) return NULL;
    Py_RETURN_NONE;
}

static PyObject *batch_get_results(PyObject *self, void *Py_UNUSED(closure)) {
    return Py_NewRef(((Batch *)self)->results);
}

/* sizes() -> (bytes of the table, number of blocks, words of the totals). The table has a row for itself, the tasks and
   one more, which writes that row and has the first totals, and for each block the number of its task. */
static PyObject *batch_sizes(PyObject *self, PyObject *Py_UNUSED(args)) {
    Batch *batch = (Batch *)self;
    unsigned long long bytes = batch->program.row_width * sizeof(uint64_t) + (batch->count + 1) * sizeof(Task) +
                               batch->blocks * sizeof(uint32_t);
    return Py_BuildValue("(KKK)", bytes, (unsigned long long)batch->blocks, (unsigned long long)batch->totals);
}

/* launch(stream, table, device_table, parts, totals): returns False, and launches nothing, if the stream is being
   captured. Nobody may write to `table` before its first row has been written. */
static PyObject *batch_launch(PyObject *self, PyObject *args) {
    Batch *batch = (Batch *)self;
    unsigned long long stream, table, on_device, parts, totals;
    if (!PyArg_ParseTuple(args, "KKKKK", &stream, &table, &on_device, &parts, &totals)) return NULL;
    if (!table) return PyErr_Format(PyExc_ValueError, "launch(): no table");
    uint64_t *own_row = (uint64_t *)(uintptr_t)table;
    size_t row_bytes = batch->program.row_width * sizeof(uint64_t);
    Task *tasks = (Task *)((char *)own_row + row_bytes), own = {.row = (uintptr_t)own_row};
    uint32_t *owners = (uint32_t *)(tasks + batch->count + 1);
    if (batch->count) memcpy(tasks, batch->tasks, batch->count * sizeof *tasks);
    cut(&own, &batch->program);
    own.first_part = (uint32_t)batch->blocks - 1;
    tasks[batch->count] = own;
    for (size_t at = 0; at <= batch->count; at++)
        for (uint32_t part = 0; part < tasks[at].parts; part++) *owners++ = (uint32_t)at;
    await(&own);
    uint64_t first = on_device + row_bytes, second = first + (batch->count + 1) * sizeof(Task);
    void *arguments[] = {&first, &second, &parts, &totals};
    Order order = {(void *)(uintptr_t)batch->program.measure_many, (void *)(uintptr_t)batch->program.context,
                   (void *)(uintptr_t)stream, (unsigned)batch->blocks, arguments, on_device, own_row,
                   (size_t)((char *)owners - (char *)own_row)};
    int status = launch(&order);
    for (size_t at = 0; status && at <= batch->count; at++) forget(&tasks[at]);
    return was_launched(status);
}

static PyMethodDef batch_methods[] = {
    {"add", batch_add, METH_VARARGS,
     "add(task, tensor, result): a task is (numbers, count, repeats, divisor, row, wanted, channels, inner)."},
    {"sizes", batch_sizes, METH_NOARGS,
     "sizes(): returns the bytes of the table, the number of blocks, and the words of the totals."},
    {"launch", batch_launch, METH_VARARGS,
     "launch(stream, table, device_table, parts, totals): measures all with one launch; returns False, and launches "
     "nothing, if the stream is being captured."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef batch_properties[] = {
    {"results", batch_get_results, NULL, "The results of its tensors.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot batch_slots[] = {
    {Py_tp_doc, "Batch(program): tensors of one dtype that are measured together."},
    {Py_tp_new, batch_new},
    {Py_tp_dealloc, batch_dealloc},
    {Py_tp_methods, batch_methods},
    {Py_tp_getset, batch_properties},
    {0, NULL},
};

static PyType_Spec batch_spec = {"modtrace.measure._cuda_launch.Batch", sizeof(Batch), 0, Py_TPFLAGS_DEFAULT, batch_slots};

/* Measures tensors of known kinds, from Python to the launch. */
typedef struct {
    PyObject_HEAD
    PlainTensors plain;       /* those that are measured */
    PyObject *current_stream; /* returns that of a device */
    PyTypeObject *kind;       /* `Measurement` */
    PyObject *paths;          /* for each device a tuple, see `Path` */
} Launcher;

static PyObject *launcher_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *types, *kinds, *keys, *tracing, *stream, *kind, *paths;
    if (!PyArg_ParseTuple(args, "O!O!OOOO!O!", &PyTuple_Type, &types, &PyTuple_Type, &kinds, &keys, &tracing, &stream,
                          &PyType_Type, &kind, &PyDict_Type, &paths))
        return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Launcher *launcher = (Launcher *)allocate(type, 0);
    if (launcher == NULL) return NULL;
    launcher->plain = (PlainTensors){Py_NewRef(types), Py_NewRef(kinds), Py_NewRef(keys), Py_NewRef(tracing)};
    launcher->current_stream = Py_NewRef(stream);
    launcher->kind = (PyTypeObject *)Py_NewRef(kind);
    launcher->paths = Py_NewRef(paths);
    return (PyObject *)launcher;
}

static void launcher_dealloc(PyObject *self) {
    Launcher *launcher = (Launcher *)self;
    PyTypeObject *type = Py_TYPE(self);
    Py_DECREF(launcher->plain.types);
    Py_DECREF(launcher->plain.kinds);
    Py_DECREF(launcher->plain.dispatch_keys);
    Py_DECREF(launcher->plain.tracing_state);
    Py_DECREF(launcher->current_stream);
    Py_DECREF(launcher->kind);
    Py_DECREF(launcher->paths);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* How tensors on one device are measured. References are borrowed. */
typedef struct {
    PyObject *index;            /* of the device */
    PyObject *programs, *notes; /* by dtype */
    PyObject *scratch;          /* by stream */
    RowPath rows;               /* of `ArrivingRows` */
} Path;

/* Gives a row back that nothing writes to. */
static void untake_row(const Path *path, PyObject *row) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    if (PyList_Append(path->rows.free, row)) PyErr_Clear();
    PyErr_Restore(type, value, trace);
}

/* Returns 1 if a kernel is launched, 0 if it is not, -1 with an exception set. */
static int launch_on_stream(const Launcher *launcher, const Path *path, Task *task, const Program *program) {
    PyObject *stream = PyObject_CallFunctionObjArgs(launcher->current_stream, path->index, NULL), *found = NULL;
    PyObject *scratch = stream == NULL ? NULL : PyDict_GetItemWithError(path->scratch, stream);
    if (scratch != NULL) found = measure_task(task, program, stream, scratch);
    Py_XDECREF(stream);
    if (found == NULL) return PyErr_Occurred() ? -1 : 0;
    int is_launched = found == Py_True;
    Py_DECREF(found);
    return is_launched;
}

/* Measures a tensor, at once or with the others of its batch. Returns None, and launches nothing, if that takes more than
   this: Python does it then. */
static PyObject *measure_on(
    const Launcher *launcher, PyObject *tensor, PyObject *batches, const Path *path, PyObject *dtype) {
    Task task;
    Program program;
    PyObject *found = PyDict_GetItemWithError(path->programs, dtype), *result = NULL;
    Batch *batch = NULL;
    PyObject *note = PyDict_GetItemWithError(path->notes, dtype);
    if (found == NULL || note == NULL) return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    if (batches != NULL) {
        batch = (Batch *)PyDict_GetItemWithError(batches, dtype);
        if (batch == NULL || Py_TYPE(batch) != batch_type) return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    }
    if (!read_program(found, &program)) return NULL;
    int is_read = read_tensor(tensor, &program, &task);
    if (is_read <= 0) return is_read ? NULL : Py_NewRef(Py_None);
    PyObject *shape = PyObject_GetAttr(tensor, shared_names[SHAPE]), *row = NULL;
    if (shape != NULL && PyTuple_Check(shape)) row = take_free_row(&path->rows);
    if (row != NULL && (task.row = address_of_row(&path->rows, row)) != 0)
        result = make_measurement(launcher->kind, &path->rows, row, shape, dtype, note);
    if (result != NULL) {
        int is_measured = batch != NULL ? add_to_batch(batch, &task, tensor, result)
                                        : launch_on_stream(launcher, path, &task, &program);
        if (is_measured <= 0) Py_CLEAR(result);
    }
    if (result == NULL && row != NULL) untake_row(path, row);
    Py_XDECREF(shape);
    Py_XDECREF(row);
    if (result == NULL && !PyErr_Occurred()) result = Py_NewRef(Py_None);
    return result;
}

static PyObject *launcher_measure(PyObject *self, PyObject *args) {
    Launcher *launcher = (Launcher *)self;
    PyObject *tensor, *batches, *result = NULL;
    if (!PyArg_ParseTuple(args, "OO", &tensor, &batches)) return NULL;
    if (batches != Py_None && !PyDict_Check(batches)) return PyErr_Format(PyExc_TypeError, "measure(): batches is no dict");
    int known = is_plain(&launcher->plain, tensor);
    if (known <= 0) return known ? NULL : Py_NewRef(Py_None);
    PyObject *device = PyObject_GetAttr(tensor, own_names[DEVICE]), *dtype = PyObject_GetAttr(tensor, shared_names[DTYPE]);
    PyObject *found = device == NULL || dtype == NULL ? NULL : PyDict_GetItemWithError(launcher->paths, device);
    PyObject *of_device = NULL;
    Path path;
    if (found != NULL && batches != Py_None) {
        of_device = PyDict_GetItemWithError(batches, device);
        if (of_device == NULL || !PyDict_Check(of_device)) found = NULL;
    }
    Py_XINCREF(found); /* another thread may put another path in its place */
    if (found == NULL)
        result = PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    else if (PyArg_ParseTuple(found, "OO!O!O!OO!O!nn", &path.index, &PyDict_Type, &path.programs, &PyDict_Type,
                              &path.notes, &PyDict_Type, &path.scratch, &path.rows.rows, &PyList_Type, &path.rows.free,
                              &PyList_Type, &path.rows.addresses, &path.rows.block_rows, &path.rows.row_bytes) &&
             path.rows.block_rows > 0)
        result = measure_on(launcher, tensor, of_device, &path, dtype);
    Py_XDECREF(found);
    Py_XDECREF(device);
    Py_XDECREF(dtype);
    return result;
}

static PyMethodDef launcher_methods[] = {
    {"measure", launcher_measure, METH_VARARGS,
     "measure(tensor, batches): returns the measurement of a contiguous tensor, which is launched at once or, where "
     "`batches` is no None, with its batch; returns None, and launches nothing, for any other tensor."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot launcher_slots[] = {
    {Py_tp_doc, "Launcher(types, kinds, dispatch_keys, tracing_state, current_stream, kind, paths): measures tensors."},
    {Py_tp_new, launcher_new},
    {Py_tp_dealloc, launcher_dealloc},
    {Py_tp_methods, launcher_methods},
    {0, NULL},
};

static PyType_Spec launcher_spec = {
    "modtrace.measure._cuda_launch.Launcher", sizeof(Launcher), 0, Py_TPFLAGS_DEFAULT, launcher_slots};

static int add_type(PyObject *module, const char *name, PyType_Spec *spec) {
    PyObject *type = PyType_FromSpec(spec);
    if (spec == &batch_spec) batch_type = (PyTypeObject *)type;
    int status = type == NULL || PyModule_AddObject(module, name, type);
    if (status) Py_XDECREF(type);
    return status;
}

static int execute(PyObject *module) {
    if (intern_names() < 0) return -1;
    for (int name = 0; name < OWN_NAMES; name++)
        if (own_names[name] == NULL && (own_names[name] = PyUnicode_InternFromString(spelled[name])) == NULL) return -1;
    return -(add_type(module, "Batch", &batch_spec) || add_type(module, "Launcher", &launcher_spec));
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, execute}, {0, NULL}};

static PyMethodDef methods[] = {
    {"open", open_driver, METH_VARARGS, "open(path): opens the library of the driver."},
    {"load", load, METH_VARARGS, "load(device, image, names): returns the context and the functions of an image."},
    {"measure", (PyCFunction)(void (*)(void))measure, METH_FASTCALL,
     "measure(task, program, stream, scratch): returns False, and launches nothing, if the stream is being captured."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_cuda_launch", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__cuda_launch(void) { return PyModuleDef_Init(&definition); }
