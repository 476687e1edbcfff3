"""A difference is that of the elements, in float32 at least, whatever the dtype and the strides."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from helpers.user_modes import SeesFunctions, SeesOps
from modtrace.measure.measurers.differences import Before, Difference
from modtrace.torch_internals.modes import unseen

HALVES = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
FLOATS = (torch.float32, torch.float64, *HALVES)

LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t(),
    "every other": lambda x: x[:, ::2],
    "from the middle": lambda x: x[1:],
    "flipped order of dimensions": lambda x: x.reshape(2, 3, 4).permute(2, 0, 1),
    "one element": lambda x: x[0, 0],
    "none": lambda x: x[:0],
    "expanded": lambda x: x[:1].expand(3, 4),
}


def moved(old: torch.Tensor, new: torch.Tensor, before: Before | None = None, **options: Any) -> Difference:
    """What is said of a tensor that held `old` and holds `new`."""
    tensor = old.clone()
    return moved_by(tensor, lambda: tensor.copy_(new), before, **options)


def moved_by(tensor: Any, move: Any, before: Before | None = None, keep: bool = False) -> Difference:
    before = Before() if before is None else before
    with unseen(), torch.inference_mode(False), torch.no_grad():
        before.take(tensor)
        move()
        return before.difference(tensor, keep=keep)


def same(found: torch.Tensor | None, expected: torch.Tensor) -> bool:
    """Equal to the bit, NaN included, and of one dtype and shape."""
    assert found is not None
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    return torch.allclose(found, expected, rtol=0, atol=0, equal_nan=True)


@settings(deadline=None)
@given(st.data(), st.sampled_from(FLOATS), st.booleans())
def test_difference_of_floats_is_that_of_the_elements(data: st.DataObject, dtype: torch.dtype, keep: bool):
    numbers = st.lists(st.floats(width=32), min_size=6, max_size=6)
    old, new = (torch.tensor(data.draw(numbers)).to(dtype).reshape(2, 3) for _ in range(2))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    found = moved(old, new, keep=keep)
    assert found.note is None
    assert same(found.tensor, new.to(wide) - old.to(wide))


@settings(deadline=None)
@given(st.lists(st.integers(-(2**62), 2**62 - 1), min_size=2, max_size=2))
def test_difference_of_integers_is_exact(pair: list[int]):
    old, new = (torch.tensor([each]) for each in pair)
    assert moved(old, new).tensor.tolist() == [pair[1] - pair[0]]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_difference_of_complex_numbers_is_complex(dtype: torch.dtype):
    old, new = torch.tensor([1 + 2j, 3.5j], dtype=dtype), torch.tensor([1 - 2j, 1 + 3.25j], dtype=dtype)
    assert same(moved(old, new).tensor, torch.tensor([-4j, 1 - 0.25j], dtype=dtype))


def test_difference_of_booleans_counts():
    old, new = torch.tensor([True, False, True]), torch.tensor([True, True, False])
    assert moved(old, new).tensor.tolist() == [0, 1, -1]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_elements_stay_at_their_places(layout: str, dtype: torch.dtype):
    whole = torch.arange(24).reshape(6, 4).to(dtype)
    old = whole.clone()
    tensor = LAYOUTS[layout](whole)
    found = moved_by(tensor, lambda: whole.mul_(whole))
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    assert same(found.tensor, LAYOUTS[layout]((old * old).to(wide) - old.to(wide)))


def test_convolution_weights_in_channels_last_stay_at_their_places():
    weight = torch.arange(48.0).reshape(2, 6, 2, 2).to(memory_format=torch.channels_last)
    old = weight.clone()
    assert same(moved_by(weight, lambda: weight.square_()).tensor, old.square() - old)


def test_memory_of_the_copy_is_used_again():
    before = Before()
    first = moved(torch.ones(1000), torch.zeros(1000), before)
    address = first.tensor.data_ptr()
    second = moved(torch.ones(1000), torch.full((1000,), 3.0), before)
    assert second.tensor.data_ptr() == address
    assert second.tensor.eq(2).all()


def test_difference_that_somebody_keeps_is_not_written_over():
    before = Before()
    first = moved(torch.ones(4), torch.zeros(4), before, keep=True)
    moved(torch.ones(4), torch.full((4,), 3.0), before)
    assert first.tensor.tolist() == [-1.0] * 4


def test_tensor_of_another_shape_or_dtype_is_copied_anew():
    before = Before()
    for tensor in (
        torch.ones(2),
        torch.ones(3, 3),
        torch.ones(2, dtype=torch.float64),
        torch.ones(2).bfloat16(),
    ):
        wide = torch.float32 if tensor.dtype == torch.bfloat16 else tensor.dtype
        assert same(moved(tensor, 2 * tensor, before).tensor, torch.ones(tensor.shape, dtype=wide))


def test_tensor_that_has_another_shape_afterwards_has_no_difference():
    parameter = nn.Parameter(torch.ones(3))

    def replace() -> None:
        parameter.data = torch.ones(4)

    found = moved_by(parameter, replace)
    assert found == (None, (4,), "not measured: its shape, dtype or device has changed meanwhile")


def test_freed_tensor_has_no_difference():
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    assert moved_by(tensor, lambda: None) == (None, (4,), "not measured: its storage has been freed")
    tensor = torch.ones(4)
    found = moved_by(tensor, lambda: tensor.untyped_storage().resize_(0))
    assert found.tensor is None
    assert found.note == "not measured: RuntimeError: its storage has been freed"


def test_tensor_without_numbers_says_why():
    assert moved_by(torch.ones(2, device="meta"), lambda: None).note == (
        "not measured: a meta tensor holds no numbers"
    )
    assert moved_by(nn.UninitializedParameter(), lambda: None).note == "not measured: not initialized yet"


def test_stored_values_of_a_sparse_tensor_move():
    tensor = torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (4,)).coalesce()
    found = moved_by(tensor, lambda: tensor._values().mul_(3))
    assert found.tensor.tolist() == [2.0, 4.0]
    assert (found.shape, found.note) == ((4,), "sparse: the stored values")


def test_nobody_sees_an_operation_on_a_plain_tensor():
    old = {dtype: torch.ones(8, 4, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.complex64)}
    old["transposed"] = torch.ones(8, 4).t()
    befores = {name: Before() for name in old}
    for name, before in befores.items():
        moved_by(old[name], lambda: None, before)  # torch is asked once what a plain tensor is
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with profile, SeesOps() as ops, SeesFunctions() as functions:
        for name, before in befores.items():
            moved_by(old[name], lambda: None, before)
    assert [event.name for event in profile.events() or [] if "aten" in event.name] == []
    assert ops.seen == functions.seen == []


def test_numpy_does_not_tell_the_user_of_infinities():
    with np.errstate(all="raise"):
        found = moved(torch.full((2,), torch.inf), torch.full((2,), torch.inf))
    assert found.tensor.isnan().all()


def test_parameter_is_left_as_it_is():
    parameter = nn.Parameter(torch.ones(3))
    version, state = parameter._version, torch.get_rng_state()
    found = moved_by(parameter, lambda: None, keep=True)
    assert not found.tensor.requires_grad
    assert (parameter._version, parameter.grad) == (version, None)
    assert torch.get_rng_state().equal(state)
