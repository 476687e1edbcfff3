"""The kernels of tier 2, hash and sketch, on a cuda_device driver that runs them on the CPU."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from helpers.any_numbers import of_magnitudes, random_bits
from helpers.cuda_on_cpu import KERNELS, needs_compiler
from helpers.dtypes import FLOAT8, FLOATS
from helpers.float64_reference import to_numbers
from helpers.tensor_kinds import HOLDERS, KINDS, silently
from modtrace.measure.cuda.cuda_kernels import CudaKernels
from modtrace.measure.cuda.together import Together
from modtrace.measure.dtypes import format_of
from modtrace.measure.fingerprints.fingerprints import fingerprint_array
from modtrace.measure.measurers import cuda_extras
from modtrace.measure.measurers.device_results import read_results
from modtrace.measure.measurers.extras import Extras
from modtrace.measure.measurers.user_functions import UserFunctions
from modtrace.measure.measurers.want import Extra, Want
from modtrace.measure.memory import logical_array
from modtrace.measure.moments import rows
from modtrace.measure.tier2.tier2 import channel_max_array, sample_array, tier2_array
from modtrace.recording.statistics.fingerprints import SKETCH_SIZE, bucket_and_sign
from modtrace.torch_internals import graph_captures as graph_captures_module
from modtrace.torch_internals.graph_captures import graph_captures
from modtrace.torch_internals.modes import DisableTorchFunction

pytestmark = needs_compiler

#: Of numbers around a vector, a block of the sketch, a round of all threads, a part, a row of words, a chunk and more.
SIZES = [0, 1, 17, 65, 4099, 16_385, 70_001]

#: One of each size and sign: what their numbers are is shown of the usual statistics, which read them in the same way.
DTYPES = [
    *FLOATS[:3], FLOAT8[-1], torch.int8, torch.uint16, torch.int32, torch.uint64, torch.bool, torch.complex64,
]  # fmt: skip

ALL = Want(stats=2, hash=True, sketch=True)


def new_extras(together: "Together | None" = None) -> Extras:
    return Extras(UserFunctions(lambda what, error: None), together)


def launched(extras: Extras, tensor: torch.Tensor, want: Want = ALL) -> Extra:
    extra = Extra()
    with DisableTorchFunction():
        extras.measure(tensor, want, extra)
    return extra


def measured(extras: Extras, tensor: torch.Tensor, want: Want = ALL) -> Extra:
    extra = launched(extras, tensor, want)
    read_results([extra])
    return extra


def numbers_of(dtype: torch.dtype, size: int) -> "list[torch.Tensor]":
    """Tensors of any bits, and of ordinary, large, tiny and non-finite numbers and zeros."""
    tensors = [random_bits(size, size, dtype)]
    if dtype.is_floating_point and dtype.itemsize > 1:
        odd = [np.inf, -np.inf, np.nan] if size % 2 else []
        tensors += [
            torch.randn(size).relu().to(dtype),
            of_magnitudes(size, size, -45, 38, dtype, odd),
        ]
    return tensors


def check(found: Extra, tensor: torch.Tensor, channel_dim: int = -1) -> None:
    """Counts, indices, maxima and the hash are exact; sums are as near as float64, and the sketch as float32."""
    array, form, numbers = logical_array(tensor), format_of(tensor.dtype), to_numbers(tensor)
    expected = tier2_array(array, form)
    assert (found.zero_count, found.argmax) == (expected.zero_count, expected.argmax)
    np.testing.assert_array_equal(found.histogram, expected.histogram)
    smallest = numbers.size * 2.0**-1074
    np.testing.assert_allclose(found.sumabs, expected.sumabs, rtol=1e-12, atol=smallest)
    np.testing.assert_allclose(found.sum4, expected.sum4, rtol=1e-12, atol=smallest)
    largest = channel_max_array(array, form, channel_dim)
    if isinstance(largest, str):
        assert found.channel_max == {}
    else:
        np.testing.assert_array_equal(found.channel_max[channel_dim], largest)
        assert found.channel_max[channel_dim].dtype == largest.dtype
    assert found.hash == fingerprint_array(array, None).hash
    check_sketch(found.sketch, numbers)


def check_sketch(found: np.ndarray, numbers: np.ndarray) -> None:
    bucket, sign = bucket_and_sign(np.arange(numbers.size))
    finite = np.where(np.isfinite(numbers), numbers, 0)
    with np.errstate(all="ignore"):
        expected = np.bincount(bucket, finite * sign, SKETCH_SIZE)
        magnitudes = np.bincount(bucket, np.abs(finite), SKETCH_SIZE)
        is_known = np.isfinite(magnitudes)
        near = np.abs(found - expected) <= 1e-6 * magnitudes + numbers.size * 2.0**-149
    assert near[is_known].all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_are_those_of_main_memory(cuda_device, dtype):
    extras, launches = new_extras(), 0
    for number, size in enumerate(SIZES):
        for other, tensor in enumerate(numbers_of(dtype, size)):
            # Aligned to a vector, and not; of large ones, which take long, one or the other.
            for start in (0, 1) if size < 10_000 else ((number + other) % 2,):
                check(measured(extras, tensor[start:]), tensor[start:])
                launches += 2
    assert cuda_device.launches == launches


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_bits_depend_on_neither_the_order_of_blocks_nor_alignment(cuda_device, dtype):
    tensor = torch.randn(262_145).mul(100).to(dtype)
    extras, found = new_extras(), []
    for seed in range(3):
        cuda_device.reset(seed)
        moved = torch.cat([tensor[:seed], tensor])[seed:]
        found.append(measured(extras, moved))
    check(found[0], tensor)
    assert len({bits_of(extra) for extra in found}) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_parts_of_large_tensors_span_rows_of_words_and_chunks(cuda_device, monkeypatch, dtype):
    """They do from 32 MiB on; with 3 parts a smaller one will do."""
    kernels = {kernel: cuda_device.kernels(kernel=kernel._replace(most_parts=3)) for kernel in KERNELS}
    monkeypatch.setattr(cuda_extras, "find_kernels", lambda device, kernel: kernels[kernel])
    tensor = torch.randn(1_100_001).mul(30).to(dtype)
    check(measured(new_extras(), tensor), tensor)


def bits_of(extra: Extra) -> bytes:
    sums = np.array([extra.sumabs, extra.sum4])
    integers = np.array([extra.zero_count, extra.argmax])
    arrays = [extra.histogram, extra.sketch, *extra.channel_max.values()]
    return b"".join(array.tobytes() for array in (sums, integers, *arrays)) + str(extra.hash).encode()


#: Of a tensor of 6 x 5 x 4 elements. What does not lie side by side in the order of its elements is copied.
VIEWS = {
    "whole": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2),
    "every second": lambda x: x[:, ::2],
    "expanded": lambda x: x[:1].expand(9, 5, 4),
    "expanded, and strided": lambda x: x[:, :1, ::2].expand(6, 7, 2),
    "expanded scalar": lambda x: x[0, 0, 0].expand(5, 6),
    "0-dim": lambda x: x[1, 1, 1],
    "overlapping": lambda x: x.reshape(-1).unfold(0, 10, 3),
    "no elements": lambda x: x[:0],
    "no elements, expanded": lambda x: x[:0, :1].expand(0, 9, 4),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int8], ids=str)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_each_view_takes_two_launches(cuda_device, view, dtype):
    numbers = torch.arange(120).mul(7919).remainder(251).sub(100).view(6, 5, 4)
    tensor, extras = view(numbers.to(dtype)), new_extras()
    for dim in (-1, 0, 1):
        cuda_device.reset()
        check(measured(extras, tensor, ALL._replace(channel_dim=dim)), tensor, dim)
        assert cuda_device.launches == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape", [(3, 8191), (40, 1001, 3), (2, 3, 20_011), (5, 16_384), (9000, 4, 2)], ids=str
)
def test_channels_of_any_number_and_length_have_their_maxima(cuda_device, shape, dtype):
    """More than 8,192 of them take two passes over each part; runs and parts end anywhere."""
    tensor, extras = (
        of_magnitudes(1, int(np.prod(shape)), -40, 38, dtype, [np.nan, -np.inf]).view(shape),
        new_extras(),
    )
    for dim in range(len(shape)):
        check(measured(extras, tensor, ALL._replace(channel_dim=dim)), tensor, dim)


def test_nan_that_rows_are_filled_with_is_measured_as_any_other(cuda_device):
    awaited = torch.tensor([0x7FF8_A3A1_7ED0_0001] * 100).view(torch.float64)
    found = measured(new_extras(), awaited)
    assert (np.isnan(found.sumabs), found.hash) == (True, fingerprint_array(awaited.numpy(), None).hash)


def test_nothing_is_added_behind_the_last_number(cuda_device):
    """In this format no bits are zero."""
    tensor = torch.zeros(65, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    check(measured(new_extras(), tensor), tensor)


@pytest.mark.parametrize("kind", [*HOLDERS, "no elements", "masked", "zeros that take no memory"])
def test_each_kind_of_tensor_is_measured_as_in_main_memory(cuda_device, monkeypatch, kind):
    want = ALL._replace(sample=4)
    extras = new_extras()
    there = [measured(extras, silently(KINDS[kind][0]), want) for _ in range(2)]
    monkeypatch.undo()
    here = measured(new_extras(), silently(KINDS[kind][0]), want)
    for extra in there:
        assert [note.text for note in extra.notes] == [note.text for note in here.notes]
        assert (extra.zero_count, extra.argmax, extra.hash) == (here.zero_count, here.argmax, here.hash)
        for name in ("histogram", "channel_max", "sample"):
            np.testing.assert_equal(getattr(extra, name), getattr(here, name))
        for name in ("sumabs", "sum4", "sketch"):
            np.testing.assert_allclose(getattr(extra, name), getattr(here, name), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("want", "launches", "missing"),
    [
        (Want(stats=2), 1, {"hash", "sketch"}),
        (Want(hash=True), 1, {"histogram", "sketch"}),
        (Want(sketch=True), 1, {"histogram", "hash"}),
        (Want(hash=True, sketch=True), 1, {"histogram"}),
        (Want(sample=8), 1, {"histogram", "hash", "sketch"}),
        (Want(), 0, {"histogram", "hash", "sketch"}),
    ],
    ids=lambda value: "+".join(sorted(value)) if isinstance(value, set) else "",
)
def test_nothing_but_what_is_wanted_is_launched(cuda_device, want, launches, missing):
    tensor = torch.randn(70_001)
    found = measured(new_extras(), tensor, want)
    assert cuda_device.launches == launches
    assert {name for name in ("histogram", "hash", "sketch") if getattr(found, name) is None} == missing
    if found.hash is not None:
        assert found.hash == fingerprint_array(tensor.numpy(), None).hash
    if found.sketch is not None:
        check_sketch(found.sketch, to_numbers(tensor))


def test_what_is_on_its_way_is_not_measured_again(cuda_device):
    tensor, extras = torch.randn(5, 4), new_extras()
    extra = launched(extras, tensor)
    with DisableTorchFunction():
        extras.measure(tensor, ALL, extra)
        assert cuda_device.launches == 2
        extras.measure(tensor, ALL._replace(channel_dim=0), extra)
    assert cuda_device.launches == 3
    read_results([extra])
    for dim in (-1, 0):
        check(extra, tensor, dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, FLOAT8[1], torch.complex32], ids=str)
def test_sample_is_that_of_main_memory(cuda_device, dtype):
    extras, launches = new_extras(), 0
    for size in (0, 1, 5, 6, 64, 4099):
        for tensor in (random_bits(size, size, dtype), random_bits(1, 2 * size, dtype)[::2]):
            for samples in (1, 5, 64):
                found = measured(extras, tensor, Want(sample=samples)).sample[samples]
                launches += 1
                expected = sample_array(logical_array(tensor), format_of(dtype), samples)
                np.testing.assert_array_equal(found, expected)
                assert found.dtype == np.float32
    assert cuda_device.launches == launches


# Many at once.


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_many_tensors_take_a_launch_for_each_kernel_and_have_the_bits_of_each_alone(cuda_device, dtype):
    together = Together()
    extras = new_extras(together)
    tensors = [tensor for size in (1, 63, 4099, 70_001) for tensor in numbers_of(dtype, size)]
    tensors += [torch.ones(3, 1).to(dtype).expand(3, 4), torch.randn(5, 4).to(dtype).t()]
    alone = [measured(extras, tensor) for tensor in tensors]
    for seed in range(2):
        cuda_device.reset(seed)
        with together.block():
            found = [launched(extras, tensor) for tensor in tensors]
            assert cuda_device.launches == 0
        assert (cuda_device.launches, cuda_device.copies) == (2, 2)
        read_results(found)
        assert list(map(bits_of, found)) == list(map(bits_of, alone))


def test_launch_that_fails_leaves_a_note_for_each(cuda_device):
    together = Together()
    extras, tensor = new_extras(together), torch.randn(3, 4)
    measured(extras, tensor)
    cuda_device.fail(1)
    lost = measured(extras, tensor, Want(stats=2))
    failed = "RuntimeError: cuLaunchKernel: CUDA_ERROR_INVALID_VALUE (1)"
    assert [note.text for note in lost.notes] == [f"no histogram: {failed}", f"no channel_max: {failed}"]
    cuda_device.fail(1)
    with together.block():
        found = [launched(extras, tensor, Want(hash=True)) for _ in range(2)]
    for extra in found:
        assert [note.text for note in extra.notes] == [f"not measured: {failed}"]
        assert (extra.hash, extra.arriving) == (None, [])
    cuda_device.reset()


# Rows.


def test_rows_of_results_are_free_when_they_are_read_or_dropped_and_have_come(cuda_device):
    extras, tensor = new_extras(), torch.randn(3, 4)
    first = launched(extras, tensor)
    taken = places_of(first)
    read_results([first])
    second = launched(extras, tensor)
    assert places_of(second) == taken
    second.free()
    assert (second.histogram, second.channel_max, second.hash, second.arriving) == (None, {}, None, [])
    cuda_device.defer()
    late = launched(extras, tensor)
    assert places_of(late) == taken
    late.free()
    assert places_of(launched(extras, tensor)).isdisjoint(taken)
    cuda_device.run()


def places_of(extra: Extra) -> set[tuple[int, int]]:
    return {(arriving.rows.width, arriving.row) for arriving in extra.arriving}


def test_results_that_never_come_leave_a_note(cuda_device, monkeypatch):
    monkeypatch.setattr(rows, "_PATIENCE_S", 0.05)
    extras = new_extras()
    measured(extras, torch.ones(3))
    cuda_device.defer()
    lost = measured(extras, torch.ones(3))
    assert [note.text for note in lost.notes] == ["not read from cpu:0: RuntimeError"]
    assert (lost.histogram, lost.channel_max, lost.hash, lost.sketch) == (None, {}, None, None)
    cuda_device.run()


# Where no kernel measures.


def test_nothing_is_launched_while_a_graph_is_captured(cuda_device, monkeypatch):
    monkeypatch.setattr(graph_captures_module, "is_on_device", lambda tensor: True)
    extras, graph = new_extras(), torch.nn.Module()
    graph_captures._begin(graph)
    try:
        found = measured(extras, torch.ones(3))
    finally:
        graph_captures._end(graph)
    assert [note.text for note in found.notes] == ["not measured: a CUDA graph was being captured"]
    assert cuda_device.launches == 0


@pytest.mark.parametrize("view", ["whole", "every second"])
def test_torch_measures_where_no_kernel_can_be_compiled(cuda_device, monkeypatch, view):
    def refuses(source, options):
        raise RuntimeError("no NVRTC here")

    kernels = {kernel: CudaKernels(torch.device("cpu", 0), kernel, refuses) for kernel in KERNELS}
    monkeypatch.setattr(cuda_extras, "find_kernels", lambda device, kernel: kernels[kernel])
    tensor = VIEWS[view](torch.randn(6, 5, 4))
    for together in (None, Together()):
        with together.block() if together else nullcontext():
            found = launched(new_extras(together), tensor)
        assert isinstance(found.hash, torch.Tensor)
        read_results([found])
        found.hash %= 2**64
        check(found, tensor)
    assert cuda_device.launches == 0


def test_large_expanded_tensor_is_not_copied(cuda_device, monkeypatch):
    monkeypatch.setattr(cuda_extras, "_MOST_COPIED_BYTES", 1000)
    tensor = torch.randn(7, 1).expand(7, 500)
    found = measured(new_extras(), tensor)
    assert cuda_device.launches == 1, "tier 2 needs each element once"
    found.hash %= 2**64
    check(found, tensor)
