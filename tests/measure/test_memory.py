"""Arrays over a tensor's own memory: with each element that lies there once, or in the tensor's own shape."""

import gc
import weakref

import numpy as np
import pytest
import torch

from helpers.layouts import LAYOUTS, laid_out
from modtrace.measure.dtypes import format_of
from modtrace.measure.memory import array_over, extent_of, is_held, logical_array


def over(tensor):
    extent, form = extent_of(tensor), format_of(tensor.dtype)
    return None if extent is None else (array_over(extent, form), extent.repeats)


@pytest.mark.parametrize(
    ("tensor", "shape", "repeats"),
    [
        (torch.zeros(2, 3), (6,), 1),
        (torch.zeros(2, 3).t(), (6,), 1),
        (torch.zeros(2, 3, 4).permute(1, 2, 0), (24,), 1),
        (torch.zeros(2, 3).expand(5, 2, 3), (6,), 5),
        (torch.zeros(2, 1, 3).expand(2, 4, 3), (6,), 4),
        (torch.zeros(1).expand(100), (1,), 100),
        (torch.zeros(()).expand(4, 5), (1,), 20),
        (torch.zeros(2, 3)[:, :2], (2, 2, 1), 1),
        (torch.zeros(10)[::2], (5, 1), 1),
        (torch.zeros(10).unfold(0, 4, 2), (4, 4, 1), 1),
        (torch.zeros(2, 3, dtype=torch.complex64), (12,), 1),
        (torch.zeros(2, 3, dtype=torch.complex64)[:, 0], (2, 2), 1),
        (torch.zeros(0, 3), (0,), 1),
        (torch.zeros(3, 0).t(), (0,), 1),
        (torch.zeros(()), (1,), 1),
    ],
    ids=lambda value: str(tuple(value.shape)) if isinstance(value, torch.Tensor) else None,
)
def test_array_has_each_element_of_memory_once(tensor, shape, repeats):
    array, times = over(tensor)
    assert (array.shape, times) == (shape, repeats)


def freed(tensor):
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x[5:],  # its `data_ptr()` is 20
        lambda x: x.view(2, 4).t()[1:],
        lambda x: x[::2],
        lambda x: x[3].expand(6),
    ],
    ids=["whole", "with an offset", "transposed", "stepped", "expanded"],
)
def test_freed_storage_has_no_array(view):
    tensor = freed(view(torch.ones(8)))
    assert over(tensor) is logical_array(tensor) is None
    assert not is_held(tensor)


def test_storage_that_has_been_cut_short_has_no_array():
    tensor = torch.ones(8)
    stepped, start, start_stepped = tensor[::7], tensor[:7], tensor[:5:2]
    tensor.untyped_storage().resize_(31)
    assert over(tensor) is None
    assert over(stepped) is None
    np.testing.assert_array_equal(over(start)[0], np.ones(7))
    np.testing.assert_array_equal(over(start_stepped)[0].reshape(-1), np.ones(3))


def test_no_elements_need_no_storage():
    tensor = freed(torch.ones(8))[8:]
    assert is_held(tensor)
    assert over(tensor)[0].size == 0


def test_array_keeps_neither_the_tensor_nor_its_storage_alive():
    for array_of in (logical_array, over):
        tensor = torch.ones(100)
        storage = tensor.untyped_storage()
        gone = weakref.ref(tensor), weakref.ref(storage)
        array = array_of(tensor)
        del tensor, storage
        gc.collect()
        assert [each() for each in gone] == [None, None]
        del array


# In the tensor's own shape.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_array_has_the_shape_and_the_elements_of_the_tensor(layout, dtype):
    tensor = laid_out(layout, dtype)
    expected = torch.view_as_real(tensor) if dtype.is_complex else tensor
    array = logical_array(tensor)
    assert array.shape == tuple(expected.shape)
    np.testing.assert_array_equal(array, expected.numpy())


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[1:].view(-1, 5)[:, 2]], ids=["dense", "stepped"])
def test_array_is_the_tensors_memory_and_cannot_be_written(view):
    tensor = view(torch.arange(6.0))
    for array in (logical_array(tensor), over(tensor)[0]):
        assert array.__array_interface__["data"] == (tensor.data_ptr(), True)
    tensor.fill_(7)
    assert set(logical_array(tensor).reshape(-1).tolist()) == {7.0}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_floats_are_raw(dtype):
    tensor = torch.tensor([[1.0, -2.0]], dtype=dtype)
    array = logical_array(tensor)
    assert (array.dtype, array.tolist()) == (np.uint16, tensor.view(torch.uint16).tolist())


def test_a_dtype_that_nothing_can_read_has_no_array():
    assert logical_array(torch.empty(3, dtype=torch.uint4)) is None
