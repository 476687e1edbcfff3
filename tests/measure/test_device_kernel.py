"""The kernel of devices, on tensors of the CPU in place of a device's."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.any_numbers import from_valid_bytes
from helpers.devices import Devices, no_waiting
from helpers.dtypes import DEVICE_DTYPES as DTYPES
from helpers.float64_reference import assert_near_reference, statistics, to_numbers
from modtrace.measure import device_kernel
from modtrace.measure.cpu_kernel import RawStatistics
from modtrace.measure.device_kernel import measure_on_device
from modtrace.measure.rows import FIRST_INDEX, WIDTH, DeviceRows


@pytest.fixture(scope="module", params=[2**24, 100], ids=["one chunk", "chunks of 100"])
def chunk(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_kernel, "_CHUNK", request.param)
        yield request.param


def measured(tensor: torch.Tensor) -> RawStatistics:
    row = torch.full((WIDTH,), 99.0, dtype=torch.float64)  # what the row's last tensor has left
    with torch.no_grad():
        measure_on_device(tensor, row)
    return RawStatistics(*row[:FIRST_INDEX].tolist())


def check(tensor: torch.Tensor) -> None:
    assert_near_reference(measured(tensor), to_numbers(tensor))


@settings(deadline=None, max_examples=60)
@given(st.binary(min_size=16, max_size=3000), st.sampled_from(DTYPES))
def test_statistics_of_any_bits_equal_the_reference(chunk, content, dtype):
    check(from_valid_bytes(content[: len(content) // 16 * 16], dtype))


@pytest.mark.parametrize("value", [1e-38, 1e-45, 1.1, 2e19, 3.3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squares_beyond_the_range_of_float32_are_summed(chunk, dtype, value):
    check(torch.full((100_000,), value, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_elements_give_a_count_of_0(chunk, dtype):
    for tensor in (torch.empty(0, dtype=dtype), torch.empty(3, 0, dtype=dtype).t()):
        np.testing.assert_equal(tuple(measured(tensor)), (0, math.nan, math.nan, 0.0, 0.0, 0, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int64, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.view(30, 20).t(),
        lambda x: x.view(30, 20)[::2, 3:],
        lambda x: x.view(30, 1, 20).expand(30, 7, 20),
        lambda x: x[0].expand(5, 6),
        lambda x: x[0],
        lambda x: x.unfold(0, 10, 3),
        lambda x: x[:0].expand(9, 0),
    ],
    ids=[
        "transposed",
        "sliced",
        "expanded",
        "expanded scalar",
        "0-dim",
        "overlapping",
        "expanded, no elements",
    ],
)
def test_any_strides_are_measured(chunk, view, dtype):
    tensor = torch.arange(600).remainder(51).to(torch.int8).view(dtype) if dtype.itemsize == 1 else None
    check(view(torch.arange(600).to(dtype) if tensor is None else tensor))


def test_an_expanded_tensor_is_not_copied_in_full():
    """2^50 elements."""
    assert measured(torch.tensor([1.0, -3.0]).expand(2**49, 2)) == (2**50, -3, 1, -(2**50), 10 * 2**49, 0, 0)


def test_statistics_are_those_of_the_kernel_in_memory(chunk):
    tensor = torch.arange(-300.0, 301).view(-1, 1)
    assert measured(tensor) == statistics(tensor) == (601, -300, 300, 0, 18090100, 0, 0)


def test_device_rows_keep_what_the_kernel_wrote():
    rows = DeviceRows(torch.device("cpu"))
    numbers = [rows.take() for _ in range(3)]
    for number in numbers:
        measure_on_device(torch.full((2,), float(number)), rows.row(number))
    table = rows.read(list(reversed(numbers)))
    assert table[:, :FIRST_INDEX].tolist() == [
        [2.0, n, n, 2 * n, 2 * n * n, 0, 0] for n in map(float, reversed(numbers))
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_waits_for_the_device(dtype):
    tensors = [torch.ones(5, dtype=dtype), torch.empty(0, dtype=dtype), torch.ones(1, dtype=dtype).expand(4)]
    rows = [torch.zeros(WIDTH, dtype=torch.float64) for _ in tensors]
    with no_waiting():
        for tensor, row in zip(tensors, rows, strict=True):
            measure_on_device(tensor, row)
    assert [row[0].item() for row in rows] == ([10, 0, 8] if dtype.is_complex else [5, 0, 4])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_tensor_of_another_device_takes_part(chunk, dtype):
    """A copy from the host would wait, too; and what would have to be read fails on meta."""
    ones = torch.ones(250, dtype=dtype, device="meta")
    for tensor in (ones, ones[:0], ones[:1].expand(4), ones.view(10, 25)[:, ::2]):
        row = torch.zeros(WIDTH, dtype=torch.float64, device="meta")
        with Devices() as devices:
            measure_on_device(tensor, row)
        assert devices.types == {"meta"}
