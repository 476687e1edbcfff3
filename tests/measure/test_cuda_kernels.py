"""The kernels of CUDA devices, on a fake driver that runs them on the CPU."""

import threading
import time
import weakref

import numpy as np
import pytest
import torch

from helpers.any_numbers import of_magnitudes, random_bits
from helpers.cuda_on_cpu import needs_compiler
from helpers.dtypes import FLOAT8, FLOATS, INTEGERS
from helpers.float64_reference import measure as measure_on_cpu
from helpers.float64_reference import to_numbers
from modtrace.measure.cuda import cuda_kernels
from modtrace.measure.cuda.cuda_kernels import Task
from modtrace.measure.dtypes import format_of
from modtrace.measure.measurers import measurer
from modtrace.measure.measurers.measurer import Measurement, Measurer
from modtrace.measure.memory import extent_of
from modtrace.measure.moments import rows
from modtrace.measure.moments.cpu_kernel import RawStatistics
from modtrace.measure.moments.rows import FIRST_INDEX, WIDTH, ArrivingRows
from modtrace.torch_internals.graph_captures import graph_captures
from modtrace.torch_internals.modes import DisableTorchFunction
from modtrace.torch_internals.tensors import plain_kinds

pytestmark = needs_compiler

#: Of numbers around a vector, a round of all threads, a part, and many parts.
SIZES = [0, 1, 15, 17, 4099, 16_385, 100_003]

#: Floats of 8 bits differ in the table that a kernel is given, so one of them will do.
DTYPES = [*FLOATS, FLOAT8[0], *INTEGERS, torch.complex64, torch.complex32]


@pytest.fixture
def fake(cuda_driver, monkeypatch):
    monkeypatch.setattr(cuda_kernels, "current_stream", cuda_driver.stream)
    return cuda_driver


def row_of(kernels, tensor: torch.Tensor) -> np.ndarray:
    row = np.full(WIDTH, 99.0)
    assert kernels.measure(task_of(tensor, row), tensor.dtype)
    return row


class HostTable:
    """Rows for the launcher, in place of `ArrivingRows`."""

    def __init__(self, count: int) -> None:
        self.rows = np.full((count, WIDTH), 99.0)

    def path(self) -> tuple:
        count = len(self.rows)
        return self, list(range(count))[::-1], [self.rows.ctypes.data], count + 1, 8 * WIDTH


def rows_by_launcher(kernels, tensors: "list[torch.Tensor]", batch=None) -> "list[np.ndarray] | None":
    """Returns the rows; None if the launcher has launched nothing."""
    table, kinds = HostTable(len(tensors)), plain_kinds("cpu")
    device, dtype = tensors[0].device, tensors[0].dtype
    launcher = cuda_kernels.launcher(kinds, Measurement, {device: kernels.path(table)})
    batches = None if batch is None else {device: {dtype: batch}}
    measured = [launcher.measure(tensor, batches) for tensor in tensors]
    numbers = [found and found.row for found in measured]
    assert numbers in (list(range(len(tensors))), [None] * len(tensors))
    if batch is not None and not kernels.launch(batch):
        assert not table.rows.any(), "nobody will write them"
        return None
    return None if None in numbers else list(table.rows)


def task_of(tensor: torch.Tensor, row: np.ndarray) -> Task:
    form, extent = format_of(tensor.dtype), extent_of(tensor)
    parts = form.parts if extent.is_row_major else 0
    return Task(extent.address, extent.numel * form.parts, extent.repeats, parts, row.ctypes.data)


def numbers_of(dtype: torch.dtype, size: int) -> "list[torch.Tensor]":
    """Tensors of ordinary numbers, of any bits, and of magnitudes that float32 squares do not hold."""
    tensors = [random_bits(size, size, dtype)]
    if dtype.is_floating_point and dtype.itemsize > 1:
        odd = [np.inf, -np.inf] if size % 2 else []
        tensors += [
            torch.randn(size).mul(3).add(0.1).to(dtype),
            of_magnitudes(size, size, -45, 38, dtype, odd),
        ]
        tensors += [of_magnitudes(size, size, -45, -30, dtype)]
    return tensors


def check(row: np.ndarray, tensor: torch.Tensor) -> None:
    """Counts, extremes and the first index are exact; sums are within 1e-7 of the sum of magnitudes."""
    numbers = to_numbers(tensor)
    nans, infs = np.isnan(numbers), np.isinf(numbers)
    low, high = (numbers.min(), numbers.max()) if numbers.size else (np.nan, np.nan)
    first = np.flatnonzero(nans | infs)[0] // (2 if tensor.is_complex() else 1) if (nans | infs).any() else -1
    expected = (numbers.size, low, high, nans.sum(), infs.sum(), first)
    np.testing.assert_array_equal((*row[:3], *row[5:]), expected)
    with np.errstate(all="ignore"):
        for found, terms in ((row[3], numbers), (row[4], numbers * numbers)):
            magnitude = np.abs(terms).sum()
            if np.isfinite(magnitude):
                assert abs(found - terms.sum()) <= 1e-7 * magnitude + 5e-324 * numbers.size
            elif np.isnan(terms).any() or np.isinf(terms).any():
                np.testing.assert_equal(found, terms.sum())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_statistics_are_those_of_float64(fake, dtype):
    kernels = fake.kernels()
    launches = 0
    for number, size in enumerate(SIZES):
        for other, tensor in enumerate(numbers_of(dtype, size)):
            # Aligned to a vector, and not; of large ones, which take long, one or the other.
            for start in (0, 1) if size < 10_000 else ((number + other) % 2,):
                row = row_of(kernels, tensor[start:])
                check(row, tensor[start:])
                (again,) = rows_by_launcher(kernels, [tensor[start:]])
                assert again.tobytes() == row.tobytes()
                launches += 2
    assert fake.launches == launches


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64], ids=str)
def test_bits_depend_on_neither_the_order_of_blocks_nor_alignment(fake, dtype):
    kernels = fake.kernels()
    tensor = torch.randn(300_001).mul(100).to(dtype)
    found = set()
    for seed in range(3):
        fake.reset(seed)
        moved = torch.cat([tensor[:seed], tensor])[seed:]
        found.add(row_of(kernels, moved).tobytes())
    check(np.frombuffer(found.pop()), tensor)
    assert not found


def test_index_is_not_known_where_elements_lie_in_another_order(fake):
    tensor = torch.randn(5, 4)
    tensor[1, 1] = torch.nan
    assert row_of(fake.kernels(), tensor)[FIRST_INDEX] == 5
    assert row_of(fake.kernels(), tensor.t())[FIRST_INDEX] == -1


def test_each_device_has_its_own_context_on_any_thread(fake):
    tensor, found = torch.arange(10.0), []
    kernels = [fake.kernels(0), fake.kernels(1)]

    def measure():
        found.extend(row_of(each, tensor)[3] for each in kernels)

    measure()
    thread = threading.Thread(target=measure)
    thread.start()
    thread.join()
    assert found == [45.0] * 4


def test_nothing_is_launched_on_a_stream_that_is_captured(fake):
    kernels, row = fake.kernels(), np.zeros(WIDTH)
    row_of(kernels, torch.ones(3))
    fake.capture(fake.stream(0))
    tensor = torch.ones(3)
    assert not kernels.measure(task_of(tensor, row), tensor.dtype)
    assert rows_by_launcher(kernels, [tensor]) is None
    assert rows_together(kernels, [tensor]) is None
    assert (fake.launches, fake.copies) == (1, 0)
    assert row.tolist() == [0.0] * WIDTH, "nobody will write it"


def test_path_that_another_thread_replaces_meanwhile_lives_to_the_end(fake, monkeypatch):
    class FreeRows(list):
        """Can be referred to weakly."""

    def replaced(device):
        paths.clear()
        are_alive.append(free_rows() is not None)
        return fake.stream(device)

    kernels, tensor, table, are_alive = fake.kernels(), torch.ones(3), HostTable(1), []
    owner, free, *rest = table.path()
    row_of(kernels, tensor)
    monkeypatch.setattr(cuda_kernels, "current_stream", replaced)
    monkeypatch.setattr(table, "path", lambda: (owner, FreeRows(free), *rest))
    paths = {tensor.device: kernels.path(table)}
    free_rows = weakref.ref(paths[tensor.device][5])
    assert cuda_kernels.launcher(plain_kinds("cpu"), Measurement, paths).measure(tensor, None).row == 0
    assert are_alive == [True]


# Many at once.


def rows_together(kernels, tensors: "list[torch.Tensor]") -> "list[np.ndarray] | None":
    return rows_by_launcher(kernels, tensors, kernels.new_batch(tensors[0].dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128], ids=str)
def test_many_tensors_take_one_launch_and_have_the_bits_of_each_alone(fake, dtype):
    kernels = fake.kernels()
    tensors = [tensor for size in SIZES for tensor in numbers_of(dtype, size)]
    for seed in range(2):
        fake.reset(seed)
        found = rows_together(kernels, tensors)
        assert (fake.launches, fake.copies) == (1, 1)
        assert [row.tobytes() for row in found] == [row_of(kernels, tensor).tobytes() for tensor in tensors]


def test_table_is_written_again_only_when_it_has_been_read(fake):
    kernels = fake.kernels()
    tensors = [torch.full((100,), float(number)) for number in range(50)]
    rows_together(kernels, tensors)  # the memory of a device would be freed behind what runs there
    fake.defer()
    found = [rows_together(kernels, tensors[: 10 * number + 10]) for number in range(5)]
    fake.run()
    for rows_found in found:
        assert [row[3] for row in rows_found] == [100.0 * number for number in range(len(rows_found))]
    tables = len(kernels._tables)
    for _ in range(3):
        found = rows_together(kernels, tensors)
        fake.run()
        assert found[49][3] == 4900.0
    assert len(kernels._tables) == tables


# Rows that arrive.


@pytest.fixture(autouse=True)
def unpinned(monkeypatch):
    """Memory cannot be pinned without a device."""
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *args, pin_memory=False, **kwargs: zeros(*args, **kwargs))


@pytest.fixture
def arriving(monkeypatch):
    monkeypatch.setattr(ArrivingRows, "_has_ended_work", lambda self: True)
    return ArrivingRows(torch.device("cpu"))


def launched(kernels, arriving, tensor: torch.Tensor) -> int:
    row = arriving.take()
    extent = extent_of(tensor)
    assert kernels.measure(Task(extent.address, extent.numel, 1, 1, arriving.address(row)), tensor.dtype)
    return row


def test_rows_are_read_when_they_have_come(fake, arriving):
    fake.defer()
    kernels = fake.kernels()
    tensors = [torch.full((10,), float(number)) for number in range(20)]
    numbers = [launched(kernels, arriving, tensor) for tensor in tensors]
    timer = threading.Timer(0.02, fake.run)
    timer.start()
    assert arriving.read(numbers)[:, 3].tolist() == [10.0 * number for number in range(20)]
    timer.join()


def test_rows_that_never_come_are_an_error(fake, arriving, monkeypatch):
    monkeypatch.setattr(rows, "_PATIENCE_S", 0.05)
    fake.defer()
    numbers = [launched(fake.kernels(), arriving, torch.ones(3))]
    with pytest.raises(RuntimeError, match="1 of 1 rows of statistics never came from cpu"):
        arriving.read(numbers)


def test_a_row_is_free_only_when_it_has_come(fake, arriving):
    kernels = fake.kernels()
    first = [arriving.take() for _ in range(1023)]
    fake.defer()
    late = launched(kernels, arriving, torch.ones(3))
    arriving.free([late])
    assert arriving.take() not in (late, *first)
    assert len(arriving.blocks) == 2
    fake.run()
    others = [arriving.take() for _ in range(1023)]
    assert late not in others
    assert arriving.take() == late


# The measurer.


@pytest.fixture
def measured_on_device(fake, arriving, monkeypatch):
    """Measures tensors of main memory as those of a device, and returns the measurement."""
    kernels = fake.kernels()
    monkeypatch.setattr(measurer, "find_kernels", lambda device: kernels)
    monkeypatch.setattr(measurer, "plain_kinds", lambda device="": plain_kinds(device) if device else ())
    measurer_of_device = Measurer()

    def measure(*tensors):
        with monkeypatch.context() as patch, DisableTorchFunction():
            patch.setattr(measurer, "is_on_device", lambda tensor: True)
            if len(tensors) == 1:
                return measurer_of_device.measure(*tensors)
            with measurer_of_device.together():
                return [measurer_of_device.measure(tensor) for tensor in tensors]

    measure.measurer = measurer_of_device
    return measure


def read(measurement) -> RawStatistics:
    return RawStatistics(*measurement.rows.read([measurement.row])[0, :FIRST_INDEX].tolist())


VIEWS = {
    "whole": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2),
    "every second": lambda x: x[:, ::2],
    "expanded": lambda x: x[:1].expand(9, 6, 5),
    "expanded and strided": lambda x: x[:1, ::2].expand(9, 3, 5),
    "no elements": lambda x: x[:0],
    "conjugate": lambda x: x.to(torch.complex64).conj(),
    "sparse": lambda x: x.relu().to_sparse(),
    "parameter": torch.nn.Parameter,
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_each_tensor_takes_one_launch(fake, measured_on_device, view):
    tensor = view(torch.randn(4, 6, 5))
    for launches in (1, 2):  # the first tensor takes the slow way
        found = measured_on_device(tensor)
        assert fake.launches == launches
        expected = measure_on_cpu(tensor)
        assert (found.shape, found.dtype, found.note) == (expected.shape, expected.dtype, expected.note)
        np.testing.assert_allclose(read(found), read(expected), rtol=1e-6, atol=1e-5)


def test_tensors_that_are_given_together_take_a_launch_for_each_dtype(fake, measured_on_device):
    measured_on_device(torch.ones(3))
    tensors = [torch.randn(50, 3) for _ in range(20)]
    tensors += [torch.randn(7).double(), torch.arange(5), torch.empty(0), torch.ones(4, 6)[:, ::2]]
    fake.reset()
    found = measured_on_device(*tensors)
    assert fake.launches == 3 + 1  # that of a copy of the last
    for measured, tensor in zip(found, tensors, strict=True):
        np.testing.assert_allclose(read(measured), read(measure_on_cpu(tensor)), rtol=1e-6, atol=1e-5)


def test_no_graph_is_captured_while_a_program_is_loaded(fake, measured_on_device, monkeypatch):
    """It takes a second, and would end the capture of another thread."""
    measured_on_device(torch.ones(3))
    [(kernels, _)] = measured_on_device.measurer._arriving.values()
    compiles, may_begin = kernels._compiles, []

    def waits(*given):
        may_begin.append(not graph_captures._working)
        return compiles(*given)

    monkeypatch.setattr(kernels, "_compiles", waits)
    measured_on_device(torch.ones(3).double(), torch.ones(4).double())
    assert may_begin == [False]


def test_row_freed_on_two_threads_is_free_once(fake, arriving):
    """A thread that writes steps frees rows while another looks for free ones."""
    kernels = fake.kernels()
    held = [arriving.take() for _ in range(1000)]
    fake.defer()
    late = [launched(kernels, arriving, torch.ones(3)) for _ in range(20)]
    stop = threading.Event()

    def reclaim():
        while not stop.is_set():
            arriving._reclaim()

    thread = threading.Thread(target=reclaim)
    thread.start()
    for row in late:
        arriving.free([row])
    fake.run()
    time.sleep(0.05)
    stop.set()
    thread.join()
    arriving._reclaim()
    taken = [arriving.take() for _ in range(24)]
    assert sorted([*held, *taken]) == list(range(1024))


def test_block_inside_another_measures_at_its_own_end(fake, measured_on_device):
    measured_on_device(torch.ones(3))
    fake.reset()
    with measured_on_device.measurer.together():
        inner = measured_on_device(torch.ones(3), torch.ones(4))
        assert (fake.launches, [read(measured).count for measured in inner]) == (1, [3, 4])
        outer = measured_on_device(torch.ones(5))
        assert fake.launches == 1
    assert (fake.launches, read(outer).count) == (2, 5)


def test_launch_that_fails_leaves_a_note_and_no_row(fake, measured_on_device):
    measured_on_device(torch.ones(3), torch.ones(3).double())
    fake.fail(1)
    alone = measured_on_device(torch.ones(3))
    failed = "not measured: RuntimeError: cuLaunchKernel: CUDA_ERROR_INVALID_VALUE (1)"
    assert (alone.rows, alone.note) == (None, failed)
    fake.fail(1)
    lost, kept = measured_on_device(torch.ones(3), torch.ones(3).double())
    fake.reset()
    assert (lost.rows, lost.note) == (None, failed)
    assert read(kept).sum == 3


@pytest.mark.parametrize("view", ["whole", "every second"])
def test_torch_measures_where_no_kernel_can_be_compiled(fake, measured_on_device, monkeypatch, view):
    def refuses(source, options):
        raise RuntimeError("no NVRTC here")

    kernels = cuda_kernels.CudaKernels(torch.device("cpu", 0), compiles=refuses)
    monkeypatch.setattr(measurer, "find_kernels", lambda device: kernels)
    tensor = VIEWS[view](torch.randn(4, 6, 5))
    for _ in range(3):
        found = measured_on_device(tensor)
        assert (type(found.rows), found.note) == (rows.DeviceRows, None)
        np.testing.assert_allclose(read(found), read(measure_on_cpu(tensor)), rtol=1e-6, atol=1e-5)
    assert (fake.launches, kernels.problem) == (0, "RuntimeError: no NVRTC here")


def test_freed_storage_is_not_read(fake, measured_on_device):
    tensor = torch.ones(1000)
    measured_on_device(tensor)
    tensor.untyped_storage().resize_(0)
    assert measured_on_device(tensor).note == "not measured: its storage has been freed"
    assert fake.launches == 1
