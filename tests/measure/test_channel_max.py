"""The largest magnitude at each index of a dimension, against torch."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.dtypes import FLOATS
from helpers.kernels import both_kernels
from helpers.layouts import LAYOUTS, laid_out
from modtrace.measure.dtypes import CHUNK, format_of
from modtrace.measure.memory import logical_array
from modtrace.measure.tier2 import tier2
from modtrace.measure.tier2.tier2 import channel_max_array

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

ODD_FLOATS = [*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2fnuz]
DTYPES = [*FLOATS, torch.float8_e4m3fn, torch.int8, torch.int64, torch.bool, torch.complex32]

#: Every law holds for both kernels.
kernel = both_kernels((tier2, "tier2_into"), (tier2, "largest_into"))


def found(tensor: torch.Tensor, dim: int = -1) -> np.ndarray | str:
    return channel_max_array(logical_array(tensor), format_of(tensor.dtype), dim)


def check(tensor: torch.Tensor, dim: int) -> None:
    """Against torch in float64."""
    numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    numbers = numbers.double().abs()
    axis = dim % tensor.dim()
    expected = numbers.movedim(axis, 0).reshape(tensor.shape[axis], -1).amax(dim=1)
    result = found(tensor, dim)
    assert isinstance(result, np.ndarray) and result.dtype == np.float32
    np.testing.assert_array_equal(result, expected.float().numpy())


def numbers_of(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    size = math.prod(shape)
    numbers = torch.arange(size).mul(7919).remainder(251).sub(125)
    if dtype.itemsize == 1 and dtype.is_floating_point:
        numbers = numbers.to(torch.float32)
    return numbers.to(dtype).view(shape)


def test_a_nan_is_the_largest_of_its_channel():
    for nan in (math.nan, -math.nan):
        tensor = torch.tensor([[1.0, math.inf, 2.0], [nan, nan, -math.inf]])
        np.testing.assert_array_equal(found(tensor), [nan, nan, math.inf])


def test_what_is_beyond_float32_is_infinite():
    tensor = torch.tensor([[1e300, 1.0], [2.0, -1e-300]], dtype=torch.float64)
    with np.errstate(all="raise"):  # and no handler of the user's hears of it
        assert found(tensor).tolist() == [math.inf, 1.0]


def test_the_larger_part_of_a_complex_number_counts():
    assert found(torch.tensor([[1 + 2j, 3 - 4j], [0.5 - 9j, 0j]])).tolist() == [9, 4]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [(5,), (7, 300), (1000, 3), (2, 3, 4, 5), (4, 3, 5, 100), (3, 70, 65), (2, 16384)],
    ids=str,
)
def test_channels_of_any_dimension_are_those_of_torch(shape, dtype):
    tensor = numbers_of(shape, dtype)
    for dim in range(-len(shape), len(shape)):
        check(tensor, dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides_are_read(layout, dtype):
    tensor = laid_out(layout, dtype)
    for dim in range(tensor.dim()) if tensor.numel() else ():
        check(tensor, dim)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_as_strided_is_read_in_pieces_of_any_size(data):
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    strides = [data.draw(st.integers(0, 40)) for _ in shape]
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16, torch.float64, torch.complex64]))
    tensor = torch.arange(1000.0).sin().to(dtype).as_strided(shape, strides)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tier2, "CHUNK", data.draw(st.integers(2, 30)))
        check(tensor, data.draw(st.integers(-len(shape), len(shape) - 1)))


@settings(deadline=None, max_examples=60)
@given(st.binary(min_size=64, max_size=800), st.sampled_from(ODD_FLOATS), st.integers(1, 8))
def test_any_bits_are_compared(content, dtype, channels):
    whole = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    rows = len(content) // (dtype.itemsize * channels)
    tensor = whole[: rows * dtype.itemsize * channels].clone().view(dtype).view(rows, channels)
    if rows:
        check(tensor, -1)
        check(tensor, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.float16], ids=str)
def test_more_than_a_chunk_is_read(dtype):
    tensor = numbers_of((CHUNK // 100 + 7, 3, 101), dtype)
    for view in (tensor, tensor[:, :, 1:]):
        for dim in (1, 2):
            check(view, dim)


@pytest.mark.parametrize(
    ("tensor", "dim", "why"),
    [
        (torch.tensor(1.0), -1, "a tensor of no dimensions has no channels"),
        (torch.tensor(1j), 0, "a tensor of no dimensions has no channels"),
        (torch.ones(2, 3), 2, "no dimension 2 in a tensor of 2"),
        (torch.ones(2, 3), -3, "no dimension -3 in a tensor of 2"),
        (torch.ones(2, 16385), 1, "16,385 channels in dimension 1, more than 16,384"),
        (torch.ones(1).expand(20000), -1, "20,000 channels in dimension -1, more than 16,384"),
        (torch.ones(0, 3), 1, "no elements"),
        (torch.ones(3, 0), 1, "no elements"),
    ],
)
def test_where_there_are_none_it_says_why(tensor, dim, why):
    assert found(tensor, dim) == why
