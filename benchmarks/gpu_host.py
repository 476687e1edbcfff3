"""What the host does of a recording on a GPU, where there is none: python benchmarks/gpu_host.py (1 minute).

A driver whose launches only write empty rows takes the place of CUDA's, and tensors of main memory that of a device's.
The model is that of gpu.py with 134M parameters, twelve layers of it, so narrow that its own kernels take no time. What
is printed is the CPU time of a step beyond that of the plain step, in the thread that trains and in the one that makes
rows, and what is called in Python, which does not depend on how busy the machine is.
"""

import ctypes
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import gpu
import torch

import modtrace
from modtrace.collect.recorder.row_writer import RowWriter
from modtrace.measure.cuda import cuda_kernels
from modtrace.measure.measurers import measurer
from modtrace.torch_internals.tensors import plain_kinds

#: Has the functions that _cuda_launch.c asks for; TASK is what that file calls a `Task`.
DRIVER = r"""
#include <stdint.h>
#include <string.h>
TASK
enum { ONE = 1, MANY };
static uint64_t launches;
uint64_t count_launches(void) { return launches; }
static void write_row(const Task *task) {
    double *row = (double *)(uintptr_t)task->row;
    memset(row, 0, task->width * sizeof *row);
    row[0] = task->count * task->repeats;
}
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = (void *)8, 0; }
int cuCtxGetCurrent(void **context) { return *context = (void *)8, 0; }
int cuCtxPushCurrent_v2(void *context) { return 0; }
int cuCtxPopCurrent_v2(void **context) { return *context = (void *)8, 0; }
int cuModuleLoadData(void **program, const void *image) { return *program = (void *)8, 0; }
int cuModuleGetFunction(void **function, void *program, const char *name) {
    return *function = (void *)(uintptr_t)(strcmp(name, "measure_many") ? ONE : MANY), 0;
}
int cuStreamIsCapturing(void *stream, int *is_capturing) { return *is_capturing = 0; }
int cuGetErrorName(int status, const char **name) { return *name = "?", 0; }
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t size_bytes, void *stream) {
    memcpy((void *)(uintptr_t)to, from, size_bytes);
    return 0;
}
int cuLaunchKernel(void *function, unsigned blocks, unsigned y, unsigned z, unsigned threads, unsigned threads_y,
                   unsigned threads_z, unsigned shared, void *stream, void **arguments, void **extra) {
    launches++;
    if ((uintptr_t)function == ONE) return write_row(arguments[0]), 0;
    const Task *tasks = *(Task **)arguments[0];
    const uint32_t *owners = *(uint32_t **)arguments[1];
    for (unsigned at = 0; at < blocks; at++)
        if (at == 0 || owners[at] != owners[at - 1]) write_row(tasks + owners[at]);
    return 0;
}
"""

ROUNDS, STEPS = 6, 25


def open_driver(folder: Path) -> Any:
    """Compiles the driver, has modtrace launch by it, and returns it."""
    compiler = shutil.which("cc") or sys.exit("benchmarks/gpu_host.py: there is no C compiler `cc`")
    source, library = folder / "driver.c", folder / "driver.so"
    launch = Path(cuda_kernels.__file__).with_name("_cuda_launch.c").read_text()
    end = launch.index("} Task;")
    task = launch[launch.rindex("typedef struct {", 0, end) : end] + "} Task;"
    source.write_text(DRIVER.replace("TASK", task))
    subprocess.run([compiler, "-O2", "-w", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    cuda_kernels.driver.open(str(library))
    kernels, zeros = (
        cuda_kernels.CudaKernels(torch.device("cpu", 0), compiles=lambda source, options: b"\0"),
        torch.zeros,
    )
    replaced: list[tuple[Any, str, Any]] = [
        (cuda_kernels, "current_stream", lambda index: 8),
        (torch, "zeros", lambda *args, pin_memory=False, **kwargs: zeros(*args, **kwargs)),
        (measurer, "is_on_device", lambda tensor: True),
        (measurer, "find_kernels", lambda device: kernels),
        (measurer, "plain_kinds", lambda device="": plain_kinds(device) if device else ()),
    ]
    for holder, name, value in replaced:
        setattr(holder, name, value)
    opened = ctypes.CDLL(str(library))
    opened.count_launches.restype = ctypes.c_uint64
    return opened


class Work:
    """The model of gpu.py in training, in main memory."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        size = gpu.SIZES["134M"]._replace(width=16, heads=2, tokens=8, batch=1)
        self.model, self.ids = gpu.GPT(size), torch.randint(0, gpu.VOCABULARY, (1, 8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)

    def step(self) -> None:
        self.optimizer.zero_grad()
        logits = self.model(self.ids).flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, self.ids.flatten()).backward()
        self.optimizer.step()


@contextmanager
def timed_rows(spent_ns: list[int]) -> Iterator[None]:
    """Adds up the CPU time in which rows are made, on whatever thread."""
    write = RowWriter.write

    def timed(*args: Any, **kwargs: Any) -> None:
        start_ns = time.thread_time_ns()
        try:
            write(*args, **kwargs)
        finally:
            spent_ns.append(time.thread_time_ns() - start_ns)

    RowWriter.write = timed  # type: ignore[method-assign]
    try:
        yield
    finally:
        RowWriter.write = write  # type: ignore[method-assign]


def count_calls(step: Callable[[], None]) -> tuple[int, int]:
    """Returns how many functions of Python and of C a step calls on this thread."""
    counts = {"call": 0, "c_call": 0}

    def count(frame: Any, event: str, argument: Any) -> None:
        if event in counts:
            counts[event] += 1

    sys.setprofile(count)
    step()
    sys.setprofile(None)
    return counts["call"], counts["c_call"]


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        driver = open_driver(Path(folder))
        gpu.VOCABULARY = 64
        work, variants = Work(), gpu.variants()
        names = ["plain", "calls alone", "outputs and gradients", "default", "every op, no values"]
        step_us: dict[str, list[float]] = {name: [] for name in names}
        rows_us: dict[str, list[float]] = {name: [] for name in names}
        found: dict[str, tuple[int, int, int, int]] = {}
        for _ in range(ROUNDS):
            for name in names:
                spent_ns: list[int] = []
                context = nullcontext() if name == "plain" else variants[name](work.model)
                with timed_rows(spent_ns), context as rec:
                    for _ in range(3):
                        work.step()
                    for _ in range(STEPS):
                        start_ns = time.thread_time_ns()
                        work.step()
                        step_us[name].append((time.thread_time_ns() - start_ns) / 1e3)
                    launches = driver.count_launches()
                    calls = count_calls(work.step)
                    launches = driver.count_launches() - launches
                    samples = 0
                if isinstance(rec, modtrace.Recording):
                    samples = rec.table("values").num_rows // (STEPS + 4)
                rows_us[name].append(sum(spent_ns) / 1e3 / (STEPS + 4))
                found[name] = (*calls, launches, samples)
        plain, plain_calls = sorted(step_us["plain"]), found["plain"]
        print("beyond the plain step:   training    rows   Python      C   launches  values")
        for name in names[1:]:
            # The tenth part of the steps that other programs disturb least.
            trained = sorted(step_us[name])[len(plain) // 10] - plain[len(plain) // 10]
            calls, c_calls, launches, samples = found[name]
            print(
                f"  {name:22} {trained:7.0f} us {statistics.median(rows_us[name]):5.0f} us "
                f"{calls - plain_calls[0]:6} {c_calls - plain_calls[1]:6}     {launches:6}  {samples:6}"
            )
        print(f"  the plain step takes {plain[len(plain) // 10]:.0f} us")


if __name__ == "__main__":
    main()
