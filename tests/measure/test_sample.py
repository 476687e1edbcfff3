"""The values of a sample: those of the tensor at the sample's positions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.dtypes import FLOATS
from modtrace.measure.dtypes import format_of
from modtrace.measure.memory import logical_array
from modtrace.measure.tier2 import tier2
from modtrace.measure.tier2.tier2 import sample_array
from modtrace.recording.statistics.sample import sample_positions

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

DTYPES = [*FLOATS, torch.float8_e5m2, torch.int64, torch.bool, torch.complex32]


def sample(tensor: torch.Tensor, k: int) -> np.ndarray:
    return sample_array(logical_array(tensor), format_of(tensor.dtype), k)


def check(tensor: torch.Tensor, k: int) -> None:
    chosen = tensor.reshape(-1)[torch.from_numpy(sample_positions(tensor.numel(), k))]
    numbers = torch.view_as_real(chosen) if tensor.is_complex() else chosen
    found = sample(tensor, k)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, numbers.float().reshape(-1).numpy())


def test_a_small_tensor_is_kept_whole():
    assert sample(torch.tensor([[1.0, -2.0], [3.0, 4.0]]), 4).tolist() == [1, -2, 3, 4]
    assert sample(torch.tensor(7), 4).tolist() == [7]
    assert sample(torch.empty(3, 0), 4).tolist() == []
    assert sample(torch.tensor([1 + 2j, 3 - 4j]), 4).tolist() == [1, 2, 3, -4]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [1, 64, 1000])
def test_values_are_those_at_the_positions(dtype, k):
    numbers = torch.arange(600).remainder(97).sub(40)
    tensor = (numbers.float() if dtype.itemsize == 1 else numbers).to(dtype)
    for view in (tensor, tensor.view(30, 20).t(), tensor.view(30, 20)[:, ::3], tensor[:5].expand(9, 5)):
        check(view, k)


def test_nan_and_infinities_are_kept():
    np.testing.assert_array_equal(sample(torch.tensor([torch.nan, -torch.inf, 0.0]), 3), [np.nan, -np.inf, 0])


def test_what_is_beyond_float32_is_infinite():
    with np.errstate(all="raise"):
        assert sample(torch.tensor([1e300, 1.0], dtype=torch.float64), 2).tolist() == [np.inf, 1.0]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_as_strided_is_sampled(data):
    shape = data.draw(st.lists(st.integers(0, 5), max_size=4))
    strides = [data.draw(st.integers(0, 40)) for _ in shape]
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.complex64]))
    tensor = torch.arange(1000.0).sin().to(dtype).as_strided(shape, strides)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tier2, "CHUNK", data.draw(st.integers(1, 20)))
        check(tensor, data.draw(st.integers(1, 30)))


def test_an_expanded_tensor_is_not_walked_in_full():
    assert sample(torch.tensor([2.0]).expand(2**50), 3).tolist() == [2, 2, 2]
