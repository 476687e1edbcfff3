"""C measures plain tensors in main memory by itself, and leaves all others to Python.

That its numbers are right is shown by the tests of `Measurer`, which run with it and without it.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.any_numbers import magnitudes, odd_numbers, of_magnitudes, seeds
from modtrace.measure.measurers.measurer import Measurer
from modtrace.torch_internals.modes import DisableTorchFunction


class Subclass(Tensor):
    """May redefine anything."""


def freed() -> Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


MADE_IN_C: dict[str, Callable[[], Tensor]] = {
    **{
        str(dtype): lambda dtype=dtype: torch.ones(3, 4, dtype=dtype)  # type: ignore[misc]
        for dtype in (
            torch.float32,
            torch.float64,
            torch.float16,
            torch.bfloat16,
            torch.complex64,
            torch.complex128,
        )
    },
    "transposed": lambda: torch.ones(3, 4).t(),
    "every second": lambda: torch.ones(6, 8)[:, ::2],
    "expanded": lambda: torch.ones(3, 1).expand(3, 5),
    "all expanded": lambda: torch.ones(()).expand(3, 5),
    "no elements": lambda: torch.ones(0, 3),
    "0-dim": lambda: torch.tensor(1.0),
    "overlapping": lambda: torch.ones(9).unfold(0, 3, 1),
    "parameter": lambda: torch.nn.Parameter(torch.ones(3)),
    "not a leaf": lambda: torch.ones(3, requires_grad=True) * 2,
    "inference": lambda: torch.inference_mode()(torch.ones)(3),
}

LEFT_TO_PYTHON: dict[str, Callable[[], Tensor]] = {
    "integers": lambda: torch.arange(3),
    "truths": lambda: torch.ones(3, dtype=torch.bool),
    "float8": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "subclass": lambda: torch.ones(3).as_subclass(Subclass),
    "conjugated": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "negated": lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
    "on meta": lambda: torch.ones(3, device="meta"),
    "sparse": lambda: torch.ones(3).to_sparse(),
    "freed": freed,
}


@pytest.mark.parametrize("kind", MADE_IN_C)
def test_plain_tensors_are_measured_in_c(kind: str) -> None:
    tensor, measurer = MADE_IN_C[kind](), Measurer()
    with DisableTorchFunction():
        found = measurer.host_measurer.measure(tensor)
    assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
    [row] = found.rows.read([found.row])
    assert row[0] == tensor.numel() * (2 if tensor.is_complex() else 1)


@pytest.mark.parametrize("kind", LEFT_TO_PYTHON)
def test_others_are_left_to_python_and_take_no_row(kind: str) -> None:
    measurer = Measurer()
    with DisableTorchFunction():
        assert measurer.host_measurer.measure(LEFT_TO_PYTHON[kind]()) is None
        found = measurer.measure(torch.ones(3))
    assert found.row == 0


def test_tensors_inside_of_transforms_and_traces_are_left_to_python() -> None:
    measurer, found = Measurer(), []

    def measure(x: Tensor) -> Tensor:
        with DisableTorchFunction():
            found.append(measurer.host_measurer.measure(x))
        return x * 2

    torch.vmap(measure)(torch.ones(2, 3))
    torch.func.grad(lambda x: measure(x).sum())(torch.ones(3))
    torch.jit.trace(measure, torch.ones(3), check_trace=False)
    assert found == [None] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@given(
    seeds,
    st.sampled_from([511, 512, 513, 16383, 16385, 40000]) | st.integers(0, 2000),
    magnitudes,
    odd_numbers,
)
@settings(deadline=None, max_examples=60)
def test_16_bits_have_the_statistics_of_the_same_numbers_in_32(dtype, seed, size, between, odd):
    """By whichever instruction of the processor they are converted: all processors give the same bits."""
    tensor, measurer = of_magnitudes(seed, size, *between, dtype, odd), Measurer()
    with DisableTorchFunction():
        rows = [measurer.host_measurer.measure(given) for given in (tensor, tensor.float())]
    one, other = measurer.host_measurer.measure(tensor).rows.read([found.row for found in rows])
    np.testing.assert_array_equal(one, other)
