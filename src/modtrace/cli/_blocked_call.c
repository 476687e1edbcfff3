/* Ends the process at a signal that Python cannot act on, because a call of the main thread does not come back.

   Python runs the handler of a signal when its main thread executes Python code again. A handler of ours stands in front
   of Python's: it notes when the signal came, and resumes a thread of ours, which needs no interpreter lock. The handlers
   in Python say when they run. If none has after 400 ms, a thread of Python is to close the recording and to end the
   process, which it can if the lock is free. After another 1.1 s the process ends in any case, by the default action of
   the signal.

   Whoever sets a handler in Python or in C replaces ours, and gets its signals as without us. Python's wakeup file is
   not used: a process has one, which asyncio and trio set for themselves. */

#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

/* The second of two signals ends the process at once, but `timeout`, say, sends the same signal twice within
   microseconds. */
enum { AGAIN_NS = 50000000, BLOCKED_NS = 400000000, CLOSE_NS = 1100000000 };

/* Of a signal: none is waiting; it has come; the main thread is blocked; the process is being ended. */
enum { NONE, CAME, BLOCKED, ENDING };

typedef struct {
    const int number;
    atomic_int state;
    _Atomic int64_t came_ns, blocked_ns, ends_ns;
    struct sigaction python; /* the action that ours stands in front of */
} Signal;

static Signal signals[] = {{.number = SIGINT}, {.number = SIGTERM}, {.number = SIGHUP}};
enum { SIGNALS = sizeof signals / sizeof *signals };

static atomic_int owner;                  /* the process that is watched: not its forks */
static atomic_int is_stopping;
static void (*python_handler)(int);       /* that of Python, which is the same for all signals */
static pthread_t watcher;
static int to_watcher[2], to_python[2];   /* pipes */

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static Signal *find_signal(int number) {
    for (int i = 0; i < SIGNALS; i++)
        if (signals[i].number == number) return &signals[i];
    return NULL;
}

static int is_owner(void) { return atomic_load(&owner) == (int)getpid(); }

static void send(int pipe_end, char byte) {
    ssize_t written = write(pipe_end, &byte, 1);
    (void)written; /* a pipe that is full resumes its reader too */
}

/* Ends the process by the default action. Where there is none, as for the first process of a container, by a status. */
static void end_by(int number) {
    struct sigaction action = {.sa_handler = SIG_DFL};
    sigset_t set;
    sigemptyset(&action.sa_mask);
    sigaction(number, &action, NULL);
    sigemptyset(&set);
    sigaddset(&set, number);
    pthread_sigmask(SIG_UNBLOCK, &set, NULL);
    raise(number);
    _exit(128 + number);
}

/* What is noted stands before Python's handler runs: another thread may get the signal, and the main thread act on it. */
static void on_signal(int number, siginfo_t *info, void *context) {
    int error = errno;
    Signal *signal = find_signal(number);
    if (is_owner()) {
        int64_t now = now_ns();
        if (atomic_load(&signal->state) == NONE) {
            atomic_store(&signal->came_ns, now);
            atomic_store(&signal->blocked_ns, now + BLOCKED_NS);
            atomic_store(&signal->ends_ns, now + BLOCKED_NS + CLOSE_NS);
            atomic_store(&signal->state, CAME);
        } else if (now - atomic_load(&signal->came_ns) >= AGAIN_NS) {
            end_by(number);
        }
        send(to_watcher[1], 0);
    }
    if (signal->python.sa_flags & SA_SIGINFO)
        signal->python.sa_sigaction(number, info, context);
    else
        signal->python.sa_handler(number);
    errno = error;
}

static int change_state(Signal *signal, int from, int to) {
    return atomic_compare_exchange_strong(&signal->state, &from, to);
}

/* The main thread acts on the signal. It goes no further if the process is being ended. */
static void note_return(Signal *signal) {
    if (!is_owner() || change_state(signal, CAME, NONE) || change_state(signal, BLOCKED, NONE)) return;
    if (atomic_load(&signal->state) != ENDING) return;
    Py_BEGIN_ALLOW_THREADS
    for (;;) pause();
    Py_END_ALLOW_THREADS
}

/* Does what is due for a signal, and returns when something is due next. */
static int64_t watch_signal(Signal *signal) {
    int state = atomic_load(&signal->state);
    int64_t now = now_ns();
    if (state == NONE) return INT64_MAX;
    if (now >= atomic_load(&signal->ends_ns)) end_by(signal->number);
    if (state != CAME) return atomic_load(&signal->ends_ns);
    if (now < atomic_load(&signal->blocked_ns)) return atomic_load(&signal->blocked_ns);
    if (change_state(signal, CAME, BLOCKED)) send(to_python[1], (char)signal->number);
    return atomic_load(&signal->ends_ns);
}

static void *watch(void *Py_UNUSED(argument)) {
    char bytes[64];
    while (!atomic_load(&is_stopping)) {
        int64_t next = INT64_MAX;
        for (int i = 0; i < SIGNALS; i++) {
            int64_t due = watch_signal(&signals[i]);
            next = due < next ? due : next;
        }
        int64_t left_ms = (next - now_ns()) / 1000000 + 1;
        struct pollfd wanted = {.fd = to_watcher[0], .events = POLLIN};
        if (poll(&wanted, 1, next == INT64_MAX ? -1 : left_ms < 0 ? 0 : (int)left_ms) > 0)
            while (read(to_watcher[0], bytes, sizeof bytes) == sizeof bytes) {}
    }
    return NULL;
}

static int open_pipe(int ends[2]) {
    if (pipe(ends) < 0) return -1;
    for (int i = 0; i < 2; i++) {
        fcntl(ends[i], F_SETFD, FD_CLOEXEC);
        fcntl(ends[i], F_SETFL, O_NONBLOCK);
    }
    return 0;
}

static void close_pipe(int ends[2]) {
    close(ends[0]);
    close(ends[1]);
}

/* Signals stay with the other threads. */
static int start_watcher(void) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failure = pthread_create(&watcher, NULL, watch, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return failure ? -1 : 0;
}

static PyObject *start(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored)) {
    if (is_owner() || open_pipe(to_watcher) < 0) Py_RETURN_FALSE;
    if (open_pipe(to_python) < 0) {
        close_pipe(to_watcher);
        Py_RETURN_FALSE;
    }
    for (int i = 0; i < SIGNALS; i++) atomic_store(&signals[i].state, NONE);
    atomic_store(&is_stopping, 0);
    if (start_watcher() < 0) {
        close_pipe(to_watcher);
        close_pipe(to_python);
        Py_RETURN_FALSE;
    }
    atomic_store(&owner, (int)getpid());
    Py_RETURN_TRUE;
}

static int is_ours(const struct sigaction *action) {
    return (action->sa_flags & SA_SIGINFO) && action->sa_sigaction == on_signal;
}

static PyObject *guard(PyObject *Py_UNUSED(module), PyObject *argument) {
    Signal *signal = find_signal((int)PyLong_AsLong(argument));
    struct sigaction action;
    if (PyErr_Occurred()) return NULL;
    if (signal == NULL || !is_owner() || sigaction(signal->number, NULL, &action) < 0) Py_RETURN_NONE;
    if (python_handler == NULL && !(action.sa_flags & SA_SIGINFO)) python_handler = action.sa_handler;
    if (is_ours(&action) || action.sa_handler != python_handler) Py_RETURN_NONE;
    signal->python = action;
    action.sa_sigaction = on_signal;
    action.sa_flags |= SA_SIGINFO;
    sigaction(signal->number, &action, NULL);
    Py_RETURN_NONE;
}

static PyObject *next_blocked(PyObject *Py_UNUSED(module), PyObject *argument) {
    struct pollfd wanted = {.fd = to_python[0], .events = POLLIN};
    long timeout_ms = PyLong_AsLong(argument);
    char number = 0;
    ssize_t count = -1;
    if (PyErr_Occurred()) return NULL;
    Py_BEGIN_ALLOW_THREADS
    if (poll(&wanted, 1, (int)timeout_ms) > 0) count = read(to_python[0], &number, 1);
    Py_END_ALLOW_THREADS
    if (!atomic_load(&is_stopping)) return PyLong_FromLong(count > 0 ? number : 0);
    close(to_python[0]);
    return PyLong_FromLong(-1);
}

static PyObject *postpone(PyObject *Py_UNUSED(module), PyObject *argument) {
    Signal *signal = find_signal((int)PyLong_AsLong(argument));
    if (signal == NULL) return PyErr_Format(PyExc_ValueError, "postpone(): no such signal");
    int64_t now = now_ns();
    atomic_store(&signal->blocked_ns, now + BLOCKED_NS);
    atomic_store(&signal->ends_ns, now + BLOCKED_NS + CLOSE_NS);
    change_state(signal, BLOCKED, CAME);
    send(to_watcher[1], 0);
    Py_RETURN_NONE;
}

static PyObject *begin_end(PyObject *Py_UNUSED(module), PyObject *argument) {
    Signal *signal = find_signal((int)PyLong_AsLong(argument));
    if (signal == NULL) return PyErr_Format(PyExc_ValueError, "begin_end(): no such signal");
    return PyBool_FromLong(change_state(signal, BLOCKED, ENDING));
}

static PyObject *end(PyObject *Py_UNUSED(module), PyObject *argument) {
    long number = PyLong_AsLong(argument);
    if (PyErr_Occurred()) return NULL;
    end_by((int)number);
    Py_RETURN_NONE;
}

static PyObject *came_back(PyObject *Py_UNUSED(module), PyObject *argument) {
    Signal *signal = find_signal((int)PyLong_AsLong(argument));
    if (PyErr_Occurred()) return NULL;
    if (signal != NULL) note_return(signal);
    Py_RETURN_NONE;
}

static PyObject *default_int_handler(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(arguments)) {
    note_return(find_signal(SIGINT));
    PyErr_SetNone(PyExc_KeyboardInterrupt);
    return NULL;
}

static PyObject *stop(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored)) {
    struct sigaction action;
    if (!is_owner()) Py_RETURN_NONE;
    for (int i = 0; i < SIGNALS; i++) {
        note_return(&signals[i]);
        if (sigaction(signals[i].number, NULL, &action) == 0 && is_ours(&action))
            sigaction(signals[i].number, &signals[i].python, NULL);
    }
    atomic_store(&is_stopping, 1);
    atomic_store(&owner, 0);
    send(to_watcher[1], 0);
    Py_BEGIN_ALLOW_THREADS
    pthread_join(watcher, NULL);
    Py_END_ALLOW_THREADS
    close_pipe(to_watcher);
    send(to_python[1], 0); /* closing it is seen only when no fork holds it any more */
    close(to_python[1]);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"start", start, METH_NOARGS,
     "start(): starts to watch; returns whether it does. Not if this process is watched already."},
    {"guard", guard, METH_O, "guard(number): watches a signal that Python handles. Again after its handler was set."},
    {"next_blocked", next_blocked, METH_O,
     "next_blocked(timeout_ms): waits for a signal that the main thread does not act on. Returns its number, 0 after "
     "the timeout, -1 after stop()."},
    {"postpone", postpone, METH_O, "postpone(number): waits for the main thread for as long again."},
    {"begin_end", begin_end, METH_O,
     "begin_end(number): keeps the main thread from coming back to Python; returns whether it has not come before."},
    {"end", end, METH_O, "end(number): ends the process by the default action of the signal."},
    {"came_back", came_back, METH_O,
     "came_back(number): says that the main thread acts on the signal. Does not return if the process is being ended."},
    {"default_int_handler", default_int_handler, METH_VARARGS,
     "default_int_handler(number, frame): that of Python's module signal, which says too that the main thread acts."},
    {"stop", stop, METH_NOARGS, "stop(): stops to watch, and gives Python its handlers back."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_blocked_call", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__blocked_call(void) { return PyModuleDef_Init(&definition); }
