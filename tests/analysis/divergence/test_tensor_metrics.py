"""Whole tensors, element by element."""

import math

import numpy as np
import pytest
import torch

from modtrace.analysis.divergence.tensor_metrics import TensorDifference, compare_tensors
from modtrace.recording.raw_tensor import RawTensor
from modtrace.recording.statistics.number_formats import to_float64


def raw(tensor: torch.Tensor) -> RawTensor:
    content = memoryview(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return RawTensor(dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape), data=content)


def compared(a: torch.Tensor, b: torch.Tensor, axes: tuple[int, ...] | None = None) -> TensorDifference:
    found = compare_tensors(raw(a), raw(b), axes=axes)
    assert found is not None
    return found


def test_one_changed_element_is_found_with_its_index_and_its_size() -> None:
    a = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    b = torch.tensor([[3.0, 4.5], [0.0, 0.0]])

    found = compared(a, b)

    assert found.relative_l2 == pytest.approx(0.5 / math.hypot(3, 4.5))
    assert (found.largest, found.where, found.pair) == (0.5, (0, 1), (4.0, 4.5))
    assert found.close_share == 0.75
    assert found.ulps == 0.5 / 2**-21


def test_equal_infinities_and_nan_are_equal() -> None:
    special = torch.tensor([math.nan, math.inf, -math.inf, 1.0])

    assert compared(special, special).relative_l2 == 0
    assert compared(special, torch.tensor([math.nan, math.inf, math.inf, 1.0])).largest == math.inf


def test_a_transpose_is_undone_first() -> None:
    a = torch.arange(6.0).reshape(2, 3)

    assert compared(a, a.T, axes=(1, 0)).relative_l2 == 0
    assert compare_tensors(raw(a), raw(torch.zeros(5))) is None


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.bool),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    ],
)
def test_numbers_of_each_dtype_are_those_of_torch(dtype: torch.dtype) -> None:
    bits = torch.arange(256, dtype=torch.uint8)
    tensor = (
        (bits < 7) if dtype is torch.bool else bits.view(dtype) if dtype.itemsize == 1 else bits.to(dtype)
    )

    numbers = to_float64(raw(tensor))

    assert numbers is not None
    np.testing.assert_array_equal(numbers, tensor.to(torch.float64).numpy())


def test_complex_numbers_have_an_axis_of_parts() -> None:
    numbers = to_float64(raw(torch.tensor([1 + 2j], dtype=torch.complex64)))

    assert numbers is not None and numbers.tolist() == [[1.0, 2.0]]
