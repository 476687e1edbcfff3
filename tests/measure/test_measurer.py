"""Measuring changes nothing, and nothing changes it."""

import gc
import math
import threading
import warnings
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
import torch
from torch import nn

from helpers.float64_reference import measure, read, statistics
from helpers.tensor_kinds import HOLDERS, KINDS, references, silently
from helpers.user_modes import SeesFunctions, SeesOps
from modtrace.measure.measurers import measurer as measurer_module
from modtrace.measure.measurers.measurer import Measurer
from modtrace.measure.moments import cpu_kernel, device_kernel
from modtrace.measure.moments.rows import FIRST_INDEX, DeviceRows
from modtrace.torch_internals.modes import DisableTorchFunction, unseen

# Nobody hears of it.


_measurer = Measurer()


@pytest.mark.parametrize("kind", KINDS)
def test_measuring_is_noticed_nowhere_and_raises_no_error_of_the_users(kind):
    """Modes hear of nothing, no number is drawn, and the tensor stays as it was, where numpy and warnings raise."""
    make, expected = KINDS[kind]
    tensor = silently(make)
    before = state_of(tensor), torch.get_rng_state(), np.random.get_state()[1].tolist()
    with (
        warnings.catch_warnings(),
        np.errstate(all="raise"),
        SeesOps() as ops,
        SeesFunctions() as functions,
        DisableTorchFunction(),
    ):
        warnings.simplefilter("error")
        measurement = _measurer.measure(tensor)
        assert np.geterr() == dict.fromkeys(("divide", "over", "under", "invalid"), "raise")
    assert (ops.seen, functions.seen) == ([], [])
    assert measurement.note == expected.note
    if expected.statistics is not None:
        assert str(tuple(read(measurement))) == str(tuple(map(float, expected.statistics)))
    assert state_of(tensor) == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert np.random.get_state()[1].tolist() == before[2]


def state_of(tensor):
    def ask(name):
        try:
            return getattr(tensor, name)
        except (RuntimeError, KeyError, OSError):
            return "raises"

    with DisableTorchFunction():  # no subclass's `__torch_function__`
        return [ask(name) for name in ("_version", "grad_fn", "requires_grad", "is_leaf", "_backward_hooks")]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_numbers_that_overflow_and_underflow_raise_no_error_of_numpys(dtype):
    limits = torch.finfo(dtype)
    numbers = [math.nan, math.inf, limits.max, -limits.max, limits.tiny, limits.tiny / 4]
    tensor = torch.tensor(numbers, dtype=dtype).repeat(500)
    with np.errstate(all="raise"):
        assert statistics(tensor)[5:] == (500, 500)
        assert statistics(tensor.view(500, 6)[:, 2:])[5:] == (0, 0)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap], ids=["grad", "vmap"])
def test_modes_of_the_users_see_the_ops_of_a_transform_alone(transform):
    def names_of(function):
        with SeesOps() as ops, SeesFunctions() as functions:
            transform(function)(torch.ones(3))
        return ops.seen, functions.seen

    def measuring(x):
        measure(x)
        return (x * 2).sum()

    assert names_of(measuring) == names_of(lambda x: (x * 2).sum())


def test_the_profiler_sees_nothing_of_a_plain_tensor():
    plain = [torch.ones(2, 3), torch.ones(3, 4)[:, ::2], torch.ones(1).expand(5), torch.ones(2).bfloat16()]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for tensor in plain:
            measure(tensor)
    assert [event.name for event in profile.events() or [] if "aten" in event.name] == []


def test_a_trace_has_no_trace_of_it():
    def function(x):
        for each in (x, x[:1], x.t(), x.expand(3, 2, 2)):
            with DisableTorchFunction():
                found.append(_measurer.measure(each))
        return x * 2

    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        warnings.filterwarnings("ignore", message=".*torch.jit.*")
        traced = torch.jit.trace(function, torch.ones(2, 2), check_trace=False)
    assert [node.kind() for node in traced.graph.nodes()].count("aten::mul") == 1
    assert not {"aten::size", "aten::numel", "aten::stride"} & {node.kind() for node in traced.graph.nodes()}
    assert [read(each).count for each in found] == [4, 2, 4, 12]
    assert all(type(size) is int for each in found for size in each.shape)


# The tensor and the run stay as they were.


def test_measuring_between_forward_and_backward_leaves_gradients_bit_identical(seeded):
    def gradients(between):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.ReLU(inplace=True), nn.Linear(5, 2))
        x = torch.randn(3, 4)
        for layer in model:
            x = layer(x)
            between(x)
        x.sum().backward()
        return [each.grad for each in model.parameters()]

    for ours, theirs in zip(gradients(measure), gradients(lambda x: None), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", [*HOLDERS, "CSR", "masked"])
def test_neither_the_tensor_nor_its_storage_is_kept_alive(kind):
    tensor = silently(KINDS[kind][0])
    gone = references(tensor)
    measurement = measure(tensor)
    del tensor
    gc.collect()
    assert [each() for each in gone] == [None] * len(gone)
    read(measurement)


def test_no_memory_is_copied_for_a_plain_tensor():
    measure(torch.ones(10))  # makes the scratch
    tensor = torch.ones(1_000_000, dtype=torch.bfloat16)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        measure(tensor)
    assert sum(event.cpu_memory_usage for event in profile.key_averages()) == 0


# Surroundings.


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SURROUNDINGS = {
    "default device meta": lambda: torch.device("meta"),
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "inference mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "deterministic algorithms": deterministic,
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True),
    "saved tensor hooks": lambda: torch.autograd.graph.saved_tensors_hooks(_raises, _raises),
}


def _raises(*args):
    raise AssertionError("measuring has saved a tensor")


@pytest.mark.parametrize("surroundings", SURROUNDINGS.values(), ids=SURROUNDINGS.keys())
def test_surroundings_change_no_number(surroundings):
    tensors = [(silently(make), expected) for make, expected in KINDS.values()]
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # anomaly mode says that it is slow
        stack.enter_context(surroundings())
        measurer = Measurer()
        with DisableTorchFunction():
            found = [measurer.measure(tensor) for tensor, _ in tensors]
    for measurement, (_, expected) in zip(found, tensors, strict=True):
        assert measurement.note == expected.note
        if expected.statistics is not None:
            row = measurement.rows.read([measurement.row])[0, :FIRST_INDEX].tolist()
            assert str(row) == str(list(map(float, expected.statistics)))


@contextmanager
def flushed_denormals():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_flushed_denormals_are_the_zeros_that_torch_takes_them_for(dtype):
    tensor = torch.tensor([torch.finfo(dtype).tiny / 4, 0.0, 2.0], dtype=dtype)
    with flushed_denormals():
        theirs = (tensor * 1).double().tolist()
        found = statistics(tensor)
    assert theirs == [0, 0, 2]
    assert found == (3, 0, 2, 2, 4, 0, 0)


def test_subnormals_are_measured_as_they_stand_whatever_is_flushed():
    if cpu_kernel.measure_into is None:
        pytest.skip("numpy reads them as the processor is set to")
    halves = torch.tensor([2.0**-20, -(2.0**-14), 2.0], dtype=torch.float16)
    singles = torch.tensor([2.0**-140, 2.0**-139])
    with flushed_denormals():
        assert statistics(halves).sum == 2 - 2.0**-14 + 2.0**-20
        assert statistics(singles).sum == 3 * 2.0**-140


def test_numpy_flushes_subnormal_float16_though_torch_would_convert_it(monkeypatch):
    """What is subnormal is not so in torch's float32, but it is on numpy's way to one."""
    monkeypatch.setattr(measurer_module, "measure_into", None)
    tensor = torch.tensor([2.0**-20, -(2.0**-14), 2.0], dtype=torch.float16)
    with flushed_denormals():
        found = statistics(tensor)
    assert found == (3, -(2.0**-14), 2, 2 - 2.0**-14, 4 + 2.0**-28, 0, 0)
    assert statistics(tensor).sum == 2 - 2.0**-14 + 2.0**-20


# Threads.


def test_threads_measure_at_once():
    """numpy lets go of the interpreter in large tensors, so that the kernels really overlap."""
    measurer, start, found = Measurer(), threading.Barrier(6), {}

    def work(number):
        tensors = [torch.full((150_000,), number + at, dtype=torch.bfloat16)[at:] for at in range(8)]
        start.wait()
        with DisableTorchFunction():
            found[number] = [measurer.measure(tensor) for _ in range(5) for tensor in tensors]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = [each.row for measured in found.values() for each in measured]
    assert len(set(rows)) == 6 * 40
    for number, measured in found.items():
        for at, row in enumerate(
            measured[0].rows.read([each.row for each in measured])[:, :FIRST_INDEX].tolist()
        ):
            count, value = 150_000 - at % 8, number + at % 8
            assert row == [count, value, value, count * value, count * value**2, 0, 0]


# Devices: the memory of the CPU in place of one.


class OnDevice(Measurer):
    """Takes memory for a device."""

    def __init__(self):
        super().__init__()
        self.host_measurer = None

    def _measure_memory(self, tensor, shape, note):
        with unseen(), torch.no_grad():
            return self._measure_on_device(tensor, tuple(shape), note)


#: The ops that the kernel of devices runs are a subclass's own to run.
ON_DEVICE = [kind for kind in KINDS if kind != "subclass with __torch_dispatch__ and own memory"]


@pytest.mark.parametrize("kind", ON_DEVICE)
def test_each_kind_of_tensor_is_measured_on_a_device(kind):
    make, expected = KINDS[kind]
    tensor = silently(make)
    with DisableTorchFunction():
        measurement = OnDevice().measure(tensor)
    assert (measurement.shape, measurement.dtype, measurement.note) == expected[:3]
    if expected.statistics is not None:
        assert type(measurement.rows) is DeviceRows
        row = measurement.rows.read([measurement.row])[0, :FIRST_INDEX].tolist()
        assert str(row) == str(list(map(float, expected.statistics)))


def test_a_row_is_free_again_when_the_device_lacks_an_op(monkeypatch):
    def fails(chunk, row):
        raise NotImplementedError("no such kernel")

    measurer = OnDevice()
    with DisableTorchFunction():
        rows = measurer.measure(torch.ones(3)).rows
        monkeypatch.setattr(device_kernel, "_measure", fails)
        failed = [measurer.measure(torch.ones(3)) for _ in range(2000)]
    assert {each.note for each in failed} == {"not measured: NotImplementedError: no such kernel"}
    assert len(rows.blocks) == 1


# Versions.


def test_versions_are_those_of_torch():
    tensor = torch.ones(3)
    assert _measurer.version_of(tensor) == 0
    tensor.add_(1)
    assert _measurer.version_of(tensor) == 1
    with torch.inference_mode():
        assert _measurer.version_of(torch.ones(3)) is None
