"""Tensors of any dtype, strides and offset in memory of exactly their size: what is measured of them is right.

`make sanitize` runs many more of them, with kernels that report a read outside of that memory.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch

from helpers import kernels
from helpers.any_numbers import from_valid_bytes
from helpers.dtypes import DTYPES, FLOATS
from helpers.float64_reference import assert_near_reference, measure, statistics, to_numbers
from helpers.fuzzed import FUZZ
from helpers.tier2_reference import tier2_of
from modtrace.collect.values.whole_tensors import KeptTensors
from modtrace.measure.fingerprints import fingerprints
from modtrace.measure.measurers import measurer
from modtrace.measure.measurers.differences import Before
from modtrace.measure.measurers.extras import Extras
from modtrace.measure.measurers.user_functions import UserFunctions
from modtrace.measure.measurers.want import Extra, Want
from modtrace.measure.tier2 import tier2
from modtrace.recording.raw_tensor import copy_raw
from modtrace.recording.statistics.fingerprints import bucket_and_sign, hash_weight
from modtrace.recording.statistics.sample import sample_positions
from modtrace.torch_internals.modes import DisableTorchFunction, unseen

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

#: Tensors of one test; most have up to 4,096 elements, every tenth up to 600,000.
TENSORS = 80

kernel = kernels.both_kernels(
    (measurer, "measure_into"),
    (fingerprints, "compiled"),
    (tier2, "tier2_into"),
    (tier2, "largest_into"),
)

EVERYTHING = Want(stats=2, hash=True, sketch=True, sample=5)

#: Where pieces, blocks, rows and chunks of the kernels end.
ENDS = [16, 64, 512, 1024, 2048, 16_384, 65_536, 131_072, 262_144]

Draw = np.random.Generator


class Drawn(NamedTuple):
    """A tensor, and a dense one with the same elements that was made byte by byte."""

    tensor: torch.Tensor
    dense: torch.Tensor


def one_of(draw: Draw, *values):
    return values[draw.integers(len(values))]


def drawn_shape(draw: Draw) -> tuple[int, ...]:
    """Few elements, none at all beside large sizes, or about as many as end a piece of a kernel."""
    kind = draw.integers(10)
    if kind == 0:
        shape = [0, one_of(draw, 1, 3, 1 << 20, 1 << 40), one_of(draw, 1, 2)][: draw.integers(1, 4)]
        draw.shuffle(shape)
        return tuple(shape)
    if kind == 1:
        numel = one_of(draw, *ENDS) * one_of(draw, 1, 2) + one_of(draw, -1, 0, 1, 3)
        return one_of(draw, (numel,), (numel // 7 + 1, 7), (7, numel // 7 + 1))
    return tuple(one_of(draw, 1, 2, 3, 5, 8) for _ in range(draw.integers(5)))


def drawn_strides(draw: Draw, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Dense in some order of the dimensions, with gaps, expanded, or overlapping."""
    kind = one_of(draw, "dense", "permuted", "gaps", "expanded", "overlapping")
    order = list(range(len(shape)))[::-1]
    if kind != "dense":
        draw.shuffle(order)
    strides, step = [0] * len(shape), 1
    for dim in order:
        if kind == "overlapping":
            strides[dim] = int(draw.integers(4))
        elif kind != "expanded" or draw.integers(2):
            strides[dim] = step
            step *= max(1, shape[dim]) * (int(draw.integers(1, 4)) if kind == "gaps" else 1)
    return tuple(strides)


def drawn_bytes(draw: Draw, size_bytes: int, dtype: torch.dtype) -> bytes:
    """Random bits, few different numbers, or zeros; a bool is 0 or 1."""
    kind = one_of(draw, "bits", "few", "zeros")
    content = draw.bytes(size_bytes) if kind == "bits" else bytes(size_bytes)
    if kind == "few":
        numbers = torch.tensor([1.0, 0.0, 3.0, 0.5]).to(dtype)
        content = (numbers.view(torch.uint8).numpy().tobytes() * (size_bytes // numbers.nbytes + 1))[
            :size_bytes
        ]
    return bytes(byte & 1 for byte in content) if dtype is torch.bool else content


def storage_of(draw: Draw, content: bytes) -> torch.UntypedStorage:
    """A storage of just these bytes: of torch's, or of Python's at any address."""
    if not content:
        return torch.UntypedStorage(0)
    lead = one_of(draw, None, 0, 1, 2, 4, 7)
    if lead is None:
        own = torch.empty(len(content), dtype=torch.uint8)
        own.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        return own.untyped_storage()
    return torch.frombuffer(
        bytearray(lead) + bytearray(content), dtype=torch.uint8, offset=lead
    ).untyped_storage()


def draw_tensor(draw: Draw) -> Drawn:
    """A tensor that ends where its memory does, most often."""
    dtype, shape = one_of(draw, *DTYPES), drawn_shape(draw)
    strides, offset, numel = drawn_strides(draw, shape), int(one_of(draw, 0, 0, 1, 2, 3, 7)), math.prod(shape)
    places = np.zeros(1, np.int64)
    for size, stride in zip(shape, strides, strict=True):
        places = np.add.outer(places, np.arange(size if numel else 0) * stride).reshape(-1)
    extent = (int(places.max()) + 1 if numel else 0) + offset
    content = drawn_bytes(draw, extent * dtype.itemsize + int(one_of(draw, 0, 0, 0, 1, 9)), dtype)
    tensor = torch.empty(0, dtype=dtype).set_(storage_of(draw, content), offset, shape, strides)
    elements = np.frombuffer(content, f"V{dtype.itemsize}", count=extent)[offset + places[:numel]]
    dense = from_valid_bytes(elements.tobytes(), dtype).reshape(shape)
    is_aligned = not tensor.data_ptr() % dtype.itemsize  # else torch's own `resolve_conj` crashes (2.13)
    if dtype.is_complex and is_aligned and draw.integers(2):
        return Drawn(tensor.conj(), dense.conj().resolve_conj())
    return Drawn(tensor, dense)


def raw_bytes(dense: torch.Tensor) -> np.ndarray:
    parts = torch.view_as_real(dense) if dense.is_complex() else dense
    return parts.reshape(-1).view(torch.uint8).numpy()


# What is right.


def check_statistics(drawn: Drawn, numbers: np.ndarray) -> None:
    assert_near_reference(statistics(drawn.tensor), numbers)


def check_extras(drawn: Drawn, numbers: np.ndarray) -> None:
    extra = Extra()
    with DisableTorchFunction():
        Extras(UserFunctions(lambda what, error: None)).measure(drawn.tensor, EVERYTHING, extra)
    parts = 2 if drawn.dense.is_complex() else 1
    check_tier2(extra, tier2_of(numbers), parts)
    assert extra.hash == hash_of(raw_bytes(drawn.dense))
    check_sketch(extra.sketch, numbers)
    places = sample_positions(drawn.dense.numel(), 5)
    with np.errstate(all="ignore"):
        sample = numbers.reshape(-1, parts)[places].astype(np.float32).reshape(-1)
        np.testing.assert_array_equal(extra.sample[5], sample)
        check_channels(extra, numbers, drawn.dense.shape, parts)


def check_tier2(extra: Extra, expected: dict, parts: int) -> None:
    argmax = expected["argmax"]
    found = (extra.zero_count, extra.histogram.tolist(), extra.argmax)
    assert found == (
        expected["zero_count"],
        expected["histogram"],
        None if argmax is None else argmax // parts,
    )
    for name in ("sumabs", "sum4"):
        if math.isfinite(expected[name]):
            np.testing.assert_allclose(getattr(extra, name), expected[name], rtol=1e-9, atol=1e-300)


def check_channels(extra: Extra, numbers: np.ndarray, shape: tuple[int, ...], parts: int) -> None:
    if shape and math.prod(shape) and shape[-1] <= tier2.MOST_CHANNELS:
        magnitudes = np.abs(numbers).reshape(-1, shape[-1], parts)
        np.testing.assert_array_equal(extra.channel_max[-1], magnitudes.max(axis=(0, 2)).astype(np.float32))
    else:
        assert extra.channel_max == {}


def hash_of(content: np.ndarray) -> int:
    words = np.concatenate([content, np.zeros(-len(content) % 4, np.uint8)]).view("<i4")
    with np.errstate(over="ignore"):
        return int((words.astype(np.int64).view(np.uint64) * hash_weight(np.arange(len(words)))).sum())


def check_sketch(found: np.ndarray, numbers: np.ndarray) -> None:
    finite = np.where(np.isfinite(numbers), numbers, 0)
    bucket, sign = bucket_and_sign(np.arange(len(numbers)))
    with np.errstate(all="ignore"):
        magnitudes = np.bincount(bucket, np.abs(finite), minlength=64)
        if np.isfinite(magnitudes).all():
            expected = np.bincount(bucket, finite * sign, minlength=64)
            assert (np.abs(found - expected) <= 1e-6 * magnitudes + 1e-37).all()


def check_copy(drawn: Drawn, numbers: np.ndarray) -> None:
    copies = []

    def put(name, array, dtype, shape):
        copies.append(np.empty(array.nbytes, np.uint8))
        copy_raw(array, copies[-1])
        return name

    extra, kept = Extra(), KeptTensors(put)
    with DisableTorchFunction():
        kept.keep(extra, drawn.tensor, "x", lazy=bool(len(numbers) % 2))
        kept.settle()
    np.testing.assert_array_equal(copies[0], raw_bytes(drawn.dense))


def check_difference(drawn: Drawn, numbers: np.ndarray) -> None:
    if drawn.dense.dtype not in FLOATS:
        return
    before = Before()
    with unseen(), torch.no_grad(), np.errstate(all="ignore"):
        before.take(drawn.tensor)
        moved = before.difference(drawn.tensor, keep=bool(len(numbers) % 2))
        np.testing.assert_array_equal(to_numbers(moved.tensor), numbers - numbers)


def check_freed(drawn: Drawn, numbers: np.ndarray) -> None:
    """The storage ends where the tensor still has elements; nothing there is read."""
    storage = drawn.tensor.untyped_storage()
    if not storage.resizable() or not len(numbers):
        return
    size_bytes = storage.nbytes()
    for less in (0, drawn.tensor.storage_offset() * drawn.tensor.element_size()):
        storage.resize_(less)
        extra = Extra()
        with DisableTorchFunction():
            Extras(UserFunctions(lambda what, error: None)).measure(drawn.tensor, EVERYTHING, extra)
        for note in (measure(drawn.tensor).note, extra.notes[-1].text):
            assert note.startswith("not measured: ")
        assert (extra.hash, extra.sketch, extra.histogram, extra.sample) == (None, None, None, {})
    storage.resize_(size_bytes)


def check_without_memory(drawn: Drawn, numbers: np.ndarray) -> None:
    meta = torch.empty_strided(
        drawn.tensor.shape, drawn.tensor.stride(), dtype=drawn.tensor.dtype, device="meta"
    )
    assert measure(meta).note == "not measured: a meta tensor holds no numbers"


CHECKS: list[Callable[[Drawn, np.ndarray], None]] = [
    check_statistics, check_extras, check_copy, check_difference, check_without_memory, check_freed,
]  # fmt: skip


@pytest.mark.parametrize("seed", range(3 * FUZZ))
def test_what_is_measured_of_any_tensor_is_right_and_nothing_outside_of_its_memory_is_read(seed):
    draw = np.random.default_rng(seed)
    for number in range(TENSORS):
        drawn = draw_tensor(draw)
        numbers = to_numbers(drawn.dense)
        about = f"seed {seed}, tensor {number}: {drawn.tensor.dtype}, {drawn.tensor.shape}, {drawn.tensor.stride()}"
        for check in CHECKS:
            try:
                check(drawn, numbers)
            except Exception as error:
                raise AssertionError(f"{check.__name__}, {about}") from error
