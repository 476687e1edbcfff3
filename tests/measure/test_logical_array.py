"""Arrays over a tensor's own memory, in its own shape."""

import gc
import weakref

import numpy as np
import pytest
import torch

from modtrace.measure.memory import logical_array

VIEWS = {
    "dense": lambda x: x.view(2, 3, 4),
    "transposed": lambda x: x.view(4, 6).t(),
    "stepped": lambda x: x.view(4, 6)[1::2, ::3],
    "expanded": lambda x: x.view(4, 1, 6).expand(4, 5, 6),
    "overlapping": lambda x: x.unfold(0, 4, 2),
    "0-dim": lambda x: x[5],
    "no elements": lambda x: x.view(4, 6)[2:2],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_array_has_the_shape_and_the_elements_of_the_tensor(view, dtype):
    tensor = view(torch.arange(24).to(dtype))
    expected = torch.view_as_real(tensor) if dtype.is_complex else tensor
    array = logical_array(tensor)
    assert array.shape == tuple(expected.shape)
    np.testing.assert_array_equal(array, expected.numpy())


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[1:].view(-1, 5)[:, 2]], ids=["dense", "stepped"])
def test_array_is_the_tensors_memory_and_cannot_be_written(view):
    tensor = view(torch.arange(6.0))
    array = logical_array(tensor)
    assert array.__array_interface__["data"] == (tensor.data_ptr(), True)
    tensor.fill_(7)
    assert set(array.reshape(-1).tolist()) == {7.0}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_floats_are_raw(dtype):
    tensor = torch.tensor([[1.0, -2.0]], dtype=dtype)
    array = logical_array(tensor)
    assert (array.dtype, array.tolist()) == (np.uint16, tensor.view(torch.uint16).tolist())


@pytest.mark.parametrize(
    "view", [lambda x: x, lambda x: x[3:], lambda x: x.view(4, 2).t()], ids=["whole", "tail", "transposed"]
)
def test_freed_memory_is_none(view):
    tensor = view(torch.ones(8))
    tensor.untyped_storage().resize_(0)
    assert logical_array(tensor) is None


def test_a_dtype_that_nothing_can_read_is_none():
    assert logical_array(torch.empty(3, dtype=torch.uint4)) is None


def test_array_keeps_nothing_alive():
    tensor = torch.ones(3)
    storage = weakref.ref(tensor.untyped_storage())
    array = logical_array(tensor)
    del tensor
    gc.collect()
    assert storage() is None
    del array
