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
    uint64_t each = (units + program->most_parts - 1) / program->most_parts;
    each = each ? each : 1;
    task->part_size = each * unit;
    task->parts = units ? (uint32_t)((units + each - 1) / each) : 1;
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

enum { DTYPE, IS_CONTIGUOUS, NUMEL, DATA_PTR, STORAGE_OFFSET, UNTYPED_STORAGE, NBYTES, NAMES };
static const char *const spelled[NAMES] = {
    "dtype", "is_contiguous", "numel", "data_ptr", "storage_offset", "untyped_storage", "nbytes",
};
static PyObject *attributes[NAMES];

/* Calls a method without arguments. Returns 0, with an exception set, if it raises, or does not return a number. */
static int ask(PyObject *object, int name, unsigned long long *number) {
    PyObject *result = PyObject_CallMethodObjArgs(object, attributes[name], NULL);
    if (result == NULL) return 0;
    *number = PyLong_AsUnsignedLongLong(result);
    Py_DECREF(result);
    return !PyErr_Occurred();
}

/* Reads where the elements of a contiguous tensor are. Returns 0 if it is not contiguous or its storage is too short, -1
   with an exception set. */
static int read_tensor(PyObject *tensor, const Program *program, Task *task) {
    unsigned long long is_contiguous, numel, address, offset, held;
    if (!ask(tensor, IS_CONTIGUOUS, &is_contiguous)) return -1;
    if (!is_contiguous) return 0;
    if (!ask(tensor, NUMEL, &numel)) return -1;
    memset(task, 0, sizeof *task);
    task->repeats = 1;
    task->divisor = program->parts;
    if (numel == 0) return 1;
    if (!ask(tensor, DATA_PTR, &address) || !ask(tensor, STORAGE_OFFSET, &offset)) return -1;
    PyObject *storage = PyObject_CallMethodObjArgs(tensor, attributes[UNTYPED_STORAGE], NULL);
    if (storage == NULL) return -1;
    int is_read = ask(storage, NBYTES, &held);
    Py_DECREF(storage);
    if (!is_read) return -1;
    if (address == 0) return 0;
    task->numbers = address;
    task->count = numel * program->parts;
    return held >= (offset + numel) * program->parts * program->number_bytes && address % program->number_bytes == 0;
}

/* measure_tensor(tensor, row, programs, device, current_stream, scratch_of_streams): returns None, and launches nothing, if
   the tensor is not contiguous, or its dtype or the current stream is not in the dictionaries. */
static PyObject *measure_tensor(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs) {
    Task task;
    Program program;
    if (nargs != 6) return PyErr_Format(PyExc_TypeError, "measure_tensor() takes 6 arguments, not %zd", nargs);
    PyObject *dtype = PyObject_GetAttr(args[0], attributes[DTYPE]);
    if (dtype == NULL) return NULL;
    PyObject *found = PyDict_GetItemWithError(args[2], dtype);
    Py_DECREF(dtype);
    if (found == NULL) return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    if (!read_program(found, &program)) return NULL;
    int is_read = read_tensor(args[0], &program, &task);
    if (is_read <= 0) return is_read ? NULL : Py_NewRef(Py_None);
    task.row = PyLong_AsUnsignedLongLong(args[1]);
    if (PyErr_Occurred()) return NULL;
    PyObject *stream = PyObject_CallFunctionObjArgs(args[4], args[3], NULL);
    if (stream == NULL) return NULL;
    PyObject *scratch = PyDict_GetItemWithError(args[5], stream), *result = NULL;
    if (scratch != NULL)
        result = measure_task(&task, &program, stream, scratch);
    else if (!PyErr_Occurred())
        result = Py_NewRef(Py_None);
    Py_DECREF(stream);
    return result;
}

/* Tensors of one dtype that are measured together. */
typedef struct {
    PyObject_HEAD
    Task *tasks;
    size_t count, capacity;
    uint64_t blocks, totals; /* of all, and of one more */
    Program program;
} Batch;

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
    if (batch != NULL) batch->program = program, batch->blocks = 1, batch->totals = program.total_width;
    return (PyObject *)batch;
}

static void batch_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    free(((Batch *)self)->tasks);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* add(tensor, row): returns False, and adds nothing, if the tensor is not contiguous. */
static PyObject *batch_add(PyObject *self, PyObject *args) {
    Batch *batch = (Batch *)self;
    PyObject *tensor;
    unsigned long long row;
    Task task;
    if (!PyArg_ParseTuple(args, "OK", &tensor, &row)) return NULL;
    int is_read = read_tensor(tensor, &batch->program, &task);
    if (is_read < 0) return NULL;
    if (!is_read) Py_RETURN_FALSE;
    task.row = row;
    if (!append(batch, &task)) return NULL;
    await(&task);
    Py_RETURN_TRUE;
}

/* add_task(task) */
static PyObject *batch_add_task(PyObject *self, PyObject *tuple) {
    Task task;
    if (!read_task(tuple, &task) || !append((Batch *)self, &task)) return NULL;
    await(&task);
    Py_RETURN_NONE;
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
    {"add", batch_add, METH_VARARGS, "add(tensor, row): returns False, and adds nothing, if the tensor is not contiguous."},
    {"add_task", batch_add_task, METH_O, "add_task(task): a task is (numbers, count, repeats, divisor, row, wanted, channels, inner)."},
    {"sizes", batch_sizes, METH_NOARGS,
     "sizes(): returns the bytes of the table, the number of blocks, and the words of the totals."},
    {"launch", batch_launch, METH_VARARGS,
     "launch(stream, table, device_table, parts, totals): measures all with one launch; returns False, and launches "
     "nothing, if the stream is being captured."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot batch_slots[] = {
    {Py_tp_doc, "Batch(program): tensors of one dtype that are measured together."},
    {Py_tp_new, batch_new},
    {Py_tp_dealloc, batch_dealloc},
    {Py_tp_methods, batch_methods},
    {0, NULL},
};

static PyType_Spec batch_spec = {"modtrace.measure._cuda_launch.Batch", sizeof(Batch), 0, Py_TPFLAGS_DEFAULT, batch_slots};

static int execute(PyObject *module) {
    for (int name = 0; name < NAMES; name++)
        if (attributes[name] == NULL && (attributes[name] = PyUnicode_InternFromString(spelled[name])) == NULL) return -1;
    PyObject *type = PyType_FromSpec(&batch_spec);
    if (type == NULL) return -1;
    int status = PyModule_AddObject(module, "Batch", type);
    if (status) Py_DECREF(type);
    return status;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, execute}, {0, NULL}};

static PyMethodDef methods[] = {
    {"open", open_driver, METH_VARARGS, "open(path): opens the library of the driver."},
    {"load", load, METH_VARARGS, "load(device, image, names): returns the context and the functions of an image."},
    {"measure", (PyCFunction)(void (*)(void))measure, METH_FASTCALL,
     "measure(task, program, stream, scratch): returns False, and launches nothing, if the stream is being captured."},
    {"measure_tensor", (PyCFunction)(void (*)(void))measure_tensor, METH_FASTCALL,
     "measure_tensor(tensor, row, programs, device, current_stream, scratch_of_streams): the same of a contiguous tensor; "
     "returns None, and launches nothing, if it is none, or its dtype or the stream is not known."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_cuda_launch", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__cuda_launch(void) { return PyModuleDef_Init(&definition); }
