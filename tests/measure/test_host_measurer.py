"""C measures plain tensors in main memory by itself, and leaves all others to Python.

That its numbers are right is shown by the tests of `Measurer`, which run with it and without it.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

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
